"""A trial as the Trainer sees it, whoever proposed it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_trainer.utils.errors import ConfigError


class TrialPruned(Exception):
    """The search has given up this trial; raised at the same evaluation on all ranks."""


class SearchEnds(ConfigError):
    """A mistake that every trial would repeat; it ends the search."""


@dataclass(frozen=True)
class SearchTrial:
    """One trial.

    Attributes:
        values: the arguments that it sets, by name.
        source: what ``model_init(trial)`` is given: the backend's own object.
        params: the values as the backend proposed them; they may hold what only the model looks at.
        id: identifies the trial in its search; empty outside of one.
        name: directory below ``output_dir`` and name of the run; None leaves everything in ``output_dir``.
    """

    values: Mapping[str, Any]
    source: Any
    params: Mapping[str, Any]
    id: str = ""
    name: str | None = None

    @property
    def where(self) -> str:
        """Where its values come from, for messages."""
        return f"trial {self.id}" if self.id else "trial"


def as_trial(trial: Any, arguments: set[str], model_takes_trial: bool) -> SearchTrial:
    """What was given to ``train(trial=...)``: hyper-parameters by name, a trial of optuna's, or one of ours.

    Of a trial of optuna's those ``params`` are taken that are ``arguments``; the others are for ``model_init(trial)``.

    Raises:
        ConfigError: it is something else, or nobody would look at one of the values.
    """
    if isinstance(trial, SearchTrial):
        return trial
    if isinstance(trial, Mapping):
        return SearchTrial(dict(trial), trial, dict(trial))
    params = getattr(trial, "params", None)
    if not isinstance(params, Mapping):
        raise ConfigError(
            f"trial={trial!r} is a {type(trial).__name__}: pass a dict of hyper-parameters or an optuna trial."
        )
    if model_takes_trial:
        return SearchTrial({name: value for name, value in params.items() if name in arguments}, trial, dict(params))
    return SearchTrial(dict(params), trial, dict(params))
