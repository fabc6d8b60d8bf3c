"""``Packing``: sample packing in the loaders of a Trainer, and its proof before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_trainer.arguments.enums import SamplingStrategy
from ds_trainer.arguments.redefined import is_redefined, packs
from ds_trainer.data.collators import default_data_collator
from ds_trainer.data.columns import base_model, has_columns
from ds_trainer.training.loop.auxiliary_loss import shows_auxiliary_loss
from ds_trainer.training.loop.loss_rule import loss_in
from ds_trainer.training.loop.packed_data import PackedData, RowSettings
from ds_trainer.training.loop.token_counter import number_format
from ds_trainer.training.model.label_shift import shifts_labels
from ds_trainer.training.model.preparation import compiles
from ds_trainer.training.signatures import accepted_arguments
from ds_trainer.utils import distributed
from ds_trainer.utils.logging import CHECK, get_logger

if TYPE_CHECKING:
    from ds_trainer.data.packing.batch import PackedFormat
    from ds_trainer.training.assembly import Assembly
    from ds_trainer.training.protocol import TrainerProtocol

logger = get_logger(__name__)

_PADDING_ONLY = ("DataCollatorWithPadding", "DefaultDataCollator")


class Packing:
    """Packed rows in place of samples, if ``packing`` asks for it.

    Args:
        assembly: the components of the Trainer.

    Attributes:
        proven: whether the start-up comparison of packed samples with samples alone was made.
    """

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._data = PackedData()
        self.proven = False

    @property
    def _trainer(self) -> TrainerProtocol:
        return self._assembly.trainer

    def for_training(self, dataset: Any) -> tuple[Any, Callable[[list[Any]], Any]]:
        """The rows of the training data, and their collator."""
        in_order = self._assembly.args.train_sampling_strategy == SamplingStrategy.SEQUENTIAL
        seed = self._assembly.args.seed if self._assembly.args.data_seed is None else self._assembly.args.data_seed
        return self._packed(dataset, "train_dataset", None if in_order else seed)

    def for_evaluation(self, dataset: Any) -> tuple[Any, Callable[[list[Any]], Any]]:
        """The rows of evaluation data, in its order, and their collator."""
        return self._packed(dataset, "eval_dataset", None)

    def evaluates(self) -> bool:
        """Whether evaluations use packed rows: not if predictions of single samples are needed."""
        args = self._assembly.args
        wanted = True if is_redefined(args, "eval_packing") or args.eval_packing is None else args.eval_packing
        generates = bool(getattr(args, "predict_with_generate", False))
        return packs(args) and wanted and self._trainer.compute_metrics is None and not generates

    def _packed(self, source: Any, name: str, seed: int | None) -> tuple[Any, Callable[[list[Any]], Any]]:
        from ds_trainer.data.packing.batch import PackingCollator
        from ds_trainer.training.model.packing.support import row_length, strategy_of

        trainer, args = self._trainer, self._assembly.args
        length = row_length(args, trainer.model)
        assert length is not None  # packing_problems refuses it before
        dataset = trainer._remove_unused_columns(source) if has_columns(source) else source
        rows = self._data.packed(source, dataset, name, RowSettings(length, strategy_of(args), seed))
        given = trainer.data_collator
        only_pads = given is default_data_collator or type(given).__name__ in _PADDING_ONLY
        collate = default_data_collator if only_pads else given
        if not has_columns(source):
            collate = trainer._get_collator_with_removed_columns(collate)
        copies = only_pads and shifts_labels(base_model(self._trainer.model))
        return rows, PackingCollator(collate, length, self.packed_format(), copies, self._assembly.layout.cp)

    def packed_format(self) -> PackedFormat:
        """What the batches of packed rows need for the model."""
        from ds_trainer.training.model.packing.support import packed_format

        assembly, trainer = self._assembly, self._trainer
        in_compiled_code = compiles(assembly.args, assembly.compiled)
        return packed_format(
            trainer.model, assembly.layout, trainer.label_names, trainer.processing_class, in_compiled_code
        )

    def check(self, model: nn.Module, batch: Any, again: bool = False) -> None:
        """Compare packed samples of the first batch with the same samples alone, once; ``again`` for a new engine.
        Collective.

        Raises:
            ConfigError: they are not equal.
        """
        from ds_trainer.training.model.packing.equality import PackedPass, check_packed_model
        from ds_trainer.training.model.packing.support import has_experts

        if self.proven and not again:
            return
        evaluates_in_bf16 = self._assembly.args.bf16_full_eval and not self._trainer.is_in_train
        run = PackedPass(
            model=model,
            loss=self._mean_loss,
            count=self._assembly.losses.rule.count,
            prepare=self._trainer._prepare_inputs,
            sharded=self._shard_of,
            sum_of_shards=self._sum_of_shards,
            number_format="bf16"
            if evaluates_in_bf16
            else number_format(self._assembly.compiled, self._assembly.device),
            experts=has_experts(self._trainer.model),
        )
        equality = check_packed_model(batch, self.packed_format(), run)
        self.proven = True
        if distributed.rank() == 0:
            logger.info("packing: %s.", equality.text(), extra={CHECK: "packing"})

    def _mean_loss(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[torch.Tensor | None, Any]:
        """Mean loss over the targets of ``inputs`` (None if an auxiliary loss is added to it), and the outputs."""
        given = dict(inputs)
        if accepted_arguments(self._trainer.compute_loss, {"return_outputs"}):
            loss, outputs = self._trainer.compute_loss(model, inputs, return_outputs=True)
        else:
            loss, outputs = self._trainer.compute_loss(model, inputs), None
        if self._assembly.losses.rule.auxiliary or (outputs is not None and shows_auxiliary_loss(outputs)):
            return None, outputs
        return loss_in({"loss": loss}, model, given).detach(), outputs

    def _shard_of(self, batch: Mapping[str, Any]) -> AbstractContextManager[Any]:
        return self._assembly.losses.sharded(batch)

    def _sum_of_shards(self, value: torch.Tensor) -> torch.Tensor:
        distributed.all_reduce_sum(value, group=self._assembly.groups.sequence)
        return value
