"""Profiles some steps of a run with torch.profiler: a trace, and a page that says where the time goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ds_trainer.monitor.health.heartbeat import COMPUTE, DATA, UPDATE
from ds_trainer.monitor.kernel_groups import covered, group_seconds, table
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.output_files import keep_of_user, note_written, write_output, write_output_json
from ds_trainer.utils.units import counted

logger = get_logger(__name__)

T = TypeVar("T")

WARMUP_STEPS = 2
"""Steps before the first profiled one: they allocate memory and verify the loss."""
FOLDER, TRACE, PAGE, FIGURES = "profile", "trace.json.gz", "profile.md", "profile.json"
_OPERATORS = 15


class StepProfiler:
    """Profiles consecutive optimizer steps on this rank.

    The files are written to ``directory/profile``: ``trace.json.gz`` (for https://ui.perfetto.dev or chrome://tracing),
    ``profile.md`` and ``profile.json``.

    Args:
        steps: number of steps to profile.
        available: steps of the run. If it is too short, there is less or no warm-up, or fewer steps are profiled.
        directory: output directory of the run.
        device: device of this rank.
        best: seconds of the parts of a step that is as fast as the planner thinks it can be; None if it does not know.
        standing: what to say about a step of so many seconds.
    """

    def __init__(
        self,
        steps: int,
        available: int,
        directory: Path,
        device: torch.device,
        best: Mapping[str, float] | None = None,
        standing: Callable[[float], str] | None = None,
    ) -> None:
        self._best, self._standing = best, standing
        self._steps = min(steps, available)
        self._to_skip = min(WARMUP_STEPS, available - self._steps)
        self._directory = directory / FOLDER
        self._device = device
        self._profiler: Any = None
        self._phase: AbstractContextManager[Any] | None = None
        self._done = 0

    def phase(self, name: str) -> None:
        """A phase of the step begins, and with it the previous one ends."""
        if self._profiler is None:
            return
        self._end_phase()
        self._phase = record_function(PHASE_PREFIX + name)
        self._phase.__enter__()

    def run(self, step: Callable[[], T]) -> T:
        """Run ``step``, and profile it if it is its turn."""
        if self._to_skip > 0:
            self._to_skip -= 1
            return step()
        if self._done == self._steps:
            return step()
        if self._profiler is None:
            activities = [ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profiler = profile(activities=activities)
            self._profiler.start()
        try:
            result = step()
        except BaseException as error:
            self._end_phase()
            # Stop profiling without files, because a step failed.
            profiler, self._profiler = self._profiler, None
            if self._device.type == "cpu":  # elsewhere stopping waits for the device, which may wait for another rank
                profiler.stop()
            logger.warning(
                "the profile is lost after %s: a step failed (%s).", counted(self._done, "step"), type(error).__name__
            )
            raise
        self._end_phase()
        self._done += 1
        if self._done == self._steps:
            self.finish()
        return result

    def finish(self) -> None:
        """Stop profiling and write the files; does nothing if nothing is being profiled."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        self._steps = self._done
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        profiler.stop()
        self._directory.mkdir(parents=True, exist_ok=True)
        keep_of_user(self._directory / TRACE)
        profiler.export_chrome_trace(str(self._directory / TRACE))
        note_written(self._directory / TRACE)
        figures = step_profile(profiler, self._done)
        content = figures.to_dict() | ({"at_best": self._best} if self._best else {})
        write_output_json(self._directory / FIGURES, content)
        standing = self._standing(figures.seconds) if self._standing else ""
        text = page_text(figures, TRACE, self._best, standing)
        write_output(self._directory / PAGE, text)
        logger.info("profile of %s (%s):\n%s", counted(self._done, "step"), self._directory / PAGE, text)

    def _end_phase(self) -> None:
        phase, self._phase = self._phase, None
        if phase is not None:
            phase.__exit__(None, None, None)


def step_profile(profiler: Any, steps: int) -> StepProfile:
    """The figures of a finished ``torch.profiler.profile`` over ``steps`` steps."""
    events = profiler.events()
    on_host = [event for event in events if event.device_type.name == "CPU"]
    spans = [
        Span(event.time_range.start, event.time_range.end, kind)
        for event in on_host
        if (kind := kind_of(event.name)) is not None
    ]
    operators = sorted(profiler.key_averages(), key=lambda row: row.self_cpu_time_total, reverse=True)
    rows = [
        (row.key, row.self_cpu_time_total / 1e6 / steps, row.count / steps)
        for row in operators
        if not row.key.startswith(PHASE_PREFIX)
    ]
    # Ranges of record_function are on the timeline of the device too, from their first kernel to their last one.
    on_device = [event for event in events if event.device_type.name != "CPU" and not event.is_user_annotation]
    kernels = [(event.name, event.time_range.start, event.time_range.end) for event in on_device]
    ranges = [event for event in events if event.name == PHASE_PREFIX + UPDATE]
    updates = [(e.time_range.start, e.time_range.end) for e in ranges if (e.device_type.name == "CPU") != bool(kernels)]
    phases = [span for span in spans if span.kind in PHASES.values()] or [Span(0, 0, Kind.COMPUTE)]
    begin, end = min(one.start for one in phases), max(one.end for one in phases)
    computed = [(*kernel, kernel[2] - kernel[1]) for kernel in kernels if "nccl" not in kernel[0].lower()]
    wires = [kernel[1:] for kernel in kernels if "nccl" in kernel[0].lower()]
    if kernels:  # the device runs behind the host
        end = max(end, *(last for _, _, last in kernels))
    else:
        computed = [
            (event.name, event.time_range.start, event.time_range.end, event.self_cpu_time_total)
            for event in on_host
            if kind_of(event.name) is Kind.OPERATOR
        ]
        wires = [(span.start, span.end) for span in spans if span.kind is Kind.COMMUNICATION]
    return StepProfile(
        steps,
        {part: seconds / steps for part, seconds in breakdown(spans).items()},
        rows[:_OPERATORS],
        DeviceTimes.of(kernels, steps) if kernels else None,
        group_seconds(computed, wires, updates, window=(begin, end), steps=steps),
    )


# Where the time of profiled steps goes: spans of a timeline, attributed to the parts of a step.
#
# Pure arithmetic over recorded spans; :mod:`ds_trainer.monitor.step_profiler` records them with torch.profiler.


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


# The figures of profiled steps, and the page that shows them.


_ADVICE = {
    "data": "Set dataloader_num_workers, or tokenize before training: the step waits for its batches.",
    "communication": "The step waits for other ranks. Increase gradient_accumulation_steps or the micro-batch, or "
    "use a lower ZeRO stage if memory allows.",
    "optimizer": "Increase gradient_accumulation_steps, or use optim='adamw_torch_fused'; with offload, the optimizer "
    "runs on the host.",
    "Python": "The operators are too small to hide the time of the interpreter. Increase the micro-batch, turn "
    "activation_checkpointing off if memory allows, or set torch_compile.",
    "callbacks": "Callbacks, logging, or an evaluation or save among these steps: log less often (logging_steps), or "
    "set eval_steps and save_steps so that none falls between the profiled steps.",
}
_LARGE = 0.15  # of the step
_IDLE = 0.1  # of the step


@dataclass(frozen=True)
class DeviceTimes:
    """Seconds of a step on the GPU.

    Attributes:
        compute, communication, copies: time in kernels of each kind; kinds may overlap.
        idle: time between the first and the last kernel in which none ran.
        kernels: number of kernels.
        longest: ``(name, seconds)`` of the kernels that took the most time.
    """

    compute: float
    communication: float
    copies: float
    idle: float
    kernels: float
    longest: list[tuple[str, float]]

    @classmethod
    def of(cls, kernels: Sequence[tuple[str, float, float]], steps: int) -> DeviceTimes:
        """From ``(name, start, end)`` in microseconds of all kernels of ``steps`` steps."""
        seconds = dict.fromkeys(("compute", "communication", "copies"), 0.0)
        by_name: Counter[str] = Counter()
        for name, start, end in kernels:
            kind = (
                "communication"
                if "nccl" in name.lower()
                else "copies"
                if name.startswith(("Memcpy", "Memset"))
                else "compute"
            )
            seconds[kind] += (end - start) / 1e6
            by_name[name] += end - start  # type: ignore[assignment]  # a Counter of floats
        whole = max(end for _, _, end in kernels) - min(start for _, start, _ in kernels)
        return cls(
            **{kind: value / steps for kind, value in seconds.items()},
            idle=(whole - covered((start, end) for _, start, end in kernels)) / 1e6 / steps,
            kernels=len(kernels) / steps,
            longest=[(name, value / 1e6 / steps) for name, value in by_name.most_common(10)],
        )


@dataclass(frozen=True)
class StepProfile:
    """The mean of some profiled steps on one rank.

    Attributes:
        steps: number of profiled steps.
        parts: seconds of each part on the host (:data:`ds_trainer.monitor.step_profiler.PARTS`).
        operators: ``(name, seconds of its own, calls)`` of the operators that took the most time of the host.
        device: times on the GPU; None without one.
        groups: seconds of each group of kernels, on a CPU of operators (:mod:`ds_trainer.monitor.kernel_groups`).
    """

    steps: int
    parts: dict[str, float]
    operators: list[tuple[str, float, float]]
    device: DeviceTimes | None = None
    groups: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Seconds of a step, with the time between two steps."""
        return sum(self.parts.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"step_seconds": self.seconds, **asdict(self)}


def page_text(profile: StepProfile, trace: str, best: Mapping[str, float] | None = None, standing: str = "") -> str:
    """The page in Markdown: groups of kernels beside the planner's best, parts, advice, operators, kernels if any."""
    whole = profile.seconds or 1.0
    lines = [
        f"# Where the time of a step goes: mean of {counted(profile.steps, 'step')}, {1e3 * profile.seconds:.1f} ms",
        "",
        *([standing, ""] if standing else []),
        *(table(profile.groups, best) if profile.groups else []),
        "| part | ms | share |",
        "|---|---:|---:|",
        *(f"| {part} | {1e3 * value:.2f} | {100 * value / whole:.1f} % |" for part, value in profile.parts.items()),
        "",
        "Times of the host on rank 0, measured with the profiler on, which itself slows Python down. Recomputed "
        "activations count as backward. Communication is what does not overlap with computation, waiting for slower "
        "ranks included.",
        "",
    ]
    # A GPU that is never idle hides what the host does.
    waits = profile.device is None or profile.device.idle > _IDLE * whole
    advice = [
        f"- **{part}**: {text}" for part, text in _ADVICE.items() if waits and profile.parts[part] > _LARGE * whole
    ]
    lines += [*advice, ""] if advice else []
    if profile.device is not None:
        lines += _device_lines(profile.device)
    lines += ["| operator | ms of its own | calls |", "|---|---:|---:|"]
    lines += [f"| `{name}` | {1e3 * value:.2f} | {calls:g} |" for name, value, calls in profile.operators]
    lines += ["", f"Timeline: open {trace} in https://ui.perfetto.dev.", ""]
    return "\n".join(lines)


def _device_lines(device: DeviceTimes) -> list[str]:
    parts = {name: getattr(device, name) for name in ("compute", "communication", "copies", "idle")}
    return [
        f"On the GPU: {device.kernels:.0f} kernels per step. Kinds may overlap; idle is time without any kernel.",
        "",
        "| GPU | ms |",
        "|---|---:|",
        *(f"| {name} | {1e3 * value:.2f} |" for name, value in parts.items()),
        "",
        "| kernel | ms |",
        "|---|---:|",
        *(f"| `{name[:100]}` | {1e3 * value:.2f} |" for name, value in device.longest),
        "",
    ]
