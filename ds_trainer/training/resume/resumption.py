"""How a run resumes from a checkpoint: files, comparison of arguments, data position, and the printed report.

Besides engine state, schedule and random states, a checkpoint has: ``trainer_state.json``; ``run.json`` (compatibility
fingerprint, data position, divergence incidents); ``training_args.json``; and ``data_<rank>.pt`` for every rank that
needs it (state of a stream or loader).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.callbacks.state import STATE_FILE, TrainerState
from ds_trainer.checkpoint.protocol.checkpoint_file import InMemoryFile, load_pickle
from ds_trainer.checkpoint.protocol.manifest import BrokenCheckpoint, Manifest
from ds_trainer.data.position import DataPosition
from ds_trainer.data.stream import StreamLoader
from ds_trainer.monitor.health.divergence import TrainingDiverged
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.loop.data_cursor import DataCursor
from ds_trainer.training.loop.divergence_guard import DivergenceGuard
from ds_trainer.training.loop.run_plan import RunPlan
from ds_trainer.training.loop.training_run import TrainingRun
from ds_trainer.training.resume.compatibility import Changes, compare
from ds_trainer.training.resume.output_directory import OutputDirectory
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import directory_problem, read_json, user_path
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.units import counted

logger = get_logger(__name__)

RUN_FILE = "run.json"
ARGUMENTS_FILE = "training_args.json"


def _data_file(rank: int) -> str:
    return f"data_{rank:05d}.pt"


# -- writing ---------------------------------------------------------------------------------------------------------


def run_files(
    run: TrainingRun, cursor: DataCursor, guard: DivergenceGuard, evaluation_is_due: bool
) -> list[InMemoryFile]:
    """The files of a checkpoint that describe the run, the same on all ranks.

    Args:
        run: the training.
        cursor: the data cursor.
        guard: the divergence guard.
        evaluation_is_due: whether an evaluation of this step is due, but not done.
    """
    content = {
        "compatibility": run.fingerprint,
        "planned_steps": run.plan.planned_steps,
        "steps": run.plan.max_steps,
        "epochs": run.plan.epochs,
        "data": cursor.position.to_json(),
        "evaluation_is_due": evaluation_is_due,
        "divergence": guard.to_json(),
        "loss": run.losses.rule.to_json(),
    }
    return [
        InMemoryFile(RUN_FILE, (json.dumps(content, indent=2) + "\n").encode()),
        InMemoryFile(ARGUMENTS_FILE, (run.events.args.to_json_string() + "\n").encode()),
    ]


def rank_files(cursor: DataCursor) -> list[InMemoryFile]:
    """The files of a checkpoint that describe this rank."""
    state = cursor.reader_state()
    return [InMemoryFile.of(_data_file(distributed.rank()), state)] if state else []


# -- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resumption:
    """The description of a run in a checkpoint.

    Attributes:
        path: path of the checkpoint.
        state: the trainer state in it.
        run: the content of ``run.json``; None if there is none (a converted checkpoint).
    """

    path: Path
    state: TrainerState
    run: Mapping[str, Any] | None

    @classmethod
    def of(cls, path: Path) -> Resumption:
        """Read the small files of the checkpoint at ``path``."""
        run = read_json(path / RUN_FILE) if (path / RUN_FILE).is_file() else None
        return cls(path, TrainerState.load_from_json(path / STATE_FILE), run)

    @property
    def evaluation_is_due(self) -> bool:
        """Whether the run was stopped before a due evaluation at the step of the checkpoint."""
        return self.run is not None and bool(self.run.get("evaluation_is_due"))

    def position(self, plan: RunPlan) -> DataPosition:
        """The data position of the checkpoint."""
        if self.run is not None:
            return DataPosition.from_json(self.run["data"])
        length = self.state.max_steps or plan.steps_per_epoch
        written = plan if plan.micro_steps_per_epoch is not None else replace(plan, steps_per_epoch=length)
        return written.position(self.state.global_step, self.state.epoch)

    def plan(
        self, args: TrainingArguments, batch_plan: BatchPlan, plan: RunPlan, loader: Any, fingerprint: Mapping[str, Any]
    ) -> RunPlan:
        """The plan of the resumed run.

        With another global batch size, or another length of the data, the same epochs have other steps: those that are
        left are counted from the position in the data.

        Args:
            args: the arguments of this run.
            batch_plan: sizes of its batches.
            plan: the plan of a new run.
            loader: micro-batches of this replica.
            fingerprint: :func:`compatibility_of` this run.
        """
        if self.run is None or plan.micro_steps_per_epoch is None:
            return plan
        written, at = self.run["compatibility"], self.position(plan)
        same_epochs = all(written[name] == fingerprint[name] for name in ("global_batch", "train_dataset"))
        if same_epochs and self.run["planned_steps"] == plan.max_steps:
            return replace(plan, max_steps=self.run["steps"], epochs=self.run["epochs"])
        if same_epochs and self.run["planned_steps"] == self.run["steps"]:
            return plan
        cursor = DataCursor(args, batch_plan, plan, loader, at)
        return plan.with_another_batch(args, at.epoch, cursor.micro_steps, self.state.global_step)

    def changes(self, fingerprint: Mapping[str, Any], args: TrainingArguments) -> Changes:
        """The changes of arguments since the checkpoint was written.

        Args:
            fingerprint: :func:`compatibility_of` this run.
            args: the arguments of this run.

        Raises:
            ConfigError: a change that is not possible, or not allowed.
        """
        if self.run is None:
            before, now = self.state.max_steps, fingerprint["max_steps"]  # now is None if it has no effect
            longer = now is not None and before not in (0, now)
            logger.warning(
                "%s has no %s, so its arguments cannot be compared with those of this run. "
                "The learning rates are those of %s.",
                self.path,
                RUN_FILE,
                f"this run, of {counted(now, 'step')} instead of {before}" if longer else "the checkpoint's schedule",
            )
            return Changes({"max_steps": (before, now)} if longer else {})
        return compare(self.run["compatibility"], fingerprint, args, self.path)

    def reader_state(self, loader: Any, at: DataPosition, manifest: Manifest, same_layout: bool) -> dict[str, Any]:
        """The saved :meth:`DataCursor.reader_state`: for streams that of the main process, otherwise that of this rank.

        For a stream that is read in shards, the states of this replica's shards, from the ranks that have read them.

        Args:
            loader: the loader of this run.
            at: the position in the data.
            manifest: the manifest of the checkpoint.
            same_layout: whether the layout is that of the checkpoint.
        """
        from ds_trainer.data.stream_shards import StreamOrder

        order = StreamOrder(*(at.stream or ()))
        if not isinstance(loader, StreamLoader):
            return self._state_on(distributed.rank()) if same_layout else {}
        if not order.shards:
            return self._state_on(0)
        written, found = _layout_of(manifest), dict[str, Any]()
        shards = loader.shards_of(order, at.samples)
        for replica in sorted({number % math.gcd(written.dp, order.shards) for number in shards}):
            saved = self._state_on(written.rank_at(dp=replica))
            if "state" in saved:  # a stream without a state is read again
                states = {number: state for number, state in saved["state"].items() if number in shards}
                saved["state"] = found.get("state", {}) | states
            found |= saved
        return found

    def _state_on(self, rank: int) -> dict[str, Any]:
        file = self.path / _data_file(rank)
        return dict(load_pickle(file, trusted=True)) if file.is_file() else {}  # the checkpoint has been verified


# -- reporting --------------------------------------------------------------------------------------------------------


def report(run: TrainingRun, resumption: Resumption, changes: Changes, manifest: Manifest, cursor: DataCursor) -> str:
    """A few lines that tell the user what was restored.

    Args:
        run: the resumed training.
        resumption: the checkpoint.
        changes: the changes of arguments.
        manifest: the manifest of the checkpoint.
        cursor: the data cursor.
    """
    from ds_trainer.training.resume.changed_arguments import Consequences, finished, table

    state, engine, args = run.events.state, run.engine, run.events.args
    now = _describe(engine.layout.describe(), engine.stage, engine.precision)
    written = _layout_of(manifest)
    before = _describe(written.describe(), manifest.zero_stage, manifest.precision)
    same = before == now
    rates = ", ".join(f"{float(g['lr']):g}" for g in {float(g["lr"]): g for g in run.optimizer.param_groups}.values())
    schedule = type(run.lr_scheduler).__name__
    callbacks = ", ".join(state.stateful_callbacks) or "none with a state"
    rows = [
        ("state of", before if same else f"{before}; resharded for {now}"),
        ("weights", "restored"),
        ("optimizer", "new, because it has changed" if changes.optimizer else "restored"),
        ("schedule", f"{schedule}, {'moved to' if changes.schedule else 'restored at'} learning rate {rates}"),
        ("random state", "of every rank" if same else "of the replica with the same number"),
        ("data", _describe_position(args, cursor)),
        ("callbacks", callbacks),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"Resumed from {resumption.path}: step {state.global_step} of {state.max_steps}"]
    lines += [f"  {name:<{width}}  {text}" for name, text in rows]
    if resumption.run is not None and (resumption.path / ARGUMENTS_FILE).is_file():
        consequences = Consequences(
            changes,
            args,
            world_size=(written.world_size, engine.layout.world_size),
            max_steps=(resumption.run["steps"], run.plan.max_steps),
            step=state.global_step,
            position=cursor.position,
            rates=rates,
        )
        changed = consequences.rows(read_json(resumption.path / ARGUMENTS_FILE))
        if changed and run.is_main_process:
            logger.warning("arguments that differ from the checkpoint's: %s", ", ".join(row.name for row in changed))
        lines += table(changed)
    if state.global_step >= run.plan.max_steps or cursor.epoch >= run.plan.epochs:
        lines += finished(args, state.global_step, resumption.path)
    return "\n".join(lines)


def _layout_of(manifest: Manifest) -> ParallelLayout:
    return ParallelLayout(*(manifest.layout[name] for name in ("world_size", "tp", "cp", "sp")))


def _describe(layout: str, stage: int, precision: str) -> str:
    return f"{layout}, ZeRO {stage}, {precision}"


def _describe_position(args: TrainingArguments, cursor: DataCursor) -> str:
    at = cursor.position
    if args.ignore_data_skip:
        return f"epoch {at.epoch} from its beginning (ignore_data_skip=True)"
    if not at.steps:
        return f"epoch {at.epoch}, from its beginning"
    way = cursor.way
    return f"epoch {at.epoch}, after {counted(at.samples, 'sample')}" + (f" ({way})" if way else "")


def weights_directory(path: str) -> Path:
    """The directory of ``start_from_weights``.

    Raises:
        ConfigError: it does not exist.
    """
    directory = user_path(path, f"start_from_weights={path!s}")
    if not directory.is_dir() or directory_problem(directory):
        problem = directory_problem(directory) or f"is not a directory (current directory: {Path.cwd()})"
        raise ConfigError(f"start_from_weights={path!r} {problem}. Name the directory of a model, or a checkpoint.")
    return directory


def rollback_checkpoint(
    directory: OutputDirectory, resumption: Resumption | None, changes: Changes, reason: str
) -> Path:
    """The newest valid checkpoint of this training, or the one from which it resumed. Collective.

    Args:
        directory: the output directory of the training.
        resumption: the checkpoint from which it resumed.
        changes: the arguments that had changed since that checkpoint was written.
        reason: for the error message.

    Raises:
        TrainingDiverged: there is no such checkpoint.
    """
    from ds_trainer.checkpoint.selection import resolve, verify_checkpoint

    nothing = f"{reason} There is no checkpoint of this training for a rollback"
    try:
        path, manifest = resolve(None, directory.path, directory.writer_group)
        if distributed.broadcast_object(manifest.generation >= directory.first_generation):
            return path
    except BrokenCheckpoint:
        pass
    if resumption is None:
        raise TrainingDiverged(f"{nothing}: training stops; the weights are those before this step.")
    if changes.optimizer:
        raise TrainingDiverged(f"{nothing} with the current optimizer, which was changed on resume: training stops.")
    try:
        return verify_checkpoint(resumption.path, directory.writer_group, distributed).path
    except BrokenCheckpoint as error:
        raise TrainingDiverged(f"{nothing} ({error}): training stops.") from error
