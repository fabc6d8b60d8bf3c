"""Describes a model from a transformers directory, for checkpoints that do not describe their model."""

from __future__ import annotations

from pathlib import Path

import torch

from ds_trainer.checkpoint.weights.model_description import ModelDescription, description_files
from ds_trainer.utils.errors import ConfigError


def describe_directory(model: Path, target: Path) -> ModelDescription:
    """Write the description that a checkpoint of the model in ``model`` would contain to ``target``.

    Args:
        model: a directory with ``config.json`` and, optionally, tokenizer files; weights are not read.
        target: an existing directory.

    Raises:
        ConfigError: there is no ``config.json``, or it names no class of the installed transformers.
    """
    if not (model / "config.json").is_file():
        raise ConfigError(
            f"--model {model}: config.json is missing. Pass the directory that the model was loaded from."
        )
    try:
        import transformers
    except ModuleNotFoundError:
        raise ConfigError(f"--model {model} requires transformers: pip install 'ds-trainer[hf]'.") from None
    config = transformers.AutoConfig.from_pretrained(str(model))
    names = config.architectures or []
    model_class = getattr(transformers, names[0], None) if len(names) == 1 else None
    if model_class is None:
        raise ConfigError(
            f"--model {model}: architectures in its config.json is {names or 'empty'}; it must list exactly one class "
            f"of transformers {transformers.__version__}."
        )
    with torch.device("meta"):
        meta_model = model_class(config)
    if isinstance(config.dtype, torch.dtype):
        meta_model.to(config.dtype)
    if (model / "generation_config.json").is_file():
        meta_model.generation_config = transformers.GenerationConfig.from_pretrained(str(model))
    has_tokenizer = (model / "tokenizer_config.json").is_file()
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(model)) if has_tokenizer else None
    for file in description_files(meta_model, tokenizer):
        (target / file.name).parent.mkdir(parents=True, exist_ok=True)
        with (target / file.name).open("wb") as stream:
            file.write(stream)
    return ModelDescription.read(target)
