"""Arguments as plain data: to_dict, JSON, text, trackers' tables."""

from __future__ import annotations

import json
from typing import Any

import torch

from tests.behaviors.api import Api
from tests.behaviors.topics.arguments import _fields_of_the_reference


def to_dict_has_every_field(api: Api) -> Any:
    values = api.arguments().to_dict()
    return [name for name in _fields_of_the_reference() if name not in values]


def to_dict_has_plain_enums(api: Api) -> Any:
    values = api.arguments(eval_strategy="epoch", debug="underflow_overflow").to_dict()
    names = ("eval_strategy", "save_strategy", "optim", "lr_scheduler_type", "hub_strategy", "debug")
    return {name: (type(values[name]).__name__, values[name]) for name in names}


def to_dict_hides_tokens(api: Api) -> Any:
    return api.arguments(hub_token="hf_secret").to_dict()["hub_token"]


def to_dict_is_independent(api: Api) -> Any:
    args = api.arguments()
    args.to_dict()["learning_rate"] = 5.0
    return args.learning_rate


def to_dict_of_accelerator_config(api: Api) -> Any:
    return api.arguments(accelerator_config={"split_batches": True}).to_dict()["accelerator_config"]


def to_dict_writes_dtypes_as_text(api: Api) -> Any:
    args = api.arguments()
    args.lr_scheduler_kwargs = {"dtype": torch.bfloat16, "nested": {"dtype": torch.float32}}
    return args.to_dict()["lr_scheduler_kwargs"]


def arguments_from_a_dict(api: Api) -> Any:
    values = api.arguments(learning_rate=0.25, eval_strategy="epoch").to_dict()
    again = api.TrainingArguments(**values)
    return [again.learning_rate, again.eval_strategy, again.do_eval]


def json_string_round_trip(api: Api) -> Any:
    values = json.loads(api.arguments(learning_rate=0.25, seed=4).to_json_string())
    return {name: values[name] for name in ("learning_rate", "seed", "optim", "report_to", "max_steps")}


def json_string_is_indented(api: Api) -> Any:
    return api.arguments().to_json_string().startswith('{\n  "')


def sanitized_dict_has_simple_types(api: Api) -> Any:
    values = api.arguments().to_sanitized_dict()
    return sorted({type(value).__name__ for value in values.values()})


def sanitized_dict_has_the_batch_sizes(api: Api) -> Any:
    values = api.arguments(per_device_train_batch_size=6).to_sanitized_dict()
    return [values["train_batch_size"], values["eval_batch_size"]]


def sanitized_dict_values(api: Api) -> Any:
    values = api.arguments(eval_strategy="epoch", report_to="tensorboard").to_sanitized_dict()
    names = ("eval_strategy", "report_to", "run_name", "label_names", "learning_rate", "do_train")
    return {name: values[name] for name in names}


def text_names_the_class_and_the_fields(api: Api) -> Any:
    text = str(api.arguments(learning_rate=0.25))
    return [text.startswith("TrainingArguments(\n"), "learning_rate=0.25,\n" in text, "seed=42," in text]


def text_hides_tokens(api: Api) -> Any:
    args = api.arguments(hub_token="hf_secret")
    return ["hf_secret" in str(args), "hf_secret" in repr(args), "hub_token=<HUB_TOKEN>" in str(args)]


def text_is_sorted(api: Api) -> Any:
    lines = [line.split("=")[0] for line in str(api.arguments()).splitlines()[1:-1]]
    return lines == sorted(lines)


def repr_is_str(api: Api) -> Any:
    args = api.arguments()
    return repr(args) == str(args)
