"""``HfArgumentParser``: makes dataclass objects from command lines, mappings, JSON and YAML files.

The interface is that of transformers' parser of the same name. Two differences are intended: only given values are
passed to the dataclass, so that it can distinguish them from defaults; and invalid input raises one
:class:`ConfigError` with all problems, instead of printing a usage text and exiting with code 2.

For scripts and subclasses it is an argparse parser like any other (:mod:`ds_trainer.arguments.parser_actions`).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shlex
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ds_trainer.arguments.compat.renamed_arguments import RENAMED, name_as_given
from ds_trainer.arguments.construction import ArgumentsType, file_problems
from ds_trainer.arguments.overrides import ORIGIN
from ds_trainer.arguments.parser_actions import (
    COMMAND_LINE,
    FieldAction,
    FlagFormatter,
    SwitchOffAction,
    help_of,
    sources_of,
    spellings,
    wrong_values,
)
from ds_trainer.arguments.parser_values import (
    accepts_list,
    argparse_type,
    choices,
    converter,
    is_switch,
    metavar,
    strict,
)
from ds_trainer.arguments.redefined import left_to_others
from ds_trainer.arguments.typed import WrongType, read_as
from ds_trainer.arguments.yaml_reader import read_yaml
from ds_trainer.utils.errors import ConfigError, did_you_mean
from ds_trainer.utils.files import read_user_file, read_user_json
from ds_trainer.utils.logging import one_error_per_job


def HfArg(
    *,
    aliases: str | list[str] | None = None,
    help: str | None = None,
    default: Any = dataclasses.MISSING,
    default_factory: Any = dataclasses.MISSING,
    metadata: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """A dataclass field with aliases and a help text for the command line.

    Args:
        aliases: other flags, such as ``"-e"``.
        help: text for ``--help``.
        default: default value; without one (and without ``default_factory``) the argument is required.
        default_factory: function that makes the default value.
        metadata: further metadata of the field.
        **kwargs: for ``dataclasses.field``.
    """
    known = dict(metadata or {})
    known.update({name: value for name, value in (("aliases", aliases), ("help", help)) if value is not None})
    return dataclasses.field(metadata=known, default=default, default_factory=default_factory, **kwargs)


class HfArgumentParser(argparse.ArgumentParser):
    """Makes dataclass objects from command lines, mappings and files.

    Args:
        dataclass_types: one or more dataclasses whose fields become flags. ``--help`` groups them by topic:
            :meth:`TrainingArguments.topics`, or ``topic`` in a field's metadata.
        **kwargs: for :class:`argparse.ArgumentParser`. Abbreviated flags are off by default.

    Further arguments can be added with ``add_argument``. They are returned as a namespace after the objects.

    ``parse_args`` and ``parse_known_args`` return a namespace with all fields, ``get_default`` the default of a field.
    ``set_defaults``, or an assignment to an action's ``default``, replaces it; such a value counts as given: its source
    in ``origins`` is ``parser default``.
    """

    def __init__(self, dataclass_types: Any = None, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", FlagFormatter)
        super().__init__(**kwargs)
        one_error_per_job()
        types = [] if dataclass_types is None else dataclass_types
        self.dataclass_types: list[Any] = [types] if dataclasses.is_dataclass(types) else list(types)
        self._topics: dict[str, Any] = {}
        self._hints: dict[Any, dict[str, Any]] = {}
        self._collecting = False
        self._left = left_to_others(self.dataclass_types)
        for cls in self.dataclass_types:
            self._add_dataclass_arguments(cls)

    def error(self, message: str) -> typing.NoReturn:
        """Called by argparse for its own errors. Raises ConfigError."""
        raise ConfigError(f"{COMMAND_LINE}: {message}.")

    # -- declaration ------------------------------------------------------------------------------------------------

    def _add_dataclass_arguments(self, dtype: Any) -> None:
        """Add the flags of a dataclass. Subclasses call and override it."""
        for field in dataclasses.fields(dtype):
            if field.init and (dtype, field.name) not in self._left:
                self._add_field(dtype, field)
        if isinstance(dtype, ArgumentsType):
            self._add_old_names(dtype)

    def _add_field(self, cls: Any, field: dataclasses.Field[Any]) -> None:
        metadata, hint = dict(field.metadata), self._hints_of(cls)[field.name]
        aliases = metadata.get("aliases", [])
        flags = [*spellings(f"--{field.name}"), *([aliases] if isinstance(aliases, str) else aliases)]
        convert = converter(hint, f"--{field.name}")
        options: dict[str, Any] = {
            "dest": field.name,
            "convert": convert,
            "type": argparse_type(hint) or strict(convert),
            "choices": choices(hint),
            "help": help_of(field),
            "metavar": metavar(hint),
        }
        if field.default is not dataclasses.MISSING:
            options["default"] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            options["default"] = field.default_factory()
        else:
            options["required"] = True
        if is_switch(hint):
            options.update(nargs="?", const=True)
        elif accepts_list(hint):
            options.update(nargs="+")
        known = ("nargs", "const", "choices", "metavar")
        options.update({name: metadata[name] for name in known if name in metadata}, closed="choices" in metadata)
        group = self._group(
            getattr(cls, "_argument_group_name", None)
            or metadata.get("topic")
            or self._topic_of(cls, field)
            or cls.__name__
        )
        switch = group.add_argument(*flags, action=FieldAction, **options)
        if field.default is True and is_switch(hint):
            off = {"dest": field.name, "default": True, "help": argparse.SUPPRESS, "switch": switch}
            group.add_argument(*spellings(f"--no_{field.name}"), action=SwitchOffAction, **off)

    def _hints_of(self, cls: Any) -> dict[str, Any]:
        if cls not in self._hints:
            self._hints[cls] = typing.get_type_hints(cls)
        return self._hints[cls]

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
                    *spellings(f"--{name}"),
                    action=FieldAction,
                    dest=name,
                    default=argparse.SUPPRESS,
                    convert=converter(row.hint, f"--{name}"),
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
        """Make objects of the dataclasses from a command line.

        Args:
            args: the arguments; default: ``sys.argv[1:]``.
            return_remaining_strings: return unknown arguments as the last element instead of raising.
            look_for_args_file: read arguments from a file next to the script, with the script's name and the suffix
                ``.args``. They come before those of the command line.
            args_filename: name of such a file.
            args_file_flag: flag that names such files on the command line.

        Returns:
            The objects in the order of the dataclasses; a namespace if other arguments were added; the remaining
            arguments if requested. If an argument is given twice, the last value counts.

        Raises:
            ConfigError: with all problems.
        """
        argv = list(sys.argv[1:] if args is None else args)
        argv = args_of_files(argv, look_for_args_file, args_filename, args_file_flag)
        with self._collecting_problems():
            namespace, remaining = self.parse_known_args(argv)
        sources = sources_of(self._actions, namespace)
        fields = {name for cls in self.dataclass_types for name in self._accepted(cls)}
        wrong = wrong_values(namespace)
        problems = [f"{sources[name]}: {problem}" for name, texts in wrong.items() for problem in texts]
        given = {
            name: value
            for name, value in vars(namespace).items()
            if name not in wrong and (name in sources or name not in fields)
        }
        if remaining and not return_remaining_strings:
            problems += [self._unknown_flag(text) for text in remaining if text.startswith("-")] or [
                f"{COMMAND_LINE}: {' '.join(remaining)} belongs to no argument."
            ]
        reported = {re.split(r"\W+", problem.partition("--")[2])[0] for problem in problems}
        texts, rest = self._build(given, sources, problems, reported)
        extra = (argparse.Namespace(**rest),) if rest else ()
        return (*texts, *extra, remaining) if return_remaining_strings else (*texts, *extra)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in argparse: the namespace has all fields, at their defaults if they are not given.

        Raises:
            ConfigError: with all values that do not fit their types, or the missing flags.
        """
        for action in self._actions:
            if isinstance(action, FieldAction):
                action.given = False
        namespace_found, remaining = super().parse_known_args(args, namespace)
        if not self._collecting and (wrong := wrong_values(namespace_found)):
            sources = sources_of(self._actions, namespace_found)
            raise ConfigError([f"{sources[name]}: {problem}" for name, part in wrong.items() for problem in part])
        return namespace_found, remaining

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        return action.read(arg_string) if isinstance(action, FieldAction) else super()._get_value(action, arg_string)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if not isinstance(action, FieldAction):  # its conversion checks the choices
            super()._check_value(action, value)

    @contextmanager
    def _collecting_problems(self) -> Iterator[None]:
        """A context in which nothing is required and wrong values are kept, to be reported with all other problems."""
        required = [action for action in self._actions if isinstance(action, FieldAction) and action.required]
        for action in required:
            action.required = False
        self._collecting = True
        try:
            yield
        finally:
            self._collecting = False
            for action in required:
                action.required = True

    def parse_dict(self, args: Mapping[str, Any], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Make objects of the dataclasses from a mapping of field names to values.

        Args:
            args: the values.
            allow_extra_keys: ignore keys that are no field of any dataclass.

        Raises:
            ConfigError: unknown keys, or invalid values.
        """
        return self._from_values(dict(args), dict.fromkeys(args, "argument"), [], allow_extra_keys)

    def parse_json_file(self, json_file: str | os.PathLike[str], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Like :meth:`parse_dict`, from a JSON file. Also raises ConfigError if it cannot be read."""
        name = os.fspath(json_file)
        values = read_user_json(name, name)
        if not isinstance(values, dict):
            raise ConfigError(f"{name}: expected a mapping of argument names to values.")
        return self._from_values(values, dict.fromkeys(values, name), [], allow_extra_keys)

    def parse_yaml_file(self, yaml_file: str | os.PathLike[str], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Like :meth:`parse_dict`, from a YAML file. Also raises ConfigError if it cannot be read."""
        name = os.fspath(yaml_file)
        root, problems = read_yaml(read_user_file(name, name, "YAML file"), name)
        if not isinstance(root.value, dict):
            raise ConfigError(f"{root.where}: expected a mapping of argument names to values.")
        hints = {
            key: hint
            for cls in self.dataclass_types
            for key, hint in self._hints_of(cls).items()
            if (cls, key) not in self._left
        }
        hints = {**{old: row.hint for old, row in RENAMED.items()}, **hints}
        values: dict[str, Any] = {}
        for key, entry in root.value.items():
            try:
                values[key] = read_as(entry, hints.get(key, Any))
            except WrongType as error:
                problems.append(f"{entry.where}: {key}: {error}.")
        sources = {key: entry.where for key, entry in root.value.items()}
        return self._from_values(values, sources, problems, allow_extra_keys)

    # -- building -------------------------------------------------------------------------------------------------

    def _from_values(
        self, values: dict[str, Any], sources: dict[str, str], problems: list[str], allow_extra: bool
    ) -> tuple[Any, ...]:
        known = [name for cls in self.dataclass_types for name in self._accepted(cls)]
        unknown = [name for name in values if name not in known]
        if not allow_extra:
            problems = problems + [
                f"{sources[name]}: unknown argument '{name}'.{did_you_mean(name, known)}" for name in unknown
            ]
        given = {name: value for name, value in values.items() if name in known}
        return tuple(self._build(given, sources, problems, set())[0])

    def _build(
        self, given: dict[str, Any], sources: dict[str, str], problems: list[str], reported: set[str]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The objects, and the entries of ``given`` that belong to none of them.

        Fields in ``reported`` have a problem already and are not reported as missing.
        """
        objects, rest = [], dict(given)
        for cls in self.dataclass_types:
            values = {name: rest.pop(name) for name in self._accepted(cls) if name in rest}
            missing = [
                field.name
                for field in dataclasses.fields(cls)
                if field.init
                and field.name not in (*values, *reported)
                and field.default is dataclasses.MISSING
                and field.default_factory is dataclasses.MISSING
            ]
            if missing:
                problems = problems + [f"--{name} is required ({cls.__name__})." for name in missing]
                continue
            try:
                instance = cls(**values)
            except ConfigError as error:
                problems = problems + [_with_source(problem, values, sources) for problem in error.problems]
                continue
            except TypeError:
                if not problems:  # otherwise the missing value has been reported
                    raise
                continue
            origins = getattr(instance, "origins", None)
            if isinstance(origins, dict):
                keys = {name: name_as_given(name, values) for name in origins}
                origins.update(
                    {name: sources[key] for name, key in keys.items() if key is not None and origins[name] != ORIGIN}
                )
            objects.append(instance)
        if problems:
            raise ConfigError(dict.fromkeys([*problems, *file_problems(given)]))
        return objects, rest

    def _accepted(self, cls: Any) -> list[str]:
        """Names that the constructor of a dataclass accepts from here."""
        names = [field.name for field in dataclasses.fields(cls) if field.init and (cls, field.name) not in self._left]
        return [*names, *(old for old in RENAMED if old not in names)] if isinstance(cls, ArgumentsType) else names

    def _unknown_flag(self, text: str) -> str:
        flag = text.partition("=")[0]
        flags = [known for known in self._option_string_actions if "-" not in known.removeprefix("--")]
        near = did_you_mean(flag.replace("-", "_").replace("__", "--", 1), flags)
        return f"{COMMAND_LINE}: unknown argument {flag}.{near}"


def _with_source(problem: str, values: dict[str, Any], sources: dict[str, str]) -> str:
    match = re.match(r"(\w+)\W", problem)
    key = name_as_given(match.group(1), values) if match else None
    source = sources[key] if key is not None else None
    return f"{source}: {problem}" if source not in (None, "argument") else problem


def args_of_files(argv: list[str], look: bool, filename: str | None, flag: str | None) -> list[str]:
    """The arguments in files (:meth:`HfArgumentParser.parse_args_into_dataclasses`), then ``argv`` without ``flag``."""
    files = [filename] if filename else []
    default = Path(sys.argv[0]).with_suffix(".args") if sys.argv[0] else None
    if not filename and look and default is not None and default.is_file():
        files.append(str(default))
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    if flag:
        finder.add_argument(flag, action="append", default=[], dest="files")
        files += finder.parse_known_args(argv)[0].files
    texts = [read_user_file(name, name, "text file") for name in files]
    argv = [word for text in texts for word in shlex.split(text, comments=True)] + argv
    return finder.parse_known_args(argv)[1] if flag else argv
