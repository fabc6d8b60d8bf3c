"""Construction of argument objects: translates old names, rejects unknown names, checks and converts values.

``ArgumentsType`` is the metaclass of the argument classes. It receives the keyword arguments before the dataclass does.
So names of transformers 4 still work, a misspelled name gets a suggestion, and given values are distinguished from
defaults.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from ds_trainer.arguments.checks.type_checks import numbers_of_text, type_problems
from ds_trainer.arguments.checks.unsupported import unsupported_problems
from ds_trainer.arguments.checks.value_checks import argument_problems
from ds_trainer.arguments.compat.renamed_arguments import older_names, translate, warn_renamed
from ds_trainer.arguments.completion import fill_in
from ds_trainer.arguments.overrides import ORIGIN, overrides_for
from ds_trainer.utils.errors import ConfigError, Problems, did_you_mean
from ds_trainer.utils.logging import one_error_per_job
from ds_trainer.utils.replaced_transformers import arguments_made

_Self = TypeVar("_Self", bound="CheckedArguments")
FILE_CHECKS: dict[str, Callable[[Any], list[str]]] = {}
"""By argument that names a file: what is wrong with the file itself. Filled by the module that reads the file."""


def file_problems(values: Mapping[str, Any]) -> list[str]:
    """What is wrong with the files that ``values`` name, to be listed beside problems of the arguments."""
    return [found for name, check in FILE_CHECKS.items() if values.get(name) for found in check(values[name])]


class ArgumentsType(type):
    """Constructs argument objects, and records in ``origins`` which fields were given.

    A call raises one :class:`ConfigError` for all unknown names and wrong values.
    """

    def __call__(cls, *args: Any, **keywords: Any) -> Any:
        """Construct the object; problems of all arguments are raised together."""
        one_error_per_job()
        parameters = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
        keywords, deprecations, translation_problems = translate(keywords, declared=parameters)
        warn_renamed(deprecations + older_names(keywords))
        problems = Problems(translation_problems)
        names = [name for name in parameters if name != "self"]
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            unknown = [name for name in keywords if name not in parameters]
            problems.extend(
                f"{name} is not an argument of {cls.__name__}.{did_you_mean(name, names)}" for name in unknown
            )
            keywords = {name: value for name, value in keywords.items() if name not in unknown}
        fixed = overrides_for(names)
        args = tuple(fixed.get(name, value) for name, value in zip(names, args, strict=False)) + args[len(names) :]
        keywords.update({name: value for name, value in fixed.items() if name not in names[: len(args)]})
        arguments = cast(Any, cls).__new__(cls)
        arguments.origins = {
            **dict.fromkeys((*names[: len(args)], *keywords), "argument"),
            **dict.fromkeys(fixed, ORIGIN),
        }
        try:
            with problems.collecting():
                arguments.__init__(*args, **keywords)
        except TypeError:
            problems.extend(file_problems(keywords) if problems else ())
            problems.raise_if_any()  # a required field may be missing because its name is misspelled
            raise
        problems.extend(file_problems(keywords) if problems else ())
        problems.raise_if_any()
        rest = overrides_for([field.name for field in dataclasses.fields(cast(Any, cls)) if field.name not in fixed])
        if rest:  # arguments that a subclass sets itself, in a constructor of its own
            arguments.change(**rest)
            arguments.origins = {**arguments.origins, **dict.fromkeys(rest, ORIGIN)}
        arguments_made(arguments)
        return arguments


class CheckedArguments:
    """Checks and completes the fields of an argument class; see :mod:`ds_trainer.arguments.checks`."""

    origins: dict[str, str]
    fields_of_subclass: frozenset[str] = frozenset()
    """Names that belong to a class of another package, from which these arguments were made."""

    def problems(self) -> list[str]:
        """One sentence for each problem with the current values, which may have changed since construction."""
        if wrong_types := list(type_problems(self)):
            return wrong_types
        if numbers := numbers_of_text(self):
            probe = copy.copy(self)
            vars(probe).update(numbers)
            return probe.problems()
        problems = list(argument_problems(self))
        fields = {re.split(r"\W", problem, maxsplit=1)[0] for problem in problems}
        return [*problems, *unsupported_problems(self, skip=fields)]

    def complete(self, problems: Problems | None = None) -> None:
        """Check all values, convert names to enums, and fill in the values that follow from others.

        Args:
            problems: collects problems instead of raising them. With problems, the object is not changed.

        Raises:
            ConfigError: all problems together, if there is no collector. The object is then not changed.
        """
        own = Problems(self.problems())
        if problems is None:
            own.raise_if_any()
        else:
            problems.extend(own)
        if not own:
            self.fill_in()

    def fill_in(self) -> None:
        """Fill in the values that follow from others. All values have been checked."""
        fill_in(self)

    def change(self: _Self, **values: Any) -> _Self:
        """Set several fields together and check all values again.

        Raises:
            ConfigError: all problems together; the object is then not changed.
        """
        before = dict(vars(self))
        vars(self).update(values)
        try:
            self.complete()
        except ConfigError:
            vars(self).clear()
            vars(self).update(before)
            raise
        new = [name for name, value in values.items() if value != before[name]]  # a setter sets its whole group
        self.origins = {**self.origins, **dict.fromkeys(new, "argument")}
        return self

    def where(self, name: str) -> str:
        """Source of a field's value: ``recipe.yaml:12``, ``command line``, ``argument``, or ``default``."""
        return self.origins.get(name, "default")

    def given(self, name: str) -> bool:
        """Whether the value of a field was given rather than kept at its default."""
        return name in self.origins
