"""Methods of the Trainer for logs, metrics and callbacks."""

from __future__ import annotations

import json
from typing import Any

from ds_trainer.callbacks.state import STATE_FILE
from ds_trainer.engine.process_group import stop_process_group
from ds_trainer.monitor.step_line import format_metrics, metrics_table
from ds_trainer.training.loop.token_counter import batch_flops
from ds_trainer.training.overrides.base import TrainerBase
from ds_trainer.utils.files import parse_json
from ds_trainer.utils.output_files import write_output
from ds_trainer.utils.plain_attributes import only_looks
from ds_trainer.utils.printable import say, shown


class LoggingMethods(TrainerBase):
    """Logs, metrics and callbacks."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Record ``logs`` in the history and pass them to the callbacks.

        Args:
            logs: values by name; ``epoch`` is added to them, and what callbacks change is changed in them.
            start_time: the ``time.time()`` at which the training began. If input tokens are counted
                (``include_num_input_tokens_seen``), their number and their rate since then are logged too.
        """
        if not only_looks():
            self._ds_trainer.telemetry.log(logs, start_time)

    def save_state(self) -> None:
        """Write ``trainer_state.json`` to the output directory (main process)."""
        if self.is_world_process_zero():
            write_output(self._ds_trainer.output_dir / STATE_FILE, self.state.to_json())

    # -- work and metrics ---------------------------------------------------------------------------------------------

    def store_flos(self) -> None:
        """Add the work of all ranks since the last call to ``total_flos`` and ``num_input_tokens_seen`` of the state.

        Collective.
        """
        self._ds_trainer.telemetry.flush()

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Operations of the forward and backward pass of one micro-batch; override it for a custom model.

        If the model has ``floating_point_ops(inputs)``, that is called. Otherwise operations are counted from the
        architecture (:mod:`ds_trainer.planner.flops`), with 0 if the input is not token ids. An override is called for
        every micro-batch, so it should read shapes only.
        """
        of_model = getattr(self.model, "floating_point_ops", None)
        if callable(of_model):
            return int(of_model(inputs))
        return int(batch_flops(self.model, self._ds_trainer.telemetry.flop_rule(self.model), inputs))

    @staticmethod
    def metrics_format(metrics: dict[str, Any]) -> dict[str, Any]:
        """``metrics`` in readable form: bytes in MB, durations in hours, minutes and seconds, four decimals."""
        return format_metrics(metrics)

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print ``metrics`` as a table (main process); ``split`` is its name: train, eval, test."""
        if self.is_world_process_zero():
            say(shown(metrics_table(split, metrics)))

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write ``metrics`` to ``<split>_results.json`` in the output directory (main process).

        With ``combined``, also add them to ``all_results.json``, which keeps the metrics of earlier calls.
        """
        if not self.is_world_process_zero():
            return
        write_output(self._ds_trainer.output_dir / f"{split}_results.json", _json(metrics))
        if combined:
            path = self._ds_trainer.output_dir / "all_results.json"
            earlier = parse_json(path.read_text(encoding="utf-8")) if path.exists() else {}
            write_output(path, _json({**earlier, **metrics}))

    # -- the end of a script ------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Wait for all ranks, then leave the process group; a script may call it last. Collective."""
        self.accelerator.end_training()
        self._ds_trainer.engines.close()
        stop_process_group()

    # -- callbacks ----------------------------------------------------------------------------------------------------

    def add_callback(self, callback: Any) -> None:
        """Add a callback (class or instance)."""
        self._ds_trainer.events.user_callbacks = True
        self._ds_trainer.events.handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback (instance, or first of a class) and return it; None if there is none."""
        return self._ds_trainer.events.handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback (instance, or first of a class)."""
        self._ds_trainer.events.handler.remove_callback(callback)


def _json(metrics: dict[str, Any]) -> str:
    return json.dumps(metrics, indent=4, sort_keys=True)
