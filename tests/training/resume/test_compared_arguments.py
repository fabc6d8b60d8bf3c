"""What may change when a run is resumed: each name for itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_trainer import ConfigError, TrainingArguments
from ds_trainer.training.resume.compatibility import allowed_names, compare

BEFORE = {
    "learning_rate": 0.1,
    "weight_decay": 0.0,
    "optim": "adamw_torch",
    "global_batch": 8,
    "max_steps": 10,
    "deepspeed.optimizer.type": "AdamW",
    "deepspeed.optimizer.params.eps": 1.0,
}


def compared(changes: dict[str, Any], allowed: list[str], without: str = "", **arguments: Any) -> Any:
    args = TrainingArguments("out", allow_changed_on_resume=allowed, **{"strict_resume": True, **arguments})
    present = {name: value for name, value in {**BEFORE, **changes}.items() if name != without}
    return compare(BEFORE, present, args, Path("checkpoint-5"))


@pytest.mark.parametrize("name", BEFORE)
def test_a_change_is_rejected_unless_it_is_allowed(name: str) -> None:
    key = "deepspeed" if name.startswith("deepspeed") else name
    with pytest.raises(ConfigError, match=f"{name} was .* and is .*allow_changed_on_resume=\\['{key}'\\]"):
        compared({name: 7}, [])
    assert set(compared({name: 7}, [key]).values) == {name}
    with pytest.raises(ConfigError, match=name):  # another name does not allow it
        compared({name: 7}, ["seed"])


def test_added_and_removed_arguments_are_changes() -> None:
    with pytest.raises(ConfigError, match=r"new was null .* and is 1"):
        compared({"new": 1}, [])
    with pytest.raises(ConfigError, match=r"weight_decay was 0\.0 .* and is null"):
        compared({}, [], without="weight_decay")
    assert compared({}, []).values == {}


def test_every_change_is_reported() -> None:
    with pytest.raises(ConfigError) as error:
        compared({"learning_rate": 1, "optim": "sgd", "weight_decay": 2}, ["weight_decay"])
    assert [problem.split()[0] for problem in error.value.problems] == ["learning_rate", "optim"]


def test_another_batch_size_changes_the_steps_of_the_same_epochs() -> None:
    both = {"global_batch": 4, "max_steps": 20}
    assert set(compared(both, ["global_batch"]).values) == set(both)
    assert set(compared(both, ["per_device_train_batch_size"]).values) == set(both)
    with pytest.raises(ConfigError, match="max_steps"):  # which were given
        compared(both, ["global_batch"], max_steps=20)
    with pytest.raises(ConfigError, match="max_steps"):
        compared({"max_steps": 20}, ["global_batch", "seed"], max_steps=20)


def test_allowed_names_are_those_of_arguments() -> None:
    assert allowed_names(["num_train_epochs", "seed"]) == {"max_steps", "seed"}
    with pytest.raises(ConfigError, match="'logging_steps' is not compared"):
        allowed_names(["logging_steps"])


def test_effects_of_changes_on_optimizer_and_schedule() -> None:
    args = TrainingArguments("out")
    rate = compared({"learning_rate": 1}, ["learning_rate"])
    assert (rate.optimizer, rate.schedule) == (False, True)
    assert rate.settings(args) == {"lr", "initial_lr", "schedule"}
    decay = compared({"weight_decay": 1}, ["weight_decay"])
    assert (decay.optimizer, decay.schedule) == (False, False)
    assert decay.settings(args) == {"weight_decay"}
    eps = compared({"deepspeed.optimizer.params.eps": 2}, ["deepspeed"])
    assert (eps.optimizer, eps.schedule, eps.settings(args)) == (False, False, {"eps"})
    other = compared({"deepspeed.optimizer.type": "sgd"}, ["deepspeed"])
    assert (other.optimizer, other.schedule) == (True, True)


def test_without_strict_resume_only_another_optimizer_is_refused() -> None:
    everything = {"learning_rate": 1, "weight_decay": 2, "global_batch": 4, "max_steps": 20, "new": 1}
    free = compared(everything, [], strict_resume=False)
    assert set(free.values) == set(everything) and not free.optimizer and free.schedule
    for name in ("optimizer", "deepspeed.optimizer.type", "optim_target_modules"):
        with pytest.raises(ConfigError, match=f"{name} was .* mean nothing to another one") as error:
            compared({**everything, name: "Other"}, ["learning_rate"], strict_resume=False)
        assert len(error.value.problems) == 1
        allowed = compared({name: "Other"}, [name.partition(".")[0]], strict_resume=False)
        assert allowed.optimizer and allowed.schedule


@pytest.mark.parametrize(
    ("before", "now", "another"),
    [
        ({"optim": "adamw_torch"}, {"optim": "adamw_torch_fused"}, False),
        ({"optim": "adamw_torch"}, {"optim": "sgd"}, True),
        ({"optim": "adamw_torch"}, {"optim": "adamw_torch", "deepspeed.optimizer.type": "AdamW"}, False),
        ({"optim": "adamw_torch"}, {"optim": "adamw_torch", "deepspeed.optimizer.type": "Lion"}, True),
        ({"optim": "adamw_torch", "optimizer": "SGD"}, {"optim": "sgd"}, False),
        ({"optim": "adamw_torch", "optimizer": "SGD"}, {"optim": "adamw_torch"}, True),
    ],
)
def test_names_of_one_optimizer_are_not_another_one(before: Any, now: Any, another: bool) -> None:
    args = TrainingArguments("out", allow_changed_on_resume=["optim", "optimizer", "deepspeed"])
    assert compare(before, now, args, Path("checkpoint-5")).optimizer is another
