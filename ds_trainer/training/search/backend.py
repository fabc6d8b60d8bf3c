"""``SearchBackend``: proposes the trials of a search. This module also has the registry of backends.

A custom backend is an object with these members that is passed to :func:`register_backend`. Its name can then be used
as ``backend="..."``. Its :meth:`SearchBackend.run` runs the trials through
:class:`~ds_trainer.training.search.trial_coordinator.TrialCoordinator`, which coordinates the ranks.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from ds_trainer.training.search.best_run import BestRun
from ds_trainer.utils.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from ds_trainer.training.trainer import Trainer


class SearchBackend(Protocol):
    """The interface of a backend."""

    name: str
    """The value of ``backend`` that selects it."""
    install: str
    """The argument of ``pip install``."""

    def is_available(self) -> bool:
        """Whether it is installed."""

    def default_hp_space(self, trial: Any) -> dict[str, Any]:
        """The search space if the user passes none."""

    def run(
        self, trainer: Trainer, n_trials: int | None, direction: str | list[str], **kwargs: Any
    ) -> BestRun | list[BestRun]:
        """Run the search. Called on all ranks; ``trainer.hp_space`` and ``trainer.hp_name`` are set."""


_backends: dict[str, SearchBackend] = {}


def register_backend(backend: SearchBackend) -> None:
    """Make ``backend`` available as ``hyperparameter_search(backend=name)``; replaces a backend of the same name."""
    _backends[backend.name] = backend


def find_backend(name: Any) -> SearchBackend:
    """The backend of this name; for None, the first one that is installed.

    Raises:
        ConfigError: the backend is unknown or not installed; lists those that are installed.
    """
    known = _known()
    installed = [backend.name for backend in known.values() if backend.is_available()]
    have = f"Installed: {', '.join(installed) or 'none'}."
    if name is None:
        if installed:
            return known[installed[0]]
        choices = " or ".join(f"`pip install {backend.install}`" for backend in known.values())
        raise ConfigError(f"hyperparameter_search: no backend is installed. Run {choices}.")
    wanted = str(getattr(name, "value", name))
    if wanted not in known:
        raise ConfigError(
            f"backend={wanted!r} is unknown.{did_you_mean(wanted, known)} Known: {', '.join(known)}. {have}"
        )
    if wanted not in installed:
        raise ConfigError(f"backend={wanted!r} is not installed: `pip install {known[wanted].install}`. {have}")
    return known[wanted]


def is_installed(package: str) -> bool:
    """Whether a module of this (possibly dotted) name can be imported."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def check_direction(direction: Any, *, several: bool) -> None:
    """Reject an invalid direction.

    Raises:
        ConfigError: the direction is invalid, or a list although ``several`` is False.
    """
    directions = direction if isinstance(direction, list | tuple) else [direction]
    if not directions or not set(map(str, directions)) <= {"minimize", "maximize"}:
        raise ConfigError(f"direction={direction!r}: use 'minimize' or 'maximize', or a list of them.")
    if isinstance(direction, list | tuple) and not several:
        raise ConfigError(f"direction={direction!r}: only optuna supports several directions.")


def _known() -> dict[str, SearchBackend]:
    from ds_trainer.training.search.optuna_backend import OptunaBackend
    from ds_trainer.training.search.ray_backend import RayBackend
    from ds_trainer.training.search.wandb_backend import WandbBackend

    own: list[SearchBackend] = [OptunaBackend(), RayBackend(), WandbBackend()]
    return {**{backend.name: backend for backend in own}, **_backends}
