"""What a behavior gets: the names of one library, a directory, and short ways to build arguments and trainers."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ds_trainer
from ds_trainer.compatibility.replacement import all_names, replacement
from tests.parity.library import FullTokens, Library
from tests.support.models import Regression, regression_rows

_REPLACED = frozenset(all_names())
_LOGGERS = ("ds_trainer", "transformers", "accelerate")


@dataclass(frozen=True)
class Message:
    """A record of ``logging``, or a warning of ``warnings``."""

    level: str
    text: str


class Messages(list[Message]):
    """The messages of a block, in order."""

    def warned(self, *words: str) -> bool:
        """Whether one message of level WARNING or higher contains all ``words``, in any case."""
        return any(
            all(word.lower() in message.text.lower() for word in words)
            for message in self
            if message.level in ("WARNING", "ERROR", "CRITICAL")
        )

    def said(self, *words: str) -> bool:
        """Whether any one message contains all ``words``, in any case."""
        return any(all(word.lower() in message.text.lower() for word in words) for message in self)


class _Handler(logging.Handler):
    def __init__(self, messages: Messages) -> None:
        super().__init__(logging.DEBUG)
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(Message(record.levelname, record.getMessage()))


@dataclass(frozen=True)
class Api(Library):
    """The names of one library, as a script imports them, and a directory of its own.

    Attributes:
        shared_results: results of :meth:`shared`, by library and function.
    """

    shared_results: dict[Any, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        """The object that a script gets by this name: of this package if it replaces it, else of transformers."""
        import transformers

        if name.startswith("_"):
            raise AttributeError(name)
        if self.is_ours and hasattr(ds_trainer, name):
            return getattr(ds_trainer, name)
        if self.is_ours and name in _REPLACED:
            return replacement(name)
        for module in (
            transformers,
            transformers.trainer_callback,
            transformers.training_args,
            transformers.hf_argparser,
        ):
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(name)

    def shared(self, build: Callable[[Api], Any]) -> Any:
        """The result of ``build``, which is called once for each library. For trainings that several behaviors read."""
        key = (self.module.__name__, build)
        if key not in self.shared_results:
            self.shared_results[key] = build(self)
        return self.shared_results[key]

    def plain_trainer(self, changes: dict[str, Any] | None = None, base: Any = None, **given: Any) -> Any:
        """A Trainer of a small model that knows nothing of transformers, over 16 samples."""
        given.setdefault("train_dataset", regression_rows(16))
        if "model_init" not in given:
            given.setdefault("model", Regression())
        return self.trainer(changes, base, **given)

    def evaluated_trainer(self, changes: dict[str, Any] | None = None, base: Any = None, **given: Any) -> Any:
        """:meth:`plain_trainer` with 10 samples for evaluations."""
        given.setdefault("eval_dataset", regression_rows(10, seed=1))
        return self.plain_trainer(changes, base, **given)

    def text_trainer(self, changes: dict[str, Any] | None = None, base: Any = None, **given: Any) -> Any:
        """A Trainer of a small Llama, with 9 samples for evaluations."""
        given.setdefault("eval_dataset", FullTokens(9))
        return self.trainer(changes, base, **given)

    def subclass(self, base: type, **members: Any) -> type:
        """A subclass, as a script defines one."""
        return type(f"My{base.__name__}", (base,), members)

    def files(self, folder: str | Path = ".") -> list[str]:
        """The names in a folder of the output directory."""
        return sorted(path.name for path in (self.directory / folder).iterdir())

    @contextmanager
    def messages(self, level: int = logging.INFO) -> Iterator[Messages]:
        """Collects what is logged and warned inside the block."""
        found = Messages()
        handler = _Handler(found)
        loggers = [logging.getLogger(name) for name in _LOGGERS]
        levels = [logger.level for logger in loggers]
        for logger in loggers:
            logger.addHandler(handler)
            logger.setLevel(level)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                yield found
            found.extend(Message("WARNING", f"{item.category.__name__}: {item.message}") for item in caught)
        finally:
            for logger, before in zip(loggers, levels, strict=True):
                logger.removeHandler(handler)
                logger.setLevel(before)


def raised(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> str:
    """The name of the built-in exception that a call raises, which is what ``except`` clauses of scripts name."""
    try:
        function(*arguments, **keywords)
    except Exception as error:
        return builtin_name(error)
    return "nothing"


def builtin_name(error: BaseException) -> str:
    """The nearest built-in class of an exception."""
    return next(base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins")
