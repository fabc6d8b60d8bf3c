"""How a run goes on from a checkpoint: what is compared, what is put back, what begins anew, and what is said of it.

A checkpoint holds, besides the engine's state, schedule and random states: ``trainer_state.json``; ``run.json`` (what
decides the trajectory, and the position in the data); ``training_args.json``; and of every rank that needs it
``data_<rank>.pt`` (state of a stream or a loader).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LambdaLR

from ds_trainer.callbacks.state import TrainerState
from ds_trainer.checkpoint.manager import STATE_FILE
from ds_trainer.checkpoint.protocol.contents import Held
from ds_trainer.checkpoint.protocol.manifest import Manifest
from ds_trainer.checkpoint.protocol.pickles import load_pickle
from ds_trainer.data.position import DataPosition
from ds_trainer.data.stream import StreamLoader
from ds_trainer.optim.stepping import steps_on_metric
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.data_place import DataPlace
from ds_trainer.training.run_plan import RunPlan
from ds_trainer.training.trajectory import Changes, compare, trajectory_of
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import read_json
from ds_trainer.utils.logging import get_logger

if TYPE_CHECKING:
    from ds_trainer.training.trainer import Trainer

logger = get_logger(__name__)

RUN_FILE = "run.json"
ARGUMENTS_FILE = "training_args.json"


def _data_file(rank: int) -> str:
    return f"data_{rank:05d}.pt"


# -- what is written -------------------------------------------------------------------------------------------------


def shared_contents(trainer: Trainer) -> list[Held]:
    """Files of a checkpoint that are alike on all ranks."""
    run = {
        "trajectory": trajectory_of(trainer, trainer.run_plan),
        "planned_steps": trainer.run_plan.planned_steps,
        "steps": trainer.run_plan.max_steps,
        "epochs": trainer.run_plan.epochs,
        "data": trainer.data_place.position.to_json(),
        "evaluation_is_due": trainer.evaluation_is_due,
        "divergence": trainer.guard.to_json(),
    }
    return [
        Held(RUN_FILE, (json.dumps(run, indent=2) + "\n").encode()),
        Held(ARGUMENTS_FILE, (trainer.args.to_json_string() + "\n").encode()),
    ]


def own_contents(trainer: Trainer) -> list[Held]:
    """Files of a checkpoint that are this rank's."""
    kept = trainer.data_place.kept()
    return [Held.of(_data_file(distributed.rank()), kept)] if kept else []


