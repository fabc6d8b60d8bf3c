"""Private methods of transformers' Trainer that scripts call, with the meaning that they have there.

Also those of transformers 4 that scripts of today still call. Names without a counterpart are in
:mod:`ds_trainer.training.overrides.private_methods`.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ds_trainer.monitor.memory_tracker import MemoryTracker, Stage
from ds_trainer.training.evaluation.nested import map_leaves
from ds_trainer.training.loading.model_argument import put_on_device
from ds_trainer.training.loop.device_copies import on_device
from ds_trainer.training.overrides.base import TrainerBase
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)


class CalledMethods(TrainerBase):
    """Private methods for calls; an override takes effect where docs/reference/private-methods.md says so."""

    def _move_model_to_device(self, model: nn.Module, device: torch.device | str) -> None:
        """Move a model of the script, such as a teacher, to ``device``. The engine moves the trained model itself."""
        if model is self.model:
            return
        if getattr(model, "hf_device_map", None) is not None:
            logger.warning("_move_model_to_device: the %s is on several devices, and stays.", type(model).__name__)
            return
        put_on_device(model, torch.device(device))

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """What to call in a forward pass: the engine for the trained model, any other model itself."""
        return self.model_wrapped if model is self.model else model

    def _prepare_input(self, data: Any) -> Any:
        """A part of a batch on the device, floating-point tensors in the precision of the engine."""
        return on_device(data, self._ds_trainer.device, self._ds_trainer.engines.copies.float_type)

    def _nested_gather(self, tensors: Any, name: str | None = None) -> Any:
        """Tensors of all replicas, concatenated along the first dimension (transformers 4). Collective."""
        return None if tensors is None else self.accelerator.gather(tensors)

    def _pad_across_processes(self, tensor: Any, pad_index: int = -100) -> Any:
        """Tensors padded along their second dimension to the longest of all ranks (transformers 4). Collective."""
        return self.accelerator.pad_across_processes(tensor, dim=1, pad_index=pad_index)

    def _gather_and_numpify(self, tensors: Any, name: str | None = None) -> Any:
        """:meth:`_nested_gather` as arrays (transformers 4). Collective."""
        gathered = self._nested_gather(tensors, name)
        return map_leaves(lambda leaf: leaf.cpu().numpy() if isinstance(leaf, torch.Tensor) else leaf, gathered)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor:
        """Items of the micro-batches of a step, over all ranks. ``get_batch_samples`` uses an override. Collective."""
        return self._ds_trainer.losses.count_step(batch_samples, device).divisor

    def _get_grad_norm(self, model: nn.Module | None = None, grad_norm: Any = None) -> float:
        """``grad_norm``, or the norm of the last step's gradient before clipping, as a number."""
        return self.engine.grad_norm() if grad_norm is None else float(grad_norm)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Warn of missing and unexpected keys in what ``load_state_dict`` returned."""
        ignored = set(getattr(self.model, "_keys_to_ignore_on_save", None) or ())
        missing = [name for name in load_result.missing_keys if name not in ignored]
        for what, names in (("missing", missing), ("unexpected", load_result.unexpected_keys)):
            if names:
                logger.warning("There were %s keys in the loaded checkpoint: %s.", what, ", ".join(names))


class MeasuredStages:
    """``_memory_tracker`` of transformers: ``start`` and ``stop_and_update_metrics``, which may be nested.

    Args:
        tracker: measures, with ``skip_memory_metrics=False``.
    """

    def __init__(self, tracker: MemoryTracker) -> None:
        self._tracker = tracker
        self._open: list[tuple[ExitStack, Stage]] = []

    def start(self) -> None:
        """Begin to measure an evaluation."""
        stack = ExitStack()
        self._open.append((stack, stack.enter_context(self._tracker.stage("eval"))))

    def stop_and_update_metrics(self, metrics: dict[str, Any] | None = None) -> None:
        """Add what was measured since the last :meth:`start` to ``metrics``."""
        if self._open:
            stack, stage = self._open.pop()
            if metrics is not None:
                metrics.update(stage.end())
            stack.close()
