"""``HubPublisher``: the repository of a run on the Hugging Face Hub, and pushes in the background.

All ranks take part in saving weights; only the main process connects to the Hub.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ds_trainer.arguments.enums import HubStrategy, SaveStrategy
from ds_trainer.callbacks.events import TrainingEvents
from ds_trainer.checkpoint.protocol.checkpoint_directory import list_checkpoints
from ds_trainer.checkpoint.protocol.manifest import MANIFEST_FILE
from ds_trainer.training.hub.client import HubError, Repository, repository_name
from ds_trainer.training.startup.process_setup import join_ranks
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.failures import fails_together
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.output_files import write_output

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ds_trainer.callbacks.state import TrainerState
    from ds_trainer.training.hub.uploads import Commit, Uploads

logger = get_logger(__name__)

_ARGUMENTS = "training_args.json"
_LAST = "last-checkpoint"
_WITH_CHECKPOINTS = (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS)


class HubPublisher:
    """Pushes the model and the checkpoints of a Trainer.

    Args:
        events: arguments, state and callbacks.
        save_model: saves the model as part of a push; calls ``Trainer.save_model``, which a subclass may override.
        open_repository: ``Trainer.init_hf_repo``.
        write_card: ``Trainer.create_model_card``.

    Attributes:
        repository_id: ``owner/name``; None until the repository is open, and on other ranks.
        card_arguments: the arguments of ``create_model_card`` so far.
    """

    def __init__(
        self,
        events: TrainingEvents,
        save_model: Callable[[str | None], None],
        open_repository: Callable[..., None],
        write_card: Callable[..., None],
    ) -> None:
        self.repository_id: str | None = None
        self.card_arguments: dict[str, Any] = {}
        self._events = events
        self._save_model = save_model
        self._open_repository = open_repository
        self._write_card = write_card
        self._repository: Repository | None = None
        self._uploads: Uploads | None = None
        self._is_open = False  # the same on all ranks
        self._saving = False
        # Checkpoints of this process by name, with their last push; None if the previous one was still in progress.
        self._checkpoints: dict[str, Future[Any] | None] = {}

    @property
    def output_dir(self) -> Path:
        """The output directory of the run."""
        return Path(str(self._events.args.output_dir))

    @property
    def uploads(self) -> Uploads:
        """Pushes in progress and waiting."""
        from ds_trainer.training.hub.uploads import Uploads

        if self._uploads is None:
            self._uploads = Uploads(self.output_dir)
        return self._uploads

    # -- the repository -----------------------------------------------------------------------------------------------

    def open_here(self, token: str | None, private: bool | None) -> None:
        """Open the repository and its branch on this process; see ``Trainer.init_hf_repo``."""
        args = self._events.args
        self._repository = Repository(
            repository_name(args.hub_model_id, str(args.output_dir)),
            token if token is not None else args.hub_token,
            private if private is not None else args.hub_private_repo,
        )
        self._repository.use_branch(args.hub_revision)
        self.repository_id = self._repository.id

    @fails_together
    def open(self, token: str | None = None, private: bool | None = None) -> None:
        """Call ``init_hf_repo`` on the main process, and raise its errors on all ranks. Collective."""
        args, failure = self._events.args, None
        if args.world_size > 1:
            join_ranks(args)
        try:
            given: dict[str, Any] = {"token": token, "private": private}
            self._open_repository(**{name: value for name, value in given.items() if value is not None})
        except (ConfigError, HubError) as error:
            failure = error
        _raise_on_all_ranks(failure)
        self._is_open = True

    # -- pushes -------------------------------------------------------------------------------------------------------

    @property
    def is_saving(self) -> bool:
        """Whether the model is being saved as part of a push or a checkpoint, so that the save starts no push."""
        return self._saving

    def save(self, directory: str | None = None) -> None:
        """Save the model as part of a push or a checkpoint. Collective."""
        with self._mark_saving():
            self._save_model(directory)

    @contextmanager
    def _mark_saving(self) -> Iterator[None]:
        # Not an argument: the save_model of a subclass may not forward it.
        before, self._saving = self._saving, True
        try:
            yield
        finally:
            self._saving = before

    def push(
        self,
        message: str | None,
        blocking: bool,
        token: str | None,
        revision: str | None,
        private: bool | None,
        card: dict[str, Any],
    ) -> Any:
        """See ``Trainer.push_to_hub``."""
        args, result, failure = self._events.args, None, None
        self._events.notify("on_push_begin")
        if not self._is_open or token is not None:
            self.open(token, private)
        self.save()
        push: Future[Any] | None = None
        if distributed.rank() == 0:
            name = repository_name(args.hub_model_id, str(args.output_dir)).split("/")[-1]
            card = {"model_name": name, **card}
            push = self._begin(message or "End of training", revision, card=card, awaited=blocking)
        if not blocking:
            return push
        if push is not None:
            try:
                result = push.result()
            except (ConfigError, HubError) as error:
                failure = error
        _raise_on_all_ranks(failure)
        return result

    def prepare(self, checkpoint: Path) -> bool:
        """Save the current weights if ``checkpoint`` is to be pushed once it is written. Collective.

        Returns:
            Whether it is to be pushed.
        """
        args, strategy = self._events.args, self._events.args.hub_strategy
        if not args.push_to_hub or strategy == HubStrategy.END:
            return False
        free = distributed.rank() == 0 and (args.hub_always_push or not self.uploads.busy)
        if not distributed.agree(torch.tensor([int(free)]))[0]:
            logger.info("%s is not pushed: the previous push is still in progress (hub_always_push).", checkpoint.name)
            self._checkpoints[checkpoint.name] = None
            return False
        self._events.notify("on_push_begin")
        self.save()
        return True

    def push_prepared(self, checkpoint: Path, state: TrainerState) -> None:
        """Push the files that :meth:`prepare` saved.

        Args:
            checkpoint: a complete checkpoint.
            state: the trainer state when it was saved.
        """
        if distributed.rank() != 0:
            return
        by_step = self._events.args.save_strategy != SaveStrategy.EPOCH
        message = "Training in progress, " + (
            f"step {state.global_step}" if by_step else f"epoch {int(state.epoch or 0)}"
        )
        self._push_or_warn(message, [checkpoint])

    def finish(self, resumed: bool) -> None:
        """Push the final model at the end of a training, and wait for all pushes. Collective.

        Checkpoints that are missing on the Hub are pushed too: skipped ones, those whose push failed, and after a
        resume those of the earlier process, which may have been killed during a push.
        """
        if not self._events.args.push_to_hub:
            return
        self._events.notify("on_push_begin")
        self.save()
        if distributed.rank() == 0:
            if self.uploads.busy:
                logger.info("Waiting until everything is pushed to %s.", self.repository_id)
            self.uploads.finish()
            self._push_or_warn("End of training", self._missing(resumed))
            self.uploads.finish()
        distributed.broadcast_from_main(None)  # all ranks wait here: their next collective would time out

    # -- details ------------------------------------------------------------------------------------------------------

    def _missing(self, resumed: bool) -> list[Path]:
        """The checkpoints that the Hub lacks, as far as this process knows, while no push is in progress."""
        assert self._repository is not None
        args, known = self._events.args, self._checkpoints
        if args.hub_strategy not in _WITH_CHECKPOINTS:
            return []
        found, there = list_checkpoints(self.output_dir), set()
        if args.hub_strategy == HubStrategy.CHECKPOINT:
            found = found[-1:]
        elif resumed:
            try:
                there = self._repository.files(args.hub_revision)
            except (ConfigError, HubError) as error:
                logger.warning("%s Checkpoints of earlier processes are not pushed.", error)
                resumed = False
        pushed = {name for name, push in known.items() if push is not None and push.exception() is None}
        earlier = [path.name for path in found if resumed and f"{path.name}/{MANIFEST_FILE}" not in there]
        return [path for path in found if path.name not in pushed and path.name in (*known, *earlier)]

    def _push_or_warn(self, message: str, checkpoints: Sequence[Path]) -> None:
        try:
            self._begin(message, None, checkpoints)
        except OSError as error:
            logger.warning("%s is not pushed: its files cannot be staged (%s).", message, error)

    def _begin(
        self,
        message: str,
        revision: str | None,
        checkpoints: Sequence[Path] = (),
        card: dict[str, Any] | None = None,
        awaited: bool = False,
    ) -> Future[Any]:
        """Stage the output directory with a card, and ``checkpoints`` if ``hub_strategy`` pushes checkpoints."""
        from ds_trainer.training.hub.uploads import Commit, stage_checkpoint, stage_model

        assert self._repository is not None
        args, strategy = self._events.args, self._events.args.hub_strategy
        if strategy not in _WITH_CHECKPOINTS:
            checkpoints = ()
        self._write_card(**(card or {}))
        write_output(self.output_dir / _ARGUMENTS, args.to_json_string() + "\n")

        def prepare(staged: Path) -> list[Commit]:
            commits = [Commit(stage_model(self.output_dir, staged / "model"), message)]
            for path in checkpoints:
                folder = _LAST if strategy == HubStrategy.CHECKPOINT else path.name
                commits.append(Commit(stage_checkpoint(path, staged / path.name), f"{message}, checkpoint", folder))
            return commits

        branch = revision if revision is not None else args.hub_revision
        push = self.uploads.begin(prepare, self._repository, branch, not awaited)
        self._checkpoints.update({path.name: push for path in checkpoints})
        return push


def _raise_on_all_ranks(failure: ConfigError | HubError | None) -> None:
    """Raise a failure of the main process on all ranks, so that the process group stays usable. Collective."""
    received = distributed.broadcast_from_main(failure and [isinstance(failure, ConfigError), str(failure)])
    if received:
        is_config_error, message = received
        raise (ConfigError if is_config_error else HubError)(message)
