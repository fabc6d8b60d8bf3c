"""Trackio: a local database, or a Space on the Hugging Face Hub."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from ds_trainer.callbacks.integrations.hyperparameters import hyperparameters, parameter_count
from ds_trainer.callbacks.integrations.tracker import SUMMARY, Tracker, logger, rewrite_logs
from ds_trainer.callbacks.state import TrainerControl, TrainerState

_PAGE = "https://huggingface.co/spaces/"


class TrackioCallback(Tracker):
    """Sends each log event to Trackio, with ``train/global_step`` among the values.

    Arguments: ``project``, ``run_name`` (a run with this name is resumed), ``trackio_space_id`` (None: the database in
    ``TRACKIO_DIR``), ``trackio_bucket_id``, ``hub_private_repo``, and ``trackio_static_space_id``: name of the
    read-only copy that is made of the Space when training ends, or of the local project when the model is pushed. None
    generates a name, False makes no copy. If the copy fails, there is a warning.

    Logs after the training go to the same run.
    """

    name = "trackio"
    package = "trackio"
    install = "trackio"

    def __init__(self, deepspeed_config: Callable[[], Mapping[str, Any]] | None = None) -> None:
        super().__init__(deepspeed_config)
        self._where: dict[str, Any] = {}
        self._space: str | None = None
        self._copy: str | None = None
        self._open = False

    def start(self, args: Any, state: TrainerState, model: Any) -> None:
        """Open the run and record arguments and model."""
        config = hyperparameters(args, model, self.deepspeed_config)
        count = parameter_count(model)
        if count is not None:
            config["model/num_parameters"] = count
        self._where = {
            "project": args.project,
            "name": state.trial_name or args.run_name,
            "space_id": args.trackio_space_id,
            "bucket_id": args.trackio_bucket_id,
            "private": args.hub_private_repo,
        }
        # Trackio rejects names that begin with an underscore, such as _name_or_path of a model's configuration.
        self._where["config"] = {name.lstrip("_"): value for name, value in config.items()}
        self._begin()

    def _begin(self) -> None:
        # The configuration is passed each time: a resumed run would lose it otherwise.
        run = self.library().init(**self._where, resume="allow")
        self._where["name"] = run.name  # Trackio generates one if there is none
        self._space = run._space_id  # complete, even if the owner's name was left out
        self._open = True

    def write(self, logs: dict[str, Any], state: TrainerState) -> None:
        """Record one set of values."""
        if not self._open:
            self._begin()
        curves = {name: value for name, value in logs.items() if name not in SUMMARY}
        self.library().log({**rewrite_logs(curves), "train/global_step": state.global_step})

    def finish(self, args: Any, state: TrainerState, model: Any) -> None:
        """Close the run."""
        if not self._open:
            return
        self._open = False
        self.library().finish()
        if self._space is not None:
            self._publish(args, model, "freeze", space_id=self._space, project=args.project)

    def on_push_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Synchronize before a push to the Hub."""
        if state.is_world_process_zero and self._where and self._space is None:
            options = {"project": args.project, "sdk": "static", "bucket_id": args.trackio_bucket_id, "force": True}
            self._publish(args, model, "sync", **options)

    def _publish(self, args: Any, model: Any, function: str, **arguments: Any) -> None:
        """Make the read-only copy, and tag the model with its address, which the Hub shows with the model."""
        if args.trackio_static_space_id is False:
            return
        target = self._copy or args.trackio_static_space_id or _generated_name(args.project)
        keyword = "new_space_id" if function == "freeze" else "space_id"
        try:
            call = getattr(self.library(), function)
            self._copy = call(**{keyword: target}, private=args.hub_private_repo, **arguments)
        except Exception as error:
            logger.warning("trackio.%s could not make the read-only copy %s: %s", function, target, error)
            return
        tags = [tag for tag in getattr(model, "model_tags", None) or [] if not str(tag).startswith("trackio")]
        model.model_tags = [*tags, "trackio", f"trackio:{_PAGE}{self._copy}"]


def _generated_name(project: str) -> str:
    """A valid name for the Hub, with a random suffix."""
    letters = re.sub(r"[^a-z0-9._]+", "-", project.lower()).strip("-_.")[:80]
    return f"{letters or 'trackio-project'}-static-{secrets.token_hex(3)}"
