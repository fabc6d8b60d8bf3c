"""MLflow."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from ds_trainer.callbacks.integrations.hyperparameters import flattened, hyperparameters
from ds_trainer.callbacks.integrations.tracker import Tracker, logger, number
from ds_trainer.callbacks.state import TrainerControl, TrainerState
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import parse_json
from ds_trainer.utils.threads import new_executor
from ds_trainer.utils.units import whole_number


class MLflowCallback(Tracker):
    """Sends each log event to MLflow, with unchanged metric names, as in transformers.

    Environment: ``MLFLOW_TRACKING_URI``, ``MLFLOW_EXPERIMENT_NAME`` (default: ``args.project`` if it was set),
    ``MLFLOW_RUN_ID`` (resume that run), ``MLFLOW_NESTED_RUN``, ``MLFLOW_TAGS`` (JSON), ``MLFLOW_FLATTEN_PARAMS``,
    ``MLFLOW_MAX_LOG_PARAMS``, ``HF_MLFLOW_LOG_ARTIFACTS`` (upload checkpoints as artifacts).

    An active run is used, and not ended. Metrics are sent in the background, so that a slow server does not delay the
    training; an error is reported at the next log event or at the end.
    """

    name = "mlflow"
    package = "mlflow"
    install = "mlflow"

    def __init__(self, deepspeed_config: Callable[[], Mapping[str, Any]] | None = None) -> None:
        super().__init__(deepspeed_config)
        self.run_id: str | None = None
        self._ends_run = False
        self._sent: list[Future[None]] = []
        self._waiter: ThreadPoolExecutor | None = None

    def check(self, args: Any) -> None:
        """Raise ConfigError for settings of the tracker that cannot work."""
        _tags()
        wanted = os.environ.get("MLFLOW_MAX_LOG_PARAMS")
        if wanted and whole_number(wanted) is None:
            raise ConfigError(f"MLFLOW_MAX_LOG_PARAMS={wanted} (environment) must be a whole number of parameters.")

    def start(self, args: Any, state: TrainerState, model: Any) -> None:
        """Open the run and record arguments and model."""
        mlflow = self.library()
        nested, wanted = _is_on("MLFLOW_NESTED_RUN"), os.environ.get("MLFLOW_RUN_ID")
        active = mlflow.active_run()
        if active is None or nested or (wanted and active.info.run_id != wanted):
            project = None if args.project == "huggingface" else args.project  # the default was not chosen by the user
            experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or project
            if experiment and not wanted:
                mlflow.set_experiment(experiment)
            # It reads MLFLOW_RUN_ID itself.
            active = mlflow.start_run(run_name=state.trial_name or args.run_name, nested=nested)
            self._ends_run = True
        self.run_id = active.info.run_id
        self._log_parameters(mlflow, hyperparameters(args, model, self.deepspeed_config))
        if tags := _tags():
            mlflow.set_tags(tags)

    def _log_parameters(self, mlflow: Any, values: dict[str, Any]) -> None:
        """Log parameters in batches of MLflow's size. Values that are too long are left out, with one warning."""
        nested = {"ds_config": values.pop("ds_config")} if "ds_config" in values else {}
        values = flattened(values) if _is_on("MLFLOW_FLATTEN_PARAMS") else values
        values = {_allowed(name): value for name, value in {**values, **flattened(nested)}.items()}
        limits = mlflow.utils.validation
        long = [name for name, value in values.items() if len(str(value)) > limits.MAX_PARAM_VAL_LENGTH]
        if long:
            logger.warning(
                "mlflow accepts parameters of up to %d characters; left out: %s. MLFLOW_FLATTEN_PARAMS=1 splits"
                " nested parameters.",
                limits.MAX_PARAM_VAL_LENGTH,
                ", ".join(long),
            )
        most = int(os.environ.get("MLFLOW_MAX_LOG_PARAMS") or len(values))
        rows = islice(((name, value) for name, value in values.items() if name not in long), most)
        while batch := dict(islice(rows, limits.MAX_PARAMS_TAGS_PER_BATCH)):
            mlflow.log_params(batch, run_id=self.run_id)

    def write(self, logs: dict[str, Any], state: TrainerState) -> None:
        """Record one set of values."""
        self._raise_what_failed()
        metrics = {}
        for name, value in logs.items():
            scalar = number(value)
            if scalar is None:
                self.leave_out(name, value)
            else:
                metrics[_allowed(name)] = scalar
        sent = self.library().log_metrics(metrics, state.global_step, synchronous=False, run_id=self.run_id)
        if self._waiter is None:
            self._waiter = new_executor("mlflow-waiter")
        self._sent.append(self._waiter.submit(sent.wait))

    def finish(self, args: Any, state: TrainerState, model: Any) -> None:
        """Close the run."""
        self._raise_what_failed(wait=True)
        active = self.library().active_run()
        if self._ends_run and active is not None and active.info.run_id == self.run_id:
            self.library().end_run()
        self._ends_run = False

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Record the checkpoint."""
        if self._running and state.is_world_process_zero and _is_on("HF_MLFLOW_LOG_ARTIFACTS"):
            self.guarded(self._upload, Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def _upload(self, directory: Path) -> None:
        self.library().log_artifacts(str(directory), artifact_path=directory.name, run_id=self.run_id)

    def _raise_what_failed(self, wait: bool = False) -> None:
        finished = [sent for sent in self._sent if wait or sent.done()]
        self._sent = [sent for sent in self._sent if sent not in finished]
        for sent in finished:
            sent.result()


def _allowed(name: str) -> str:
    """``name`` with an underscore for every character that MLflow does not allow."""
    return re.sub(r"[^0-9A-Za-z_\-. :/]", "_", name)


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").upper() in ("1", "ON", "YES", "TRUE")


def _tags() -> dict[str, Any]:
    text = os.environ.get("MLFLOW_TAGS")
    try:
        tags = parse_json(text) if text else {}
    except ValueError:
        tags = None
    if not isinstance(tags, dict):
        raise ConfigError(f'MLFLOW_TAGS={text} (environment) must be a JSON object, like {{"team": "vision"}}.')
    return tags
