"""``Checkpointer``: saves one training, in the background or synchronously, and restores it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds_trainer.arguments.enums import SaveFailurePolicy, SaveStrategy
from ds_trainer.callbacks.state import STATE_FILE, TrainerState, export_states, restore_states
from ds_trainer.checkpoint.manager import SCHEDULE_FILE, CheckpointManager
from ds_trainer.checkpoint.protocol.checkpoint_directory import checkpoint_name
from ds_trainer.checkpoint.protocol.checkpoint_file import CheckpointFile, FallbackFile, GeneratedFile, InMemoryFile
from ds_trainer.checkpoint.protocol.checkpoint_save import SaveFailed
from ds_trainer.checkpoint.protocol.manifest import BrokenCheckpoint, Manifest, arguments_digest
from ds_trainer.checkpoint.protocol.retention import Retention
from ds_trainer.checkpoint.shards.frozen_weights import FrozenFiles
from ds_trainer.checkpoint.weights.base_digest import BaseDigest
from ds_trainer.checkpoint.weights.model_description import description_files
from ds_trainer.data.position import DataPosition
from ds_trainer.engine.expert_parallel import of_divided_groups, of_whole_groups, schedule_state
from ds_trainer.engine.state.flat_partitions import UnknownState
from ds_trainer.engine.state.state_shards import all_in_memory
from ds_trainer.training.hub.publisher import HubPublisher
from ds_trainer.training.loading.weight_check import WeightCheck, forget_origin
from ds_trainer.training.loop.best_model import best_checkpoint, note_checkpoint
from ds_trainer.training.loop.data_cursor import DataCursor
from ds_trainer.training.loop.divergence_guard import DivergenceGuard, RolledBack
from ds_trainer.training.loop.training_run import TrainingRun
from ds_trainer.training.model.cache import original_cache_settings
from ds_trainer.training.resume.background_saves import AFTER_FAILURE_SECONDS, AFTER_SIGTERM_SECONDS, BackgroundSaves
from ds_trainer.training.resume.changed_arguments import MovedSchedule, move_schedule
from ds_trainer.training.resume.checkpoint_model import ModelFiles, announce
from ds_trainer.training.resume.compatibility import Changes
from ds_trainer.training.resume.output_directory import OutputDirectory
from ds_trainer.training.resume.resumption import (
    Resumption,
    rank_files,
    report,
    rollback_checkpoint,
    run_files,
    weights_directory,
)
from ds_trainer.training.stopping.stop_controller import StopController
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.printable import say, shown
from ds_trainer.utils.units import parse_size

logger = get_logger(__name__)


class Checkpointer:
    """Saves and restores one training. All methods are collective.

    Args:
        run: the training.
        directory: the output directory with its checkpoints.
        stop: records the duration of saves.
        publisher: pushes checkpoints to the Hub.
        save_weights: writes the weights to a directory (``Trainer.save_model``).
        has_own_files: whether a subclass writes other files there. Checkpoints then hold them in place of the model.

    Attributes:
        cursor, guard: data cursor and divergence guard, after :meth:`start` has created or restored them.
        evaluation_is_due: whether an evaluation is due, but not done, at the step of the checkpoint that is written or
            restored.
    """

    def __init__(
        self,
        run: TrainingRun,
        directory: OutputDirectory,
        stop: StopController,
        publisher: HubPublisher,
        save_weights: Callable[[str], None],
        has_own_files: bool = False,
    ) -> None:
        self.cursor: DataCursor
        self.guard: DivergenceGuard
        self.evaluation_is_due = False
        self._run = run
        self._directory = directory
        self._stop = stop
        self._publisher = publisher
        self._save_weights = save_weights
        self._has_own_files = has_own_files
        self._frozen = FrozenFiles.of(run.engine)
        self._base = BaseDigest.of(run.engine)
        group, frozen = directory.writer_group, self._frozen.names
        self._model_files = ModelFiles(run.model, run.optimizer, run.events.args, group, frozen, has_own_files)
        self._background: BackgroundSaves | None = None
        self._resumption: Resumption | None = None
        self._changes = Changes({})
        self._moved_schedule: MovedSchedule | None = None

    # -- restoring ----------------------------------------------------------------------------------------------------

    def start(self, resumption: Resumption | None, changes: Changes, weight_check: WeightCheck) -> None:
        """Restore a checkpoint, or load the weights from ``start_from_weights``.

        Args:
            resumption: the checkpoint; None for a new run.
            changes: the arguments that have changed since it was written.
            weight_check: compares the weights with the files of the model.
        """
        run, args = self._run, self._run.events.args
        self._resumption, self._changes = resumption, changes
        if resumption is None:
            if args.start_from_weights is None:
                weight_check.loaded(run.model, args, run.engine)
            else:
                from ds_trainer.checkpoint.loading.engine_weights import load_engine_weights

                directory = weights_directory(args.start_from_weights)
                load_engine_weights(run.engine, directory)
                weight_check.restarted(run.model, directory, args, run.engine)
                self._print(f"Weights from {directory}; optimizer, schedule and data start fresh.")
            forget_origin(run.model)
            self.cursor = self._new_cursor(None, None)
            self.guard = self._new_guard(None)
            return
        forget_origin(run.model)
        self.evaluation_is_due = resumption.evaluation_is_due
        at, manager = resumption.position(run.plan), self.manager(run.events.state)
        schedule = manager.load(resumption.path, changes.settings(args), states=not changes.optimizer)
        schedule = schedule_state(schedule, run.optimizer.param_groups, of_divided_groups)
        run.events.state = self._merged_state(resumption.state, at)
        if changes.schedule:
            move_schedule(run.lr_scheduler, schedule, run.events.state.global_step)
            self._moved_schedule = MovedSchedule(run.lr_scheduler, run.optimizer)
        else:
            run.lr_scheduler.load_state_dict(schedule)
        manifest = Manifest.read(resumption.path)
        same_layout = manager.is_same_layout(manifest)
        self.cursor = self._new_cursor(at, resumption.reader_state(run.loader, at, manifest, same_layout))
        self.guard = self._new_guard((resumption.run or {}).get("divergence"))
        run.losses.rule.kept = (resumption.run or {}).get("loss")
        self._print(report(run, resumption, changes, manifest, self.cursor))

    def _new_cursor(self, at: DataPosition | None, reader_state: dict[str, Any] | None) -> DataCursor:
        run = self._run
        return DataCursor(run.events.args, run.batch_plan, run.plan, run.loader, at, reader_state)

    def _new_guard(self, restored: Any) -> DivergenceGuard:
        run, size = self._run, self._run.batch_plan.global_batch_size
        return DivergenceGuard(
            events=run.events,
            engine=run.engine,
            global_batch_size=size,
            samples_ahead=self.cursor.samples_ahead,
            roll_back=self.roll_back,
            log=run.log,
            restored=restored,
        )

    def _merged_state(self, resumed: TrainerState, at: DataPosition) -> TrainerState:
        """The state of the checkpoint, with the values of this run and process."""
        present, plan, events = self._run.events.state, self._run.plan, self._run.events
        if plan.micro_steps_per_epoch is None and resumed.max_steps != plan.max_steps:
            resumed.epoch = plan.epoch_after(at.epoch, at.steps, at.micro_steps)  # a fraction of the new length
        for name in (
            *("max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps", "train_batch_size"),
            *("is_local_process_zero", "is_world_process_zero"),
        ):
            setattr(resumed, name, getattr(present, name))
        restore_states(
            events.handler.callbacks,
            resumed.stateful_callbacks,
            include_arguments=events.args.restore_callback_states_from_checkpoint,
        )
        return resumed

    def roll_back(self, reason: str) -> RolledBack:
        """Restore the newest valid checkpoint of this training, or the one from which it resumed.

        The data cursor keeps its position, so the data read since that checkpoint is not read again: the steps before
        the failing one are skipped too. Waits for a save in progress.

        Args:
            reason: for the error message.

        Raises:
            TrainingDiverged: there is no such checkpoint.
        """
        self.wait()
        resumption = Resumption.of(rollback_checkpoint(self._directory, self._resumption, self._changes, reason))
        state = self._run.events.state
        first = self._resumption is not None and resumption.path == self._resumption.path
        changes = self._changes if first else Changes({})  # later checkpoints have the values of this run
        schedule = self.manager(state).load(resumption.path, changes.settings(self._run.events.args))
        schedule = schedule_state(schedule, self._run.optimizer.param_groups, of_divided_groups)
        restored = self._merged_state(resumption.state, resumption.position(self._run.plan))
        vars(state).update(vars(restored))  # in place: the loop and callbacks hold this object
        if first and self._moved_schedule is not None:
            self._moved_schedule.restore()
        else:
            self._run.lr_scheduler.load_state_dict(schedule)
        run: Any = resumption.run or {}
        tried = run.get("divergence", {}).get("incidents", {}).get("tried", resumption.state.global_step)
        return RolledBack(resumption.path, tried)

    # -- saving -------------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Announce the size of a checkpoint, and allocate memory for copies of the state.

        Call it after the first step, when there are optimizer states.
        """
        if self._run.events.args.save_strategy != SaveStrategy.NO:
            self._announce_size()
            self._background_saves()

    def save_in_background(self) -> None:
        """Begin to write a checkpoint in the background, or write it now if that is not possible.

        ``on_save`` is called when it is written.
        """
        self.wait()
        saves, events = self._background_saves(), self._run.events
        began = time.perf_counter()
        if saves is None:
            if self.save() is not None:
                self._stop.note_save(time.perf_counter() - began)
                self._notify_saved(events.state)
            return
        state = dataclasses.replace(
            events.state,
            log_history=list(events.state.log_history),
            stateful_callbacks=export_states(events.handler.callbacks),
        )
        note_checkpoint(state, self._directory.path)
        pushes = self._publisher.prepare(self._directory.path / checkpoint_name(state.global_step))

        def on_done(outcome: Path | BaseException) -> None:
            if not isinstance(outcome, Path):
                if not isinstance(outcome, SaveFailed):
                    raise outcome
                self._report_failure(outcome)
                return
            self._stop.note_save(saves.ended - began)
            events.state.best_model_checkpoint = state.best_model_checkpoint
            if pushes:
                self._publisher.push_prepared(outcome, state)
            self._notify_saved(state)

        saves.begin(self.manager(state), self.shared_files(state), rank_files(self.cursor), state, on_done)

    def save(self) -> Path | None:
        """Write a checkpoint to ``checkpoint-<global_step>`` while training waits. Waits for a save in progress first.

        Returns:
            Its path; None if it could not be written and ``save_failure_policy="continue"``.

        Raises:
            SaveFailed: it could not be written; on all ranks.
        """
        self.wait()
        events, state = self._run.events, self._run.events.state
        state.stateful_callbacks = export_states(events.handler.callbacks)
        best_before, only_model = state.best_model_checkpoint, events.args.save_only_model
        note_checkpoint(state, self._directory.path)
        write = (lambda path: self._save_weights(str(path))) if only_model or self._has_own_files else None
        try:
            checkpoint = self.manager(state).save(
                state.global_step, self.shared_files(state), rank_files(self.cursor), write, only_model
            )
        except SaveFailed as error:
            state.best_model_checkpoint = best_before
            self._report_failure(error)
            return None
        if self._publisher.prepare(checkpoint):
            self._publisher.push_prepared(checkpoint, state)
        return checkpoint

    @property
    def save_in_progress(self) -> bool:
        """Whether a checkpoint is being written, or is written but not yet reported."""
        return self._background is not None and self._background.in_flight is not None

    def poll(self) -> None:
        """At a step boundary, report the save in progress if it is done. Raises :class:`SaveFailed` on all ranks."""
        if self._background is not None:
            self._background.poll()

    def wait(self) -> None:
        """Wait for the save in progress, and report it. Raises the same as :meth:`poll`."""
        if self._background is not None:
            self._background.wait()

    def finish_before_exit(self) -> None:
        """Finish the save in progress before a signal ends the process."""
        if self._background is not None:
            self._background.finish(AFTER_SIGTERM_SECONDS)

    def close(self) -> None:
        """Finish after the end of the training. A save is still in progress only if the training was aborted."""
        if self._background is not None:
            # A signal now means that the launcher ends all ranks: the missing parts of the save will never come.
            self._background.finish(AFTER_FAILURE_SECONDS, lambda: self._stop.signaled)
            self._run.engine.before_step = None  # which holds the last copy
            self._background.release()
            self._background = None

    def keep_best(self) -> None:
        """At the end of training, load the checkpoint of the best evaluation if ``load_best_model_at_end``."""
        state = self._run.events.state
        best, manager = best_checkpoint(self._run.events.args, state), self.manager(state)
        if best is not None:
            try:
                manager.load_best(best)
            except BrokenCheckpoint as error:
                logger.warning("%s The model keeps its last weights.", error)
        manager.finish()

    def newest(self) -> Path | None:
        """The newest checkpoint in the directory."""
        return self._directory.newest()

    # -- details ------------------------------------------------------------------------------------------------------

    def _background_saves(self) -> BackgroundSaves | None:
        run, args = self._run, self._run.events.args
        if not args.save_async or args.save_only_model or self._has_own_files:
            return None
        if self._background is None:
            self._background = BackgroundSaves(
                run.engine, run.device, self._frozen.names, run.events.handler, run.optimizer
            )
        return self._background if self._background.possible else None

    def _notify_saved(self, state: TrainerState) -> None:
        events = self._run.events
        due = events.control.should_save  # another checkpoint may be due at this step
        events.notify_with(state, "on_save")
        events.control.should_save = events.control.should_save or due

    def _report_failure(self, error: SaveFailed) -> None:
        if self._run.events.args.save_failure_policy != SaveFailurePolicy.CONTINUE or not error.by_disk:
            raise error
        if self._run.is_main_process:
            what = "Training continues" if self._stop.agreed is None else "The run stops without it"
            logger.error("%s %s (save_failure_policy=continue).", error, what)

    def shared_files(self, state: TrainerState) -> list[CheckpointFile]:
        """The files that are the same on all ranks (trainer state, schedule ...); empty unless this rank leads."""
        run = self._run
        if not self._directory.writer_group.is_leader:
            return []
        written = state.snapshot()  # converted to JSON when it is written, which takes seconds for a long history
        files: list[CheckpointFile] = [GeneratedFile(STATE_FILE, lambda: written.to_json().encode())]
        files += run_files(run, self.cursor, self.guard, self.evaluation_is_due)
        if not run.events.args.save_only_model:
            state_dict = schedule_state(run.lr_scheduler.state_dict(), run.optimizer.param_groups, of_whole_groups)
            files.append(InMemoryFile.of(SCHEDULE_FILE, state_dict))
            with original_cache_settings(run.model):  # these files allow an export of the weights without the model
                files += map(FallbackFile, description_files(run.model, run.processing_class))
        return files

    def manager(self, state: TrainerState) -> CheckpointManager:
        """A manager for the checkpoints of the run; ``state`` has the path of the best one."""
        args, best, run = self._run.events.args, state.best_model_checkpoint, self._run
        limit = args.save_total_limit
        retention = Retention(
            limit if isinstance(limit, int) else None,
            parse_size(limit) if isinstance(limit, str) else None,
            args.save_keep_every,
            Path(best) if best is not None else None,
        )
        return CheckpointManager(
            directory=self._directory.checkpoints,
            engine=run.engine,
            writer_group=self._directory.writer_group,
            retention=retention,
            arguments=arguments_digest(args.to_json_string()),
            model=self._model_files.plan(),
            frozen=self._frozen,
            base=self._base,
        )

    def _announce_size(self) -> None:
        """Print the size of a checkpoint, unless DeepSpeed has swapped states out or writes them itself."""
        args = self._run.events.args
        if args.save_only_model:
            return
        try:
            in_memory = all_in_memory(self._run.engine)
            size = self.manager(self._run.events.state).size() if in_memory else None
        except UnknownState:
            return
        if size is not None and self._run.is_main_process:
            self._print(announce(size, self._directory.path, args.save_total_limit))

    def _print(self, text: str) -> None:
        if self._run.is_main_process:
            say(shown(text))
