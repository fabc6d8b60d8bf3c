"""Builds the model of a checkpoint on torch's meta device, for the names and shapes of its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ds_trainer.checkpoint.weights.model_description import ModelDescription
from ds_trainer.utils.errors import ConfigError

_PEFT_PREFIX = "base_model.model."  # peft's attributes for the wrapped model


def base_meta_model(checkpoint: Path, description: ModelDescription) -> Any:
    """Builds the model that ``config.json`` describes with its transformers class; all tensors are on meta.

    Raises:
        ConfigError: the class is not part of transformers, or transformers is not installed.
    """
    if not description.from_transformers or "config.json" not in description.files:
        raise ConfigError(
            f"The model of {checkpoint} is a {description.model_class}, which is not a transformers model and cannot "
            "be built from a file. In a script that builds the model, call train(resume_from_checkpoint=...) and "
            "save_model()."
        )
    try:
        import transformers
    except ModuleNotFoundError:
        raise ConfigError(f"{checkpoint} contains a transformers model: pip install 'ds-trainer[hf]'.") from None
    model_class = getattr(transformers, description.model_class, None)
    if model_class is None:
        raise ConfigError(
            f"The model of {checkpoint} is a {description.model_class}, which transformers {transformers.__version__} "
            "does not have. Use the version that it was trained with."
        )
    config = transformers.AutoConfig.from_pretrained(str(checkpoint))
    config.name_or_path = description.name_or_path
    with torch.device("meta"):
        return model_class(config)


def check_against_model(checkpoint: Path, description: ModelDescription) -> list[str]:
    """Compare the described tensors with those of the model that ``config.json`` describes.

    Returns:
        Names that only the checkpoint has; ``from_pretrained`` would warn about them.

    Raises:
        ConfigError: the shape of a tensor differs, so that it could not be loaded.
    """
    expected = {name: tuple(t.shape) for name, t in base_meta_model(checkpoint, description).state_dict().items()}
    described = {tensor.name: tuple(tensor.shape) for tensor in description.tensors}
    problems = [
        f"{name} has shape {list(shape)} in {checkpoint}, but {list(expected[name])} in the "
        f"{description.model_class} that its config.json describes."
        for name, shape in described.items()
        if name in expected and expected[name] != shape
    ]
    if problems:
        raise ConfigError(problems)
    return sorted(described.keys() - expected.keys())


def adapted_meta_model(checkpoint: Path, description: ModelDescription, wrapped: bool) -> Any:
    """Builds :func:`base_meta_model` with the checkpoint's adapters, also on meta.

    Args:
        checkpoint, description: the checkpoint and its description.
        wrapped: whether peft's class wraps the model; otherwise transformers injects the adapters.

    Raises:
        ConfigError: as :func:`base_meta_model`; or peft is not installed, or creates other tensors than were saved.
    """
    base = base_meta_model(checkpoint, description)
    try:
        import peft
    except ModuleNotFoundError:
        raise ConfigError(f"{checkpoint} contains a model with adapters: pip install 'ds-trainer[peft]'.") from None
    configs = {name: _config_of(values) for name, values in description.adapters.items()}
    model: Any = base
    for index, (name, config) in enumerate(configs.items()):
        with _no_weight_initialization(config):
            if not wrapped:
                with torch.device("meta"):
                    model.add_adapter(config, adapter_name=name)
            elif index == 0:
                model = peft.get_peft_model(base, config, adapter_name=name, low_cpu_mem_usage=True)
            else:
                model.add_adapter(name, config, low_cpu_mem_usage=True)
    if wrapped:
        model.peft_config.update({name: _config_of(values) for name, values in description.adapters.items()})
    if not any(config.is_prompt_learning for config in configs.values()):
        (model.base_model if wrapped else model).set_adapter(list(description.active))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for tensor in description.tensors:
        name = meta_model_name(tensor.name, description.wrapped, wrapped)
        if tensor.adapter and shapes.get(name) != tuple(tensor.shape):
            raise ConfigError(
                f"{tensor.name} has shape {list(tensor.shape)} in {checkpoint}, but peft {peft.__version__} creates "
                f"{list(shapes.get(name, ())) or 'no such tensor'} from its configuration. Use the version that it was "
                "trained with."
            )
    return model


def meta_model_name(name: str, from_wrapped: bool, to_wrapped: bool) -> str:
    """Converts the name of a tensor between a model wrapped by peft's class and one with injected adapters."""
    if from_wrapped == to_wrapped:
        return name
    return f"{_PEFT_PREFIX}{name}" if to_wrapped else name.removeprefix(_PEFT_PREFIX)


def _config_of(values: Mapping[str, Any]) -> Any:
    from peft import PeftConfig

    return PeftConfig.from_peft_type(**values)


@contextmanager
def _no_weight_initialization(config: Any) -> Iterator[None]:
    """Inside the block, adapters are created without initializations that read the weights, such as an SVD."""
    if not hasattr(config, "init_lora_weights"):
        yield
        return
    original, config.init_lora_weights = config.init_lora_weights, False
    try:
        yield
    finally:
        config.init_lora_weights = original
