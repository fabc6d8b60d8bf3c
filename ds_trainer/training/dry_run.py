"""A dry run: the start-up of rank 0 of a job of any size, in one process, without GPUs and without weights.

The process group is a fake one, and the model and its engine are on the meta device. The rest is the real thing: the
Trainer, its checks, the compiled configuration, the process groups, the loader, optimizer, schedule and engine of
``train()``, up to its first step. What would be an error of the real start is the same error here.

Nothing is written to the output directory: the dry run has a temporary one, in which the real one's checkpoints are
links.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import resource
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_trainer.arguments.enums import When
from ds_trainer.arguments.redefined import packs
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.callbacks.defaults import DefaultFlowCallback
from ds_trainer.checkpoint import selection
from ds_trainer.data.stream import length_of
from ds_trainer.engine.fake_group import MadeGroups, fake_process_group
from ds_trainer.engine.loading.weight_source import WeightSource, attach_weight_source, attached_weight_source
from ds_trainer.engine.meta_engine import engines_on_meta, move_to_meta, updated_elements
from ds_trainer.engine.weights import full_numel
from ds_trainer.parallel.shard_slices import ShardSlice
from ds_trainer.training.loading.weight_check import WeightCheck
from ds_trainer.training.loop.training_run import TrainingRun
from ds_trainer.training.resume.checkpointer import Checkpointer
from ds_trainer.training.resume.compatibility import Changes
from ds_trainer.training.resume.resumption import Resumption, weights_directory
from ds_trainer.utils import failures
from ds_trainer.utils.devices import planned_device_type
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.units import counted, human_bytes, human_count

if TYPE_CHECKING:
    import torch

    from ds_trainer.training.trainer import Trainer

Adapt = Callable[[TrainingArguments], TrainingArguments]
MakeTrainer = Callable[[Adapt], "Trainer"]
"""Makes the Trainer of the job; it must pass its training arguments through the function that it is given."""


@dataclass(frozen=True)
class DryRun:
    """What a dry run has found. Sizes are those of rank 0.

    Attributes:
        ranks: ranks of the job.
        layout: the layout in one line.
        groups: process groups that the rank made, besides that of all ranks.
        model: class of the model.
        parameters: elements of the whole model.
        engine: ZeRO stage, precision, optimizer, offload.
        wrapper: DeepSpeed's class around the optimizer.
        weight_bytes: weights that the rank holds between steps.
        updated: elements that the rank updates in a step.
        settings: keys of the compiled DeepSpeed configuration.
        batch: the global batch size and its factors.
        global_batch_size: ``get_total_train_batch_size()``.
        samples: samples of the training data; None if unknown.
        samples_per_rank: samples of an epoch that the rank reads; None if unknown.
        steps_per_epoch: optimizer steps of an epoch; None if the length of the data is unknown.
        max_steps: optimizer steps of the run.
        estimate: predicted memory and step time.
        operators: operators of DeepSpeed that the real start loads or compiles.
        not_rehearsed: what the real start does besides.
        seconds: duration of the dry run.
        peak_memory: peak host memory of this process, in bytes.
    """

    ranks: int
    layout: str
    groups: int
    model: str
    parameters: int
    engine: str
    wrapper: str
    weight_bytes: int
    updated: int
    settings: int
    batch: str
    global_batch_size: int
    samples: int | None
    samples_per_rank: int | None
    steps_per_epoch: int | None
    max_steps: int
    estimate: str
    operators: tuple[str, ...]
    not_rehearsed: tuple[str, ...]
    seconds: float
    peak_memory: int

    def lines(self) -> Iterator[str]:
        """The report."""
        yield f"layout   {self.layout}; {self.groups} process groups besides that of all ranks"
        yield f"config   {self.settings} DeepSpeed settings, without a conflict"
        yield f"model    {self.model}, {human_count(self.parameters)} parameters"
        yield (
            f"engine   {self.engine} ({self.wrapper}); this rank holds {human_bytes(self.weight_bytes)} of weights and "
            f"updates {self.updated:,} elements"
        )
        yield f"batch    get_total_train_batch_size() = {self.batch}"
        if self.samples is None:
            yield "data     length unknown"
        else:
            yield f"data     {counted(self.samples, 'sample')}; this rank reads {self.samples_per_rank:,} in an epoch"
        epoch = "" if self.steps_per_epoch is None else f", {self.steps_per_epoch:,} in an epoch"
        yield f"steps    {counted(self.max_steps, 'optimizer step')}{epoch}"
        yield f"estimate {self.estimate}"
        if self.operators:
            yield f"later    operators of DeepSpeed, loaded or compiled at the real start: {', '.join(self.operators)}"
        for text in self.not_rehearsed:
            yield f"later    {text}"
        yield (
            f"The start-up of rank 0 of {counted(self.ranks, 'rank')} succeeded ({self.seconds:.1f} s, "
            f"{human_bytes(self.peak_memory)} of host memory)."
        )


def dry_run(
    make_trainer: MakeTrainer,
    ranks: int,
    local_ranks: int = 8,
    device_type: str | None = None,
    resume_from_checkpoint: str | bool | None = None,
    device: str | None = None,
) -> DryRun:
    """Run the start-up of rank 0. Call it once, in a process of its own: DeepSpeed cannot leave a fake process group.

    Args:
        make_trainer: makes the Trainer.
        ranks: ranks of the job.
        local_ranks: ranks of a machine.
        device_type: ``"cuda"`` or ``"cpu"``, of the machines of the job; default: that of this one. ``use_cpu`` has
            precedence.
        resume_from_checkpoint: as for ``Trainer.train``.
        device: name of the GPUs of the job, such as ``H100-80GB``; without it, their memory is not checked.

    Raises:
        ConfigError: the real start would raise it too.
        ValueError: ``make_trainer`` did not use the function that it was given.
    """
    began = time.perf_counter()
    with _Rehearsal(ranks, local_ranks, device_type, device) as rehearsal:
        try:
            trainer = make_trainer(rehearsal.adapt)
            run = rehearsal.start(trainer, resume_from_checkpoint)
        except ConfigError as error:
            raise rehearsal.as_on_the_real_directory(error) from error
        return rehearsal.report(trainer, run, time.perf_counter() - began)


class _StartedUp(BaseException):
    """Ends ``train()`` before the first step. Not an Exception, so nothing takes it for a failure of the rank."""


class _Unread:
    """A weight source of which nothing is read.

    Args:
        source: the source of the model, if it has one; this one has the same tensors.
        dropped: names of the parameters that had elements before they were moved to meta.
    """

    def __init__(self, source: WeightSource | None, dropped: set[str]) -> None:
        self._source, self._dropped = source, dropped

    def has(self, name: str) -> bool:
        return name in self._dropped or (self._source is not None and self._source.has(name))

    def fill(self, name: str, shard_slice: ShardSlice, target: torch.Tensor) -> None:
        return


@dataclass
class _Rehearsal:
    """The surroundings of a dry run, entered before the Trainer is made."""

    ranks: int
    local_ranks: int
    device_type: str | None
    device: str | None
    groups: MadeGroups = field(default_factory=MadeGroups)
    operators: list[str] = field(default_factory=list)
    not_rehearsed: list[str] = field(default_factory=list)

    def __enter__(self) -> _Rehearsal:
        with ExitStack() as stack:
            self._directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dry_run_")))
            self._real = ""
            if self.device_type is not None:
                stack.enter_context(planned_device_type(self.device_type, self.device))
            stack.enter_context(_quiet())
            self.groups = stack.enter_context(fake_process_group(self.ranks, min(self.ranks, self.local_ranks)))
            self._undo = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._undo.close()

    def adapt(self, args: TrainingArguments) -> TrainingArguments:
        """A copy of the arguments that writes nothing, uses no network, and needs no values of weights."""
        args = copy.copy(args)
        self._real = str(args.output_dir)
        output_dir = Path(self._real).expanduser()
        for checkpoint in output_dir.glob("checkpoint-*") if output_dir.is_dir() else ():
            (self._directory / checkpoint.name).symlink_to(checkpoint.resolve())
        args.output_dir = str(self._directory)
        args.self_test, args.verify_weights = When.NEVER, When.NEVER
        if args.push_to_hub:
            args.push_to_hub = False
            self.not_rehearsed.append("the repository on the Hub (push_to_hub)")
        if args.eval_on_start:
            args.eval_on_start = False
            self.not_rehearsed.append("the first evaluation (eval_on_start)")
        if args.auto_find_batch_size:
            args.auto_find_batch_size = False
            self.not_rehearsed.append("the search of a micro-batch (auto_find_batch_size)")
        return args

    def as_on_the_real_directory(self, error: ConfigError) -> ConfigError:
        """``error`` with the output directory of the job in place of the temporary one."""
        return ConfigError([problem.replace(str(self._directory), self._real) for problem in error.problems])

    def start(self, trainer: Trainer, resume_from_checkpoint: str | bool | None) -> TrainingRun:
        """Run ``trainer.train()`` up to its first step.

        Raises:
            ValueError: the Trainer has other arguments than those of :meth:`adapt`.
        """
        if Path(str(trainer.args.output_dir)) != self._directory:
            raise ValueError("make_trainer did not pass the arguments of its Trainer through the given function.")
        model = trainer.model
        dropped = {name for name, parameter in model.named_parameters() if not parameter.is_meta}
        move_to_meta(model)
        attach_weight_source(model, _Unread(attached_weight_source(model), dropped))
        runs: list[TrainingRun] = []
        assembly = trainer._ds_trainer
        make = assembly.setup.make_checkpointer

        def make_checkpointer(run: TrainingRun, *rest: Any) -> Checkpointer:
            runs.append(run)
            checkpointer = make(run, *rest)
            _replace(checkpointer, "start", partial(self._start_from, checkpointer.start, run.events.args))
            return checkpointer

        def check_first(batch: Any) -> None:
            assembly.setup.check_keys(batch)
            if assembly.losses.sharder is not None:
                self.not_rehearsed.append("the comparison of sharded sequences with whole ones")
            if packs(trainer.args):
                self.not_rehearsed.append("the comparison of packed samples with the samples alone")
            raise _StartedUp

        _replace(assembly.setup, "make_checkpointer", make_checkpointer)
        _replace(assembly.setup, "check_first_batch", check_first)
        # Remove all callbacks that could write, print or connect. What decides when to log, evaluate and save stays.
        handler = trainer.callback_handler
        handler.own = []
        for callback in [one for one in handler.callbacks if not isinstance(one, DefaultFlowCallback)]:
            handler.remove_callback(callback)
        with engines_on_meta() as self.operators, contextlib.redirect_stdout(io.StringIO()):
            try:
                trainer.train(resume_from_checkpoint=resume_from_checkpoint)
                self.not_rehearsed.append("a step: this run has none")
            except _StartedUp:
                pass
        return runs[0]

    def _start_from(
        self,
        start: Callable[..., None],
        args: TrainingArguments,
        resumption: Resumption | None,
        changes: Changes,
        weight_check: WeightCheck,
    ) -> None:
        """``Checkpointer.start`` without reading weights and states."""
        if resumption is not None:
            self.not_rehearsed.append(f"the states of {resumption.path.name}, and the data at its position")
            raise _StartedUp
        if args.start_from_weights is not None:
            directory = weights_directory(args.start_from_weights)
            self.not_rehearsed.append(f"the weights of {directory} (start_from_weights)")
            args.start_from_weights = None
        start(None, changes, weight_check)

    def report(self, trainer: Trainer, run: TrainingRun, seconds: float) -> DryRun:
        """What was rehearsed."""
        batch, plan, config, engine = run.batch_plan, run.plan, run.config, run.engine
        samples = length_of(trainer.train_dataset)
        steps = plan.micro_steps_per_epoch
        per_rank = None
        if samples is not None and steps is not None:
            per_rank = (steps - 1) * batch.micro_batch + len(batch.rank_samples(steps - 1, 0, samples)) if steps else 0
        if "nvme" in (config.offload("optimizer"), config.offload("param")):
            self.not_rehearsed.append("files of the offload to NVMe; the engine was created as for offload to the host")
        parts = [f"ZeRO {engine.stage}", str(config.precision), config.optimizer_type or type(run.optimizer).__name__]
        parts += [f"offload_{name} {target}" for name in ("optimizer", "param") if (target := config.offload(name))]
        parameters = list(run.model.parameters())
        return DryRun(
            ranks=self.ranks,
            layout=batch.layout.describe(),
            groups=self.groups.groups,
            model=type(run.model).__name__,
            parameters=sum(full_numel(parameter) for parameter in parameters),
            engine=", ".join(parts),
            wrapper=type(engine.optimizer).__name__,
            weight_bytes=sum(_held(parameter) for parameter in parameters),
            updated=updated_elements(engine),
            settings=_leaves(config.to_dict()),
            batch=batch.describe(),
            global_batch_size=trainer.get_total_train_batch_size(),
            samples=samples,
            samples_per_rank=per_rank,
            steps_per_epoch=None if steps is None else plan.steps_per_epoch,
            max_steps=plan.max_steps,
            estimate=trainer._ds_trainer.estimator.text(),
            operators=tuple(self.operators),
            not_rehearsed=tuple(self.not_rehearsed),
            seconds=seconds,
            peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )


def _replace(owner: Any, name: str, method: Callable[..., Any]) -> None:
    """Replace a method of this object only."""
    setattr(owner, name, method)


def _held(parameter: Any) -> int:
    """Bytes of a parameter that this rank holds between steps."""
    data = getattr(parameter, "ds_tensor", parameter)
    return int(data.numel() * data.element_size())


def _leaves(value: Any) -> int:
    return sum(map(_leaves, value.values())) if isinstance(value, dict) else 1


@contextmanager
def _quiet() -> Iterator[None]:
    """No wait for other ranks that might fail too, and no warnings about this machine, which is not that of the job."""
    logger = logging.getLogger("ds_trainer.monitor.doctor.startup_checks")
    level, grace, split = logger.level, failures.GRACE_SECONDS, selection.SPLIT_BYTES
    logger.setLevel(logging.ERROR)
    failures.GRACE_SECONDS = 0.0
    selection.SPLIT_BYTES = 2**63  # no other rank reads its part of a file
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Set timeout is now only supported")  # not by fake groups
            warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true")  # there is no GPU
            yield
    finally:
        failures.GRACE_SECONDS, selection.SPLIT_BYTES = grace, split
        logger.setLevel(level)
