"""A trial as the Trainer sees it, independent of the backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_trainer.utils.errors import ConfigError


class TrialPruned(Exception):
    """The search has pruned this trial; raised at the same evaluation on all ranks."""


class SearchError(ConfigError):
    """An error that every trial would repeat; it ends the search."""


@dataclass(frozen=True)
class SearchTrial:
    """One trial.

    Attributes:
        values: the arguments that it sets, by name.
        source: the argument of ``model_init(trial)``: the object of the backend.
        params: the values that the backend proposed; may include values that only the model uses.
        id: identifies the trial in its search; empty outside of a search.
        name: name of the run and of its directory in ``output_dir``; None keeps everything in ``output_dir``.
    """

    values: Mapping[str, Any]
    source: Any
    params: Mapping[str, Any]
    id: str = ""
    name: str | None = None

    @property
    def where(self) -> str:
        """The source of its values, for messages."""
        return f"trial {self.id}" if self.id else "trial"


def as_trial(trial: Any, arguments: set[str], model_takes_trial: bool) -> SearchTrial:
    """Convert the argument of ``train(trial=...)``: a dict of hyperparameters, an optuna trial, or a ``SearchTrial``.

    If ``model_init`` takes the trial, the values of an optuna trial are those ``params`` that are ``arguments``.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(trial, SearchTrial):
        return trial
    if isinstance(trial, Mapping):
        return SearchTrial(dict(trial), trial, dict(trial))
    params = getattr(trial, "params", None)
    if not isinstance(params, Mapping):
        raise ConfigError(
            f"trial={trial!r} is a {type(trial).__name__}: pass a dict of hyperparameters or an optuna trial."
        )
    if model_takes_trial:
        return SearchTrial({name: value for name, value in params.items() if name in arguments}, trial, dict(params))
    return SearchTrial(dict(params), trial, dict(params))
