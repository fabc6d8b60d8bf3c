"""``StartingModel``: what a new recipe has to know of the model that it starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_trainer.planner.planned_model import PlannedModel
from ds_trainer.recipes.tokenizers import ByteTokenizer, load_processor
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import read_json


@dataclass(frozen=True)
class StartingModel:
    """A model before training.

    Attributes:
        name: directory or Hub name.
        config: the content of its ``config.json``.
        tokenizer: one of transformers; None if the model was trained on bytes.
    """

    name: str
    config: Mapping[str, Any]
    tokenizer: Any

    @property
    def is_bytes(self) -> bool:
        """Whether the model was trained on bytes."""
        return self.tokenizer is None

    @property
    def has_template(self) -> bool:
        """Whether its tokenizer has a chat template."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def takes_images(self) -> bool:
        """Whether it is a vision-language model."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

        return self.config.get("model_type") in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    @property
    def is_causal(self) -> bool:
        """Whether transformers has it as a language model that reads text alone."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        return self.config.get("model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    def processor(self) -> Any:
        """Its processor, which makes inputs of images.

        Raises:
            ConfigError: the model takes no images, or its processor cannot be loaded.
        """
        if not self.takes_images:
            raise ConfigError(
                f"The data has images, but a model of type {self.config.get('model_type')!r} ({self.name}) takes none."
            )
        return load_processor(self.name, "--model")

    def planned(self, lora_rank: int = 0) -> PlannedModel:
        """The model for the planner, with adapters of this rank."""
        # The last part of its name.
        return PlannedModel.from_config(self.config, Path(self.name).name, lora_rank)


def read_starting_model(name: str) -> StartingModel:
    """The model ``name``, a directory or Hub name, without its weights.

    Raises:
        ConfigError: there is no model of that name, or it has no tokenizer.
    """
    from ds_trainer.training.loading.model_files import model_directory

    try:
        directory = model_directory(name, weights=False)
    except ConfigError as error:
        raise ConfigError(f"--model: {error}") from error
    if not (directory / "config.json").is_file():
        raise ConfigError(f"--model {name}: there is no config.json in {directory}; give the directory of a model.")
    config = dict(read_json(directory / "config.json"))
    if (directory / ByteTokenizer.FILE_NAME).is_file():
        return StartingModel(name, config, None)
    from transformers import AutoTokenizer

    try:
        return StartingModel(name, config, AutoTokenizer.from_pretrained(directory, local_files_only=True))
    except Exception as error:  # code of any tokenizer, which reads the model's config.json, too
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"--model {name}: it has no tokenizer that can be loaded: {reason}") from error
