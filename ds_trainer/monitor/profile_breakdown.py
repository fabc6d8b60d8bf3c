"""Where the time of profiled steps goes: spans of a timeline, attributed to the parts of a step.

Pure arithmetic over recorded spans; :mod:`ds_trainer.monitor.step_profiler` records them with torch.profiler.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from ds_trainer.monitor.health.heartbeat import COMPUTE, DATA, UPDATE

PARTS = ("data", "forward", "backward", "communication", "optimizer", "Python", "callbacks")
"""The parts of a step. *Communication* is the time in which nothing but communication was in progress: what overlaps
with computation costs nothing. *Python* is the time in which no operator ran. *Callbacks* is the time between steps."""


class Kind(Enum):
    """What a span records."""

    DATA = "fetching the micro-batches of a step"
    COMPUTE = "forward and backward passes of a step"
    UPDATE = "the update of the weights"
    OPERATOR = "an operator of torch"
    BACKWARD = "a node of the backward pass"
    COMMUNICATION = "a collective or a point-to-point operation, from its start to its end"


PHASES = {DATA: Kind.DATA, COMPUTE: Kind.COMPUTE, UPDATE: Kind.UPDATE}
"""The phases of a step that :class:`~ds_trainer.monitor.health.run_health.RunHealth` announces."""
PHASE_PREFIX = "ds_trainer."
_COMMUNICATION = ("gloo:", "nccl:", "mpi:", "xccl:", "c10d::", "record_param_comms")
_WRAPPERS = ("autograd::", "torch::autograd::", "torch::distributed")  # they contain the operators


@dataclass(frozen=True)
class Span:
    """A part of the timeline.

    Attributes:
        start, end: microseconds.
        kind: what happened.
    """

    start: float
    end: float
    kind: Kind


def kind_of(name: str) -> Kind | None:
    """The kind of a recorded event; None for one that only contains others."""
    if name.startswith(PHASE_PREFIX):
        return PHASES.get(name.removeprefix(PHASE_PREFIX))
    if name.startswith(_COMMUNICATION):
        return Kind.COMMUNICATION
    if name.startswith("autograd::engine::evaluate_function"):
        return Kind.BACKWARD
    return Kind.OPERATOR if "::" in name and not name.startswith(_WRAPPERS) else None


def breakdown(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds of each of :data:`PARTS`, from the start of the first phase to the end of the last one.

    Every moment counts for one part, so that the parts add up to the whole.
    """
    spans = [span for span in spans if span.end > span.start]
    phases = [span for span in spans if span.kind in PHASES.values()]
    seconds = dict.fromkeys(PARTS, 0.0)
    if not phases:
        return seconds
    begin, end = min(span.start for span in phases), max(span.end for span in phases)
    borders = [(at, change, span.kind) for span in spans for at, change in ((span.start, 1), (span.end, -1))]
    active = dict.fromkeys(Kind, 0)
    before = begin
    for at, change, kind in sorted(borders, key=lambda border: border[0]):
        now = min(max(at, begin), end)
        if now > before:
            seconds[_part(active)] += (now - before) / 1e6
            before = now
        active[kind] += change
    return seconds


def _part(active: Mapping[Kind, int]) -> str:
    """The part of a moment in which these kinds of spans are open."""
    if active[Kind.DATA]:
        return "data"
    if not (active[Kind.COMPUTE] or active[Kind.UPDATE]):
        return "callbacks"
    if active[Kind.OPERATOR]:
        return "backward" if active[Kind.BACKWARD] else "optimizer" if active[Kind.UPDATE] else "forward"
    return "communication" if active[Kind.COMMUNICATION] else "Python"
