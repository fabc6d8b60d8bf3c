"""How arguments come into being: old names translated, unknown ones refused, values converted, everything checked.

``ArgumentsType`` is the type of the argument classes: it sees the keywords before the dataclass does, so that names of
transformers 4 still work, a misspelt one is answered with the nearest, and given values can be told from defaults.
"""

from __future__ import annotations

import inspect
import re
from typing import Any, TypeVar, cast

from ds_trainer.arguments.checks import argument_problems, type_problems
from ds_trainer.arguments.completion import fill_in
from ds_trainer.arguments.renamed import translate, warn_renamed
from ds_trainer.arguments.support import support_problems
from ds_trainer.utils.errors import ConfigError, did_you_mean

_Self = TypeVar("_Self", bound="CheckedArguments")


class ArgumentsType(type):
    """Makes objects from keywords of any age; notes in ``origins`` which fields were given."""

    def __call__(cls, *args: Any, **keywords: Any) -> Any:
        parameters = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
        keywords, deprecations, problems = translate(keywords, declared=parameters)
        warn_renamed(deprecations)
        names = [name for name in parameters if name != "self"]
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            problems += [
                f"{name} is not an argument of {cls.__name__}.{did_you_mean(name, names)}"
                for name in keywords
                if name not in parameters
            ]
        if problems:
            raise ConfigError(problems)
        made = cast(Any, cls).__new__(cls)
        made.origins = dict.fromkeys((*names[: len(args)], *keywords), "argument")
        made.__init__(*args, **keywords)
        return made


class CheckedArguments:
    """Completes and checks the fields of an argument class; see :mod:`ds_trainer.arguments.checks`."""

    origins: dict[str, str]

    def problems(self) -> list[str]:
        """What is wrong with the present values, one sentence each. They may have been changed since they were made."""
        wrong = type_problems(self)
        if wrong:
            return wrong
        wrong = argument_problems(self)
        blamed = {re.split(r"\W", problem, maxsplit=1)[0] for problem in wrong}
        return wrong + support_problems(self, blamed)

    def complete(self) -> None:
        """Check all values, convert names to enums, and fill in what follows from others.

        Raises:
            ConfigError: all problems at once; the object is then as it was.
        """
        problems = self.problems()
        if problems:
            raise ConfigError(problems)
        fill_in(self)

    def _changed(self: _Self, **values: Any) -> _Self:
        """Set several fields together and check everything anew.

        Raises:
            ConfigError: all problems at once; nothing is changed then.
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
        """Where a field was given: ``recipe.yaml:12``, ``command line``, ``argument``; ``default`` where it was not."""
        return self.origins.get(name, "default")

    def given(self, name: str) -> bool:
        """Whether the value of a field was given rather than left at its default."""
        return name in self.origins
