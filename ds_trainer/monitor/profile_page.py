"""The figures of profiled steps, and the page that shows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ds_trainer.utils.units import counted

_ADVICE = {
    "data": "Set dataloader_num_workers, or tokenize before training: the step waits for its batches.",
    "communication": "The step waits for other ranks. Increase gradient_accumulation_steps or the micro-batch, set "
    "overlap_comm in the DeepSpeed configuration, or use a lower ZeRO stage if memory allows.",
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
        busy, until = 0.0, float("-inf")
        for _, start, end in sorted(kernels, key=lambda kernel: kernel[1]):
            busy += max(0.0, end - max(start, until))
            until = max(until, end)
        whole = until - min(start for _, start, _ in kernels)
        return cls(
            **{kind: value / steps for kind, value in seconds.items()},
            idle=(whole - busy) / 1e6 / steps,
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
    """

    steps: int
    parts: dict[str, float]
    operators: list[tuple[str, float, float]]
    device: DeviceTimes | None = None

    @property
    def seconds(self) -> float:
        """Seconds of a step, with the time between two steps."""
        return sum(self.parts.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"step_seconds": self.seconds, **asdict(self)}


def page_text(profile: StepProfile, trace: str) -> str:
    """The page in Markdown: parts, advice, operators, and kernels if there are any."""
    whole = profile.seconds or 1.0
    lines = [
        f"# Where the time of a step goes: mean of {counted(profile.steps, 'step')}, {1e3 * profile.seconds:.1f} ms",
        "",
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
