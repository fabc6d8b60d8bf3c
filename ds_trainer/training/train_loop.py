"""The training loop: epochs, optimizer steps, and the actions after each step.

One epoch::

    while there are micro-batches:
        one optimizer step                                    (loop/step.py)
        log, evaluate, save, stop: decided by the callbacks, agreed by all ranks

docs/reference/throughput.md lists where a step waits for the device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from ds_trainer.arguments.enums import IntervalStrategy, SaveStrategy, TokenCount
from ds_trainer.monitor.health.run_health import RunHealth
from ds_trainer.monitor.memory import memory_in_use_gb
from ds_trainer.monitor.throughput import ThroughputMeter
from ds_trainer.optim.schedule_stepping import step_on_metric, steps_on_metric
from ds_trainer.optim.script_optimizers import use_training_weights
from ds_trainer.training.loop.best_model import judge
from ds_trainer.training.loop.divergence_guard import Update
from ds_trainer.training.loop.loss_window import LossWindow
from ds_trainer.training.loop.packed_data import running_log
from ds_trainer.training.loop.step import StepRunner
from ds_trainer.training.loop.token_counter import TokenCounter
from ds_trainer.training.loop.training_run import TrainingRun
from ds_trainer.training.resume.checkpointer import Checkpointer
from ds_trainer.training.signatures import accepted_arguments
from ds_trainer.training.stopping.stop_controller import EvaluationAborted, StopController
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.printable import say
from ds_trainer.utils.seeds import random_state, restore_random_state

if TYPE_CHECKING:
    from ds_trainer.monitor.step_profiler import StepProfiler

_EMPTY_DATA = (
    "The training data is empty: its iterator ended before the first batch (with dataloader_drop_last, before the "
    "first full micro-step)."
)
_READ_ONCE = (
    "The training data ended after {0} steps and was empty when it was read again, like a generator. Pass an object "
    "whose __iter__ starts again each time, or set max_steps={0}."
)


class TrainOutput(NamedTuple):
    """The result of ``train``: optimizer steps done, mean training loss, and the metrics of the run.

    If there was nothing left to train, the loss is NaN, and the metrics have no ``train_loss``.
    """

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class TrainLoop:
    """One run over a loader, from ``state.global_step`` to the end of the plan.

    Args:
        run: the training.
        step: runs optimizer steps.
        checkpointer: saves checkpoints, and has the data cursor.
        stop: decides whether the run stops early.
        health: watches for hangs and stragglers.
        meter: measures the speed.
        counter: counts samples, tokens and operations.
        window: losses since the last log.
        evaluate: evaluates and returns metrics. Its argument is called between micro-batches; if it returns True, the
            evaluation is aborted.
        save_checkpoint: saves a checkpoint, in the background if possible.
        own_flos: ``store_flos`` of a subclass, whose ``state.total_flos`` stays; None: there is none.
        profiler: profiles some steps on this rank; None: none.
    """

    def __init__(
        self,
        *,
        run: TrainingRun,
        step: StepRunner,
        checkpointer: Checkpointer,
        stop: StopController,
        health: RunHealth,
        meter: ThroughputMeter,
        counter: TokenCounter,
        window: LossWindow,
        evaluate: Callable[[Callable[[], bool] | None], dict[str, float]],
        save_checkpoint: Callable[[], None],
        own_flos: Callable[[], None] | None = None,
        profiler: StepProfiler | None = None,
    ) -> None:
        self._run = run
        self._own_flos = own_flos
        self._plan = run.plan
        self._events = run.events
        self._step = step
        self._checkpointer = checkpointer
        self._cursor = checkpointer.cursor
        self._guard = checkpointer.guard
        self._stop = stop
        self._health = health
        self._meter = meter
        self._counter = counter
        self._window = window
        self._evaluate_model = evaluate
        self._save_checkpoint = save_checkpoint
        self._profiler = profiler
        self._logs_time = bool(accepted_arguments(run.log, {"start_time"}))
        self._window_start = self._first_step = run.events.state.global_step
        self._seen_before = run.events.state.num_input_tokens_seen
        self._loss_sum, self._loss_steps = 0.0, 0
        self._stopped = False
        self._schedule_follows_metric = steps_on_metric(run.lr_scheduler)

    def run(self) -> TrainOutput:
        """Train until the plan is done or a callback stops the training."""
        with self._health:
            return self._train()

    def _train(self) -> TrainOutput:
        events, cursor, stop = self._events, self._cursor, self._stop
        with self._paused("on_train_begin"):  # a tracker may need time to open a run
            events.notify("on_train_begin")
        if events.args.eval_on_start and self._evaluate() is None:
            self._raise_stopped()
        if self._checkpointer.evaluation_is_due:  # the previous process was stopped before a due evaluation
            self._checkpointer.evaluation_is_due, events.control.should_evaluate = False, True
            self._log_evaluate_save()
        if self._stopped or (not self._is_done() and stop.before_first_step()):
            self._raise_stopped()
        while cursor.epoch < self._plan.epochs or self._lacks_steps():
            if self._is_done() and not cursor.is_inside:
                break
            events.notify("on_epoch_begin")
            self._run_epoch()
            if self._stopped:
                self._save_and_stop()
            events.notify("on_epoch_end")
            cursor.next_epoch()
            self._agree()
            self._log_evaluate_save()
            if self._stopped:
                self._save_and_stop()
            if events.control.should_training_stop:
                break
        if self._profiler is not None:
            self._profiler.finish()
        stop.no_more_steps()
        self._report_save(wait=True)
        with self._health.paused("the end of training"):
            logs = self._close_window()
            if logs and events.args.logging_strategy != IntervalStrategy.NO:  # a callback has ended the training
                self._log(logs)
            output = self._output()
            self._checkpointer.keep_best()
            events.notify("on_train_end")
            self._run.engine.follow_written_weights()
        self._run.engine.updates.close()  # a script may go on with the optimizer by itself
        return output

    def _run_epoch(self) -> None:
        events, cursor = self._events, self._cursor
        state, batches = events.state, cursor.batches()
        while not self._is_done():
            with nullcontext() if self._plan.micro_steps_per_epoch is not None else self._health.reading_ahead():
                micro_steps = cursor.micro_steps_ahead(batches)
            if micro_steps == 0:
                if cursor.steps == 0:
                    raise ConfigError(_EMPTY_DATA if cursor.epoch == 0 else _READ_ONCE.format(state.global_step))
                break
            update = self._run_step(batches, micro_steps)
            self._empty_cache(state.global_step + 1)
            state.epoch = cursor.advance(micro_steps)
            if update is Update.ROLLED_BACK:
                self._window.forget()
                self._window_start = state.global_step
                continue
            state.global_step += 1
            if state.global_step == self._first_step + 1:
                self._checkpointer.prepare()
            events.notify("on_step_end")
            self._agree()
            if self._stop.after_step() and self._can_stop():
                self._stopped = True
                break
            self._log_evaluate_save()
            if self._stopped or events.control.should_epoch_stop or events.control.should_training_stop:
                break

    def _run_step(self, batches: Any, micro_steps: int) -> Update:
        if self._profiler is None:
            return self._step.run(batches, micro_steps)
        return self._profiler.run(lambda: self._step.run(batches, micro_steps))

    def _is_done(self) -> bool:
        """Whether the run has done its steps."""
        return self._events.state.global_step >= self._plan.max_steps

    def _lacks_steps(self) -> bool:
        """Whether more epochs are needed to reach ``max_steps``, because a rollback has skipped data."""
        return self._events.args.max_steps > 0 and self._guard.skipped_data and not self._is_done()

    # -- after a step -------------------------------------------------------------------------------------------------

    def _agree(self) -> None:
        """Agree on the decisions of the callbacks so far. Collective."""
        self._report_save()
        self._decide()

    def _decide(self) -> None:
        self._events.agree_on_decisions()
        if self._events.control.should_epoch_stop and self._cursor.is_inside:
            self._cursor.leave()  # a checkpoint of this step says so, whatever event the decision came from

    def _log_evaluate_save(self) -> None:
        """Do what all ranks have decided; callbacks may decide more after each part, alone on a rank. Collective."""
        events = self._events
        # A callback may replace the control at any of these events, so it is read again after each.
        if events.control.should_log and events.state.global_step > self._window_start:
            self._log(self._close_window())
            self._decide()
        if events.control.should_evaluate:
            self._store_flos()
            metrics = self._evaluate()
            if metrics is None:
                self._stopped = True
                return
            if self._schedule_follows_metric:  # the evaluation of eval_on_start does not step it
                step_on_metric(self._run.lr_scheduler, metrics, events.args)
            self._compare(metrics)
        if events.control.should_save:
            self._store_flos()
            with self._paused("saving"):
                self._save_checkpoint()
            self._decide()
            events.control.should_save = False

    def _report_save(self, wait: bool = False) -> None:
        """Report a checkpoint that was written in the background since the last call."""
        if self._checkpointer.save_in_progress:
            with self._paused("saving"):
                if wait:
                    self._checkpointer.wait()
                else:
                    self._checkpointer.poll()

    def _evaluate(self) -> dict[str, float] | None:
        """Evaluate and return the metrics; None, without side effects, if all ranks have agreed to stop meanwhile."""
        run, before = self._run, random_state()
        # A run that a callback has ended early must not resume in another process.
        may_stop = self._is_done() or not self._events.control.should_training_stop
        try:
            with self._paused("evaluation"), self._stop.evaluation():
                return self._evaluate_model(self._stop.after_step if may_stop else None)
        except EvaluationAborted:
            use_training_weights(run.optimizer)
            restore_random_state(before)
            return None
        finally:
            run.engine.deepspeed.train()

    def _compare(self, metrics: dict[str, float]) -> None:
        """Compare with the best model so far, and agree on the decisions of the callbacks after the evaluation."""
        events = self._events
        is_best = judge(events.args, events.state, metrics)
        if events.args.save_strategy == SaveStrategy.BEST:
            events.control.should_save = is_best
        self._decide()

    def _close_window(self) -> dict[str, float]:
        """Return the logs of the steps since the last log, and begin a new window. Waits for the device."""
        run, state = self._run, self._events.state
        steps = state.global_step - self._window_start
        if steps == 0:
            return {}
        loss, counted = self._window.close()
        self._window_start = state.global_step
        self._loss_sum += loss * counted if counted else 0.0
        self._loss_steps += counted
        self._store_flos()
        logs = {
            "loss": loss,
            **self._window.close_sources(),
            "grad_norm": run.engine.grad_norm(),
            "learning_rate": float(self._step.learning_rate),
            **self._counter.rates(),
            **running_log(run.loader),
            "memory_gb": memory_in_use_gb(run.device),
        }
        if run.batch_plan.layout.ep > 1:
            from ds_trainer.training.model.expert_division import expert_log

            logs |= expert_log(run.model, run.batch_plan.layout, steps, run.device)
        if counted < steps:
            logs["steps_with_nonfinite_loss"] = float(steps - counted)
        if self._guard.incidents.skipped:
            logs["skipped_steps"] = float(self._guard.incidents.skipped)  # in the whole run
        return logs

    def _log(self, logs: dict[str, float]) -> None:
        """Log a window of steps. Its start is moved by the pauses: train_runtime means the same in every log."""
        keywords = {"start_time": time.time() - self._meter.overall().seconds} if self._logs_time else {}
        self._run.log(logs, **keywords)

    def _store_flos(self) -> None:
        if self._own_flos is not None:
            self._own_flos()
        own = self._events.state.total_flos
        self._counter.flush()
        if self._own_flos is not None:
            self._events.state.total_flos = own

    def _empty_cache(self, step: int) -> None:
        every = self._events.args.torch_empty_cache_steps
        if every is not None and step % every == 0 and self._run.device.type == "cuda":
            torch.cuda.empty_cache()

    @contextmanager
    def _paused(self, what: str) -> Iterator[None]:
        """Context of anything but training: excluded from the speed, and without the time limit of a step."""
        with self._meter.paused(), self._health.paused(what):
            yield

    # -- the end ------------------------------------------------------------------------------------------------------

    def _can_stop(self) -> bool:
        """Whether there are steps left for another process. Collective."""
        self._decide()
        return not (self._is_done() or self._events.control.should_training_stop)

    def _save_and_stop(self) -> NoReturn:
        """Stop before the end of the plan, at a checkpoint. A due evaluation is postponed to the resumed run.

        Raises:
            TrainingStopped: always.
        """
        events, stop, checkpointer = self._events, self._stop, self._checkpointer
        if events.control.should_log and events.state.global_step > self._window_start:
            self._log(self._close_window())
        assert stop.agreed is not None
        with self._health.paused("saving"):
            if stop.saves and not stop.agreed.hurry:
                self._store_flos()
                checkpointer.evaluation_is_due = events.control.should_evaluate
                self._save_checkpoint()
                checkpointer.evaluation_is_due = False
            checkpointer.wait()
            events.notify("on_train_end")
        self._raise_stopped()

    def _raise_stopped(self) -> NoReturn:
        if self._profiler is not None:
            self._profiler.finish()
        stopped = self._stop.stopped(self._events.state.global_step, self._checkpointer.newest())
        if self._run.is_main_process:
            say(str(stopped))
        distributed.barrier()  # after the first rank exits, a launcher ends the others
        raise stopped

    def _output(self) -> TrainOutput:
        run, state = self._run, self._events.state
        loss = self._loss_sum / self._loss_steps if self._loss_steps else math.nan
        rates, counts = self._meter.overall(), self._events.args.include_num_input_tokens_seen != TokenCount.NO
        tokens = rates.tokens_per_second
        if counts and rates.seconds:  # those that are counted, as in the logs of steps
            tokens = (state.num_input_tokens_seen - self._seen_before) / rates.seconds
        metrics = {
            "train_runtime": rates.seconds,
            "train_samples_per_second": rates.samples_per_second,
            "train_steps_per_second": rates.steps_per_second,
            **({"train_tokens_per_second": tokens} if self._counter.has_tokens else {}),
            "total_flos": state.total_flos,
            **({"train_loss": loss} if state.global_step > self._first_step else {}),  # the run may have been finished
            **run.final_metrics(),
        }
        run.log(metrics)
        if counts:
            metrics["num_input_tokens_seen"] = state.num_input_tokens_seen
        return TrainOutput(state.global_step, loss, {**metrics, "epoch": state.epoch or 0.0})
