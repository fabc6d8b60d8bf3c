"""Methods of the Trainer about one step: its micro-batches, their loss, the backward pass."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn

from ds_trainer.data.source_ids import SOURCE_IDS
from ds_trainer.training.engines import NO_ENGINE
from ds_trainer.training.overrides.called_methods import CalledMethods
from ds_trainer.utils.errors import ConfigError


class TrainingStep(CalledMethods):
    """What happens to the micro-batches of one optimizer step."""

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor]:
        """Fetch the micro-batches of one optimizer step and count the items of the global batch.

        Returns:
            The batches, and the item count over all ranks: a float32 scalar on ``device``, at least 1. One all-reduce.
            If no user code can read it, this is an estimate that is corrected later
            (:mod:`ds_trainer.training.loop.item_count`).
        """
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        assembly = self._ds_trainer
        if "_get_num_items_in_batch" in assembly.overridden:
            return batches, self._get_num_items_in_batch(batches, device)
        return batches, assembly.losses.count_step(batches, device).divisor

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Forward and backward pass of one micro-batch.

        Args:
            model: the engine.
            inputs: one micro-batch; with sequence sharding, the shard of this rank.
            num_items_in_batch: items of the global batch.

        Returns:
            The detached contribution of the micro-batch to the mean loss of the global batch. The sum over all
            micro-batches and ranks is that mean.
        """
        runner = self._ds_trainer.micro_batches
        if runner is None:
            raise ConfigError(NO_ENGINE)
        return runner.forward_backward(model, inputs, num_items_in_batch)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """The loss of one micro-batch, with the outputs of the model if ``return_outputs``.

        Override it for a custom loss. Either return the *sum* over items divided by ``num_items_in_batch``, or ignore
        that argument and return the *mean* over the items of the micro-batch. Both give the exact gradient
        (:mod:`ds_trainer.training.loop.loss_rule`).

        If the ``training_step`` of a subclass calls it with ``num_items_in_batch``, the loss is multiplied by the
        number of ranks, as in transformers, because ``accelerator.backward`` averages over ranks.

        Raises:
            ConfigError: the model returned no loss.
        """
        loss, outputs = self._ds_trainer.losses.default(model, inputs, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def compute_loss_context_manager(self) -> ExitStack:
        """The contexts around the loss computation of a training step: that of ``autocast_smart_context_manager``.

        Override it to add others.
        """
        contexts = ExitStack()
        contexts.enter_context(self.autocast_smart_context_manager())
        return contexts

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        """An empty context: the engine does the casts (bf16, fp16, torch_autocast). Override it for another context.

        Args:
            cache_enabled: ignored; part of the signature in transformers.
        """
        return nullcontext()

    def _prepare_inputs(self, inputs: Any) -> Any:
        """The batch on the device of this rank, with floating-point tensors in the precision of the engine.

        The numbers of sources (``source_ids``) are taken out of it.
        """
        assembly = self._ds_trainer
        own = "_prepare_input" in assembly.overridden
        prepared: Any = self._prepare_input(inputs) if own else assembly.engines.copies.take(inputs)
        assembly.losses.sources.ids = prepared.pop(SOURCE_IDS, None) if isinstance(prepared, MutableMapping) else None
        return prepared
