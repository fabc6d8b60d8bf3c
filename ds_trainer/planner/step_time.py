"""Time of an optimizer step, from FLOPs, bytes and bandwidths. An interval: kernels and overlap differ.

Matrix products run at a fraction of the peak, everything else at the bandwidth of the memory, collectives at that of
the slowest link that they cross. The collectives of ZeRO overlap with the computation, others do not.
The fractions (:data:`EFFICIENCY`) are those of published runs, listed in ``tests/planner/test_anchors.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log

from ds_trainer.planner.bucket_sizes import Network, prefetch_bucket, reduce_bucket
from ds_trainer.planner.candidate import Candidate
from ds_trainer.planner.cluster import Cluster
from ds_trainer.planner.flops import forward_flops
from ds_trainer.planner.layer_sizes import layer_sizes
from ds_trainer.planner.offload_sizes import PARAMS_IN_HOST
from ds_trainer.planner.planned_model import PlannedModel

EFFICIENCY = {
    "matrix products": (0.75, 0.58, 0.45),
    "attention": (0.60, 0.40, 0.28),
    "memory": (0.90, 0.80, 0.60),
    "links": (0.85, 0.70, 0.50),
    "overlap": (1.0, 0.8, 0.4),
}
"""Fraction of a peak that is reached: at best, usually, at worst; of the collectives, the share that is hidden."""

HOST_ADAM = 1.9e9
"""Elements that DeepSpeed's CPU Adam updates per second on one machine."""

CHUNKED_LOSS_AGAIN = 1
"""Products with the LM head that a chunked loss repeats: the backward pass computes the logits again."""

TILED_MLP_AGAIN = 1
"""Forward passes of the MLPs that tiling repeats: that of a tile in its backward pass, also if the layer has been
recomputed before."""

