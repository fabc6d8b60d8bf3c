"""TrainingArguments: the reference's names and defaults, everything wrong reported at once."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.utils.errors import ConfigError

OWN = {
    "torch_autocast",
    "zero_stage",
    "offload_optimizer",
    "tensor_parallel_size",
    "context_parallel_size",
    "sequence_parallel_size",
    "max_shard_size",
}


def test_names_and_defaults_are_those_of_transformers() -> None:
    import transformers

    theirs = {f.name: f.default for f in dataclasses.fields(transformers.TrainingArguments)}
    ours = {f.name: f.default for f in dataclasses.fields(TrainingArguments)}
    assert ours.keys() - theirs.keys() == OWN
    different = {}
    for name in ours.keys() & theirs.keys():
        wanted = getattr(theirs[name], "value", theirs[name])
        if ours[name] != wanted:
            different[name] = (ours[name], wanted)
    assert different == {}
    assert all(f.metadata["help"].endswith(".") for f in dataclasses.fields(TrainingArguments))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0 must be a positive integer"),
    ({"gradient_accumulation_steps": 1.5}, "gradient_accumulation_steps=1.5 must be a positive integer"),
    ({"learning_rate": -1.0}, "learning_rate=-1.0 must be a number that is not negative"),
    ({"learning_rate": "fast"}, "learning_rate='fast' must be a number"),
    ({"learning_rate": float("nan")}, "learning_rate=nan must be"),
    ({"adam_beta1": 1.0}, "adam_beta1=1.0 must be a number from 0 up to"),
    ({"bf16": "yes"}, "bf16='yes' must be true or false"),
    ({"optim": "adamw_troch"}, "optim='adamw_troch' is not one of .*Did you mean 'adamw_torch'"),
    ({"lr_scheduler_type": "cosin"}, "Did you mean 'cosine'"),
    ({"save_strategy": "step"}, "Did you mean 'steps'"),
    ({"max_steps": 0, "num_train_epochs": 0}, "num_train_epochs=0 must be a positive number"),
    ({"max_steps": 2.5}, "max_steps=2.5 must be an integer"),
    ({"seed": -1}, "seed=-1 must be an integer"),
    ({"seed": None}, "seed=None must be an integer"),
    ({"save_total_limit": 0}, "save_total_limit=0 must be a positive integer or None"),
    ({"logging_steps": 1.5}, "logging_steps=1.5 must be a whole number of steps"),
    ({"save_steps": 0}, "save_steps=0 must be positive"),
    ({"bf16": True, "fp16": True}, "bf16 and fp16 are different precisions"),
    ({"bf16": True, "torch_autocast": "bf16"}, "bf16 and torch_autocast=bf16 are different"),
    ({"zero_stage": 4}, "zero_stage=4 must be 0, 1, 2, 3"),
    ({"zero_stage": 0, "offload_optimizer": "cpu"}, "offload_optimizer=cpu needs ZeRO"),
    ({"optim_args": "momentum"}, "'momentum' is not of the form name=value"),
    ({"max_shard_size": "5 apples"}, "max_shard_size='5 apples'"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_each_wrong_value_gives_one_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        TrainingArguments("out", **changes)
    assert len(error.value.problems) == 1


def test_all_wrong_values_are_reported_together() -> None:
    with pytest.raises(ConfigError) as error:
        TrainingArguments("out", seed=-1, optim="x", learning_rate=-1, zero_stage=9)
    assert len(error.value.problems) == 4


def test_derived_values() -> None:
    args = TrainingArguments("~/runs", eval_strategy="steps", logging_steps=7, warmup_steps=0.1, learning_rate="1e-3")  # type: ignore[arg-type]
    assert not str(args.output_dir).startswith("~")
    assert args.eval_steps == 7
    assert args.get_warmup_steps(95) == 10
    assert TrainingArguments("out", warmup_steps=5).get_warmup_steps(95) == 5
    assert args.learning_rate == 1e-3
    assert json.loads(args.to_json_string())["lr_scheduler_type"] == "linear"
    assert TrainingArguments("o", optim_args="a=1, b=True,c=x").optimizer_arguments() == {"a": 1, "b": True, "c": "x"}
    assert TrainingArguments().output_dir == "trainer_output"
