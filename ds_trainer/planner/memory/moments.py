"""The moments of a run of which one is the largest, each with what exists on the device in addition to model states.

    forward             a layer of the forward pass, when all others have kept their activations
    loss                logits, loss and their gradients
    head                the gradient of the LM head, and its reduction
    backward, first     the backward pass of the last layer: everything is still kept
    backward, middle    that of the layer after the first reduction of gradients
    backward, last      that of the first layer: all other gradients exist
    reduction           of the last gradients: the activations are gone
    optimizer step      gradients are converted for the optimizer
    evaluation          a forward pass without gradients
    between steps       when the model is loaded, saved (the snapshot is in host memory) or resumed

Sources: DeepSpeed 0.19.8, ``stage_1_and_2.py`` (``setup_buckets``, ``copy_grads_in_partition``, ``allreduce_bucket``,
``step``), ``stage3.py`` (``_prepare_fp32_grad_for_sub_group``),
``partition_parameters.py`` (``AllGatherCoalescedHandle``), ``partitioned_param_coordinator.py``
(``__params_to_release``), ``unfused_optimizer.py`` (``step``); allocations counted in ``benchmarks/plan_memory.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ds_trainer.planner.candidate import Candidate
from ds_trainer.planner.memory.elements import Elements
from ds_trainer.planner.memory.micro_batch import MicroBatch
from ds_trainer.planner.offload_sizes import SUB_GROUP

REUSE_DISTANCE = 10**9
"""DeepSpeed's default of ``stage3_max_reuse_distance``: gathered weights that are used again within that many elements
stay."""
MAX_LIVE = 10**9
"""DeepSpeed's default of ``stage3_max_live_parameters``: the prefetch gathers so many ahead."""
ALL_REDUCE_BUCKET = 2**24
"""Elements of ``ds_trainer.engine.whole_reduction.BUCKET``: as many gradients exist twice for a moment without ZeRO."""


@dataclass(frozen=True)
class Moment:
    """What exists at a time.

    Args:
        name: for reports.
        items: bytes by name.
    """

    name: str
    items: Mapping[str, float]

    @cached_property
    def total(self) -> float:
        """Bytes of all items."""
        return sum(self.items.values())


MOMENTS = (
    "a layer's forward pass",
    "logits and loss",
    "gradient of the LM head",
    "reduction of the LM head's gradient",
    "backward pass of the last layer",
    "backward pass after the first reduction",
    "backward pass of the first layer",
    "reduction of the last gradients",
    "optimizer step",
    "evaluation",
    "loading, save, resume",
)
"""Their names, in order."""

Items = Mapping[str, float]
"""Bytes by name."""


@dataclass(frozen=True)
class SharedItems:
    """What runs have in common that differ in their activations only.

    Args:
        states: model states on the device between two steps.
        at: what exists in addition at each of :data:`MOMENTS`, besides activations.
        after_reduction: share of the layers that the backward pass has not reached at its first reduction.
        host: in host memory.
        nvme: on local disks.
    """

    states: Items
    at: tuple[Items, ...]
    after_reduction: float
    host: Items
    nvme: Items = field(default_factory=dict)

    @cached_property
    def totals(self) -> tuple[float, ...]:
        """Bytes on the device at each moment."""
        always = sum(self.states.values())
        return tuple(always + sum(items.values()) for items in self.at)


def shared_items(states: Items, host: Items, elements: Elements, run: Candidate, layers: int) -> SharedItems:
    """Everything but activations.

    Args:
        states: model states on the device between two steps.
        host: what is in host memory.
        elements: the numbers of elements of this rank.
        run: how it is trained.
        layers: number of layers.
    """
    gathered = GatheredWeights(elements, run)
    before = _accumulated(elements, run)
    turn = {"gathered weights": gathered.at_the_turn, **before}
    gradients = _Gradients(elements, run, layers)
    sums = {"float32 gradient of the LM head": 4.0 * elements.head * run.one_pass}
    at: tuple[Items, ...] = (
        {**turn, "gather buffer": gathered.buffer},
        {**turn, **sums},
        {**turn, **gradients.head, **sums},
        {"gathered weights": gathered.without_head, **before, **gradients.head_reduction},
        {**before, "gathered weights": gathered.without_head, **gradients.first},
        {**before, "gathered weights": gathered.a_layer, **gradients.middle},
        {**before, "gathered weights": gathered.at_the_end, **gradients.last, **gathered.in_flight},
        {"gathered weights": gathered.at_the_end, **before, **gradients.end},
        {} if run.offload_optimizer else _update(elements, run),
        {"gathered weights": gathered.in_evaluation, "gather buffer": gathered.buffer},
        {},
    )
    return SharedItems(states, at, 1 - gradients.layers_until_reduction / layers, host)


