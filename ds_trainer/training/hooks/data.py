"""The data of a run: sizes and loaders."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.data.columns import CollatorOfWantedColumns, drop_unused_columns, has_columns
from ds_trainer.data.stream import length_of
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.training.batches import Sampling, check_dataset, lengths_for_evaluation, planned_loader, rounds_of
from ds_trainer.training.hooks.parts import Parts
from ds_trainer.training.run_plan import RunPlan
from ds_trainer.utils.errors import ConfigError


class DataHooks(Parts):
    """Batch arithmetic and the loaders of training and evaluation."""

    # Of an evaluation set by its name: the set, its collator, sizes, its loader.
    _kept_loaders: dict[str, tuple[Any, Any, Any, Any]]

    @property
    def batch_plan(self) -> BatchPlan:
        """Batch arithmetic of training."""
        return self._batch_plan_of(self.args)

    def _batch_plan_of(self, args: TrainingArguments) -> BatchPlan:
        return BatchPlan(
            self.layout, args.per_device_train_batch_size, args.gradient_accumulation_steps, args.dataloader_drop_last
        )

    def get_total_train_batch_size(self, args: TrainingArguments | None = None) -> int:
        """Samples of one optimizer step over all ranks: micro batch x accumulation x data-parallel replicas.

        The number of replicas is ``world size / (tp x cp x sp)``: the layout's arithmetic.

        Args:
            args: whose micro-batch and accumulation; default: the Trainer's.
        """
        return self._batch_plan_of(self.args if args is None else args).step_size

    def get_tp_size(self) -> int:
        """Ranks that share each weight matrix (tensor parallelism)."""
        return self.layout.tp

    def get_cp_size(self) -> int:
        """Ranks that share a sequence by ring attention (context parallelism)."""
        return self.layout.cp

    def get_sp_size(self) -> int:
        """Ranks that share a sequence by exchanging heads (sequence parallelism)."""
        return self.layout.sp

    def num_examples(self, dataloader: Any) -> int:
        """Samples that ``dataloader`` gives in one epoch, over all replicas.

        Where its dataset has no length: an estimate from the number of its batches and the batch size; a TypeError
        where that is not known either.
        """
        samples = length_of(getattr(dataloader, "dataset", None))
        return len(dataloader) * self.batch_plan.round_size if samples is None else samples

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: Any
    ) -> tuple[int, int, int, int, int, int | None, int]:
        """How long the run is. The loop takes these numbers, so a subclass may change them. Collective.

        Returns:
            Epochs (the last may be partial), optimizer steps of an epoch, samples of an epoch, samples of the whole
            run, samples of an optimizer step, micro-batches of each replica in an epoch (None where the data has no
            length: then an epoch counts as long as the run), optimizer steps of the run.

        Raises:
            ConfigError: the loaders of the ranks differ in length, or have none and there is no ``max_steps``.
        """
        plan = RunPlan.of(args, rounds_of(dataloader))
        step_size = self.get_total_train_batch_size(args)
        examples = plan.max_steps * step_size if plan.rounds_per_epoch is None else self.num_examples(dataloader)
        samples = plan.max_steps * step_size if args.max_steps > 0 else math.ceil(examples * args.num_train_epochs)
        return (
            *(plan.epochs, plan.steps_per_epoch, examples, samples),
            *(step_size, plan.rounds_per_epoch, plan.max_steps),
        )

    def get_train_dataloader(self) -> Any:
        """Micro-batches of this replica: the order follows from seed and epoch, the plan decides who holds what."""
        sampling = Sampling(self.args, self.train_dataset, self.processing_class)
        dataset, collate = self._wanted_columns(self.train_dataset)
        return planned_loader(dataset, self.batch_plan, self.args, collate, sampling)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Micro-batches of this replica for evaluation, in the dataset's order, or by length (``group_by_length``).

        With ``dataloader_persistent_workers`` a set keeps its loader, and that its loading processes, from one
        evaluation to the next; another dataset (object or length) gets another loader.

        Args:
            eval_dataset: a dataset, or the name of one in a dict of them; default: the one handed to the Trainer.

        Raises:
            ConfigError: there is no evaluation data.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        name = dataset if isinstance(dataset, str) else ""
        if isinstance(dataset, str):
            known = self.eval_dataset if isinstance(self.eval_dataset, dict) else {}
            if dataset not in known:
                raise ConfigError(
                    f"eval_dataset={dataset!r} is none of the Trainer's evaluation sets: {', '.join(known) or 'none'}."
                )
            dataset = known[dataset]
        if dataset is None:
            raise ConfigError("evaluate() needs an eval_dataset: pass one to the Trainer or to evaluate().")
        if not self.args.dataloader_persistent_workers:
            return self._loader_in_order(dataset, "eval_dataset")
        about = (length_of(dataset), self.args.per_device_eval_batch_size)
        kept = self._kept_loaders.get(name)
        if kept is None or kept[0] is not dataset or kept[1] is not self.data_collator or kept[2] != about:
            self._kept_loaders.pop(name, None)  # its processes end
            kept = (dataset, self.data_collator, about, self._loader_in_order(dataset, "eval_dataset"))
            self._kept_loaders[name] = kept
        return kept[3]

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Micro-batches of this replica for :meth:`predict`, in the dataset's order."""
        return self._loader_in_order(test_dataset, "test_dataset")

    def _loader_in_order(self, dataset: Any, name: str) -> Any:
        plan = BatchPlan(self.layout, self.args.per_device_eval_batch_size)
        check_dataset(dataset, name, plan)
        lengths = lengths_for_evaluation(self.args, dataset, self.processing_class)
        dataset, collate = self._wanted_columns(dataset)
        loader = planned_loader(dataset, plan, self.args, collate, lengths=lengths)
        loader.during = self.accelerator.batch
        return loader

    def _wanted_columns(self, dataset: Any) -> tuple[Any, Callable[[list[Any]], Any]]:
        """Dataset and collator so that only what the model takes reaches the collator."""
        if not self.args.remove_unused_columns:
            return dataset, self.data_collator
        if has_columns(dataset):
            return drop_unused_columns(dataset, self.model, self.label_names), self.data_collator
        return dataset, CollatorOfWantedColumns(self.data_collator, self.model, self.label_names)
