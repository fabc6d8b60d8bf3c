"""Sizes of the messages of ZeRO in the compiled configuration, from model and network, with their reasons."""

from __future__ import annotations

from ds_trainer.config.config_builder import ConfigBuilder
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.planner.bucket_sizes import BucketSize, Network, prefetch_bucket, reduce_bucket
from ds_trainer.planner.cluster import Cluster
from ds_trainer.planner.model_shape import ModelShape

_SECTION = "zero_optimization"
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def write_communication_sizes(
    builder: ConfigBuilder, stage: int, layout: ParallelLayout, shape: ModelShape, cluster: Cluster | None
) -> None:
    """Choose buckets, prefetch, the persistence threshold and the overlap, where the user's file does not.

    Args:
        builder: has the precision.
        stage: of ZeRO, 1 to 3.
        layout: the parallel layout.
        shape: of the model.
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
    if network is not None:
        _write_overlap(builder, stage, size)
    on_nvme = builder.config.get(f"{_SECTION}.offload_param.device") == "nvme"  # the compiler turns prefetch off
    prefetch = prefetch_bucket(width, size, total, network, shape.source) if stage == 3 and not on_nvme else None
    if prefetch is not None and (width is not None or network is not None):
        _write(builder, "stage3_prefetch_bucket_size", prefetch)
    if stage == 3 and width is not None:
        why = f"10 x hidden size ({shape.source}): vectors are not sharded, matrices are"
        builder.derive(f"{_SECTION}.stage3_param_persistence_threshold", 10 * width, why)


def _write(builder: ConfigBuilder, key: str, size: BucketSize) -> None:
    builder.derive(f"{_SECTION}.{key}", size.elements, size.reason)


def _write_overlap(builder: ConfigBuilder, stage: int, element_bytes: int) -> None:
    """ZeRO 1 and 2 with overlap need a second bucket, and lose gradients of ZeRO 1 (docs/explanation/planner.md)."""
    if stage == 3:
        builder.derive(f"{_SECTION}.overlap_comm", True, "gathers and reductions run beside the passes")
        return
    bucket = builder.config.get(f"{_SECTION}.reduce_bucket_size", 0)
    why = f"a second bucket ({bucket * element_bytes / 1e6:.0f} MB), and not verified on GPUs for ZeRO 1 and 2"
    builder.derive(f"{_SECTION}.overlap_comm", False, why)
