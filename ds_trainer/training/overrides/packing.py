"""Sample packing in the loaders of a Trainer, and its proof before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ds_trainer.arguments.enums import SamplingStrategy
from ds_trainer.arguments.redefined import is_redefined, packs
from ds_trainer.data.collators import default_data_collator
from ds_trainer.data.columns import base_model, has_columns
from ds_trainer.data.packing.batch import PackedFormat, PackingCollator
from ds_trainer.training.loop.auxiliary_loss import shows_auxiliary_loss
from ds_trainer.training.loop.loss_rule import loss_in
from ds_trainer.training.loop.packed_data import PackedData, RowSettings
from ds_trainer.training.loop.token_counter import number_format
from ds_trainer.training.model.label_shift import shifts_labels
from ds_trainer.training.model.packing.equality import PackedPass, check_packed_model
from ds_trainer.training.model.packing.support import has_experts, packed_format, row_length, strategy_of
from ds_trainer.training.model.preparation import compiles
from ds_trainer.training.overrides.private_methods import PrivateMethods
from ds_trainer.training.signatures import accepted_arguments
from ds_trainer.utils import distributed
from ds_trainer.utils.logging import CHECK, get_logger

logger = get_logger(__name__)

_PADDING_ONLY = ("DataCollatorWithPadding", "DefaultDataCollator")


class Packing(PrivateMethods):
    """Packed rows in place of samples, if ``packing`` asks for it."""

    packed_data: PackedData
    """The rows of the datasets."""
    compute_loss: Callable[..., Any]

    def packed_for_training(self, dataset: Any) -> tuple[Any, Callable[[list[Any]], Any]]:
        """The rows of the training data, and their collator."""
        in_order = self.args.train_sampling_strategy == SamplingStrategy.SEQUENTIAL
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return self._packed(dataset, "train_dataset", None if in_order else seed)

    def packed_for_evaluation(self, dataset: Any) -> tuple[Any, Callable[[list[Any]], Any]]:
        """The rows of evaluation data, in its order, and their collator."""
        return self._packed(dataset, "eval_dataset", None)

    def packs_evaluation(self) -> bool:
        """Whether evaluations use packed rows: not if predictions of single samples are needed."""
        args = self.args
        wanted = True if is_redefined(args, "eval_packing") or args.eval_packing is None else args.eval_packing
        generates = bool(getattr(args, "predict_with_generate", False))
        return packs(args) and wanted and self.compute_metrics is None and not generates

    def _packed(self, source: Any, name: str, seed: int | None) -> tuple[Any, Callable[[list[Any]], Any]]:
        length = row_length(self.args, self.model)
        assert length is not None  # packing_problems refuses it before
        dataset = self._remove_unused_columns(source) if has_columns(source) else source
        rows = self.packed_data.packed(source, dataset, name, RowSettings(length, strategy_of(self.args), seed))
        only_pads = self.data_collator is default_data_collator or type(self.data_collator).__name__ in _PADDING_ONLY
        collate = default_data_collator if only_pads else self.data_collator
        if not has_columns(source):
            collate = self._get_collator_with_removed_columns(collate)
        copies = only_pads and shifts_labels(base_model(self.model))
        return rows, PackingCollator(collate, length, self._packed_format(), copies, self.layout.cp)

    def _packed_format(self) -> PackedFormat:
        in_compiled_code = compiles(self.args, self.compiled)
        return packed_format(self.model, self.layout, self.label_names, self.processing_class, in_compiled_code)

    def check_packing(self, model: nn.Module, batch: Any) -> None:
        """Compare packed samples of the first batch with the same samples alone, once. Collective.

        Raises:
            ConfigError: they are not equal.
        """
        if self.packed_data.proven:
            return
        evaluates_in_bf16 = self.args.bf16_full_eval and not self.is_in_train
        run = PackedPass(
            model,
            self._mean_loss,
            self.loss_rule.count,
            self._prepare_inputs,
            self._shard_of,
            self._sum_of_shards,
            "bf16" if evaluates_in_bf16 else number_format(self.compiled, self.device),
            has_experts(self.model),
        )
        equality = check_packed_model(batch, self._packed_format(), run)
        self.packed_data.proven = True
        if distributed.rank() == 0:
            logger.info("packing: %s.", equality.text(), extra={CHECK: "packing"})

    def _mean_loss(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[torch.Tensor | None, Any]:
        """Mean loss over the targets of ``inputs`` (None if an auxiliary loss is added to it), and the outputs."""
        given = dict(inputs)
        if accepted_arguments(self.compute_loss, {"return_outputs"}):
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        else:
            loss, outputs = self.compute_loss(model, inputs), None
        if self.loss_rule.auxiliary or (outputs is not None and shows_auxiliary_loss(outputs)):
            return None, outputs
        return loss_in({"loss": loss}, model, given).detach(), outputs

    def _shard_of(self, batch: Mapping[str, Any]) -> AbstractContextManager[Any]:
        return self.losses.sharded(batch)

    def _sum_of_shards(self, value: torch.Tensor) -> torch.Tensor:
        distributed.all_reduce_sum(value, group=self.groups.sequence)
        return value
