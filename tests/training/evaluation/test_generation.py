"""Greedy generation under a layout: every rank of a replica holds full sequences, nothing is sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer import Trainer
from tests.support.models import VOCABULARY, RaggedTokens, tiny_llama
from tests.support.pool import pool
from tests.support.predictions import arguments

NEW = 6


def prompts(replica: int) -> torch.Tensor:
    """Of another length for each replica."""
    return torch.randint(3, VOCABULARY, (2, 5 + replica), generator=torch.Generator().manual_seed(replica))


def tokens_of(model: Any, replica: int, **keywords: Any) -> list[list[int]]:
    given = prompts(replica)
    found = model.generate(
        given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=NEW + replica, pad_token_id=0,
        **keywords
    )  # fmt: skip
    return list(found.tolist())


def generated(output_dir: str, sizes: dict[str, int], stage: int, train: bool) -> list[list[int]]:
    args = arguments(output_dir, **sizes, zero_stage=stage, learning_rate=1e-2, max_steps=2)
    trainer = Trainer(tiny_llama(), args, train_dataset=RaggedTokens(8), eval_dataset=RaggedTokens(4))
    if train:
        trainer.train()
    trainer.evaluate()
    replica = trainer.layout.coordinates(args.process_index).dp
    # With ZeRO-3 ranks gather weights together: one that has finished must continue until all have.
    return tokens_of(trainer.model.eval(), replica, synced_gpus=stage == 3)


LAYOUTS = {
    "tp 2": (2, {"tensor_parallel_size": 2}),
    "sp 2": (2, {"sequence_parallel_size": 2}),
    "cp 2": (2, {"context_parallel_size": 2}),
    "dp 2": (2, {}),
    "dp 2 x tp 2": (4, {"tensor_parallel_size": 2}),
    "tp 2 x sp 2": (4, {"tensor_parallel_size": 2, "sequence_parallel_size": 2}),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_tokens_are_those_of_one_process(name: str, stage: int, tmp_path: Path) -> None:
    world, sizes = LAYOUTS[name]
    model = tiny_llama().eval()
    found = pool(world).run(generated, str(tmp_path), sizes, stage, False)
    replica_size = 1
    for size in sizes.values():
        replica_size *= size
    for rank, tokens in enumerate(found):
        assert tokens == tokens_of(model, rank // replica_size)


@pytest.mark.parametrize("stage", [0, 3])
def test_the_tokens_after_training_are_those_of_one_process(stage: int, tmp_path: Path) -> None:
    (wanted,) = pool(1).run(generated, str(tmp_path / "one"), {}, 0, True)
    assert wanted != tokens_of(tiny_llama().eval(), 0)  # or the run below would show nothing
    for tokens in pool(2).run(generated, str(tmp_path / "two"), {"tensor_parallel_size": 2}, stage, True):
        assert tokens == wanted
