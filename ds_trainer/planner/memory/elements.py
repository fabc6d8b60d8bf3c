"""``Elements``: the numbers of elements of a rank from which its model states follow."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ds_trainer.planner.bucket_sizes import SMALLEST_BUCKET, Network, prefetch_bucket, reduce_bucket
from ds_trainer.planner.candidate import Candidate
from ds_trainer.planner.cluster import Cluster
from ds_trainer.planner.planned_model import PlannedModel, elements_of_rank

_OF_HEAD = ("head", "embedding")  # kinds


@dataclass(frozen=True)
class Elements:
    """Elements of a rank: a slice of the model with tensor parallelism, not yet divided by ZeRO.

    Attributes:
        total: all parameters, with adapters, without quantized ones.
        quantized: bytes of quantized parameters.
        trainable: parameters that are trained.
        whole_total, whole_trainable: ``total`` and ``trainable`` with the experts of all ranks that divide them.
        persistent: parameters that ZeRO-3 does not shard, because they are small.
        layer: a layer.
        outside: parameters outside of layers.
        head: the LM head, tied or not; 0 if it is frozen.
        tied: the LM head if it is the embedding too; otherwise 0.
        largest: the largest parameter that is trained.
        largest_in_layer: the largest one that is trained inside of a layer.
        widest: the largest parameter, trained or not.
        widest_in_layer: the largest one inside of a layer, trained or not.
        layers: all layers.
        largest_matrix: that the largest parameter may have, on all ranks of tensor parallelism together.
        bucket: ``reduce_bucket_size`` of the compiled configuration.
        prefetch: ``stage3_prefetch_bucket_size`` of the compiled configuration.
    """

    total: int
    quantized: float
    trainable: int
    whole_total: int
    whole_trainable: int
    persistent: int
    layer: int
    outside: int
    head: int
    tied: int
    largest: int
    largest_in_layer: int
    widest: int
    widest_in_layer: int
    layers: int
    largest_matrix: int
    bucket: int
    prefetch: int

    def trained_of(self, shards: int) -> float:
        """Trained elements of a rank, if ZeRO divides them among ``shards`` ranks; experts among those with the same.

        Each has one in so many of a part of the experts, so as many as of all experts among all ranks.
        """
        return self.trainable if shards == 1 else self.whole_trainable / shards

    def held_of(self, shards: int) -> float:
        """The same of all elements."""
        return self.total if shards == 1 else self.whole_total / shards


def elements_of(model: PlannedModel, tp: int, ep: int = 1) -> Elements:
    """Elements of the rank that has most, of ``tp`` tensor-parallel ranks and ``ep`` that divide the experts."""
    groups = (*model.parameters, *model.adapters)
    trained_groups = set(model.trained_parameters)
    hidden, last = model.stack.hidden_size, len(model.transformer.stacks) - 1
    total = trainable = persistent = inside = largest = largest_in_layer = widest = widest_in_layer = 0
    quantized, others, others_trained = 0.0, 0, 0
    for group, (size, copies) in zip(groups, elements_of_rank(groups, model.stack, tp), strict=True):
        if group.is_stacked_experts:
            others += (size - size // ep) * copies
            others_trained += (size - size // ep) * copies * (group in trained_groups)
            size //= ep
        total += size * copies
        if group.element_bytes is not None:
            quantized += size * copies * group.element_bytes
            total -= size * copies
        widest = max(widest, size)
        if group.stack is not None:
            widest_in_layer = max(widest_in_layer, size)
        if group.stack == last:
            inside += size * copies
        if group in trained_groups:
            trainable += size * copies
            largest = max(largest, size)
            if group.stack is not None:
                largest_in_layer = max(largest_in_layer, size)
        if size <= 10 * hidden:
            persistent += size * copies
    layer = inside // model.stack.layers
    kinds = {group.kind for group in trained_groups}
    head = -(-model.rows // tp) * hidden if kinds & set(_OF_HEAD) else 0
    return Elements(
        total=total,
        quantized=quantized,
        trainable=trainable,
        whole_total=total + others,
        whole_trainable=trainable + others_trained,
        persistent=persistent,
        layer=layer,
        outside=max(0, total - inside),
        head=head,
        tied=0 if "head" in kinds else head,
        largest=largest,
        largest_in_layer=largest_in_layer,
        widest=widest,
        widest_in_layer=widest_in_layer,
        layers=inside,
        largest_matrix=model.transformer.largest_matrix,
        bucket=max(hidden * hidden, SMALLEST_BUCKET),
        prefetch=max(hidden * hidden, SMALLEST_BUCKET) * 9 // 10,
    )


def with_buckets(elements: Elements, hidden: int, run: Candidate, cluster: Cluster | None) -> Elements:
    """``elements`` with the buckets of the compiled configuration of ``run``.

    Args:
        elements: the numbers of elements of a rank.
        hidden: width of the model.
        run: stage, precision and tensor-parallel size.
        cluster: the machines; None if they are not known.
    """
    network = Network.of(cluster, run.tp)
    if network is None:
        return elements
    bucket = reduce_bucket(hidden, run.weight_bytes, run.stage, elements.trainable, network)
    prefetch = prefetch_bucket(hidden, run.weight_bytes, elements.total, network)
    assert bucket is not None and prefetch is not None  # the width is known
    return replace(elements, bucket=bucket.elements, prefetch=prefetch.elements)