# -- what is read ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resumption:
    """What a checkpoint says of the run that wrote it.

    Attributes:
        path: of the checkpoint.
        state: the trainer's state in it.
        run: the content of ``run.json``; None where the checkpoint has none (it was converted).
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
        """Whether the run was stopped before it could evaluate the step of the checkpoint."""
        return self.run is not None and bool(self.run.get("evaluation_is_due"))

    def position(self, plan: RunPlan) -> DataPosition:
        """Where in the data it was written."""
        if self.run is not None:
            return DataPosition.from_json(self.run["data"])
        length = self.state.max_steps or plan.steps_per_epoch
        written = plan if plan.rounds_per_epoch is not None else replace(plan, steps_per_epoch=length)
        return written.position(self.state.global_step, self.state.epoch)

    def plan(self, trainer: Trainer, plan: RunPlan, loader: Any) -> RunPlan:
        """The plan of the run that goes on: with another global batch the same epochs are other steps."""
        if self.run is None or plan.rounds_per_epoch is None:
            return plan
        at = self.position(plan)
        if self.run["trajectory"]["global_batch"] != trainer.batch_plan.step_size:
            place = DataPlace(trainer, plan, loader, at)
            return plan.with_another_batch(trainer.args, at.epoch, place.rounds, self.state.global_step)
        if self.run["planned_steps"] == plan.max_steps:  # an earlier change of the batch counts on
            return replace(plan, max_steps=self.run["steps"], epochs=self.run["epochs"])
        return plan

    def changes(self, trainer: Trainer, plan: RunPlan) -> Changes:
        """What was changed since, and allowed.

        Raises:
            ConfigError: something that was not.
        """
        if self.run is None:
            logger.warning("%s has no %s: whether the arguments are the same is not known.", self.path, RUN_FILE)
            return Changes({})
        return compare(self.run["trajectory"], trajectory_of(trainer, plan), trainer.args, self.path)

    def kept(self, loader: Any, same_layout: bool) -> dict[str, Any]:
        """What :meth:`DataPlace.kept` gave: a stream's is the main process's, a foreign loader's is each rank's.

        Args:
            loader: of this run.
            same_layout: the ranks stand where they stood.
        """
        stream = isinstance(loader, StreamLoader)
        file = self.path / _data_file(0 if stream else distributed.rank())
        if not file.is_file() or not (stream or same_layout):
            return {}
        return dict(load_pickle(file, trusted=True))  # the checkpoint has been verified


def move_schedule(schedule: Any, saved: Mapping[str, Any], steps: int) -> None:
    """Let a new ``schedule`` stand where the one that was ``saved`` stood.

    Args:
        schedule: has been made and not stepped.
        saved: the state of the old one; says how often it was stepped.
        steps: optimizer steps done, where that does not.
    """
    if steps_on_metric(schedule):
        logger.warning("The new schedule (%s) follows a metric and begins anew.", type(schedule).__name__)
        return
    done = int(saved.get("last_epoch", saved.get("last_batch_iteration", steps)))
    if done <= 0:
        return
    if "last_batch_iteration" in inspect.signature(schedule.step).parameters:  # DeepSpeed's
        schedule.step(done)
    elif isinstance(schedule, LambdaLR):  # its rate follows from the step alone
        schedule.last_epoch = done - 1
        schedule._step_count = done + 1
        schedule.step()
    else:
        for _ in range(done):
            schedule.step()


# -- what is said ----------------------------------------------------------------------------------------------------


def report(trainer: Trainer, resumption: Resumption, changes: Changes, manifest: Manifest, place: DataPlace) -> str:
    """What was restored, a few lines for a person.

    Args:
        trainer: as it goes on.
        resumption: from where.
        changes: what was allowed to change.
        manifest: of the checkpoint.
        place: in the data.
    """
    state, layout, engine = trainer.state, trainer.layout, trainer.engine
    now = _describe(layout.describe(), engine.stage, engine.precision)
    sizes = {name: manifest.layout[name] for name in ("world_size", "tp", "cp", "sp")}
    before = _describe(ParallelLayout(**sizes).describe(), manifest.zero_stage, manifest.precision)
    same = before == now
    rates = ", ".join(f"{rate:g}" for rate in dict.fromkeys(trainer.get_learning_rates()))
    schedule = type(trainer.lr_scheduler).__name__
    callbacks = ", ".join(state.stateful_callbacks) or "none has a state"
    rows = [
        ("state of", before if same else f"{before}; cut anew for {now}"),
        ("weights", "restored"),
        ("optimizer", "begins anew: it is another one" if changes.optimizer else "restored"),
        ("schedule", f"{schedule}, {'moved to' if changes.schedule else 'restored at'} learning rate {rates}"),
        ("random state", "of every rank" if same else "of the replica with the same number"),
        ("data", _place_in_words(trainer, place)),
        ("callbacks", callbacks),
        *(("changed", line) for line in changes.lines()),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"Resumed from {resumption.path}: step {state.global_step} of {state.max_steps}"]
    return "\n".join([*lines, *(f"  {name:<{width}}  {text}" for name, text in rows)])


def _describe(layout: str, stage: int, precision: str) -> str:
    return f"{layout}, ZeRO {stage}, {precision}"


def _place_in_words(trainer: Trainer, place: DataPlace) -> str:
    at = place.position
    if trainer.args.ignore_data_skip:
        return f"epoch {at.epoch} from its beginning (ignore_data_skip=True)"
    if not at.steps:
        return f"epoch {at.epoch}, from its beginning"
    how = place.way
    return f"epoch {at.epoch}, after {at.samples} samples" + (f" ({how})" if how else "")


def weights_directory(path: str) -> Path:
    """The directory that ``start_from_weights`` names.

    Raises:
        ConfigError: there is none.
    """
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise ConfigError(f"start_from_weights={path!r} is no directory (looked from {Path.cwd()}).")
    return directory
