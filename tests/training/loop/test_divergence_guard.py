"""A step with a non-finite loss or gradient: skip, stop, or roll back; the same on all ranks, in every layout."""

from __future__ import annotations

import math
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ds_trainer import ConfigError, TrainingArguments
from ds_trainer.monitor.health.replay import replay
from ds_trainer.monitor.metrics_file import read_records
from ds_trainer.training.loop import divergence_guard
from ds_trainer.training.loop.data_cursor import DataCursor
from ds_trainer.training.loop.divergence_guard import DivergenceGuard, Update
from ds_trainer.utils import distributed
from tests.support.diverging import Rows, divergence_error, failing_llama, run, run_in_fp16
from tests.support.pool import pool
from tests.support.resuming import RunRecord, differences

STEPS, SIZE = 6, 8

_NO_NORM = {"zero_optimization": {"compute_grad_norm": False}}

CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "1 rank": (1, "nan", {}),
    "bf16, 1 rank": (1, "nan", {"bf16": True}),
    **{f"zero {stage}": (2, "nan", {"zero_stage": stage}) for stage in (0, 1, 2, 3)},
    **{f"bf16, zero {stage}": (2, "inf", {"zero_stage": stage, "bf16": True}) for stage in (0, 1, 2, 3)},
    "accumulation": (2, "nan", {"zero_stage": 2, "gradient_accumulation_steps": 4}),
    "gradient alone": (2, "gradient", {"zero_stage": 1, "gradient_accumulation_steps": 2}),
    "gradient alone, zero 0": (2, "gradient", {"zero_stage": 0, "max_grad_norm": 0.0}),
    "loss alone": (2, "loss alone", {"zero_stage": 3}),
    "loss alone, zero 0": (2, "loss alone", {"zero_stage": 0}),
    "bf16, DeepSpeed looks away": (
        2,
        "nan",
        {"bf16": True, "zero_stage": 2, "deepspeed": {"bf16": {"enabled": True, "check_grad_overflow": False}}},
    ),
    "no norm": (2, "nan", {"zero_stage": 1, "max_grad_norm": 0.0, "deepspeed": _NO_NORM}),
    "offload": (2, "nan", {"zero_stage": 2, "offload_optimizer": "cpu"}),
    "offload, zero 3": (2, "nan", {"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"}),
    "tp 2": (2, "nan", {"tensor_parallel_size": 2, "zero_stage": 0}),
    "tp 2, zero 3": (2, "gradient", {"tensor_parallel_size": 2, "zero_stage": 3}),
    "sp 2": (2, "nan", {"sequence_parallel_size": 2, "zero_stage": 1}),
    "4 ranks": (4, "nan", {"zero_stage": 3}),
    "4 ranks, tp 2": (4, "inf", {"zero_stage": 2, "tensor_parallel_size": 2, "bf16": True}),
}


def rates(record: RunRecord) -> list[float]:
    return [rate for _, _, rate in record.logs]


@pytest.mark.cases(2, "bf16, DeepSpeed looks away", "loss alone, zero 0", "loss alone", "no norm", "zero 0")
@pytest.mark.parametrize("name", CASES)
def test_a_skipped_step_leaves_no_trace(name: str, tmp_path: Path) -> None:
    world, trap, arguments = CASES[name]
    found = pool(world).run(partial(run, str(tmp_path / "bad"), Rows(STEPS, SIZE, bad=(2,)), trap, **arguments))
    wanted = pool(world).run(
        partial(run, str(tmp_path / "clean"), Rows(STEPS, SIZE, without=(2,)), trap, stop_at=STEPS - 1, **arguments)
    )
    for (record, counted), (other, _) in zip(found, wanted, strict=True):
        assert (counted["skipped"], counted["at"]) == (1, [3])
        assert record.step == STEPS
        assert record.state == other.state
        assert rates(record)[:3] + rates(record)[4:] == rates(other)
        assert rates(record)[2] == rates(record)[3]  # the schedule waits
        assert [entry.get("skipped_steps") for entry in counted["history"][:4]] == [None, None, 1.0, 1.0]


