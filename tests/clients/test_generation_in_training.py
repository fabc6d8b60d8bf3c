"""GRPO of TRL, which generates inside the loop: both ways to get the weights under ZeRO-3, and layouts it cannot have.

Run with ``tools/test_clients.sh``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.clients.runs import Client, differences, with_ds_trainer
from tests.clients.test_clients import CLIENTS


def test_both_ways_to_get_the_weights_give_the_same_numbers(tmp_path: Path) -> None:
    found = {
        gathers: with_ds_trainer(_grpo("--ds3_gather_for_generation", gathers), tmp_path, 2, settings=["zero_stage=3"])
        for gathers in ("True", "False")
    }
    assert len(found["True"]["history"]) > 4
    assert differences(found["True"], found["False"], 1e-5) == []


@pytest.mark.parametrize("axis", ["sequence_parallel_size", "tensor_parallel_size"])
def test_a_replica_of_several_ranks_is_refused(axis: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"GRPOTrainer of TRL takes the rewards of a rank by accelerator"):
        with_ds_trainer(_grpo(), tmp_path, 2, settings=[f"{axis}=2", "per_device_train_batch_size=4"])


def _grpo(*more: str) -> Client:
    grpo = CLIENTS["TRL GRPO"]
    return replace(grpo, arguments=(*grpo.arguments, *more))
