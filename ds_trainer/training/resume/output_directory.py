"""``OutputDirectory``: the output directory of one training: lock, checkpoints, imported checkpoints."""

from __future__ import annotations

import errno
import inspect
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock, Timeout
from filelock import __version__ as filelock_version
from torch import nn

from ds_trainer.arguments.enums import SchedulerType
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.checkpoint.protocol import disk
from ds_trainer.checkpoint.protocol.checkpoint_directory import (
    HOW_TO_RESUME,
    CheckpointDirectory,
    find_checkpoint,
    list_checkpoints,
)
from ds_trainer.checkpoint.protocol.writer_group import WriterGroup
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.config.library_optimizer_table import library_optimizer
from ds_trainer.optim.optimizer_builder import parameters_of_groups
from ds_trainer.optim.schedule_stepping import steps_on_metric
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError, listed
from ds_trainer.utils.files import exists, parse_json
from ds_trainer.utils.logging import EVERY_RANK, get_logger
from ds_trainer.utils.output_files import write_result

if TYPE_CHECKING:
    from ds_trainer.checkpoint.converters.transformers_reader import RunningModel

logger = get_logger(__name__)

AUTO_RESUME = "DS_TRAINER_AUTO_RESUME"
"""The environment variable with the meaning of ``auto_resume``, for schedulers that restart jobs."""

# A job that a scheduler restarts may start while the last ranks of the previous one are still exiting.
_EXITING_SECONDS = 120.0


def write_compiled(directory: Path, compiled: CompiledConfig, args: TrainingArguments) -> None:
    """Write ``ds_config.json``, what DeepSpeed is told. A file of the user that has this name is not replaced."""
    path, text = directory / "ds_config.json", compiled.to_json() + "\n"
    named = args.deepspeed if isinstance(args.deepspeed, (str, os.PathLike)) and exists(args.deepspeed) else None
    same = named is not None and path.exists() and os.path.samefile(os.path.expanduser(named), path)
    if named is not None and same and path.read_text(encoding="utf-8") != text:
        raise ConfigError(
            f"deepspeed={os.fspath(named)!r} ({args.where('deepspeed')}) is where the run writes its own; it "
            "would be replaced. Name the file otherwise, or set another output_dir."
        )
    write_result(path, text)


