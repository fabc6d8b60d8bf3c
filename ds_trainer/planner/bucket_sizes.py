"""Sizes of ZeRO's buckets: the message at which the latency of a collective is a small share of its time.

A ring over ``n`` ranks needs ``latency + bytes (n - 1) / n / bandwidth`` seconds. With latency at most 5 % of the
transfer, messages have at least ``latency / 0.05 x bandwidth x n / (n - 1)`` bytes: 190 MB for eight H100 on NVLink,
7 MB for eight T4 on PCIe. The latency grows with the ranks (:meth:`~ds_trainer.planner.cluster.Cluster.latency`), so on
many, the memory of the device is the limit. More is memory for nothing: ZeRO 1 and 2 hold a bucket and a copy of it
(``allreduce_bucket`` flattens, ``runtime/zero/stage_1_and_2.py``), ZeRO 3 in addition what is prefetched and the buffer
of that gather.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_trainer.planner.cluster import Cluster
from ds_trainer.utils.units import counted

SMALLEST_BUCKET = 2**20
"""A bucket of less than a million elements costs more in collective latency than it saves by overlap."""

DEFAULT_BUCKET = 500_000_000
"""DeepSpeed's ``reduce_bucket_size``."""

_LATENCY_SHARE = 0.05  # of the transfer
_MEMORY_SHARE = 0.02  # of a device, for all buckets
_OVERLAPPED = 8  # ZeRO 3 hides collectives behind the passes: messages are an eighth of the model at most


@dataclass(frozen=True)
class Network:
    """What the collectives of ZeRO cross.

    Args:
        name: for reasons.
        ranks: in the ring.
        bandwidth: GB/s of the ring.
        latency: seconds of a collective without data.
        memory: GB of a device.
    """

    name: str
    ranks: int
    bandwidth: float
    latency: float
    memory: float

    @classmethod
    def of(cls, cluster: Cluster | None, tp: int = 1) -> Network | None:
        """That of ``cluster``; None if it is not known, for CPUs, and for a single rank.

        On CPU ranks with gloo, larger buckets were slower (docs/explanation/negative-results.md).

        Args:
            cluster: the machines; None if they are not known.
            tp: tensor-parallel size.
        """
        if cluster is None or cluster.is_cpu or (ranks := cluster.world_size // tp) < 2:
            return None
        across = f", {counted(cluster.nodes, 'machine')}" if cluster.crosses_machines(ranks, tp) else ""
        bandwidth, latency = cluster.ring_bandwidth(ranks, tp), cluster.latency(ranks, tp)
        return cls(f"{ranks} x {cluster.device}{across}", ranks, bandwidth, latency, cluster.board.memory)

    @property
    def message(self) -> float:
        """Bytes at which the latency is 5 % of the transfer."""
        return self.latency / _LATENCY_SHARE * self.bandwidth * 1e9 * self.ranks / (self.ranks - 1)

    @property
    def reason(self) -> str:
        """Why messages have that size."""
        return (
            f"{self.latency * 1e6:.0f} us of latency are {_LATENCY_SHARE:.0%} of the transfer at {self.bandwidth:g} "
            f"GB/s ({self.name})"
        )


@dataclass(frozen=True)
class BucketSize:
    """A size in elements, even, and its reason."""

    elements: int
    reason: str


def reduce_bucket(
    hidden: int | None,
    element_bytes: int,
    stage: int,
    trainable: int | None = None,
    network: Network | None = None,
    source: str = "",
) -> BucketSize | None:
    """``reduce_bucket_size``; None if nothing is known about the model.

    Args:
        hidden: width of the model; None if unknown.
        element_bytes: bytes of an element of a gradient.
        stage: the ZeRO stage.
        trainable: elements of a rank that are trained; None if unknown.
        network: None if unknown.
        source: where the width was read.
    """
    return _chosen(
        hidden=hidden,
        element_bytes=element_bytes,
        stage=stage,
        elements=trainable,
        network=network,
        source=source,
        which="trained elements",
    )


def prefetch_bucket(
    hidden: int | None,
    element_bytes: int,
    total: int | None = None,
    network: Network | None = None,
    source: str = "",
) -> BucketSize | None:
    """``stage3_prefetch_bucket_size``: 0.9 x a bucket of weights, trained or not; None like :func:`reduce_bucket`.

    Args:
        hidden: width of the model; None if unknown.
        element_bytes: bytes of an element of a weight.
        total: elements of the model; None if unknown.
        network: None if unknown.
        source: where the width was read.
    """
    size = _chosen(
        hidden=hidden,
        element_bytes=element_bytes,
        stage=3,
        elements=total,
        network=network,
        source=source,
        which="elements",
    )
    return None if size is None else BucketSize(size.elements * 9 // 10, f"0.9 x bucket, {size.reason}")


def _chosen(
    hidden: int | None,
    element_bytes: int,
    stage: int,
    elements: int | None,
    network: Network | None,
    source: str,
    which: str,
) -> BucketSize | None:
    if hidden is not None:
        matrix = f"hidden size squared, {source}, at least {SMALLEST_BUCKET} elements"
        lower = BucketSize(max(hidden * hidden, SMALLEST_BUCKET), matrix)
    elif elements is None:
        return None  # DeepSpeed's default sizes apply
    elif network is None:
        lower = BucketSize(DEFAULT_BUCKET, "DeepSpeed's default")
    else:
        lower = BucketSize(SMALLEST_BUCKET, f"at least {SMALLEST_BUCKET} elements")
    size, limits = lower, []
    if network is not None:
        message = BucketSize(int(network.message / element_bytes), f"{network.reason}, {element_bytes} bytes each")
        share = _MEMORY_SHARE / (4 if stage == 3 else 2)
        room = max(lower.elements, int(share * network.memory * 1e9 / element_bytes))
        limits.append(BucketSize(room, f"{share:.1%} of {network.memory:g} GB"))
        if elements is not None and stage == 3:
            part = max(lower.elements, elements // _OVERLAPPED)
            limits.append(BucketSize(part, f"an eighth of {elements} {which}"))
        size = max(size, message, key=_elements)
    if elements is not None and (network is not None or hidden is None):
        limits.append(BucketSize(max(elements, SMALLEST_BUCKET), f"all {elements} {which}"))
    size = min([size, *limits], key=_elements)
    return BucketSize(size.elements + size.elements % 2, size.reason)  # DeepSpeed requires an even number


def _elements(size: BucketSize) -> int:
    return size.elements
