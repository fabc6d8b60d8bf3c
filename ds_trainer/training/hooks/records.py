"""Logs, the trainer's state on disk, and the callbacks that hear of them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from ds_trainer.arguments.enums import HangAction, TokenCount
from ds_trainer.checkpoint.manager import STATE_FILE
from ds_trainer.monitor.health.run_health import RunHealth, Watch
from ds_trainer.monitor.metrics_text import format_metrics, metrics_table
from ds_trainer.monitor.throughput import ThroughputMeter
from ds_trainer.planner.flops import FlopRule
from ds_trainer.training.hooks.parts import Parts
from ds_trainer.training.work import WorkCounter, flop_rule, sequence_lengths, target_length, token_shape
from ds_trainer.utils.files import write_text_atomic

if TYPE_CHECKING:
    from ds_trainer.training.trainer import Trainer


class RecordHooks(Parts):
    """What is recorded, and who is told."""

    current_flos: float = 0.0
    """Operations of this rank that :meth:`store_flos` has not stored yet."""

    _own_callbacks: bool
    _work: WorkCounter | None = None
    _health: RunHealth | None = None
    _tokens_at_start: int = 0
    _flop_rule: tuple[nn.Module, FlopRule | None] | None = None

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Record ``logs`` in the history and hand them to the callbacks.

        Args:
            logs: name to value.
            start_time: moment of ``time.time()`` at which the training began. Where input tokens are counted
                (``include_num_input_tokens_seen``), their number and their rate since then are logged too.
        """
        entry = {**logs, "epoch": self.state.epoch}
        if self.args.include_num_input_tokens_seen != TokenCount.NO:
            seen = entry["num_input_tokens_seen"] = self.state.num_input_tokens_seen
            if start_time is not None and (seconds := time.time() - start_time) > 0:
                rate = (seen - self._tokens_at_start) / seconds
                entry.update(train_runtime=round(seconds, 4), train_tokens_per_second=round(rate, 3))
        self.state.log_history.append({**entry, "step": self.state.global_step})
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, entry)

    def save_state(self) -> None:
        """Write ``trainer_state.json`` to the output directory (main process)."""
        if self.is_world_process_zero():
            self.state.save_to_json(self._output_dir / STATE_FILE)

    # -- work and metrics -----------------------------------------------------------------------------------------

    def begin_work(self, meter: ThroughputMeter) -> WorkCounter:
        """Count the work of a training from now on; the loop's part of :meth:`store_flos`."""
        self.current_flos = 0.0
        self._tokens_at_start = self.state.num_input_tokens_seen
        self._flop_rule = None  # what is frozen may have changed
        self._work = WorkCounter(cast("Trainer", self), meter)
        return self._work

    def begin_health(self) -> RunHealth:
        """Watch over the training that begins; the loop tells what it does."""
        args = self.args
        watch = Watch(
            hang_seconds=args.hang_timeout,
            hang_factor=args.hang_factor,
            patience=float(args.ddp_timeout),
            abort=args.hang_action == HangAction.ABORT,
            straggler_steps=args.straggler_steps,
        )
        trainer = cast("Trainer", self)
        self._health = RunHealth(watch, self._output_dir, self.state.global_step, trainer._finish_save)
        return self._health

    def health_beat(self) -> None:
        """An evaluation gets on. Called for every batch."""
        if self._health is not None:
            self._health.beat()

    def store_flos(self) -> None:
        """Add what all ranks have done since the last call to the state: ``total_flos``, ``num_input_tokens_seen``.

        Collective.
        """
        if self._work is not None:
            self._work.settle()

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        """Operations of the forward and backward pass of one micro-batch; override it for a model of your own.

        A model's own ``floating_point_ops(inputs)`` is asked if there is one; otherwise they are counted from the
        architecture (:mod:`ds_trainer.planner.flops`). 0 where the input is not token numbers. Called for every
        micro-batch: look at shapes only.
        """
        own = getattr(self.model, "floating_point_ops", None)
        if callable(own):
            return float(own(inputs))
        rows, length = token_shape(self.model, inputs)
        rule = self.flop_rule
        if rule is None or rows == 0:
            return 0.0
        if rule.transformer is not None and len(rule.transformer.stacks) > 1:
            return rule.flops(rows, length, target_length(inputs))
        return sum(rule.flops(count, size) for size, count in sequence_lengths(inputs, rows, length).items())

    @property
    def flop_rule(self) -> FlopRule | None:
        """How the model's operations are counted; None for a model that nothing is known of."""
        if self._flop_rule is None or self._flop_rule[0] is not self.model:
            self._flop_rule = (self.model, flop_rule(self.model))
        return self._flop_rule[1]

    @staticmethod
    def metrics_format(metrics: dict[str, Any]) -> dict[str, Any]:
        """``metrics`` with values for people: bytes in MB, durations in hours, minutes and seconds, four decimals."""
        return format_metrics(metrics)

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print ``metrics`` as a table (main process). ``split`` names it: train, eval, test."""
        if self.is_world_process_zero():
            print(metrics_table(split, metrics), flush=True)

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write ``metrics`` to ``<split>_results.json`` in the output directory (main process).

        With ``combined`` also into ``all_results.json``, in which those of earlier calls are kept.
        """
        if not self.is_world_process_zero():
            return
        write_text_atomic(self._output_dir / f"{split}_results.json", _json(metrics))
        if combined:
            path = self._output_dir / "all_results.json"
            earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            write_text_atomic(path, _json({**earlier, **metrics}))

    # -- callbacks ------------------------------------------------------------------------------------------------

    def add_callback(self, callback: Any) -> None:
        """Add a callback (class or instance)."""
        self._own_callbacks = True
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback (instance, or first of a class) and return it; None where there is none."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback (instance, or first of a class)."""
        self.callback_handler.remove_callback(callback)

    @property
    def callbacks_may_differ(self) -> bool:
        """Whether ranks could decide differently: the default callbacks decide by step numbers, alike on all ranks."""
        return self._own_callbacks and self.layout.world_size > 1

    @property
    def _output_dir(self) -> Path:
        return Path(str(self.args.output_dir))


def _json(metrics: dict[str, Any]) -> str:
    return json.dumps(metrics, indent=4, sort_keys=True)
