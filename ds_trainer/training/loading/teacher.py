"""``Teacher``: a frozen model beside the one that is trained, under the same rules: precision, device, ZeRO-3."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.engine.evaluation_engine import EvaluationEngine
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.loading.model_argument import put_on_device
from ds_trainer.training.model.chunked_loss.chunked_loss import ChunkedLoss


class Teacher:
    """Computes logits without gradients.

    At ZeRO-3 its weights are sharded over all ranks and gathered layer by layer, by an engine of its own; below, every
    rank has all of them.

    Args:
        model: the module; its weights may still be on meta, with a source.
        chunk_tokens: ``loss_chunk_tokens``; see :class:`ChunkedLoss`.
    """

    def __init__(self, model: nn.Module, chunk_tokens: int | None) -> None:
        self.model = model.requires_grad_(False).eval()
        self._chunked = ChunkedLoss(chunk_tokens)
        self._engine: EvaluationEngine | None = None
        self._module: nn.Module | None = None

    def place(
        self, config: CompiledConfig, layout: ParallelLayout, device: torch.device, dtype: torch.dtype | None
    ) -> None:
        """Load the weights, on this rank or sharded over all. Collective; after the engine of the training was built.

        Args:
            config: the compiled configuration.
            layout: the parallel layout.
            device: of this rank.
            dtype: to which floating-point weights are converted below ZeRO-3; None keeps theirs.
        """
        if self._module is not None:
            return
        if config.zero_stage == 3:
            self._engine = EvaluationEngine(self.model, config, layout)
            self._module = self._engine.deepspeed
        else:
            put_on_device(self.model, device)
            self._module = self.model if dtype is None else self.model.to(dtype)

    def logits(self, inputs: dict[str, Any]) -> torch.Tensor:
        """The logits ``[B, T, V]``, perhaps deferred (:mod:`ds_trainer.parallel.deferred_logits`).

        Args:
            inputs: a batch without labels, on the device.
        """
        assert self._module is not None  # place() was called
        with torch.no_grad(), self._chunked.deferring(self._module):
            outputs = self._module(**inputs, use_cache=False)
        logits: torch.Tensor = outputs["logits"]
        return logits

    def close(self) -> None:
        """Free the engine; :meth:`place` may be called again."""
        self._chunked.release()
        self._module = None
        if self._engine is not None:
            self._engine.close()
            self._engine = None