@pytest.mark.cases(4)
@pytest.mark.parametrize("precision", [{}, {"bf16": True}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_control_without_the_guard_weights_become_non_finite(
    stage: int, precision: dict[str, Any], tmp_path: Path
) -> None:
    """The negative control, of the traps and of the oracle."""
    data = Rows(STEPS, SIZE, bad=(2,))
    case = partial(run, str(tmp_path), data, "nan", unguarded=True, zero_stage=stage, **precision)
    for record, counted in pool(2).run(case):
        assert counted["skipped"] == 0
        assert all(math.isnan(loss) for loss, _, _ in record.logs[3:])


# -- spikes -----------------------------------------------------------------------------------------------------------

SPIKES: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"zero {stage}": (2, {"zero_stage": stage}) for stage in (0, 3)},
    **{f"bf16, zero {stage}": (2, {"zero_stage": stage, "bf16": True}) for stage in (0, 1)},
    "no norm": (2, {"zero_stage": 2, "max_grad_norm": 0.0, "deepspeed": _NO_NORM}),
    "offload": (2, {"zero_stage": 2, "offload_optimizer": "cpu", "gradient_accumulation_steps": 2}),
    "offload, zero 3": (1, {"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"}),
    "tp 2": (2, {"tensor_parallel_size": 2, "zero_stage": 1}),
    "sp 2": (2, {"sequence_parallel_size": 2, "zero_stage": 3}),
}


@pytest.mark.cases(1, "bf16, zero 0", "bf16, zero 1", "no norm", "zero 0", "zero 3")
@pytest.mark.parametrize("name", SPIKES)
def test_a_spike_is_skipped(name: str, tmp_path: Path) -> None:
    world, arguments = SPIKES[name]
    more = {"max_steps": 10, "loss_spike_factor": 2.0, "loss_spike_window": 8, **arguments}
    found = pool(world).run(partial(run, str(tmp_path / "bad"), Rows(10, SIZE, bad=(7,)), "9.0", **more))
    wanted = pool(world).run(partial(run, str(tmp_path / "ok"), Rows(10, SIZE, without=(7,)), stop_at=9, **more))
    for (record, counted), (other, _) in zip(found, wanted, strict=True):
        assert (counted["skipped"], counted["at"]) == (1, [8])
        assert record.state == other.state
        assert rates(record)[:8] + rates(record)[9:] == rates(other)


def test_spikes_are_not_detected_by_default(tmp_path: Path) -> None:
    ((record, counted),) = pool(1).run(
        partial(run, str(tmp_path / "bad"), Rows(10, SIZE, bad=(7,)), "9.0", max_steps=10)
    )
    assert counted["skipped"] == 0
    assert record.logs[7][0] > 2 * record.logs[6][0]


# -- stopping ---------------------------------------------------------------------------------------------------------


def test_the_stop_policy_names_the_rank_and_saves_the_batch(tmp_path: Path) -> None:
    data = Rows(STEPS, SIZE, bad=(2,))
    errors = pool(2).run(
        partial(divergence_error, str(tmp_path), data, nonfinite_policy="stop", gradient_accumulation_steps=2)
    )
    assert errors[0] == errors[1]
    # Two ranks with two samples a micro-batch: sample 20 is the first of rank 0's second one.
    assert "Step 3: the loss is not finite on rank 0" in errors[0]
    assert "samples 16, 17, 20, 21 of the dataset" in errors[0]
    assert "nonfinite_policy=stop" in errors[0]
    folder = tmp_path / "divergence" / "step-3"
    assert [path.name for path in folder.iterdir()] == ["rank_0.pt"]
    saved = torch.load(folder / "rank_0.pt", weights_only=True)
    assert saved["samples"] == [[16, 17], [20, 21]]
    assert [math.isnan(loss) for loss in saved["losses"]] == [False, True]
    assert torch.equal(saved["batches"][1]["input_ids"], torch.stack(data.rows[20:22]))
    first, second = replay(folder / "rank_0.pt", failing_llama("nan"))
    assert first.is_finite
    assert (math.isnan(second.loss), second.first) == (True, "FailingLlama")
    assert "lm_head.weight" in second.gradients


def test_a_failing_disk_does_not_stop_training(tmp_path: Path) -> None:
    (tmp_path / "divergence").write_text("in the way")
    ((record, counted),) = pool(1).run(partial(run, str(tmp_path), Rows(STEPS, SIZE, bad=(2,))))
    assert (record.step, counted["skipped"]) == (STEPS, 1)


def diverged_with_two_files(*arguments: Any, **more: Any) -> str:
    divergence_guard._MOST_FILES = 2
    try:
        return divergence_error(*arguments, **more)
    finally:
        divergence_guard._MOST_FILES = 16


