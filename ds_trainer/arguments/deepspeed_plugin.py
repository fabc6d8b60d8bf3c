"""``args.deepspeed_plugin``: what scripts ask the arguments about DeepSpeed before there is a Trainer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ds_trainer.arguments.yaml_reader import read_yaml
from ds_trainer.utils.files import read_user_file


class DeepSpeedPlugin:
    """Counterpart of accelerate's ``DeepSpeedPlugin`` before the configuration is compiled.

    The compiled one is ``trainer.accelerator.state.deepspeed_plugin``.

    Args:
        args: the training arguments; read at each access.
    """

    def __init__(self, args: Any) -> None:
        self._args = args

    @property
    def zero_stage(self) -> int:
        """ZeRO stage, 0 to 3: ``zero_stage``, else that of the DeepSpeed file, else the default.

        Raises:
            ConfigError: the DeepSpeed file cannot be read.
        """
        args = self._args
        if args.zero_stage is not None:
            return int(args.zero_stage)
        given = args.deepspeed
        if isinstance(given, str | os.PathLike):
            text = os.fspath(given)
            if not text.lstrip().startswith("{"):
                text = read_user_file(text, f"deepspeed={text!r}", "JSON file")
            root, _ = read_yaml(text, "deepspeed")  # JSON is YAML too
            given = root.plain()
        section = given.get("zero_optimization", {}) if isinstance(given, Mapping) else {}
        stage = section.get("stage", "auto") if isinstance(section, Mapping) else "auto"
        return int(args.world_size > 1 or bool(args.fp16)) if stage == "auto" else int(stage)
