"""Communication in the compiled configuration: dtypes of gradient sums, and sizes of ZeRO's messages.

Gradients are summed over ranks (``communication_data_type``) and over micro-batches (``data_types.grad_accum_dtype``).
By default DeepSpeed sums in the dtype of the weights. A ring adds one rank after the other, and accumulation one
micro-batch after the other: a term below half a unit in the last place of the partial sum is lost. bf16 has 8
significant bits, fp16 has 11. ``benchmarks/gradient_sums.py`` simulates this; up to the limits below the error stays
near 1 %.
"""

from __future__ import annotations

from math import inf

from ds_trainer.arguments.enums import GradientDtype
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.config.config_builder import ConfigBuilder
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.planner.bucket_sizes import BucketSize, Network, prefetch_bucket, reduce_bucket
from ds_trainer.planner.candidate import FLOAT32_SUMS
from ds_trainer.planner.cluster import Cluster
from ds_trainer.planner.model_shape import ModelShape
from ds_trainer.utils.units import counted

_ZERO = "zero_optimization"
_ACCUMULATE = "data_types.grad_accum_dtype"
_COMMUNICATE = "communication_data_type"
_SAFE_MODULES = "torch_autocast.lower_precision_safe_modules"


def write_gradient_dtypes(builder: ConfigBuilder, args: TrainingArguments, layout: ParallelLayout) -> None:
    """Write both dtypes if the arguments set them, or if the sum has too many terms for 16 bits.

    Args:
        builder: the configuration; precision, ZeRO, offload and optimizer are already set.
        args: the arguments.
        layout: gradients are summed over its data-parallel, context-parallel and sequence-parallel ranks.
    """
    model = builder.config.precision.dtype
    ranks, micro_batches = layout.seq_data_parallel_size, args.gradient_accumulation_steps
    _communication(builder, args, model, ranks)
    if args.grad_accum_dtype != GradientDtype.AUTO:
        builder.argument(_ACCUMULATE, str(args.grad_accum_dtype), "grad_accum_dtype")
    elif micro_batches >= FLOAT32_SUMS.get(model, inf) and _can_accumulate_in_float32(builder, model, layout):
        builder.derive(
            _ACCUMULATE,
            "fp32",
            f"{model} with {counted(micro_batches, 'micro-batch', 'micro-batches')}: the sum would lose precision",
        )


def _communication(builder: ConfigBuilder, args: TrainingArguments, model: str, ranks: int) -> None:
    requested = args.communication_data_type
    why = f"{model} with {counted(ranks, 'rank')}: the sum would lose precision"
    if requested != GradientDtype.AUTO:
        builder.argument(_COMMUNICATE, str(requested), "communication_data_type")
    elif ranks >= FLOAT32_SUMS.get(model, inf) and builder.requested(f"{_ZERO}.zero_quantized_gradients") is not True:
        builder.derive(_COMMUNICATE, "fp32", why)
    if not builder.config.get("torch_autocast.enabled", builder.requested("torch_autocast.enabled")):
        return
    # With autocast, DeepSpeed's ZeRO reduces gradients of these modules in bf16 and ignores other settings.
    if requested == GradientDtype.FP32:
        shown = f"communication_data_type=fp32 ({args.where('communication_data_type')})"
        builder.determined(_SAFE_MODULES, [], "communication_data_type", shown)
    elif requested == GradientDtype.AUTO and ranks >= FLOAT32_SUMS["bf16"]:
        builder.derive(_SAFE_MODULES, [], f"autocast with {counted(ranks, 'rank')}: a sum in bf16 would lose precision")


def _can_accumulate_in_float32(builder: ConfigBuilder, model: str, layout: ParallelLayout) -> bool:
    """Whether DeepSpeed 0.19.8 supports float32 accumulation with the other settings."""
    if any(builder.requested(f"{model}.{model}_{key}") for key in ("master_weights_and_grads", "optimizer_states")):
        return False  # low-precision gradients are requested
    if builder.mentions(f"{_ZERO}.zenflow") or builder.requested(f"{_ZERO}.offload_optimizer.super_offload"):
        return False  # they accumulate in their own way
    optimizer = str(builder.config.get("optimizer.type", "")).lower()
    if optimizer == "lamb":
        return False  # its kernel needs gradients in the dtype of the weights
    if model != "bf16" or builder.config.zero_stage != 1:
        return True
    muon_with_tp = optimizer == "muon" and layout.tp > 1
    return not muon_with_tp and builder.requested(f"{_ZERO}.compute_grad_norm") is not False


_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def write_communication_sizes(
    builder: ConfigBuilder, stage: int, layout: ParallelLayout, shape: ModelShape, cluster: Cluster | None
) -> None:
    """Choose buckets, prefetch, the persistence threshold and the overlap, where the user's file does not.

    Args:
        builder: has the precision.
        stage: the ZeRO stage, 1 to 3.
        layout: the parallel layout.
        shape: the model's shape.
        cluster: the machines; None if they are not known: sizes then follow from the width alone.
    """
    width, network = shape.hidden_size, Network.of(cluster, layout.tp)
    size = _BYTES[builder.config.precision.dtype]
    trained, total = (None if count is None else count // layout.tp for count in (shape.trainable, shape.total))
    bucket = reduce_bucket(width, size, stage, trained, network, shape.source)
    if bucket is not None:
        _write(builder, "reduce_bucket_size", bucket)
        if stage < 3:
            _write(builder, "allgather_bucket_size", bucket)
    if network is not None and stage == 3:  # at 1 and 2 engine/overlapped_reduction.py decides, and not DeepSpeed
        builder.derive(f"{_ZERO}.overlap_comm", True, "gathers and reductions run beside the passes")
    on_nvme = builder.config.get(f"{_ZERO}.offload_param.device") == "nvme"  # the compiler turns prefetch off
    prefetch = prefetch_bucket(width, size, total, network, shape.source) if stage == 3 and not on_nvme else None
    if prefetch is not None and (width is not None or network is not None):
        _write(builder, "stage3_prefetch_bucket_size", prefetch)
    if stage == 3 and width is not None:
        why = f"10 x hidden size ({shape.source}): vectors are not sharded, matrices are"
        builder.derive(f"{_ZERO}.stage3_param_persistence_threshold", 10 * width, why)


def _write(builder: ConfigBuilder, key: str, size: BucketSize) -> None:
    builder.derive(f"{_ZERO}.{key}", size.elements, size.reason)
