"""A run that does not fit is refused before its engine is made, with what would make it fit."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ds_trainer.recipes.dry_run import dry_run_of_model
from ds_trainer.training.dry_run import DryRun
from ds_trainer.utils.errors import ConfigError
from tests.support.forks import in_a_fork

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 1024,
}
BASE = {"bf16": True, "zero_stage": 1, "per_device_train_batch_size": 8}


def rehearsed(arguments: dict[str, Any], device: str | None, ranks: int = 8) -> DryRun | list[str]:
    try:
        return dry_run_of_model(LLAMA, arguments, 1024, ranks, 8, "cuda", device)
    except ConfigError as error:
        return error.problems


def test_a_run_that_is_too_large_is_refused_with_what_makes_it_fit() -> None:
    whole = {**BASE, "loss_chunk_tokens": 0}
    problems = in_a_fork(rehearsed, whole, "H100-8GB")
    assert isinstance(problems, list), problems
    (problem,) = problems
    assert re.search(r"needs [\d.]+ GB on a device, which has 8 GB \(H100-8GB\)", problem)
    assert "Its largest moment: " in problem and "activations" in problem
    assert problem.endswith("To start it nevertheless: memory_check=False.")
    advice = re.search(r"fastest first: (.*?)\. To start", problem)
    assert advice is not None
    changes = advice[1].split("; or ")
    assert len(changes) == 3
    # The first advice is true: with these arguments the same start succeeds.
    given = eval(f"dict({changes[0]})")
    assert isinstance(in_a_fork(rehearsed, {**whole, **given}, "H100-8GB"), DryRun)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("arguments", "device"),
    [
        ({}, "H100-80GB"),  # it fits
        ({}, None),  # nothing is known about the devices
        ({"memory_check": False}, "H100-8GB"),
        ({"use_cpu": True, "bf16": False}, None),  # CPU ranks share the memory of their machine
    ],
)
def test_other_runs_start(arguments: dict[str, Any], device: str | None) -> None:
    found = in_a_fork(rehearsed, {**BASE, **arguments}, device)
    assert isinstance(found, DryRun), found


def test_the_plan_of_a_job_fits_and_keeps_the_global_batch() -> None:
    auto = {"bf16": True, "per_device_train_batch_size": 8, "parallelism": "auto"}
    found = in_a_fork(rehearsed, auto, "H100-3GB")
    assert isinstance(found, DryRun), found
    assert found.global_batch_size == 8 * 8
    given = in_a_fork(rehearsed, {**auto, "tensor_parallel_size": 2, "zero_stage": 3}, "H100-3GB")
    assert isinstance(given, DryRun), given
    assert given.global_batch_size == 8 * 8
    assert "tp 2" in given.layout and given.engine.startswith("ZeRO 3")


def test_if_nothing_fits_one_error_has_reasons_and_changes() -> None:
    auto = {"bf16": True, "per_device_train_batch_size": 8, "parallelism": "auto", "zero_stage": 0}
    problems = in_a_fork(rehearsed, auto, "H100-4GB")
    assert isinstance(problems, list), problems
    assert problems[0].startswith("parallelism='auto': nothing with zero_stage=0 fits on 8 x H100-4GB of 4 GB")
    assert "global batch of 64 sequences of 1024 tokens" in problems[0]
    assert any(problem.startswith("The nearest is ZeRO 0") for problem in problems)
    assert any(problem.startswith("It fits with ") for problem in problems)
