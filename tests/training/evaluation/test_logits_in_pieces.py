"""``preprocess_logits_for_metrics`` on a few tokens at a time: the results of whole logits, which never exist."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.training.evaluation.logits_in_pieces import LogitPieces
from ds_trainer.training.model.chunked_loss import head_check
from ds_trainer.training.model.chunked_loss.head_check import check_tiles
from tests.support.models import VOCABULARY, RaggedTokens, tiny_llama
from tests.support.pool import pool
from tests.training.test_chunked_loss_runs import adapted

CHUNK = 10
WIDTH = 32  # of the model: the transposed weight of the head is no logits


class LargestLogits(TorchDispatchMode):
    """The largest number of tokens of a tensor with a column for each token of the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if (
                isinstance(leaf, torch.Tensor)
                and leaf.dim() > 1
                and leaf.shape[-1] == VOCABULARY
                and len(leaf) != WIDTH
            ):
                self.tokens = max(self.tokens, leaf.shape[:-1].numel())
        return result


def best(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def right_and_likely(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"right": logits.argmax(-1) == labels, "two": logits.softmax(-1).topk(2).values}


def of_the_token_before(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1).roll(1, dims=1)


def of_the_last(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits[:, -1].topk(3).indices


FUNCTIONS = {f.__name__: f for f in (best, right_and_likely, of_the_token_before, of_the_last)}


def predicted(output_dir: str, function: str, chunk: int, make_model: Any = tiny_llama, **more: Any) -> Any:
    args = TrainingArguments(
        output_dir, use_cpu=True, loss_chunk_tokens=chunk, report_to="none", disable_tqdm=True, **more
    )
    trainer = Trainer(make_model(), args, preprocess_logits_for_metrics=FUNCTIONS[function])
    head_check.check_tiles = lambda *_: None  # has logits of a sample of its own
    with LargestLogits() as largest:
        found = trainer.predict(RaggedTokens(12))
    head_check.check_tiles = check_tiles
    leaves = [np.asarray(leaf) for leaf in tree_leaves(found.predictions)]
    return leaves, found.metrics["test_loss"], largest.tokens


def assert_equal(found: Any, wanted: Any) -> None:
    for one, other in zip(found[0], wanted[0], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    assert found[1] == pytest.approx(wanted[1], rel=1e-6)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_results_are_those_of_whole_logits(function: str, tmp_path: Any, caplog: Any) -> None:
    wanted = predicted(str(tmp_path), function, 0)
    found = predicted(str(tmp_path), function, CHUNK)
    assert_equal(found, wanted)
    token_wise = function in ("best", "right_and_likely")
    assert (found[2] <= 2 * 8) == token_wise, found[2]  # at least two tokens of each of eight rows
    assert wanted[2] > 8 * CHUNK


def test_pieces_that_are_not_verified_differ(tmp_path: Any, monkeypatch: Any) -> None:
    wanted = predicted(str(tmp_path), "of_the_token_before", 0)
    monkeypatch.setattr(LogitPieces, "_verify", lambda *_: True)
    found = predicted(str(tmp_path), "of_the_token_before", CHUNK)
    with pytest.raises(AssertionError):
        assert_equal(found, wanted)


LAYOUTS: dict[str, dict[str, Any]] = {
    "ZeRO 3": dict(zero_stage=3),
    "ring": dict(context_parallel_size=2, zero_stage=1),
    "Ulysses, ZeRO 3": dict(sequence_parallel_size=2, zero_stage=3),
    "partitioned vocabulary": dict(
        tensor_parallel_size=2, zero_stage=1, deepspeed={"tensor_parallel": {"vocab_parallel_lm_head": True}}
    ),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_on_two_ranks(layout: str, tmp_path: Any) -> None:
    wanted = predicted(str(tmp_path), "right_and_likely", 0)
    job = partial(predicted, str(tmp_path), "right_and_likely", CHUNK, **LAYOUTS[layout])
    for found in pool(2).run(job):
        assert_equal(found, wanted)
        assert found[2] <= 2 * 8


def test_lora_on_the_head(tmp_path: Any) -> None:
    wanted = predicted(str(tmp_path), "right_and_likely", 0, adapted)
    found = predicted(str(tmp_path), "right_and_likely", CHUNK, adapted)
    assert_equal(found, wanted)
    assert found[2] <= 2 * 8
