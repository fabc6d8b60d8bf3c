"""What would make a run fit: the fewest changes of its arguments, those that cost least time first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from ds_trainer.planner.candidate import FEATURES, Candidate
from ds_trainer.planner.cluster import Cluster
from ds_trainer.planner.memory.estimate import MemoryEstimator
from ds_trainer.planner.plan import Plan
from ds_trainer.planner.search import ALL, HOST, Goal, candidates, feature_sets
from ds_trainer.utils.units import counted

_AT_ONCE = 2
_DOUBLINGS = 6  # of the number of devices
_OF_A_MACHINE = 8  # up to here, more devices are more of a machine

_SEARCHED = (
    *("world_size", "stage", "micro_batch", "accumulation", "tp", "cp", "sp", "ep"),
    *("offload_optimizer", "offload_param", "optimizer_on_nvme", "param_on_nvme", "checkpointing"),
)
_SMALLER = ("micro_batch", "eval_micro_batch", "hpz")  # what saves memory if it is reduced
_DEFAULTS: dict[str, Any] = {
    **{"tensor_parallel_size": 1, "context_parallel_size": 1, "sequence_parallel_size": 1},
    "expert_parallel_size": 1,
    **{"nvme_path": None, "activation_checkpointing_kwargs": None},
    "deepspeed": {"zero_optimization": {"zero_hpz_partition_size": 1}},
}


def cheapest_changes(plan: Plan, count: int = 3) -> list[Plan]:
    """Plans that fit, with the global batch of ``plan``, which does not fit.

    Each differs in another set of arguments: activation checkpointing, a smaller micro-batch with more accumulation, a
    higher ZeRO stage, offload, larger parallel sizes, a smaller batch of evaluation. More than two changes at once are
    tried only if fewer do not help, and more devices only if less than ``count`` changes help on the same ones.

    Args:
        plan: the run.
        count: the most to return.

    Returns:
        those on the same devices by predicted time of a step, then those on more.
    """
    plans = _on_cluster(plan, plan.cluster)[:count]
    cluster = plan.cluster
    for _ in range(_DOUBLINGS):
        if len(plans) >= count:
            break
        if cluster.devices_per_node * 2 <= _OF_A_MACHINE:
            cluster = replace(cluster, devices_per_node=cluster.devices_per_node * 2)
        else:
            cluster = replace(cluster, nodes=cluster.nodes * 2)
        plans += _on_cluster(plan, cluster)[:1]
    return plans


def changed_arguments(before: Candidate, after: Candidate) -> dict[str, Any]:
    """The arguments of ``TrainingArguments`` that turn the one run into the other."""
    old, new = before.arguments(), after.arguments()
    names = dict.fromkeys((*new, *old))
    changed = {name: new.get(name, _DEFAULTS.get(name, "none")) for name in names if new.get(name) != old.get(name)}
    return {name: value for name, value in changed.items() if name in new or value != old[name]}


def describe_change(before: Plan, after: Plan) -> str:
    """The changes in one line, such as ``activation_checkpointing=True, offload_optimizer='cpu'``."""
    parts = [f"{name}={value!r}" for name, value in changed_arguments(before.candidate, after.candidate).items()]
    if before.cluster.world_size != after.cluster.world_size:
        parts.insert(0, f"{after.cluster.nodes} x {counted(after.cluster.devices_per_node, 'device')}")
    return ", ".join(parts)


def _on_cluster(plan: Plan, cluster: Cluster) -> list[Plan]:
    by_number: dict[int, list[tuple[frozenset[str], Candidate]]] = {}
    for candidate in _variants(plan, cluster):
        changes = _changes(plan, candidate)
        if changes is not None:
            by_number.setdefault(len(changes), []).append((changes, candidate))
    estimator = MemoryEstimator(plan.model, cluster)
    best: dict[frozenset[str], Plan] = {}
    for number in sorted(by_number):
        if number > _AT_ONCE and best:
            break
        for changes, candidate in by_number[number]:
            changed = Plan(plan.model, candidate, cluster, estimator.estimate(candidate), plan.margin)
            if not changed.fits:
                continue
            # A superset of other changes is worth it only if it is faster.
            fewer = [other for names, other in best.items() if names <= changes]
            if all(changed.seconds < other.seconds for other in fewer):
                best[changes] = changed
    return sorted(best.values(), key=lambda changed: changed.seconds)


def _variants(plan: Plan, cluster: Cluster) -> Iterator[Candidate]:
    """All ways to run, with what is not searched for as in ``plan``."""
    run = plan.candidate
    kept = [name for name in FEATURES if getattr(run, name)]
    evaluation = [run.eval_micro_batch]
    if run.eval_micro_batch is not None and run.eval_micro_batch > 1:
        evaluation.append(1)
    tiers = ALL if cluster.nvme is not None or plan.host_share > 1 or run.uses_nvme else HOST
    goal = Goal(run.length, run.global_batch, run.precision, fixed=(("hpz", 1),))  # more of it takes more memory
    for candidate in candidates(plan.model, cluster, goal, [], tiers):
        possible = [
            size
            for size in {1, run.hpz}
            if size == 1 or (candidate.stage == 3 and candidate.ep == 1 and candidate.shards % size == 0)
        ]
        for batch, hpz in product(evaluation, possible):
            searched = {name: getattr(candidate, name) for name in _SEARCHED}
            one = replace(run, **searched, eval_micro_batch=batch, hpz=hpz)
            if run.every_n_layers > 1 and one.checkpointing:
                yield replace(one, every_n_layers=1)
            for features in feature_sets(plan.model, one, kept):
                turned_on: dict[str, Any] = dict.fromkeys(features, True)
                yield replace(one, **turned_on) if turned_on else one


def _changes(plan: Plan, after: Candidate) -> frozenset[str] | None:
    """Names of what differs; None if something is reversed that saves the memory that is missing."""
    before, changes = plan.candidate, set()
    for name in ("checkpointing", "stage", "offload", *_SMALLER, "tp", "cp", "sp", "ep", *FEATURES):
        old, new = _value(before, name), _value(after, name)
        if old == new:
            continue
        is_reversed = (new < old) != (name in _SMALLER)
        if is_reversed and not (name == "offload" and plan.host_share > 1):
            return None
        changes.add(name)
    return frozenset(changes)


def _value(run: Candidate, name: str) -> int:
    if name == "offload":
        return run.offload_optimizer + run.optimizer_on_nvme + 3 * (run.offload_param + run.param_on_nvme)
    if name == "checkpointing":
        return 128 // run.every_n_layers * run.checkpointing
    return getattr(run, name) or 0
