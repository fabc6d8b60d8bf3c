"""``ds-trainer plan --solve``: the largest value with which something fits, or the smallest number of devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ds_trainer.planner.cluster import Cluster
from ds_trainer.planner.planned_model import PlannedModel
from ds_trainer.planner.search import Goal, SearchResult, fits, search
from ds_trainer.utils.units import counted

QUANTITIES = ("seq-len", "params", "devices", "micro-batch")

_CHUNKS = (4096, 256)  # tokens: multiples of what most layouts divide a sequence into
_MOST_LAYERS, _MOST_TOKENS, _MOST_SEQUENCES = 2**14, 2**26, 2**16


@dataclass(frozen=True)
class Solution:
    """An answer.

    Args:
        value: the number.
        unit: what is counted, with remarks.
        model: with which it was found.
        cluster: with which it was found.
        goal: with which it was found.
    """

    value: int
    unit: str
    model: PlannedModel
    cluster: Cluster
    goal: Goal

    @property
    def result(self) -> SearchResult:
        """Everything that fits then."""
        return search(self.model, self.cluster, self.goal)


def solve(quantity: str, model: PlannedModel, cluster: Cluster, goal: Goal) -> Solution | None:
    """The answer; None if nothing fits at all.

    Args:
        quantity: one of :data:`QUANTITIES`.
        model: what is trained; for ``params``, layers are added to it.
        cluster: the devices; for ``devices``, one of them and the size of a machine.
        goal: batch, length and what is fixed.
    """
    names = ("optimizer_on_nvme", "param_on_nvme")
    if cluster.nvme is None and not {name for name, _ in goal.fixed} & set(names):
        goal = replace(
            goal, fixed=(*goal.fixed, *((name, False) for name in names))
        )  # disks of unknown size are no limit
    if quantity == "devices":
        return _devices(model, cluster, goal)
    if quantity == "seq-len":
        for step in _CHUNKS:
            found = _largest(lambda n: fits(model, cluster, replace(goal, length=n * step)), _MOST_TOKENS // step)  # noqa: B023
            if found:
                length = found * step
                unit = f"tokens a sequence (in steps of {step:,})"
                return Solution(length, unit, model, cluster, replace(goal, length=length))
        return None
    if quantity == "micro-batch":

        def with_micro_batch(number: int) -> Goal:
            return replace(goal, global_batch=None, fixed=(*goal.fixed, ("micro_batch", number)))

        found = _largest(lambda n: fits(model, cluster, with_micro_batch(n)), _MOST_SEQUENCES)
        return Solution(found, "sequences", model, cluster, with_micro_batch(found)) if found else None
    found = _largest(lambda n: fits(model.with_layers(n), cluster, goal), _MOST_LAYERS)
    deepest = model.with_layers(max(1, found))
    unit = f"parameters ({counted(found, 'layer')} of this width)"
    return Solution(deepest.total, unit, deepest, cluster, goal) if found else None


def _largest(is_possible: Callable[[int], bool], most: int) -> int:
    """The largest number up to ``most`` that is possible, if all smaller ones are; 0 if 1 is not."""
    low, high = 0, 1
    while high <= most and is_possible(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if middle <= most and is_possible(middle):
            low = middle
        else:
            high = middle
    return low


def _devices(model: PlannedModel, cluster: Cluster, goal: Goal) -> Solution | None:
    for nodes, devices in _sizes(cluster.devices_per_node):
        smaller = replace(cluster, nodes=nodes, devices_per_node=devices)
        if fits(model, smaller, goal):
            unit = f"devices ({nodes} x {devices} {cluster.device})"
            return Solution(nodes * devices, unit, model, smaller, goal)
    return None


def _sizes(devices_per_node: int) -> Iterator[tuple[int, int]]:
    """Machines and devices of each: powers of 2 and what is in the middle of them."""
    yield from ((1, number) for number in (1, 2, 4) if number < devices_per_node)
    for power in range(11):
        yield 1 << power, devices_per_node
        if power:
            yield 3 << (power - 1), devices_per_node
