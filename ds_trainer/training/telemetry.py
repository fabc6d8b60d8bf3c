"""``Telemetry``: logs, work counts and health monitoring of a Trainer."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ds_trainer.arguments.enums import HangPolicy, TokenCount
from ds_trainer.callbacks.events import TrainingEvents
from ds_trainer.monitor.health.run_health import HealthSettings, RunHealth
from ds_trainer.monitor.throughput import ThroughputMeter
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.planner.flops import FlopRule
from ds_trainer.training.loop.token_counter import TokenCounter, flop_rule
from ds_trainer.training.run_recorder import RunRecorder

if TYPE_CHECKING:
    from ds_trainer.data.packing.batch import PackedFormat


class Telemetry:
    """Records the logs of a Trainer, and counts the work of its trainings.

    Args:
        events: the state that records logs, and the callbacks that are notified.

    Attributes:
        health: health monitoring of the training; None before the first one.
        recorder: records the training for its report.
    """

    def __init__(self, events: TrainingEvents) -> None:
        self.health: RunHealth | None = None
        self.recorder = RunRecorder(events)
        self._events = events
        self._counter: TokenCounter | None = None
        self._tokens_at_start = 0
        self._rule: tuple[nn.Module, FlopRule | None] | None = None

    def log(self, logs: dict[str, float], start_time: float | None) -> None:
        """See ``Trainer.log``."""
        events, state = self._events, self._events.state
        logs["epoch"] = state.epoch  # in the caller's dict: an evaluate() that logs its metrics returns the epoch too
        if events.args.include_num_input_tokens_seen != TokenCount.NO:
            seen = logs["num_input_tokens_seen"] = state.num_input_tokens_seen
            if start_time is not None and (seconds := time.time() - start_time) > 0:
                rate = (seen - self._tokens_at_start) / seconds
                logs.update(train_runtime=round(seconds, 4), train_tokens_per_second=round(rate, 3))
        state.log_history.append({**logs, "step": state.global_step})
        events.notify("on_log", logs)
        self.recorder.progress()

    # -- work ---------------------------------------------------------------------------------------------------------

    def count_work(
        self,
        model: nn.Module,
        meter: ThroughputMeter,
        layout: ParallelLayout,
        peak: float | None,
        padding: int | None,
        flops: Callable[[Any], float] | None,
        packed: PackedFormat | None = None,
    ) -> TokenCounter:
        """Begin to count the work of a training; see :class:`TokenCounter` for the arguments."""
        self._tokens_at_start = self._events.state.num_input_tokens_seen
        self._rule = None  # the set of frozen parameters may have changed
        rule = self.flop_rule(model)
        self._counter = TokenCounter(
            model, self._events, meter, layout, rule=rule, peak=peak, padding=padding, flops=flops, packed=packed
        )
        return self._counter

    def flush(self) -> None:
        """Add the work of all ranks since the last call to the state. Collective."""
        if self._counter is not None:
            self._counter.flush()

    @property
    def flops(self) -> float:
        """Operations of this rank that :meth:`flush` has not added yet."""
        return 0.0 if self._counter is None else self._counter.flops

    def flop_rule(self, model: nn.Module) -> FlopRule | None:
        """The rule that counts the operations of ``model``; None for an unknown model."""
        if self._rule is None or self._rule[0] is not model:
            self._rule = (model, flop_rule(model))
        return self._rule[1]

    def release(self) -> None:
        """Drop the references to the model."""
        self._counter = self._rule = None

    # -- health -------------------------------------------------------------------------------------------------------

    def watch(self, output_dir: Path, on_abort: Callable[[], None]) -> RunHealth:
        """Create the health monitoring of a new training.

        Args:
            output_dir: the directory for reports.
            on_abort: called before a hung process is ended.
        """
        args = self._events.args
        watch = HealthSettings(
            hang_seconds=args.hang_timeout,
            hang_factor=args.hang_factor,
            patience=float(args.ddp_timeout),
            abort=None if args.hang_policy == HangPolicy.AUTO else args.hang_policy == HangPolicy.ABORT,
            straggler_steps=args.straggler_steps,
        )

        def end_recording() -> None:
            on_abort()
            self.recorder.end(None, "ended because it made no progress; see the folder health")

        self.health = RunHealth(watch, output_dir, self._events.state.global_step, end_recording)
        self.recorder.time_by(self.health.clock)
        return self.health

    def step_seconds(self) -> float | None:
        """Median seconds of a step of the training; None before its second step."""
        return None if self.health is None else self.health.median_step_seconds()

    def phase_seconds(self) -> dict[str, float]:
        """Seconds of the training thread by phase, since the loop of the newest training began; empty before it."""
        return {} if self.health is None else self.health.clock.seconds()

    def beat(self) -> None:
        """Record progress of an evaluation. Called for every batch."""
        if self.health is not None:
            self.health.beat()
