"""The setters against transformers: same signatures, same fields after the same calls, and nothing half-set."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import fields
from enum import Enum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_trainer.arguments.compat.setters import Setters
from ds_trainer.arguments.enums import HubStrategy, IntervalStrategy
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.utils.errors import ConfigError
from tests.support.transformers_version import needs_the_reference

SETTERS = [name for name in vars(Setters) if name.startswith("set_")]

# Every parameter of every setter with a value that is not its default.
CALLS: dict[str, dict[str, Any]] = {
    "set_training": {
        "learning_rate": 1e-3,
        "batch_size": 3,
        "weight_decay": 0.1,
        "num_epochs": 1.5,
        "max_steps": 7,
        "gradient_accumulation_steps": 2,
        "seed": 5,
        "activation_checkpointing": True,
    },
    "set_evaluate": {
        "strategy": "steps",
        "steps": 20,
        "batch_size": 4,
        "accumulation_steps": 2,
        "delay": 10,
        "loss_only": True,
    },
    "set_testing": {"batch_size": 5, "loss_only": True},
    "set_save": {"strategy": "epoch", "steps": 30, "total_limit": 2, "on_each_node": True},
    "set_logging": {
        "strategy": "epoch",
        "steps": 40,
        "report_to": ["tensorboard"],
        "level": "info",
        "first_step": True,
        "nan_inf_filter": True,
        "on_each_node": True,
        "replica_level": "error",
    },
    "set_push_to_hub": {
        "model_id": "me/model",
        "strategy": "checkpoint",
        "token": "secret",
        "private_repo": True,
        "always_push": True,
        "revision": "trial",
    },
    "set_optimizer": {
        "name": "adafactor",
        "learning_rate": 2e-3,
        "weight_decay": 0.2,
        "beta1": 0.8,
        "beta2": 0.95,
        "epsilon": 1e-6,
        "args": "scale_parameter=False",
    },
    "set_lr_scheduler": {"name": "cosine", "num_epochs": 2.0, "max_steps": 11, "warmup_steps": 0.25},
    "set_dataloader": {
        "train_batch_size": 2,
        "eval_batch_size": 6,
        "drop_last": True,
        "num_workers": 2,
        "pin_memory": False,
        "persistent_workers": True,
        "prefetch_factor": 3,
        "multiprocessing_context": "spawn",
        "in_order": False,
        "auto_find_batch_size": True,
        "ignore_data_skip": True,
        "sampler_seed": 9,
    },
}
NEEDED = {"set_push_to_hub": {"model_id": "me/model"}}
CASES = [
    *((setter, NEEDED.get(setter, {})) for setter in CALLS),
    *CALLS.items(),
    *(
        (setter, NEEDED.get(setter, {}) | {name: value})
        for setter, call in CALLS.items()
        for name, value in call.items()
    ),
    ("set_evaluate", {"strategy": "epoch"}),
    ("set_evaluate", {"strategy": IntervalStrategy.STEPS, "steps": 20}),
    ("set_evaluate", {"strategy": "no", "steps": 0}),
    ("set_save", {"strategy": "best"}),
    ("set_save", {"strategy": "no", "steps": 0}),
    ("set_push_to_hub", {"model_id": "model", "strategy": HubStrategy.ALL_CHECKPOINTS}),
    ("set_training", {"gradient_checkpointing": True}),
    ("set_training", {"activation_checkpointing": True, "gradient_checkpointing": False}),
]


class Recorder(Setters):
    """The setters on their own: keeps what they hand to the hook, unchecked."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def change(self, **values: Any) -> Recorder:
        self.values.update(values)
        return self


def plain(value: Any) -> Any:
    """Members of any enum are set by value."""
    return value.value if isinstance(value, Enum) else value


def transformers_arguments(**keywords: Any) -> Any:
    """transformers' arguments; on the CPU, so that nothing of the machine shows."""
    import transformers

    return transformers.TrainingArguments(use_cpu=True, **keywords)


@needs_the_reference
@pytest.mark.parametrize("name", SETTERS)
def test_signatures_are_those_of_transformers(name: str) -> None:
    import transformers

    expected = inspect.signature(getattr(transformers.TrainingArguments, name)).parameters.values()
    found = inspect.signature(getattr(Setters, name)).parameters.values()
    assert [(p.name, p.default, p.kind) for p in found] == [(p.name, p.default, p.kind) for p in expected]


def test_there_are_no_other_setters() -> None:
    import transformers

    assert sorted(SETTERS) == sorted(name for name in dir(transformers.TrainingArguments) if name.startswith("set_"))
    assert set(CALLS) == set(SETTERS)
    for name in SETTERS:
        assert set(CALLS[name]) | {"self", "gradient_checkpointing"} >= set(
            inspect.signature(getattr(Setters, name)).parameters
        )


