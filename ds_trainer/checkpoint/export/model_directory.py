"""A model as a directory of transformers describes it: for checkpoints that do not say themselves what they are of."""

from __future__ import annotations

from pathlib import Path

import torch

from ds_trainer.checkpoint.weights.description import ModelDescription, description_contents
from ds_trainer.utils.errors import ConfigError


def describe_directory(model: Path, into: Path) -> ModelDescription:
    """Write to ``into`` what a checkpoint of the model in ``model`` would say of it.

    Args:
        model: a directory with ``config.json``, and the files of a tokenizer where there is one; weights are not read.
        into: an existing directory.

    Raises:
        ConfigError: there is no ``config.json``, or it names no class that the installed transformers has.
    """
    if not (model / "config.json").is_file():
        raise ConfigError(f"--model {model}: has no config.json. Name the directory that the model was loaded from.")
    try:
        import transformers
    except ModuleNotFoundError:
        raise ConfigError(f"--model {model} is read with transformers: pip install 'ds-trainer[hf]'.") from None
    config = transformers.AutoConfig.from_pretrained(str(model))
    names = config.architectures or []
    model_class = getattr(transformers, names[0], None) if len(names) == 1 else None
    if model_class is None:
        raise ConfigError(
            f"--model {model}: its config.json names {names or 'no class'} under architectures; it must be one class "
            f"that transformers {transformers.__version__} has."
        )
    with torch.device("meta"):
        blueprint = model_class(config)
    if isinstance(config.dtype, torch.dtype):
        blueprint.to(config.dtype)
    if (model / "generation_config.json").is_file():
        blueprint.generation_config = transformers.GenerationConfig.from_pretrained(str(model))
    has_tokenizer = (model / "tokenizer_config.json").is_file()
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(model)) if has_tokenizer else None
    for content in description_contents(blueprint, tokenizer):
        (into / content.name).parent.mkdir(parents=True, exist_ok=True)
        with (into / content.name).open("wb") as stream:
            content.write(stream)
    return ModelDescription.read(into)
