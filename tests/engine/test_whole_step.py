"""Stage 0 in 16 bits: the step over all tensors together is that of ZeRO 1, divided or not."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ds_trainer import ConfigError
from tests.support.compare import assert_equal
from tests.support.expert_models import maker
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import pool
from tests.support.runs import train_and_report

TOLERANCES = {"one rank": 1e-3, "accumulation in float32": 1e-3}  # other last bits of a norm round other weights
CASES: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "one rank": (1, tiny_llama, {}),
    "accumulation in float32": (2, tiny_llama, {"gradient_accumulation_steps": 2, "grad_accum_dtype": "fp32"}),
    "tensor parallelism": (2, tiny_llama, {"tensor_parallel_size": 2}),
    "divided experts": (2, maker("qwen3_moe"), {"expert_parallel_size": 2}),
    "experts and replicas": (4, maker("mixtral"), {"expert_parallel_size": 2, "optim": "adamw_torch"}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_step_is_that_of_stage_1(tmp_path: Path, case: str) -> None:
    """With clipping active: a weight that a norm leaves out changes all others."""
    ranks, model, arguments = CASES[case]
    values = {
        "bf16": True,
        "optim": "sgd",
        "learning_rate": 0.5,
        "weight_decay": 0.0,
        "max_grad_norm": 0.1,
        **arguments,
    }
    if values["optim"] != "sgd":
        values["learning_rate"] = 1e-3
    job = partial(train_and_report, model, partial(RaggedTokens, 64), str(tmp_path), max_steps=6, **values)
    found, *_ = pool(ranks).run(partial(job, zero_stage=0))
    wanted, *_ = pool(ranks).run(partial(job, zero_stage=1))
    assert max(wanted.grad_norms) > 0.1
    assert_equal(found, wanted, TOLERANCES.get(case, 1e-6))


def with_a_fused_optimizer(job: Any) -> str:
    """The error if DeepSpeed takes SGD for its fused Adam, which it wraps in another class."""
    with mock.patch("deepspeed.runtime.engine.FusedAdam", torch.optim.SGD):
        try:
            job()
        except ConfigError as error:
            return str(error)
    return "trained"


@pytest.mark.parametrize("case", ["tensor parallelism", "divided experts"])
def test_a_wrapper_with_another_norm_is_refused(tmp_path: Path, case: str) -> None:
    ranks, model, arguments = CASES[case]
    values = {"bf16": True, "optim": "sgd", "zero_stage": 0, "max_steps": 1, **arguments}
    job = partial(train_and_report, model, partial(RaggedTokens, 64), str(tmp_path), **values)
    assert all(
        "SGD in 16 bits with zero_stage=0" in said for said in pool(ranks).run(partial(with_a_fused_optimizer, job))
    )


@pytest.mark.parametrize("case", ["tensor parallelism", "divided experts"])
def test_a_stopped_run_goes_on(tmp_path: Path, case: str) -> None:
    """From its checkpoint on the same ranks, and on one rank with ZeRO 2."""
    ranks, model, arguments = CASES[case]
    values = {"bf16": True, "learning_rate": 1e-3, "max_grad_norm": 0.1, "zero_stage": 0, "max_steps": 6, **arguments}
    job = partial(train_and_report, model, partial(RaggedTokens, 64), str(tmp_path / "whole"), **values)
    wanted, *_ = pool(ranks).run(partial(job, save_strategy="steps", save_steps=3))
    for index, (own, others) in enumerate([(ranks, {}), (1, {**dict.fromkeys(arguments, 1), "zero_stage": 2})]):
        size = {"per_device_train_batch_size": 8 * (ranks if own == 1 and case == "divided experts" else 1)}
        run = partial(train_and_report, model, partial(RaggedTokens, 64), str(tmp_path / f"{index}"))
        found, *_ = pool(own).run(partial(run, resume=str(tmp_path / "whole/checkpoint-3"), **values | others | size))
        assert_equal(found, wanted, 1e-6 if own > 1 else 0.02)
