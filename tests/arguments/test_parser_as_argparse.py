"""HfArgumentParser to scripts and subclasses that treat it as what it is: an argparse parser."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from ds_trainer import ConfigError, HfArgumentParser, TrainingArguments
from tests.arguments.test_parser import Colour, Data, Model


@dataclass
class Limits:
    mode: str = field(default="fast", metadata={"help": "How.", "choices": ["fast", "slow"]})
    when: Literal["now", "later"] | None = None
    colour_or_text: Colour | str = "blue"
    sizes: dict[str, int] | None = None


def actions_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The first action of every dest."""
    return {action.dest: action for action in reversed(parser._actions)}


def objects(parser: HfArgumentParser, line: str = "") -> tuple[Any, ...]:
    return parser.parse_args_into_dataclasses(line.split(), look_for_args_file=False)


# -- what argparse tells -----------------------------------------------------------------------------------------------


def test_actions_are_those_of_transformers() -> None:
    import transformers

    ours = actions_of(HfArgumentParser([Model, Data]))
    reference = actions_of(transformers.HfArgumentParser([Model, Data]))
    assert ours.keys() == reference.keys()
    for name, action in reference.items():
        found = ours[name]
        listed = [list(one.choices) if one.choices else None for one in (found, action)]
        assert listed[0] == listed[1], name
        assert (found.default, found.required, found.option_strings) == (
            action.default,
            action.required,
            action.option_strings,
        ), name
        if action.type in (int, float, str):
            assert found.type is action.type, name
        elif action.type is not None:
            text = {"colour": "blue", "kind": "3"}.get(name, "no")
            assert found.type(text) == action.type(text), name  # type: ignore[operator]
        help_text = action.help or found.help  # without a text we show the default
        assert found.help == (help_text.replace("100%", "100%%") if name == "text" else help_text), name


def test_every_default_of_the_training_arguments_is_told() -> None:
    parser = HfArgumentParser(TrainingArguments)
    namespace, rest = parser.parse_known_args(["--unknown", "3"])
    assert rest == ["--unknown", "3"]
    fields = dataclasses.fields(TrainingArguments)
    assert vars(namespace).keys() == {item.name for item in fields}
    for item in fields:
        missing = item.default_factory is dataclasses.MISSING
        default = item.default if missing else item.default_factory()  # type: ignore[misc]
        assert (parser.get_default(item.name), getattr(namespace, item.name)) == (default, default), item.name
        assert type(getattr(namespace, item.name)) is type(default), item.name


def test_closed_lists() -> None:
    parser = HfArgumentParser([Limits, TrainingArguments])
    found = actions_of(parser)
    assert found["mode"].choices == ["fast", "slow"]
    assert found["when"].choices == ["now", "later"]
    assert found["colour_or_text"].choices == ["red", "blue"]
    assert found["sizes"].choices is None and found["report_to"].choices is None
    assert "adafactor" in found["optim"].choices  # type: ignore[operator]
    with pytest.raises(ConfigError, match=r"command line: --mode medium: expected one of 'fast', 'slow'\."):
        objects(parser, "--mode medium")
    with pytest.raises(ConfigError, match=r"command line: --when never: expected one of 'now', 'later' or null"):
        parser.parse_args(["--when", "never"])


def test_the_help_shows_changed_defaults() -> None:
    parser = HfArgumentParser([Model, Limits], prog="train.py")
    assert "(default: x)" in parser.format_help() and "How. (default: fast)" in parser.format_help()
    parser.set_defaults(text="5%", mode="slow")
    assert "(default: 5%)" in parser.format_help() and "How. (default: slow)" in parser.format_help()
    shown = HfArgumentParser(Limits, formatter_class=argparse.ArgumentDefaultsHelpFormatter).format_help()
    assert shown.count("default: fast") == 1


def test_plain_argparse_requires_and_converts() -> None:
    parser = HfArgumentParser(Model)
    with pytest.raises(ConfigError, match=r"the following arguments are required: --name\.$"):
        parser.parse_args([])
    assert parser.parse_args(["--name", "n", "--rate", "1e-3", "--no_other_flag"]).other_flag is False
    with pytest.raises(ConfigError) as error:
        parser.parse_args(["--name", "n", "--width", "w", "--rate", "r"])
    assert [problem.split(": expected")[0] for problem in error.value.problems] == [
        "command line: --width w",
        "command line: --rate r",
    ]
    assert parser.parse_args(["--name", "n"]).width == 8  # nothing of the parse before is left


# -- other defaults ----------------------------------------------------------------------------------------------------


def test_set_defaults_count_as_given() -> None:
    parser = HfArgumentParser([Data, TrainingArguments])
    parser.set_defaults(learning_rate=5e-5, path="p", remove_unused_columns=False, lr_scheduler_kwargs={"a": 1}, main=3)
    assert parser.get_default("path") == "p"
    data, args, rest = objects(parser, "--path q --bf16")
    assert data.path == "q" and rest == argparse.Namespace(main=3)
    assert (args.remove_unused_columns, args.lr_scheduler_kwargs) == (False, {"a": 1})
    names = ("learning_rate", "remove_unused_columns", "bf16", "fp16")  # the first has the value of the field
    assert [args.where(name) for name in names] == ["parser default", "parser default", "command line", "default"]
    assert not HfArgumentParser(TrainingArguments).parse_args_into_dataclasses([])[0].given("learning_rate")


