"""Methods of the Trainer for the data of a run: batch sizes and loaders."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ds_trainer.arguments.enums import SamplingStrategy
from ds_trainer.arguments.redefined import packs
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.data.columns import base_model, has_columns
from ds_trainer.data.stream import is_stream, length_of
from ds_trainer.training.loop.batches import (
    EpochOrder,
    Sampling,
    check_dataset,
    lengths_for_evaluation,
    micro_steps_of,
    planned_loader,
)
from ds_trainer.training.loop.run_plan import RunPlan, batch_plan_of, evaluation_plan_of
from ds_trainer.training.overrides.private_methods import PrivateMethods
from ds_trainer.utils.errors import ConfigError


class DataLoading(PrivateMethods):
    """Batch arithmetic and the loaders of training and evaluation."""

    def get_total_train_batch_size(self, args: TrainingArguments | None = None) -> int:
        """Samples of one optimizer step over all ranks: micro-batch x accumulation x data-parallel replicas.

        The number of replicas is ``world size / (tp x cp x sp)``.

        Args:
            args: the arguments with micro-batch and accumulation; default: those of the Trainer.
        """
        return batch_plan_of(self.args if args is None else args, self._ds_trainer.layout).global_batch_size

    def get_tp_size(self) -> int:
        """Ranks that share each weight matrix (tensor parallelism)."""
        return self._ds_trainer.layout.tp

    def get_cp_size(self) -> int:
        """Ranks that share a sequence by ring attention (context parallelism)."""
        return self._ds_trainer.layout.cp

    def get_sp_size(self) -> int:
        """Ranks that share a sequence by exchanging heads (sequence parallelism)."""
        return self._ds_trainer.layout.sp

    def num_examples(self, dataloader: Any) -> int:
        """Samples in one epoch of ``dataloader``, over all replicas.

        If its dataset has no length, this is an estimate from the number of batches and the batch size. Raises
        TypeError if that is unknown too.
        """
        samples = length_of(getattr(dataloader, "dataset", None))
        return len(dataloader) * self._ds_trainer.batch_plan.samples_per_micro_step if samples is None else samples

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: Any
    ) -> tuple[int, int, int, int, int, int | None, int]:
        """The length of the run. The loop uses these numbers, so a subclass may change them. Collective.

        Returns:
            Epochs (the last may be partial), optimizer steps in an epoch, samples in an epoch, samples in the whole
            run, samples in an optimizer step, micro-steps in an epoch (None if the data has no length; then the whole
            run counts as one epoch), optimizer steps in the run.

        Raises:
            ConfigError: the lengths of the loaders differ between ranks, or are unknown and there is no ``max_steps``.
        """
        plan = RunPlan.of(args, micro_steps_of(dataloader))
        global_batch_size = self.get_total_train_batch_size(args)
        examples = (
            plan.max_steps * global_batch_size if plan.micro_steps_per_epoch is None else self.num_examples(dataloader)
        )
        samples = (
            plan.max_steps * global_batch_size if args.max_steps > 0 else math.ceil(examples * args.num_train_epochs)
        )
        return (
            *(plan.epochs, plan.steps_per_epoch, examples, samples),
            *(global_batch_size, plan.micro_steps_per_epoch, plan.max_steps),
        )

    def get_train_dataloader(self) -> Any:
        """The training loader: micro-batches of this replica, in an order that follows from seed and epoch.

        Raises:
            ConfigError: there is no training data.
        """
        if self.train_dataset is None:
            raise ConfigError("There is no train_dataset: pass one to the Trainer.")
        source = self.train_dataset
        packing = self._ds_trainer.packing
        dataset, collate = packing.for_training(source) if packs(self.args) else _wanted_columns(self, source)
        collate = _in_buckets(self, collate, dataset)
        source = dataset if packs(self.args) else source
        order = None if is_stream(source) else self._get_train_sampler(source)
        sampling = (
            order.sampling
            if isinstance(order, EpochOrder)
            else Sampling(self.args, source, self.processing_class, order)
        )
        return planned_loader(dataset, self._ds_trainer.batch_plan, self.args, collate, sampling)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The evaluation loader: micro-batches of this replica, in dataset order or by length (``group_by_length``).

        With ``dataloader_persistent_workers``, a dataset keeps its loader and its worker processes from one evaluation
        to the next. Another dataset (object or length) gets another loader.

        Args:
            eval_dataset: a dataset, or the name of one in a dict of them; default: the one passed to the Trainer.

        Raises:
            ConfigError: there is no evaluation data.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        name = dataset if isinstance(dataset, str) else ""
        if isinstance(dataset, str):
            known = self.eval_dataset if isinstance(self.eval_dataset, dict) else {}
            if dataset not in known:
                raise ConfigError(
                    f"eval_dataset={dataset!r} is not an evaluation dataset of the Trainer; known: "
                    f"{', '.join(known) or 'none'}."
                )
            dataset = known[dataset]
        if dataset is None:
            raise ConfigError("evaluate() needs an eval_dataset: pass one to the Trainer or to evaluate().")
        if not self.args.dataloader_persistent_workers:
            return _loader_in_order(self, dataset, "eval_dataset")
        about = (length_of(dataset), self.args.per_device_eval_batch_size)
        kept = self._ds_trainer.eval_loaders
        cached = kept.get(name)
        if cached is None or cached[0] is not dataset or cached[1] is not self.data_collator or cached[2] != about:
            kept.pop(name, None)  # ends its worker processes
            cached = (dataset, self.data_collator, about, _loader_in_order(self, dataset, "eval_dataset"))
            kept[name] = cached
        return cached[3]

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The loader for :meth:`predict`: micro-batches of this replica, in dataset order."""
        return _loader_in_order(self, test_dataset, "test_dataset")