def test_an_incident_of_many_ranks_has_few_files_and_a_short_message(tmp_path: Path) -> None:
    data = Rows(STEPS, SIZE, bad=(2,))
    more = {"nonfinite_policy": "stop", "zero_stage": 2}
    error, *_ = pool(4).run(partial(diverged_with_two_files, str(tmp_path), data, "gradient", **more))
    assert "2 of these ranks' micro-batches are in" in error
    assert sorted(path.name for path in (tmp_path / "divergence" / "step-3").iterdir()) == ["rank_0.pt", "rank_2.pt"]
    text = divergence_guard._nonfinite(list(range(1024)), [([math.nan], None)] * 1024)
    assert "on ranks 0, 1, 2," in text and "15 and 1,008 more (contributions" in text and len(text) < 200


def test_a_non_finite_gradient_is_saved_by_all_ranks(tmp_path: Path) -> None:
    data = Rows(STEPS, SIZE, bad=(2,))
    (error, _) = pool(2).run(
        partial(divergence_error, str(tmp_path), data, "gradient", nonfinite_policy="stop", zero_stage=2)
    )
    assert "the gradient is not finite, although the loss is finite on all ranks" in error
    assert sorted(path.name for path in (tmp_path / "divergence" / "step-3").iterdir()) == ["rank_0.pt", "rank_1.pt"]
    found = [
        replay(path, failing_llama("gradient"))[0] for path in sorted((tmp_path / "divergence" / "step-3").iterdir())
    ]
    assert [one.is_finite for one in found] == [True, False]
    assert math.isfinite(found[1].loss)


def test_after_too_many_incidents_training_stops(tmp_path: Path) -> None:
    data = Rows(STEPS, SIZE, bad=(1, 2, 4))
    (error,) = pool(1).run(partial(divergence_error, str(tmp_path), data, divergence_limit=2))
    assert "Step 5" in error and "incident 3 in 1000 steps (divergence_limit=2)" in error
    ((_, counted),) = pool(1).run(partial(run, str(tmp_path), data, divergence_limit=2, divergence_window=3))
    assert (counted["skipped"], counted["at"]) == (3, [3, 5])


def test_a_resumed_run_remembers_incidents(tmp_path: Path) -> None:
    data = Rows(STEPS, SIZE, bad=(1, 4))
    saving = {"save_strategy": "steps", "save_steps": 3, "divergence_limit": 1}
    ((_, counted),) = pool(1).run(partial(run, str(tmp_path), data, stop_at=3, **saving))
    assert counted["at"] == [2]
    (error,) = pool(1).run(partial(divergence_error, str(tmp_path), data, resume=True, **saving))
    assert "Step 5" in error and "incident 2 in 1000 steps (divergence_limit=1)" in error


def test_a_spike_can_stop_training(tmp_path: Path) -> None:
    more = {"max_steps": 10, "loss_spike_factor": 2.0, "loss_spike_window": 8, "loss_spike_policy": "stop"}
    (error, _) = pool(2).run(partial(divergence_error, str(tmp_path), Rows(10, SIZE, bad=(7,)), "9.0", **more))
    assert re.search(r"Step 8: the loss is [0-9.]+, and the median of earlier steps is [0-9.]+; samples 56, 57", error)
    assert "loss_spike_policy=stop" in error


# -- going back -------------------------------------------------------------------------------------------------------

