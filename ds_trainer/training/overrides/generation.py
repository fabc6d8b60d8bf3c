"""Generation of text with the model in training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from torch import nn

from ds_trainer.arguments.enums import GenerationGather
from ds_trainer.training.generation.generation_phase import evaluation_mode
from ds_trainer.training.overrides.base import TrainerBase


class Generation(TrainerBase):
    """A context for several calls of ``generate``."""

    @contextmanager
    def unwrap_model_for_generation(self, gather: GenerationGather | str | None = None) -> Iterator[nn.Module]:
        """Inside, the model is ready for ``generate``: in evaluation mode and, with ZeRO-3, with its weights gathered
        once if ``generation_gather`` says so. Each replica may then generate as often and as long as it needs, or not
        at all. Entering is collective.

        A single ``model.generate(...)`` needs no context: it gathers the weights itself, once for each call.

        Args:
            gather: ``"always"``, ``"never"`` or ``"auto"``; default: ``generation_gather`` of the arguments.

        Returns:
            The model without its engine. Do not train inside.
        """
        phase = self._ds_trainer.engines.generation
        choice = None if gather is None else GenerationGather(str(gather))
        with nullcontext() if phase is None else phase.weights(choice), evaluation_mode(self.model):
            yield self.model
