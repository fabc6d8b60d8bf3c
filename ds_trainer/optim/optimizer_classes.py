"""The class and arguments of an optimizer name, and optimizers of a class that the user passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ds_trainer.arguments.enums import OptimizerNames
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.config.library_optimizer_table import library_optimizer
from ds_trainer.config.optimizer_types import BUILT_HERE, OF_NAME, TYPES
from ds_trainer.optim.library_optimizer_builder import library_arguments, library_class, target_parameters
from ds_trainer.optim.optimizer_builder import construct
from ds_trainer.utils.errors import ConfigError


def optimizer_class_and_arguments(
    args: TrainingArguments, model: nn.Module | None = None
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class and keyword arguments of ``args.optim``, like transformers' ``Trainer.get_optimizer_cls_and_kwargs``.

    For a low-rank optimizer the arguments contain ``params``: the parameter groups of ``model``. Weight decay is in the
    parameter groups of the Trainer, and here too if the class takes it as a default. If the compiled configuration uses
    DeepSpeed's own AdamW or Adagrad (offload on a GPU), this returns torch's class with the same formula.

    Raises:
        ConfigError: DeepSpeed builds the optimizer itself; or a library or the model is missing.
    """
    source = f"optim={args.optim} ({args.where('optim')})"
    library = library_optimizer(args)
    if library is not None:
        cls = library_class(args, library)
        arguments, of_matrices = library_arguments(args, library)
        if library.low_rank:
            if model is None:
                raise ConfigError(f"{source} works on matrices of the model: pass the model, too.")
            targets = target_parameters(args, model)
            rest = [parameter for name, parameter in model.named_parameters() if name not in targets]
            arguments["params"] = [{"params": rest}, {"params": list(targets.values()), **of_matrices}]
        return cls, arguments
    kind = TYPES[OF_NAME[OptimizerNames(args.optim)].lower()]
    if kind.name not in BUILT_HERE:
        raise ConfigError(
            f"{source}: DeepSpeed builds it from the compiled configuration; there is no class to return."
        )
    arguments = {}
    for name, fields in kind.arguments:
        values = tuple(getattr(args, item) for item in fields)
        if name != "weight_decay":
            arguments[name] = values if len(values) > 1 else values[0]
    if args.optim == OptimizerNames.ADAMW_TORCH_FUSED:
        arguments["fused"] = True
    arguments |= {name: value for name, value in args.optimizer_arguments().items() if name in kind.own}
    return getattr(torch.optim, kind.name), arguments


_GROUPS = ("params", "model", "optimizer_dict")  # names by which arguments give parameters, as in transformers


def build_given_optimizer(
    cls: Any,
    arguments: dict[str, Any],
    model: nn.Module,
    groups: list[dict[str, Any]],
    source: str = "optimizer_cls_and_kwargs passed to the Trainer",
) -> torch.optim.Optimizer:
    """Builds an optimizer of the class that the user chose.

    Args:
        cls: an optimizer class, called with parameter groups and ``arguments``; or a factory class, whose instance is
            called with the model and ``arguments``.
        arguments: keyword arguments; ``params``, ``model`` or ``optimizer_dict`` among them replaces ``groups``.
        model: the model.
        groups: the Trainer's parameter groups.
        source: who chose it, for messages.

    Raises:
        ConfigError: the class rejects the arguments, or does not build an optimizer.
    """
    rest = {name: value for name, value in arguments.items() if name not in _GROUPS}
    if not callable(cls):
        raise ConfigError(f"{source}: {cls!r} is neither an optimizer class nor a factory class.")
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer):
        given = [arguments[name] for name in _GROUPS if name in arguments]
        chosen = given[-1] if given else groups
        if isinstance(chosen, list):  # an engine has no group without parameters, and restores none
            chosen = [group for group in chosen if not isinstance(group, dict) or group.get("params") != []]
        return construct(cls, chosen, rest, source)
    try:
        factory = cls()
    except TypeError as error:
        raise ConfigError(f"{source}: the factory {cls!r} must be constructible without arguments: {error}.") from error
    if not callable(factory):
        raise ConfigError(f"{source}: {cls!r} is not an optimizer class, and its instances are not callable.")
    return construct(factory, model, arguments, source)