def activation_items(batch: MicroBatch, after_reduction: float) -> tuple[Items, ...]:
    """The activations at each of :data:`MOMENTS`.

    Args:
        batch: activations of a micro-batch.
        after_reduction: the field of :class:`SharedItems`.
    """
    output = batch.kept + batch.output
    layer = {"recomputed layer": batch.recomputed, "a layer": batch.backward}
    last = {"recomputed layer": batch.recomputed_last, "a layer": batch.backward}
    gradient = {"gradient of the output": batch.output_gradient}
    return (
        {"activations": batch.kept, "a layer": batch.forward},
        {"activations": output, "logits and loss": batch.loss},
        {"activations": output, "gradient of logits": batch.logits, "last norm": batch.last_norm, **gradient},
        {"activations": output, "last norm": batch.norm_backward, **gradient},
        {"activations": batch.kept, **last},
        {"activations": batch.layer + after_reduction * (batch.kept - batch.layer), **layer},
        {"activations": batch.layer, **layer},
        {},
        {},
        {"evaluation": batch.evaluation},
        {},
    )


class GatheredWeights:
    """Bytes of weights that ZeRO 3 has gathered, at the moments of a step.

    A weight stays if the passes use it again before they have used :data:`REUSE_DISTANCE` elements. The layer at a
    distance of ``x`` elements from the end is used again after ``2 x`` elements, with recomputation after ``3 x``.
    Elsewhere a layer and what is prefetched (0.9 x the bucket, and the parameter that exceeds it) are gathered. What
    is prefetched together is gathered into one buffer first and copied from there.

    Attributes:
        at_the_turn: from the forward to the backward pass.
        without_head: after the backward pass of the LM head.
        a_layer: far from the turn.
        at_the_end: when the backward pass is at the first layer.
        in_evaluation: at most in a forward pass that keeps nothing.
        buffer: what a gather is collected in.
        in_flight: a buffer that exists at the end of the backward pass too. It was measured in runs with sequences that
            ranks share, in which DeepSpeed gathers weights again.
    """

    def __init__(self, elements: Elements, run: Candidate) -> None:
        self.at_the_turn = self.without_head = self.a_layer = self.at_the_end = self.in_evaluation = self.buffer = 0.0
        self.in_flight: dict[str, float] = {}
        if run.stage != 3 or run.shards == 1:
            return
        width, sharded = run.weight_bytes, elements.total - elements.persistent
        uses = 2 + run.checkpointing / run.every_n_layers
        prefetched = 0.0 if run.param_on_nvme else elements.prefetch
        layer = min(sharded, elements.layer + prefetched)
        near = max(layer, min(sharded, REUSE_DISTANCE / uses + elements.layer))
        if run.param_on_nvme:  # the compiled configuration releases them after each use
            near = min(sharded, max(elements.layer, elements.head))
        first = max(0, elements.outside - elements.head) + elements.tied
        embedding = first if elements.head else 0  # its backward pass needs it, if there is one
        live = min(sharded, MAX_LIVE)
        self.a_layer = width * layer
        self.at_the_turn = width * near
        self.without_head = width * max(layer, near - elements.head + elements.tied)
        self.at_the_end = width * min(sharded, embedding + elements.layer)
        self.in_evaluation = width * max(min(live, sharded - first), elements.widest)
        self.buffer = width * min(sharded, max(prefetched + elements.widest_in_layer / 2, elements.widest))
        if run.cp * run.sp > 1:
            self.in_flight = {"gather buffer": self.buffer}


def _accumulated(elements: Elements, run: Candidate) -> dict[str, float]:
    """Gradients of earlier micro-batches on the device, where model states do not contain them."""
    if run.accumulation == 1 or run.stage == 3 or (run.stage == 2 and run.offload_optimizer):
        return {}
    found = {"gradients of earlier micro-batches": run.gradient_bytes * elements.trained_of(run.gradient_shards)}
    if run.stage == 1:
        found["waiting reduction bucket"] = run.weight_bytes * elements.bucket
    return found