BACK: dict[str, tuple[int, str, dict[str, Any]]] = {
    **{f"zero {stage}": (2, "nan", {"zero_stage": stage}) for stage in (0, 3)},
    "bf16, zero 0": (1, "nan", {"bf16": True, "zero_stage": 0}),
    "bf16, zero 1": (2, "nan", {"bf16": True, "zero_stage": 1}),
    "bf16, zero 3": (2, "gradient", {"bf16": True, "zero_stage": 3, "save_async": False}),
    "accumulation": (2, "nan", {"zero_stage": 2, "gradient_accumulation_steps": 2}),
    "offload": (2, "nan", {"zero_stage": 2, "offload_optimizer": "cpu"}),
    "tp 2": (2, "nan", {"tensor_parallel_size": 2, "zero_stage": 1}),
    "sp 2": (2, "inf", {"sequence_parallel_size": 2, "zero_stage": 3}),
    "spike": (2, "9.0", {"zero_stage": 1, "loss_spike_factor": 2.0, "loss_spike_window": 5}),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", BACK)
def test_a_rollback_skips_the_batches_that_caused_it(name: str, tmp_path: Path) -> None:
    world, trap, case = BACK[name]
    bad = 6
    arguments = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4, **case}
    policies = {"nonfinite_policy": "rollback", "loss_spike_policy": "rollback"}
    found = pool(world).run(
        partial(run, str(tmp_path / "bad"), Rows(12, SIZE, bad=(bad,)), trap, **arguments, **policies)
    )
    # Saved after step 4; 5 and 6 were done, 7 went wrong: the data of 4, 5 and 6, counted from 0, is passed over.
    wanted = pool(world).run(partial(run, str(tmp_path / "ok"), Rows(12, SIZE, without=(4, 5, bad)), trap, **arguments))
    for (run_, counted), (other, _) in zip(found, wanted, strict=True):
        assert (counted["rollbacks"], counted["skipped"], counted["tried"]) == (1, 0, 11)
        assert run_.step == other.step == 8
        assert run_.state == other.state
        assert run_.random == other.random
        steps = [entry["step"] for entry in counted["history"] if "loss" in entry]
        assert steps == [1, 2, 3, 4, 5, 6, 7, 8]
        assert run_.logs == other.logs
        (event,) = [entry for entry in counted["history"] if "rolled_back_to_step" in entry]
        assert (event["rolled_back_from_step"], event["rolled_back_to_step"]) == (7, 4)
    recorded = [record["step"] for record in read_records(tmp_path / "bad" / "metrics.jsonl") if "loss" in record]
    assert recorded == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_run_with_a_rollback_can_be_resumed(tmp_path: Path) -> None:
    arguments = {"max_steps": 9, "save_strategy": "steps", "save_steps": 3, "nonfinite_policy": "rollback"}
    data = Rows(9, SIZE, bad=(4,))  # an epoch is too short for nine steps then
    ((uninterrupted, counted),) = pool(1).run(partial(run, str(tmp_path / "whole"), data, **arguments))
    assert (uninterrupted.step, counted["rollbacks"]) == (9, 1)
    pool(1).run(partial(run, str(tmp_path / "parts"), data, stop_at=6, **arguments))
    ((found, _),) = pool(1).run(partial(run, str(tmp_path / "parts"), data, resume=True, **arguments))
    assert differences(found, uninterrupted) == []


def test_a_rollback_needs_a_checkpoint(tmp_path: Path) -> None:
    arguments = {"save_strategy": "steps", "save_steps": 4, "nonfinite_policy": "rollback"}
    other = Rows(STEPS, SIZE)
    pool(1).run(partial(run, str(tmp_path), other, **arguments))  # leaves a checkpoint of another training
    (error,) = pool(1).run(partial(divergence_error, str(tmp_path), Rows(STEPS, SIZE, bad=(2,)), **arguments))
    assert "There is no checkpoint of this training for a rollback" in error


def test_a_rollback_may_use_the_checkpoint_of_the_resumed_run(tmp_path: Path) -> None:
    arguments = {"save_strategy": "steps", "save_steps": 2, "nonfinite_policy": "rollback"}
    data = Rows(STEPS, SIZE, bad=(3,))
    pool(1).run(partial(run, str(tmp_path), data, stop_at=2, **arguments))
    ((record, counted),) = pool(1).run(partial(run, str(tmp_path), data, resume=True, **arguments))
    assert (record.step, counted["rollbacks"], counted["tried"]) == (6, 1, 8)


@pytest.mark.cases(1)
@pytest.mark.parametrize("changed", [{"learning_rate": 0.02}, {"weight_decay": 0.5}, {"max_steps": 7}], ids=str)
def test_a_rollback_to_the_resumed_checkpoint_keeps_changed_arguments(changed: dict[str, Any], tmp_path: Path) -> None:
    arguments = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "nonfinite_policy": "rollback"}
    bad, without = Rows(10, SIZE, bad=(3,)), Rows(10, SIZE, without=(2, 3))
    later = {**arguments, "save_steps": 4, **changed}
    records = []
    for name, data in (("bad", bad), ("ok", without)):
        pool(1).run(partial(run, str(tmp_path / name), data, stop_at=2, **arguments))
        ((record, counted),) = pool(1).run(partial(run, str(tmp_path / name), data, resume=True, **later))
        assert counted["rollbacks"] == int(name == "bad")
        records.append(record)
    assert records[0].logs == records[1].logs and records[0].state == records[1].state
    assert records[0].step == later["max_steps"]


