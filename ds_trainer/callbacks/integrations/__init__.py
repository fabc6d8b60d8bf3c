"""Experiment trackers: ``report_to`` as callbacks. A tracker is imported only if it is requested.

Four trackers have a module here; for the others the callback of transformers is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ds_trainer.callbacks.integrations.tracker import Tracker, import_tracker, switched_off
from ds_trainer.utils.errors import ConfigError, did_you_mean
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.ranks import likely_rank

logger = get_logger("callbacks.integrations")


@dataclass(frozen=True)
class TrackerSpec:
    """One tracker.

    Attributes:
        name: its name in ``report_to``.
        package: the package to import.
        install: what ``pip install`` takes.
        callback: name of the callback's class.
        own: module of this package with the callback; empty for a callback of transformers.
        each_machine: whether one process of each machine reports, not only the main process.
        in_all: whether it is part of ``report_to="all"``.
    """

    name: str
    package: str
    install: str
    callback: str
    own: str = ""
    each_machine: bool = False
    in_all: bool = True

    @property
    def missing(self) -> str:
        """Why it cannot be used, as a sentence with the remedy; empty if it can."""
        remedy = f"or take {self.name} out of report_to."
        switch = "DISABLE_MLFLOW_INTEGRATION"
        if self.name == "mlflow" and os.environ.get(switch, "").upper() == "TRUE":
            return f"report_to={self.name}, but {switch}=TRUE (environment). Unset it, {remedy}"
        needed = [(self.package, self.install), *([] if self.own else [("transformers", "transformers")])]
        if self.name == "dagshub":
            needed.append(("mlflow", "mlflow"))
        absent = [(package, install) for package, install in needed if not _is_installed(package)]
        if not absent:
            return ""
        packages = " and ".join(package for package, _ in absent)
        pip = " ".join(f"'{i}'" if "[" in i or "<" in i else i for _, i in absent)
        verb = "are" if len(absent) > 1 else "is"
        return f"report_to={self.name}: {packages} {verb} not installed. Run `pip install {pip}`, {remedy}"

    def make(self, deepspeed_config: Callable[[], Mapping[str, Any]] | None) -> Any:
        """The callback."""
        if self.own:
            callback = getattr(import_module(f"{__name__}.{self.own}"), self.callback)
            return callback(deepspeed_config=deepspeed_config)
        return reused_callback(self.name, self.callback, self.package, self.install)


ROWS: tuple[TrackerSpec, ...] = (
    TrackerSpec("tensorboard", "tensorboard", "tensorboard", "TensorBoardCallback", own="tensorboard"),
    TrackerSpec("wandb", "wandb", "wandb", "WandbCallback", own="wandb"),
    TrackerSpec("mlflow", "mlflow", "mlflow", "MLflowCallback", own="mlflow"),
    TrackerSpec("trackio", "trackio", "trackio", "TrackioCallback", own="trackio"),
    TrackerSpec("azure_ml", "azureml.core", "azureml-core", "AzureMLCallback"),
    TrackerSpec("clearml", "clearml", "clearml", "ClearMLCallback"),
    TrackerSpec("codecarbon", "codecarbon", "codecarbon", "CodeCarbonCallback", each_machine=True),
    TrackerSpec("comet_ml", "comet_ml", "comet-ml", "CometCallback"),
    TrackerSpec("dagshub", "dagshub", "dagshub", "DagsHubCallback"),
    TrackerSpec("dvclive", "dvclive", "dvclive", "DVCLiveCallback"),
    TrackerSpec("flyte", "flytekit", "flytekit", "FlyteCallback", in_all=False),  # works inside a Flyte task only
    TrackerSpec("swanlab", "swanlab", "swanlab", "SwanLabCallback"),
)
TRACKERS: dict[str, TrackerSpec] = {row.name: row for row in ROWS}


def reporting_callbacks(
    report_to: str | Iterable[str] | None,
    deepspeed_config: Callable[[], Mapping[str, Any]] | None = None,
    *,
    main_process: bool = True,
    first_of_machine: bool = True,
) -> list[Any]:
    """One callback for each tracker in ``report_to``.

    Args:
        report_to: a name, several names, ``"none"``, or ``"all"`` for all installed trackers.
        deepspeed_config: returns the compiled DeepSpeed configuration, to be recorded.
        main_process: whether this is the main process of the job; other processes get no callback and import nothing.
        first_of_machine: whether this is the first process of its machine, for trackers that measure machines
            (codecarbon).

    Raises:
        ConfigError: an unknown name, or a tracker that is not installed; on every process, with all problems.
    """
    rows, problems = _rows(report_to)
    problems += [row.missing for row in rows if row.missing]
    if problems:
        raise ConfigError(problems)
    here = [row for row in rows if main_process or (row.each_machine and first_of_machine)]
    made = []
    for row in here:
        try:
            made.append(row.make(deepspeed_config))
        except ConfigError as error:  # installed, but not configured
            if not _wants_all(report_to):
                raise
            logger.warning("report_to=all leaves out %s: %s", row.name, error)
    return made


def check_trackers(report_to: str | Iterable[str] | None) -> None:
    """Refuse trackers that could not begin a run, on the main process, before something is built.

    Raises:
        ConfigError: as :func:`reporting_callbacks`, or a key is missing.
    """
    main_process = likely_rank(os.environ) == 0
    for callback in reporting_callbacks(report_to, main_process=main_process, first_of_machine=main_process):
        if isinstance(callback, Tracker):
            callback.check_usable()


def _wants_all(report_to: str | Iterable[str] | None) -> bool:
    return report_to == "all" or report_to == ["all"]


def _rows(report_to: str | Iterable[str] | None) -> tuple[list[TrackerSpec], list[str]]:
    names = [report_to] if isinstance(report_to, str) else list(report_to or ())
    if names in ([], ["none"]):
        return [], []
    if _wants_all(names):
        installed = [row for row in ROWS if row.in_all and not row.missing]
        if any(row.name == "mlflow" for row in installed):  # Azure takes what MLflow sends
            installed = [row for row in installed if row.name != "azure_ml"]
        logger.info("report_to=all: %s", ", ".join(row.name for row in installed) or "no tracker is installed")
        return installed, []
    alone = [
        f"report_to={names}: '{word}' cannot be combined with others." for word in ("all", "none") if word in names
    ]
    known = f"Use one of {', '.join(TRACKERS)}, all or none."
    unknown = [
        f"report_to={name} is not a tracker.{did_you_mean(name, TRACKERS)} {known}"
        for name in names
        if name not in (*TRACKERS, "all", "none")
    ]
    return [TRACKERS[name] for name in dict.fromkeys(names) if name in TRACKERS], alone + unknown


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of the parent of a dotted name
        return False


_MODULE = "transformers.integrations.integration_utils"


class Guarded:
    """Mixin for a callback class: an error while logging, saving or ending disables the tracker."""

    name: str
    _off = False

    def on_train_begin(self, *arguments: Any, **kwargs: Any) -> None:
        """Open the run."""
        self._off = False
        super().on_train_begin(*arguments, **kwargs)  # type: ignore[misc]

    def on_log(self, *arguments: Any, **kwargs: Any) -> None:
        """Record the logs."""
        self._guarded("on_log", *arguments, **kwargs)

    def on_train_end(self, *arguments: Any, **kwargs: Any) -> None:
        """Finish the run."""
        self._guarded("on_train_end", *arguments, **kwargs)

    def on_save(self, *arguments: Any, **kwargs: Any) -> None:
        """Record the checkpoint."""
        self._guarded("on_save", *arguments, **kwargs)

    def on_predict(self, *arguments: Any, **kwargs: Any) -> None:
        """Record the metrics of a prediction."""
        self._guarded("on_predict", *arguments, **kwargs)

    def _guarded(self, event: str, *arguments: Any, **kwargs: Any) -> None:
        if self._off:
            return
        try:
            getattr(super(), event)(*arguments, **kwargs)
        except Exception as error:
            switched_off(self.name, error)
            self._off = True


def reused_callback(name: str, class_name: str, package: str, install: str) -> Any:
    """A guarded instance of transformers' callback for the tracker ``name``.

    Raises:
        ConfigError: transformers or the tracker's library cannot be imported, or the callback refuses to start.
    """
    integrations = import_tracker(name, _MODULE, "transformers")
    import_tracker(name, package, install)
    original = getattr(integrations, class_name)
    try:
        return type(class_name, (Guarded, original), {"name": name})()
    except (ImportError, RuntimeError) as error:  # a missing API key, for example
        raise ConfigError(f"report_to={name}: {error} Otherwise take {name} out of report_to.") from error
