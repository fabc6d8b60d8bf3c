"""Weight files have the tensors that ``save_pretrained`` of transformers writes: names, shapes, types and numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers.core_model_loading import Chunk, Interleave, Transpose, WeightConverter, WeightRenaming

from ds_trainer.checkpoint.weights.model_saving import plan_model_files, save_weights
from ds_trainer.engine.state.buffers import persistent_buffers
from tests.checkpoint.loading.tiny_models import KINDS, make

SHARD = 8_000  # bytes: several files


def in_files(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found.update(load_file(path))
    return found


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names that only one has, or whose types, shapes or bits differ."""
    return sorted(one.keys() ^ other.keys()) + [
        name
        for name in one.keys() & other.keys()
        if one[name].dtype != other[name].dtype or not torch.equal(one[name], other[name])
    ]


def written_in_place(model: nn.Module, directory: Path, frozen: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """The files of a checkpoint, with each of the model's own tensors where the plan says that it lies."""
    plan = plan_model_files(model, SHARD, frozen)
    directory.mkdir()
    data = {file.name: bytearray(file.header.ljust(file.size, b"\0")) for file in plan.files}
    for name, tensor in [*model.named_parameters(), *persistent_buffers(model)]:
        stored = plan.tensors[name]
        elements = tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        data[stored.file][stored.offset : stored.offset + len(elements)] = elements
    for file, content in data.items():
        (directory / file).write_bytes(content)
    if plan.index is not None:
        (directory / plan.index.name).write_bytes(plan.index.data)
        where = json.loads(plan.index.data)["weight_map"]
        assert where == {key: name for name in data for key in load_file(directory / name)}
    return in_files(directory)


def published(kind: str, to: Path) -> Any:
    make(kind).save_pretrained(to)
    return KINDS[kind]()[0].from_pretrained(to)


def as_in_memory(kind: str, to: Path) -> Any:
    """transformers knows that no conversion was used, and uses none when it saves."""
    make(kind).save_pretrained(to, save_original_format=False)
    return KINDS[kind]()[0].from_pretrained(to)


MADE: dict[str, Callable[[str, Path], Any]] = {
    "made": lambda kind, to: make(kind),
    "published": published,
    "as in memory": as_in_memory,
}


EXPERTS = ("qwen3_moe", "mixtral", "deepseek_v3")
CASES = [("made", kind) for kind in KINDS] + [(made, kind) for made in MADE if made != "made" for kind in EXPERTS]


def check(model: Any, directory: Path) -> dict[str, torch.Tensor]:
    """Both ways to write ``model`` against ``save_pretrained``, whose tensors are returned."""
    model.save_pretrained(directory / "wanted")
    wanted = in_files(directory / "wanted")
    save_weights(model, directory / "saved", SHARD)
    assert difference(in_files(directory / "saved"), wanted) == []
    assert difference(written_in_place(model, directory / "planned"), wanted) == []
    return wanted


@pytest.mark.cases(14, rest="extended")
@pytest.mark.parametrize(("made", "kind"), CASES)
def test_names_are_those_of_save_pretrained(made: str, kind: str, tmp_path: Path) -> None:
    model = MADE[made](kind, tmp_path / "origin")
    wanted = check(model, tmp_path)
    if kind in EXPERTS:
        assert any(".experts.1." in name for name in wanted) == (made != "as in memory")
    for files in ("saved", "planned"):
        model.config.save_pretrained(tmp_path / files)
        loaded, report = type(model).from_pretrained(tmp_path / files, output_loading_info=True)
        assert not any(report.values())
        assert difference(dict(loaded.state_dict()), dict(model.state_dict())) == []


QKV = ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"]
OF_LAYER = "model.layers.0."


def llama(*conversions: Any) -> Any:
    """A model that says that it was loaded with these conversions."""
    model = make("llama")
    model._weight_conversions = list(conversions)
    return model


def test_tensors_that_are_fused_in_the_files_are_written_as_one(tmp_path: Path) -> None:
    """Each projection is a run of the fused one, and the renaming comes after."""
    fused = WeightConverter("attention.wqkv", QKV, [Chunk(dim=0)])
    model = llama(WeightRenaming(r"^blocks\.", "model.layers."), fused)
    wanted = check(model, tmp_path)
    assert wanted["blocks.1.attention.wqkv"].shape == (32, 16)
    # A file whose weights stay as they are has no others.
    frozen = (OF_LAYER + QKV[1],)
    found = written_in_place(model, tmp_path / "frozen", frozen)
    assert found.keys() - wanted.keys() == {OF_LAYER + name for name in QKV}
    assert all(torch.equal(found[OF_LAYER + name], model.get_parameter(OF_LAYER + name)) for name in QKV)
    plan = plan_model_files(model, SHARD, frozen)
    assert [name for name, stored in plan.tensors.items() if stored.file in plan.frozen] == list(frozen)


@pytest.mark.parametrize("operation", [Transpose(0, 1), Interleave(dim=0)], ids=["transposed", "interleaved"])
def test_interleaved_tensors_are_written_as_in_the_model(operation: Any, tmp_path: Path) -> None:
    model = llama(
        WeightConverter("mlp.w2", "mlp.down_proj.weight", [operation]),
        WeightConverter("attention.wqkv", QKV, [Chunk(dim=0)]),
    )
    model.save_pretrained(tmp_path / "wanted")
    wanted = in_files(tmp_path / "wanted")
    save_weights(model, tmp_path / "saved", SHARD)
    found = in_files(tmp_path / "saved")
    assert difference(found, written_in_place(model, tmp_path / "planned")) == []
    down = [f"model.layers.{layer}.mlp." for layer in (0, 1)]
    assert set(difference(found, wanted)) == {f"{name}{end}" for name in down for end in ("w2", "down_proj.weight")}
    assert all(torch.equal(found[f"{n}down_proj.weight"], model.get_parameter(f"{n}down_proj.weight")) for n in down)


def test_tensors_of_different_dtypes_are_not_fused(tmp_path: Path) -> None:
    model = llama(WeightConverter("attention.wqkv", QKV, [Chunk(dim=0)]))
    model.model.layers[0].self_attn.k_proj.to(torch.bfloat16)
    save_weights(model, tmp_path, SHARD)
    found = in_files(tmp_path)
    assert found[OF_LAYER + QKV[1]].dtype == torch.bfloat16
    assert found["model.layers.1.attention.wqkv"].dtype == torch.float32


def test_duplicate_names_are_not_renamed(tmp_path: Path) -> None:
    """transformers itself writes one of both here."""
    model = llama(WeightRenaming("mlp.proj", "mlp.(gate|up)_proj"))
    model.save_pretrained(tmp_path / "wanted")
    assert len(in_files(tmp_path / "wanted")) == len(model.state_dict()) - 2
    save_weights(model, tmp_path, SHARD)
    assert difference(in_files(tmp_path), dict(model.state_dict())) == []


def test_a_stacked_tensor_larger_than_a_file_stays_in_one_file(tmp_path: Path) -> None:
    """It stays in one file; the index has each expert."""
    model = make("qwen3_moe")
    stacked = model.model.layers[0].mlp.experts.gate_up_proj
    plan = plan_model_files(model, stacked.nbytes // 2, ())
    assert plan.index is not None
    where = json.loads(plan.index.data)["weight_map"]
    named = {where[f"{OF_LAYER}mlp.experts.{e}.{p}_proj.weight"] for e in range(len(stacked)) for p in ("gate", "up")}
    assert named == {plan.tensors[f"{OF_LAYER}mlp.experts.gate_up_proj"].file}
