"""``SearchBackend``: what proposes the trials of a search, and the list of those that there are.

A backend of your own is an object with these members, given to :func:`register_backend`; its name then works as
``backend="..."``. Its :meth:`SearchBackend.run` lets :class:`~ds_trainer.training.search.conductor.Conductor` run the
trials, which does all that concerns several ranks.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from ds_trainer.training.search.best_run import BestRun
from ds_trainer.utils.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from ds_trainer.training.trainer import Trainer


class SearchBackend(Protocol):
    """What a backend has."""

    name: str
    """As in ``backend``."""
    install: str
    """What to tell pip."""

    def is_available(self) -> bool:
        """Whether it can be used here."""

    def default_hp_space(self, trial: Any) -> dict[str, Any]:
        """The search space where the user has none."""

    def run(
        self, trainer: Trainer, n_trials: int | None, direction: str | list[str], **kwargs: Any
    ) -> BestRun | list[BestRun]:
        """Search. Called on all ranks alike; ``trainer.hp_space`` and ``trainer.hp_name`` are set."""


_backends: dict[str, SearchBackend] = {}


def register_backend(backend: SearchBackend) -> None:
    """Let ``backend.name`` be used in ``hyperparameter_search(backend=...)``; a later one replaces an earlier one."""
    _backends[backend.name] = backend


def find_backend(name: Any) -> SearchBackend:
    """The backend of this name; None is the first one that is installed.

    Raises:
        ConfigError: there is none of this name, or it is not installed; names those that are.
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
            f"backend={wanted!r} is not known.{did_you_mean(wanted, known)} Known: {', '.join(known)}. {have}"
        )
    if wanted not in installed:
        raise ConfigError(f"backend={wanted!r} is not installed: `pip install {known[wanted].install}`. {have}")
    return known[wanted]


def is_installed(package: str) -> bool:
    """Whether a module of this name, which may be dotted, can be imported."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of the parent
        return False


def check_direction(direction: Any, *, several: bool) -> None:
    """Refuse what is no direction.

    Raises:
        ConfigError: names it; also for a list where only one direction is possible (``several`` is False).
    """
    directions = direction if isinstance(direction, list | tuple) else [direction]
    if not directions or not set(map(str, directions)) <= {"minimize", "maximize"}:
        raise ConfigError(f"direction={direction!r}: use 'minimize' or 'maximize', or a list of them.")
    if isinstance(direction, list | tuple) and not several:
        raise ConfigError(f"direction={direction!r}: only optuna searches in several directions.")


def _known() -> dict[str, SearchBackend]:
    from ds_trainer.training.search.optuna_backend import OptunaBackend
    from ds_trainer.training.search.ray_backend import RayBackend
    from ds_trainer.training.search.wandb_backend import WandbBackend

    own: list[SearchBackend] = [OptunaBackend(), RayBackend(), WandbBackend()]
    return {**{backend.name: backend for backend in own}, **_backends}