class OutputDirectory:
    """The output directory of one training.

    Args:
        args: the training arguments.
        resume: the argument ``resume_from_checkpoint`` of ``train``.

    Raises:
        ConfigError: there is no such checkpoint.

    Attributes:
        path: its path.
        checkpoints: those in it.
        writer_group: the ranks that share it; set by :meth:`acquire`.
        first_generation: the generation of the first checkpoint of this training; checkpoints with a smaller one are of
            another training. Set by :meth:`acquire` on the leader. Clocks may be set back, generations are not.
    """

    def __init__(self, args: TrainingArguments, resume: str | bool | None = None) -> None:
        self.path = Path(str(args.output_dir))
        self.checkpoints = CheckpointDirectory(self.path)
        self._resumes = bool(resume)
        self._requested = find_checkpoint(resume, self.path) if resume else None
        self.writer_group: WriterGroup
        self.first_generation = 0
        self._args = args
        self._lock: DirectoryLock | None = None
        self._imported: Path | None = None

    @property
    def resumes_automatically(self) -> bool:
        """Whether the run resumes from the newest checkpoint in this directory without a request.

        Raises:
            ConfigError: the environment variable says neither yes nor no.
        """
        value = os.environ.get(AUTO_RESUME, "").strip().lower()
        if value not in ("", "0", "false", "no", "off", "1", "true", "yes", "on"):
            raise ConfigError(f"The environment variable {AUTO_RESUME}={value!r} must be 1 or 0.")
        return bool(self._args.auto_resume) or value in ("1", "true", "yes", "on")

    @property
    def is_ours(self) -> bool:
        """Whether this process holds the lock of the directory: the leader of its writers, while it trains."""
        return self._lock is not None

    def acquire(self) -> None:
        """Lock the directory, and remove what a killed process left in it. Collective.

        Raises:
            ConfigError: another training uses it, or it cannot be written to.
        """
        args = self._args
        self.writer_group = WriterGroup.of(
            args.save_on_each_node, distributed.rank(), distributed.world_size(), distributed
        )
        problem = None
        if self.writer_group.is_leader:
            try:
                self._lock = DirectoryLock(self.path)
                holder = self._lock.acquire(_EXITING_SECONDS if self.resumes_automatically else 0.0)
                if holder is not None:
                    problem = (
                        f"output_dir={self.path} ({args.where('output_dir')}) is in use by another "
                        f"training: {holder}. End that training, or choose another directory."
                    )
                else:
                    self.checkpoints.pin()
                    for action in self.checkpoints.tidy():
                        logger.info("%s: %s.", self.path, action)
                    self.first_generation = self.checkpoints.next_generation()
            except ConfigError as error:
                problem = str(error)
            except OSError as error:
                problem = f"output_dir={self.path} ({args.where('output_dir')}) cannot be used: {error}."
        if distributed.agree(torch.tensor([int(problem is not None)]), patient=True)[0]:
            problems = [message for message in distributed.gather_objects(problem) if message is not None]
            self.release()
            raise ConfigError(list(dict.fromkeys(problems)))

    def release(self) -> None:
        """Unlock the directory, and remove the imported checkpoint."""
        self._remove_imported()
        self.checkpoints.unpin()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def resolve(self, running_model: Callable[[], RunningModel], is_trial: bool = False) -> Path | None:
        """The checkpoint to resume from, verified by all ranks; None for a new run. Collective.

        It is the requested one, or the newest valid one if that was requested or, outside of a search, the run resumes
        automatically. A checkpoint of DeepSpeed or transformers is converted first.

        Args:
            running_model: describes the model of this run, for checkpoints whose optimizer states have numbers.
            is_trial: whether the run is a trial of a search.

        Raises:
            BrokenCheckpoint: it is damaged, or there is no valid checkpoint.
            ConfigError: it has weights only, or cannot be converted; or a new run could not replace what is there.
        """
        if not self._resumes and not (self.resumes_automatically and not is_trial and self._has_checkpoints()):
            if not is_trial:
                self._check_new_run()
            return None
        from ds_trainer.checkpoint.selection import resolve

        trusted = self._args.trust_checkpoint
        path = resolve(self._requested, self.path, self.writer_group, trusted, running_model).path
        if self._requested not in (None, path) and self.writer_group.is_leader:
            self._imported = path
        return path

    def _has_checkpoints(self) -> bool:
        """Whether there is a checkpoint to resume from, damaged or not. Collective."""
        here = self.writer_group.is_leader and self.checkpoints.has_checkpoints()
        return bool(distributed.agree(torch.tensor([int(here)]))[0])

    def _check_new_run(self) -> None:
        """Warn that a new run begins in a directory that has checkpoints of another one. Collective.

        Raises:
            ConfigError: a checkpoint there is of another program, or incomplete: it would not be replaced.
        """
        entries = self.checkpoints.entries() if distributed.rank() == 0 else []
        unknown = [e.problem for e in entries if e.manifest is None and (e.path / "trainer_state.json").is_file()]
        found = [str(entry.path.resolve()) for entry in entries if entry.manifest is not None]
        unknown, newest = distributed.broadcast_object((unknown, found[-1] if found else None))
        set_another = f"set another output_dir ({self._args.where('output_dir')})"
        if unknown:
            raise ConfigError(
                f"output_dir={self.path} has checkpoints that this run could neither resume from nor replace: "
                f"{listed(unknown, 3, ' ')} Move them elsewhere, or {set_another}."
            )
        if newest is not None:
            logger.warning(
                "This run begins at step 0 although %s is there; it will replace checkpoints of the same steps. To "
                "resume instead, %s. To keep both, %s.",
                newest,
                HOW_TO_RESUME,
                set_another,
            )

    def newest(self) -> Path | None:
        """The newest checkpoint, as the main process sees it. Collective."""
        found = list_checkpoints(self.path) if distributed.rank() == 0 else []
        newest: Path | None = distributed.broadcast_object(found[-1] if found else None)
        return newest

    def drop_imported(self) -> None:
        """Remove the imported checkpoint after all ranks have read it. Collective."""
        distributed.barrier()
        self._remove_imported()

    def _remove_imported(self) -> None:
        if self._imported is not None:
            disk.remove_tree(self._imported)
            self._imported = None


