"""Checkpoints that are written while training goes on: when one begins, when it is done, and who is told then."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ds_trainer.checkpoint.background.arena import Arena
from ds_trainer.checkpoint.background.meeting import Meeting
from ds_trainer.checkpoint.background.snapshot import Snapshot, fits_in_memory, frozen_bytes, sizes_of
from ds_trainer.checkpoint.background.writing import BackgroundSave, BackgroundWork
from ds_trainer.checkpoint.pieces.engine_files import engine_contents
from ds_trainer.checkpoint.pieces.frozen import FrozenFiles
from ds_trainer.checkpoint.weights.adapters import base_names
from ds_trainer.engine.state.pieces import all_in_memory, changes_in_steps_only
from ds_trainer.engine.state.units import UnknownState
from ds_trainer.optim.swapping import swaps_weights
from ds_trainer.utils import distributed
from ds_trainer.utils.logging import get_logger

if TYPE_CHECKING:
    from ds_trainer.callbacks.state import TrainerState
    from ds_trainer.checkpoint.manager import CheckpointManager
    from ds_trainer.checkpoint.protocol.contents import Content
    from ds_trainer.training.trainer import Trainer

logger = get_logger(__name__)

# How long a process that ends waits for the other ranks' part of the save under way, after its own is written. After
# a failure they may be gone, and who waits longer than the watch over failures allows is ended without a word.
AFTER_SIGTERM_SECONDS, AFTER_FAILURE_SECONDS = 60.0, 8.0

_ASK_SECONDS = 0.5  # between two looks at whether the other ranks are still there, while all wait for a save

# Events between a save and the next optimizer step.
_MEANWHILE = ("on_epoch_end", "on_epoch_begin", "on_step_begin", "on_substep_end", "on_pre_optimizer_step")


@dataclass(frozen=True)
class InFlight:
    """A checkpoint that is being written.

    Attributes:
        save: the work.
        state: the trainer's state that is in it.
        told: what is called when it is there: with its path, or with what went wrong.
    """

    save: BackgroundSave
    state: TrainerState
    told: Callable[[Path | BaseException], None]


class BackgroundSaves:
    """The saves of one training, one at a time.

    To be made by all ranks together, after an optimizer step: before that there are no optimizer states.

    Args:
        trainer: whose engine is saved.

    Attributes:
        possible: whether the state can be copied; alike on all ranks. Nothing else may be called where it cannot.
        in_flight: what is being written.
        ended: moment of ``time.perf_counter()`` at which the last one was written.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._arena = Arena(pinned=trainer.device.type == "cuda")
        self.in_flight: InFlight | None = None
        self.ended = 0.0
        self._preparing: BackgroundWork[None] | None = None
        self._asked: distributed.Agreement | None = None  # whether the save is under way on any rank
        self.possible = self._are_possible()
        if self.possible:
            self._meeting = Meeting()
            # In the background: the first touch of memory is slow.
            sizes = sizes_of(self._files())
            self._preparing = BackgroundWork(lambda: self._arena.prepare(sizes))

    def _files(self) -> Iterator[Content]:
        engine = self._trainer.engine
        frozen = FrozenFiles(self._trainer.frozen_files.names)
        return engine_contents(engine, False, frozen=frozen, left_out=base_names(engine.deepspeed.module))

    def _are_possible(self) -> bool:
        """Whether the state can be copied as a whole. Collective, alike on all ranks."""
        engine = self._trainer.engine
        try:
            if not all_in_memory(engine):
                logger.info("Checkpoints are written while training waits: DeepSpeed has swapped states out.")
                return False
            files = list(self._files())
            needed = self._arena.room_for(sizes_of(files)) + frozen_bytes(files)
        except UnknownState:
            return False
        if not fits_in_memory(needed):
            if distributed.rank() == 0:
                logger.warning(
                    "Checkpoints are written while training waits: a copy of the state (%.1f GiB a rank) does not fit "
                    "into the free host memory. save_async=False says so without this warning.",
                    needed / 2**30,
                )
            return False
        return True

    def begin(
        self,
        manager: CheckpointManager,
        shared: Sequence[Content],
        own: Sequence[Content],
        state: TrainerState,
        told: Callable[[Path | BaseException], None],
    ) -> None:
        """Copy the state of this moment, and begin to write ``checkpoint-<state.global_step>``.

        Args:
            manager: which writes it.
            shared: files besides the engine's, alike on all ranks.
            own: the same, of this rank.
            state: the trainer's, which nobody changes any more.
            told: see :class:`InFlight`; called by :meth:`settle`.
        """
        assert self.in_flight is None  # settled before
        if self._preparing is not None:
            self._preparing.result()
            self._preparing = None
        engine = self._trainer.engine
        waits = changes_in_steps_only(engine) if self._nobody_interferes() else lambda piece: False
        snapshot = Snapshot(manager.contents(shared, own), self._arena, waits)
        engine.before_step = snapshot.wait
        write = manager.writer(state.global_step)
        self.in_flight = InFlight(BackgroundSave(snapshot, write, self._meeting), state, told)

    def _nobody_interferes(self) -> bool:
        """Whether nothing but the engine's step changes masters and optimizer states before that step has ended."""
        trainer = self._trainer
        listeners = [one for event in _MEANWHILE for one in trainer.callback_handler.listeners(event)]
        return all(one.__module__.startswith("ds_trainer.") for one in listeners) and not swaps_weights(
            trainer.optimizer
        )

    def settle(self, wait: bool) -> None:
        """At a step boundary: if the save is done on all ranks (``wait``: when it is), tell of it. Collective.

        Nobody waits for an answer: what ranks say at one boundary is read at the next.

        Raises:
            Exception: what the save failed with, where :attr:`InFlight.told` raises it; on all ranks.
        """
        flight = self.in_flight
        if flight is None:
            return
        if wait:
            # Asking each other meanwhile: who waits in a thread's join for a rank that was killed waits for ever.
            while distributed.agree(torch.tensor([int(not flight.save.wait(_ASK_SECONDS))]))[0]:
                pass
        elif self._asked is None or self._asked.result()[0]:
            self._asked = distributed.Agreement(torch.tensor([int(not flight.save.done)]))
            if distributed.world_size() > 1 or self._asked.result()[0]:
                return
        self._asked = None
        self.in_flight = None
        self.ended = flight.save.ended
        outcome: Path | BaseException
        try:
            outcome = flight.save.result()
        except Exception as error:
            outcome = error
        flight.told(outcome)

    def finish(self, patience: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """The process ends, or training was broken off: finish what is under way, and tell nobody but the log.

        Args:
            patience: seconds to wait for other ranks.
            hurry: whether they are known to be gone meanwhile.
        """
        flight, self.in_flight = self.in_flight, None
        if flight is None:
            return
        name = f"checkpoint-{flight.state.global_step}"
        try:
            flight.save.finish(patience, hurry)
        except Exception as error:
            logger.error("%s was not finished: %s", name, error)
        else:
            logger.info("%s was finished.", name)
