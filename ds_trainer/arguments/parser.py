"""``HfArgumentParser``: dataclasses to command line, and back from words, mappings, JSON and YAML files.

The interface is that of transformers' parser of the same name. Two things differ on purpose: only what was given goes
to the dataclass, so that it can tell given values from defaults; and wrong input ends in one :class:`ConfigError` with
all problems instead of a usage text and exit code 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shlex
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_trainer.arguments.construction import ArgumentsType
from ds_trainer.arguments.parser_values import Wrong, accepts_list, converter, is_switch, metavar
from ds_trainer.arguments.renamed import RENAMED, name_as_given
from ds_trainer.arguments.typed import WrongType, read_as
from ds_trainer.arguments.yaml_reader import read_yaml
from ds_trainer.utils.errors import ConfigError, did_you_mean
from ds_trainer.utils.files import read_users_text

_COMMAND_LINE = "command line"
_LONGEST_DEFAULT = 24


def HfArg(
    *,
    aliases: str | list[str] | None = None,
    help: str | None = None,
    default: Any = dataclasses.MISSING,
    default_factory: Any = dataclasses.MISSING,
    metadata: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """A dataclass field with other flags and a help text for the command line.

    Args:
        aliases: other flags, such as ``"-e"``.
        help: what ``--help`` says.
        default: default value; without one (and without ``default_factory``) the argument is required.
        default_factory: makes the default value.
        metadata: further metadata of the field.
        **kwargs: for ``dataclasses.field``.
    """
    known = dict(metadata or {})
    known.update({name: value for name, value in (("aliases", aliases), ("help", help)) if value is not None})
    return dataclasses.field(metadata=known, default=default, default_factory=default_factory, **kwargs)


class HfArgumentParser(argparse.ArgumentParser):
    """Makes dataclass objects from command lines, mappings and files.

    Args:
        dataclass_types: a dataclass, or several, whose fields become flags; ``--help`` groups them by topic: that of
            :meth:`TrainingArguments.topics`, or ``topic`` in a field's metadata.
        **kwargs: for :class:`argparse.ArgumentParser`. Abbreviated flags are off unless asked for.

    More arguments may be added in argparse's way; they come back as a namespace after the objects.
    """

    def __init__(self, dataclass_types: Any = None, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", _Formatter)
        super().__init__(**kwargs)
        types = [] if dataclass_types is None else dataclass_types
        self.dataclass_types: list[Any] = [types] if dataclasses.is_dataclass(types) else list(types)
        self._topics: dict[str, Any] = {}
        self._hints: dict[Any, dict[str, Any]] = {}
        for cls in self.dataclass_types:
            self._hints[cls] = typing.get_type_hints(cls)
            for field in dataclasses.fields(cls):
                if field.init:
                    self._add_field(cls, field)
            if isinstance(cls, ArgumentsType):
                self._add_old_names(cls)

    def error(self, message: str) -> typing.NoReturn:
        """What argparse itself finds wrong. Raises ConfigError."""
        raise ConfigError(f"{_COMMAND_LINE}: {message}.")

    # -- declaring ------------------------------------------------------------------------------------------------

    def _add_field(self, cls: Any, field: dataclasses.Field[Any]) -> None:
        metadata, hint = dict(field.metadata), self._hints[cls][field.name]
        aliases = metadata.get("aliases", [])
        flags = [*_spellings(f"--{field.name}"), *([aliases] if isinstance(aliases, str) else aliases)]
        options: dict[str, Any] = {
            "dest": field.name,
            "default": argparse.SUPPRESS,
            "type": converter(hint, f"--{field.name}"),
            "help": _help(field),
            "metavar": metadata.get("metavar", metavar(hint)),
        }
        if is_switch(hint):
            options.update(nargs="?", const=True)
        elif accepts_list(hint):
            options.update(nargs="+")
        options.update({name: metadata[name] for name in ("nargs", "const") if name in metadata})
        group = self._group(
            getattr(cls, "_argument_group_name", None)
            or metadata.get("topic")
            or self._topic_of(cls, field)
            or cls.__name__
        )
        group.add_argument(*flags, **options)
        if field.default is True and is_switch(hint):
            off = {"dest": field.name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
            group.add_argument(*_spellings(f"--no_{field.name}"), action="store_false", **off)

    @staticmethod
    def _topic_of(cls: Any, field: dataclasses.Field[Any]) -> str | None:
        topics = cls.topics() if isinstance(cls, ArgumentsType) else {}  # type: ignore[attr-defined]
        return topics.get(field.name)

    def _add_old_names(self, cls: Any) -> None:
        taken = set(self._option_string_actions)
        for name, row in RENAMED.items():
            if f"--{name}" not in taken:
                options: dict[str, Any] = {"nargs": "?", "const": True} if is_switch(row.hint) else {}
                self.add_argument(
                    *_spellings(f"--{name}"),
                    dest=name,
                    default=argparse.SUPPRESS,
                    type=converter(row.hint, f"--{name}"),
                    help=argparse.SUPPRESS,
                    **options,
                )

    def _group(self, title: str) -> Any:
        if title not in self._topics:
            self._topics[title] = self.add_argument_group(title)
        return self._topics[title]

    # -- parsing --------------------------------------------------------------------------------------------------

    def parse_args_into_dataclasses(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,
        look_for_args_file: bool = True,
        args_filename: str | None = None,
        args_file_flag: str | None = None,
    ) -> tuple[Any, ...]:
        """Objects of the dataclasses from the words of a command line.

        Args:
            args: the words; default: those of the process.
            return_remaining_strings: give unknown words back as a last element instead of refusing them.
            look_for_args_file: words in a file beside the script, with its name and the suffix ``.args``, come first.
            args_filename: such a file by name.
            args_file_flag: a flag that names such files on the command line.

        Returns:
            The objects in the order of the dataclasses; a namespace if arguments of other kinds were added; the
            remaining words if asked for. Where an argument is given twice the last one counts.

        Raises:
            ConfigError: all that is wrong, at once.
        """
        words = list(sys.argv[1:] if args is None else args)
        words = _words_of_files(words, look_for_args_file, args_filename, args_file_flag) + words
        if args_file_flag:
            words = _without_flag(words, args_file_flag)
        namespace, remaining = self.parse_known_args(words)
        given = vars(namespace)
        problems = []
        for name, value in list(given.items()):
            wrong = [
                part.problem for part in (value if isinstance(value, list) else [value]) if isinstance(part, Wrong)
            ]
            if wrong:
                problems += wrong
                del given[name]
        if remaining and not return_remaining_strings:
            problems += [self._unknown_word(word) for word in remaining if word.startswith("-")] or [
                f"{_COMMAND_LINE}: {' '.join(remaining)} belongs to no argument."
            ]
        blamed = {re.split(r"\W+", problem.partition("--")[2])[0] for problem in problems}
        found, rest = self._build(given, dict.fromkeys(given, _COMMAND_LINE), problems, blamed)
        extra = (argparse.Namespace(**rest),) if rest else ()
        return (*found, *extra, remaining) if return_remaining_strings else (*found, *extra)

    def parse_dict(self, args: Mapping[str, Any], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Objects of the dataclasses from a mapping of field names to values.

        Args:
            args: the values.
            allow_extra_keys: ignore keys that no dataclass has.

        Raises:
            ConfigError: unknown keys, or what a dataclass refuses.
        """
        return self._from_values(dict(args), dict.fromkeys(args, "argument"), [], allow_extra_keys)

    def parse_json_file(self, json_file: str | os.PathLike[str], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Like :meth:`parse_dict`, from a JSON file. Raises ConfigError also when it cannot be read."""
        name = os.fspath(json_file)
        try:
            values = json.loads(read_users_text(name, name, "JSON file"))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{name}:{error.lineno}:{error.colno}: no JSON: {error.msg}.") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{name}: a mapping of argument names to values is expected.")
        return self._from_values(values, dict.fromkeys(values, name), [], allow_extra_keys)

    def parse_yaml_file(self, yaml_file: str | os.PathLike[str], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Like :meth:`parse_dict`, from a YAML file. Raises ConfigError also when it cannot be read."""
        name = os.fspath(yaml_file)
        root, problems = read_yaml(read_users_text(name, name, "YAML file"), name)
        if not isinstance(root.value, dict):
            raise ConfigError(f"{root.where}: a mapping of argument names to values is expected.")
        hints = {key: hint for cls in self.dataclass_types for key, hint in self._hints[cls].items()}
        hints = {**{old: row.hint for old, row in RENAMED.items()}, **hints}
        values: dict[str, Any] = {}
        for key, entry in root.value.items():
            try:
                values[key] = read_as(entry, hints.get(key, Any))
            except WrongType as error:
                problems.append(f"{entry.where}: {key}: {error}.")
        places = {key: entry.where for key, entry in root.value.items()}
        return self._from_values(values, places, problems, allow_extra_keys)

    # -- building -------------------------------------------------------------------------------------------------

    def _from_values(
        self, values: dict[str, Any], places: dict[str, str], problems: list[str], allow_extra: bool
    ) -> tuple[Any, ...]:
        known = [name for cls in self.dataclass_types for name in _accepted(cls)]
        unknown = [name for name in values if name not in known]
        if not allow_extra:
            problems = problems + [
                f"{places[name]}: unknown argument '{name}'.{did_you_mean(name, known)}" for name in unknown
            ]
        given = {name: value for name, value in values.items() if name in known}
        return tuple(self._build(given, places, problems, set())[0])

    def _build(
        self, given: dict[str, Any], places: dict[str, str], problems: list[str], blamed: set[str]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The objects, and what of ``given`` belongs to none of them."""
        objects, rest = [], dict(given)
        for cls in self.dataclass_types:
            values = {name: rest.pop(name) for name in _accepted(cls) if name in rest}
            missing = [
                field.name
                for field in dataclasses.fields(cls)
                if field.init
                and field.name not in (*values, *blamed)
                and field.default is dataclasses.MISSING
                and field.default_factory is dataclasses.MISSING
            ]
            if missing:
                problems = problems + [f"--{name} is required ({cls.__name__})." for name in missing]
                continue
            try:
                made = cls(**values)
            except ConfigError as error:
                problems = problems + [_with_place(problem, values, places) for problem in error.problems]
                continue
            except TypeError:
                if not problems:  # otherwise what is missing has been blamed
                    raise
                continue
            origins = getattr(made, "origins", None)
            if isinstance(origins, dict):
                keys = {name: name_as_given(name, values) for name in origins}
                origins.update({name: places[key] for name, key in keys.items() if key is not None})
            objects.append(made)
        if problems:
            raise ConfigError(problems)
        return objects, rest

    def _unknown_word(self, word: str) -> str:
        flag = word.partition("=")[0]
        flags = [known for known in self._option_string_actions if "-" not in known.removeprefix("--")]
        near = did_you_mean(flag.replace("-", "_").replace("__", "--", 1), flags)
        return f"{_COMMAND_LINE}: unknown argument {flag}.{near}"


class _Formatter(argparse.HelpFormatter):
    """Help texts in a column that leaves room for long flags."""

    def __init__(self, prog: str, **kwargs: Any) -> None:
        super().__init__(prog, max_help_position=40, **kwargs)

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any) -> str:
        """One line: a hundred flags in brackets tell nobody anything."""
        return f"usage: {usage or f'{self._prog} [--argument VALUE ...]'}\n\n"

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """The flag once, with underscores; the spelling with hyphens goes without saying."""
        if not action.option_strings or not action.option_strings[0].startswith("--"):
            return super()._format_action_invocation(action)
        flags = [flag for flag in action.option_strings if "-" not in flag.removeprefix("--") or len(flag) == 2]
        return ", ".join(flags) + ("" if action.nargs == 0 else f" {action.metavar or 'VALUE'}")


def _accepted(cls: Any) -> list[str]:
    """Names that the constructor of a dataclass takes."""
    names = [field.name for field in dataclasses.fields(cls) if field.init]
    return [*names, *(old for old in RENAMED if old not in names)] if isinstance(cls, ArgumentsType) else names


def _spellings(flag: str) -> list[str]:
    """A flag with underscores, and with hyphens."""
    return list(dict.fromkeys([flag, f"--{flag.removeprefix('--').replace('_', '-')}"]))


def _help(field: dataclasses.Field[Any]) -> str:
    text = str(field.metadata.get("help", "")).replace("%", "%%").replace("%%%%", "%%")
    if field.default is None:
        default = ""
    elif field.default is dataclasses.MISSING:
        default = "" if field.default_factory is not dataclasses.MISSING else " (required)"
    else:
        shown = str(getattr(field.default, "value", field.default))
        default = f" (default: {shown})" if len(shown) <= _LONGEST_DEFAULT else ""
    return (text + default.replace("%", "%%")).strip()


def _with_place(problem: str, values: dict[str, Any], places: dict[str, str]) -> str:
    match = re.match(r"(\w+)\W", problem)
    key = name_as_given(match.group(1), values) if match else None
    place = places[key] if key is not None else None
    return f"{place}: {problem}" if place not in (None, "argument") else problem


def _words_of_files(words: list[str], look: bool, filename: str | None, flag: str | None) -> list[str]:
    files = [filename] if filename else []
    beside = Path(sys.argv[0]).with_suffix(".args") if sys.argv[0] else None
    if not filename and look and beside is not None and beside.is_file():
        files.append(str(beside))
    if flag:
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        finder.add_argument(flag, action="append", default=[], dest="files")
        files += finder.parse_known_args(words)[0].files
    return [word for name in files for word in shlex.split(read_users_text(name, name, "text file"), comments=True)]


def _without_flag(words: list[str], flag: str) -> list[str]:
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument(flag, action="append")
    return finder.parse_known_args(words)[1]
