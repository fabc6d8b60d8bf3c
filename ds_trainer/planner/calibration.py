"""``Calibration``: how much longer steps took, and how much more memory, than was predicted on a kind of device.

``calibrate_planner=True`` measures it in a run. It is kept in a file of the user, by device and model family, and
applies to later predictions there. So is what ``ds-trainer plan --probe`` measured, by the sizes of the model's layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ds_trainer.planner.activations.probed import Probe
from ds_trainer.planner.cluster import Cluster
from ds_trainer.planner.planned_model import PlannedModel
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import read_json, user_cache, write_json

if TYPE_CHECKING:
    from ds_trainer.planner.search import Goal

VERSION = 1
Entry = TypeVar("Entry")
_LEAST, _MOST = 0.1, 100.0  # a ratio beyond is a defect, not a calibration


@dataclass(frozen=True)
class Calibration:
    """Means over runs.

    Attributes:
        step_seconds: measured / predicted seconds of a step.
        memory: measured / predicted bytes of tensors; None if it was not measured.
        runs: number of runs.
        busiest_expert: share of a layer's tokens that its busiest expert gets; None without divided experts.
    """

    step_seconds: float
    memory: float | None = None
    runs: int = 1
    busiest_expert: float | None = None

    def describe(self) -> str:
        """In a few words, for reports."""
        memory = "" if self.memory is None else f", memory x {self.memory:.2f}"
        experts = "" if self.busiest_expert is None else f", busiest expert {100 * self.busiest_expert:.1f} % of tokens"
        runs = f"{self.runs} run{'s' if self.runs > 1 else ''}"
        return f"corrected by {runs}: time x {self.step_seconds:.2f}{memory}{experts}"

    def with_run(self, run: Calibration) -> Calibration:
        """The means with another run."""

        def mean(before: Any, value: Any) -> Any:
            if value is None or before is None:
                return before if value is None else value
            return (before * self.runs + value) / (self.runs + 1)

        names = ("step_seconds", "memory", "busiest_expert")
        return Calibration(
            **{name: mean(getattr(self, name), getattr(run, name)) for name in names}, runs=self.runs + 1
        )

    def applied(self, model: PlannedModel, cluster: Cluster, goal: Goal) -> tuple[PlannedModel, Cluster, Goal]:
        """The three with routing, speeds and a margin, so that a search takes the corrections into account."""
        peaks, board, slower = cluster.peaks, cluster.board, self.step_seconds
        formats = {name: getattr(peaks, name) for name in ("bf16", "fp16", "tf32", "fp32")}
        peaks = replace(peaks, **{name: value and value / slower for name, value in formats.items()})
        rates = {
            name: getattr(board, name) / slower
            for name in ("bandwidth", "link", "host", "network", "nvme_read", "nvme_write")
        }
        goal = replace(goal, margin=self.margin(goal.margin))
        cluster = replace(cluster, peaks=peaks, board=replace(board, **rates))
        return replace(model, busiest_expert=self.busiest_expert), cluster, goal

    def margin(self, margin: float) -> float:
        """``margin`` of a device's memory, and what uncorrected predictions lack."""
        return 1 - (1 - margin) / (self.memory or 1.0)


def calibration_file(environment: Mapping[str, str] | None = None) -> Path:
    """``$XDG_CACHE_HOME/ds_trainer/calibration.json``, by default in ``~/.cache``."""
    return user_cache(environment) / "calibration.json"


def read_calibration(device: str, family: str, path: Path | None = None) -> Calibration | None:
    """The calibration of a device for a model family; None if there is none.

    Raises:
        ConfigError: the file is damaged, or of another version.
    """
    return _read(path or calibration_file()).get(_key(device, family))


