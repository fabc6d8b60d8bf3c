"""The moments of a run of which one is the largest, each with what exists on the device in addition to model states.

    forward             a layer of the forward pass, when all others have kept their activations
    loss                logits, loss and their gradients
    head                the gradient of the LM head
    backward, first     the backward pass of the last layer: everything is still kept
    backward, middle    that of the layer after the first reduction of gradients
    backward, last      that of the first layer: all other gradients exist
    reduction           of the last gradients: the activations are gone
    optimizer step      gradients are converted for the optimizer
    evaluation          a forward pass without gradients

Sources: DeepSpeed 0.19.8, ``stage_1_and_2.py`` (``setup_buckets``, ``copy_grads_in_partition``, ``allreduce_bucket``,
``step``), ``stage3.py`` (``_prepare_fp32_grad_for_sub_group``), ``partitioned_param_coordinator.py``
(``__params_to_release``), ``unfused_optimizer.py`` (``step``); allocations counted in ``benchmarks/plan_memory.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ds_trainer.planner.candidate import Candidate
from ds_trainer.planner.memory.elements import Elements
from ds_trainer.planner.memory.micro_batch import MicroBatch

REUSE_DISTANCE = 10**9
"""DeepSpeed's default of ``stage3_max_reuse_distance``: gathered weights that are used again within that many elements
stay."""
SUB_GROUP = 10**9
"""DeepSpeed's default of ``sub_group_size``: ZeRO 3 updates that many elements at a time."""
ALL_REDUCE_BUCKET = 5 * 10**8
"""Elements that are reduced at a time without ZeRO."""


@dataclass(frozen=True)
class Moment:
    """What exists at a time.

    Args:
        name: for reports.
        items: bytes by name.
    """

    name: str
    items: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def total(self) -> float:
        """Bytes of all items."""
        return sum(self.items.values())


def moments_of_a_run(
    states: Mapping[str, float], batch: MicroBatch, elements: Elements, run: Candidate, layers: int
) -> tuple[Moment, ...]:
    """The moments, in order.

    Args:
        states: model states on the device between two steps.
        batch: activations.
        elements: of this rank.
        run: how it is trained.
        layers: number of layers.
    """
    gathered = gathered_weights(elements, run)
    before = _accumulated(elements, run)
    turn = {"gathered weights": gathered["at the turn"], **before}
    later = {"weights of a layer": gathered["a layer"], **before}
    of_layer = {"recomputed layer": batch.recomputed, "a layer": batch.backward}
    gradients = _Gradients(elements, run, layers)
    share = 1 - gradients.layers_until_reduction / layers
    found = [
        ("a layer's forward pass", {"activations": batch.kept, "a layer": batch.forward, **turn}),
        ("logits and loss", {"activations": batch.kept + batch.output, "logits and loss": batch.loss, **turn}),
        (
            "gradient of the LM head",
            {"activations": batch.kept + batch.output, "gradient of logits": batch.logits, **turn, **gradients.head},
        ),
        ("backward pass of the last layer", {"activations": batch.kept, **of_layer, **turn, **gradients.first}),
        (
            "backward pass after the first reduction",
            {"activations": batch.layer + share * (batch.kept - batch.layer), **of_layer, **later, **gradients.middle},
        ),
        ("backward pass of the first layer", {"activations": batch.layer, **of_layer, **later, **gradients.last}),
        ("reduction of the last gradients", {**later, **gradients.end}),
        ("optimizer step", {} if run.offload_optimizer else _update(elements, run)),
        ("evaluation", {"evaluation": batch.evaluation, "weights of a layer": gathered["a layer"]}),
    ]
    return tuple(
        Moment(name, {**states, **{item: size for item, size in items.items() if size > 0}}) for name, items in found
    )


