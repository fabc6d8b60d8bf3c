"""What an engine holds is compared with the files that it came from."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ds_trainer.checkpoint.loading.verification import Verification, verify_weights
from ds_trainer.engine.state.flat_partitions import flat_partitions
from ds_trainer.engine.training_engine import TrainingEngine
from tests.checkpoint.loading.engines import MODELS, engine_over, loaded, saved
from tests.support.models import tiny_llama
from tests.support.pool import pool

BF16 = {"bf16": True}
OFFLOAD = {"offload_optimizer": "cpu", "zero_stage": 3, "offload_param": "cpu"}
STAGES: list[dict[str, Any]] = [{"zero_stage": stage} for stage in range(4)]
LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "llama": [
        *STAGES,
        *({**stage, **BF16} for stage in STAGES),
        *({"zero_stage": stage, "tensor_parallel_size": 2} for stage in (0, 3)),
        {"zero_stage": 1, "sequence_parallel_size": 2},
        {"zero_stage": 3, "context_parallel_size": 2},
        {"zero_stage": 2, "offload_optimizer": "cpu"},
        OFFLOAD,
        {**OFFLOAD, **BF16},
    ],
    "tied": [*STAGES, {"zero_stage": 3, "tensor_parallel_size": 2}],
    "qwen3_moe": [*STAGES, {"zero_stage": 3, **BF16}],
    "t5": [*STAGES, {"zero_stage": 1, "tensor_parallel_size": 2}],
    "bert": STAGES,
    "clip": STAGES,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {name: saved(name, directory) for name in MODELS}


def verified(engine: TrainingEngine, path: Path, **keywords: Any) -> Verification:
    return verify_weights(engine.deepspeed.module, path, engine, **keywords)


def all_layouts(path: Path, output_dir: str, layouts: list[dict[str, Any]]) -> list[Verification]:
    found = []
    for layout in layouts:
        with engine_over(loaded(path), output_dir, **layout) as engine:
            found.append(verified(engine, path))
    return found


def check(found: list[list[Verification]], layouts: list[dict[str, Any]], tensors: int) -> None:
    for of_rank in found:
        for layout, result in zip(layouts, of_rank, strict=True):
            assert result.good and not result.problems(), (layout, result.problems())
            assert (result.verified, result.unexpected) == (tensors, ()), layout
            assert result.tensors == tensors
            assert result.masters is (layout["zero_stage"] > 0 or bool(layout.get("bf16"))), layout


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_is_verified_against_the_files(name: str, files: dict[str, Path], tmp_path: Path) -> None:
    job = partial(all_layouts, files[name], str(tmp_path), LAYOUTS[name])
    check(pool(2).run(job), LAYOUTS[name], len(list(loaded(files[name]).parameters())))


@pytest.mark.extended
def test_tensor_and_data_parallel_weights_are_verified(files: dict[str, Path], tmp_path: Path) -> None:
    layouts = [{"zero_stage": stage, "tensor_parallel_size": 2} for stage in (1, 3)]
    found = pool(4).run(partial(all_layouts, files["llama"], str(tmp_path), layouts))
    check(found, layouts, len(list(loaded(files["llama"]).parameters())))


def test_rounding_to_another_dtype_is_not_a_difference(files: dict[str, Path], tmp_path: Path) -> None:
    half = saved("llama", tmp_path / "half", dtype=torch.bfloat16)
    jobs: list[tuple[Path, dict[str, Any], dict[str, Any]]] = [
        (half, {"dtype": torch.float32}, {"zero_stage": 1}),
        (half, {"dtype": torch.float16}, {"zero_stage": 3, **BF16}),
        (files["llama"], {"dtype": torch.float16}, {"zero_stage": 2}),
        (files["llama"], {"dtype": torch.float16}, {"zero_stage": 3, **BF16}),
    ]
    for path, of_loading, layout in jobs:
        (result,) = pool(1).run(rounded, path, str(tmp_path), of_loading, layout)
        assert result.good, (of_loading, layout, result.problems())


def rounded(path: Path, output_dir: str, of_loading: dict[str, Any], layout: dict[str, Any]) -> Verification:
    with engine_over(loaded(path, **of_loading), output_dir, **layout) as engine:
        return verified(engine, path)


# -- negative controls ------------------------------------------------------------------------------------------------


def with_keys(path: Path, to: Path, change: Any) -> Path:
    """A copy of a model whose tensors in the file are what ``change`` makes of them."""
    shutil.copytree(path, to)
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def exchange(first: str, second: str) -> Any:
    """Exchanges two tensors."""
    return lambda tensors: tensors.update({first: tensors[second], second: tensors[first]})


def roll(flat: torch.Tensor) -> None:
    flat.copy_(flat.roll(len(flat) // 2))


UP = "model.layers.1.mlp.up_proj.weight"


DOWN = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1)]
EXPERT = "model.layers.1.mlp.experts.{}.gate_proj.weight"


def detected_faults(files: dict[str, Path], changed: Path, output_dir: str, stage: int) -> dict[str, Verification]:
    found = {}
    with engine_over(loaded(files["llama"]), output_dir, zero_stage=stage) as engine:
        for case in ("renamed", "layers", "initial", "shape"):
            found[case] = verified(engine, changed / case)
        found["new"] = verified(engine, changed / "renamed", allowed_new=["model.layers.1.mlp.up_proj"])
        found["all new"] = verified(engine, changed / "shape", allowed_new=True)
        if stage:
            # The same with what rank 1 steps; what it computes with stays right.
            if torch.distributed.get_rank() == 1:
                roll(flat_partitions(engine.deepspeed, 0)[0].tensor.data.view(-1))
            found["master"] = verified(engine, files["llama"])
    with engine_over(loaded(files["llama"]), output_dir, zero_stage=stage) as engine:
        # Exchange the halves of what rank 1 holds of one weight; every other rank has it right.
        if torch.distributed.get_rank() == 1:
            parameter: Any = engine.deepspeed.module.get_parameter(UP)
            roll(getattr(parameter, "ds_tensor", parameter).data.view(-1))
        found["shard"] = verified(engine, files["llama"])
    with engine_over(loaded(files["qwen3_moe"]), output_dir, zero_stage=stage) as engine:
        found["experts"] = verified(engine, changed / "experts")
        found["lost"] = verified(engine, changed / "lost")
    return found


@pytest.fixture(scope="module")
def changed(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that are not those of the models that are loaded from ``files``."""
    to = tmp_path_factory.mktemp("changed")
    of = with_keys
    of(files["llama"], to / "renamed", lambda tensors: tensors.update({UP.replace("up", "upp"): tensors.pop(UP)}))
    of(files["llama"], to / "layers", exchange(*DOWN))
    of(files["qwen3_moe"], to / "experts", exchange(EXPERT.format(0), EXPERT.format(2)))
    of(files["qwen3_moe"], to / "lost", lambda tensors: tensors.pop(EXPERT.format(3)))
    tiny_llama(seed=7).save_pretrained(to / "initial")
    tiny_llama(vocab_size=64).save_pretrained(to / "shape")
    return to


