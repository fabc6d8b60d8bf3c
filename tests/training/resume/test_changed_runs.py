"""Runs that are continued with other arguments: the right samples, the right rates, and a table of what has changed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer import ConfigError
from tests.support.numbered import SAMPLES, Numbers, NumberStream, Ran, ShuffledStream, StatefulStream, run, trainer_of
from tests.support.pool import pool
from tests.support.resuming import StopAt

ENGINES = [(1, 0), (1, 3), (2, 0), (2, 3)]
SOME = [(1, 0), (2, 3)]


def ran(world: int, output_dir: Path, resume: Any = None, **changes: Any) -> list[Ran]:
    found: list[Ran] = pool(world).run(partial(run, str(output_dir), resume, **changes))
    return found


def samples(ranks: list[Ran]) -> list[int]:
    return sorted(sample for one in ranks for sample in one.seen)


def table(text: str) -> list[str]:
    """The lines of the table, without its title."""
    _, _, rest = text.partition("Changed since then:\n")
    return [line for line in rest.partition("ds_trainer\n")[0].splitlines() if line.startswith("  ")]


# -- the length of the run -------------------------------------------------------------------------------------------


@pytest.mark.cases(1)
@pytest.mark.parametrize(("world", "stage"), ENGINES)
@pytest.mark.parametrize(
    ("before", "after"),
    [({"max_steps": 5}, {"max_steps": 10}), ({"num_train_epochs": 1}, {"num_train_epochs": 2})],
    ids=["steps", "epochs"],
)
def test_a_longer_run_is_bit_for_bit_one_run(
    before: dict[str, int], after: dict[str, int], world: int, stage: int, tmp_path: Path
) -> None:
    """Five steps end in the middle of the second or the first epoch."""
    whole = ran(world, tmp_path / "whole", zero_stage=stage, **after)
    first = ran(world, tmp_path / "parts", zero_stage=stage, **before)
    second = ran(world, tmp_path / "parts", True, zero_stage=stage, **after)
    for wanted, one, two in zip(whole, first, second, strict=True):
        assert one.seen + two.seen == wanted.seen and two.seen
        assert two.losses == wanted.losses and two.step == wanted.step > one.step
        assert all(torch.equal(two.weights[name], wanted.weights[name]) for name in wanted.weights)


def test_a_shorter_run_ends_earlier(tmp_path: Path) -> None:
    ran(1, tmp_path, max_steps=10, callbacks=[StopAt(4)])
    (found,) = ran(1, tmp_path, True, max_steps=6)
    assert (found.step, len(found.seen)) == (6, 8)


def test_a_linear_schedule_follows_the_new_length(tmp_path: Path) -> None:
    linear = {"lr_scheduler_type": "linear", "learning_rate": 0.1}
    ran(1, tmp_path, max_steps=10, callbacks=[StopAt(6)], **linear)
    (found,) = ran(1, tmp_path, True, max_steps=20, **linear)
    wanted = [0.1 * (10 - step) / 10 for step in range(6)] + [0.1 * (20 - step) / 20 for step in range(6, 20)]
    assert found.rates == pytest.approx(wanted, rel=1e-12)
    (rows,) = [line for line in table(found.text) if "max_steps" in line]
    assert rows.split()[:3] == ["max_steps", "10", "20"]
    assert "learning rate 0.07 at step 7" in " ".join(" ".join(table(found.text)).split())


def test_a_schedule_of_deepspeed_follows_the_new_length(tmp_path: Path) -> None:
    params = {"warmup_min_lr": 0, "warmup_max_lr": "auto", "warmup_num_steps": 1, "total_num_steps": "auto"}
    values = {"deepspeed": {"scheduler": {"type": "WarmupDecayLR", "params": params}}, "lr_scheduler_type": None}
    (whole,) = ran(1, tmp_path / "whole", max_steps=8, **values)
    ran(1, tmp_path / "parts", max_steps=4, **values)
    (found,) = ran(1, tmp_path / "parts", True, max_steps=8, **values)
    assert found.rates[4:] == whole.rates[4:]
    assert "the schedule too: learning rate 0.0" in " ".join(" ".join(table(found.text)).split())


def test_a_finished_run_with_a_schedule_that_ended_at_zero_goes_on(tmp_path: Path) -> None:
    linear = {"lr_scheduler_type": "linear", "learning_rate": 0.1}
    ran(1, tmp_path, num_train_epochs=1, **linear)
    (found,) = ran(1, tmp_path, True, num_train_epochs=2, **linear)
    assert found.rates[6:] == pytest.approx([0.1 * (12 - step) / 12 for step in range(6, 12)], rel=1e-12)
    assert found.rates[:6] == pytest.approx([0.1 * (6 - step) / 6 for step in range(6)], rel=1e-12)
    row = next(line for line in table(found.text) if line.startswith("  num_train_epochs"))
    assert row.split()[1:3] == ["1", "2"] and "the run was 6 steps, is 12" in row
    assert not any(line.startswith("  max_steps") for line in table(found.text))  # the user has not set it


@pytest.mark.cases(1)
@pytest.mark.parametrize(("world", "stage"), SOME)
def test_learning_rate_warmup_and_type_take_effect_at_the_step(world: int, stage: int, tmp_path: Path) -> None:
    ran(world, tmp_path / "parts", max_steps=8, callbacks=[StopAt(3)], zero_stage=stage)
    changes: dict[str, Any] = {"lr_scheduler_type": "cosine", "learning_rate": 0.02, "warmup_steps": 5, "max_steps": 9}
    whole = ran(world, tmp_path / "whole", zero_stage=stage, **changes)
    found = ran(world, tmp_path / "parts", True, zero_stage=stage, **changes)
    assert found[0].rates[3:] == whole[0].rates[3:] and found[0].rates[:3] == [0.05] * 3
    again = ran(world, tmp_path / "parts", str(tmp_path / "parts" / "checkpoint-6"), zero_stage=stage, **changes)
    assert again[0].losses == found[0].losses and not table(again[0].text)  # restored, not moved once more


# -- the samples -----------------------------------------------------------------------------------------------------

STREAMS: dict[str, Any] = {"stream": NumberStream, "shuffled": ShuffledStream, "stateful": StatefulStream}


@pytest.mark.cases(1)
@pytest.mark.parametrize(("world", "stage"), SOME)
def test_another_batch_size_continues_with_the_next_sample(world: int, stage: int, tmp_path: Path) -> None:
    """Three steps of the larger batch, then the rest of two epochs with the smaller one."""
    size = 4 // world
    values: dict[str, Any] = {"num_train_epochs": 2, "zero_stage": stage}
    whole = ran(world, tmp_path / "whole", per_device_train_batch_size=size, **values)
    first = ran(world, tmp_path / "parts", per_device_train_batch_size=size, callbacks=[StopAt(3)], **values)
    second = ran(world, tmp_path / "parts", True, per_device_train_batch_size=size // 2, **values)
    assert samples(first) == sorted(one for rank in whole for one in rank.seen[: 3 * size])
    assert samples([*first, *second]) == sorted([*range(SAMPLES), *range(SAMPLES)])
    if world == 1:
        assert first[0].seen + second[0].seen == whole[0].seen  # in the same order
    assert second[0].step == second[0].max_steps == 3 + (SAMPLES - 12) // 2 + SAMPLES // 2
    text = " ".join(" ".join(table(second[0].text)).split())
    assert "the global batch was 4 samples, is 2, from sample 13 of epoch 0 on; the run was 12 steps, is 21" in text


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [0, 3])
def test_fewer_ranks_continue_with_the_next_sample(stage: int, tmp_path: Path) -> None:
    """Four ranks, then two: half of the global batch."""
    values = {"num_train_epochs": 1, "zero_stage": stage, "per_device_train_batch_size": 1}
    first = ran(4, tmp_path, callbacks=[StopAt(3)], **values)
    second = ran(2, tmp_path, True, **values)
    assert samples([*first, *second]) == list(range(SAMPLES))
    assert [len(rank.seen) for rank in (*first, *second)] == [3] * 4 + [6] * 2
    assert second[0].step == second[0].max_steps == 3 + 6
    (row,) = [line for line in table(second[0].text) if line.startswith("  ranks")]
    assert row.split()[:3] == ["ranks", "4", "2"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize(("world", "sizes"), [(1, (4, 2)), (2, (2, 1)), (1, (2, 4))])
def test_streams_continue_with_the_next_sample(kind: str, world: int, sizes: tuple[int, int], tmp_path: Path) -> None:
    """Twelve samples of one batch size, then two epochs to their end with the other one."""
    old, new = (size * world for size in sizes)
    data = STREAMS[kind]
    whole = ran(1, tmp_path / "whole", data=data(), max_steps=12, per_device_train_batch_size=4)
    first = ran(world, tmp_path / "parts", data=data(), max_steps=12 // old, per_device_train_batch_size=sizes[0])
    last = 12 // old + (2 * SAMPLES - 12) // new
    second = ran(world, tmp_path / "parts", True, data=data(), max_steps=last, per_device_train_batch_size=sizes[1])
    assert samples(first) == sorted(whole[0].seen[:12])
    assert samples(second) == sorted(whole[0].seen[12:])
    if world == 1:
        assert first[0].seen + second[0].seen == whole[0].seen


def test_accumulation_and_micro_batch_may_change_together(tmp_path: Path) -> None:
    (whole,) = ran(1, tmp_path / "whole", max_steps=8)
    (first,) = ran(1, tmp_path / "parts", max_steps=8, callbacks=[StopAt(4)])
    changed = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    (second,) = ran(1, tmp_path / "parts", True, max_steps=8, **changed)
    assert first.seen + second.seen == whole.seen
    assert second.losses == pytest.approx(whole.losses, rel=1e-5)
    assert "the global batch stays the same" in table(second.text)[1]


def test_a_second_change_counts_from_where_the_run_is(tmp_path: Path) -> None:
    """Batches of 4, then 2, then more epochs: every sample of every epoch once."""
    (first,) = ran(1, tmp_path, num_train_epochs=1, callbacks=[StopAt(3)])
    smaller = {"per_device_train_batch_size": 2}
    (second,) = ran(1, tmp_path, True, num_train_epochs=1, callbacks=[StopAt(5)], **smaller)
    (third,) = ran(1, tmp_path, True, num_train_epochs=3, **smaller)
    seen = [*first.seen, *second.seen, *third.seen]
    assert [sorted(seen[start : start + SAMPLES]) for start in (0, 24, 48)] == [list(range(SAMPLES))] * 3
    assert len(seen) == 3 * SAMPLES and third.step == third.max_steps == 3 + 6 + 24
    assert second.max_steps == 9


BY_LENGTH = ("group_by_length", "batch_rebalance")


@pytest.mark.cases(1)
@pytest.mark.parametrize(("name", "order"), [("seed", "random"), *(("data_seed", order) for order in BY_LENGTH)])
def test_another_seed_orders_the_next_epoch(name: str, order: str, tmp_path: Path) -> None:
    """The epoch that has begun keeps its order, also if it is resumed twice."""
    values = {"num_train_epochs": 2, "train_sampling_strategy": order}
    (whole,) = ran(1, tmp_path / "whole", **values)
    (other,) = ran(1, tmp_path / "other", **{**values, name: 7})
    (first,) = ran(1, tmp_path / "parts", callbacks=[StopAt(2)], **values)
    (second,) = ran(1, tmp_path / "parts", True, callbacks=[StopAt(4)], **{**values, name: 7})
    (third,) = ran(1, tmp_path / "parts", True, **{**values, name: 7})
    assert first.seen + second.seen + third.seen == whole.seen[:SAMPLES] + other.seen[SAMPLES:]
    assert whole.seen[SAMPLES:] != other.seen[SAMPLES:]
    text = " ".join(" ".join(table(second.text)).split())
    assert "the order of samples is another one from epoch 1 on" in text and not table(third.text)


def test_another_seed_orders_the_next_epoch_of_a_stream(tmp_path: Path) -> None:
    values = {"max_steps": 12, "data": ShuffledStream()}
    (whole,) = ran(1, tmp_path / "whole", **values)
    (other,) = ran(1, tmp_path / "other", data_seed=7, **values)
    (first,) = ran(1, tmp_path / "parts", callbacks=[StopAt(2)], **values)
    (second,) = ran(1, tmp_path / "parts", True, data_seed=7, **values)
    assert first.seen + second.seen == whole.seen[:SAMPLES] + other.seen[SAMPLES:]
    assert whole.seen[SAMPLES:] != other.seen[SAMPLES:]


@pytest.mark.parametrize("order", ["random", "sequential"])
def test_a_dataset_may_have_grown(order: str, tmp_path: Path) -> None:
    values = {"num_train_epochs": 2, "train_sampling_strategy": order}
    (first,) = ran(1, tmp_path, callbacks=[StopAt(3)], **values)
    (second,) = ran(1, tmp_path, True, data=Numbers(40), **values)
    assert second.step == second.max_steps == 3 + (40 - 12) // 4 + 10
    assert sorted(second.seen[28:]) == list(range(40))  # the second epoch
    if order == "sequential":
        assert first.seen + second.seen[:28] == list(range(40))
    rows = [line for line in table(second.text) if line.startswith("  train_dataset")]
    assert rows[0].split()[1:3] == ["24", "40"]


def test_a_dataset_may_have_shrunk(tmp_path: Path) -> None:
    """More of the epoch is done than the dataset still has: the next epoch begins."""
    ran(1, tmp_path, num_train_epochs=2, callbacks=[StopAt(5)])
    (found,) = ran(1, tmp_path, True, data=Numbers(16), num_train_epochs=2)
    assert sorted(found.seen) == list(range(16)) and found.step == found.max_steps == 9


# -- everything else -------------------------------------------------------------------------------------------------


def test_other_intervals_apply_from_the_step_on(tmp_path: Path) -> None:
    ran(1, tmp_path, max_steps=4, save_steps=4)
    (found,) = ran(1, tmp_path, True, max_steps=12, save_steps=5, logging_steps=3)
    assert found.logged == [1, 2, 3, 4, 6, 9, 12]
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {f"checkpoint-{n}" for n in (4, 5, 10, 12)}
    lines = table(found.text)
    assert [line.split()[0] for line in lines[1:]] == ["max_steps", "logging_steps", "save_steps"]
    assert lines[2].split(maxsplit=3)[3] == "from step 5 on" and lines[3].split(maxsplit=3)[3] == "as above"


@pytest.mark.parametrize(("world", "stage"), SOME)
def test_the_precision_may_change(world: int, stage: int, tmp_path: Path) -> None:
    """Master weights stay exact: back in float32, they are those that were saved."""
    (written, *_) = ran(world, tmp_path, max_steps=3, zero_stage=stage)
    still = {"learning_rate": 0.0, "zero_stage": stage}
    (halved, *_) = ran(world, tmp_path, True, max_steps=4, bf16=True, **still)
    (back, *_) = ran(world, tmp_path, True, max_steps=5, **still)
    for name, wanted in written.weights.items():
        assert torch.equal(halved.weights[name], wanted.to(torch.bfloat16).float())
        assert torch.equal(back.weights[name], wanted)
    assert "bf16" in " ".join(table(halved.text))


def test_the_optimizer_keeps_its_states_with_another_implementation(tmp_path: Path) -> None:
    (whole,) = ran(1, tmp_path / "whole", max_steps=6, optim="adamw_torch")
    ran(1, tmp_path / "parts", max_steps=3, optim="adamw_torch")
    (found,) = ran(1, tmp_path / "parts", True, max_steps=6, optim="adamw_torch_fused")
    assert found.losses == pytest.approx(whole.losses, rel=1e-4)
    assert "optimizer     restored" in found.text and "the optimizer's states are restored" in found.text


def refusal(output_dir: str, **changes: Any) -> list[str]:
    try:
        run(output_dir, True, **changes)
    except ConfigError as error:
        return error.problems
    raise AssertionError("was not refused")


def refused(output_dir: Path, **changes: Any) -> list[str]:
    (problems,) = pool(1).run(partial(refusal, str(output_dir), **changes))
    return list(problems)


def test_another_optimizer_is_refused_and_can_begin_anew(tmp_path: Path) -> None:
    ran(1, tmp_path, max_steps=3)
    (problem,) = refused(tmp_path, max_steps=5, optim="sgd", learning_rate=0.01)
    assert problem.startswith("optim was adamw_torch") and "and is sgd (argument); the optimizer's states" in problem
    assert "begin with new states: allow_changed_on_resume=['optim']" in problem
    (problem,) = refused(tmp_path, max_steps=5, optimizer=torch.optim.SGD)
    assert problem.startswith("optimizer was null") and "is SGD" in problem
    (found,) = ran(1, tmp_path, True, max_steps=5, optim="sgd", allow_changed_on_resume=["optim"])
    assert "the optimizer's states are new" in found.text and found.step == 5


def test_another_model_is_refused_by_name(tmp_path: Path) -> None:
    ran(1, tmp_path, max_steps=3)
    (problem,) = refused(tmp_path, max_steps=5, width=9)
    assert "hidden.weight has the shape [9, 1] in this model, but [8, 1]" in problem


def test_strict_resume_refuses_every_change_at_once(tmp_path: Path) -> None:
    ran(1, tmp_path, max_steps=3)
    changes = {"learning_rate": 0.1, "seed": 1, "per_device_train_batch_size": 2, "weight_decay": 0.5}
    problems = refused(tmp_path, max_steps=5, strict_resume=True, allow_changed_on_resume=["weight_decay"], **changes)
    assert [problem.partition(" was ")[0] for problem in problems] == [
        *("learning_rate", "seed", "data_seed", "global_batch")
    ]
    (found,) = ran(1, tmp_path, True, max_steps=5, strict_resume=True)  # constant rates do not depend on the length
    assert found.step == 5


def test_the_table_fits_a_terminal(tmp_path: Path) -> None:
    ran(1, tmp_path, num_train_epochs=1, callbacks=[StopAt(3)])
    changes: dict[str, Any] = {
        **{"learning_rate": 0.012345678901234, "weight_decay": 0.5, "per_device_train_batch_size": 2, "seed": 3},
        **{"gradient_accumulation_steps": 3, "restore_callback_states_from_checkpoint": True, "adam_beta1": 0.8},
        **{"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 3}, "max_steps": 30},
    }
    (found,) = ran(1, tmp_path, True, **changes)
    lines = table(found.text)
    assert max(map(len, lines)) <= 100
    named = {line.split()[0] for line in lines if not line.startswith("   ")}
    assert named == {"argument", "num_train_epochs", *changes}
    assert "none: max_steps=30 decides" in found.text
    assert "random states are those of the checkpoint" in " ".join(" ".join(lines).split())


def test_a_seed_that_is_written_out_changes_nothing(tmp_path: Path) -> None:
    ran(1, tmp_path, max_steps=5, callbacks=[StopAt(3)])
    (found,) = ran(1, tmp_path, True, max_steps=5, data_seed=42)
    assert "none: the order of samples stays the same" in found.text


def test_nothing_is_said_if_nothing_has_changed(tmp_path: Path) -> None:
    ran(1, tmp_path, max_steps=5, callbacks=[StopAt(3)])
    (found,) = ran(1, tmp_path, True, max_steps=5, auto_resume=True)
    assert "Changed since" not in found.text and "finished" not in found.text


@pytest.mark.parametrize(("name", "longer"), [("max_steps", 8), ("num_train_epochs", 2)])
def test_a_finished_run_says_how_to_continue(name: str, longer: int, tmp_path: Path) -> None:
    length = {"max_steps": 4, "num_train_epochs": 1}[name]
    ran(1, tmp_path, **{name: length})
    (found,) = ran(1, tmp_path, True, **{name: length})
    assert not found.seen and "train_loss" not in found.metrics and "nan" not in found.text
    assert f"The run is finished after {found.step} steps ({name}={length}, argument)" in found.text
    assert f"{name}={longer}) and train(resume_from_checkpoint=True)" in found.text
    assert f"--{name} {longer} --auto_resume True" in found.text
    assert f"--arguments.{name} {longer} --arguments.auto_resume True" in found.text
    (continued,) = ran(1, tmp_path, True, **{name: longer})
    assert continued.step > found.step and continued.metrics["train_loss"] > 0


def test_a_new_run_beside_a_checkpoint_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(str(tmp_path), max_steps=2)
    assert "begins at step 0" not in caplog.text
    trainer = trainer_of(str(tmp_path), max_steps=2)
    trainer.train()
    trainer.engine.close()
    assert f"This run begins at step 0 although {tmp_path / 'checkpoint-2'} is there" in caplog.text
    assert "call train(resume_from_checkpoint=True), or add --auto_resume True (of a recipe: --arg" in caplog.text
    caplog.clear()
    run(str(tmp_path), max_steps=3, auto_resume=True)
    assert "begins at step 0" not in caplog.text
