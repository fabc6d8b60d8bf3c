"""``OutOfMemory``: an out-of-memory error that ends with what to change, in the order in which to try it.

The first remedies cost the least speed. Only what the run does not use already is listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.parallel.batch_plan import smaller_micro_batch
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import text_of

# CUDA and its libraries raise a RuntimeError if their own allocations fail; so does torch on the host.
_PHRASES = ("out of memory", "can't allocate memory", "CUDNN_STATUS_NOT_SUPPORTED", "CUBLAS_STATUS_ALLOC_FAILED")


class OutOfMemory(torch.OutOfMemoryError):
    """Memory ran out. The message has the original one and the remedies."""


class NotRepeatable(torch.OutOfMemoryError):
    """Memory ran out on a rank in what is no part of a step that ranks could run again."""


@dataclass(frozen=True)
class Remedy:
    """Something to change.

    Attributes:
        what: in words.
        settings: arguments and their new values.
        deepspeed_key: the same setting in a DeepSpeed configuration; empty if there is none.
    """

    what: str
    settings: Mapping[str, Any]
    deepspeed_key: str = ""

    def lines(self, deepspeed_file: str | None) -> list[str]:
        """The remedy as Python and as command line; ``deepspeed_file`` holds the setting if the user passed one."""
        if self.deepspeed_key and deepspeed_file is not None:
            (value,) = self.settings.values()
            return [f"{self.what}:", f"    {deepspeed_file}: {self.deepspeed_key} = {value}"]
        python = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        words = (f"--{name}" if value is True else f"--{name} {value}" for name, value in self.settings.items())
        return [f"{self.what}:", f"    Python:        {python}", f"    command line:  {' '.join(words)}"]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that the memory of the device or of the host did not suffice."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # The text of a failed collective may quote another rank.
    return (
        isinstance(error, RuntimeError)
        and not isinstance(error, (dist.DistBackendError, dist.DistNetworkError))
        and any(phrase in text_of(error) for phrase in _PHRASES)
    )


@contextmanager
def explained_out_of_memory(when: Callable[[], str], remedies: Callable[[], list[Remedy]], file: Any) -> Iterator[None]:
    """Context in which an out-of-memory error becomes an :class:`OutOfMemory`.

    Args:
        when: returns what was done, for the message.
        remedies: returns what to change.
        file: ``args.deepspeed``, where some of it is set if the user passed one.

    Raises:
        OutOfMemory: memory ran out inside. The original error is its cause.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, OutOfMemory) or not is_out_of_memory(error):
            raise
        raise OutOfMemory(_message(str(error) or type(error).__name__, when(), remedies(), file)) from error


def _message(text: str, when: str, remedies: list[Remedy], file: Any) -> str:
    name = None if file is None else str(file) if isinstance(file, (str, bytes)) else "DeepSpeed configuration"
    lines = [f"Out of memory on rank {distributed.rank()} {when}: {text.strip()}"]
    if remedies:
        lines.append("What helps, in the order in which to try it:")
    for number, remedy in enumerate(remedies, 1):
        first, *rest = remedy.lines(name)
        lines += [f"  {number}. {first}", *(f"  {line}" for line in rest)]
    return "\n".join(lines)


def training_remedies(
    args: TrainingArguments, config: CompiledConfig, layout: ParallelLayout, can_recompute: bool
) -> list[Remedy]:
    """What lowers the memory of a training, from cheap to expensive; without what is in use already.

    ``can_recompute``: whether the model has gradient checkpointing.
    """
    remedies = _smaller_micro_batch(args, layout)
    recomputes = args.gradient_checkpointing or args.activation_checkpointing
    if can_recompute and not recomputes:
        remedies.append(
            Remedy("activations computed again in the backward pass (slower)", {"gradient_checkpointing": True})
        )
    return remedies + _states(config, layout)


def startup_remedies(config: CompiledConfig, layout: ParallelLayout) -> list[Remedy]:
    """What lowers the memory that a training needs before its first step, for weights and optimizer states."""
    return _states(config, layout)


def evaluation_remedies(args: TrainingArguments, keeps_predictions: bool) -> list[Remedy]:
    """What lowers the memory of an evaluation; ``keeps_predictions`` if it keeps more than the loss."""
    remedies = []
    size = args.per_device_eval_batch_size
    if size > 1:
        remedies.append(Remedy("a smaller batch", {"per_device_eval_batch_size": size // 2}))
    if keeps_predictions:
        if args.eval_accumulation_steps != 1:
            steps = args.eval_accumulation_steps
            fewer = 8 if steps is None or steps > 8 else max(1, steps // 2)
            remedies.append(Remedy("predictions moved to the host more often", {"eval_accumulation_steps": fewer}))
        remedies.append(Remedy("no predictions, only the loss", {"prediction_loss_only": True}))
    return remedies


def _smaller_micro_batch(args: TrainingArguments, layout: ParallelLayout) -> list[Remedy]:
    size, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    if size == 1:
        return []
    smaller, more = smaller_micro_batch(size, accumulation)
    return [
        Remedy(
            f"a smaller micro-batch; the global batch stays at {size * accumulation * layout.dp}",
            {"per_device_train_batch_size": smaller, "gradient_accumulation_steps": more},
        )
    ]


def _states(config: CompiledConfig, layout: ParallelLayout) -> list[Remedy]:
    remedies, stage = [], config.zero_stage
    if layout.seq_data_parallel_size > 1:
        what = {2: "gradients sharded over the ranks", 3: "gradients and weights sharded over the ranks"}
        for higher in range(max(2, stage + 1), 4):
            remedies.append(Remedy(f"ZeRO-{higher}: {what[higher]}", {"zero_stage": higher}, "zero_optimization.stage"))
    if config.offload("optimizer") is None:
        key = "zero_optimization.offload_optimizer.device"
        settings: dict[str, Any] = {"offload_optimizer": "cpu"}
        if stage == 0:
            settings["zero_stage"], key = 1, ""
        remedies.append(Remedy("optimizer states in the memory of the host (slower)", settings, key))
    if stage == 3 and config.offload("param") is None:
        key = "zero_optimization.offload_param.device"
        remedies.append(Remedy("weights in the memory of the host (slower)", {"offload_param": "cpu"}, key))
    return remedies
