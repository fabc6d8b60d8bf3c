"""The training loop: epochs, optimizer steps, micro-batches, and what happens after each.

One optimizer step::

    fetch all micro-batches of the step; count their items; one all-reduce of the count
    for each micro-batch: forward, loss / items of the global batch, backward
    reduce, clip, update; advance the schedule
    log, evaluate, save, stop: as the callbacks decide, agreed by all ranks

Nothing on the per-micro-batch path waits for the device, logs, or walks modules; what a step waits for is listed in
docs/throughput.md.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ds_trainer.arguments.enums import SaveStrategy, TokenCount
from ds_trainer.monitor.memory import memory_in_use_gb
from ds_trainer.monitor.throughput import ThroughputMeter, TimedIterator
from ds_trainer.optim.stepping import rate_of, step_on_metric, steps_on_metric
from ds_trainer.optim.swapping import weights_of_training
from ds_trainer.training.best_model import judge
from ds_trainer.training.data_place import DataPlace
from ds_trainer.training.divergence import Update
from ds_trainer.training.run_plan import RunPlan
from ds_trainer.training.signatures import accepted_arguments
from ds_trainer.training.stopping.stopper import EvaluationGivenUp
from ds_trainer.training.window_losses import WindowLosses
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.seeds import random_state, restore_random_state

if TYPE_CHECKING:
    from ds_trainer.callbacks.state import TrainerControl
    from ds_trainer.training.trainer import Trainer


_DECISIONS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


def _agree(control: TrainerControl) -> None:
    """Make one rank's decision everybody's, so that no rank enters a collective alone. Between hosts."""
    votes = distributed.agree(torch.tensor([int(getattr(control, name)) for name in _DECISIONS]))
    for name, vote in zip(_DECISIONS, votes, strict=True):
        setattr(control, name, bool(vote))


_NOTHING_IN_IT = (
    "The training data is empty: its iterator ended before the first batch (with dataloader_drop_last, before the "
    "first whole round)."
)
_READ_ONCE = (
    "The training data ended after {0} steps and gave nothing when it was read again, as a generator does. Pass an "
    "object whose __iter__ begins anew each time, or set max_steps={0}."
)


class TrainOutput(NamedTuple):
    """What ``train`` returns: optimizer steps done, mean training loss, and the run's metrics."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class TrainLoop:
    """One run over a loader, from ``state.global_step`` to the end of the plan.

    Args:
        trainer: whose hooks, engine and callbacks are used.
        plan: the length of the run.
        place: where the run begins in its data.
        ignore_keys: outputs that evaluations leave out.
    """

    def __init__(self, trainer: Trainer, plan: RunPlan, place: DataPlace, ignore_keys: list[str] | None = None) -> None:
        self.trainer = trainer
        self.plan = plan
        self.place = place
        self.ignore_keys = ignore_keys
        self.meter = ThroughputMeter()
        self.work = trainer.begin_work(self.meter)
        self.health = trainer.begin_health()
        self._log_keywords = {"start_time": time.time()} if accepted_arguments(trainer.log, {"start_time"}) else {}
        # Kept on the device: reading them would make the host wait for it.
        self._losses = WindowLosses(trainer.device, trainer.args.logging_nan_inf_filter, trainer.gradient_group())
        self._window_start = trainer.state.global_step
        self._loss_sum, self._loss_steps = 0.0, 0
        self._first_step = trainer.state.global_step
        self._learning_rate: Any = math.nan  # of the last step
        self._stopped = False
        self._schedule_follows_metric = steps_on_metric(trainer.lr_scheduler)

    def run(self) -> TrainOutput:
        """Train until the plan is done or a callback stops it."""
        with self.health:
            return self._run()

    def _run(self) -> TrainOutput:
        trainer, state, args = self.trainer, self.trainer.state, self.trainer.args
        handler = trainer.callback_handler
        with self._aside("on_train_begin"):  # a tracker may take its time to open a run
            trainer.control = handler.on_train_begin(args, state, trainer.control)
        if args.eval_on_start and self._evaluate() is None:
            trainer.raise_stopped()
        if trainer.evaluation_is_due:  # the run was stopped before it came to it
            trainer.evaluation_is_due, trainer.control.should_evaluate = False, True
            self._log_evaluate_save()
        if self._stopped or (not self._is_done() and trainer.stopper.before_first_step()):
            trainer.raise_stopped()
        while self.place.epoch < self.plan.epochs or self._lacks_steps():
            if self._is_done() and not self.place.is_inside:
                break
            trainer.control = handler.on_epoch_begin(args, state, trainer.control)
            self._run_epoch()
            if self._stopped:
                self._save_and_stop()
            trainer.control = handler.on_epoch_end(args, state, trainer.control)
            self.place.next_epoch()
            self._log_evaluate_save()
            if self._stopped:
                self._save_and_stop()
            if trainer.control.should_training_stop:
                break
        trainer.stopper.no_more_steps()
        self._settle_save(wait=True)
        with self.health.aside("the end of training"):
            self._close_window()
            output = self._output()
            trainer.keep_best()
            trainer.control = handler.on_train_end(args, state, trainer.control)
        return output

    # -- one epoch, one step --------------------------------------------------------------------------------------

    def _run_epoch(self) -> None:
        trainer, state, place = self.trainer, self.trainer.state, self.place
        batches = place.batches()
        while not self._is_done():
            rounds = place.rounds_ahead(batches)
            if rounds == 0:
                if place.steps == 0:
                    raise ConfigError(_NOTHING_IN_IT if place.epoch == 0 else _READ_ONCE.format(state.global_step))
                break
            update = self._run_step(batches, rounds)
            state.epoch = place.advance(rounds)
            if update is Update.ROLLED_BACK:
                self._losses.forget()
                self._window_start = state.global_step
                continue
            state.global_step += 1
            if state.global_step == self._first_step + 1:
                trainer.prepare_saves()
            trainer.control = trainer.callback_handler.on_step_end(trainer.args, state, trainer.control)
            if trainer.control.should_epoch_stop:
                place.leave()
            if trainer.stopper.after_step() and self._can_stop():
                self._stopped = True
                break
            self._log_evaluate_save()
            if self._stopped or trainer.control.should_epoch_stop or trainer.control.should_training_stop:
                break

    def _is_done(self) -> bool:
        """Whether the run has done its steps."""
        return self.trainer.state.global_step >= self.plan.max_steps

    def _lacks_steps(self) -> bool:
        """Whether ``max_steps`` are asked for and the run has passed over data: it reads on until they are done."""
        return self.trainer.args.max_steps > 0 and self.trainer.guard.skipped_data and not self._is_done()

    def _run_step(self, iterator: Iterator[Any], rounds: int) -> Update:
        trainer, args, state = self.trainer, self.trainer.args, self.trainer.state
        handler, engine = trainer.callback_handler, trainer.engine
        trainer.control = handler.on_step_begin(args, state, trainer.control)
        weights_of_training(trainer.optimizer)
        data = TimedIterator(self.health.loads_data(iterator))
        batches, items = trainer.begin_step(data, rounds)
        if len(batches) != rounds:
            raise ConfigError(
                f"The training loader of rank {distributed.rank()} ended after {len(batches)} of {rounds} "
                f"micro-batches of step {state.global_step + 1}, although its length is {self.plan.rounds_per_epoch}."
            )
        self.health.computes()
        trainer.guard.begin_step()
        shares = []
        for index, batch in enumerate(batches):
            last = index == rounds - 1
            engine.begin_micro_batch(last)
            self.work.add(batch)
            shares.append(trainer.call_training_step(batch, items))
            self._losses.add(shares[-1])
            if not last:
                trainer.control = handler.on_substep_end(args, state, trainer.control)
        trainer.control = handler.on_pre_optimizer_step(args, state, trainer.control)
        self._learning_rate = rate_of(trainer.optimizer)
        self.health.updates()
        update = trainer.guard.update(batches, shares)
        trainer.control = handler.on_optimizer_step(args, state, trainer.control)
        if update is Update.APPLIED and engine.own_schedule is None and not self._schedule_follows_metric:
            trainer.lr_scheduler.step()
        self._losses.end_step()
        self._empty_cache(state.global_step + 1)
        self.meter.add(waited=data.seconds)
        self.health.step_done(state.global_step + 1, data.seconds)
        return update

    # -- after a step ---------------------------------------------------------------------------------------------

    def _log_evaluate_save(self) -> None:
        trainer = self.trainer
        self._settle_save()
        if trainer.callbacks_may_differ:
            _agree(trainer.control)
        # A callback may put another control in place at any of these events, so it is looked up anew.
        if trainer.control.should_log and trainer.state.global_step > self._window_start:
            trainer.log(self._close_window(), **self._log_keywords)
        if trainer.control.should_evaluate:
            trainer.store_flos()
            metrics = self._evaluate()
            if metrics is None:
                self._stopped = True
                return
            if self._schedule_follows_metric:  # not at the start: nothing has been learned yet
                step_on_metric(trainer.lr_scheduler, metrics, trainer.args)
            self._compare(metrics)
        if trainer.control.should_save:
            trainer.store_flos()
            with self._aside("saving"):
                trainer.save_in_training()
            trainer.control.should_save = False

    def _can_stop(self) -> bool:
        """Whether there is anything left that another process could go on with. Collective."""
        if self.trainer.callbacks_may_differ:
            _agree(self.trainer.control)
        return not (self._is_done() or self.trainer.control.should_training_stop)

    def _save_and_stop(self) -> None:
        """The run ends here before its time, at a checkpoint. An evaluation that is due is left to whoever goes on.

        Raises:
            TrainingStopped: always.
        """
        trainer, state = self.trainer, self.trainer.state
        if trainer.control.should_log and state.global_step > self._window_start:
            trainer.log(self._close_window(), **self._log_keywords)
        with self.health.aside("saving"):
            trainer.save_and_stop()
            trainer.control = trainer.callback_handler.on_train_end(trainer.args, state, trainer.control)
        trainer.raise_stopped()

    @contextmanager
    def _aside(self, what: str) -> Iterator[None]:
        """For what is no training: it counts for no speed, and may take long."""
        with self.meter.paused(), self.health.aside(what):
            yield

    def _settle_save(self, wait: bool = False) -> None:
        """Tell of the checkpoint that was written meanwhile."""
        if self.trainer.saves_in_flight:
            with self._aside("saving"):
                self.trainer.settle_save(wait)

    def _evaluate(self) -> dict[str, float] | None:
        """The metrics; None where all ranks have agreed to stop before there were any: then all is as it was before."""
        trainer, before = self.trainer, random_state()
        # A run that a callback has ended before its last step must not go on in another process.
        may_stop = self._is_done() or not trainer.control.should_training_stop
        try:
            with self._aside("evaluation"), trainer.stopper.evaluation():
                trainer.asked_to_stop = trainer.stopper.after_step if may_stop else None
                metrics = trainer.evaluate(ignore_keys=self.ignore_keys)
                trainer.report_evaluation(metrics)
        except EvaluationGivenUp:
            weights_of_training(trainer.optimizer)
            restore_random_state(before)
            return None
        finally:
            trainer.asked_to_stop = None
            trainer.model_wrapped.train()
        return metrics

    def _compare(self, metrics: dict[str, float]) -> None:
        """Is this model the best so far? That, and what callbacks made of the evaluation, holds for all ranks."""
        trainer = self.trainer
        is_best = judge(trainer.args, trainer.state, metrics)
        if trainer.args.save_strategy == SaveStrategy.BEST:
            trainer.control.should_save = is_best
        if trainer.callbacks_may_differ:
            _agree(trainer.control)

    def _close_window(self) -> dict[str, float]:
        """Logs of the steps since the last log; begins a new window. Waits for the device."""
        trainer = self.trainer
        steps = trainer.state.global_step - self._window_start
        if steps == 0:
            return {}
        loss, counted = self._losses.close()
        self._window_start = trainer.state.global_step
        self._loss_sum += loss * counted if counted else 0.0
        self._loss_steps += counted
        trainer.store_flos()
        logs = {
            "loss": loss,
            "grad_norm": trainer.engine.grad_norm(),
            "learning_rate": float(self._learning_rate),
            **self.work.rates(),
            "memory_gb": memory_in_use_gb(trainer.device),
        }
        if counted < steps:
            logs["steps_with_nonfinite_loss"] = float(steps - counted)
        if trainer.guard.incidents.skipped:
            logs["skipped_steps"] = float(trainer.guard.incidents.skipped)  # of the whole run
        return logs

    def _empty_cache(self, step: int) -> None:
        every = self.trainer.args.torch_empty_cache_steps
        if every is not None and step % every == 0 and self.trainer.device.type == "cuda":
            torch.cuda.empty_cache()

    def _output(self) -> TrainOutput:
        trainer, state = self.trainer, self.trainer.state
        loss = self._loss_sum / self._loss_steps if self._loss_steps else math.nan
        rates = self.meter.overall()
        metrics = {
            "train_runtime": rates.seconds,
            "train_samples_per_second": rates.samples_per_second,
            "train_steps_per_second": rates.steps_per_second,
            **({"train_tokens_per_second": rates.tokens_per_second} if self.work.has_tokens else {}),
            "total_flos": state.total_flos,
            "train_loss": loss,
            **({} if trainer.load_report is None else trainer.load_report.metrics()),
            **trainer.stage.end(),
        }
        trainer.log(metrics)
        if trainer.args.include_num_input_tokens_seen != TokenCount.NO:
            metrics["num_input_tokens_seen"] = state.num_input_tokens_seen
        return TrainOutput(state.global_step, loss, {**metrics, "epoch": state.epoch or 0.0})
