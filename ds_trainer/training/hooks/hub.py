"""The Hugging Face Hub: the run's repository, the model card, and pushes that do not hold up the training.

All ranks take part in saving weights; the main process alone talks to the Hub.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from ds_trainer.arguments.enums import HubStrategy, SaveStrategy
from ds_trainer.training.hooks.records import RecordHooks
from ds_trainer.training.hub.card import card_text, is_generated
from ds_trainer.training.hub.card_facts import facts_of
from ds_trainer.training.hub.client import HubError
from ds_trainer.training.hub.repository import Repository, repository_name
from ds_trainer.training.hub.staging import stage_checkpoint, stage_model
from ds_trainer.training.hub.uploads import Commit, Uploads
from ds_trainer.training.signatures import accepted_arguments
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.failures import fails_together
from ds_trainer.utils.files import write_text_atomic
from ds_trainer.utils.logging import get_logger

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ds_trainer.callbacks.state import TrainerState
    from ds_trainer.training.trainer import Trainer

logger = get_logger(__name__)

CARD = "README.md"
_ARGUMENTS = "training_args.json"
_LAST = "last-checkpoint"


class HubHooks(RecordHooks):
    """What is pushed to the Hub, and when."""

    hub_model_id: str | None = None
    """``owner/name`` of the repository; None until :meth:`init_hf_repo` has opened it, and on other ranks."""

    _repository: Repository | None = None
    _upload_queue: Uploads | None = None
    _hub_is_open: bool = False  # alike on all ranks
    _saves_internally: bool = False  # a subclass' save_model may not hand on that it was told so
    _card_words: dict[str, Any] | None = None
    _passed_over: Path | None = None
    """The newest checkpoint, where it was not pushed because the push before was still under way."""

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Open the repository ``args.hub_model_id`` and the branch ``args.hub_revision``; they are made if missing.

        Called at construction with ``push_to_hub=True``. Does nothing on other ranks than the main process.

        Args:
            token: with write permission; default: ``args.hub_token``, then that of the environment.
            private: whether others may see a repository that is made now; default: ``args.hub_private_repo``.

        Raises:
            ConfigError: the Hub refused the token, the name or the branch; or huggingface_hub is not installed.
            HubError: the Hub does not answer.
        """
        if not self.is_world_process_zero():
            return
        args = self.args
        self._repository = Repository(
            repository_name(args.hub_model_id, str(args.output_dir)),
            token if token is not None else args.hub_token,
            private if private is not None else args.hub_private_repo,
        )
        self._repository.use_branch(args.hub_revision)
        self.hub_model_id = self._repository.id

    def create_model_card(
        self,
        language: str | list[str] | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """Write ``README.md`` to the output directory (main process): metadata, hyper-parameters, results, versions.

        What is not given stays as an earlier call said, or is taken from the model, the data and the run. A card that
        a person has written is kept as it is.

        Args:
            language: of the model, as the Hub abbreviates it: ``en``.
            license: as the Hub abbreviates it; default: that of the model that was fine-tuned, if the Hub has it.
            tags: further words for the search on the Hub.
            model_name: heading.
            finetuned_from: repository of the model that the training began with.
            tasks: the Hub's names of tasks, such as ``text-classification``.
            dataset_tags: the Hub's names of the data sets; without them and ``tasks`` there is no ``model-index``.
            dataset: their names for people.
            dataset_args: their configurations.

        Raises:
            ConfigError: huggingface_hub is not installed.
        """
        if not self.is_world_process_zero():
            return
        given = dict(
            language=language,
            license=license,
            tags=tags,
            model_name=model_name,
            finetuned_from=finetuned_from,
            tasks=tasks,
            dataset_tags=dataset_tags,
            dataset=dataset,
            dataset_args=dataset_args,
        )
        said = self._card_words = {**(self._card_words or {}), **{k: v for k, v in given.items() if v is not None}}
        path = self._output_dir / CARD
        if path.exists() and not is_generated(path.read_text(encoding="utf-8")):
            logger.info("%s was written by a person and stays as it is.", path)
            return
        try:
            text = card_text(facts_of(cast("Trainer", self), said))
        except ImportError:
            raise ConfigError("A model card needs the package huggingface_hub: pip install huggingface_hub.") from None
        write_text_atomic(path, text)

    @fails_together
    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the model to the output directory and push that, without checkpoints. Collective.

        Args:
            commit_message: of the commit.
            blocking: wait until it is pushed; otherwise it goes on in the background, after pushes under way.
            token: from now on; default: as :meth:`init_hf_repo`.
            revision: branch, made if missing; default: ``args.hub_revision``, or the main one.
            private: whether others may see a repository that is made now.
            **kwargs: for :meth:`create_model_card`.

        Returns:
            huggingface_hub's ``CommitInfo`` on the main process, or a ``Future`` of it without ``blocking``; None on
            the other ranks.

        Raises:
            ConfigError: the Hub refused the push; on all ranks.
            HubError: the Hub does not answer; likewise. Of a push in the background, the future raises both.
        """
        self._join_ranks()
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if not self._hub_is_open or token is not None:
            self._open_hub(token, private)
        self.save_internally()
        push, result, failure = None, None, None
        if self.is_world_process_zero():
            name = repository_name(self.args.hub_model_id, str(self.args.output_dir)).split("/")[-1]
            said, card = commit_message or "End of training", {"model_name": name, **kwargs}
            push = self._begin_push(said, revision, card=card, nobody_waits=not blocking)
        if not blocking:
            return push
        if push is not None:
            try:
                result = push.result()
            except (ConfigError, HubError) as error:
                failure = error
        self._raise_alike(failure)
        return result

    # -- in the course of a training ------------------------------------------------------------------------------

    @fails_together
    def _open_hub(self, token: str | None = None, private: bool | None = None) -> None:
        """:meth:`init_hf_repo` on the main process; what it raises is raised on all ranks. Collective."""
        if self.layout.world_size > 1:
            self._join_ranks()
        failure = None
        try:
            given: dict[str, Any] = {"token": token, "private": private}
            self.init_hf_repo(**{name: value for name, value in given.items() if value is not None})
        except (ConfigError, HubError) as error:
            failure = error
        self._raise_alike(failure)
        self._hub_is_open = True

    def _raise_alike(self, failure: ConfigError | HubError | None) -> None:
        """Raise what failed on the main process, on all ranks: the process group stays usable. Collective."""
        told = distributed.told_by_main(failure and [isinstance(failure, ConfigError), str(failure)])
        if told:
            raise (ConfigError if told[0] else HubError)(told[1])

    def _push_checkpoint(self, checkpoint: Path) -> None:
        """After a checkpoint was saved: push what ``hub_strategy`` asks for, in the background. Collective."""
        if self._prepare_push(checkpoint):
            self._push_prepared(checkpoint, self.state)

    def _prepare_push(self, checkpoint: Path) -> bool:
        """Whether ``checkpoint`` is to be pushed when it is there; the weights of this moment then lie beside it.

        Collective.
        """
        args, strategy = self.args, self.args.hub_strategy
        if not args.push_to_hub or strategy == HubStrategy.END:
            return False
        free = self.is_world_process_zero() and (args.hub_always_push or not self._uploads.busy)
        if not distributed.agree(torch.tensor([int(free)]))[0]:
            logger.info("%s is not pushed: the push before is still under way (hub_always_push).", checkpoint.name)
            self._passed_over = checkpoint
            return False
        self._passed_over = None
        self.callback_handler.on_push_begin(args, self.state, self.control)
        self.save_internally()
        return True

    def _push_prepared(self, checkpoint: Path, state: TrainerState) -> None:
        """Push what :meth:`_prepare_push` made ready.

        Args:
            checkpoint: complete by now.
            state: the trainer's when it was saved.
        """
        if not self.is_world_process_zero():
            return
        by_step = self.args.save_strategy != SaveStrategy.EPOCH
        message = "Training in progress, " + (
            f"step {state.global_step}" if by_step else f"epoch {int(state.epoch or 0)}"
        )
        self._push_or_warn(message, checkpoint)

    def _end_pushes(self) -> None:
        """At the end of a training: push the final model, and wait for what is under way. Collective.

        The newest checkpoint too, where it was passed over: what is resumed from the Hub shall not be older.
        """
        if not self.args.push_to_hub:
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.save_internally()
        if self.is_world_process_zero():
            left = self._passed_over
            self._push_or_warn("End of training", left if left is not None and left.is_dir() else None)
            self._passed_over = None
            if self._uploads.busy:
                logger.info("Waiting until everything is pushed to %s.", self.hub_model_id)
            self._uploads.finish()
        distributed.told_by_main(None)  # the others wait too: a collective of theirs would run into its time limit

    def save_internally(self, directory: str | None = None) -> None:
        """:meth:`save_model` as a part of something else, which pushes by itself where that is wanted. Collective."""
        save = cast("Trainer", self).save_model
        outer, self._saves_internally = self._saves_internally, True
        try:
            save(directory, **dict.fromkeys(accepted_arguments(save, {"_internal_call"}), True))
        finally:
            self._saves_internally = outer

    @property
    def _uploads(self) -> Uploads:
        if self._upload_queue is None:
            self._upload_queue = Uploads(self._output_dir)
        return self._upload_queue

    def _push_or_warn(self, message: str, checkpoint: Path | None = None) -> None:
        try:
            self._begin_push(message, None, checkpoint)
        except OSError as error:
            logger.warning("%s is not pushed: files cannot be set aside for it (%s).", message, error)

    def _begin_push(
        self,
        message: str,
        revision: str | None,
        checkpoint: Path | None = None,
        card: dict[str, Any] | None = None,
        nobody_waits: bool = True,
    ) -> Future[Any]:
        """Set aside the output directory, with a card, and ``checkpoint`` where the strategy is to push them."""
        assert self._repository is not None  # opened at construction, or just now
        strategy = self.args.hub_strategy
        kept = checkpoint if strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS) else None
        self.create_model_card(**(card or {}))
        write_text_atomic(self._output_dir / _ARGUMENTS, self.args.to_json_string() + "\n")

        def prepare(staged: Path) -> list[Commit]:
            commits = [Commit(stage_model(self._output_dir, staged / "model"), message)]
            if kept is not None:
                aside = stage_checkpoint(kept, staged / "checkpoint")
                folder = _LAST if strategy == HubStrategy.CHECKPOINT else kept.name
                commits.append(Commit(aside, f"{message}, checkpoint", folder))
            return commits

        branch = revision if revision is not None else self.args.hub_revision
        return self._uploads.begin(prepare, self._repository, branch, nobody_waits)
