"""Search for the best way to run: every valid candidate, its memory and its time; why the others do not fit."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, islice, product
from typing import Any

from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.planner.candidate import CHUNK_TOKENS, FEATURES, SEARCHED_FEATURES, Candidate
from ds_trainer.planner.cluster import Cluster
from ds_trainer.planner.layouts import layout_conflicts
from ds_trainer.planner.memory.estimate import MemoryEstimator
from ds_trainer.planner.model_shape import ModelShape
from ds_trainer.planner.plan import MARGIN, Plan
from ds_trainer.planner.planned_model import PlannedModel

_NEAREST = 64  # rejected plans of which those that lack as much are in the order of their times
_LARGEST_MICRO_BATCH = 128
_AS_GIVEN = (*FEATURES, "every_n_layers", "attention", "state_bytes", "float32_sums")  # not searched for if fixed
_SPARSER = (4, 2)  # activation checkpointing of 1 in so many layers, where none is too large and all is not needed


HOST, NVME, ALL = "host", "nvme", "all"
"""What :func:`candidates` gives: ways to run with nothing on NVMe, with something, or all."""

_NO_OFFLOAD = dict.fromkeys(("offload_optimizer", "offload_param", "optimizer_on_nvme", "param_on_nvme"), False)
_OPTIMIZER, _PARAM = {"offload_optimizer": True}, {"offload_param": True}


@dataclass(frozen=True)
class Goal:
    """What is asked for.

    Args:
        length: tokens of a sequence.
        global_batch: sequences of an optimizer step; None accepts the smallest that uses all devices.
        precision: ``bf16``, ``fp16`` or ``fp32``; None takes bf16 where the device has it, else fp16.
        margin: share of the device's memory that is left free.
        fixed: values of :class:`Candidate` that are given, such as ``{"stage": 3}``.
        eval_micro_batch: sequences of a replica in a batch of evaluation; None is the micro-batch.
    """

    length: int
    global_batch: int | None = None
    precision: str | None = None
    margin: float = MARGIN
    fixed: tuple[tuple[str, object], ...] = ()
    eval_micro_batch: int | None = None


@dataclass(frozen=True)
class SearchResult:
    """Plans that fit, fastest first, and those that do not, nearest first.

    Attributes:
        fitting: all that fit.
        rejected: those that do not, without larger micro-batches of the same.
        conflicts: why some layouts are impossible.
        tried: number of ways to run.
    """

    fitting: tuple[Plan, ...]
    rejected: tuple[Plan, ...]
    conflicts: tuple[str, ...] = ()
    tried: int = 0

    @property
    def best(self) -> Plan | None:
        """The fastest plan that fits."""
        return self.fitting[0] if self.fitting else None

    @property
    def cautious(self) -> Plan | None:
        """The fastest plan that fits with the most fragmentation that was measured; None if there is none."""
        return next((plan for plan in self.fitting if plan.is_cautious), None)

    def neighbors(self, count: int = 5) -> list[Plan]:
        """Rejected plans that would be faster than the best: what a larger device would allow."""
        if self.best is None:
            return list(self.rejected[:count])
        faster = (plan for plan in self.rejected if plan.tokens_per_second > self.best.tokens_per_second)
        return list(islice(faster, count))


def search(model: PlannedModel, cluster: Cluster, goal: Goal) -> SearchResult:
    """Evaluate every candidate.

    Offload to NVMe is tried where machines have it, and where nothing fits because host memory is too small.

    Args:
        model: what is trained.
        cluster: the devices, all of which are used.
        goal: batch, length and what is fixed.
    """
    fitting: list[Plan] = []
    rejected: list[Plan] = []
    conflicts: list[str] = []
    tried = 0
    for nvme in _tiers(cluster, dict(goal.fixed)):
        if nvme == NVME and (fitting or not any(plan.lacks_host_memory for plan in rejected)):
            break
        for plan in _plans(model, cluster, goal, conflicts, nvme):
            tried += 1
            if plan is not None:
                (fitting if plan.fits else rejected).append(plan)
    fitting.sort(key=lambda plan: (-plan.tokens_per_second, plan.candidate.replicas))
    rejected.sort(key=_rounded_excess)
    rejected[:_NEAREST] = sorted(rejected[:_NEAREST], key=lambda plan: (_rounded_excess(plan), plan.seconds))
    return SearchResult(tuple(fitting), tuple(rejected), tuple(dict.fromkeys(conflicts)), tried)


def _rounded_excess(plan: Plan) -> float:
    return round(plan.excess, 3)


def unsharded_stage(ranks: int) -> int:
    """The highest ZeRO stage that leaves weights whole: quantized ones cannot be sharded."""
    return 2 if ranks > 1 else 1


def fits(model: PlannedModel, cluster: Cluster, goal: Goal) -> bool:
    """Whether :func:`search` finds something that fits."""
    tiers = _tiers(cluster, dict(goal.fixed))
    return any(plan is not None and plan.fits for nvme in tiers for plan in _plans(model, cluster, goal, [], nvme))


def nearest_batches(model: PlannedModel, cluster: Cluster, goal: Goal) -> list[int]:
    """Global batches near that of ``goal`` that some layout can divide: the next smaller and larger one.

    Empty if no global batch is possible.
    """
    wanted = goal.global_batch or 1
    units = {one.micro_batch * one.replicas for one in candidates(model, cluster, replace(goal, global_batch=None), [])}
    below = max((wanted // unit * unit for unit in units), default=0)
    above = min((-(-wanted // unit) * unit for unit in units), default=0)
    return sorted({batch for batch in (below, above) if batch})


def _tiers(cluster: Cluster, fixed: Mapping[str, object]) -> tuple[str, ...]:
    """What is searched: with or without NVMe, and what after that if host memory is too small."""
    if cluster.nvme is not None or fixed.get("optimizer_on_nvme") or fixed.get("param_on_nvme"):
        return (ALL,)
    is_open = not {"optimizer_on_nvme", "param_on_nvme"} & fixed.keys()
    return (HOST, NVME) if cluster.host_memory is not None and is_open else (HOST,)


def _plans(
    model: PlannedModel, cluster: Cluster, goal: Goal, conflicts: list[str], tiers: str
) -> Iterator[Plan | None]:
    """A plan for each candidate; None if it is larger than another that does not fit, or slower than one that does."""
    estimator, fixed = MemoryEstimator(model, cluster), {name for name, _ in goal.fixed}
    too_large: set[tuple[object, ...]] = set()
    is_open = not {"checkpointing", "every_n_layers"} & fixed
    whole: set[tuple[str, ...]] = set()  # features with which the candidate fits that keeps all activations
    for candidate in candidates(model, cluster, goal, conflicts, tiers):
        if not candidate.checkpointing:
            whole = set()
        others = _without_micro_batch(candidate)
        enough: int | None = None  # number of features with which it fits
        sets = feature_sets(model, candidate, fixed)
        every = sets[1] if len(sets) > 1 else ()
        for features in sets:
            is_last_resort = features == every
            key = (others, features)
            if key in too_large or (others, every) in too_large or (enough is not None and len(features) > enough):
                yield None
                continue
            turned_on: dict[str, Any] = dict.fromkeys(features, True)
            run = replace(candidate, **turned_on) if turned_on else candidate
            plan = Plan(model, run, cluster, estimator.estimate(run), goal.margin)
            if not plan.fits:
                too_large.add(key)
            else:
                plan = in_one_pass(plan, estimator)
                if not (features and is_last_resort):
                    enough = len(features)
                if not candidate.checkpointing:
                    whole.add(features)
                elif is_open and features not in whole:
                    yield from _sparser(plan, estimator, too_large, features)
            yield plan


def _sparser(
    plan: Plan, estimator: MemoryEstimator, too_large: set[tuple[object, ...]], features: tuple[str, ...]
) -> Iterator[Plan | None]:
    """The plan with activation checkpointing of as few layers as fit."""
    for layers in _SPARSER:
        run = replace(plan.candidate, every_n_layers=layers, one_pass=False)
        key = (_without_micro_batch(run), features)
        if layers >= plan.model.stack.layers or key in too_large:
            continue
        sparser = Plan(plan.model, run, plan.cluster, estimator.estimate(run), plan.margin)
        if sparser.fits:
            yield in_one_pass(sparser, estimator)
            return
        too_large.add(key)
        yield None


def in_one_pass(plan: Plan, estimator: MemoryEstimator) -> Plan:
    """``plan`` with its loss in one pass, if there is room for that."""
    if not plan.candidate.chunked_loss:
        return plan
    run = replace(plan.candidate, one_pass=True)
    other = Plan(plan.model, run, plan.cluster, estimator.estimate(run), plan.margin)
    return other if other.fits else plan


def _without_micro_batch(run: Candidate) -> tuple[object, ...]:
    """What decides about the memory besides the micro-batch: more sequences need more if all of this is equal."""
    sizes = (run.tp, run.cp, run.sp, run.ep, run.stage, run.hpz, run.checkpointing, run.every_n_layers)
    offload = (run.offload_optimizer, run.offload_param, run.optimizer_on_nvme, run.param_on_nvme)
    return (*sizes, *offload, run.accumulation == 1, run.gradient_bytes)


def candidates(
    model: PlannedModel, cluster: Cluster, goal: Goal, conflicts: list[str], tiers: str = HOST
) -> Iterator[Candidate]:
    """Every valid way to run; ``conflicts`` gets the reasons why a layout is impossible.

    Args:
        model: what is trained.
        cluster: the devices.
        goal: batch, length and what is fixed.
        conflicts: see above.
        tiers: ``HOST``, ``NVME`` or ``ALL``: those with nothing on NVMe, with something, or all.
    """
    fixed = dict(goal.fixed)
    precision = goal.precision or ("bf16" if cluster.peaks.bf16 else "fp16")
    shape = ModelShape(transformer=model.transformer)
    as_given = {name: value for name, value in goal.fixed if name in _AS_GIVEN}
    for tp, cp, sp in _sizes(cluster, fixed):
        layout = ParallelLayout(cluster.world_size, tp=tp, cp=cp, sp=sp)
        of_layout = layout_conflicts(shape, layout)
        if model.stack.kv_heads < tp:
            of_layout.append(f"{model.stack.kv_heads} key heads are fewer than {tp} tensor-parallel ranks")
        if goal.length % layout.length_multiple and cp * sp > 1:
            of_layout.append(f"{goal.length} tokens are no multiple of {layout.length_multiple}")
        if of_layout:
            conflicts += of_layout
            continue
        for sequences, accumulation in _batches(layout.dp, goal.global_batch, fixed.get("micro_batch")):
            for stage, offload in _states(cluster, tp, precision, tiers, bool(fixed.get("param_on_nvme"))):
                second = _second_partitions(cluster, tp, stage, offload["offload_param"], fixed.get("hpz"))
                for hpz, checkpointing in product(second, (False, True)):
                    values = {
                        "stage": stage,
                        "hpz": hpz,
                        "micro_batch": sequences,
                        "accumulation": accumulation,
                        "tp": tp,
                        "cp": cp,
                        "sp": sp,
                        **offload,
                        "checkpointing": checkpointing,
                        "precision": precision,
                        "eval_micro_batch": goal.eval_micro_batch,
                        **as_given,
                    }
                    for ep in _expert_sizes(model, cluster, layout, values, fixed.get("ep")):
                        values["ep"] = ep
                        if all(values.get(name, wanted) == wanted for name, wanted in fixed.items()):
                            yield Candidate(cluster.world_size, goal.length, **values)  # type: ignore[arg-type]


def _sizes(cluster: Cluster, fixed: dict[str, object]) -> Iterator[tuple[int, int, int]]:
    world = cluster.world_size
    divisors = [size for size in range(1, world + 1) if world % size == 0]
    for tp in divisors:
        if tp > cluster.devices_per_node or fixed.get("tp", tp) != tp:
            continue  # tensor parallelism waits for every collective, so it stays in a machine
        for sp in divisors:
            if fixed.get("sp", sp) != sp:
                continue
            for cp in divisors:
                if world % (tp * sp * cp) == 0 and fixed.get("cp", cp) == cp:
                    yield tp, cp, sp


def _expert_sizes(
    model: PlannedModel, cluster: Cluster, layout: ParallelLayout, values: Mapping[str, Any], given: Any
) -> list[int]:
    """Numbers of ranks that divide the experts: none, and most of a machine, where the exchange is fast.

    What rules refuse is not tried: offload, hpZ, and 16 bits without ZeRO.
    """
    refused = values["hpz"] > 1 or any(values.get(name) for name in _NO_OFFLOAD)
    refused |= values["stage"] == 0 and values["precision"] != "fp32"
    most = cluster.devices_per_node // layout.tp if given is None else int(given)
    common = 1 if refused else math.gcd(model.stacked_experts, layout.seq_data_parallel_size)
    return sorted({1, max(size for size in range(1, max(1, most) + 1) if common % size == 0)})


def _second_partitions(cluster: Cluster, tp: int, stage: int, is_on_host: bool, given: Any) -> tuple[int, ...]:
    """Sizes of hpZ that are tried. With shards in host memory none: each step would pin memory for the second ones."""
    if given is not None:
        return (given,) if given == 1 or (stage == 3 and cluster.world_size // tp % given == 0) else ()
    size, others = divmod(cluster.devices_per_node, tp)
    is_useful = stage == 3 and cluster.nodes > 1 and size > 1 and not others and not is_on_host
    return (1, size) if is_useful else (1,)


def _batches(replicas: int, global_batch: int | None, micro_batch: Any) -> Iterator[tuple[int, int]]:
    """Micro-batch and accumulation."""
    if global_batch is None:
        yield from (
            (size, 1) for size in ([1 << power for power in range(8)] if micro_batch is None else [micro_batch])
        )
    elif global_batch % replicas == 0:
        share = global_batch // replicas
        sizes = range(1, _LARGEST_MICRO_BATCH + 1) if micro_batch is None else [micro_batch]
        yield from ((size, share // size) for size in sizes if share % size == 0)


def _states(
    cluster: Cluster, tp: int, precision: str, tiers: str, weights: bool
) -> Iterator[tuple[int, Mapping[str, bool]]]:
    """ZeRO stage, and what is offloaded, as fields of a candidate; weights on NVMe only if they were asked for.

    With its default of 5 buffers, DeepSpeed 0.19.8 runs out of them: a gathered weight keeps its buffer.
    """
    ranks = cluster.world_size // tp
    for stage in (0, 1, 2, 3):
        if stage == 0 and (precision == "fp16" or (tp > 1 and precision != "fp32")):
            continue  # DeepSpeed neither scales the loss nor counts partitions there
        if stage == 2 and ranks == 1:
            continue
        if tiers != NVME:
            yield stage, _NO_OFFLOAD
            if stage:
                yield stage, {**_NO_OFFLOAD, **_OPTIMIZER}
            if stage == 3:
                yield stage, {**_NO_OFFLOAD, **_OPTIMIZER, **_PARAM}
        if tiers != HOST and stage == 3:
            yield stage, {**_NO_OFFLOAD, **_OPTIMIZER, "optimizer_on_nvme": True}
            yield stage, {**_NO_OFFLOAD, **_OPTIMIZER, **_PARAM, "optimizer_on_nvme": True}
            if weights:
                yield stage, {**_NO_OFFLOAD, **_OPTIMIZER, **_PARAM, "optimizer_on_nvme": True, "param_on_nvme": True}


# Features that save activations (:data:`~ds_trainer.planner.candidate.FEATURES`): which are worth trying together.


def feature_sets(model: PlannedModel, run: Candidate, fixed: Collection[str]) -> list[tuple[str, ...]]:
    """Sets of features that ``run`` could have in addition: none, all that have an effect, then fewer to more.

    If the second does not fit, no other does. Of the rest, one that has less costs less time.

    Args:
        model: what is trained.
        run: how.
        fixed: fields of ``run`` that are given.
    """
    useful = [name for name in SEARCHED_FEATURES if name not in fixed and _has_effect(model, run, name)]
    if not useful:
        return [()]
    between = [chosen for number in range(1, len(useful)) for chosen in combinations(useful, number)]
    return [(), tuple(useful), *between]


def _has_effect(model: PlannedModel, run: Candidate, name: str) -> bool:
    if name == "chunked_loss":
        return model.rows > 0 and run.tokens > CHUNK_TOKENS
    if name == "tiled_mlp":
        return model.stack.intermediate_size > 0 and run.tokens > model.stack.hidden_size
    return run.checkpointing
