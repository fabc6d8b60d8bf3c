"""Memory and time of real steps on a GPU (benchmarks/results/gpu_h100.json) against what the planner says."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer.planner.candidate import Candidate
from ds_trainer.planner.cluster import Cluster
from ds_trainer.planner.memory.estimate import estimate_memory
from ds_trainer.planner.planned_model import PlannedModel
from ds_trainer.planner.step_time import step_time

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # they are scripts, not a package

import gpu_memory  # noqa: E402
from gpu_models import CASES, Case, build_model  # noqa: E402

RESULTS: dict[str, Any] = json.loads((BENCHMARKS / "results" / "gpu_h100.json").read_text(encoding="utf-8"))
CASE = {case.name: case for case in CASES["cuda"]}
CLUSTER = Cluster.of(RESULTS["environment"]["device"], 1, 1)


def planned(case: Case) -> PlannedModel:
    with torch.device("meta"):
        return PlannedModel.from_module(build_model(case, "meta"))


@pytest.mark.parametrize("row", RESULTS["memory"], ids=lambda row: row["name"])
def test_the_largest_moment_of_a_step(row: dict[str, Any]) -> None:
    case, given = next(run for run in gpu_memory.runs("cuda") if gpu_memory.name_of(*run) == row["name"])
    found = estimate_memory(planned(case), gpu_memory.candidate(case, given))
    assert found.tensors == pytest.approx(row["measured"]["tensors"], rel=0.05)


@pytest.mark.parametrize(("loop", "chunked"), [("ds_trainer", True), ("ds_trainer, whole logits", False)])
def test_a_step_of_one_billion_parameters(loop: str, chunked: bool) -> None:
    (found,) = (one for one in RESULTS["throughput"] if one["name"] == "1b")
    case, model = CASE["1b"], planned(CASE["1b"])
    run = Candidate(1, case.sequence, stage=1, micro_batch=case.micro_batch, chunked_loss=chunked)
    assert estimate_memory(model, run).tensors == pytest.approx(1e9 * found["loops"][loop]["peak_gb"], rel=0.02)
    time, wanted = step_time(model, run, CLUSTER), run.tokens / found["loops"][loop]["tokens_per_second"]
    assert time.seconds == pytest.approx(wanted, rel=0.15)
    assert time.low < wanted < time.high


@pytest.mark.parametrize(
    ("variant", "saving"),
    [
        ("tiled MLPs", {"tiled_mlp": True}),
        ("offloaded activations", {"checkpointing": True, "offload_activations": True}),
    ],
)
def test_features_that_save_activations(variant: str, saving: dict[str, Any]) -> None:
    """Their largest moment is the optimizer step."""
    (found,) = (one for one in RESULTS["features"] if one["variant"] == variant)
    case = CASE["1b"]
    run = Candidate(1, case.sequence, stage=1, micro_batch=case.micro_batch, chunked_loss=True, **saving)
    assert estimate_memory(planned(case), run).tensors == pytest.approx(1e9 * found["peak_gb"], rel=0.01)


def test_a_sequence_of_64k_tokens_with_adapters() -> None:
    pytest.importorskip("peft")
    (found,) = RESULTS["longest"]
    case = replace(CASE["8b lora"], sequence=found["length"], micro_batch=1)
    saving = {"checkpointing": True, "chunked_loss": True, "tiled_mlp": True, "offload_activations": True}
    model, run = planned(case), Candidate(1, case.sequence, stage=1, **saving)
    assert estimate_memory(model, run).tensors == pytest.approx(1e9 * found["peak_gb"], rel=0.08)
    assert step_time(model, run, CLUSTER).seconds == pytest.approx(found["seconds_per_step"], rel=0.15)
