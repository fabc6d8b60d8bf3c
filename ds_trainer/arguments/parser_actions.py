"""The flags of :class:`HfArgumentParser` as argparse actions that remember whether a value was given.

Code that inspects or changes them finds what argparse has: ``default``, ``type``, ``choices``, ``required``, ``help``
of the field. Which values were given is recorded apart from that, so that a given value can equal the default.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from ds_trainer.arguments.parser_values import Wrong

COMMAND_LINE = "command line"
PARSER_DEFAULT = "parser default"
"""Source of a value that a script put into the parser: ``set_defaults``, or an action's ``default``."""
_LONGEST_DEFAULT = 24


class FieldAction(argparse._StoreAction):
    """Stores the value of a field, converted by its type hint.

    Attributes:
        given: whether the last command line had the flag.
        changed: whether the default is no longer that of the field: ``set_defaults``, or an assignment to ``default``.
        mandatory: whether the field has no default. ``required`` may be cleared later by a subclass of the parser.
    """

    def __init__(self, *args: Any, convert: Callable[[str], Any], closed: bool = False, **kwargs: Any) -> None:
        self._convert, self._closed = convert, closed
        self.given = False
        super().__init__(*args, **kwargs)
        self.changed = False
        self.mandatory = self.required

    @property
    def default(self) -> Any:
        """The value of the namespace without this flag."""
        return self.__dict__["default"]  # argparse formats help texts with vars(action)

    @default.setter
    def default(self, value: Any) -> None:
        self.__dict__["default"] = value
        self.changed = True

    def read(self, text: str) -> Any:
        """The value of ``text``, or :class:`Wrong`. The field's own default, which argparse hands in too, stays."""
        if text is self.default and not self.changed:
            return text
        value = self._convert(text)
        if self._closed and not isinstance(value, Wrong) and self.choices is not None and value not in self.choices:
            listed = ", ".join(repr(choice) for choice in self.choices)
            return Wrong(f"{self.option_strings[0]} {text}: expected one of {listed}.")
        return value

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        """Called by argparse for the flag: keep the value."""
        self.given = True
        super().__call__(parser, namespace, values, option_string)


class SwitchOffAction(argparse._StoreFalseAction):
    """``--no_NAME``: sets the field of ``action`` to False."""

    def __init__(self, *args: Any, switch: FieldAction, **kwargs: Any) -> None:
        self._switch = switch
        super().__init__(*args, **kwargs)

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        """Called by argparse for the flag: keep False."""
        self._switch.given = True
        super().__call__(parser, namespace, values, option_string)


class FlagFormatter(argparse.HelpFormatter):
    """Leaves a wide column for long flags, and shows short defaults."""

    def __init__(self, prog: str, **kwargs: Any) -> None:
        super().__init__(prog, max_help_position=40, **kwargs)

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any) -> str:
        """One line, because a list of a hundred flags is of no use."""
        return f"usage: {usage or f'{self._prog} [--argument VALUE ...]'}\n\n"

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """The flag with underscores only, without its spelling with hyphens."""
        if not action.option_strings or not action.option_strings[0].startswith("--"):
            return super()._format_action_invocation(action)
        flags = [flag for flag in action.option_strings if "-" not in flag.removeprefix("--") or len(flag) == 2]
        return ", ".join(flags) + ("" if action.nargs == 0 else f" {action.metavar or 'VALUE'}")

    def _get_help_string(self, action: argparse.Action) -> str | None:
        """The help text with the default, or with ``(required)``."""
        text = action.help or ""
        if not isinstance(action, FieldAction) or "%(default)" in text:
            return text
        if action.required:
            return text if text.endswith("(required)") else f"{text} (required)"
        shown = str(getattr(action.default, "value", action.default))
        if action.default in (None, [], {}) or len(shown) > _LONGEST_DEFAULT:
            return text
        return f"{text} (default: {shown.replace('%', '%%')})"


def sources_of(actions: Iterable[argparse.Action], namespace: argparse.Namespace) -> dict[str, str]:
    """Where the values of a parsed namespace came from, by name, without the fields that are at their own defaults."""
    sources = dict.fromkeys(vars(namespace), COMMAND_LINE)
    for action in actions:
        if not isinstance(action, FieldAction) or action.dest not in namespace or action.given:
            continue
        # Not its default: another argument with this dest, or a subclass, set it.
        other = getattr(namespace, action.dest) is not action.default
        if action.changed or other or (action.mandatory and not action.required):
            sources[action.dest] = PARSER_DEFAULT
        else:
            del sources[action.dest]
    return sources


def wrong_values(namespace: argparse.Namespace) -> dict[str, list[str]]:
    """The problems of values that do not fit their types, by name; each without its source."""
    parts = {name: value if isinstance(value, list) else [value] for name, value in vars(namespace).items()}
    problems = {name: [one.problem for one in part if isinstance(one, Wrong)] for name, part in parts.items()}
    return {name: found for name, found in problems.items() if found}


def spellings(flag: str) -> list[str]:
    """A flag with underscores and with hyphens."""
    return list(dict.fromkeys([flag, f"--{flag.removeprefix('--').replace('_', '-')}"]))


def help_of(field: dataclasses.Field[Any]) -> str:
    """The help text of a field's flag."""
    text = str(field.metadata.get("help", "")).replace("%", "%%").replace("%%%%", "%%")
    if text:
        return text
    has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    return "default: %(default)s" if has_default else "(required)"  # argparse shows no default without a text