def gathered_weights(elements: Elements, run: Candidate) -> dict[str, float]:
    """Bytes of weights that ZeRO 3 has gathered: at the turn from forward to backward pass, and far from it.

    A weight stays if the passes use it again before they have used :data:`REUSE_DISTANCE` elements. The layer at a
    distance of ``x`` elements from the end is used again after ``2 x`` elements, with recomputation after ``3 x``.
    Elsewhere a layer and what is prefetched (0.9 x the bucket) are gathered.
    """
    if run.stage != 3 or run.shards == 1:
        return {"at the turn": 0.0, "a layer": 0.0}
    width, sharded = run.weight_bytes, elements.total - elements.persistent
    near = min(sharded, REUSE_DISTANCE / (3 if run.checkpointing else 2) + elements.layer)
    layer = min(sharded, elements.layer + 0.9 * elements.bucket)
    return {"at the turn": width * max(near, layer), "a layer": width * layer}


def _accumulated(elements: Elements, run: Candidate) -> dict[str, float]:
    """Gradients of earlier micro-batches on the device, where model states do not contain them."""
    if run.accumulation == 1 or run.stage == 3 or (run.stage == 2 and run.offload_optimizer):
        return {}
    found = {"gradients of earlier micro-batches": run.gradient_bytes * elements.trainable / run.gradient_shards}
    if run.stage == 1:
        found["waiting reduction bucket"] = run.weight_bytes * elements.bucket
    return found


class _Gradients:
    """Gradients and the buffers of their reduction, in bytes by name, at the moments of a backward pass.

    With ZeRO, a gradient is copied to a bucket, which is reduced when the next gradient has no room in it. From the
    first reduction on, ZeRO 1 and 2 have a buffer for the gradients of this rank's partition.
    """

    def __init__(self, elements: Elements, run: Candidate, layers: int) -> None:
        width, trained = run.weight_bytes, elements.trainable
        head: dict[str, float] = {"gradient of the LM head": width * min(elements.head, trained)}
        inside: dict[str, float] = {"gradient": width * elements.largest_in_layer}
        largest: dict[str, float] = {"gradient": width * elements.largest}
        self.layers_until_reduction = 0
        if run.stage == 0:
            everything = 0.0 if run.accumulation > 1 else width * trained
            outside = min(everything, width * (elements.layer + elements.head))
            summed = width * min(ALL_REDUCE_BUCKET, trained) if run.shards > 1 else 0.0
            self.head, self.first, self.middle = head, {"gradients": outside}, {"gradients": outside}
            self.last, self.end = {"gradients": everything}, {"gradients": everything, "all-reduce": summed}
            return
        bucket = width * elements.bucket
        copy = width * min(elements.bucket, trained) if run.shards > 1 else 0.0  # collectives work on a copy
        copies: dict[str, float] = {"copies for the reduction": copy}
        if run.stage == 3:
            self.head, self.end = {**head, **copies}, {**largest, **copies}
            self.first = self.middle = self.last = {**inside, **copies}
            return
        if run.stage == 2 or run.accumulation == 1:
            copies["reduction bucket"] = bucket
        owned = 0.0 if run.offload_optimizer else width * trained / run.shards
        at_once = elements.head > elements.bucket
        if not at_once:
            room = max(0, elements.bucket - elements.head)
            self.layers_until_reduction = min(layers - 1, room // max(1, elements.layer) + 1)
        reduced = {**copies, "reduced gradients": owned}
        self.head = {**head, "reduction bucket": copies.get("reduction bucket", 0.0)}
        self.first = {**inside, **(reduced if at_once else copies)}
        self.middle = self.last = {**inside, **reduced}
        self.end = {**largest, **reduced}


def _update(elements: Elements, run: Candidate) -> dict[str, float]:
    """Gradients in the optimizer step, in the dtype of the model, and converted."""
    width, trained = run.weight_bytes, elements.trainable / run.zero_shards
    converted = 4 * trained if width == 2 else 0.0
    if run.stage == 0:
        return {"gradients": run.gradient_bytes * trained, "float32 gradients": converted}
    if run.stage == 3:
        part = min(SUB_GROUP, trained)
        return {"flattened gradients": width * part, "float32 gradients": 4 * part if width == 2 else 0.0}
    flattened = width * trained if run.gradient_bytes == width else 0.0
    return {
        "gradients": run.gradient_bytes * trained,
        "flattened gradients": flattened,
        "float32 gradients": converted if flattened else 0.0,
    }
