"""The data of a run: sizes and loaders."""

from __future__ import annotations

import math
from typing import Any

from ds_trainer.arguments.enums import SamplingStrategy
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.data.columns import drop_unused_columns
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.training.batches import check_dataset, planned_loader, rounds_of
from ds_trainer.training.hooks.parts import Parts
from ds_trainer.training.run_plan import RunPlan
from ds_trainer.utils.errors import ConfigError


class DataHooks(Parts):
    """Batch arithmetic and the loaders of training and evaluation."""

    @property
    def batch_plan(self) -> BatchPlan:
        """Batch arithmetic of training."""
        args = self.args
        return BatchPlan(
            self.layout, args.per_device_train_batch_size, args.gradient_accumulation_steps, args.dataloader_drop_last
        )

    def get_total_train_batch_size(self, args: TrainingArguments | None = None) -> int:
        """Samples of one optimizer step over all ranks: micro batch x accumulation x data-parallel replicas.

        The number of replicas is ``world size / (tp x cp x sp)``: the layout's arithmetic.
        """
        return self.batch_plan.step_size

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

        Where its dataset has no length: an estimate from the number of its batches and the batch size.
        """
        dataset = getattr(dataloader, "dataset", None)
        if hasattr(dataset, "__len__"):
            return len(dataset)  # type: ignore[arg-type]
        return len(dataloader) * self.batch_plan.round_size

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: Any
    ) -> tuple[int, int, int, int, int, int, int]:
        """How long the run is. The loop takes these numbers, so a subclass may change them. Collective.

        Returns:
            Epochs (the last may be partial), optimizer steps of an epoch, samples of an epoch, samples of the whole
            run, samples of an optimizer step, micro-batches of each replica in an epoch, optimizer steps of the run.

        Raises:
            ConfigError: the loaders of the ranks differ in length, or have none.
        """
        plan = RunPlan.of(args, rounds_of(dataloader))
        examples, step_size = self.num_examples(dataloader), self.get_total_train_batch_size(args)
        samples = plan.max_steps * step_size if args.max_steps > 0 else math.ceil(examples * args.num_train_epochs)
        return (
            *(plan.epochs, plan.steps_per_epoch, examples, samples),
            *(step_size, plan.rounds_per_epoch, plan.max_steps),
        )

    def get_train_dataloader(self) -> Any:
        """Micro-batches of this replica: the order follows from seed and epoch, the plan decides who holds what."""
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        dataset = self._without_unused_columns(self.train_dataset)
        shuffle = self.args.train_sampling_strategy != SamplingStrategy.SEQUENTIAL
        return planned_loader(dataset, self.batch_plan, self.args, self.data_collator, seed=seed, shuffle=shuffle)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Micro-batches of this replica for evaluation, in the dataset's order.

        Args:
            eval_dataset: a dataset, or the name of one in a dict of them; default: the one handed to the Trainer.

        Raises:
            ConfigError: there is no evaluation data.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            known = self.eval_dataset if isinstance(self.eval_dataset, dict) else {}
            if dataset not in known:
                raise ConfigError(
                    f"eval_dataset={dataset!r} is none of the Trainer's evaluation sets: {', '.join(known) or 'none'}."
                )
            dataset = known[dataset]
        if dataset is None:
            raise ConfigError("evaluate() needs an eval_dataset: pass one to the Trainer or to evaluate().")
        return self._loader_in_order(dataset, "eval_dataset")

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Micro-batches of this replica for :meth:`predict`, in the dataset's order."""
        return self._loader_in_order(test_dataset, "test_dataset")

    def _loader_in_order(self, dataset: Any, name: str) -> Any:
        plan = BatchPlan(self.layout, self.args.per_device_eval_batch_size)
        check_dataset(dataset, name, plan)
        dataset = self._without_unused_columns(dataset)
        loader = planned_loader(dataset, plan, self.args, self.data_collator, seed=0, shuffle=False)
        loader.during = self.accelerator.batch
        return loader

    def _without_unused_columns(self, dataset: Any) -> Any:
        if not self.args.remove_unused_columns:
            return dataset
        return drop_unused_columns(dataset, self.model, self.label_names)