@pytest.mark.cases(3)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_wrong_weights_are_detected_and_named(
    stage: int, files: dict[str, Path], changed: Path, tmp_path: Path
) -> None:
    ranks = pool(2).run(detected_faults, files, changed, str(tmp_path), stage)
    for found in ranks:
        assert found["shard"].different == {UP: 1}
        assert stage == 0 or (found["master"].masters and set(found["master"].different.values()) == {1})
        assert sorted(found["layers"].different) == DOWN
        stacked = "model.layers.1.mlp.experts.gate_up_proj"
        assert found["experts"].different.keys() == {stacked}
        assert stacked in (*found["lost"].missing, *found["lost"].shape_mismatches)
        assert len(found["initial"].different) == found["initial"].tensors
        renamed = found["renamed"]
        assert (renamed.missing, renamed.unexpected) == ((UP,), (UP.replace("up", "upp"),))
        assert renamed.nearest == {UP: UP.replace("up", "upp")}
        (problem,) = renamed.problems()
        assert UP in problem and UP.replace("up", "upp") in problem and "allow_new_weights" in problem
        assert found["new"].good and found["new"].new == (UP,)
        assert found["shape"].shape_mismatches["lm_head.weight"] == ((61, 32), (64, 32))
        assert found["all new"].good
        for case in ("shard", "layers", "experts", "initial", "renamed", "shape", "lost"):
            assert not found[case].good
    assert {str(of["shard"]).split(" (")[0] for of in ranks} == {
        "not verified, 20 of 21 tensors, 0 missing, 1 different, 0 unexpected"
    }


def partitions_of_another_rank(path: Path, output_dir: str) -> Verification:
    with engine_over(loaded(path), output_dir, tensor_parallel_size=2) as engine:
        coordinates = engine.groups.coordinates
        engine.groups = replace(engine.groups, coordinates=coordinates._replace(tp=1 - coordinates.tp))
        return verified(engine, path)


def test_the_partition_of_another_rank_is_detected(tmp_path: Path) -> None:
    tiny_llama(vocab_size=64).save_pretrained(tmp_path / "model")
    for found in pool(2).run(partitions_of_another_rank, tmp_path / "model", str(tmp_path)):
        assert UP in found.different and "model.norm.weight" not in found.different


def adapted(path: Path) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], modules_to_save=["lm_head"])
    return get_peft_model(loaded(path), config)


def test_the_base_of_a_model_with_adapters_is_verified(files: dict[str, Path], changed: Path) -> None:
    model = adapted(files["llama"])
    found = verify_weights(model, files["llama"])
    assert found.good and (found.verified, found.new, found.unexpected) == (21, (), ())
    found = verify_weights(model, changed / "renamed")
    assert (found.missing, found.verified) == ((UP,), 20)
    with torch.no_grad():
        model.get_parameter(f"base_model.model.{UP.replace('.weight', '.base_layer.weight')}").zero_()
    assert verify_weights(model, files["llama"]).different == {UP: 0}


def test_bin_files_and_nested_base_models_are_verified(files: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "bin"
    shutil.copytree(files["llama"], path)
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    torch.save({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, path / "pytorch_model.bin")
    found = verify_weights(loaded(path), path)
    assert found.good and (found.verified, found.unexpected) == (21, ())
