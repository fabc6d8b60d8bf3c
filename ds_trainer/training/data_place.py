"""``DataPlace``: where a run stands in its data, how it gets there, and what of it belongs into a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ds_trainer.data.loader import PlannedLoader
from ds_trainer.data.lockstep import Lockstep
from ds_trainer.data.position import DataPosition
from ds_trainer.data.replica import batches_of
from ds_trainer.data.stream import Resumed, StreamLoader, has_state
from ds_trainer.training.batches import tell_epoch
from ds_trainer.training.run_plan import RunPlan
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.seeds import random_state

if TYPE_CHECKING:
    from ds_trainer.training.trainer import Trainer


class DataPlace:
    """Counts through the epochs of a run.

    Data of the Trainer's own loaders is gone on with at a sample, whatever the layout and the global batch: rounds are
    cut from there on. A loader of somebody else knows batches only: those that were had are read again, unless it has
    a state.

    Args:
        trainer: whose arguments and layout count.
        plan: the length of the run.
        loader: micro-batches of this replica.
        at: where the run goes on.
        kept: what :meth:`kept` gave there on this rank (of streams: on the main process).

    Attributes:
        epoch: the epoch that is being read.
        steps: optimizer steps done in it.
        rounds: micro-batches of it that are done, counted in today's rounds.

    Raises:
        ConfigError: the loader cannot be entered there.
    """

    def __init__(
        self,
        trainer: Trainer,
        plan: RunPlan,
        loader: Any,
        at: DataPosition | None = None,
        kept: Mapping[str, Any] | None = None,
    ) -> None:
        self.plan = plan
        self.loader = loader
        self._trainer = trainer
        self._batch = trainer.batch_plan
        self._resumed = at
        self._kept = kept or {}
        self._random: dict[str, Any] | None = None
        self._enter(0 if at is None else at.epoch)
        if at is not None:
            self._enter_at(at)

    @property
    def is_ours(self) -> bool:
        """Whether the loader is the Trainer's own."""
        return isinstance(self.loader, (PlannedLoader, StreamLoader))

    @property
    def is_inside(self) -> bool:
        """Whether the epoch has been begun, and its end has not been dealt with."""
        return self.steps > 0

    def _enter(self, epoch: int) -> None:
        self.epoch, self.steps, self.rounds = epoch, 0, 0
        self._first_sample, self._first_round = 0, 0
        self._ordered_for = self._batch.step_size
        self._ended = False

    def _enter_at(self, at: DataPosition) -> None:
        self.steps, self._ended = at.steps, at.ended
        self._ordered_for = at.ordered_for or self._batch.step_size
        # Of a checkpoint that says no more than its steps, they were such as today's.
        self._first_sample = at.samples if at.round_size else at.rounds * self._batch.round_size
        whole = self.plan.rounds_per_epoch
        if not self.is_ours:
            self._first_round = self._rounds_had(at)
        elif whole is not None:
            self._first_round = max(0, whole - self.loader.rounds_from(self._first_sample))
        else:
            self._first_round = math.ceil(self._first_sample / self._batch.round_size)
        self.rounds = self._first_round

    def _rounds_had(self, at: DataPosition) -> int:
        if at.round_size in (0, self._batch.round_size):
            return at.rounds
        if at.samples % self._batch.round_size:
            raise ConfigError(
                f"{at.samples} samples of epoch {at.epoch} were trained on, in rounds of {at.round_size}, which are no "
                f"whole number of rounds of {self._batch.round_size} (per_device_train_batch_size x replicas): a "
                f"{type(self.loader).__name__} can be entered between two batches only. Choose sizes that divide it."
            )
        return at.samples // self._batch.round_size

    # -- reading ------------------------------------------------------------------------------------------------------

    def batches(self) -> Iterator[Any]:
        """The micro-batches of this epoch from here on."""
        trainer, epoch = self._trainer, self.epoch
        at = self._resumed if self._resumed is not None and self._resumed.epoch == epoch and self.steps > 0 else None
        sample, rounds = self._first_sample, self._first_round
        begun_with, show = None, trainer.is_world_process_zero() and not trainer.args.disable_tqdm
        if at is None:
            self._random = None if self._goes_there_by_itself else random_state()
        else:
            self._random = begun_with = self._kept.get("random")
            if trainer.args.ignore_data_skip:
                sample, rounds, begun_with = 0, 0, None
        if self._is_read:  # a loader that is put at its end and not read would begin the next epoch there
            return iter(())
        if isinstance(self.loader, PlannedLoader):
            self.loader.start(epoch, sample, self._ordered_for)
            return iter(self.loader)
        if isinstance(self.loader, StreamLoader):
            state = self._kept.get("state") if at is not None and sample else None
            self.loader.start(epoch, sample, Resumed(epoch, state, begun_with, show))
            return iter(self.loader)
        tell_epoch(self.loader, epoch)
        if at is not None and rounds and has_state(self.loader) and "state" in self._kept:
            self.loader.load_state_dict(self._kept["state"])
            rounds = 0
        batches = batches_of(self.loader, trainer.layout, rounds, begun_with, show)
        if self.plan.rounds_per_epoch is not None:
            return batches
        return Lockstep(((batch, 0) for batch in batches), self.plan.accumulation)

    @property
    def _goes_there_by_itself(self) -> bool:
        return isinstance(self.loader, PlannedLoader) or (
            isinstance(self.loader, StreamLoader) and self.loader.knows_place
        )

    def rounds_ahead(self, batches: Iterator[Any]) -> int:
        """Micro-batches of the next step; 0 at the end of the epoch."""
        if self._is_read:
            return 0
        if self.plan.rounds_per_epoch is not None:
            return self.plan.rounds_after(self.rounds)
        assert isinstance(batches, Lockstep)  # batches() made it
        return batches.ahead()

    def samples_ahead(self, rounds: int) -> list[list[int]] | None:
        """Positions in the dataset of this replica's next micro-batches; None where the data has none that is known."""
        if not isinstance(self.loader, PlannedLoader):
            return None
        first = self.rounds - self._first_round
        return self.loader.positions(range(first, first + rounds))

    @property
    def _is_read(self) -> bool:
        """Whether nothing more of the epoch is read, as far as is known without reading."""
        return self._ended or (self.plan.rounds_per_epoch is not None and self.plan.rounds_after(self.rounds) == 0)

    @property
    def way(self) -> str:
        """How the place where a run goes on is reached, in words; empty where it is reached at once."""
        if isinstance(self.loader, PlannedLoader):
            return ""
        if "state" in self._kept:
            return f"by the state of the {type(self._stateful).__name__}"
        return "what was had is read over"

    @property
    def _stateful(self) -> Any:
        return self.loader.stream if isinstance(self.loader, StreamLoader) else self.loader

    # -- counting -----------------------------------------------------------------------------------------------------

    def advance(self, rounds: int) -> float:
        """A step of ``rounds`` micro-batches has been done; the epochs that are done now."""
        self.steps += 1
        self.rounds += rounds
        return self.plan.epoch_after(self.epoch, self.steps, self.rounds)

    def leave(self) -> None:
        """Nothing more of this epoch is read."""
        self._ended = True

    def next_epoch(self) -> None:
        """All that is done at the end of the epoch has been done."""
        self._enter(self.epoch + 1)

    @property
    def position(self) -> DataPosition:
        """Where the run stands."""
        samples = self._first_sample + (self.rounds - self._first_round) * self._batch.round_size
        if isinstance(self.loader, PlannedLoader):
            samples = min(samples, self.loader.samples)
        size, ordered_for = self._batch.round_size, self._ordered_for
        return DataPosition(self.epoch, samples, self.steps, self.rounds, size, ordered_for, self._ended)

    def kept(self) -> dict[str, Any]:
        """What reading needs besides the position, on this rank: state of stream or loader, random state."""
        if isinstance(self.loader, PlannedLoader) or not self.is_inside:
            return {}
        kept: dict[str, Any] = {}
        if isinstance(self.loader, StreamLoader):
            state = self.loader.state
        else:
            state = self.loader.state_dict() if has_state(self.loader) else None
        if state is not None:
            kept["state"] = state
        if self._random is not None:
            kept["random"] = self._random
        return kept
