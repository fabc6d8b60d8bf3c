"""Which class an optimizer's name stands for, with which arguments; and optimizers of a class that was handed in."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ds_trainer.arguments.enums import OptimizerNames
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.config.library_optimizers import library_optimizer
from ds_trainer.config.optimizer_types import BUILT_HERE, OF_NAME, TYPES
from ds_trainer.optim.library_optimizers import library_arguments, library_class, target_parameters
from ds_trainer.optim.optimizers import construct
from ds_trainer.utils.errors import ConfigError


def optimizer_class_and_arguments(
    args: TrainingArguments, model: nn.Module | None = None
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Class and keyword arguments of ``args.optim``, as transformers' ``Trainer.get_optimizer_cls_and_kwargs``.

    For a low-rank optimizer the arguments have ``params``: the groups of ``model``. Weight decay is in the groups that
    the Trainer makes, and where the class gets it as its default here too. Where the compiled configuration takes
    DeepSpeed's own AdamW or Adagrad (offload on a GPU), this is torch's class of the same formula.

    Raises:
        ConfigError: an optimizer of DeepSpeed's, which has no class outside it; a library or a model is missing.
    """
    said = f"optim={args.optim} ({args.where('optim')})"
    library = library_optimizer(args)
    if library is not None:
        cls = library_class(args, library)
        arguments, of_matrices = library_arguments(args, library)
        if library.low_rank:
            if model is None:
                raise ConfigError(f"{said} works on matrices of the model: hand the model in too.")
            targets = target_parameters(args, model)
            rest = [parameter for name, parameter in model.named_parameters() if name not in targets]
            arguments["params"] = [{"params": rest}, {"params": list(targets.values()), **of_matrices}]
        return cls, arguments
    kind = TYPES[OF_NAME[OptimizerNames(args.optim)].lower()]
    if kind.name not in BUILT_HERE:
        raise ConfigError(f"{said} is built by DeepSpeed, from the compiled configuration; there is no class to give.")
    arguments = {}
    for name, fields in kind.arguments:
        values = tuple(getattr(args, item) for item in fields)
        if name != "weight_decay":
            arguments[name] = values if len(values) > 1 else values[0]
    if args.optim == OptimizerNames.ADAMW_TORCH_FUSED:
        arguments["fused"] = True
    arguments |= {name: value for name, value in args.optimizer_arguments().items() if name in kind.own}
    return getattr(torch.optim, kind.name), arguments


def build_given_optimizer(
    cls: Any, arguments: dict[str, Any], model: nn.Module, groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """An optimizer of the class that was handed in as ``optimizer_cls_and_kwargs``.

    Args:
        cls: a class of optimizers, called with parameter groups and ``arguments``; or a class of factories, whose
            instance is called with the model and ``arguments``.
        arguments: keyword arguments; ``params`` (or ``model``) among them takes the place of ``groups``.
        model: the model.
        groups: the Trainer's parameter groups.

    Raises:
        ConfigError: the class refuses the arguments, or makes no optimizer.
    """
    said = "optimizer_cls_and_kwargs handed to the Trainer"
    rest = {name: value for name, value in arguments.items() if name not in ("params", "model")}
    if not callable(cls):
        raise ConfigError(f"{said}: {cls!r} is neither a class of optimizers nor of factories.")
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer):
        return construct(cls, arguments.get("params", arguments.get("model", groups)), rest, said)
    try:
        factory = cls()
    except TypeError as error:
        raise ConfigError(f"{said}: the factory {cls!r} must be made without arguments: {error}.") from error
    if not callable(factory):
        raise ConfigError(f"{said}: {cls!r} is no class of optimizers, and what it makes cannot be called.")
    return construct(factory, model, arguments, said)
