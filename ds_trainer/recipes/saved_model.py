"""Finds and loads a trained model from a directory: full weights, adapters with their base, or a run's checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_trainer.checkpoint.export.inspection import find_checkpoints
from ds_trainer.checkpoint.loading.sampled_files import FILES as _WEIGHTS
from ds_trainer.checkpoint.protocol.manifest import MANIFEST_FILE
from ds_trainer.recipes.tokenizers import ByteTokenizer
from ds_trainer.training.loading.model_files import ADAPTER_CONFIG, model_directory
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import read_json

if TYPE_CHECKING:
    import torch

_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_DEEPSPEED = ("global_step*", "*mp_rank_*_model_states.pt", "*zero_pp_rank_*_optim_states.pt")
# Heads that give no text, by the end of the class's name.
_NO_TEXT = {
    "ForSequenceClassification": "classifies sequences",
    "ForTokenClassification": "classifies tokens",
    "ForQuestionAnswering": "marks spans of a text",
    "ForMaskedLM": "fills in masked tokens",
}


@dataclass(frozen=True)
class SavedModel:
    """A directory with a model.

    Attributes:
        directory: where the model is; for adapters, where the adapters are.
        base: directory of the base model of adapters; None for full weights.
        note: what was chosen, if it is not the directory that was asked for.
    """

    directory: Path
    base: Path | None = None
    note: str = ""

    @property
    def config(self) -> dict[str, Any]:
        """The content of the model's ``config.json``; for adapters, of their base."""
        return dict(read_json((self.base or self.directory) / "config.json"))

    @property
    def is_bytes(self) -> bool:
        """Whether the model was trained on bytes, so that it has no tokenizer of transformers."""
        return any((path / ByteTokenizer.FILE_NAME).is_file() for path in (self.directory, self.base) if path)

    @property
    def tokenizer_directory(self) -> Path:
        """The directory with the tokenizer: the model's own, else that of the base."""
        has_own = (self.directory / "tokenizer_config.json").is_file()
        return self.directory if has_own or self.base is None else self.base

    @property
    def has_processor(self) -> bool:
        """Whether the tokenizer is part of a processor, which reads images or sound."""
        names = ("preprocessor_config.json", "processor_config.json")
        return any((self.tokenizer_directory / name).is_file() for name in names)


def find_saved_model(name: str, base: str | None = None) -> SavedModel:
    """The model ``name``: a directory or Hub name, or the output directory of a run, of which the newest checkpoint.

    Args:
        name: the directory or Hub name.
        base: for adapters, the directory or Hub name of their base; default: the one that the adapters name.

    Raises:
        ConfigError: there is no model; the message says what is there and how to make one of it.
    """
    directory, note = model_directory(name), ""
    if not _has_model(directory):
        directory = _newest_checkpoint_with_model(directory)
        note = f"{name} has no model of its own; using its newest checkpoint {directory.name}."
    adapters = (directory / ADAPTER_CONFIG).is_file() and not any((directory / file).is_file() for file in _WEIGHTS)
    if not adapters:
        if base is not None:
            raise ConfigError(f"--base {base}: {directory} has full weights, not adapters. Remove --base.")
        return SavedModel(directory, note=note)
    from ds_trainer.training.loading.peft_adapters import AdapterDirectory

    named = base if base is not None else AdapterDirectory.of(directory).base
    try:
        base_directory = model_directory(named)
    except ConfigError as error:
        raise ConfigError(
            f"{directory} has adapters of the base model {named!r}, which is not there: {error} Give the directory of "
            "the base with --base DIR."
        ) from error
    if not _has_model(base_directory):
        raise ConfigError(f"{directory} has adapters of the base model {named!r}, but {base_directory} has no weights.")
    return SavedModel(directory, base_directory, note)


def _has_model(directory: Path) -> bool:
    full = (directory / "config.json").is_file() and any((directory / file).is_file() for file in _WEIGHTS)
    adapters = (directory / ADAPTER_CONFIG).is_file() and any((directory / file).is_file() for file in _ADAPTERS)
    return full or adapters


def _newest_checkpoint_with_model(directory: Path) -> Path:
    """The newest checkpoint in ``directory`` that ``from_pretrained`` could read.

    Raises:
        ConfigError: there is none.
    """
    new = f"{directory.name}-model"
    try:
        checkpoints = find_checkpoints(directory)
    except ConfigError:
        checkpoints = []
    usable = [checkpoint for checkpoint in checkpoints if _has_model(checkpoint)]
    if usable and not (directory / MANIFEST_FILE).is_file():
        return usable[-1]
    if checkpoints:
        raise ConfigError(
            f"{directory} has the state of a training, but no model files. Write them with\n"
            f"  ds-trainer checkpoint export {directory} --to {new}\nand use {new}."
        )
    if any(next(directory.glob(pattern), None) for pattern in _DEEPSPEED):
        raise ConfigError(
            f"{directory} has a checkpoint of DeepSpeed, whose weights are spread over the files of the ranks. Write a "
            f"model with\n  ds-trainer checkpoint convert {directory} --to {directory.name}-converted\n"
            f"  ds-trainer checkpoint export {directory.name}-converted --to {new} --model DIR\n"
            "where DIR has the model's config.json and tokenizer."
        )
    if (directory / "config.json").is_file():
        raise ConfigError(f"{directory} has a config.json but no weights ({_WEIGHTS[0]} or its index).")
    names = sorted(entry.name for entry in directory.iterdir())[:8]
    raise ConfigError(
        f"There is no model in {directory}: it needs config.json and {_WEIGHTS[0]}, or {ADAPTER_CONFIG} and "
        f"{_ADAPTERS[0]}. It contains {', '.join(names) if names else 'nothing'}."
    )


def load_for_generation(saved: SavedModel, device: torch.device, dtype: str | None = None) -> Any:
    """The model in evaluation mode on ``device``, with its adapters if it has some.

    Args:
        saved: where it is.
        device: where it goes.
        dtype: weights get this type; default: what the files have, but float32 for float16 on a CPU.

    Raises:
        ConfigError: it cannot be loaded, or is not a model that generates text.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    from ds_trainer.checkpoint.loading.stored_tensors import stored_tensors

    config = saved.config
    kind = str(config.get("model_type"))
    name = next(iter(config.get("architectures") or ()), "")
    reason = next((text for end, text in _NO_TEXT.items() if name.endswith(end)), None)
    if reason is not None:
        raise ConfigError(f"{saved.directory}: {name} {reason}; it does not generate text.")
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and "ConditionalGeneration" not in name:
        auto_class = AutoModelForCausalLM
    elif kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        auto_class = AutoModelForImageTextToText
    else:
        raise ConfigError(f"{saved.directory}: transformers has no model of type {kind!r} that generates text.")
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype is None:
        dtype = "float32" if device.type == "cpu" and stored == "float16" else stored
    where = saved.base or saved.directory
    stored_tensors(where)  # says which file is damaged
    try:
        model = auto_class.from_pretrained(where, dtype=getattr(torch, dtype), local_files_only=True)
        if saved.base is not None:
            from ds_trainer.training.loading.peft_adapters import imported_peft

            model = imported_peft().PeftModel.from_pretrained(model, str(saved.directory), torch_device="cpu")
    except Exception as error:  # code of any model
        reason = " ".join(str(error).split())[:400] or type(error).__name__
        raise ConfigError(f"The model in {saved.directory} cannot be loaded: {reason}") from error
    return model.eval().to(device)
