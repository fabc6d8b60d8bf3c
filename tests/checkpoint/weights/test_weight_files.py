"""Files of weights: what is written is the model or nothing, and what was there before stays until it is replaced."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ds_trainer.checkpoint.weights import model_saving as weights
from ds_trainer.checkpoint.weights import weight_files
from ds_trainer.checkpoint.weights.model_saving import save_config_and_processor, save_weights
from ds_trainer.checkpoint.weights.weight_files import (
    WeightFilesError,
    WeightSpec,
    plan_files,
    read_header,
    write_weight_files,
)
from ds_trainer.engine import weights as engine_weights

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.arange(5).to(torch.bfloat16),
    "c": torch.tensor(7.0),
    "d": torch.zeros(0, 4),
    "e": torch.arange(12.0).reshape(3, 4).T,  # not contiguous
}
PLANNED = [WeightSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()]


def arriving(files: list[list[WeightSpec]]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        for weight in file:
            yield weight.name, TENSORS[weight.name]


@pytest.mark.parametrize("size", [1, 40, 10**6])
def test_written_weights_are_read_back(size: int, tmp_path: Path) -> None:
    files = plan_files(PLANNED, size)
    theirs = ["model_ema.safetensors", "model-best.safetensors", "model.fp16.safetensors", "models.safetensors"]
    for name in [*theirs, "model-00001-of-00009.safetensors"]:  # the last one is of an earlier save
        (tmp_path / name).write_bytes(b"")
    write_weight_files(tmp_path, files, arriving(files))
    assert not (tmp_path / "model-00001-of-00009.safetensors").exists()
    for name in theirs:
        (tmp_path / name).unlink()
    found: dict[str, torch.Tensor] = {}
    for path in tmp_path.glob("*.safetensors"):
        found.update(load_file(path))
    assert found.keys() == TENSORS.keys()
    assert all(found[n].dtype == t.dtype and torch.equal(found[n], t) for n, t in TENSORS.items())
    assert (tmp_path / "model.safetensors.index.json").is_file() == (len(files) > 1)
    assert not list(tmp_path.glob(".*"))


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    return MixtralForCausalLM(MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=2))


def test_experts_load_with_from_pretrained(tmp_path: Path) -> None:
    """transformers keeps the experts of a layer in one tensor, and writes them one by one."""
    from transformers import AutoModelForCausalLM

    model = mixtral()
    save_weights(model, tmp_path, 10**6)
    save_config_and_processor(model, None, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    wanted = dict(model.named_parameters())
    found = dict(loaded.named_parameters())
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], parameter) for name, parameter in wanted.items())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)


def test_parameters_that_are_not_gathered_are_never_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters that were not gathered (as ZeRO-3 leaves them) are refused; the earlier save stays as it was."""
    save_weights(Model(), tmp_path, 300)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(before) == 3

    def hollow(tensors: dict[str, Any], names: list[str], most: int) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in engine_weights.whole_tensors(tensors, names, most):
            yield name, torch.empty(0) if name == "second.bias" else tensor + 1

    monkeypatch.setattr(weights, "whole_tensors", hollow)
    with pytest.raises(WeightFilesError, match=r"Expected second.bias, \[8\] .*but got second.bias, \[0\]"):
        save_weights(Model(), tmp_path, 300)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_disk_that_corrupts_data_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verify = weight_files._verify_file

    def flipped(path: Path, *more: Any) -> None:
        data = bytearray(path.read_bytes())
        data[-3] ^= 16
        path.write_bytes(data)
        verify(path, *more)

    monkeypatch.setattr(weight_files, "_verify_file", flipped)
    with pytest.raises(WeightFilesError, match="reads back differently"):
        save_weights(Model(), tmp_path, 10**6)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["cut", "longer", "header", "empty"])
def test_a_damaged_file_is_detected(damage: str, tmp_path: Path) -> None:
    save_weights(Model(), tmp_path, 10**6)
    path = tmp_path / "model.safetensors"
    assert read_header(path)["first.weight"]["shape"] == [8, 8]
    data = path.read_bytes()
    changed = {"cut": data[:-1], "longer": data + b"x", "header": b"\xff" * 8 + data[8:], "empty": b""}
    path.write_bytes(changed[damage])
    with pytest.raises(WeightFilesError, match="damaged"):
        read_header(path)