def test_repeated_rollbacks_end_training(tmp_path: Path) -> None:
    data = Rows(20, SIZE, bad=tuple(range(5, 20)))
    arguments = {"max_steps": 10, "save_strategy": "steps", "save_steps": 4, "nonfinite_policy": "rollback"}
    (error,) = pool(1).run(partial(divergence_error, str(tmp_path), data, **arguments))
    assert "incident 4 in 1000 steps (divergence_limit=3)" in error


# -- what is asked for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nonfinite_policy": "ignore"}, "nonfinite_policy='ignore' is not one of skip, stop, rollback."),
        ({"nonfinite_policy": "rollback", "save_strategy": "no"}, "save_strategy=no writes none"),
        ({"nonfinite_policy": "rollback", "save_only_model": True}, "save_only_model=True writes none"),
        (
            {"loss_spike_factor": 3.0, "loss_spike_policy": "rollback", "save_strategy": "no"},
            "loss_spike_policy=rollback returns to a checkpoint",
        ),
        ({"loss_spike_factor": 1.0}, "loss_spike_factor=1.0 must be a finite number above 1"),
        ({"divergence_limit": -1}, "divergence_limit=-1 must be a number that is not negative."),
        ({"divergence_window": 0}, "divergence_window=0 must be a positive integer."),
    ],
)
def test_invalid_guard_settings_are_rejected(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        TrainingArguments("out", **given)


# -- float16 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 3])
def test_a_loss_scale_overflow_is_not_an_incident(stage: int, tmp_path: Path) -> None:
    case = partial(run_in_fp16, str(tmp_path), Rows(STEPS, SIZE), scale_power=31, zero_stage=stage)
    for record, counted, scale in pool(2).run(case):
        assert counted["at"] == [] and counted["tried"] == record.step == STEPS
        assert scale < 2**31
        assert rates(record)[0] == rates(record)[1]  # nothing was updated in the first step


def gathers_for_an_overflow(output_dir: str) -> tuple[int, int, int]:
    """Steps left out; how often all ranks' losses were gathered, and samples named."""
    left_out, gathered, named = [], [], []
    update, gather, samples = DivergenceGuard.after_update, distributed.gather_objects, DataCursor.samples_ahead

    def counted_update(guard: Any, *args: Any) -> Update:
        outcome = update(guard, *args)
        left_out.extend([outcome] if outcome is Update.SKIPPED else [])
        return outcome

    def counted_gather(value: Any) -> list[Any]:
        if sys._getframe(1).f_globals["__name__"] == DivergenceGuard.__module__:
            gathered.append(value)
        return gather(value)

    def counted_samples(place: Any, micro_steps: int) -> Any:
        named.append(micro_steps)
        return samples(place, micro_steps)

    with (
        mock.patch.object(DivergenceGuard, "after_update", counted_update),
        mock.patch.object(distributed, "gather_objects", counted_gather),
        mock.patch.object(DataCursor, "samples_ahead", counted_samples),
    ):
        run_in_fp16(output_dir, Rows(STEPS, SIZE), scale_power=31, zero_stage=1)
    return len(left_out), len(gathered), len(named)


def test_an_overflow_of_the_loss_scale_names_no_samples(tmp_path: Path) -> None:
    """In fp16 that is usual: whether a loss is not finite anywhere is asked, and nothing that grows with the ranks."""
    for left_out, gathered, named in pool(2).run(gathers_for_an_overflow, str(tmp_path)):
        assert left_out > 0 and (gathered, named) == (0, 0)


@pytest.mark.parametrize("stage", [1, 3])
def test_in_fp16_a_non_finite_loss_is_an_incident(stage: int, tmp_path: Path) -> None:
    data = Rows(STEPS, SIZE, bad=(2,))
    for _, counted, scale in pool(2).run(partial(run_in_fp16, str(tmp_path), data, zero_stage=stage)):
        assert (counted["skipped"], counted["at"], scale) == (1, [3], 2**5)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_spike_does_not_change_the_loss_scale(stage: int, tmp_path: Path) -> None:
    data = Rows(10, SIZE, bad=(7,))
    more = {"max_steps": 10, "loss_spike_factor": 2.0, "loss_spike_window": 8, "zero_stage": stage}
    for _, counted, scale in pool(2).run(partial(run_in_fp16, str(tmp_path), data, "9.0", **more)):
        assert (counted["skipped"], counted["at"], scale) == (1, [8], 2**6)
