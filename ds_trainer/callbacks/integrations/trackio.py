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

    Arguments that it reads: ``project``, ``run_name`` (a run of that name is gone on with), ``trackio_space_id`` (none:
    the database in ``TRACKIO_DIR``), ``trackio_bucket_id``, ``hub_private_repo``, and ``trackio_static_space_id``: name
    of the read-only copy that is made of the Space when training has ended, or of the local project when the model is
    pushed; None makes a name up, False makes no copy. A copy that fails costs a warning.

    Logs after the training go on in the same run.
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
        # Trackio refuses names that begin with an underscore, as _name_or_path of a model's configuration.
        self._where["config"] = {name.lstrip("_"): value for name, value in config.items()}
        self._begin()

    def _begin(self) -> None:
        # The configuration goes along each time: a run that is gone on with would lose it otherwise.
        run = self.library().init(**self._where, resume="allow")
        self._where["name"] = run.name  # where none was given, Trackio has made one up
        self._space = run._space_id  # complete, also where the owner's name was left out
        self._open = True

    def write(self, logs: dict[str, Any], state: TrainerState) -> None:
        if not self._open:
            self._begin()
        curves = {name: value for name, value in logs.items() if name not in SUMMARY}
        self.library().log({**rewrite_logs(curves), "train/global_step": state.global_step})

    def finish(self, args: Any, state: TrainerState, model: Any) -> None:
        if not self._open:
            return
        self._open = False
        self.library().finish()
        if self._space is not None:
            self._publish(args, model, "freeze", space_id=self._space, project=args.project)

    def on_push_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero and self._where and self._space is None:
            more = {"project": args.project, "sdk": "static", "bucket_id": args.trackio_bucket_id, "force": True}
            self._publish(args, model, "sync", **more)

    def _publish(self, args: Any, model: Any, function: str, **arguments: Any) -> None:
        """Make the read-only copy, and tag the model with its address: the Hub shows it beside the model."""
        if args.trackio_static_space_id is False:
            return
        target = self._copy or args.trackio_static_space_id or _made_up_name(args.project)
        place = "new_space_id" if function == "freeze" else "space_id"
        try:
            call = getattr(self.library(), function)
            self._copy = call(**{place: target}, private=args.hub_private_repo, **arguments)
        except Exception as error:
            logger.warning("trackio.%s could not make the read-only copy %s: %s", function, target, error)
            return
        tags = [tag for tag in getattr(model, "model_tags", None) or [] if not str(tag).startswith("trackio")]
        model.model_tags = [*tags, "trackio", f"trackio:{_PAGE}{self._copy}"]


def _made_up_name(project: str) -> str:
    """A name that the Hub takes, ending in something random."""
    letters = re.sub(r"[^a-z0-9._]+", "-", project.lower()).strip("-_.")[:80]
    return f"{letters or 'trackio-project'}-static-{secrets.token_hex(3)}"
