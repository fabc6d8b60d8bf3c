"""``MemoryRecovery``: if memory runs out in a step, all ranks run it again in smaller micro-batches.

For ``auto_find_batch_size``. Before each update, the ranks agree on whether memory ran out on one of them: one vote on
the host per step. If so, all drop the gradients of the step, halve the micro-batch, and run the step again with the
same samples and random numbers. Weights, optimizer states and schedule are those of the last whole step, and the global
batch stays. The loader does not change: its micro-batches are split by rows.

A rank that runs out of memory while the others communicate completes the micro-batch with one sample
(:mod:`ds_trainer.engine.interrupted_pass`). Where that is not possible, the error ends the training: :func:`obstacle`.
An optimizer that runs out of memory before it has changed anything is called again after memory was freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.data.batch_structure import number_of_samples
from ds_trainer.engine.expert_parallel import has_foreign_experts
from ds_trainer.engine.interrupted_pass import PassCompletion
from ds_trainer.parallel.batch_plan import smaller_micro_batch
from ds_trainer.training.loop.batch_splitting import NotSplittable, part_of_batch, split_batch
from ds_trainer.training.loop.loss_passes import NoticedCollectives
from ds_trainer.training.loop.training_run import TrainingRun
from ds_trainer.training.out_of_memory import NotRepeatable, is_out_of_memory
from ds_trainer.utils import distributed
from ds_trainer.utils.devices import free_memory
from ds_trainer.utils.errors import listed
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.seeds import random_state, restore_random_state
from ds_trainer.utils.undisturbed import LARGEST, KeptBuffers

if TYPE_CHECKING:
    from ds_trainer.engine.training_engine import TrainingEngine

logger = get_logger(__name__)

_SCRIPT = "compute_loss, training_step or the model communicates in a micro-batch, which one rank cannot repeat alone"


def obstacle(engine: TrainingEngine, config: CompiledConfig) -> str:
    """Why a step cannot be run again after an out-of-memory error; empty if it can."""
    if engine.layout.world_size == 1:
        return ""
    if has_foreign_experts(engine.deepspeed.module.parameters()):
        return "DeepSpeed's expert layers exchange samples, whose number depends on the micro-batch"
    if config.uses_deepspeed_compiler:
        return "DeepSpeed's compiler schedules the communication"
    if config.offload("param") == "nvme":
        return "parameters are offloaded to NVMe"
    return ""


class MemoryRecovery:
    """Recovers the steps of one training from running out of memory.

    Args:
        engine: runs the passes.
        micro_batch: samples of a micro-batch of the loader.
        accumulation: micro-batches of a full step.
        obstacle: see :func:`obstacle`.
        resize: makes the Trainer report another micro-batch and accumulation.

    Attributes:
        rows: samples of a micro-batch now.
        loss_is_known: whether the ranks have found out in this micro-batch what its loss is.
    """

    loss_is_known = False

    def __init__(
        self,
        engine: TrainingEngine,
        micro_batch: int,
        accumulation: int,
        obstacle: str,
        resize: Callable[[int, int], Any],
    ) -> None:
        self._engine = engine
        self._completion = PassCompletion(engine)
        self._micro_batch = self.rows = micro_batch
        self._accumulation = accumulation
        self._obstacle = obstacle
        self._resize = resize
        self._modules = list(engine.deepspeed.module.modules())
        self._buffers = KeptBuffers(())
        self._failure: str | None = None
        self._random: dict[str, Any] = {}

    @classmethod
    def of(cls, run: TrainingRun, resize: Callable[[int, int], Any]) -> MemoryRecovery:
        """The recovery of ``run``; ``resize`` makes the Trainer report another micro-batch and accumulation."""

        def resized(size: int, accumulation: int) -> None:
            resize(size, accumulation)
            run.events.state.train_batch_size = size

        plan, reason = run.batch_plan, obstacle(run.engine, run.config)
        return cls(run.engine, plan.micro_batch, plan.accumulation, reason, resized)

    def begin_step(self) -> None:
        """Keep the random state and the buffers (running means), before the first pass of a step."""
        self._random = random_state()
        self._buffers = KeptBuffers(self._modules, LARGEST)
        self._failure = None

    def split(self, batches: list[Any]) -> list[Any]:
        """The micro-batches of the loader, in parts of :attr:`rows` samples."""
        parts = self._micro_batch // self.rows
        if parts == 1:
            return batches
        try:
            return [part for batch in batches for part in split_batch(batch, self.rows, parts)]
        except NotSplittable as error:
            raise torch.OutOfMemoryError(_cannot(self._failure or "", str(error))) from error

    def run(self, passes: Callable[[Any], torch.Tensor], batch: Any) -> torch.Tensor:
        """Forward and backward pass of ``batch``. If memory runs out, one of its samples completes the communication.

        Raises:
            torch.OutOfMemoryError: memory ran out, and the step cannot be run again.
        """
        self.loss_is_known = False
        with self._completion.micro_batch(completes=self._failure is not None):
            if self._failure is not None:  # the step will be dropped
                return self._rest(passes, batch)
            try:
                return passes(batch)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if reason := self._reason_against(batch, error):
                    raise torch.OutOfMemoryError(_cannot(str(error), reason)) from error
                self._failure = str(error)
            # After the except block, because its traceback keeps the activations.
            free_memory(self._engine.deepspeed.device)
            self._completion.restart()
            return self._rest(passes, batch)

    def loss_found(self) -> None:
        """What the ranks compute once, to find out what a loss is, is no part of a micro-batch that begins anew."""
        self.loss_is_known = True
        self._completion.begin()

    def _rest(self, passes: Callable[[Any], torch.Tensor], batch: Any) -> torch.Tensor:
        """What the other ranks wait for."""
        if self._completion.alone:
            return torch.zeros((), device=self._engine.deepspeed.device)
        with NoticedCollectives(NotRepeatable(_cannot(self._failure or "", _SCRIPT))):
            return passes(part_of_batch(batch, 0, 1))

    @contextmanager
    def optimizer_step(self) -> Iterator[None]:
        """Context of the step of the engine."""
        optimizer: Any = self._engine.basic_optimizer
        step, own = optimizer.step, vars(optimizer).get("step")

        def again(*args: Any, **keywords: Any) -> Any:
            before = _versions(optimizer)
            try:
                return step(*args, **keywords)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or _versions(optimizer) != before:
                    raise
            free_memory(self._engine.deepspeed.device)
            logger.warning(
                "auto_find_batch_size: the optimizer ran out of memory; it is called again with freed memory."
            )
            return step(*args, **keywords)

        optimizer.step = again
        try:
            yield
        finally:
            if own is None:
                del optimizer.step
            else:
                optimizer.step = own

    def must_repeat(self, step: int) -> bool:
        """Whether memory ran out on a rank. All ranks have then dropped the step and use smaller micro-batches.

        Collective: one vote on the host.

        Args:
            step: optimizer steps done.
        """
        failed = self._failure is not None
        if not distributed.agree(torch.tensor([int(failed)]))[0]:
            return False
        ranks = [rank for rank, short in enumerate(distributed.gather_objects(failed)) if short]
        self._engine.drop_step()
        free_memory(self._engine.deepspeed.device)
        before = self.rows
        # A divisor of the loader's micro-batch, so that all parts have the same size.
        self.rows, parts = smaller_micro_batch(before, self._micro_batch // before)
        accumulation = self._accumulation * parts
        self._resize(self.rows, accumulation)
        restore_random_state(self._random)
        self._buffers.restore()  # on every rank: what the step has counted is counted again
        self._failure = None
        logger.warning(
            "auto_find_batch_size: out of memory on %s %s in step %d with %d samples in a micro-batch; now %d, with %d "
            "accumulation steps. The global batch does not change, and the step is run again.",
            "ranks" if len(ranks) > 1 else "rank",
            listed(ranks),
            step + 1,
            before,
            self.rows,
            accumulation,
        )
        return True

    def _reason_against(self, batch: Any, error: BaseException) -> str:
        if isinstance(error, NotRepeatable):
            return "the loss was being measured, which no step repeats"
        if self._obstacle:
            return self._obstacle
        if self._engine.updates.made:
            return "training_step has updated the weights in this step already"
        if number_of_samples(batch) <= 1:
            return "the micro-batch has one sample"
        try:
            part_of_batch(batch, 0, 1)
        except NotSplittable as error:
            return str(error)
        return ""


def _versions(optimizer: Any) -> list[int]:
    """Change when a parameter of the optimizer or one of its states changes."""
    tensors = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [value for tensor in tensors for value in optimizer.state.get(tensor, {}).values()]
    return [value._version for value in (*tensors, *states) if isinstance(value, torch.Tensor)]


def _cannot(text: str, reason: str) -> str:
    return f"{text}\nauto_find_batch_size cannot go on with a smaller micro-batch: {reason}."
