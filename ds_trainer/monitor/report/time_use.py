"""Where the seconds of a run went, over all its processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from ds_trainer.monitor import throughput
from ds_trainer.monitor.report.history import Session
from ds_trainer.monitor.report.run_files import RunFiles

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
    found: dict[str, float] = {PROCESS: process}
    for name, seconds in session.seconds.items():
        name = _NAMES.get(name, name)
        found[name] = found.get(name, 0.0) + seconds
    rest = wall - process - sum(session.seconds.values())
    found[ENGINE] = found.get(ENGINE, 0.0) + max(0.0, rest)
    return found


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
