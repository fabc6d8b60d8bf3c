"""Logs, the trainer's state on disk, and the callbacks that hear of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ds_trainer.checkpoint.manager import STATE_FILE
from ds_trainer.training.hooks.parts import Parts


class RecordHooks(Parts):
    """What is recorded, and who is told."""

    _own_callbacks: bool

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Record ``logs`` in the history and hand them to the callbacks.

        Args:
            logs: name to value.
            start_time: accepted for the reference's signature.
        """
        entry = {**logs, "epoch": self.state.epoch}
        self.state.log_history.append({**entry, "step": self.state.global_step})
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, entry)

    def save_state(self) -> None:
        """Write ``trainer_state.json`` to the output directory (main process)."""
        if self.is_world_process_zero():
            self.state.save_to_json(self._output_dir / STATE_FILE)

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
