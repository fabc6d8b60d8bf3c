"""What to change for the next run: a few rules, each with the figures that lead to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ds_trainer.monitor import throughput
from ds_trainer.monitor.report.history import Session
from ds_trainer.monitor.report.run_files import RunFiles
from ds_trainer.utils.units import human_bytes, human_duration

_DATA_WAIT = 0.1  # of the time of steps
_FREE_MEMORY = 0.5  # of the limit
_LOW_MFU = 0.2
_OVERFIT = 0.02  # share by which the last evaluation loss is above the best
_LARGE_SHARE = 0.2  # of the run, for saves, evaluation, logging
_SPIKES = 3


class Advice(NamedTuple):
    """One change, and why."""

    change: str
    why: str


def advice_of(
    files: RunFiles, outcome: str, use: TimeUse, speed: Mapping[str, Any], memory: Mapping[str, Any], spikes: int
) -> list[Advice]:
    """What to change, the most urgent first.

    Args:
        files: what the run has written.
        outcome: its state.
        use: where the time went.
        speed, memory: these sections of the report.
        spikes: number of spikes of the loss.
    """
    all_advice = [
        *_failure(files, outcome),
        *_quality(files, spikes),
        *_speed(use, speed, memory),
        *_time(use, outcome),
    ]
    return all_advice


def _failure(files: RunFiles, outcome: str) -> list[Advice]:
    end = files.sessions[-1].end if files.sessions else None
    error = "" if end is None else f"{end.get('error')} {end.get('text')}"
    if outcome == "diverged":
        return [Advice("Lower learning_rate, or add warm-up (warmup_steps).", "The loss diverged.")]
    if "OutOfMemory" in error or "out of memory" in error:
        return [Advice("Use a smaller micro-batch with more gradient_accumulation_steps, or a higher ZeRO stage.",
                       "Device memory ran out.")]  # fmt: skip
    if outcome in ("killed", "stopped"):
        how = "Start the same command again: it resumes from the newest checkpoint with auto_resume=True."
        return [Advice(how, f"The run was {outcome} before its planned end.")]
    if outcome == "failed":
        return [Advice("See the error below, and start the command again after mending it.", "The run failed.")]
    return []


def _quality(files: RunFiles, spikes: int) -> list[Advice]:
    all_advice: list[Advice] = []
    if spikes >= _SPIKES:
        why = f"The loss had {spikes} spikes; the table below the curves has their samples where these are known."
        all_advice.append(
            Advice("Lower max_grad_norm or learning_rate, or set loss_spike_factor to skip such steps.", why)
        )
    for name, points in files.evaluation_losses().items():
        step, best = min(points, key=lambda point: point[1])
        last = points[-1][1]
        if len(points) > 2 and last > best * (1 + _OVERFIT):
            why = f"{name} rose from {best:.4g} at step {step:g} to {last:.4g}: the model begins to memorize."
            all_advice.append(Advice("Train for fewer steps, or set load_best_model_at_end=True.", why))
    if not files.evaluation_losses() and files.curve(files.loss_name):
        all_advice.append(Advice("Hold out some data and set eval_strategy.", "Nothing was evaluated."))
    return all_advice


def _speed(use: TimeUse, speed: Mapping[str, Any], memory: Mapping[str, Any]) -> list[Advice]:
    all_advice: list[Advice] = []
    wait = speed.get("data_wait")
    if wait is not None and wait > _DATA_WAIT:
        how = "Raise dataloader_num_workers, or tokenize before training (ds-trainer data prepare)."
        all_advice.append(Advice(how, f"{wait:.0%} of the time of steps is waiting for data."))
    limit, peak = memory.get("limit_bytes"), memory.get("peak_bytes")
    if memory.get("on_gpu") and limit and peak and peak < _FREE_MEMORY * limit:
        how = "Raise per_device_train_batch_size, and lower gradient_accumulation_steps by the same factor."
        all_advice.append(
            Advice(how, f"The peak of {human_bytes(peak)} is far below the {human_bytes(limit)} of a device.")
        )
    mfu = speed.get("mfu")
    if mfu is not None and mfu < _LOW_MFU:
        how = "Profile a few steps (profile_steps=5): larger micro-batches, longer or packed rows, torch_compile."
        all_advice.append(Advice(how, f"MFU is {mfu:.0%}, which is low."))
    communication = use.share(throughput.COMMUNICATION)
    if communication > _LARGE_SHARE:
        how = "Raise gradient_accumulation_steps or the micro-batch, or lower the ZeRO stage if memory allows."
        all_advice.append(Advice(how, f"{communication:.0%} of the time is waiting for other ranks."))
    return all_advice


def _time(use: TimeUse, outcome: str) -> list[Advice]:
    all_advice: list[Advice] = []
    if use.total <= 0:
        return all_advice
    rules = (
        ("evaluation", "Evaluate less often (eval_steps) or on fewer samples.", "evaluation"),
        ("saving", "Save less often (save_steps), or in the background (save_async=True).", "saving"),
        ("logging and callbacks", "Log less often (logging_steps), and look at your callbacks.", "between the steps"),
        ("lost to restarts", "Save more often (save_steps).", "lost to restarts"),
    )
    for part, how, what in rules:
        share, seconds = use.share(part), use.parts.get(part, 0.0)
        if share > _LARGE_SHARE / (2 if part == "lost to restarts" else 1):
            all_advice.append(Advice(how, f"{share:.0%} of the run ({human_duration(seconds)}) was {what}."))
    start = use.share(PROCESS, ENGINE)
    if outcome == "finished" and start > 0.5 and use.total > 600:
        how = "Prepare the data before the run, and check with ds-trainer doctor what the start waits for."
        all_advice.append(Advice(how, f"{start:.0%} of the run was its start."))
    return all_advice


# Where the seconds of a run went, over all its processes.


PROCESS, ENGINE, LOST = "start-up: process and data", "start-up: model and engine", "lost to restarts"
_OF_STEPS = (
    *(throughput.DATA, throughput.FORWARD, throughput.BACKWARD, throughput.COMMUNICATION),
    *(throughput.OPTIMIZER, throughput.BETWEEN),
)
_NAMES = {
    throughput.BETWEEN: "logging and callbacks",
    throughput.START: ENGINE,
    "on_train_begin": "logging and callbacks",
    "the end of training": "end of the training",
}
_ORDER = (PROCESS, ENGINE, throughput.CHECKS, *_OF_STEPS[:-1], "logging and callbacks", "evaluation", "saving")


@dataclass
class TimeUse:
    """Seconds of the main process, which are those of every device.

    Attributes:
        total: from the start of every process to its end.
        parts: seconds by part; they add up to ``total``.
        between: seconds between processes, in which the job had none. Not part of ``total``.
        repeated_steps: steps that were done again after a restart.
    """

    total: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    between: float = 0.0
    repeated_steps: int = 0

    def share(self, *names: str) -> float:
        """The share of the total that parts have, 0 to 1."""
        return sum(self.parts.get(name, 0.0) for name in names) / self.total if self.total > 0 else 0.0

    @property
    def training(self) -> float:
        """Seconds of steps."""
        return sum(self.parts.get(name, 0.0) for name in _OF_STEPS)


def time_use(files: RunFiles) -> TimeUse:
    """Where the time went; empty without a history."""
    use = TimeUse()
    parts: dict[str, float] = {}
    for number, session in enumerate(files.sessions):
        own = _parts(session)
        following = files.sessions[number + 1] if number + 1 < len(files.sessions) else None
        if following is not None:
            use.between += max(0.0, following.began - session.time)
            repeated = session.step - following.first_step
            if repeated > 0:
                use.repeated_steps += repeated
                _lose(own, _lost_seconds(session, following))
        for name, seconds in own.items():
            parts[name] = parts.get(name, 0.0) + seconds
    order = {name: place for place, name in enumerate(_ORDER)}
    use.parts = {name: parts[name] for name in sorted(parts, key=lambda name: order.get(name, 99)) if parts[name] > 0}
    use.total = sum(use.parts.values())
    return use


def _parts(session: Session) -> dict[str, float]:
    """Seconds by part of one process; what its clock has not seen is the start of the engine."""
    wall = session.wall_seconds
    process = min(wall, max(0.0, float(session.start.get("train_called") or session.began) - session.began))
    parts: dict[str, float] = {PROCESS: process}
    for name, seconds in session.seconds.items():
        name = _NAMES.get(name, name)
        parts[name] = parts.get(name, 0.0) + seconds
    rest = wall - process - sum(session.seconds.values())
    parts[ENGINE] = parts.get(ENGINE, 0.0) + max(0.0, rest)
    return parts


def _lost_seconds(session: Session, following: Session) -> float:
    """Seconds of ``session`` after the checkpoint from which ``following`` continued."""
    written = following.start.get("resumed_written")
    if isinstance(written, (int, float)) and session.began <= written <= session.time:
        return session.time - float(written)
    done = max(1, session.step - session.first_step)
    of_training = sum(session.seconds.values())
    return of_training * min(1.0, (session.step - following.first_step) / done)


def _lose(parts: dict[str, float], seconds: float) -> None:
    """Count ``seconds`` as lost instead of as training, in proportion."""
    names = [name for name in parts if name not in (PROCESS, ENGINE)]
    available = sum(parts[name] for name in names)
    seconds = min(seconds, available)
    if available > 0:
        for name in names:
            parts[name] -= seconds * parts[name] / available
        parts[LOST] = parts.get(LOST, 0.0) + seconds