@pytest.mark.filterwarnings("ignore:warmup_ratio:FutureWarning")
def test_text_defaults_are_converted_and_wrong_ones_named() -> None:
    parser = HfArgumentParser([Model, TrainingArguments])
    parser.set_defaults(name="n", learning_rate="1e-3", warmup_ratio=0.1, width="w", optim="adamw_troch")
    actions_of(parser)["name"].required = False
    with pytest.raises(ConfigError) as error:
        objects(parser)
    assert [problem.split(" is not")[0] for problem in error.value.problems] == [
        "parser default: --width w: expected int, got 'w' (str).",
        "parser default: optim='adamw_troch'",
    ]
    parser.set_defaults(width="3", optim="sgd")
    with pytest.warns(FutureWarning, match="warmup_ratio"):
        model, args = objects(parser)
    assert (model.name, model.width, args.learning_rate, args.warmup_steps, args.optim) == ("n", 3, 1e-3, 0.1, "sgd")
    assert args.where("warmup_steps") == "parser default"


def test_a_cleared_requirement_leaves_the_default() -> None:
    parser = HfArgumentParser(Model)
    actions_of(parser)["name"].required = False
    assert objects(parser)[0].name is None
    assert objects(parser, "--name n")[0].name == "n"


def test_further_arguments_may_set_a_field() -> None:
    parser = HfArgumentParser(TrainingArguments)
    parser.add_argument("--lr", dest="learning_rate", type=float)
    parser.add_argument("--quiet", dest="disable_tqdm", action="store_true", default=None)
    (args,) = objects(parser, "--lr 0.5")
    assert (args.learning_rate, args.where("disable_tqdm")) == (0.5, "default")
    assert objects(parser)[0].learning_rate == 5e-5
    with pytest.raises(ConfigError, match="invalid choice: 'c'"):
        parser.add_argument("--own", choices=["a", "b"])
        objects(parser, "--own c")


# -- subclasses --------------------------------------------------------------------------------------------------------


class ParserWithConfig(HfArgumentParser):
    """The manner of TRL's TrlParser: values of a configuration file become defaults of the parser."""

    def parse_with(self, config: dict[str, Any], line: str) -> tuple[Any, ...]:
        remaining = [f"--{name}" for name in config if name not in set(self._apply(self, config))]
        self.set_defaults(**{name: value for name, value in config.items() if f"--{name}" not in remaining})
        *found, rest = self.parse_args_into_dataclasses(line.split(), return_remaining_strings=True)
        return (*found, remaining + rest)

    def _apply(self, parser: argparse.ArgumentParser, config: dict[str, Any]) -> Iterator[str]:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for inner in action.choices.values():
                    yield from self._apply(inner, config)
            elif action.dest in config:
                action.default, action.required = config[action.dest], False
                yield action.dest


def test_a_parser_with_configuration_files() -> None:
    config = {"name": "c", "width": 3, "learning_rate": "2e-5", "gradient_checkpointing": True, "nobody": 1}
    config["dataloader_drop_last"] = "true"
    parser = ParserWithConfig([Model, TrainingArguments])
    model, args, rest = parser.parse_with(config, "--width 4 --unknown 1 --no_remove_unused_columns")
    assert (model.name, model.width, args.learning_rate, args.activation_checkpointing) == ("c", 4, 2e-5, True)
    assert args.dataloader_drop_last is True and args.remove_unused_columns is False
    assert rest == ["--nobody", "--unknown", "1"]
    assert args.where("learning_rate") == "parser default" and not args.given("weight_decay")


def test_subcommands() -> None:
    """TRL's command line: one parser, and one per subcommand that it makes with ``dataclass_types``."""
    parser = ParserWithConfig(prog="tool", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", parser_class=ParserWithConfig)
    commands.add_parser("train", dataclass_types=[Model, TrainingArguments])
    namespace, rest = parser.parse_with({"width": 3}, "train --name n --num_processes 2")
    assert (namespace.command, namespace.name, namespace.width, namespace.rate) == ("train", "n", 3, 0.1)
    assert rest == ["--num_processes", "2"]
    with pytest.raises(ConfigError, match="required: --name"):
        parser.parse_with({}, "train")


def test_subclasses_add_and_parse_in_their_own_way() -> None:
    class Own(HfArgumentParser):
        def _add_dataclass_arguments(self, dtype: Any) -> None:
            if dtype is Data:
                self.add_argument("--path", default="own", type=str.upper)
                self.add_argument("--keys", nargs="*", default=["k"])
            else:
                super()._add_dataclass_arguments(dtype)

        def parse_args_into_dataclasses(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
            return tuple(reversed(super().parse_args_into_dataclasses(*args, **kwargs)))

        def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
            found, rest = super().parse_known_args(args, namespace)
            if not found.flag:
                found.limit = 7
            return found, rest

    parser = Own([Model, Data])
    parser._add_dataclass_arguments(Limits)
    rest, data, model = objects(parser, "--name n --path p --mode slow")
    assert (model.name, model.limit) == ("n", 7) and (data.path, data.keys) == ("P", ["k"])
    assert (rest.mode, rest.colour_or_text) == ("slow", "blue")
    assert objects(parser, "--name n --flag")[2].limit is None


def test_a_plain_parser_may_have_it_as_parent() -> None:
    child = argparse.ArgumentParser(parents=[HfArgumentParser([Model, TrainingArguments], add_help=False)])
    namespace = child.parse_args(["--name", "n", "--width", "3", "--no_other_flag", "--colour", "blue"])
    assert (namespace.width, namespace.other_flag, namespace.colour, namespace.rate) == (3, False, "blue", 0.1)
    assert child.parse_known_args(["--name", "n", "--max_steps", "3"])[0].max_steps == 3
    with pytest.raises(SystemExit):
        child.parse_args(["--name", "n", "--flag", "perhaps"])
