"""``DataCursor``: the position of a run in its data, how a resumed run reaches it, and its state for checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.data.loader import PlannedLoader
from ds_trainer.data.lockstep import Aligned, Lockstep
from ds_trainer.data.position import DataPosition
from ds_trainer.data.replica import batches_of
from ds_trainer.data.stream import StreamLoader, StreamResume, has_state
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.training.loop.batches import set_epoch
from ds_trainer.training.loop.run_plan import RunPlan
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.seeds import random_state
from ds_trainer.utils.units import counted

if TYPE_CHECKING:
    from ds_trainer.data.stream_shards import StreamOrder


class DataCursor:
    """Counts epochs, steps and micro-steps of a run.

    The loaders of the Trainer resume at a sample, for any layout and global batch size; micro-steps are counted from
    there. Any other loader has batches only: it skips the batches that were trained on, unless it has a state.

    Args:
        args: the training arguments.
        batch_plan: sizes of the batches.
        plan: the length of the run.
        loader: micro-batches of this replica.
        at: the position at which the run resumes.
        saved: the result of :meth:`reader_state` at that position on this rank (for streams: on the main process).

    Attributes:
        epoch: the current epoch.
        steps: optimizer steps done in it.
        micro_steps: micro-steps done in it, counted with the current batch sizes.

    Raises:
        ConfigError: the loader cannot resume at this position.
    """

    def __init__(
        self,
        args: TrainingArguments,
        batch_plan: BatchPlan,
        plan: RunPlan,
        loader: Any,
        at: DataPosition | None = None,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        self.plan = plan
        self.loader = loader
        self._args = args
        self._batch = batch_plan
        self._resumed = at
        self._saved = saved or {}
        self._random: dict[str, Any] | None = None
        self._enter(0 if at is None else at.epoch)
        if at is not None:
            self._enter_at(at)

    @property
    def is_ours(self) -> bool:
        """Whether the loader was built by the Trainer."""
        return isinstance(self.loader, (PlannedLoader, StreamLoader))

    @property
    def is_inside(self) -> bool:
        """Whether the position is inside of an epoch."""
        return self.steps > 0

    def _enter(self, epoch: int) -> None:
        self.epoch, self.steps, self.micro_steps = epoch, 0, 0
        self._first_sample, self._first_micro_step = 0, 0
        self._ordered_for = self._batch.global_batch_size
        self._seed: int | None = self.loader.seed if self.is_ours else None
        self._stream_order: StreamOrder | None = None  # the loader's, when it reads
        self._ended = False

    def _enter_at(self, at: DataPosition) -> None:
        from ds_trainer.data.stream_shards import StreamOrder

        self.steps, self._ended = at.steps, at.ended
        self._ordered_for = at.ordered_for or self._batch.global_batch_size
        if self.is_ours and self.is_inside and not self._args.ignore_data_skip:
            self._seed = self._seed if at.seed is None else at.seed
            self._stream_order = StreamOrder(*(at.stream or ()))
        # A checkpoint without sample counts is assumed to have the current batch sizes.
        self._first_sample = (
            at.samples if at.samples_per_micro_step else at.micro_steps * self._batch.samples_per_micro_step
        )
        whole = self.plan.micro_steps_per_epoch
        if not self.is_ours:
            self._first_micro_step = self._micro_steps_done(at)
        elif whole is not None:
            self._first_micro_step = max(0, whole - self.loader.micro_steps_from(self._first_sample))
        else:
            self._first_micro_step = math.ceil(self._first_sample / self._batch.samples_per_micro_step)
        self.micro_steps = self._first_micro_step

    def _micro_steps_done(self, at: DataPosition) -> int:
        if at.samples_per_micro_step in (0, self._batch.samples_per_micro_step):
            return at.micro_steps
        if at.samples % self._batch.samples_per_micro_step:
            raise ConfigError(
                f"{counted(at.samples, 'sample')} of epoch {at.epoch} were trained on, in micro-steps of "
                f"{at.samples_per_micro_step}. That is not a multiple of the current "
                f"{self._batch.samples_per_micro_step} (per_device_train_batch_size x replicas), and a "
                f"{type(self.loader).__name__} can resume between two batches only. Choose sizes that divide it."
            )
        return at.samples // self._batch.samples_per_micro_step

    # -- reading ------------------------------------------------------------------------------------------------------

    def batches(self) -> Iterator[Any]:
        """The remaining micro-batches of this epoch."""
        args, epoch = self._args, self.epoch
        at = self._resumed if self._resumed is not None and self._resumed.epoch == epoch and self.steps > 0 else None
        sample, micro_steps = self._first_sample, self._first_micro_step
        epoch_random_state, show = None, distributed.rank() == 0 and not args.disable_tqdm
        if at is None:
            self._random = None if self._seeks_without_reading else random_state()
        else:
            self._random = epoch_random_state = self._saved.get("random")
            if args.ignore_data_skip:
                sample, micro_steps, epoch_random_state = 0, 0, None
        if self._is_read:  # a loader that is placed at its end but not read would begin the next epoch there
            return iter(())
        if isinstance(self.loader, PlannedLoader):
            self.loader.start(epoch, sample, self._ordered_for, self._seed)
            return iter(self.loader)
        if isinstance(self.loader, StreamLoader):
            state = self._saved.get("state") if at is not None and sample else None
            resumed = StreamResume(epoch, state, epoch_random_state, show)
            self.loader.start(epoch, sample, resumed, self._seed, self._stream_order)
            micro_batches = iter(self.loader)
            self._stream_order = self.loader.order
            return micro_batches
        set_epoch(self.loader, epoch)
        if at is not None and micro_steps and has_state(self.loader) and "state" in self._saved:
            self.loader.load_state_dict(self._saved["state"])
            micro_steps = 0
        batches = batches_of(self.loader, self._batch.layout, micro_steps, epoch_random_state, show)
        if self.plan.micro_steps_per_epoch is not None:
            return batches
        return Lockstep(((batch, 0) for batch in batches), self.plan.accumulation)

    @property
    def _seeks_without_reading(self) -> bool:
        return isinstance(self.loader, PlannedLoader) or (
            isinstance(self.loader, StreamLoader) and self.loader.is_stateful
        )

    def micro_steps_ahead(self, batches: Iterator[Any]) -> int:
        """Number of micro-steps in the next step; 0 at the end of the epoch."""
        if self._is_read:
            return 0
        if self.plan.micro_steps_per_epoch is not None:
            return self.plan.micro_steps_after(self.micro_steps)
        assert isinstance(batches, Lockstep)  # batches() made it
        ahead = batches.ahead()
        if isinstance(batches, Aligned):
            self.micro_steps += batches.take_left_out()
        return ahead

    def samples_ahead(self, micro_steps: int) -> list[list[int]] | None:
        """Positions in the dataset of the next micro-batches of this replica; None if they are unknown."""
        if not isinstance(self.loader, PlannedLoader):
            return None
        first = self.micro_steps - self._first_micro_step
        return self.loader.positions(range(first, first + micro_steps))

    @property
    def _is_read(self) -> bool:
        """Whether the epoch is known to be complete, without reading more data."""
        return self._ended or (
            self.plan.micro_steps_per_epoch is not None and self.plan.micro_steps_after(self.micro_steps) == 0
        )

    @property
    def way(self) -> str:
        """How a resumed run reaches its position, for a message; empty if the loader can seek."""
        if isinstance(self.loader, PlannedLoader):
            return ""
        if "state" in self._saved:
            return f"by the state of the {type(self._stateful).__name__}"
        return "earlier batches are read and skipped"

    @property
    def _stateful(self) -> Any:
        return self.loader.stream if isinstance(self.loader, StreamLoader) else self.loader

    # -- counting -----------------------------------------------------------------------------------------------------

    def advance(self, micro_steps: int) -> float:
        """Count a completed step of ``micro_steps`` micro-steps, and return the epochs done (a fraction)."""
        self.steps += 1
        self.micro_steps += micro_steps
        return self.plan.epoch_after(self.epoch, self.steps, self.micro_steps)

    def leave(self) -> None:
        """Skip the rest of this epoch."""
        self._ended = True

    def next_epoch(self) -> None:
        """Begin the next epoch."""
        self._enter(self.epoch + 1)

    @property
    def position(self) -> DataPosition:
        """The current position of the run."""
        samples = self._first_sample + (self.micro_steps - self._first_micro_step) * self._batch.samples_per_micro_step
        if isinstance(self.loader, PlannedLoader):
            samples = min(samples, self.loader.samples)
        size, ordered_for = self._batch.samples_per_micro_step, self._ordered_for
        return DataPosition(
            *(self.epoch, samples, self.steps, self.micro_steps, size, ordered_for, self._ended, self._seed),
            self._stream_order if self._stream_order is not None and self._stream_order.shards else None,
        )

    def reader_state(self) -> dict[str, Any]:
        """State of the reader on this rank besides the position: that of the stream or loader, and the random state."""
        if isinstance(self.loader, PlannedLoader) or not self.is_inside:
            return {}
        state_of_reader: dict[str, Any] = {}
        if isinstance(self.loader, StreamLoader):
            state = self.loader.state
        else:
            state = self.loader.state_dict() if has_state(self.loader) else None
        if state is not None:
            state_of_reader["state"] = state
        if self._random is not None:
            state_of_reader["random"] = self._random
        return state_of_reader
