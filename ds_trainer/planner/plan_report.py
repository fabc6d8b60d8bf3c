"""What ``ds-trainer plan`` prints: the best plans, the memory of the first, what does not fit and why."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ds_trainer.planner.plan import MEASURED_FRAGMENTATION, Plan
from ds_trainer.planner.remedies import cheapest_changes, describe_change
from ds_trainer.planner.search import SearchResult

_BAR = 34


def report(result: SearchResult, count: int) -> Iterator[str]:
    """The lines for a search."""
    best = result.best
    if best is None:
        yield from _nothing_fits(result)
        return
    yield from table(list(result.fitting[:count]))
    yield "Times are estimates with ranges, fitted to 8 published runs of dense models."
    yield from _cautious(result)
    yield ""
    yield from memory_bars(best)
    rejected = result.neighbors()
    if rejected:
        yield ""
        yield "Faster, but too large:"
        yield from (f"  {plan.candidate.describe()}: {plan.problem}" for plan in rejected)


def table(plans: list[Plan]) -> Iterator[str]:
    """Plans with their memory and speed."""
    names = [plan.candidate.describe() for plan in plans]
    width = max(len(name) for name in names)
    yield f"    {'plan':{width}}  {'memory':>8}  {'host/rank':>9}  {'step':>21}  {'tokens/s':>10}  {'MFU':>4}"
    for number, (plan, name) in enumerate(zip(plans, names, strict=True), 1):
        time = plan.time
        step = f"{seconds(time.seconds)} ({seconds(time.low)}-{seconds(time.high)})"
        yield (
            f"{number:>3} {name:{width}}  {plan.memory.device / 1e9:5.1f} GB  {plan.memory.host / 1e9:6.0f} GB  "
            f"{step:>21}  {plan.tokens_per_second:>10,.0f}  {plan.mfu:>4.0%}"
        )


def memory_bars(plan: Plan) -> Iterator[str]:
    """The largest moment of a plan, item by item, and the others in one line each."""
    items = {**plan.memory.peak.items, **plan.memory.overhead}
    total, room = plan.memory.device, plan.cluster.board.memory * 1e9
    yield f"Memory of a device, {total / 1e9:.1f} of {room / 1e9:.0f} GB; largest moment: {plan.memory.peak.name}"
    yield from _bars(items, max(room, total))
    others = [moment for moment in plan.memory.moments if moment is not plan.memory.peak]
    listed = ", ".join(f"{moment.name} {moment.total / 1e9:.1f}" for moment in others)
    yield from textwrap.wrap(
        f"Other moments, tensors in GB: {listed}", 110, initial_indent="  ", subsequent_indent="    "
    )
    machine, limit = plan.host_of_a_machine / 1e9, plan.cluster.host_memory
    available = "" if limit is None else f" of {limit:,.0f}"
    yield f"Host memory of a rank, {plan.memory.host / 1e9:,.1f} GB; of a machine, {machine:,.0f}{available} GB"
    yield from _bars(plan.memory.host_items, max(plan.memory.host, 1e9 * (limit or 0) / plan.cluster.devices_per_node))
    disk = f"NVMe of a machine: {plan.nvme / 1e9:,.0f} GB. " if plan.nvme else ""
    yield f"{disk}A checkpoint: {plan.memory.checkpoint / 1e9:.1f} GB."


def _bars(items: Mapping[str, float], whole: float) -> Iterator[str]:
    """A line with a bar for each item, the largest first."""
    width = max(len(name) for name in items)
    for name, size in sorted(items.items(), key=lambda item: -item[1]):
        yield f"  {name:{width}}  {size / 1e9:7.2f} GB  {'█' * round(_BAR * size / whole)}".rstrip()


def _cautious(result: SearchResult) -> Iterator[str]:
    """The fastest plan that fits with the most fragmentation that was measured."""
    low, high = (f"{100 * share:.0f}" for share in MEASURED_FRAGMENTATION)
    plan = result.cautious
    what = f"that fits with {high} % of fragmentation ({low} to {high} % were measured on an H100)"
    if plan is None:
        yield f"There is no plan {what}."
    elif plan is result.best:
        yield f"The first plan is also the fastest {what}."
    else:
        slower = plan.tokens_per_second / result.fitting[0].tokens_per_second
        yield f"Cautious, the fastest {what}:"
        yield (
            f"    {plan.candidate.describe()}: {plan.memory.device / 1e9:.1f} GB, "
            f"{plan.tokens_per_second:,.0f} tokens/s ({100 * slower:.3g} % of the first plan)"
        )


def changes(plans: Sequence[Plan], base: Plan) -> Iterator[str]:
    """What turns ``base`` into each of ``plans`` (:func:`~ds_trainer.planner.remedies.cheapest_changes`)."""
    for plan in plans:
        factor = plan.seconds / base.seconds
        yield (
            f"  {describe_change(base, plan)}: {plan.memory.device / 1e9:.1f} GB, step {seconds(plan.seconds)} "
            f"({factor:.2f} x the time)"
        )


def seconds(value: float) -> str:
    """A short time."""
    if value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.1f} s" if value < 100 else f"{value:.0f} s"


def as_json(plan: Plan) -> dict[str, Any]:
    """A plan as plain data: bytes and seconds."""
    memory, time = plan.memory, plan.time
    return {
        "arguments": plan.candidate.arguments(),
        "global_batch": plan.candidate.global_batch,
        "fits": not plan.problem,
        "problem": plan.problem,
        "memory": {
            "device": memory.device,
            "host": memory.host,
            "host_items": memory.host_items,
            "host_of_a_machine": plan.host_of_a_machine,
            "nvme_of_a_machine": plan.nvme,
            "checkpoint": memory.checkpoint,
            "overhead": dict(memory.overhead),
            "moments": {moment.name: dict(moment.items) for moment in memory.moments},
        },
        "seconds": {"low": time.low, "estimate": time.seconds, "high": time.high, "parts": time.parts},
        "tokens_per_second": plan.tokens_per_second,
        "mfu": plan.mfu,
    }


def _nothing_fits(result: SearchResult) -> Iterator[str]:
    yield "Nothing fits. Nearest:"
    for plan in result.rejected[:3]:
        yield f"  {plan.candidate.describe()}: {plan.problem}"
    yield from (f"  Impossible: {reason}." for reason in result.conflicts[:5])
    if not result.rejected:
        return
    nearest = result.rejected[0]
    plans = cheapest_changes(nearest)
    if plans:
        yield ""
        yield "The first of them would fit with"
        yield from changes(plans, nearest)
    yield ""
    yield from memory_bars(nearest)
