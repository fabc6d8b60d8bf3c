"""Checkpoints that are written in the background while training continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ds_trainer.checkpoint.background.background_save import BackgroundSave, BackgroundTask
from ds_trainer.checkpoint.background.snapshot import (
    Snapshot,
    StagingBuffer,
    fits_in_memory,
    frozen_copy_bytes,
    shard_file_sizes,
)
from ds_trainer.checkpoint.background.store_barrier import StoreBarrier
from ds_trainer.checkpoint.shards.engine_files import engine_state_files
from ds_trainer.checkpoint.shards.frozen_weights import FrozenFiles
from ds_trainer.checkpoint.weights.adapter_files import base_parameter_names
from ds_trainer.engine.state.flat_partitions import UnknownState
from ds_trainer.engine.state.state_shards import all_in_memory, changed_only_by_steps
from ds_trainer.optim.script_optimizers import swaps_weights
from ds_trainer.utils import distributed
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.units import human_bytes

if TYPE_CHECKING:
    from ds_trainer.callbacks.protocol import CallbackHandler
    from ds_trainer.callbacks.state import TrainerState
    from ds_trainer.checkpoint.manager import CheckpointManager
    from ds_trainer.checkpoint.protocol.checkpoint_file import CheckpointFile
    from ds_trainer.engine.training_engine import TrainingEngine

logger = get_logger(__name__)

# How long an exiting process waits for the other ranks to finish the save in progress, after its own part is written.
# After a failure the other ranks may no longer exist, and utils.failures ends a process that waits too long.
AFTER_SIGTERM_SECONDS, AFTER_FAILURE_SECONDS = 60.0, 8.0

_POLL_SECONDS = 0.5  # between two checks that the other ranks still exist, while all wait for a save

# Events between a save and the next optimizer step.
_EVENTS_BEFORE_STEP = ("on_epoch_end", "on_epoch_begin", "on_step_begin", "on_substep_end", "on_pre_optimizer_step")


@dataclass(frozen=True)
class InFlight:
    """A checkpoint that is being written.

    Attributes:
        save: the background save.
        state: the trainer state in the checkpoint.
        on_done: called when the checkpoint is written, with its path, or with the exception of the save.
    """

    save: BackgroundSave
    state: TrainerState
    on_done: Callable[[Path | BaseException], None]


class BackgroundSaves:
    """The saves of one training, one at a time.

    Creation is collective, after an optimizer step: there are no optimizer states before.

    Args:
        engine: the engine whose state is saved.
        device: the device of this rank.
        frozen: names of frozen weights.
        handler: callbacks, which may change the state between a save and the next step.
        optimizer: the optimizer of the run.

    Attributes:
        possible: whether the state can be copied; the same on all ranks. If not, call no other method.
        in_flight: the checkpoint that is being written.
        ended: the ``time.perf_counter()`` at which the last checkpoint was written.
    """

    def __init__(
        self,
        engine: TrainingEngine,
        device: torch.device,
        frozen: frozenset[str],
        handler: CallbackHandler,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._engine = engine
        self._frozen = frozen
        self._handler = handler
        self._optimizer = optimizer
        self._staging = StagingBuffer(pinned=device.type == "cuda")
        self.in_flight: InFlight | None = None
        self.ended = 0.0
        self._preparing: BackgroundTask[None] | None = None
        self._in_progress: distributed.Agreement | None = None  # whether the save is in progress on any rank
        self.possible = self._are_possible()
        if self.possible:
            self._barrier = StoreBarrier()
            # In the background, because the first access to memory is slow.
            sizes = shard_file_sizes(self._files())
            self._preparing = BackgroundTask(lambda: self._staging.preallocate(sizes))

    def _files(self) -> Iterator[CheckpointFile]:
        engine = self._engine
        return engine_state_files(
            engine, False, frozen=FrozenFiles(self._frozen), excluded=base_parameter_names(engine.deepspeed.module)
        )

    def _are_possible(self) -> bool:
        """Whether the whole state can be copied. Collective; the same on all ranks."""
        try:
            if not all_in_memory(self._engine):
                logger.info("Training waits while checkpoints are written: DeepSpeed has swapped states out.")
                return False
            files = list(self._files())
            needed = self._staging.allocated_bytes(shard_file_sizes(files)) + frozen_copy_bytes(files)
        except UnknownState:
            return False
        if not fits_in_memory(needed):
            logger.warning(
                "Training waits while checkpoints are written: a copy of the state (%s per rank) does not "
                "fit into the free host memory. To avoid this warning, set save_async=False.",
                human_bytes(needed),
            )
            return False
        return True

    def begin(
        self,
        manager: CheckpointManager,
        shared: Sequence[CheckpointFile],
        own: Sequence[CheckpointFile],
        state: TrainerState,
        on_done: Callable[[Path | BaseException], None],
    ) -> None:
        """Copy the current state, and begin to write ``checkpoint-<state.global_step>``.

        Args:
            manager: writes the checkpoint.
            shared: files besides those of the engine, the same on all ranks.
            own: files of this rank besides those of the engine.
            state: a copy of the trainer state that does not change.
            on_done: see :class:`InFlight`; called by :meth:`poll` and :meth:`wait`.
        """
        assert self.in_flight is None  # the caller waits for the previous save
        if self._preparing is not None:
            self._preparing.result()
            self._preparing = None
        engine = self._engine
        waits = changed_only_by_steps(engine) if self._only_steps_change_state() else lambda piece: False
        snapshot = Snapshot(manager.files(shared, own), self._staging, waits)
        engine.before_step = snapshot.wait
        write = manager.writer(state.global_step)
        self.in_flight = InFlight(BackgroundSave(snapshot, write, self._barrier), state, on_done)

    def _only_steps_change_state(self) -> bool:
        """Whether only the step of the engine can change master weights and optimizer states, until that step ends."""
        listeners = [one for event in _EVENTS_BEFORE_STEP for one in self._handler.listeners(event)]
        ours = all(one.__module__.startswith("ds_trainer.") for one in listeners)
        return ours and not swaps_weights(self._optimizer)

    def poll(self) -> None:
        """At a step boundary, report the save if it is done on all ranks. Collective.

        No rank waits: the answers of one boundary are read at the next one.

        Raises:
            Exception: the exception of the save, if :attr:`InFlight.on_done` raises it; on all ranks.
        """
        flight = self.in_flight
        if flight is None:
            return
        if self._in_progress is None or self._in_progress.result()[0]:
            self._in_progress = distributed.Agreement(torch.tensor([int(not flight.save.done)]))
            if distributed.world_size() > 1 or self._in_progress.result()[0]:
                return
        self._report(flight)

    def wait(self) -> None:
        """Wait for the save in progress, and report it. Collective. Raises the same as :meth:`poll`."""
        flight = self.in_flight
        if flight is None:
            return
        # Poll with a collective: joining the thread would wait forever for a rank that was killed.
        while distributed.agree(torch.tensor([int(not flight.save.wait(_POLL_SECONDS))]))[0]:
            pass
        self._report(flight)

    def release(self) -> None:
        """Give the memory of the copy back, for a later training of this process. Call no other method afterwards."""
        if self._preparing is not None:
            self._preparing.wait()
        self._staging.release()

    def _report(self, flight: InFlight) -> None:
        self._in_progress = None
        self.in_flight = None
        self.ended = flight.save.ended
        outcome: Path | BaseException
        try:
            outcome = flight.save.result()
        except Exception as error:
            outcome = error
        flight.on_done(outcome)

    def finish(self, patience: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """Before the process exits, or after an aborted training, finish the save in progress, and only log the result.

        Args:
            patience: seconds to wait for other ranks.
            hurry: polled; returns True once other ranks are known to have exited.
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