class _Gradients:
    """Gradients and the buffers of their reduction, in bytes by name, at the moments of a backward pass.

    Without ZeRO gradients stay until the backward pass has ended, as do those of earlier micro-batches with ZeRO 1.
    Else a gradient is copied to a bucket, which is reduced when the next gradient has no room in it; a gradient that is
    larger than the bucket is reduced alone. With ZeRO 1 and 2 a second bucket is filled meanwhile, and from the first
    complete reduction on there is a buffer for all parameters of which this rank updates a part.
    """

    def __init__(self, elements: Elements, run: Candidate, layers: int) -> None:
        self.layers_until_reduction = 0.0
        width, trained = run.weight_bytes, elements.trainable
        self.head: dict[str, float] = {"gradient of the LM head": width * min(elements.head, trained)}
        self.head_reduction: dict[str, float] = dict(self.head)
        self.first: dict[str, float] = {}
        if run.stage == 3:
            self._with_sharded_weights(elements, run, layers)
        elif run.stage == 2 or (_overlaps(run) and run.accumulation == 1):
            self._with_sharded_gradients(elements, run, layers)
        else:
            self._with_whole_gradients(elements, run, layers)

    def _with_whole_gradients(self, elements: Elements, run: Candidate, layers: int) -> None:
        width, trained = run.weight_bytes, elements.trainable
        tied = _tied(elements, run)
        again = run.accumulation > 1  # then they exist already, and so does the bucket
        everything = 0.0 if again else width * trained
        buffers = {"reduction bucket": 0.0 if run.stage == 0 or again else width * elements.bucket}
        embedding = max(0, elements.outside - elements.head)  # the last gradient of a backward pass
        newest = elements.largest_in_layer

        def until(layer: int) -> dict[str, float]:
            found = width * (embedding + (layer + 1) * elements.layer - newest)
            return {"gradients": max(0.0, everything - found), **buffers}

        self.head_reduction = {**self.head, **buffers}
        self.first = {"gradients": min(everything, width * (newest + elements.head)), **buffers}
        self.middle, self.last = until(1), until(0)
        self.layers_until_reduction = layers - layers / max(1, layers - 1)  # the second layer has the most gradients
        if run.stage == 0:
            bucket = 0 if run.shards == 1 else min(ALL_REDUCE_BUCKET, trained)
            self.end = {"gradients": everything, "all-reduce": width * bucket}
            return
        # The first bucket has the gradients of the first parameters, or waits while a larger one is reduced.
        first = width * (0 if embedding > elements.bucket else elements.bucket)
        second = {"second reduction bucket": width * elements.bucket}
        self.end = {
            "gradients": max(0.0, everything - first),
            **tied,
            **buffers,
            **(second if _overlaps(run) else _reduction(elements, run, elements.largest)),
            "reduced gradients": 0.0 if run.offload_optimizer else width * owned_elements(elements, run),
        }

    def _with_sharded_gradients(self, elements: Elements, run: Candidate, layers: int) -> None:
        width = run.weight_bytes
        tied = _tied(elements, run)
        overlaps = _overlaps(run)
        bucket = {"reduction bucket": width * elements.bucket}
        both = dict(bucket)
        if overlaps and elements.trainable > elements.bucket:  # the second one is filled while the first one is sent
            both["reduction bucket"] *= 2
        owned = {"reduced gradients": 0.0 if run.offload_optimizer else width * owned_elements(elements, run)}
        first = {"gradient": width * elements.largest_in_layer, **tied, **bucket}
        self.head_reduction = {**self.head, **bucket}
        self.first, copies, reduction = first, {}, {}
        if not overlaps:
            # A bucket that takes more than a layer is reduced beside fewer tensors than the most that a layer has.
            part = 0.5 if elements.bucket >= elements.layer else 1.0
            copies = {"copies for the reduction": part * _copy(elements, run, elements.layers)}
            reduction = _reduction(elements, run, elements.largest)
        inside = {**first, **both, **copies, **owned}
        end = {"gradient": width * elements.largest, **tied, **both, **reduction, **owned}
        if elements.head <= elements.bucket or tied:
            self.layers_until_reduction = _layers_until_reduction(elements, layers)
        elif overlaps:  # its gradient is being reduced until a bucket is complete
            self.first = {**self.head, **first}
            inside = {**self.first, **both, **owned} if elements.layers > elements.bucket else self.first
            end |= self.head
        else:
            of_head = _reduction(elements, run, elements.head)
            self.head_reduction |= of_head if sum(of_head.values()) > sum(owned.values()) else owned
            self.first = {**first, **owned}
        self.middle = self.last = inside
        self.end = end

    def _with_sharded_weights(self, elements: Elements, run: Candidate, layers: int) -> None:
        width = run.weight_bytes
        tied = _tied(elements, run)
        self.first = {"gradient": width * elements.largest_in_layer, **tied}
        self.middle = self.last = {**self.first, "copies for the reduction": _bucket_copy(elements, run)}
        if elements.head <= elements.bucket or tied:
            self.layers_until_reduction = _layers_until_reduction(elements, layers)
        else:
            self.head_reduction |= _reduction_of_sharded(elements, run, elements.head)
        self.end = {
            "gradient": width * elements.largest,
            **tied,
            **_reduction_of_sharded(elements, run, elements.largest),
        }


