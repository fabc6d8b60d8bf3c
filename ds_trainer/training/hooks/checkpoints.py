"""What is written of a model and of a run, and how a run goes on from it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from ds_trainer.arguments.enums import SaveFailure
from ds_trainer.callbacks.state import TrainerState, export_states, restore_states
from ds_trainer.checkpoint.foreign.convert import foreign_at
from ds_trainer.checkpoint.foreign.importing import import_hidden
from ds_trainer.checkpoint.loading.weights_source import read_weights
from ds_trainer.checkpoint.manager import SCHEDULE_FILE, STATE_FILE, CheckpointManager
from ds_trainer.checkpoint.pieces.frozen import FrozenFiles
from ds_trainer.checkpoint.pieces.model_plan import ModelPlan
from ds_trainer.checkpoint.protocol import disk
from ds_trainer.checkpoint.protocol.contents import Content, Held, Made
from ds_trainer.checkpoint.protocol.directory import CheckpointDirectory
from ds_trainer.checkpoint.protocol.foreign_formats import Kind
from ds_trainer.checkpoint.protocol.lock import DirectoryLock
from ds_trainer.checkpoint.protocol.manifest import MANIFEST_FILE, BrokenCheckpoint, Manifest, arguments_digest
from ds_trainer.checkpoint.protocol.retention import Retention
from ds_trainer.checkpoint.protocol.saving import SaveFailed
from ds_trainer.checkpoint.protocol.sharing import Sharing
from ds_trainer.checkpoint.weights.base import BaseDigest
from ds_trainer.checkpoint.weights.description import description_contents
from ds_trainer.checkpoint.weights.writing import save_pretrained_parts, save_weights
from ds_trainer.data.position import DataPosition
from ds_trainer.engine.state.pieces import all_in_memory
from ds_trainer.engine.state.units import UnknownState
from ds_trainer.optim.swapping import weights_of_evaluation
from ds_trainer.training.best_model import best_checkpoint, note_checkpoint
from ds_trainer.training.checkpoint_model import plan_of_checkpoints
from ds_trainer.training.data_place import DataPlace
from ds_trainer.training.divergence import DivergenceGuard
from ds_trainer.training.hooks.hub import HubHooks
from ds_trainer.training.loading.model_argument import is_on_meta
from ds_trainer.training.model.cache import cache_as_given
from ds_trainer.training.resume import (
    Resumption,
    move_schedule,
    own_contents,
    report,
    shared_contents,
    weights_directory,
)
from ds_trainer.training.rollback import in_place_of
from ds_trainer.training.run_plan import RunPlan
from ds_trainer.training.running_model import running_model
from ds_trainer.training.save_size import announce
from ds_trainer.training.trajectory import Changes
from ds_trainer.training.weight_check import forget_origin
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.failures import fails_together
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.sizes import parse_size

if TYPE_CHECKING:
    from ds_trainer.training.trainer import Trainer

logger = get_logger(__name__)

AUTO_RESUME = "DS_TRAINER_AUTO_RESUME"
"""The environment variable that does what ``auto_resume`` does, for whoever starts jobs again."""

# A job that is started again by itself may come while the last ranks of the one before it are still dying.
_DYING_SECONDS = 120.0


class CheckpointHooks(HubHooks):
    """Weights for others, checkpoints for the run itself."""

    run_plan: RunPlan
    data_place: DataPlace
    guard: DivergenceGuard
    _resumption: Resumption | None
    _changes: Changes
    _sharing: Sharing
    _lock: DirectoryLock | None = None
    evaluation_is_due = False
    """Whether the step of the checkpoint that is being written, or gone on from, has not been evaluated yet."""
    _converted: Path | None = None
    _planned: tuple[ModelPlan | None] | None = None
    frozen_files = FrozenFiles()
    """Which weights stay as they are in the training under way, and where they are stored already."""
    _base: BaseDigest | None = None

    @fails_together
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights as safetensors with configuration and tokenizer, for ``from_pretrained``. Collective.

        With ``push_to_hub`` the model is pushed too, except where the save is a part of something else
        (``_internal_call``).
        """
        directory = Path(output_dir) if output_dir is not None else self._output_dir
        self._join_ranks()
        if is_on_meta(self.model):  # it is saved before anything has needed its weights
            cast("Trainer", self)._model_for_evaluation(None)
        weights_of_evaluation(self.optimizer)
        if self.is_world_process_zero():
            with cache_as_given(self.model):
                save_pretrained_parts(self.model, self.processing_class, directory)
        save_weights(self.model, directory, parse_size(self.args.max_shard_size))
        if self.args.push_to_hub and not (_internal_call or self._saves_internally):
            self.push_to_hub(commit_message="Model save")

    @fails_together
    def save_checkpoint(self) -> Path | None:
        """Write everything that resuming needs to ``checkpoint-<global_step>``. Collective.

        Returns:
            Its path; None where it could not be written and ``save_failure="continue"``.

        Raises:
            SaveFailed: it could not be written; on all ranks.
        """
        args, state = self.args, self.state
        state.stateful_callbacks = export_states(self.callback_handler.callbacks)
        best_before = state.best_model_checkpoint
        note_checkpoint(state, self._output_dir)
        weights = (lambda directory: self.save_internally(str(directory))) if args.save_only_model else None
        try:
            checkpoint = self._checkpoints.save(
                state.global_step, self._shared_contents(state), own_contents(cast("Trainer", self)), weights
            )
        except SaveFailed as error:
            state.best_model_checkpoint = best_before
            self._not_saved(error)
            return None
        self._push_checkpoint(checkpoint)
        return checkpoint

    def _shared_contents(self, state: TrainerState) -> list[Content]:
        """What is alike on all ranks: the trainer's state and the schedule, as they are now.

        Of ranks that write for others; the rest have nothing to do with it.
        """
        if not self._sharing.commits:
            return []
        written = state.snapshot()  # its text is made where it is written: of a long history that takes seconds
        files: list[Content] = [Made(STATE_FILE, lambda: written.to_json().encode())]
        files += shared_contents(cast("Trainer", self))
        if not self.args.save_only_model:
            files += [Held.of(SCHEDULE_FILE, self.lr_scheduler.state_dict()), *self._description()]
        return files

    def _not_saved(self, error: SaveFailed) -> None:
        if self.args.save_failure != SaveFailure.CONTINUE or not error.by_disk:
            raise error
        if self.is_world_process_zero():
            logger.error("%s Training goes on (save_failure=continue).", error)

    def _description(self) -> list[Content]:
        """What lets weights be taken out of a checkpoint without the model."""
        with cache_as_given(self.model):
            return list(description_contents(self.model, self.processing_class))

    @property
    def _checkpoints(self) -> CheckpointManager:
        return self._manager(self.state)

    def _manager(self, state: TrainerState) -> CheckpointManager:
        args, best = self.args, state.best_model_checkpoint
        limit = args.save_total_limit
        retention = Retention(
            limit if isinstance(limit, int) else None,
            parse_size(limit) if isinstance(limit, str) else None,
            args.save_keep_every,
            Path(best) if best is not None else None,
        )
        arguments = arguments_digest(args.to_json_string())
        return CheckpointManager(
            self._output_dir,
            self.engine,
            self._sharing,
            retention,
            arguments,
            self._model_of_checkpoints(),
            self.frozen_files,
            self._base,
        )

    def _model_of_checkpoints(self) -> ModelPlan | None:
        """The weight files that each checkpoint has; None where it has none. Alike on all ranks."""
        if self._planned is None:
            frozen = self.frozen_files.names
            self._planned = plan_of_checkpoints(self.model, self.optimizer, self.args, self._sharing, frozen)
        return self._planned[0]

    def announce_size(self) -> None:
        """Say how large a checkpoint is; nothing where DeepSpeed has swapped states out, or writes them. Collective."""
        if self.args.save_only_model:
            return
        try:
            size = self._checkpoints.size() if all_in_memory(self.engine) else None
        except UnknownState:
            return
        if size is not None and self.is_world_process_zero():
            print(announce(size, self._output_dir, self.args.save_total_limit), flush=True)

    def keep_best(self) -> None:
        """When training ends: load the checkpoint of the best evaluation where that is asked for. Collective."""
        best = best_checkpoint(self.args, self.state)
        if best is not None:
            try:
                self._checkpoints.load_best(best)
            except BrokenCheckpoint as error:
                logger.warning("%s The model keeps its last weights.", error)
        self._checkpoints.finish()

    # -- the output directory -----------------------------------------------------------------------------------------

    def _take_output_dir(self) -> None:
        """Before a training: lock the output directory, and settle what a killed process left there. Collective.

        Raises:
            ConfigError: another training has it, or it cannot be written to.
        """
        self._planned = None
        self._sharing = Sharing.of(
            self.args.save_on_each_node, distributed.rank(), distributed.world_size(), distributed
        )
        problem = None
        if self._sharing.commits:
            self._lock = DirectoryLock(self._output_dir)
            try:
                holder = self._lock.acquire(_DYING_SECONDS if self._goes_on_by_itself else 0.0)
                if holder is not None:
                    problem = (
                        f"output_dir={self._output_dir} ({self.args.where('output_dir')}) is in use by another "
                        f"training: {holder}. End that one, or choose another directory."
                    )
                else:
                    for done in CheckpointDirectory(self._output_dir).tidy():
                        logger.info("%s: %s.", self._output_dir, done)
            except OSError as error:
                problem = f"output_dir={self._output_dir} ({self.args.where('output_dir')}) cannot be used: {error}."
        if distributed.agree(torch.tensor([int(problem is not None)]))[0]:
            problems = [said for said in distributed.gather_objects(problem) if said is not None]
            self._leave_output_dir()
            raise ConfigError(list(dict.fromkeys(problems)))

    def _as_ours(self, asked: Path | None) -> Path | None:
        """A checkpoint of DeepSpeed or transformers converted into a hidden directory; any other as it is. Collective.

        Raises:
            ConfigError: it cannot be converted; on all ranks.
        """
        if asked is None or (asked / MANIFEST_FILE).is_file():
            return asked
        sharing, problem = self._sharing, None
        if sharing.commits:
            try:
                foreign = foreign_at(asked)
                logger.info("%s is of %s: it is converted first.", asked, foreign.kind.value)
                node = (sharing.node, sharing.nodes, "converted")
                here = running_model(cast("Trainer", self)) if foreign.kind is Kind.PLAIN_TRAINER else None
                self._converted, made = import_hidden(foreign, self._directory, self.args.trust_checkpoint, *node, here)
                self._say("\n  ".join([f"Converted from {asked}:", *made.notes]))
            except ConfigError as error:
                problem = str(error)
        told = distributed.gather_objects((problem, self._converted))
        if problems := [said for said, _ in told if said is not None]:
            raise ConfigError(list(dict.fromkeys(problems)))
        return told[sharing.first][1]

    def _drop_converted(self) -> None:
        """All ranks have read it. Collective."""
        distributed.barrier()
        self._remove_converted()

    def _remove_converted(self) -> None:
        if self._converted is not None:
            disk.remove_tree(self._converted)
            self._converted = None

    @property
    def _goes_on_by_itself(self) -> bool:
        """Whether a checkpoint in the output directory is gone on from without being asked for."""
        return bool(self.args.auto_resume) or os.environ.get(AUTO_RESUME, "0") not in ("", "0")

    @property
    def _directory(self) -> CheckpointDirectory:
        return CheckpointDirectory(self._output_dir)

    def _leave_output_dir(self) -> None:
        self._remove_converted()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # -- going on -----------------------------------------------------------------------------------------------------

    def _plan_of_run(self, loader: Any, checkpoint: Path | None) -> RunPlan:
        """How long the run is; reads what the checkpoint says of the one that wrote it. Collective.

        Raises:
            ConfigError: something that decides the trajectory has changed since, and ``allow_changed`` does not say so.
        """
        trainer = cast("Trainer", self)
        values = trainer.set_initial_training_values(self.args, loader)
        plan = RunPlan.of_values(values, self.args.gradient_accumulation_steps)
        self._resumption = None if checkpoint is None else Resumption.of(checkpoint)
        if self._resumption is not None:
            plan = self._resumption.plan(trainer, plan, loader)
            self._changes = self._resumption.changes(trainer, plan)
        self.run_plan = plan
        return plan

    def _begin(self, loader: Any) -> None:
        """Put back what the checkpoint has, or the weights that are asked for. Collective."""
        resumption, plan, trainer = self._resumption, self.run_plan, cast("Trainer", self)
        self.frozen_files, self._planned = FrozenFiles.of(self.engine), None
        self._base = BaseDigest.of(self.engine)
        self.evaluation_is_due = resumption is not None and resumption.evaluation_is_due
        if resumption is None:
            if self.args.start_from_weights is None:
                self.weight_check.loaded(self.model, self.args, self.engine)
            else:
                directory = weights_directory(self.args.start_from_weights)
                read_weights(self.engine, directory)
                self.weight_check.restarted(self.model, directory, self.args, self.engine)
                self._say(f"Weights from {directory}; optimizer, schedule and data begin anew.")
            forget_origin(self.model)
            self.data_place = DataPlace(trainer, plan, loader)
            self.guard = DivergenceGuard(trainer)
            return
        forget_origin(self.model)
        changes, path, checkpoints = self._changes, resumption.path, self._checkpoints
        saved = checkpoints.load(path, changes.settings(self.args), states=not changes.optimizer)
        self._restore_state(resumption.state, resumption.position(plan))
        if changes.schedule:
            move_schedule(self.lr_scheduler, saved, self.state.global_step)
        else:
            self.lr_scheduler.load_state_dict(saved)
        manifest = Manifest.read(path)
        kept = resumption.kept(loader, checkpoints.is_same_layout(manifest))
        self.data_place = DataPlace(trainer, plan, loader, resumption.position(plan), kept)
        self.guard = DivergenceGuard(trainer, (resumption.run or {}).get("divergence"))
        self._say(report(trainer, resumption, changes, manifest, self.data_place))

    def restore(self, resumption: Resumption) -> None:
        """Put back a checkpoint of this very training, in the middle of it. The place in the data stays. Collective."""
        state = self.state
        saved = self._checkpoints.load(resumption.path)
        self._restore_state(resumption.state, resumption.position(self.run_plan))
        self.lr_scheduler.load_state_dict(saved)
        self.state = in_place_of(state, self.state)

    def _restore_state(self, resumed: TrainerState, at: DataPosition) -> None:
        fresh, plan = self.state, self.run_plan
        self.state = resumed
        if plan.rounds_per_epoch is None and resumed.max_steps != plan.max_steps:
            self.state.epoch = plan.epoch_after(at.epoch, at.steps, at.rounds)  # a fraction of the new length
        for name in ("max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps", "train_batch_size"):
            setattr(self.state, name, getattr(fresh, name))
        restore_states(
            self.callback_handler.callbacks,
            resumed.stateful_callbacks,
            include_arguments=self.args.restore_callback_states_from_checkpoint,
        )
        self.state.is_local_process_zero = fresh.is_local_process_zero
        self.state.is_world_process_zero = fresh.is_world_process_zero

    def _say(self, text: str) -> None:
        if self.is_world_process_zero():
            print(text, flush=True)
