"""The data of a run: sizes and loaders."""

from __future__ import annotations

from typing import Any

from ds_trainer.arguments.enums import SamplingStrategy
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.data.columns import drop_unused_columns
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.training.batches import check_dataset, planned_loader
from ds_trainer.training.hooks.parts import Parts
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
        """Samples of one optimizer step over all ranks: micro batch x accumulation x data-parallel replicas."""
        return self.batch_plan.step_size

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
            dataset = self.eval_dataset[dataset]
        if dataset is None:
            raise ConfigError("evaluate() needs an eval_dataset: pass one to the Trainer or to evaluate().")
        plan = BatchPlan(self.layout, self.args.per_device_eval_batch_size)
        check_dataset(dataset, "eval_dataset", plan)
        dataset = self._without_unused_columns(dataset)
        return planned_loader(dataset, plan, self.args, self.data_collator, seed=0, shuffle=False)

    def _without_unused_columns(self, dataset: Any) -> Any:
        if not self.args.remove_unused_columns:
            return dataset
        return drop_unused_columns(dataset, self.model, self.label_names)
