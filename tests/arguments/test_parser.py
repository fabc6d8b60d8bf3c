"""HfArgumentParser: the same results as transformers' parser; wrong input as one error."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Optional

import pytest

from ds_trainer.arguments.parser import HfArg, HfArgumentParser
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.utils.errors import ConfigError
from tests.support.transformers_version import needs_the_reference


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Model:
    name: str
    width: int = 8
    rate: float = 0.1
    colour: Colour = Colour.RED
    kind: Literal["big", "small", 3] = "big"
    flag: bool = False
    other_flag: bool = True
    maybe: Optional[bool] = None  # noqa: UP045  # the older spelling is to be understood too
    limit: int | None = None
    words: list[str] = field(default_factory=lambda: ["a"])
    numbers: list[int] | None = None
    text: str = HfArg(default="x", aliases=["--example", "-e"], help="100% text")
    derived: int = field(init=False, default=3)


@dataclass
class Data:
    path: str | None = None
    keys: list[str] = field(default_factory=list)


LINES = [
    "--name n",
    "--name n --width 3 --rate 1e-3",
    "--name n --flag",
    "--name n --flag true --other_flag false",
    "--name n --no_other_flag",
    "--name n --no-other-flag --other-flag",
    "--name n --maybe true --limit 7",
    "--name n --maybe no",
    "--name n --kind small",
    "--name n --kind 3",
    "--name n --words x y z --numbers 1 2",
    "--name n --words x",
    "-e hello --name n",
    "--example hello --name n --name again",
    "--name=n --width=4 --path p --keys k1 k2",
]


@pytest.mark.parametrize("line", LINES)
def test_parsed_values_are_those_of_transformers(line: str) -> None:
    import transformers

    ours = HfArgumentParser([Model, Data]).parse_args_into_dataclasses(line.split(), look_for_args_file=False)
    reference = transformers.HfArgumentParser([Model, Data]).parse_args_into_dataclasses(
        line.split(), look_for_args_file=False
    )
    assert [as_plain(one) for one in ours] == [as_plain(other) for other in reference]


def as_plain(value: Any) -> dict[str, Any]:
    return {name: getattr(entry, "value", entry) for name, entry in dataclasses.asdict(value).items()}


def test_enums_by_value() -> None:
    (model,) = HfArgumentParser(Model).parse_args_into_dataclasses(["--name", "n", "--colour", "blue"])
    assert getattr(model.colour, "value", model.colour) == "blue"


def test_remaining_and_additional_arguments() -> None:
    parser = HfArgumentParser(Data)
    parser.add_argument("--verbose", action="store_true")
    data, namespace, rest = parser.parse_args_into_dataclasses(
        ["--path", "p", "--verbose", "--unknown", "3"], return_remaining_strings=True
    )
    assert data.path == "p" and namespace.verbose is True and rest == ["--unknown", "3"]
    data, namespace = parser.parse_args_into_dataclasses(["--path", "p"])
    assert namespace.verbose is False


def test_files_of_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py"), "--width", "5"])
    (tmp_path / "train.args").write_text("--name 'from a file' --width 2  # a comment\n")
    (model,) = HfArgumentParser(Model).parse_args_into_dataclasses()
    assert (model.name, model.width) == ("from a file", 5)  # the command line comes last and counts
    (tmp_path / "more.args").write_text("--rate 0.5")
    argv = ["--name", "n", "--args", str(tmp_path / "more.args")]
    (model,) = HfArgumentParser(Model).parse_args_into_dataclasses(
        argv, look_for_args_file=False, args_file_flag="--args"
    )
    assert (model.name, model.rate) == ("n", 0.5)
    (model,) = HfArgumentParser(Model).parse_args_into_dataclasses([], args_filename=str(tmp_path / "train.args"))
    assert model.name == "from a file"


def test_dicts_and_files(tmp_path: Path) -> None:
    values = {"name": "n", "width": 3, "keys": ["a"]}
    parser = HfArgumentParser([Model, Data])
    model, data = parser.parse_dict(values)
    assert (model.name, model.width, data.keys) == ("n", 3, ["a"])
    with pytest.raises(ConfigError, match=r"argument: unknown argument 'widht'\. Did you mean 'width'"):
        parser.parse_dict({"name": "n", "widht": 3})
    model, _ = parser.parse_dict({"name": "n", "widht": 3}, allow_extra_keys=True)
    assert model.width == 8
    (tmp_path / "a.json").write_text(json.dumps(values))
    (tmp_path / "a.yaml").write_text("name: n\nwidth: 3\nrate: 1e-3\nkeys: [a]\n")
    assert parser.parse_json_file(tmp_path / "a.json")[0].width == 3
    assert parser.parse_yaml_file(tmp_path / "a.yaml")[0].rate == 1e-3


# -- with TrainingArguments --------------------------------------------------------------------------------------


def parse(line: str) -> TrainingArguments:
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(line.split(), look_for_args_file=False)
    return args  # type: ignore[no-any-return]


@needs_the_reference
def test_training_arguments_are_the_same_as_those_of_transformers() -> None:
    import transformers

    line = (
        "--output_dir o --learning_rate 2e-5 --bf16 --use_cpu --num_train_epochs 2 --warmup_steps 0.1 "
        "--label_names a b --lr_scheduler_type cosine --no_remove_unused_columns --logging_steps 10 "
        "--eval_strategy epoch "
        "--dataloader_num_workers 2 --dataloader_prefetch_factor 4 --max_grad_norm 0 --activation_checkpointing"
    )
    (reference,) = transformers.HfArgumentParser(transformers.TrainingArguments).parse_args_into_dataclasses(
        line.split(), look_for_args_file=False
    )
    ours = parse(line)
    known = {item.name for item in dataclasses.fields(transformers.TrainingArguments)} - {"accelerator_config"}
    different = {
        name: (getattr(ours, name), getattr(reference, name))
        for name in known
        if getattr(getattr(ours, name), "value", getattr(ours, name))
        != getattr(getattr(reference, name), "value", getattr(reference, name))
    }
    assert different == {}


def test_the_parser_of_transformers_accepts_our_arguments() -> None:
    """A script may change one import and keep the other."""
    import transformers

    argv = ["--output_dir", "o", "--learning_rate", "2e-5", "--bf16", "--zero_stage", "2", "--optim", "sgd"]
    (args,) = transformers.HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
        argv, look_for_args_file=False
    )
    assert isinstance(args, TrainingArguments)
    assert (args.learning_rate, args.bf16, args.zero_stage, args.optim) == (2e-5, True, 2, "sgd")


def test_sources_of_values(tmp_path: Path) -> None:
    args = parse("--output_dir o --bf16")
    assert args.where("bf16") == "command line" and args.where("fp16") == "default"
    (tmp_path / "a.yaml").write_text("output_dir: o\n\nlearning_rate: 1e-3\n")
    (args,) = HfArgumentParser(TrainingArguments).parse_yaml_file(tmp_path / "a.yaml")
    assert args.where("learning_rate") == f"{tmp_path}/a.yaml:3"


def test_old_names_and_mappings() -> None:
    with pytest.warns(FutureWarning, match="eval_strategy"):
        args = parse("--output_dir o --evaluation_strategy epoch")
    assert args.eval_strategy == "epoch" and args.where("eval_strategy") == "command line"
    with pytest.warns(FutureWarning), pytest.raises(ConfigError, match="command line: eval_strategy='epch'"):
        parse("--output_dir o --evaluation_strategy epch")
    with pytest.warns(FutureWarning, match="use_cpu"):
        assert parse("--output_dir o --no_cuda").use_cpu is True
    assert parse('--output_dir o --lr_scheduler_kwargs {"a":1}').lr_scheduler_kwargs == {"a": 1}
    assert parse('--output_dir o --deepspeed {"bf16":{}}').deepspeed == {"bf16": {}}
    assert parse("--output_dir o --deepspeed ds.json").deepspeed == "ds.json"
    assert parse("--output_dir 123").output_dir == "123"


WRONG = [
    ("--learnig_rate 1", "command line: unknown argument --learnig_rate. Did you mean '--learning_rate'?"),
    ("--learning-rte 1", "command line: unknown argument --learning-rte. Did you mean '--learning_rate'?"),
    ("--seed x", "command line: --seed x: expected int, got 'x' (str)."),
    ("--max_steps 1.5", "command line: --max_steps 1.5: expected int, got 1.5 (float)."),
    ("--bf16 maybe", "command line: --bf16 maybe: expected bool, got 'maybe' (str)."),
    ("--learning_rate", "command line: argument --learning_rate/--learning-rate: expected one argument."),
    ("stray", "command line: stray belongs to no argument."),
    ("--optim adamw_troch", "command line: optim='adamw_troch' is not one of"),
    ("--seed -1", "command line: seed=-1 must be an integer that is not negative."),
    ("--fsdp full_shard", "command line: fsdp=full_shard makes no sense under a DeepSpeed engine."),
]


@pytest.mark.parametrize(("line", "message"), WRONG)
def test_wrong_command_line_arguments_are_rejected(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(f"--output_dir o {line}")
    assert len(error.value.problems) == 1 and message in error.value.problems[0]


def test_all_wrong_command_line_arguments_are_reported_together() -> None:
    parser = HfArgumentParser([Model, TrainingArguments])
    with pytest.raises(ConfigError) as error:
        parser.parse_args_into_dataclasses(
            ["--seed", "x", "--widht", "3", "--zero_stage", "9"], look_for_args_file=False
        )
    assert [problem.split(":")[0] for problem in error.value.problems] == ["command line"] * 2 + [
        "--name is required (Model).",
        "command line",
    ]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{'a': 1}", "a.json:1:2: not valid JSON"),
        ("a.json", "[1]", "a.json: expected a mapping of argument names"),
        ("a.yaml", "output_dir: o\nseed: [1]\n", "a.yaml:2: seed: expected int"),
        ("a.yaml", "output_dir: o\nsede: 1\n", "a.yaml:2: unknown argument 'sede'. Did you mean 'seed'?"),
        ("a.yaml", "output_dir: o\noptim: adamx\n", "a.yaml:2: optim='adamx' is not one of"),
        ("a.yaml", "- 1\n", "a mapping of argument names"),
    ],
)
def test_wrong_files(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    parser = HfArgumentParser(TrainingArguments)
    read = parser.parse_json_file if name.endswith("json") else parser.parse_yaml_file
    with pytest.raises(ConfigError) as error:
        read(tmp_path / name)
    assert len(error.value.problems) == 1 and message in str(error.value)


def test_missing_files(tmp_path: Path) -> None:
    parser = HfArgumentParser(TrainingArguments)
    for read in (parser.parse_json_file, parser.parse_yaml_file):
        with pytest.raises(ConfigError, match=r"nowhere does not exist"):
            read(tmp_path / "nowhere")


def test_help_groups_by_topic(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        HfArgumentParser([TrainingArguments, Model], prog="train.py").parse_args(["--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    topics = dict.fromkeys(TrainingArguments.topics().values())
    positions = [text.index(f"\n{title}:\n") for title in topics]
    assert positions == sorted(positions)
    precision = text.split("\nPrecision:\n")[1].split("\n\n")[0]
    assert "--bf16 [BOOL]" in precision and "--learning_rate" not in precision
    assert "100% text" in text and "evaluation_strategy" not in text


def test_the_parser_imports_nothing_heavy() -> None:
    code = (
        "import sys; from ds_trainer import HfArgumentParser, TrainingArguments;"
        "HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(['--output_dir', 'o']);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'deepspeed', 'transformers', 'accelerate')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("text", "value"), [("3", 3), ("500GB", "500GB"), ("1.5 TiB", "1.5 TiB")])
def test_numbers_and_sizes_are_read_alike_everywhere(text: str, value: int | str, tmp_path: Path) -> None:
    parser = HfArgumentParser(TrainingArguments)
    path = tmp_path / "arguments.yaml"
    path.write_text(f"output_dir: out\nsave_total_limit: {text}\n")
    (from_yaml,) = parser.parse_yaml_file(str(path))
    (from_dict,) = parser.parse_dict({"output_dir": "out", "save_total_limit": value})
    (from_line,) = parser.parse_args_into_dataclasses(["--output_dir", "out", "--save_total_limit", text])
    assert [one.save_total_limit for one in (from_yaml, from_dict, from_line)] == [value] * 3
