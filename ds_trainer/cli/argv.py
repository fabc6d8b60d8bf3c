"""Preprocessing of a command line before argparse parses it."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ds_trainer.utils.errors import ConfigError, did_you_mean
from ds_trainer.utils.files import path_problem, shortened

_PATHS = frozenset(
    (
        "PATH",
        "DIR",
        "RECIPE",
        "RECIPE|SCRIPT",
        "SCRIPT",
        "MODEL",
        "RUN",
        "RUN2",
        "SRC",
        "FILE",
        "FILE.svg",
        "YAML",
        "OUT.yaml",
    )
)
"""Placeholders of arguments that are paths, or may be."""

_TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def add_dtype(parser: argparse.ArgumentParser, default: str) -> None:
    """Add ``--dtype``, the type of weights, which becomes the name of one in torch; default: None.

    Args:
        parser: the subcommand's parser.
        default: what None means, for the help.
    """
    parser.add_argument(
        "--dtype", type=_dtype, metavar="TYPE", help=f"type of the weights: {', '.join(_TYPES)}; default: {default}"
    )


def _dtype(text: str) -> str:
    name = _TYPES.get(text, text)
    if name not in _TYPES.values():
        raise argparse.ArgumentTypeError(f"{text!r} is no type of weights; the types are {', '.join(_TYPES)}")
    return name


class Action(NamedTuple):
    """A subcommand of a subcommand (``checkpoint export``): its help text, its arguments, and its function."""

    help: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[..., Any]


def add_actions(
    parser: argparse.ArgumentParser, args: Sequence[str], command: str, actions: Mapping[str, Action]
) -> Iterator[tuple[argparse.ArgumentParser, Action]]:
    """Add the actions of ``command`` to its ``parser``; yields the parser of each, without arguments.

    Raises:
        ConfigError: the first of ``args`` is not an action.
    """
    first = next((arg for arg in args if not arg.startswith("-")), None)
    if first is not None and first not in actions:
        raise unknown_choice("action", first, actions, command)
    subparsers = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, action in actions.items():
        yield subparsers.add_parser(name, help=action.help, description=action.help, allow_abbrev=False), action


def without_local_rank(args: Sequence[str]) -> list[str]:
    """``args`` without ``--local_rank=N``, which the ``deepspeed`` launcher inserts.

    The launcher also sets LOCAL_RANK, which the engine reads.
    """
    return [arg for arg in args if not re.fullmatch(r"--local[_-]rank=\d+", arg)]


def split_overrides(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split ``args`` into other arguments and recipe overrides: ``--a.b value`` and ``--a.b=value``."""
    others: list[str] = []
    overrides: list[str] = []
    position = 0
    while position < len(args):
        arg = args[position]
        is_override = arg.startswith("--") and "." in arg.partition("=")[0]
        takes_next = is_override and "=" not in arg and position + 1 < len(args)
        takes_next = takes_next and not args[position + 1].startswith("--")
        size = 2 if takes_next else 1
        (overrides if is_override else others).extend(args[position : position + size])
        position += size
    return others, overrides


def add_recipe(parser: argparse.ArgumentParser, args: Sequence[str]) -> None:
    """Add the optional positional argument RECIPE, which must come first, to a subcommand called with ``args``.

    Without it all arguments are training arguments, whose values argparse would take for the recipe.
    """
    if not args or not args[0].startswith("-") or {"-h", "--help"} & set(args):
        parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="YAML file; see ds_configs/recipes")
    else:
        parser.set_defaults(recipe=None)


def refuse_misspelled(command: str, unknown: Iterable[str], parser: argparse.ArgumentParser) -> None:
    """Raise an error if an argument that ``parser`` does not know is spelled almost like one of its options.

    Other unknown arguments may belong to the recipe or be training arguments.

    Args:
        command: the subcommand.
        unknown: the arguments that ``parser`` left.
        parser: the subcommand's parser.

    Raises:
        ConfigError: names the option that was probably meant.
    """
    for arg in unknown:
        dashed = arg.partition("=")[0].replace("_", "-")
        if dashed.startswith("--") and (hint := did_you_mean(dashed, list(_options(parser)), cutoff=0.85)):
            raise ConfigError(f"{command}: unknown option {arg!r}.{hint}")


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in _actions(parser):
        yield from action.option_strings


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The arguments of ``parser`` and of its subcommands (``data show``)."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for nested in action.choices.values():
                yield from _actions(nested)


def refuse_impossible_paths(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Raise an error if an argument of ``options`` that is a path cannot be one.

    Raises:
        ConfigError: names the argument.
    """
    problems: dict[str, str] = {}
    for action in _actions(parser):
        if action.dest in problems or (action.metavar not in _PATHS and "--model" not in action.option_strings):
            continue
        given = getattr(options, action.dest, None)
        for path in given if isinstance(given, list) else [given]:
            if isinstance(path, str | os.PathLike) and (problem := path_problem(path)):
                name = action.option_strings[-1] if action.option_strings else action.metavar
                problems[action.dest] = f"{name} {shortened(os.fspath(path), 80)!r} {problem}."
    if problems:
        raise ConfigError(problems.values())


def unknown_choice(kind: str, given: str, choices: Iterable[str], command: str = "") -> ConfigError:
    """The error for a subcommand or action that does not exist, with a suggestion.

    Args:
        kind: ``"subcommand"`` or ``"action"``.
        given: the argument.
        choices: the valid ones.
        command: the subcommand that has the action.
    """
    prefix = f"{command}: " if command else ""
    return ConfigError(
        f"{prefix}unknown {kind} {given!r}.{did_you_mean(given, choices)} Valid {kind}s: {', '.join(choices)}."
    )
