"""Which values of which fields are refused, and what to use instead: one row each, so that nothing is a silent no-op.

A field without a row works for every value that :mod:`ds_trainer.arguments.checks` lets through. ``ENGINE`` rows are
about other engines: DeepSpeed has its own way. The rows are printed as a table in the documentation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

from ds_trainer.utils.secrets import is_secret, masked

_NEVER = "makes no sense under a DeepSpeed engine"


@dataclass(frozen=True)
class Limit:
    """One refusal.

    Attributes:
        field: name of the argument.
        works: values that are accepted (others are refused), or a test of a value.
        why: end of the sentence ``field=value ...``.
        instead: what to change, a sentence.
    """

    field: str
    works: tuple[Any, ...] | Callable[[Any], bool]
    why: str
    instead: str

    def accepts(self, value: Any) -> bool:
        """Whether ``value`` is accepted."""
        return self.works(value) if callable(self.works) else value in self.works

    def sentence(self, value: Any) -> str:
        """The refusal of ``value``."""
        shown = masked(self.field) if is_secret(self.field) else value if isinstance(value, str) else repr(value)
        return f"{self.field}={shown} {self.why}. {self.instead}"


def _engine(field: str, works: tuple[Any, ...] | Callable[[Any], bool], instead: str, why: str = _NEVER) -> Limit:
    return Limit(field, works, why, instead)


ENGINE: tuple[Limit, ...] = (
    _engine(
        "fsdp",
        (None, "", False, []),
        "ZeRO is DeepSpeed's: full_shard is zero_stage=3, shard_grad_op is zero_stage=2, offload is "
        "offload_param=cpu and offload_optimizer=cpu.",
    ),
    _engine(
        "fsdp_config",
        (None, "", {}),
        "Set zero_stage, offload_param and offload_optimizer, or keys of zero_optimization in the deepspeed file.",
    ),
    _engine(
        "ddp_find_unused_parameters",
        (None,),
        "DeepSpeed accepts unused parameters by itself (zero_optimization.ignore_unused_parameters).",
    ),
    _engine("ddp_bucket_cap_mb", (None,), "Set zero_optimization.reduce_bucket_size (elements) in the deepspeed file."),
    _engine(
        "ddp_broadcast_buffers",
        (None,),
        "DeepSpeed broadcasts weights once, at the start; average buffers in the model where they must agree.",
    ),
    _engine("ddp_static_graph", (None,), "Use compile.deepcompile in the deepspeed file for a static graph."),
    _engine(
        "ddp_backend",
        (None,),
        "The backend follows from the device: NCCL on GPUs, gloo on CPUs (use_cpu=True).",
    ),
    _engine(
        "average_tokens_across_devices",
        (True,),
        "The gradient is always that of the mean over the tokens of all ranks: leave it at True.",
        "would make the gradient depend on the number of ranks",
    ),
    _engine(
        "dataloader_in_order",
        (True,),
        "Leave it at True; more loading processes (dataloader_num_workers) hide slow ones.",
        "would make the order of samples depend on timing, so that no run could be repeated or resumed exactly",
    ),
    _engine(
        "debug", lambda value: "tpu_metrics_debug" not in str(value), "Leave out tpu_metrics_debug: it is for TPUs."
    ),
    _engine(
        "optim",
        lambda value: str(value) not in ("adamw_torch_xla", "adamw_torch_npu_fused"),
        "Use optim=adamw_torch_fused.",
        "is for other accelerators",
    ),
    _engine(
        "optim",
        lambda value: str(value) != "adamw_anyprecision",
        "Use optim=adamw_torch with bf16=True, which keeps float32 master weights.",
        "needs torchdistx, which does not install with the versions of torch that this package needs",
    ),
    _engine(
        "optim",
        lambda value: str(value) not in ("lomo", "adalomo"),
        "Use optim=adamw_torch with offload_optimizer=cpu where memory is short.",
        "updates weights in a backward pass of its own, which a DeepSpeed engine replaces",
    ),
    _engine(
        "optim",
        lambda value: not str(value).endswith("_layerwise"),
        "Use the name without _layerwise.",
        "updates each weight in the middle of the backward pass, before gradients are summed over micro-batches and "
        "ranks",
    ),
)

# accelerate's settings: what this package does, and why it does nothing else.
ACCELERATOR: tuple[Limit, ...] = (
    _engine(
        "split_batches",
        (False,),
        "per_device_train_batch_size is of one rank: divide it by the ranks yourself.",
        "would change what per_device_train_batch_size means",
    ),
    _engine(
        "dispatch_batches",
        (None, False),
        "Every rank reads its own share of the data.",
        "would send all data through one rank",
    ),
    _engine(
        "even_batches",
        (True,),
        "Ragged batches are exact here: no sample is seen twice, none is left out, and ranks stay in step.",
        "would let ranks run out of batches at different times",
    ),
    _engine(
        "use_seedable_sampler",
        (True,),
        "The order of samples always follows from seed and epoch.",
        "would make the order depend on the number of ranks",
    ),
    _engine("non_blocking", (False, True), "Copies overlap where memory is pinned (dataloader_pin_memory)."),
    _engine(
        "gradient_accumulation_kwargs",
        (None, {}),
        "Set gradient_accumulation_steps.",
        "is decided by gradient_accumulation_steps",
    ),
    _engine("use_configured_state", (False,), "Nothing is configured before the arguments.", "has nothing to use"),
)


def support_problems(args: Any, blamed: Container[str] = ()) -> list[str]:
    """One sentence for each value that is refused, of fields that are not ``blamed`` for something else already."""
    problems = [
        limit.sentence(getattr(args, limit.field))
        for limit in ENGINE
        if hasattr(args, limit.field)
        and limit.field not in blamed
        and not limit.accepts(_plain(getattr(args, limit.field)))
    ]
    return problems + _accelerator_problems(args.accelerator_config)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _accelerator_problems(config: Any) -> list[str]:
    if config is None:
        return []
    if isinstance(config, str) and config.lstrip().startswith("{"):
        try:
            config = json.loads(config)
        except ValueError as error:
            return [
                f"accelerator_config={config!r} is no JSON ({error}); write it like '{{\"split_batches\": false}}'."
            ]
    if isinstance(config, str):
        return [f"accelerator_config={config!r}: give its fields as a mapping, not a file."]
    values = config if isinstance(config, dict) else vars(config)
    limits = {limit.field: limit for limit in ACCELERATOR}
    return [
        f"accelerator_config: {limits[name].sentence(value)}"
        if name in limits
        else f"accelerator_config: '{name}' is not known; known are {', '.join(limits)}."
        for name, value in values.items()
        if name not in limits or not limits[name].accepts(value)
    ]
