"""One optimizer step: fetch batches, count items, forward, backward, check for divergence, update, schedule.

:meth:`StepRunner.run` is the step. :meth:`MicroBatchRunner.forward_backward` implements ``Trainer.training_step``. All
that is constant over a run (which methods are overridden, whether sequences are sharded) is determined before the first
step, to keep the overhead of a micro-batch small: nothing here waits for the device, logs, or traverses modules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.callbacks.events import TrainingEvents
from ds_trainer.data.batch_structure import Dummy
from ds_trainer.data.sharded_batch import ShardedBatch
from ds_trainer.engine.own_updates import UPDATING, Unchanged
from ds_trainer.engine.zero3.shard_access import ShardAccess, is_compiled
from ds_trainer.monitor.health.run_health import RunHealth
from ds_trainer.monitor.throughput import CHECKS, ThroughputMeter
from ds_trainer.optim.schedule_stepping import current_lr, steps_on_metric
from ds_trainer.optim.script_optimizers import use_training_weights
from ds_trainer.training.loop.batch_splitting import with_equal_rows
from ds_trainer.training.loop.divergence_guard import DivergenceGuard, Update
from ds_trainer.training.loop.first_loss import FirstLoss
from ds_trainer.training.loop.first_steps import FirstSteps
from ds_trainer.training.loop.index_errors import explain_index_error
from ds_trainer.training.loop.item_count import ItemCount, count_of_script
from ds_trainer.training.loop.loss_computation import USE_THE_COUNT, LossComputation, LossMethod
from ds_trainer.training.loop.loss_window import LossWindow
from ds_trainer.training.loop.own_step import OwnStep
from ds_trainer.training.loop.token_counter import TokenCounter
from ds_trainer.training.model.micro_batch_rng import micro_batch_rng, seed_of_micro_batches
from ds_trainer.training.signatures import accepted_arguments
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError

if TYPE_CHECKING:
    from ds_trainer.accelerator.trainer_accelerator import TrainerAccelerator
    from ds_trainer.engine.training_engine import TrainingEngine
    from ds_trainer.training.loop.memory_recovery import MemoryRecovery
    from ds_trainer.training.protocol import TrainerProtocol


@dataclass(frozen=True, kw_only=True)
class StepMethods:
    """The methods of the Trainer that a step calls and that a subclass may override.

    Attributes:
        get_batch_samples: fetches the micro-batches of a step and counts their items.
        training_step: forward and backward pass of one micro-batch.
        takes_item_count: whether ``training_step`` takes ``num_items_in_batch``.
        compute_loss: the loss of one micro-batch.
        prepare_inputs: moves a batch to the device.
        loss_context: context managers around the loss computation; None if no subclass adds any.
        begin_copy: begins to copy the next micro-batch to the device; None: copies are made when they are needed.
        uses_accelerator: whether user code may call ``trainer.accelerator`` in a step.
        own_step: whether ``training_step`` is that of a subclass.
        updating: returns ``optimizer`` and ``lr_scheduler`` of the Trainer.
    """

    get_batch_samples: Callable[[Iterator[Any], int, torch.device], tuple[list[Any], torch.Tensor]]
    training_step: Callable[..., torch.Tensor]
    takes_item_count: bool
    compute_loss: LossMethod
    prepare_inputs: Callable[[Mapping[str, Any]], dict[str, Any]]
    loss_context: Callable[[], AbstractContextManager[Any]] | None
    begin_copy: Callable[[Any], None] | None
    uses_accelerator: bool
    own_step: bool
    updating: Callable[[], tuple[Any, Any]]

    @classmethod
    def of(
        cls, trainer: TrainerProtocol, changed: Collection[str], begin_copy: Callable[[Any], None] | None
    ) -> StepMethods:
        """The methods of ``trainer``, of which ``changed`` are those of a subclass or were replaced on the object."""
        contexts = not {"compute_loss_context_manager", "autocast_smart_context_manager"}.isdisjoint(changed)
        return cls(
            get_batch_samples=trainer.get_batch_samples,
            training_step=trainer.training_step,
            takes_item_count=bool(accepted_arguments(trainer.training_step, {"num_items_in_batch"})),
            compute_loss=LossMethod.of(trainer.compute_loss),
            prepare_inputs=trainer._prepare_inputs,
            loss_context=trainer.compute_loss_context_manager if contexts else None,
            begin_copy=begin_copy,
            uses_accelerator=trainer.compute_loss_func is not None or not USE_THE_COUNT.isdisjoint(changed),
            own_step="training_step" in changed,
            updating=partial(attrgetter(*UPDATING), trainer),
        )


class MicroBatchRunner:
    """Forward and backward passes on one engine.

    Args:
        methods: methods of the Trainer.
        losses: computes the loss.
        engine: runs forward and backward passes.
        accelerator: ``trainer.accelerator``, for user code.
        args: the training arguments.
    """

    def __init__(
        self,
        methods: StepMethods,
        losses: LossComputation,
        engine: TrainingEngine,
        accelerator: TrainerAccelerator,
        args: TrainingArguments,
    ) -> None:
        self._methods = methods
        self._losses = losses
        self._engine = engine
        self._module = engine.deepspeed.module
        self._accelerator = accelerator if methods.uses_accelerator else None
        watches = engine.stage == 3 and not is_compiled(self._module)
        self._watching: Any = partial(ShardAccess, self._module) if watches else nullcontext
        self._training_step = methods.training_step
        self._ranks = 1
        if methods.uses_accelerator and not methods.own_step:
            engine.allow_own_passes(completes_late=False)
        if methods.own_step:
            self._training_step = OwnStep(methods.training_step, engine, accelerator)
            self._ranks = engine.layout.seq_data_parallel_size
        self._seed = seed_of_micro_batches(args, engine.layout)
        self._layout, self._coordinates = engine.layout, engine.layout.coordinates(distributed.rank())
        self._loss_context = methods.loss_context or nullcontext
        own_context = losses.packed or losses.rows or losses.rule.balance
        self._plain = self._accelerator is None and self._seed is None and not own_context
        self.accumulation = 1
        """Micro-batches of this rank in the current step."""
        self.several_micro_batches = self.checks_parts = True
        """Whether the global batch is more than one micro-batch of one rank."""
        self.recovery: MemoryRecovery | None = None

    def run(self, batch: Any, items: ItemCount, step: int, index: int) -> torch.Tensor:
        """``training_step`` on one micro-batch.

        Args:
            batch: the micro-batch of the replica, before sequence sharding.
            items: items of the global batch.
            step: optimizer steps done.
            index: index of the micro-batch in the step.

        Returns:
            The contribution of this rank to the loss of the global batch: a scalar on the device, without graph.
        """
        keywords = {"num_items_in_batch": items.divisor} if self._methods.takes_item_count else {}
        if self._plain:
            return self._training_step(self._engine.deepspeed, batch, **keywords)
        with ExitStack() as stack:
            enter = stack.enter_context
            if self._accelerator is not None:
                enter(self._accelerator.batch(batch.local if isinstance(batch, ShardedBatch) else batch))
            local = enter(self._losses.sharded(batch))
            if self._seed is not None:
                enter(micro_batch_rng(self._seed, self._coordinates, step, index))
            return self._training_step(self._engine.deepspeed, local, **keywords)

    def forward_backward(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """See ``Trainer.training_step``."""
        losses, rule, method = self._losses, self._losses.rule, self._methods.compute_loss
        items = losses.items_of_step(num_items_in_batch)
        if not (model.training and self._module.training):  # a callback may have left it in evaluation mode
            model.train()
        first = None
        if not rule.verified and ((recovery := self.recovery) is None or not recovery.loss_is_known):
            found = None if recovery is None else recovery.loss_found
            prepare, several, checks = self._methods.prepare_inputs, self.several_micro_batches, self.checks_parts
            first = FirstLoss(losses, method, items, self._layout, prepare, several, checks_parts=checks, found=found)
        local = None if first is not None or rule.normalized else losses.local_items(inputs)
        equal = with_equal_rows(inputs) if first is None and rule.weighting.among_ranks else inputs
        prepared = self._methods.prepare_inputs(equal)
        with self._loss_context():
            if first is None:
                loss = losses.of(method, model, prepared, items.divisor)
            else:
                with self._watching():
                    loss, items = first.compute(model, prepared), first.items
                local = losses.local_items(inputs)
        contribution = rule.contribution(loss, local, items)
        by_source = losses.sources.window
        passes = self._engine.passes
        dummy = isinstance(inputs, Dummy) or (passes is not None and passes.is_dummy)
        dummy = dummy or (losses.empty and not rule.normalized)  # which counts the items of each micro-batch
        if dummy:
            contribution = contribution * 0.0
        elif by_source is not None:
            by_source.add(losses.sources.take())
        if first is not None:
            first.before_backward(contribution)
        # A copy if it is the tensor of the model: a CUDA graph reuses that memory for the next loss.
        kept = contribution.detach().clone() if contribution is loss else contribution.detach()
        if dummy:
            with self._engine.unused_parameters.dummy(kept):
                self._engine.backward(contribution)
        else:
            self._engine.backward(contribution)
        if first is not None:
            first.after_backward()
        return kept if self._ranks == 1 else kept * self._ranks  # the average over the ranks is the loss


class StepRunner:
    """Runs the optimizer steps of one training.

    Args:
        methods: methods of the Trainer.
        micro_batches: runs each micro-batch.
        losses: counts items.
        engine: updates the weights.
        events: callbacks.
        guard: handles steps whose loss or gradient diverges.
        health: is notified of each phase of the step.
        counter: counts samples, tokens and operations.
        meter: gets the time spent waiting for data.
        window: losses since the last log.
        optimizer, lr_scheduler: those of the run.
        device: the device of this rank.
        check_first: called with the first micro-batch, or the beginning of one that was cut, before anything is
            computed.
        recovery: runs a step again if memory runs out; None without ``auto_find_batch_size``.
        first_steps: looks at the first steps.

    Attributes:
        learning_rate: learning rate of the last step.
    """

    def __init__(
        self,
        *,
        methods: StepMethods,
        micro_batches: MicroBatchRunner,
        losses: LossComputation,
        engine: TrainingEngine,
        events: TrainingEvents,
        guard: DivergenceGuard,
        health: RunHealth,
        counter: TokenCounter,
        meter: ThroughputMeter,
        window: LossWindow,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: Any,
        device: torch.device,
        check_first: Callable[[Any], None],
        recovery: MemoryRecovery | None = None,
        first_steps: FirstSteps | None = None,
    ) -> None:
        self._methods = methods
        self._micro_batches = micro_batches
        self._losses = losses
        self._engine = engine
        self._events = events
        self._guard = guard
        self._health = health
        self._counter = counter
        self._meter = meter
        self._window = window
        self._optimizer = optimizer
        self._schedule = (
            None if engine.deepspeed_schedule is not None or steps_on_metric(lr_scheduler) else lr_scheduler
        )
        self._device = device
        self._unchanged = Unchanged(events.args, methods.updating)
        self._check_first: Callable[[Any], None] | None = check_first
        self._recovery = recovery
        micro_batches.checks_parts = recovery is None  # two samples may be too many
        micro_batches.recovery = recovery if engine.layout.world_size > 1 else None
        begin = methods.begin_copy if recovery is None else None  # a micro-batch may be split
        if begin is not None and losses.sharder is not None:  # whole rows are going to be cut
            self._begin_copy: Callable[[Any], Any] | None = lambda one: isinstance(one, ShardedBatch) and begin(one)
        else:
            self._begin_copy = begin
        self._first_steps = first_steps
        self.learning_rate: Any = float("nan")
        engine.during_backward = health.clock.backward
        self._gate_biases = None
        if "gate_bias_rate" in (own := events.args.optimizer_arguments(own=True)):
            from ds_trainer.training.model.expert_division import GateBiases

            self._gate_biases = GateBiases(engine.deepspeed.module, engine.layout, own["gate_bias_rate"])

    def run(self, source: Iterator[Any], micro_steps: int) -> Update:
        """One optimizer step. Collective.

        Args:
            source: gives the micro-batches of this replica.
            micro_steps: how many of them make this step.

        Raises:
            ConfigError: ``source`` ended before that, or a batch has tokens or labels out of the range of the model.
            TrainingDiverged: the guard stops the training.
        """
        events, engine, health, guard = self._events, self._engine, self._health, self._guard
        step = events.state.global_step
        events.notify("on_step_begin")
        use_training_weights(self._optimizer)

        # All micro-batches are fetched before the first is computed: a loss is divided by the items of the whole global
        # batch, and their number is summed over the ranks once in a step.
        data = health.begin_data(source)
        before = self._losses.items
        batches, divisor = self._methods.get_batch_samples(data, micro_steps, self._device)
        if self._losses.items is before:  # a script counts, or nobody
            own, count = self._losses.count_step(batches, self._device).divisor, self._losses.rule.count
            divisor = own if divisor is None else count_of_script(divisor, batches, count, engine.layout)
        items = self._losses.items_of_step(divisor)
        try:
            self._check(batches, micro_steps, step)
            if self._first_steps is not None:
                with health.clock.inside(CHECKS):
                    self._first_steps.begin(batches)
            if self._begin_copy is not None:
                self._begin_copy(batches[0])
            health.begin_compute()
            guard.begin_step()
            for batch in batches:
                self._counter.add(batch)
            # The host launches all passes of the step without a wait for the device: what ranks and host have to know
            # about them is asked for once, before the update.
            losses = self._passes(batches, items, step)
            engine.complete_gradients()
            if self._first_steps is not None:
                self._first_steps.before_update(batches, items)
            # From here on the gradients are those of the global batch. Whether they reach the weights is decided by all
            # ranks together: one rank that skips alone would have other weights from now on.
            events.notify("on_pre_optimizer_step")
            self._unchanged.check()
            self.learning_rate = current_lr(self._optimizer)
            health.begin_update()
            skip, recovery = guard.before_update(losses), self._recovery
            with nullcontext() if recovery is None else recovery.optimizer_step():
                applied = engine.step(skip_update=skip)
        except (IndexError, RuntimeError) as error:
            explain_index_error(error, batches, engine.deepspeed)
            raise
        update = guard.after_update(applied, batches, losses)
        events.notify("on_optimizer_step")
        if applied and self._gate_biases is not None:
            self._gate_biases.update()
        if applied and self._schedule is not None:
            self._schedule.step()

        loss = self._window.add_step(losses)
        first_steps = self._first_steps
        if first_steps is not None and first_steps.end(applied, loss, self.learning_rate):
            self._first_steps = None
        waited = data.seconds + health.seconds_ahead
        self._meter.add(waited=waited)
        health.step_done(step + 1, waited)
        return update

    def _passes(self, batches: list[Any], items: ItemCount, step: int) -> list[torch.Tensor]:
        """What the passes of this rank add to the loss of a step; again in smaller micro-batches if memory runs out."""
        engine, events, recovery, begin_copy = self._engine, self._events, self._recovery, self._begin_copy
        if recovery is not None:
            recovery.begin_step()
        while True:
            parts = batches if recovery is None else recovery.split(batches)
            self._window.begin_step()
            self._micro_batches.accumulation = len(parts)
            losses, notifies = [], len(parts) > 1 and bool(events.handler.listeners("on_substep_end"))
            for index, batch in enumerate(parts):
                last, local = index == len(parts) - 1, batch.local if isinstance(batch, ShardedBatch) else batch
                engine.begin_micro_batch(last, isinstance(local, Dummy))
                if self._gate_biases is not None:
                    self._gate_biases.begin_micro_batch(index, isinstance(local, Dummy))
                run = partial(self._micro_batches.run, items=items, step=step, index=index)
                losses.append(run(batch) if recovery is None else recovery.run(run, batch))
                if begin_copy is not None and not last:  # beside what the device still computes
                    begin_copy(parts[index + 1])
                if notifies and not last:
                    events.notify("on_substep_end")
            if recovery is None or not recovery.must_repeat(step):
                return losses

    def _check(self, batches: list[Any], micro_steps: int, step: int) -> None:
        if len(batches) != micro_steps:
            raise ConfigError(
                f"The training loader of rank {distributed.rank()} ended after {len(batches)} of {micro_steps} "
                f"micro-batches of step {step + 1}, although its length is larger."
            )
        self._micro_batches.several_micro_batches = micro_steps * self._engine.layout.seq_data_parallel_size > 1
        if self._check_first is not None:
            with self._health.clock.inside(CHECKS):
                first = batches[0]
                self._check_first(first.beginning if isinstance(first, ShardedBatch) else first)
            self._check_first = None
