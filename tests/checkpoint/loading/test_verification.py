"""What an engine holds is compared with the files that it came from."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer.checkpoint.loading.verification import Verification, verify_weights
from ds_trainer.engine.training_engine import TrainingEngine
from tests.checkpoint.loading.engines import MODELS, engine_over, loaded, saved
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
    place = engine.groups.place.tp
    return verify_weights(engine.deepspeed.module, path, engine.deepspeed, place, **keywords)


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


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_is_found_as_it_is_in_the_files(name: str, files: dict[str, Path], tmp_path: Path) -> None:
    job = partial(all_layouts, files[name], str(tmp_path), LAYOUTS[name])
    check(pool(2).run(job), LAYOUTS[name], len(list(loaded(files[name]).parameters())))


def test_tensor_and_data_parallel_together(files: dict[str, Path], tmp_path: Path) -> None:
    layouts = [{"zero_stage": stage, "tensor_parallel_size": 2} for stage in (1, 3)]
    found = pool(4).run(partial(all_layouts, files["llama"], str(tmp_path), layouts))
    check(found, layouts, len(list(loaded(files["llama"]).parameters())))
