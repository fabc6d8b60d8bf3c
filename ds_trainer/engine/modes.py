"""The mode of an engine is that of its module: scripts ask ``model.training`` of the engine that they get."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def follow_modes(engine: DeepSpeedEngine) -> None:
    """``engine.train()`` and ``eval()`` set ``engine.training`` and return the engine, as those of any module.

    DeepSpeed's only pass the mode on to the module: ``model.training`` stays True in evaluations, and
    ``model = model.eval()`` gives None. Metrics that a ``compute_loss`` keeps by mode would be mixed.
    """
    engine.__class__ = _with_modes(cast(Any, type(engine)))


@cache
def _with_modes(kind: Any) -> Any:
    def train(self: Any, mode: bool = True) -> Any:
        kind.train(self, mode)
        self.training = mode
        return self

    members = {"train": train, "eval": lambda self: self.train(False), "__module__": kind.__module__}
    return type(kind.__name__, (kind,), members)
