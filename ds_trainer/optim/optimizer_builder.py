"""Builds the optimizer of a compiled configuration, over parameter groups with and without weight decay."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.config.optimizer_block import BUILT_HERE
from ds_trainer.utils.errors import ConfigError

# Scales and shifts of normalization layers are not decayed, for any class name of the layer.
_NORM_NAME = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)|normalization", re.IGNORECASE)
_NORM_CLASS = re.compile(r"^norm$|(?:layer|rms|batch|group|instance)norm", re.IGNORECASE)


def decay_parameter_names(model: nn.Module) -> list[str]:
    """Names of the parameters with weight decay: all except biases and the parameters of norms."""
    in_norms = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if _NORM_CLASS.search(type(module).__name__)
        for name, _ in module.named_parameters(recurse=False)
    }
    return [name for name, _ in model.named_parameters() if name not in in_norms and not _NORM_NAME.search(name)]


def parameter_groups(model: nn.Module, decay_names: list[str], weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in two groups, with and without weight decay; omits empty groups.

    Raises:
        ConfigError: there is none.
    """
    decayed = set(decay_names)
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        adapters = hasattr(model, "peft_config")
        raise ConfigError(
            f"Nothing of {type(model).__name__} is trained: requires_grad is False for all its parameters. "
            + ("Load adapters with is_trainable=True, or set inference_mode=False." * adapters)
            + ("Call requires_grad_(True) on what is to be trained." * (not adapters))
        )
    groups = [
        {"params": [p for name, p in trainable if name in decayed], "weight_decay": weight_decay},
        {"params": [p for name, p in trainable if name not in decayed], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def is_built_here(config: CompiledConfig) -> bool:
    """Whether the configuration's optimizer is torch's, which we build; DeepSpeed builds its own."""
    if config.optimizer_type in ("Adam", "AdamW"):
        return bool(config.optimizer_params.get("torch_adam", False))
    return config.optimizer_type in BUILT_HERE


def optimizer_class(config: CompiledConfig) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Class and arguments of the configuration's ``optimizer`` section, as DeepSpeed itself would build it."""
    name, arguments = str(config.optimizer_type), config.optimizer_params
    arguments.pop("torch_adam", None)
    if name in ("Adam", "AdamW"):
        name = "AdamW" if arguments.pop("adam_w_mode", True) else name
    if "betas" in arguments:
        arguments["betas"] = tuple(arguments["betas"])
    return getattr(torch.optim, name), arguments


def build_optimizer(config: CompiledConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Builds the optimizer of the configuration over ``groups``.

    Raises:
        ConfigError: torch rejects the arguments.
    """
    cls, arguments = optimizer_class(config)
    source = "optim_args and optimizer.params of the deepspeed file (see `ds-trainer config --explain`)"
    return construct(cls, groups, arguments, source)


def construct(cls: Any, parameters: Any, arguments: dict[str, Any], source: str) -> torch.optim.Optimizer:
    """Returns ``cls(parameters, **arguments)``.

    Raises:
        ConfigError: the class rejects the arguments, or the result is not an optimizer.
    """
    name = f"{getattr(cls, '__module__', '')}.{getattr(cls, '__qualname__', cls)}"
    try:
        optimizer = cls(parameters, **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{source}: {name} rejects the arguments {arguments}: {error}.") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"{source}: {name} returns a {type(optimizer).__name__}, not a torch.optim.Optimizer.")
    return optimizer


def parameters_of_groups(optimizer: torch.optim.Optimizer | list[dict[str, Any]]) -> list[list[Any]]:
    """The parameters of each parameter group."""
    groups = optimizer if isinstance(optimizer, list) else optimizer.param_groups
    return [list(group["params"]) for group in groups]