def running_model(
    model: nn.Module,
    args: TrainingArguments,
    config: CompiledConfig,
    groups: list[dict[str, Any]],
    given: tuple[Any, Any],
    optimizer_class: type[torch.optim.Optimizer] | None,
) -> RunningModel:
    """The model of a training and the parameter groups of its optimizer, which need not exist yet.

    Args:
        model: the module.
        args: the training arguments.
        config: the compiled configuration.
        groups: the parameter groups that the Trainer builds.
        given: optimizer and schedule of the user; either may be None.
        optimizer_class: the class in ``optimizer_cls_and_kwargs``.
    """
    from ds_trainer.checkpoint.converters.transformers_reader import RunningModel

    optimizer, schedule = given
    members = parameters_of_groups(groups if optimizer is None else optimizer)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    named = [[names[id(parameter)] for parameter in group if id(parameter) in names] for group in members]
    if schedule is not None:
        follows_metric = steps_on_metric(schedule)
    else:
        follows_metric = args.lr_scheduler_type in (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)
    return RunningModel(model, named, _optimizer_name(args, config, optimizer, optimizer_class), follows_metric)


def _optimizer_name(
    args: TrainingArguments, config: CompiledConfig, given: Any, optimizer_class: type[torch.optim.Optimizer] | None
) -> str:
    if given is not None:
        return type(given).__name__
    if optimizer_class is not None:
        return optimizer_class.__name__
    if library_optimizer(args) is not None:
        return str(args.optim)
    return str(config.optimizer_type)


# Allows one training at a time in an output directory: two would overwrite each other's checkpoints and records.


LOCK_FILE = ".lock"
_NOT_SUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_POLL_SECONDS = 0.2


class _FileReplaced(Exception):
    """The locked file no longer has the name ``.lock``: its holder removed it before this process got the lock."""


class DirectoryLock:
    """A lock on a directory. This process holds it until it releases the lock or ends, in whatever way.

    It is an operating system lock on the file ``.lock`` (:class:`filelock.FileLock`: ``flock``, which Linux NFS clients
    turn into a lock on the server). If the file system does not support locks, there is a warning and no lock. A file
    that a killed process left behind does not lock anything.

    Raises:
        ConfigError: filelock is older than 3.30, which ignores keywords that it does not know.
    """

    def __init__(self, directory: Path) -> None:
        unknown = {"fallback_to_soft", "on_acquired"} - inspect.signature(FileLock.__init__).parameters.keys()
        if unknown:
            raise ConfigError(
                f"filelock {filelock_version} is installed, which ignores {', '.join(sorted(unknown))}: two trainings "
                "could write to one directory. Install a newer one: pip install 'filelock>=4.1'."
            )
        self._path = directory / LOCK_FILE
        # No fallback to a lock by existence: a killed process would leave its directory locked.
        self._lock = FileLock(
            self._path,
            thread_local=False,
            poll_interval=_POLL_SECONDS,
            fallback_to_soft=False,
            on_acquired=self._write_holder,
        )

    def acquire(self, timeout: float = 0.0) -> str | None:
        """Take the lock. Creates the directory if it is missing.

        Args:
            timeout: seconds to wait for the current holder.

        Returns:
            None if the lock was taken, or if locks are not supported here; otherwise a description of the holder.

        Raises:
            OSError: the directory cannot be created or written to.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                self._lock.acquire(timeout=timeout)
            except _FileReplaced:
                continue
            except Timeout:
                if self._path.exists():
                    return self._describe_holder()
                continue  # the holder released the lock in the meantime
            except OSError as error:
                if error.errno not in _NOT_SUPPORTED:
                    raise
                logger.warning(
                    "%s cannot be locked on this file system (%s): make sure that no other training writes to %s.",
                    self._path,
                    error.strerror,
                    self._path.parent,
                    extra=EVERY_RANK,
                )
            return None

    def release(self) -> None:
        """Release the lock and remove its file. Does nothing if the lock is not held."""
        if self._lock.is_locked:
            self._path.unlink(missing_ok=True)
            self._lock.release()

    def _write_holder(self, descriptor: int) -> None:
        try:
            current = os.path.samestat(os.stat(self._path), os.fstat(descriptor))
        except FileNotFoundError:
            current = False
        if not current:
            raise _FileReplaced
        holder = {"host": socket.gethostname(), "process": os.getpid(), "since": time.time()}
        os.truncate(descriptor, 0)
        os.write(descriptor, json.dumps(holder).encode())

    def _describe_holder(self) -> str:
        try:
            holder = parse_json(self._path.read_text(encoding="utf-8"))
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since"]))
            return f"process {holder['process']} on {holder['host']} since {since}"
        except (OSError, ValueError, KeyError, TypeError):  # the holder has just taken or released the lock
            return "another process"
