"""The files of a run that its report is made of, read once."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_trainer.monitor.metrics_file import LOSSES, read_records
from ds_trainer.monitor.report.history import HISTORY_NAME, Session, read_sessions
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import directory_problem, read_json
from ds_trainer.utils.logging import get_logger

logger = get_logger("monitor.report")

METRICS_NAME = "metrics.jsonl"
DATA_CARD_NAME = "data_card.json"
"""Optional: the description of the data, written by what prepares them (docs/how-to/report.md)."""
_EVALUATION_LOSS = re.compile(r"eval_(\w+_)?loss")
_SOURCE_LOSS = re.compile(r"((?:eval_(?:\w+_)?)?loss)/(.+)", re.DOTALL)
_NOT_LOGGED = re.compile(r"train_.*|total_flos|eval_(\w+_)?(runtime|\w+_per_second|items|model_preparation_time)")
_OF_EXPERTS = re.compile(r"experts/(.+)/(entropy|busiest_share|dead|exchange_seconds)")
_POSITION = ("step", "epoch", "time")

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class RunFiles:
    """What is known about a run.

    Attributes:
        directory: its output directory.
        records: ``metrics.jsonl``, oldest first.
        sessions: the processes that trained it, oldest first.
        stragglers: step times of the ranks, by window.
        profile: figures of profiled steps; None without.
        results: ``results.json`` of a recipe; None without.
        data: the data card; None without.
        notes: files with details about incidents, relative to the directory.
    """

    directory: Path
    records: list[dict[str, Any]]
    sessions: list[Session]
    stragglers: list[dict[str, Any]] = field(default_factory=list)
    profile: dict[str, Any] | None = None
    results: dict[str, Any] | None = None
    data: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, directory: Path) -> RunFiles:
        """Read the files in ``directory``.

        Raises:
            ConfigError: it is not the output directory of a run.
        """
        if (problem := directory_problem(directory)) or not directory.is_dir():
            problem = problem or "is not a directory"
            raise ConfigError(f"{directory} {problem}: pass the output directory of a training.")
        if not any((directory / name).is_file() for name in (METRICS_NAME, HISTORY_NAME)):
            raise ConfigError(
                f"{directory} has neither {METRICS_NAME} nor {HISTORY_NAME}: pass the output directory of a training."
            )
        incidents = [*directory.glob("divergence/step-*"), *directory.glob("health/hang-*")]
        return cls(
            directory,
            read_records(directory / METRICS_NAME),
            read_sessions(directory),
            read_records(directory / "health" / "stragglers.jsonl"),
            profile=_mapping(directory / "profile" / "profile.json"),
            results=_mapping(directory / "results.json"),
            data=_mapping(directory / DATA_CARD_NAME),
            notes=sorted(str(path.relative_to(directory)) for path in incidents),
        )

    @property
    def start(self) -> dict[str, Any]:
        """What the newest process recorded at its start; empty without a history."""
        return self.sessions[-1].start if self.sessions else {}

    @property
    def summary(self) -> Mapping[str, Any]:
        """The sizes of the run, as in its header; empty without a history."""
        summary = self.start.get("summary")
        return summary if isinstance(summary, dict) else {}

    @property
    def last_step(self) -> int:
        """The last step known."""
        logged = [int(record["step"]) for record in self.records if is_number(record.get("step"))]
        return max([*logged[-1:], *(session.step for session in self.sessions[-1:])], default=0)

    @property
    def loss_name(self) -> str:
        """What the training loss is called: ``loss``, or the name of one that is not the loss of an evaluation."""
        return next((name for record in self.records for name in LOSSES[1:] if name in record), LOSSES[0])

    def curve(self, name: str) -> Points:
        """``(step, value)`` of every finite logged value of ``name``."""
        return [
            (float(record["step"]), float(record[name]))
            for record in self.records
            if is_number(record.get("step")) and is_number(record.get(name))
        ]

    def not_finite(self, name: str) -> list[float]:
        """The steps at which ``name`` was NaN or infinite."""
        return [
            float(record["step"])
            for record in self.records
            if is_number(record.get("step")) and record.get(f"{name}_nonfinite")
        ]

    def evaluation_losses(self) -> dict[str, Points]:
        """The losses of the evaluations, by name."""
        names = dict.fromkeys(name for record in self.records for name in record if _EVALUATION_LOSS.fullmatch(name))
        return {name: points for name in names if (points := self.curve(name))}

    def source_losses(self) -> dict[str, dict[str, Points]]:
        """The losses of the sources of a mixture, by the name of the loss (``loss``, ``eval_loss``) and the source."""
        losses: dict[str, dict[str, Points]] = {}
        for key in dict.fromkeys(key for record in self.records for key in record):
            name = _SOURCE_LOSS.fullmatch(key)
            if name is not None and (points := self.curve(key)):
                losses.setdefault(name[1], {})[name[2]] = points
        return losses

    def expert_loads(self) -> dict[str, dict[str, float]]:
        """The last logged loads of divided experts, by layer and quantity."""
        loads: dict[str, dict[str, float]] = {}
        for key in dict.fromkeys(key for record in self.records for key in record):
            name = _OF_EXPERTS.fullmatch(key)
            if name is not None and (value := self.last(key)) is not None:
                loads.setdefault(name[1], {})[name[2]] = value
        return loads

    def quantities(self) -> list[str]:
        """Names of everything that is logged during the training except losses of sources, by their first records."""
        names = dict.fromkeys(name for record in self.records for name, value in record.items() if is_number(value))
        hidden = (_NOT_LOGGED, _SOURCE_LOSS, _OF_EXPERTS)
        return [name for name in names if name not in _POSITION and not any(one.fullmatch(name) for one in hidden)]

    def last(self, name: str) -> float | None:
        """The last value of ``name``; None if it was never a finite number."""
        values = (record[name] for record in reversed(self.records) if is_number(record.get(name)))
        return next((float(value) for value in values), None)


def is_number(value: Any) -> bool:
    """Whether ``value`` is a finite number."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that is larger than every float
        return False


def _mapping(path: Path) -> dict[str, Any] | None:
    """The JSON object in ``path``; None if there is none. One that cannot be read is left out with a warning."""
    try:
        value = read_json(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("%s cannot be read (%s): the report leaves it out", path, error)
        return None
    return value if isinstance(value, dict) else None