_LAUNCH_SECONDS = 4e-4  # the host starts the kernels of a layer's forward pass in eager mode
_LAUNCH_OTHERS = 3e-3  # ... and of everything else in a micro-batch
_EXCHANGE_SECONDS = 3e-4  # ... and routes, sends and receives the tokens of a layer's forward pass: an assumption
_ZERO_3_SECONDS = 2.6e-4  # ... and gathers and reduces a parameter with ZeRO 3 (docs/explanation/scale.md, Host time)
_HOST_SECONDS = (2e-3, 5e-3, 1e-2)  # of a step, in which the device waits: gradient norm, optimizer, data, callbacks


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        low: if everything overlaps and kernels are as fast as they get.
        seconds: the estimate.
        high: the opposite of ``low``.
        parts: seconds of each part of the estimate, in order. Hidden communication is not counted.
        best: those of ``low``.
    """

    low: float
    seconds: float
    high: float
    parts: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)


def step_time(model: PlannedModel, candidate: Candidate, cluster: Cluster) -> StepTime:
    """The time of a step.

    Raises:
        ValueError: the device has no figure for the precision.
    """
    low, usual, high = (_parts(model, candidate, cluster, level) for level in range(3))
    return StepTime(sum(low.values()), sum(usual.values()), sum(high.values()), usual, low)


def usual_seconds(model: PlannedModel, candidate: Candidate, cluster: Cluster) -> float:
    """:attr:`StepTime.seconds` alone, in a third of the time.

    Raises:
        ValueError: the device has no figure for the precision.
    """
    return sum(_parts(model, candidate, cluster, 1).values())


def mfu(model: PlannedModel, candidate: Candidate, cluster: Cluster, seconds: float) -> float:
    """Model FLOPs utilization, 0 to 1, with the convention of :mod:`ds_trainer.planner.flops`."""
    products, attention = forward_flops(model.transformer, candidate.length, candidate.length, False)
    trained = model.trainable / model.total if model.lora_rank else 1.0
    flops = candidate.global_batch * (products * (2 + trained) + attention * 3)
    return flops / (seconds * _peak(cluster, candidate) * candidate.world_size)


# Billions of parameters, FLOPs utilization on H100 in bf16, source: the highest that was found in November 2026.
_PUBLISHED = (
    (1.2, 0.418, "llm-foundry, 8 x H100, 2,048 tokens"),
    (2.7, 0.423, "llm-foundry, 8 x H100, 4,096 tokens"),
    (6.7, 0.48, "fms-fsdp, 128 x H100, 4,096 tokens"),
    (32.0, 0.394, "torchtitan issue 1690, Qwen3, 8 x H100"),
    (70.0, 0.426, "llm-foundry, 64 x H100, 2,048 tokens"),
)


def standing(model: PlannedModel, candidate: Candidate, cluster: Cluster, seconds: float) -> str:
    """FLOPs utilization of a step that takes ``seconds``, beside the best published one of a dense model of its size.

    Raises:
        ValueError: the device has no figure for the precision.
    """
    text = f"Model FLOPs utilization: {100 * mfu(model, candidate, cluster, seconds):.1f} %"
    size, published, source = min(_PUBLISHED, key=lambda row: abs(log(row[0] * 1e9 / model.total)))
    comparable = 0.5 < size * 1e9 / model.total < 2 and "H100" in cluster.device.upper()
    if not comparable or model.lora_rank or model.stack.experts > 1:
        return f"{text}."
    return f"{text}. The best published one for {size:g}B: {100 * published:.1f} % ({source})."


def _parts(model: PlannedModel, run: Candidate, cluster: Cluster, level: int) -> dict[str, float]:
    reached = {name: values[level] for name, values in EFFICIENCY.items()}
    ranks = run.tp * run.cp * run.sp
    peak = _peak(cluster, run)
    trained = model.trainable / model.total if model.lora_rank else 1.0
    again = run.checkpointed_layers(model.stack.layers) / model.stack.layers
    products, attention = model.flops(run.length)
    share = run.micro_batch / ranks
    compute = {
        "matrix products": share
        * (products * (2 + trained + again) + _repeated(model, run))
        / (peak * reached["matrix products"]),
        "attention": share * attention * (3 + again) / (peak * reached["attention"]),
        "element-wise": _element_wise(model, run) / (cluster.board.bandwidth * 1e9 * reached["memory"]),
    }
    if run.ep > 1:  # the rank whose experts get most tokens; the others wait for it
        routed = 2.0 * run.tokens * model.stack.routed_weights / run.tp
        compute["uneven experts"] = (
            (model.imbalance(run.ep) - 1) * routed * (2 + trained + again) / (peak * reached["matrix products"])
        )
    host = model.stack.layers * (3 + again) * _LAUNCH_SECONDS + _LAUNCH_OTHERS
    host += model.stack.expert_layers * (3 + again) * _EXCHANGE_SECONDS * (run.ep > 1)
    if run.stage == 3:  # no more with more ranks
        host += _ZERO_3_SECONDS * model.tensors
    compute["host work in micro-batches"] = max(0.0, host - sum(compute.values()))
    inside = _inside_layers(model, run, cluster) / reached["links"]
    weights, gradients = (seconds / reached["links"] for seconds in _zero(model, run, cluster))
    transfers = _offload_transfers(model, run, cluster) / reached["links"]
    busy = sum(compute.values())
    parts = {name: seconds * run.accumulation for name, seconds in compute.items()}
    parts["tensor and sequence parallelism"] = inside * run.accumulation
    parts["exchange of tokens"] = exchange_seconds(model, run, cluster) / reached["links"] * run.accumulation
    if run.stage == 3:  # what overlaps cannot hide more than the computation lasts
        parts["ZeRO communication"] = _exposed(weights + gradients, busy, reached["overlap"]) * run.accumulation
    else:  # beside the backward pass, the larger part of a micro-batch, but for offload
        hidden = 0.0 if run.offload_optimizer else reached["overlap"]
        exposed = _exposed(gradients, busy * 2 / 3, hidden)
        parts["ZeRO communication"] = exposed * (run.accumulation if run.stage == 2 else 1)
    if run.stage in (1, 2):
        parts["ZeRO communication"] += weights  # the updated weights, after the step
    parts["offload transfers"] = _exposed(transfers, busy, reached["overlap"] / 2)
    if run.checkpointing and run.offload_activations:  # down in the forward, up in the backward pass
        layers = run.checkpointed_layers(model.stack.layers) * run.tokens * run.weight_bytes * model.stack.hidden_size
        activations = 2 * layers / (cluster.board.host * 1e9 * reached["links"])
        parts["offloaded activations"] = _exposed(activations, busy, reached["overlap"]) * run.accumulation
    if run.uses_nvme:
        shards, states = (seconds / reached["links"] for seconds in _nvme_transfers(model, run, cluster))
        parts["weights from NVMe"] = _exposed(shards, busy * run.accumulation, reached["overlap"] / 2)
        parts["optimizer states on NVMe"] = states
    elements = model.trainable / run.tp / (run.shards if run.stage else 1)
    if run.offload_optimizer:
        parts["optimizer on the host"] = elements * cluster.devices_per_node / HOST_ADAM
    else:
        parts["optimizer"] = elements * 30 / (cluster.board.bandwidth * 1e9 * reached["memory"])
    parts["host work between steps"] = _HOST_SECONDS[level]
    return parts


def _repeated(model: PlannedModel, run: Candidate) -> float:
    """FLOPs that a chunked loss and tiled MLPs compute again, for a sequence."""
    tokens, stack, found = run.length, model.stack, 0.0
    if run.chunked_loss and not run.one_pass:
        found += CHUNKED_LOSS_AGAIN * 2.0 * tokens * model.rows * stack.hidden_size
    if run.tiled_mlp:
        found += TILED_MLP_AGAIN * 2.0 * tokens * stack.mlp_weights(stack.experts_per_token)
    return found


def _peak(cluster: Cluster, run: Candidate) -> float:
    peak = cluster.peaks.peak("tf32" if run.precision == "fp32" and cluster.peaks.tf32 else run.precision)
    if not peak:
        raise ValueError(f"{cluster.device} has no fast units for {run.precision}")
    return peak


def _exposed(seconds: float, busy: float, overlap: float) -> float:
    return seconds - min(seconds, busy) * overlap


def _element_wise(model: PlannedModel, run: Candidate) -> float:
    """Bytes that element-wise kernels of a micro-batch read and write.

    Each tensor that is kept is written, read by the next kernel, read in the backward pass, and its gradient is written
    and read; recomputation writes and reads it once more.
    """
    activations, _ = model.activations(run.attention, run.number_format)
    sizes = layer_sizes(model.stack, model.rows, run.length, tp=run.tp, cp=run.cp)
    found = activations.bytes_per_token(sizes)
    layers = found.layer * model.stack.layers
    again = run.checkpointed_layers(model.stack.layers) / model.stack.layers
    return run.tokens * (layers * (5 + 2 * again) + found.loss * 3)


def _ring(
    size: float, cluster: Cluster, ranks: int, stride: int = 1, messages: float = 1.0, is_all_reduce: bool = False
) -> float:
    """Seconds to gather, to scatter or to sum ``size`` bytes in all over ``ranks`` that are ``stride`` apart."""
    if ranks == 1:
        return 0.0
    transfer = size * (ranks - 1) / ranks / (cluster.ring_bandwidth(ranks, stride) * 1e9)
    return transfer * (1 + is_all_reduce) + cluster.latency(ranks, stride, is_all_reduce) * messages


def _inside_layers(model: PlannedModel, run: Candidate, cluster: Cluster) -> float:
    """Seconds of collectives that the next kernel of a layer waits for, in one micro-batch."""
    stack = model.stack
    width = run.weight_bytes * run.tokens
    passes = 2 + run.checkpointed_layers(stack.layers) / stack.layers
    seconds = 0.0
    if run.tp > 1:  # two all-reduces in a forward and in a backward pass
        one = _ring(width * stack.hidden_size, cluster, run.tp, is_all_reduce=True)
        seconds += 2 * passes * one * stack.layers
    if run.sp > 1:  # queries, keys, values, output: each rank sends all but its own heads
        columns = (2 * stack.query_width + 2 * stack.kv_heads * stack.head_dim) / run.tp
        one = _ring(width * columns, cluster, run.sp, run.tp)
        seconds += passes * one * stack.layers
    if run.cp > 1:  # keys and values go around; half of it is hidden by the blocks of attention
        columns = 2 * stack.kv_heads * stack.head_dim / run.tp / run.sp
        block = width * run.sp * columns * (run.cp - 1)
        stride = run.tp * run.sp
        one = block / (cluster.ring_bandwidth(run.cp, stride) * 1e9) + cluster.hop(run.cp, stride) * (run.cp - 1)
        seconds += (passes + 1) * one / 2 * stack.layers
    return seconds


def exchange_seconds(model: PlannedModel, run: Candidate, cluster: Cluster) -> float:
    """Seconds in which tokens travel to their experts and back in a micro-batch, for the rank that gets most.

    Two all-to-alls in a forward, a recomputed and a backward pass of a layer, and one of counts. What stays in a
    machine takes its links; the rest the network of the device.
    """
    if run.ep == 1:
        return 0.0
    stack = model.stack
    passes = 2 + run.checkpointed_layers(stack.layers) / stack.layers
    near = min(run.ep, max(1, cluster.devices_per_node // run.tp))
    size = model.imbalance(run.ep) * exchanged_bytes(model, run) * run.ep / (run.ep - 1)  # with what stays on the rank
    links = size * (near - 1) / run.ep / (cluster.board.link * 1e9)
    network = size * (run.ep - near) / run.ep / (cluster.board.network * 1e9) if run.ep > near else 0.0
    hop = cluster.hop(run.ep, run.tp)
    return stack.expert_layers * (2 * passes * (max(links, network) + hop) + hop)


def exchanged_bytes(model: PlannedModel, run: Candidate) -> float:
    """Bytes that a rank sends to others in one all-to-all of a layer, if routing is even."""
    rows = run.tokens * model.stack.experts_per_token
    return rows * model.stack.hidden_size * run.weight_bytes * (run.ep - 1) / run.ep


def _zero(model: PlannedModel, run: Candidate, cluster: Cluster) -> tuple[float, float]:
    """Seconds to gather all weights (stage 3: for forward and backward pass), and to reduce all gradients."""
    width = run.weight_bytes / run.tp
    gathers = {0: 0, 1: 1, 2: 1, 3: 2}[run.stage]
    gathered = model.total if run.stage == 3 else model.trainable
    network, hidden, trained = Network.of(cluster, run.tp), model.stack.hidden_size, model.trainable // run.tp
    reduce = reduce_bucket(hidden, run.weight_bytes, run.stage, trained, network)
    fetch = prefetch_bucket(hidden, run.weight_bytes, model.total // run.tp, network)
    assert reduce is not None and fetch is not None  # the width is known
    experts, trained_experts = (size / run.ep if run.ep > 1 else 0 for size in model.expert_elements)
    experts = experts if run.stage == 3 else trained_experts
    others = run.ep if run.ep > 1 else 0  # parts of the experts, that are not among the weights of all ranks
    replicas = run.shards // run.ep, run.tp * run.ep

    def ring(size: float, part: float, messages: float) -> float:
        """Seconds for ``size`` elements in all, ``part`` of them experts of the ranks with the same."""
        rest = size - others * part
        of_all = _ring(rest * width, cluster, run.shards, run.tp, max(1.0, messages * rest / size), run.stage == 0)
        if not part:
            return of_all
        return of_all + _ring(part * width, cluster, *replicas, max(1.0, messages * part / size), run.stage == 0)

    # ZeRO 1 and 2 gather all weights at once.
    messages = gathered / run.tp / fetch.elements if run.stage == 3 else 1.0
    gather = gathers * ring(gathered, experts, messages) if gathers else 0.0
    if run.hpz > 1:  # all ranks share what they gather first in a step; the second shards of frozen weights stay
        first = model.trainable / model.total / (2 * run.accumulation)
        inside = 2 * _ring(gathered * width, cluster, run.hpz, run.tp, max(1.0, messages))
        gather = first * gather + (1 - first) * inside
    return gather, ring(model.trainable, trained_experts, trained / reduce.elements)


def _offload_transfers(model: PlannedModel, run: Candidate, cluster: Cluster) -> float:
    """Seconds between device and host in a step."""
    shards = run.shards if run.stage else 1
    moved = 0.0
    if run.offload_optimizer:  # gradients down, weights up
        moved += 2 * model.trainable * run.weight_bytes / run.tp / shards
    if run.offload_param:  # with hpZ, the second shards: all gathers but the first, which writes them
        gathers = 2 * run.accumulation / (shards if run.hpz == 1 else run.hpz)
        moved += gathers * model.total * run.weight_bytes / run.tp
    return moved / (cluster.board.host * 1e9)


def _nvme_transfers(model: PlannedModel, run: Candidate, cluster: Cluster) -> tuple[float, float]:
    """Seconds that a device reads and writes shards of weights in a step, and states of the optimizer.

    Shards beyond those that stay in host memory are read in the forward and in the backward pass of each micro-batch.
    The optimizer waits for its states (DeepSpeed's default of ``pipeline_read`` and ``pipeline_write`` is false):
    masters, states and gradients are read, and written.
    """
    read, write = cluster.board.nvme_read * 1e9, cluster.board.nvme_write * 1e9
    trained = model.trainable / run.tp / run.shards
    weights = states = 0.0
    if run.param_on_nvme:
        moved = run.weight_bytes * max(0.0, model.total / run.tp / run.shards - min(trained, PARAMS_IN_HOST))
        weights = 2 * run.accumulation * moved / read
        states += run.weight_bytes * max(0.0, trained - PARAMS_IN_HOST) / write  # the updated ones
    if run.optimizer_on_nvme:
        moved = (4 + run.state_bytes + 4) * trained
        states += moved / read + moved / write
    return weights, states