def _loader_in_order(trainer: DataLoading, dataset: Any, name: str) -> Any:
    assembly = trainer._ds_trainer
    plan = evaluation_plan_of(trainer.args, assembly.layout)
    check_dataset(dataset, name, plan)
    if name == "eval_dataset" and assembly.packing.evaluates():
        rows, collate = assembly.packing.for_evaluation(dataset)
        loader = planned_loader(rows, plan, trainer.args, collate)
    else:
        lengths = lengths_for_evaluation(trainer.args, dataset, trainer.processing_class)
        order = None if is_stream(dataset) else trainer._get_eval_sampler(dataset)
        dataset, collate = _wanted_columns(trainer, dataset)
        loader = planned_loader(dataset, plan, trainer.args, collate, lengths=lengths, order=order)
    loader.during = trainer.accelerator.batch
    return loader


def _wanted_columns(trainer: DataLoading, dataset: Any) -> tuple[Any, Callable[[list[Any]], Any]]:
    """Dataset and collator that pass on only the columns that the model takes."""
    if has_columns(dataset):
        return trainer._remove_unused_columns(dataset), trainer.data_collator
    return dataset, trainer._get_collator_with_removed_columns(trainer.data_collator)


def _in_buckets(trainer: DataLoading, collate: Callable[[list[Any]], Any], dataset: Any) -> Callable[[list[Any]], Any]:
    """``collate``, or what pads its batches to a few lengths (``length_buckets``)."""
    args, count, assembly = trainer.args, trainer.args.length_buckets, trainer._ds_trainer
    compiles_on_gpu = args.torch_compile and args.device_type == "cuda"
    if count is None and compiles_on_gpu and not assembly.reads_logits:  # a loss of the script may count padding
        count = 8  # as many shapes as torch.compile makes of one function
    if not count or packs(args):
        return collate
    from ds_trainer.data.length_buckets import LengthBuckets

    owners = (getattr(base_model(trainer.model), "config", None), trainer.processing_class)
    tokens = [getattr(owner, "pad_token_id", None) for owner in owners]
    chosen = LengthBuckets.choose(
        collate,
        dataset,
        assembly.batch_plan.micro_batch,
        count,
        in_order=args.train_sampling_strategy == SamplingStrategy.GROUP_BY_LENGTH,
        pad_token_id=next((token for token in tokens if isinstance(token, int) and token >= 0), None),
        label_names=trainer.label_names,
    )
    return chosen or collate
