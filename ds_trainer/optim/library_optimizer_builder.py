"""Builds optimizers from other libraries, as described in :mod:`ds_trainer.config.library_optimizer_table`."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ds_trainer.arguments.enums import OptimizerNames
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.arguments.typed import WrongType, read_as
from ds_trainer.arguments.yaml_reader import Located
from ds_trainer.config.library_optimizer_table import LibraryOptimizer, library_optimizer
from ds_trainer.config.optimizer_block import BUILT_HERE, OF_NAME, TYPES
from ds_trainer.optim.optimizer_builder import construct
from ds_trainer.utils.errors import ConfigError

Groups = list[dict[str, Any]]


def library_class(args: TrainingArguments, library: LibraryOptimizer) -> Any:
    """Imports the optimizer class.

    Raises:
        ConfigError: the library is not installed, or cannot be imported.
    """
    module, _, name = library.cls.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ConfigError(
            f"optim={args.optim} ({args.where('optim')}) needs {library.package}, which cannot be imported: {error}. "
            f"Run pip install {library.package}, or use optim=adamw_torch."
        ) from error


def library_arguments(args: TrainingArguments, library: LibraryOptimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of the class, and those of the parameter groups with a low-rank optimizer's matrices.

    Raises:
        ConfigError: ``optim_args`` has a value of the wrong type.
    """
    own = dict(_own_arguments(args, library))
    betas = [args.adam_beta1, args.adam_beta2]
    if "beta3" in library.own:
        betas = [own.pop("beta1", betas[0]), own.pop("beta2", betas[1]), own.pop("beta3")]
    from_arguments = {
        "betas": tuple(betas),
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
        "warmup_steps": args.warmup_steps,
    }
    arguments = {"lr": args.learning_rate, **{name: from_arguments[name] for name in library.takes}, **library.fixed}
    if library.cls.endswith("APOLLOAdamW"):  # transformers passes Adam's arguments to the matrices only
        own |= {"betas": from_arguments["betas"], "eps": from_arguments["eps"]}
    return (arguments, own) if library.low_rank else ({**arguments, **own}, {})


def _own_arguments(args: TrainingArguments, library: LibraryOptimizer) -> Iterator[tuple[str, Any]]:
    options = args.optimizer_arguments()
    for name, (kind, *default) in library.own.items():
        if name in options:
            try:
                yield name, read_as(Located(options[name], ""), kind)
            except WrongType as error:
                raise ConfigError(f"optim_args={args.optim_args}: {name} of optim={args.optim}: {error}.") from error
        elif default:
            yield name, default[0]


def target_parameters(args: TrainingArguments, model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights of the linear layers that ``optim_target_modules`` selects: by a substring of the name (in a list), or by
    a regular expression that matches the full name; ``all-linear`` selects all.

    Raises:
        ConfigError: no layer matches.
    """
    requested = args.optim_target_modules
    patterns = [requested] if isinstance(requested, str) else list(requested or ())
    all_linear = isinstance(requested, str) and requested.replace("_", "-") == "all-linear"

    def is_target(name: str) -> bool:
        if not isinstance(requested, str) and any(pattern in name for pattern in patterns):
            return True
        return any(re.fullmatch(pattern, name) for pattern in patterns)

    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    setting = f"optim_target_modules={requested!r} ({args.where('optim_target_modules')})"
    try:
        targets = {f"{name}.weight": linear[name].weight for name in linear if all_linear or is_target(name)}
    except re.error as error:
        raise ConfigError(f"{setting} is not a regular expression: {error}.") from error
    if not targets:
        raise ConfigError(
            f"{setting} matches no linear layer of the model. Linear layers: "
            f"{', '.join(list(linear)[:8]) or 'none'}{' ...' if len(linear) > 8 else ''}."
        )
    return targets


def build_library_optimizer(
    args: TrainingArguments, library: LibraryOptimizer, model: nn.Module, groups: Groups
) -> torch.optim.Optimizer:
    """Builds the optimizer over ``groups`` of the parameters of ``model``.

    Raises:
        ConfigError: the library is missing or rejects the arguments, or no matrix matches.
    """
    cls = library_class(args, library)
    arguments, of_matrices = library_arguments(args, library)
    if library.low_rank:
        # Splits every group in two, other parameters first, because the order determines APOLLO's random numbers.
        targets = target_parameters(args, model)
        chosen = {id(parameter) for parameter in targets.values()}
        rest = [{**group, "params": [p for p in group["params"] if id(p) not in chosen]} for group in groups]
        matrices = [
            {**group, "params": [p for p in group["params"] if id(p) in chosen], **of_matrices} for group in groups
        ]
        groups = [group for group in (*rest, *matrices) if group["params"]]
    optimizer = construct(cls, groups, arguments, f"optim={args.optim} with optim_args={args.optim_args}")
    if library.package == "bitsandbytes" and library.fixed["optim_bits"] == 8:
        # As in transformers. The library identifies tensors by identity, so this has no effect on ZeRO's partitions.
        manager = importlib.import_module("bitsandbytes.optim").GlobalOptimManager.get_instance()
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                manager.register_module_override(module, "weight", {"optim_bits": 32})
    move_grokadamw_state_to_optimizer_state(optimizer)
    return optimizer


def move_grokadamw_state_to_optimizer_state(optimizer: torch.optim.Optimizer | None) -> None:
    """Moves GrokAdamW's moments from its parameter groups, where a checkpoint would lose them, to its ``state``.

    Does nothing for other optimizers. Idempotent.
    """
    if not any(cls.__module__.partition(".")[0] == "grokadamw" for cls in type(optimizer).__mro__):
        return
    assert optimizer is not None
    if any(group.get("state") is optimizer.state for group in optimizer.param_groups):
        return

    def link_state(instance: torch.optim.Optimizer) -> None:
        for group in instance.param_groups:
            group["state"] = instance.state

    def remove_link(instance: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        for group in saved["param_groups"]:
            group.pop("state", None)

    link_state(optimizer)
    optimizer.register_state_dict_post_hook(remove_link)
    optimizer.register_load_state_dict_post_hook(link_state)


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
        replacing = [arguments[name] for name in _GROUPS if name in arguments]
        chosen = replacing[-1] if replacing else groups
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
