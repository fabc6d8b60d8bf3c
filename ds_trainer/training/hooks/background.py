"""Checkpoints in the background: the loop begins them, and says so when they are there."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ds_trainer.arguments.enums import SaveStrategy
from ds_trainer.callbacks.state import TrainerState, export_states
from ds_trainer.checkpoint.protocol.directory import checkpoint_name
from ds_trainer.checkpoint.protocol.saving import SaveFailed
from ds_trainer.training.background_saves import AFTER_FAILURE_SECONDS, AFTER_SIGTERM_SECONDS, BackgroundSaves
from ds_trainer.training.best_model import note_checkpoint
from ds_trainer.training.hooks.checkpoints import CheckpointHooks
from ds_trainer.training.resume import own_contents
from ds_trainer.training.stopping.stopper import Stopper
from ds_trainer.utils.failures import fails_together

if TYPE_CHECKING:
    from ds_trainer.training.trainer import Trainer


class BackgroundHooks(CheckpointHooks):
    """How the loop saves."""

    stopper: Stopper
    _saves: BackgroundSaves | None = None

    def prepare_saves(self) -> None:
        """After the first step of a training, when there are optimizer states: say how large a checkpoint is, and make
        room for copies of the state. Collective."""
        if self.args.save_strategy != SaveStrategy.NO:
            self.announce_size()
            self._background_saves()

    def save_in_training(self) -> None:
        """A checkpoint is due: begin to write it in the background, or write it where that cannot be. Collective.

        ``on_save`` is called when it is there.
        """
        self.settle_save(wait=True)
        saves = self._background_saves()
        began = time.perf_counter()
        if saves is None:
            if self.save_checkpoint() is not None:
                self.stopper.note_save(time.perf_counter() - began)
                self._tell_of_save(self.state)
            return
        state = self._state_to_save()
        pushes = self._prepare_push(self._output_dir / checkpoint_name(state.global_step))

        def told(outcome: Path | BaseException) -> None:
            if not isinstance(outcome, Path):
                if not isinstance(outcome, SaveFailed):
                    raise outcome
                self._not_saved(outcome)
                return
            self.stopper.note_save(saves.ended - began)
            self.state.best_model_checkpoint = state.best_model_checkpoint
            if pushes:
                self._push_prepared(outcome, state)
            self._tell_of_save(state)

        saves.begin(
            self._manager(state), self._shared_contents(state), own_contents(cast("Trainer", self)), state, told
        )

    def settle_save(self, wait: bool = False) -> None:
        """If a save is under way and done (``wait``: when it is done), tell callbacks and the Hub. Collective.

        Raises:
            SaveFailed: it could not be written; on all ranks.
        """
        if self._saves is not None:
            self._saves.settle(wait)

    @property
    def saves_in_flight(self) -> bool:
        """Whether a checkpoint is being written, or written and nobody was told yet."""
        return self._saves is not None and self._saves.in_flight is not None

    @fails_together
    def save_checkpoint(self) -> Path | None:
        """Write everything that resuming needs to ``checkpoint-<global_step>``, while training waits. Collective.

        A checkpoint that is being written is finished before.

        Returns:
            Its path; None where it could not be written and ``save_failure="continue"``.

        Raises:
            SaveFailed: it could not be written; on all ranks.
        """
        self.settle_save(wait=True)
        return super().save_checkpoint()

    def _finish_save(self) -> None:
        """The process is about to end by a signal: finish the checkpoint that is being written."""
        if self._saves is not None:
            self._saves.finish(AFTER_SIGTERM_SECONDS)

    def _end_saves(self) -> None:
        """The training has ended: a checkpoint is still being written only where it was broken off."""
        if self._saves is not None:
            # A launcher ends the ranks that are left when one has gone: its part of the save will not come any more.
            self._saves.finish(AFTER_FAILURE_SECONDS, lambda: self.stopper.signalled)
            self._saves = None  # gives the memory back
            self.engine.before_step = None

    def _background_saves(self) -> BackgroundSaves | None:
        if not self.args.save_async or self.args.save_only_model:
            return None
        if self._saves is None:
            self._saves = BackgroundSaves(cast("Trainer", self))
        return self._saves if self._saves.possible else None

    def _state_to_save(self) -> TrainerState:
        """The trainer's state of this moment, which later steps do not change."""
        state = dataclasses.replace(
            self.state,
            log_history=list(self.state.log_history),
            stateful_callbacks=export_states(self.callback_handler.callbacks),
        )
        note_checkpoint(state, self._output_dir)
        return state

    def _tell_of_save(self, state: TrainerState) -> None:
        due = self.control.should_save  # of a checkpoint that is due at the very step at which this one is done
        self.control = self.callback_handler.on_save(self.args, state, self.control)
        self.control.should_save = self.control.should_save or due
