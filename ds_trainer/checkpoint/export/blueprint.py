"""The model of a checkpoint without numbers (on torch's meta device): what its tensors are called, and their shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ds_trainer.checkpoint.weights.description import ModelDescription
from ds_trainer.utils.errors import ConfigError

_INSIDE = "base_model.model."  # where peft's own class keeps what it wraps


def base_blueprint(checkpoint: Path, description: ModelDescription) -> Any:
    """The model that ``config.json`` describes, as its class in transformers makes it; all tensors are on meta.

    Raises:
        ConfigError: its class is none of transformers', or that is not installed.
    """
    if not description.from_transformers or "config.json" not in description.files:
        raise ConfigError(
            f"{checkpoint} is of a {description.model_class}, which is no model of transformers: it cannot be made "
            "from a file. In a script that makes the model, train(resume_from_checkpoint=...) and save_model() write "
            "it."
        )
    try:
        import transformers
    except ModuleNotFoundError:
        raise ConfigError(f"{checkpoint} is of a model of transformers: pip install 'ds-trainer[hf]'.") from None
    model_class = getattr(transformers, description.model_class, None)
    if model_class is None:
        raise ConfigError(
            f"{checkpoint} is of a {description.model_class}, which transformers {transformers.__version__} does not "
            "have. Use the version that it was trained with."
        )
    config = transformers.AutoConfig.from_pretrained(str(checkpoint))
    config.name_or_path = description.name_or_path
    with torch.device("meta"):
        return model_class(config)


def check_against_model(checkpoint: Path, description: ModelDescription) -> list[str]:
    """Compare the described tensors with those of the model that ``config.json`` describes.

    Returns:
        Names that only one of both has; ``from_pretrained`` would warn of them.

    Raises:
        ConfigError: a tensor has another shape there, so that nothing could load it.
    """
    expected = {name: tuple(t.shape) for name, t in base_blueprint(checkpoint, description).state_dict().items()}
    described = {tensor.name: tuple(tensor.shape) for tensor in description.tensors}
    problems = [
        f"{name} is {list(shape)} in {checkpoint}, but {list(expected[name])} in the {description.model_class} that "
        "its config.json describes."
        for name, shape in described.items()
        if name in expected and expected[name] != shape
    ]
    if problems:
        raise ConfigError(problems)
    return sorted(described.keys() - expected.keys())


def adapted_blueprint(checkpoint: Path, description: ModelDescription, wrapped: bool) -> Any:
    """:func:`base_blueprint` with the checkpoint's adapters, whose tensors are on meta too.

    Args:
        checkpoint, description: whose.
        wrapped: in peft's own class; otherwise put in by transformers.

    Raises:
        ConfigError: as :func:`base_blueprint`; or peft is not installed, or makes other tensors than were saved.
    """
    base = base_blueprint(checkpoint, description)
    try:
        import peft
    except ModuleNotFoundError:
        raise ConfigError(f"{checkpoint} is of a model with adapters: pip install 'ds-trainer[peft]'.") from None
    configs = {name: _config_of(values) for name, values in description.adapters.items()}
    model: Any = base
    for index, (name, config) in enumerate(configs.items()):
        with _untouched(config):
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
    found = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for tensor in description.tensors:
        name = blueprint_name(tensor.name, description.wrapped, wrapped)
        if tensor.adapter and found.get(name) != tuple(tensor.shape):
            raise ConfigError(
                f"{tensor.name} is {list(tensor.shape)} in {checkpoint}, but peft {peft.__version__} makes "
                f"{list(found.get(name, ())) or 'no such tensor'} from its configuration. Use the version that it was "
                "trained with."
            )
    return model


def blueprint_name(name: str, from_wrapped: bool, to_wrapped: bool) -> str:
    """The name of a tensor in a model with adapters put in by peft's class or by transformers, from the other one's."""
    if from_wrapped == to_wrapped:
        return name
    return f"{_INSIDE}{name}" if to_wrapped else name.removeprefix(_INSIDE)


def _config_of(values: Mapping[str, Any]) -> Any:
    from peft import PeftConfig

    return PeftConfig.from_peft_type(**values)


@contextmanager
def _untouched(config: Any) -> Iterator[None]:
    """Inside, adapters begin without the computations (of singular values, say) that need the weights."""
    if not hasattr(config, "init_lora_weights"):
        yield
        return
    wanted, config.init_lora_weights = config.init_lora_weights, False
    try:
        yield
    finally:
        config.init_lora_weights = wanted
