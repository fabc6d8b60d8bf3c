"""Weights as safetensors: whole, sharded by size, tied, gathered under ZeRO-3 one file at a time."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.engine import weights as engine_weights
from ds_trainer.engine.weights import plan_shards, saved_tensors
from tests.support.models import PlainLanguageModel, RaggedTokens, tiny_llama
from tests.support.pool import pool
from tests.support.runs import whole_weights

SHARD = 8_000  # bytes: several files for a model of some 20,000 parameters


def read_all(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118  no mapping
    return tensors


def train_and_save(make_model: Any, output_dir: str, **arguments: Any) -> tuple[dict[str, torch.Tensor], int]:
    """Train two steps, save; the true weights, and the most parameters that were whole at once while saving."""
    args = TrainingArguments(
        output_dir, max_steps=2, save_strategy="no", disable_tqdm=True, use_cpu=True, learning_rate=1e-2, **arguments
    )
    trainer = Trainer(make_model(), args, train_dataset=RaggedTokens(32))
    trainer.train()
    truth = whole_weights(trainer)
    most = 0
    gathered = engine_weights.gathered

    def watched(parameters: list[nn.Parameter]) -> Any:
        nonlocal most
        most = max(most, sum(engine_weights.full_numel(p) * p.element_size() for p in parameters))
        return gathered(parameters)

    engine_weights.gathered = watched
    try:
        trainer.save_model()
    finally:
        engine_weights.gathered = gathered
    trainer.engine.close()
    return truth, most


@pytest.mark.cases(4)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_saved_model_loads_with_from_pretrained(stage: int, tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    job = partial(train_and_save, partial(tiny_llama, tied=tied), str(tmp_path))
    truth, most = pool(2).run(partial(job, zero_stage=stage, max_shard_size="8KB"))[0]
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    found = dict(loaded.named_parameters())
    assert found.keys() == truth.keys()
    assert all(torch.equal(found[name], truth[name]) for name in truth)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in read_all(tmp_path).values())
    assert most <= SHARD or stage < 3  # never more than one file's worth gathered at a time
    assert ("lm_head.weight" in index["weight_map"]) is not tied


def test_bf16_weights_are_saved_as_used_in_training(tmp_path: Path) -> None:
    truth, _ = pool(2).run(partial(train_and_save, tiny_llama, str(tmp_path), zero_stage=2, bf16=True))[0]
    tensors = read_all(tmp_path)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert all(torch.equal(tensors[name].float(), truth[name]) for name in truth)


def test_any_module_is_saved_and_loads_with_load_state_dict(tmp_path: Path) -> None:
    truth, _ = pool(2).run(partial(train_and_save, PlainLanguageModel, str(tmp_path), zero_stage=3))[0]
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    model = PlainLanguageModel(seed=9)
    model.load_state_dict(read_all(tmp_path))
    assert all(torch.equal(parameter, truth[name]) for name, parameter in model.named_parameters())


def test_a_smaller_save_leaves_no_files_of_a_larger_one(tmp_path: Path) -> None:
    for size in ("8KB", "5GB"):
        pool(1).run(partial(train_and_save, tiny_llama, str(tmp_path), max_shard_size=size))
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]


def test_tied_weights_are_written_once_under_the_name_that_is_not_declared_tied() -> None:
    model = nn.Module()
    model.first = nn.Linear(2, 2, bias=False)  # type: ignore[assignment]
    model.second = nn.Linear(2, 2, bias=False)  # type: ignore[assignment]
    model.second.weight = model.first.weight
    model.register_buffer("kept", torch.ones(1))
    model.register_buffer("dropped", torch.ones(1), persistent=False)
    assert list(saved_tensors(model)) == ["kept", "first.weight"]
    model._tied_weights_keys = ["first.weight"]  # type: ignore[assignment]
    assert list(saved_tensors(model)) == ["kept", "second.weight"]


def test_files_are_filled_and_a_large_tensor_has_its_own_file() -> None:
    sizes = {"a": 10, "b": 10, "c": 100, "d": 30, "e": 10}
    tensors = {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items()}
    assert plan_shards(tensors, 40) == [["a", "b"], ["c"], ["d", "e"]]
