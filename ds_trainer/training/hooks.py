"""``Hooks``: what a subclass of the Trainer may override. Each is really called by the loop.

The optimizer, the schedule, the loaders, the micro-batches of a step, and the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ds_trainer.arguments.completion import as_mapping
from ds_trainer.arguments.enums import SamplingStrategy
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.data.columns import drop_unused_columns
from ds_trainer.data.loader import FillerBatch
from ds_trainer.engine.training_engine import TrainingEngine
from ds_trainer.optim.optimizers import build_optimizer, decay_parameter_names, is_built_here, parameter_groups
from ds_trainer.optim.schedules import build_schedule
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.batches import check_dataset, checked_batch, labels_in, on_device, planned_loader
from ds_trainer.training.item_count import ItemCount
from ds_trainer.training.loss import LossRule, loss_in
from ds_trainer.utils.errors import ConfigError


class Hooks:
    """The overridable part of :class:`ds_trainer.training.trainer.Trainer`, which sets these attributes."""

    args: TrainingArguments
    device: torch.device
    model: nn.Module
    model_wrapped: nn.Module
    train_dataset: Any
    eval_dataset: Any
    data_collator: Callable[[list[Any]], Any]
    compute_loss_func: Callable[..., torch.Tensor] | None
    label_names: list[str]
    layout: ParallelLayout
    compiled: CompiledConfig
    loss_rule: LossRule
    optimizer: Any
    lr_scheduler: Any
    _engine: TrainingEngine | None
    _compute_loss_takes: set[str]
    _training_step_takes: set[str]
    _nobody_looks_at_counts: bool
    _items: ItemCount | None = None

    @property
    def engine(self) -> TrainingEngine:
        """The engine; it exists from the first ``train`` on. Raises ConfigError before."""
        if self._engine is None:
            raise ConfigError("There is no engine yet: it is built by train().")
        return self._engine

    # -- optimizer and schedule -----------------------------------------------------------------------------------

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make what was not handed in: ``self.optimizer``, then ``self.lr_scheduler``.

        What DeepSpeed builds itself (its own optimizers; a ``scheduler`` of the DeepSpeed file, and any schedule over
        such an optimizer) is None here and made with the engine.
        """
        if self.optimizer is None:
            self.optimizer = self.create_optimizer()
        if self.lr_scheduler is None and self.optimizer is not None and "scheduler" not in self.compiled:
            self.lr_scheduler = self.create_scheduler(num_training_steps, self.optimizer)

    def create_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of the compiled configuration, kept in ``self.optimizer``; None for one that DeepSpeed builds.

        Parameters are in two groups, with and without weight decay.
        """
        self.optimizer = (
            build_optimizer(self.compiled, self.parameter_groups()) if is_built_here(self.compiled) else None
        )
        return self.optimizer

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Trainable parameters with and without weight decay."""
        return parameter_groups(self.model, self.get_decay_parameter_names(self.model), self.args.weight_decay)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """The learning-rate schedule over ``num_training_steps`` optimizer steps; kept in ``self.lr_scheduler``."""
        self.lr_scheduler = build_schedule(
            self.args.lr_scheduler_type,
            self.optimizer if optimizer is None else optimizer,
            self.args.get_warmup_steps(num_training_steps),
            num_training_steps,
            as_mapping(self.args.lr_scheduler_kwargs),
        )
        return self.lr_scheduler

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters that weight decay applies to: all but biases and norms."""
        return decay_parameter_names(model)

    # -- data -----------------------------------------------------------------------------------------------------

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

    # -- one micro-batch ------------------------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor]:
        """Fetch the micro-batches of one optimizer step and count the items of the global batch.

        Returns:
            The batches, and the number of items in all of them on all ranks: a float32 scalar on ``device``, at
            least 1. One all-reduce. (Where no hook of a subclass could look at it, an estimate that is corrected
            afterwards: :mod:`ds_trainer.training.item_count`.)
        """
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        counts = [self.loss_rule.count(checked_batch(batch)) for batch in batches]
        own = torch.stack(counts).sum().to(device) if counts else torch.zeros((), dtype=torch.int64, device=device)
        self._items = ItemCount.of_all_ranks(own, overlap=self._nobody_looks_at_counts and self.loss_rule.verified)
        return batches, self._items.divisor

    def begin_step(self, iterator: Iterator[Any], rounds: int) -> tuple[list[Any], ItemCount]:
        """:meth:`get_batch_samples` for the loop, which wants the count as the loss rule does."""
        batches, items = self.get_batch_samples(iterator, rounds, self.device)
        if self._items is None or self._items.divisor is not items:  # a subclass counts in its own way
            self._items = ItemCount(torch.as_tensor(items, dtype=torch.float32, device=self.device))
        return batches, self._items

    def call_training_step(self, inputs: Any, items: ItemCount) -> torch.Tensor:
        """:meth:`training_step` with the arguments that it takes."""
        keywords = {"num_items_in_batch": items.divisor} if self._training_step_takes else {}
        return self.training_step(self.model_wrapped, inputs, **keywords)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Forward and backward pass of one micro-batch.

        Args:
            model: the engine.
            inputs: one micro-batch.
            num_items_in_batch: items of the global batch.

        Returns:
            The micro-batch's share of the global batch's mean loss, detached: summed over micro-batches and ranks it
            is that mean.
        """
        count = self._items
        if count is None or (num_items_in_batch is not None and num_items_in_batch is not count.divisor):
            count = ItemCount(torch.as_tensor(num_items_in_batch, dtype=torch.float32, device=self.device))
        rule = self.loss_rule
        own = None if rule.verified and rule.normalised else rule.count(inputs).to(self.device)
        filler = isinstance(inputs, FillerBatch)
        inputs = self._prepare_inputs(inputs)
        if rule.verified:
            loss = self.loss_of(model, inputs, count.divisor)
        else:
            leaf = count.divisor.clone().requires_grad_()
            loss = self.loss_of(model, dict(inputs), leaf)
            rule.verify(loss, leaf, lambda n: self._loss_without_graph(model, dict(inputs), n))
        share = rule.contribution(loss, own, count)
        if filler:
            share = share * 0.0
        self.engine.backward(share)
        return share.detach()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """The loss of one micro-batch, and the model's outputs where ``return_outputs``.

        Override it for a loss of your own. Either return the *sum* over items divided by ``num_items_in_batch``, or
        leave that argument alone and return the *mean* over the micro-batch's items: both give the exact gradient
        (:mod:`ds_trainer.training.loss`).

        Raises:
            ConfigError: the model returned no loss.
        """
        labels = None
        if self.compute_loss_func is not None:
            name = labels_in(inputs, self.label_names)
            labels = inputs.pop(name) if name is not None else None
            outputs = model(**inputs)
            loss = self.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch)
        else:
            keywords = {"num_items_in_batch": num_items_in_batch} if self.loss_rule.normalised else {}
            outputs = model(**inputs, **keywords)
            loss = loss_in(outputs, model, inputs)
        return (loss, outputs) if return_outputs else loss

    def loss_of(self, model: nn.Module, inputs: dict[str, Any], items: torch.Tensor) -> torch.Tensor:
        """:meth:`compute_loss` with the arguments that it takes."""
        keywords: dict[str, Any] = {"num_items_in_batch": items} if self._compute_loss_takes else {}
        return self.compute_loss(model, inputs, **keywords)

    def _loss_without_graph(self, model: nn.Module, inputs: dict[str, Any], items: torch.Tensor) -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            loss = self.loss_of(model, inputs, items)
        model.train()
        return loss

    def _prepare_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The batch on this rank's device."""
        return on_device(inputs, self.device)