def _overlaps(run: Candidate) -> bool:
    """Whether buckets of ZeRO 1 and 2 are reduced while the backward pass goes on, in place."""
    return run.stage in (1, 2) and run.shards > 1 and not run.offload_optimizer


def _tied(elements: Elements, run: Candidate) -> dict[str, float]:
    """The LM head's gradient, if it waits for that of the embedding, to which it is added: both are one parameter."""
    return {"gradient of the tied embedding": run.weight_bytes * elements.tied} if elements.tied else {}


def _layers_until_reduction(elements: Elements, layers: int) -> int:
    """Layers whose gradients, with that of the LM head, fill the bucket."""
    room = max(0, elements.bucket - (0 if elements.tied else elements.head))
    return min(layers - 1, room // max(1, elements.layer) + 1)


def _reduction_of_sharded(elements: Elements, run: Candidate, size: int) -> dict[str, float]:
    """Like :func:`_reduction`, with ZeRO 3: a larger gradient than the bucket is always copied."""
    copy = run.weight_bytes * size if size > elements.bucket else _bucket_copy(elements, run)
    norm = 8 * size / run.shards if run.offload_optimizer else 0.0
    return {"float64 gradient": norm} if norm > copy else {"copies for the reduction": copy}


def owned_elements(elements: Elements, run: Candidate) -> float:
    """Elements of the parameters of which a rank updates a part, on the rank that has most."""
    share = elements.trained_of(run.shards)
    if run.shards == 1:
        return share
    # A rank with the end of the largest parameter fills its share with others, and has all of the last one.
    return min(elements.trainable, elements.largest + share - elements.largest % share + elements.largest_in_layer)


def _copy(elements: Elements, run: Candidate, waiting: int) -> float:
    """Bytes of the copy on which a collective works, if ``waiting`` elements are not reduced yet."""
    if run.shards == 1:
        return 0.0
    return run.weight_bytes * min(waiting, elements.trainable, elements.bucket)


def _bucket_copy(elements: Elements, run: Candidate) -> float:
    """Bytes that ZeRO 3 copies from gradients of layers to reduce them, on one rank too."""
    return run.weight_bytes * min(elements.layers, elements.trainable, elements.bucket)


def _reduction(elements: Elements, run: Candidate, size: int) -> dict[str, float]:
    """What the reduction of a gradient of ``size`` elements needs with ZeRO 1 and 2.

    Larger ones than the bucket are copied if several ranks update parts of them. With offloaded states, the norm is
    computed then, in float64.
    """
    share = elements.trained_of(run.shards)
    copy = _copy(elements, run, size)
    if size > elements.bucket:
        copy = run.weight_bytes * min(size, elements.bucket + share) if size > share else 0.0
    norm = 8 * min(size, share) if run.offload_optimizer else 0.0
    return {"float64 gradient": norm} if norm > copy else {"copies for the reduction": copy}


def _update(elements: Elements, run: Candidate) -> dict[str, float]:
    """Gradients in the optimizer step, in the dtype of the model, and converted."""
    width, trained = run.weight_bytes, elements.trained_of(run.zero_shards)
    converted = 4 * trained if width == 2 else 0.0
    if run.stage == 0:
        return {"gradients": run.gradient_bytes * trained, "float32 gradients": converted}
    if run.stage == 3:
        part = min(SUB_GROUP, trained)
        return {"flattened gradients": width * part, "float32 gradients": 4 * part if width == 2 else 0.0}
    flattened = width * trained if run.gradient_bytes == width else 0.0
    return {
        "gradients": run.gradient_bytes * owned_elements(elements, run),
        "flattened gradients": flattened,
        "float32 gradients": converted if flattened else 0.0,
    }