@needs_the_reference
@pytest.mark.parametrize(("setter", "call"), CASES, ids=lambda part: part if isinstance(part, str) else ",".join(part))
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_sets_what_transformers_sets(setter: str, call: dict[str, Any]) -> None:
    """Which fields a setter touches, and their values, are found by comparing transformers' object with a new one."""
    recorder = Recorder()
    assert getattr(recorder, setter)(**call) is recorder
    reference, untouched = transformers_arguments(), transformers_arguments()
    # A value that no setter gives, so that a field set to its default shows as well.
    for field in fields(reference):
        setattr(reference, field.name, untouched)
    getattr(reference, setter)(**{name: plain(value) for name, value in call.items()})
    expected = {
        field.name: plain(getattr(reference, field.name))
        for field in fields(reference)
        if getattr(reference, field.name) is not untouched
    }
    if setter == "set_evaluate" and expected["eval_delay"] is None:
        expected["eval_delay"] = 0  # with None transformers fails at the first comparison
    assert {name: plain(value) for name, value in recorder.values.items()} == expected


def accepted(setter: str, call: dict[str, Any]) -> bool:
    try:
        getattr(TrainingArguments(use_cpu=True), setter)(**call)
    except ConfigError:
        return False
    return True


@needs_the_reference
@pytest.mark.parametrize("setter", SETTERS)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_the_real_arguments_end_as_those_of_transformers(setter: str) -> None:
    """The whole object after the call, through all conversions."""
    compared = 0
    for call in [NEEDED.get(setter, {})] + [case for name, case in CASES if name == setter]:
        if not accepted(setter, call):  # a feature that is refused, with its own sentence
            continue
        ours = getattr(TrainingArguments(use_cpu=True), setter)(**call)
        reference = getattr(transformers_arguments(), setter)(**{name: plain(value) for name, value in call.items()})
        different = {
            field.name: (getattr(ours, field.name), getattr(reference, field.name))
            for field in fields(reference)
            if plain(getattr(ours, field.name)) != plain(getattr(reference, field.name))
        }
        different.pop("accelerator_config", None)  # an object there, not in use here
        if different.get("eval_delay") == (0, None):  # see set_evaluate
            different.pop("eval_delay")
        if different.get("report_to") == ([], "none"):  # there a setter skips the conversion
            different.pop("report_to")
        if different.get("dataloader_pin_memory") == (False, True):  # there a setter skips what use_cpu implies
            different.pop("dataloader_pin_memory")
        assert not different, call
        compared += 1
    assert compared or setter == "set_push_to_hub"


def test_setters_can_be_chained() -> None:
    args = TrainingArguments()
    assert args.set_training(learning_rate=1e-4, batch_size=32).set_save(steps=10).set_testing(batch_size=2) is args
    assert (args.learning_rate, args.per_device_train_batch_size, args.save_steps) == (1e-4, 32, 10)
    assert args.do_train and args.do_predict and not args.do_eval
    assert args.given("learning_rate") and not args.given("max_grad_norm")


@pytest.mark.parametrize(
    ("setter", "call", "message"),
    [
        ("set_training", {"batch_size": 0}, "per_device_train_batch_size"),
        ("set_training", {"learning_rate": -1.0}, "learning_rate"),
        ("set_evaluate", {"strategy": "step"}, "eval_strategy"),
        ("set_evaluate", {"strategy": "steps", "steps": 0}, "steps"),
        ("set_testing", {"batch_size": -1}, "per_device_eval_batch_size"),
        ("set_save", {"strategy": "steps", "steps": 0}, "steps"),
        ("set_save", {"total_limit": 0}, "save_total_limit"),
        ("set_logging", {"strategy": IntervalStrategy.STEPS, "steps": 0}, "steps"),
        ("set_logging", {"level": "loud"}, "log_level"),
        ("set_push_to_hub", {"model_id": "m", "strategy": "often"}, "hub_strategy"),
        ("set_optimizer", {"name": "adamm"}, "optim"),
        ("set_lr_scheduler", {"name": "cosinus"}, "lr_scheduler_type"),
        ("set_dataloader", {"num_workers": 0, "prefetch_factor": 2}, "prefetch_factor"),
    ],
)
def test_a_rejected_call_changes_nothing(setter: str, call: dict[str, Any], message: str) -> None:
    args = TrainingArguments()
    before = args.to_dict(), dict(args.origins)
    with pytest.raises(ConfigError, match=message):
        getattr(args, setter)(**call)
    assert (args.to_dict(), args.origins) == before


def test_the_old_name_in_set_training_warns_at_the_caller() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        args = TrainingArguments().set_training(gradient_checkpointing=True)
    assert [entry.category for entry in caught] == [FutureWarning]
    assert "activation_checkpointing=True" in str(caught[0].message)
    assert caught[0].filename == __file__
    assert args.activation_checkpointing is True and args.gradient_checkpointing is True


@given(st.integers(1, 64), st.floats(0.1, 5), st.integers(1, 9), st.integers(0, 99))
def test_the_last_call_wins(batch: int, epochs: float, accumulation: int, seed: int) -> None:
    call = {"batch_size": batch, "num_epochs": epochs, "gradient_accumulation_steps": accumulation, "seed": seed}
    once = TrainingArguments().set_training(**call)
    twice = TrainingArguments().set_training(batch_size=99, max_steps=5, activation_checkpointing=True)
    assert once.to_dict() == twice.set_training(**call).to_dict()
