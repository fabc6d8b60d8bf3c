"""Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from ds_trainer.callbacks.integrations.hyperparameters import hyperparameters, parameter_count
from ds_trainer.callbacks.integrations.tracker import SUMMARY, Tracker, number, rewrite_logs
from ds_trainer.callbacks.state import TrainerControl, TrainerState
from ds_trainer.utils.errors import ConfigError

_CHECKPOINTS, _END = "checkpoint", "end"
_MOST_METADATA = 100  # keys that wandb allows for an artifact


class WandbCallback(Tracker):
    """Sends each log event to Weights & Biases, with ``train/global_step`` as the x axis of all curves.

    An open run is used. The run stays open after the training for later logs; it ends with the process, or when the
    next trial of a hyperparameter search begins.

    Environment: ``WANDB_PROJECT`` (default ``args.project``); ``WANDB_WATCH``: ``gradients``, ``parameters``, ``all``
    or ``false``; ``WANDB_LOG_MODEL``: ``checkpoint`` (every checkpoint becomes an artifact), ``end`` (the best
    checkpoint if the run tracks it, otherwise the last one) or ``false``; and all variables of wandb itself
    (``WANDB_MODE``, ``WANDB_DIR``, ``WANDB_ENTITY`` ...).
    """

    name = "wandb"
    package = "wandb"
    install = "wandb"

    def __init__(self, deepspeed_config: Callable[[], Mapping[str, Any]] | None = None) -> None:
        super().__init__(deepspeed_config)
        self._last_checkpoint: Path | None = None

    def check_access(self) -> None:
        """Log in, which asks in a terminal; without network it takes the key as it is."""
        wandb = self.library()
        if wandb.run is None and os.environ.get("WANDB_MODE", "online") == "online":
            wandb.login(verify=False)

    def check(self, args: Any) -> None:
        """Raise ConfigError for settings of the tracker that cannot work."""
        _one_of("WANDB_LOG_MODEL", _CHECKPOINTS, _END, "false")
        _one_of("WANDB_WATCH", "gradients", "parameters", "all", "false")
        if _log_model() != "false" and str(args.save_strategy) == "no":
            raise ConfigError(
                f"WANDB_LOG_MODEL={_log_model()} uploads checkpoints, but save_strategy=no writes none."
                " Set save_strategy=steps or epoch, or WANDB_LOG_MODEL=false."
            )

    def start(self, args: Any, state: TrainerState, model: Any) -> None:
        """Open the run and record arguments and model."""
        wandb = self.library()
        in_sweep = getattr(wandb.run, "sweep_id", None) is not None  # wandb opens the runs of a sweep
        if state.is_hyper_param_search and not in_sweep:
            wandb.finish()
        if wandb.run is None:
            names = {"name": args.run_name} if args.run_name else {}
            if state.trial_name is not None:
                names = {"name": state.trial_name, "group": args.run_name or args.output_dir}
            wandb.init(project=os.environ.get("WANDB_PROJECT") or args.project, **names)
        values = hyperparameters(args, model, self.deepspeed_config)
        count = parameter_count(model)
        if count is not None:
            values["model/num_parameters"] = count
        wandb.config.update(values, allow_val_change=True)
        wandb.define_metric("train/global_step")
        wandb.define_metric("*", step_metric="train/global_step", step_sync=True)
        watched = os.environ.get("WANDB_WATCH", "false")
        if watched != "false" and model is not None:
            wandb.watch(model, log=watched, log_freq=max(100, state.logging_steps))

    def write(self, logs: dict[str, Any], state: TrainerState) -> None:
        """Record one set of values."""
        run = self._run()
        run.summary.update({name: number(value) for name, value in logs.items() if name in SUMMARY})
        curves = {name: value for name, value in logs.items() if name not in SUMMARY}
        run.log({**rewrite_logs(curves), "train/global_step": state.global_step})

    def finish(self, args: Any, state: TrainerState, model: Any) -> None:
        """Close the run."""
        if _log_model() == _END and (best := state.best_model_checkpoint or self._last_checkpoint):
            self._upload(Path(best), ["final_model"])

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Record the checkpoint."""
        if not state.is_world_process_zero:
            return
        self._last_checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self._running and _log_model() == _CHECKPOINTS:
            aliases = [f"epoch_{round(state.epoch, 2)}", f"checkpoint_global_step_{state.global_step}"]
            self.guarded(self._upload, self._last_checkpoint, aliases)

    def _upload(self, directory: Path, aliases: list[str]) -> None:
        run = self._run()
        results = {n: v for n, v in dict(run.summary).items() if isinstance(v, int | float) and not n.startswith("_")}
        few = dict(islice(results.items(), _MOST_METADATA))
        artifact = self.library().Artifact(name=f"model-{run.id}", type="model", metadata=few)
        artifact.add_dir(str(directory))
        run.log_artifact(artifact, aliases=aliases)

    def _run(self) -> Any:
        run = self.library().run
        if run is None:
            raise RuntimeError("the run was finished elsewhere (wandb.finish)")
        return run


def _log_model() -> str:
    return os.environ.get("WANDB_LOG_MODEL", "false").lower()


def _one_of(variable: str, *known: str) -> None:
    value = os.environ.get(variable, "false")
    if value.lower() not in known:
        raise ConfigError(f"{variable}={value} (environment): use one of {', '.join(known)}.")
