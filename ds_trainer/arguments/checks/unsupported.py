"""Values that are refused, and what to use instead. One row each, so that no argument is silently ignored.

A field without a row works for every value that the other checks accept. The documentation prints the rows as tables.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

from ds_trainer.arguments.accelerator_config import accelerator_config_problems
from ds_trainer.utils.secrets import is_secret, masked

_NEVER = "makes no sense under a DeepSpeed engine"


@dataclass(frozen=True)
class SupportedValues:
    """The supported values of one argument.

    Attributes:
        field: name of the argument.
        supported: the accepted values, or a function that tells whether a value is accepted.
        why: why other values are refused; the end of the sentence ``field=value ...``.
        instead: what to use instead, a sentence.
    """

    field: str
    supported: tuple[Any, ...] | Callable[[Any], bool]
    why: str
    instead: str

    def accepts(self, value: Any) -> bool:
        """Whether ``value`` is accepted."""
        return self.supported(value) if callable(self.supported) else value in self.supported

    def sentence(self, value: Any) -> str:
        """The message that refuses ``value``."""
        shown = masked(self.field) if is_secret(self.field) else value if isinstance(value, str) else repr(value)
        return f"{self.field}={shown} {self.why}. {self.instead}"


def _row(
    field: str, supported: tuple[Any, ...] | Callable[[Any], bool], instead: str, why: str = _NEVER
) -> SupportedValues:
    return SupportedValues(field, supported, why, instead)


ENGINE: tuple[SupportedValues, ...] = (
    _row(
        "fsdp",
        (None, "", False, []),
        "DeepSpeed shards with ZeRO: full_shard is zero_stage=3, shard_grad_op is zero_stage=2, offload is "
        "offload_param=cpu and offload_optimizer=cpu.",
    ),
    _row(
        "fsdp_config",
        (None, "", {}),
        "Set zero_stage, offload_param and offload_optimizer, or keys of zero_optimization in the deepspeed file.",
    ),
    _row("ddp_bucket_cap_mb", (None,), "Set zero_optimization.reduce_bucket_size (elements) in the deepspeed file."),
    _row(
        "ddp_broadcast_buffers",
        (None, False),
        "DeepSpeed broadcasts weights once, at the start; average buffers in the model where they must agree.",
    ),
    _row("ddp_static_graph", (None, False), "Use compile.deepcompile in the deepspeed file for a static graph."),
    _row("ddp_backend", (None,), "The backend follows from the device: NCCL on GPUs, gloo on CPUs (use_cpu=True)."),
    _row(
        "average_tokens_across_devices",
        (True,),
        "The gradient is always that of the mean over the tokens of all ranks. Leave it at True.",
        "makes the gradient depend on the number of ranks",
    ),
    _row(
        "dataloader_in_order",
        (True,),
        "Leave it at True; more workers (dataloader_num_workers) hide slow ones.",
        "makes the order of samples depend on timing, so that a run cannot be repeated or resumed exactly",
    ),
    _row("debug", lambda value: "tpu_metrics_debug" not in str(value), "Leave out tpu_metrics_debug; it is for TPUs."),
    _row(
        "optim",
        lambda value: str(value) not in ("adamw_torch_xla", "adamw_torch_npu_fused"),
        "Use optim=adamw_torch_fused.",
        "is for other accelerators",
    ),
    _row(
        "optim",
        lambda value: str(value) != "adamw_anyprecision",
        "Use optim=adamw_torch with bf16=True, which keeps float32 master weights.",
        "needs torchdistx, which does not install with the versions of torch that this package needs",
    ),
    _row(
        "optim",
        lambda value: str(value) not in ("lomo", "adalomo"),
        "Use optim=adamw_torch with offload_optimizer=cpu where memory is short.",
        "updates weights in its own backward pass, which a DeepSpeed engine replaces",
    ),
    _row(
        "optim",
        lambda value: not str(value).endswith("_layerwise"),
        "Use the name without _layerwise.",
        "updates each weight during the backward pass, before gradients are summed over micro-batches and ranks",
    ),
)


def unsupported_problems(args: Any, skip: Container[str] = ()) -> Iterator[str]:
    """One sentence for each value that is not supported. Fields in ``skip`` have another problem already."""
    for row in ENGINE:
        if hasattr(args, row.field) and row.field not in skip:
            value = getattr(args, row.field)
            if not row.accepts(list(value) if isinstance(value, tuple) else value):
                yield row.sentence(value)
    yield from accelerator_config_problems(args)
