"""What surrounds a training: it begins, it may be asked to stop, and whatever happens it gives back what it took."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from ds_trainer.arguments.enums import SaveStrategy
from ds_trainer.checkpoint.background.writing import ends_after
from ds_trainer.checkpoint.protocol.directory import list_checkpoints
from ds_trainer.training.hooks.background import BackgroundHooks
from ds_trainer.training.stopping.stopper import Stopper
from ds_trainer.utils import distributed
from ds_trainer.utils.host_votes import host_votes


class StoppingHooks(BackgroundHooks):
    """A training that can be stopped."""

    stopper: Stopper

    @contextmanager
    def _in_training(self) -> Iterator[None]:
        """All of a training happens in here. Collective."""
        self.stage = self._memory_tracker.stage("train")
        self.is_in_train = True
        args = self.args
        saves = args.enable_jit_checkpoint or (args.save_strategy != SaveStrategy.NO and not args.save_only_model)
        try:
            self._join_ranks()
            votes = host_votes(self.groups.world_host) if distributed.world_size() > 1 else None
            self.stopper = Stopper(self._output_dir, saves, not args.save_only_model, args.time_limit_margin, votes)
            with ExitStack() as contexts:
                contexts.enter_context(self.stopper)
                if not saves:
                    contexts.enter_context(ends_after(self._finish_save))
                try:
                    yield
                finally:
                    self._end_saves()
        finally:
            self._leave_output_dir()
            self.is_in_train = False
            self.stage.end()

    def save_and_stop(self) -> None:
        """All ranks have agreed to stop after this step: write a checkpoint, unless this is in a hurry. Collective."""
        assert self.stopper.agreed is not None
        if self.stopper.saves and not self.stopper.agreed.hurry:
            self.store_flos()
            self.evaluation_is_due = self.control.should_evaluate
            self.save_in_training()
            self.evaluation_is_due = False
        self.settle_save(wait=True)

    def raise_stopped(self) -> None:
        """End a training that was stopped.

        Raises:
            TrainingStopped: always.
        """
        kept = list_checkpoints(self._output_dir) if distributed.rank() == 0 else []
        newest = distributed.broadcast_object(kept[-1] if kept else None)
        stopped = self.stopper.stopped(self.state.global_step, newest)
        self._say(str(stopped))
        distributed.barrier()  # a launcher ends the ranks that come after the first
        raise stopped

    def _has_begun_before(self) -> bool:
        """Whether there is a checkpoint to go on from, damaged or not. Collective."""
        here = self._sharing.commits and self._directory.has_checkpoints()
        return bool(distributed.agree(torch.tensor([int(here)]))[0])