def record_run(
    device: str,
    family: str,
    step_seconds: float,
    memory: float | None,
    path: Path | None = None,
    busiest_expert: float | None = None,
) -> Calibration:
    """Add a run to the file. Its ratios are those of uncorrected predictions.

    Raises:
        ConfigError: the file is damaged, or of another version; a ratio is impossible.
    """
    path = path or calibration_file()
    run = Calibration(step_seconds, memory, busiest_expert=busiest_expert)
    for ratio in (step_seconds, memory):
        if ratio is not None and not _LEAST <= ratio <= _MOST:
            raise ConfigError(f"The run is no calibration: it took {ratio:.3g} times what was predicted.")
    entries = _read(path)
    before = entries.get(_key(device, family))
    new = run if before is None else before.with_run(run)
    entries[_key(device, family)] = new
    _write(path, entries, _read_probes(path))
    return new


def read_probe(model: PlannedModel, number_format: str, path: Path | None = None) -> Probe | None:
    """What ``--probe`` measured last of a model with layers of these sizes; None if nothing.

    Args:
        model: the model.
        number_format: ``bf16`` or ``fp32``.
        path: the file; default: that of the user.

    Raises:
        ConfigError: the file is damaged, or of another version.
    """
    return _read_probes(path or calibration_file()).get(_layer_key(model, number_format))


def record_probe(model: PlannedModel, probe: Probe, path: Path | None = None) -> None:
    """Keep a probe instead of an earlier one of the same layers.

    Raises:
        ConfigError: the file is damaged, or of another version.
    """
    path = path or calibration_file()
    probes = {**_read_probes(path), _layer_key(model, probe.number_format): probe}
    _write(path, _read(path), probes)


def _layer_key(model: PlannedModel, number_format: str) -> str:
    stack = model.stack
    sizes = (stack.hidden_size, stack.intermediate_size, stack.heads, stack.kv_heads, stack.head_dim, stack.experts)
    return f"{model.family} / {' '.join(map(str, sizes))} / {model.rows} / {number_format}"


def _write(path: Path, calibrations: Mapping[str, Calibration], probes: Mapping[str, Probe]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content: dict[str, Mapping[str, Any]] = {"calibrations": calibrations, "probes": probes}
    plain = {name: {key: asdict(one) for key, one in entries.items()} for name, entries in content.items()}
    write_json(path, {"version": VERSION, **plain})


def _key(device: str, family: str) -> str:
    return f"{device} / {family}"


def _read(path: Path) -> dict[str, Calibration]:
    return _entries(path, "calibrations", _checked)


def _read_probes(path: Path) -> dict[str, Probe]:
    return _entries(path, "probes", _checked_probe)


def _entries(path: Path, name: str, checked: Callable[[Any], Entry]) -> dict[str, Entry]:
    if not path.exists():
        return {}
    try:
        content = read_json(path)
        version = content["version"]
        if version == VERSION:
            return {key: checked(entry) for key, entry in content.get(name, {}).items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"The calibrations of the planner in {path} cannot be read: {type(error).__name__} {error}. Delete "
            "the file."
        ) from error
    raise ConfigError(
        f"The calibrations of the planner in {path} have version {version!r}, but this version of ds_trainer reads "
        f"{VERSION}. Delete the file, or use the version that wrote it."
    )


def _checked_probe(entry: Any) -> Probe:
    probe = Probe(**{**entry, "lengths": tuple(entry["lengths"]), "layer": tuple(entry["layer"])})
    if len(probe.lengths) != 2 or len(probe.layer) != 2 or not all(size > 0 for size in (*probe.layer, probe.loss)):
        raise ValueError(f"{entry} is no probe")
    return probe


def _checked(entry: Any) -> Calibration:
    calibration = Calibration(**entry)
    for ratio in (calibration.step_seconds, 1.0 if calibration.memory is None else calibration.memory):
        if not _LEAST <= ratio <= _MOST:
            raise ValueError(f"{ratio} is no ratio of measured to predicted values")
    if not 0 < (1.0 if calibration.busiest_expert is None else calibration.busiest_expert) <= 1:
        raise ValueError(f"{calibration.busiest_expert} is no share of tokens")
    return calibration
