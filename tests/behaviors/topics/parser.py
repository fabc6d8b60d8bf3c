"""HfArgumentParser, as the main functions of scripts use it."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, Optional

from tests.behaviors.api import Api, raised


class Color(Enum):
    """A choice."""

    RED = "red"
    BLUE = "blue"


@dataclass
class ModelArguments:
    """Arguments of a script."""

    model_name_or_path: Optional[str] = field(default="facebook/opt-125m")  # noqa: UP045 - as scripts write it
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code of the model."})
    use_fast: bool = field(default=True, metadata={"help": "Use the fast tokenizer."})
    lora_targets: list[str] = field(default_factory=lambda: ["q_proj"])
    color: Color = Color.RED
    kind: Literal["small", "large"] = "small"
    dropout: float = 0.1


@dataclass
class DataArguments:
    """Arguments with a required one."""

    data_path: str = field(metadata={"help": "Path to the training data."})
    max_samples: int | None = None


def _parse(api: Api, *texts: str, kinds: Any = ModelArguments, **keywords: Any) -> Any:
    return api.HfArgumentParser(kinds).parse_args_into_dataclasses(list(texts), **keywords)


def _values(parsed: Any) -> Any:
    return [vars(item) for item in parsed]


def a_required_argument(api: Api) -> Any:
    def parse() -> Any:
        return _parse(api, kinds=DataArguments)

    try:
        parse()
    except SystemExit as error:
        return error.code
    return "nothing"


def with_training_arguments(api: Api) -> Any:
    texts = [
        "--output_dir",
        "out",
        "--learning_rate",
        "2e-5",
        "--use_cpu",
        "--eval_strategy",
        "epoch",
        "--bf16",
        "False",
    ]
    model, args = _parse(api, *texts, kinds=(ModelArguments, api.TrainingArguments))
    return [vars(model), args.output_dir, args.learning_rate, args.use_cpu, args.eval_strategy, args.bf16]


def json_on_the_command_line(api: Api) -> Any:
    texts = ["--output_dir", "o", "--lr_scheduler_kwargs", '{"num_cycles": 2}', "--report_to", "none", "--use_cpu"]
    (args,) = _parse(api, *texts, kinds=api.TrainingArguments)
    return [args.lr_scheduler_kwargs, args.report_to]


def unknown_arguments_are_refused(api: Api) -> Any:
    try:
        return raised(_parse, api, "--other", "1")
    except SystemExit as error:
        return f"exit {error.code}"


def an_argument_of_another_parser(api: Api) -> Any:
    parser = api.HfArgumentParser(ModelArguments)
    parser.add_argument("--extra", type=int, default=3)
    parsed = parser.parse_args_into_dataclasses(["--extra", "4"])
    return [vars(parsed[0])["dropout"], parsed[1].extra]


def parse_dict_with_unknown_keys(api: Api) -> Any:
    parser = api.HfArgumentParser((ModelArguments,))
    extra = parser.parse_dict({"dropout": 0.5, "x": 1}, allow_extra_keys=True)
    return [raised(parser.parse_dict, {"x": 1}), vars(extra[0])["dropout"]]


def parse_yaml_file(api: Api) -> Any:
    path = api.directory / "args.yaml"
    path.write_text("dropout: 0.75\nkind: large\nlora_targets: [x, y]\n")
    return _values(api.HfArgumentParser(ModelArguments).parse_yaml_file(str(path)))


def arguments_of_the_process(api: Api) -> Any:
    before = sys.argv
    sys.argv = ["train.py", "--dropout", "0.5"]
    try:
        return vars(api.HfArgumentParser(ModelArguments).parse_args_into_dataclasses()[0])["dropout"]
    finally:
        sys.argv = before


def is_an_argparse_parser(api: Api) -> Any:
    parser = api.HfArgumentParser(ModelArguments)
    return [isinstance(parser, argparse.ArgumentParser), parser.parse_args([]).dropout]


def help_names_every_argument(api: Api) -> Any:
    text = api.HfArgumentParser((ModelArguments, DataArguments)).format_help()
    return [f"--{name}" in text for name in ("dropout", "data_path", "no_use_fast", "lora_targets")]


def wrong_values_end_the_process(api: Api) -> Any:
    codes: list[Any] = []
    for texts in (["--dropout", "x"], ["--color", "green"], ["--kind", "medium"], ["--use_fast", "maybe"]):
        try:
            _parse(api, *texts)
            codes.append("nothing")
        except SystemExit as error:
            codes.append(error.code)
    return codes


def a_field_with_an_alias(api: Api) -> Any:
    @dataclass
    class Short:
        learning_rate: float = api.HfArg(default=0.1, aliases=["--lr"])

    return vars(api.HfArgumentParser(Short).parse_args_into_dataclasses(["--lr", "0.5"])[0])
