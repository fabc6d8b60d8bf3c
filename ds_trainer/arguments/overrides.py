"""Values that take the place of what a script gives to its argument objects: ``ds-trainer run --set NAME=VALUE``.

They apply to this process, to every object of :class:`TrainingArguments` or a subclass, and are recorded with their
own origin.
"""

from __future__ import annotations

import typing
from collections.abc import Container, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields
from typing import Any

from ds_trainer.arguments.checks.type_checks import type_problems
from ds_trainer.arguments.checks.unsupported import unsupported_problems
from ds_trainer.arguments.checks.value_checks import value_problems
from ds_trainer.arguments.compat.renamed_arguments import RENAMED
from ds_trainer.arguments.parser_values import FALSE_TEXTS, TRUE_TEXTS, is_switch
from ds_trainer.arguments.typed import WrongType, describe, read_as
from ds_trainer.arguments.yaml_reader import Located, read_command_line_value
from ds_trainer.utils.errors import ConfigError, did_you_mean
from ds_trainer.utils.replaced_transformers import arguments_are_no_start
from ds_trainer.utils.secrets import is_secret, masked

ORIGIN = "ds-trainer run --set"
PLANNED = "parallelism='auto'"  # origin of values that the planner has chosen

_values: dict[str, Any] = {}
_applied: set[str] = set()


def read_overrides(texts: Sequence[str], cls: Any) -> dict[str, Any]:
    """The values of ``NAME=VALUE`` texts; the last one of a name counts.

    Args:
        texts: values are written as on a command line; a list is ``[a, b]``, a mapping is JSON.
        cls: the argument class, whose fields are the valid names.

    Raises:
        ConfigError: unknown names, values of the wrong type or outside the range of their argument; all together.
    """
    hints = typing.get_type_hints(cls)
    names = [field.name for field in fields(cls) if field.init]
    values: dict[str, Any] = {}
    problems: list[str] = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            problems.append(f"--set {masked(name) if is_secret(name) else name}: write --set NAME=VALUE.")
        elif name in RENAMED and name not in names:
            problems.append(f"--set {name}: this is an argument of transformers 4: {RENAMED[name].now}.")
        elif name not in names:
            problems.append(f"--set {name}: unknown argument '{name}'.{did_you_mean(name, names)}")
        else:
            try:
                values[name] = _read(value, hints[name])
            except WrongType as error:
                shown = f"{masked(name)}: expected {describe(hints[name])}" if is_secret(name) else f"{value}: {error}"
                problems.append(f"--set {name}={shown}.")
    with arguments_are_no_start():
        probe = cls()  # the defaults are valid, so what is found is about a value of --set
    vars(probe).update(deepcopy(values))
    # Problems of a combination depend on what the script sets.
    wrong = list(type_problems(probe)) or list(unsupported_problems(probe)) or value_problems(probe)
    problems += [f"--set {problem}" for problem in wrong]
    if problems:
        raise ConfigError(problems)
    return values


def activate(values: Mapping[str, Any]) -> None:
    """Apply ``values`` to all argument objects that this process makes from now on, and to no others."""
    _values.clear()
    _values.update(values)
    _applied.clear()


def overrides_for(accepted: Container[str]) -> dict[str, Any]:
    """Copies of the active values whose names are in ``accepted``. They count as applied."""
    chosen = {name: deepcopy(value) for name, value in _values.items() if name in accepted}
    _applied.update(chosen)
    return chosen


def unused() -> list[str]:
    """Names of active values that no object has received."""
    return [name for name in _values if name not in _applied]


def overridden_text(args: Any, of: str = ORIGIN) -> str | None:
    """The values of ``args`` of one origin, by default the overridden ones, for the header of a run; None without."""
    names = [name for name, origin in args.origins.items() if origin == of]
    values = [f"{name}={masked(name) if is_secret(name) else getattr(args, name)}" for name in names]
    return f"{', '.join(values)} ({of})" if values else None


def _read(text: str, hint: Any) -> Any:
    if is_switch(hint) and text.lower() in TRUE_TEXTS + FALSE_TEXTS:
        return text.lower() in TRUE_TEXTS
    return read_as(Located(text, ORIGIN, text) if hint is str else read_command_line_value(text), hint)
