"""Makes MoE blocks ZeRO-3 leaf modules: all experts of a block are gathered together, regardless of routing.

ZeRO-3 gathers a module's parameters when the module is called, and a gather needs all ranks. An expert that is a
separate module is called only on ranks that route tokens to it: the other ranks hang. DeepSpeed has leaf modules for
this, and a list of three classes; this module finds MoE blocks by structure. Models that stack the experts of a block
into one parameter, as transformers does since version 5, need no leaf module and get none.

**The structure.** A list of at least two identical modules (class, parameter names and shapes), without submodules that
have only vectors as parameters (norms, as in every transformer layer); and, in the module that contains the list or in
its parent, a router: a matrix with one row per expert, as wide as the experts' input. The full model is never a leaf.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ds_trainer.engine.tiling.tiled_forward import tiled_forward


def moe_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Modules of ``model`` whose experts are separate modules, by name; the outermost if they are nested."""
    modules = dict(model.named_modules())
    blocks: dict[str, nn.Module] = {}
    for name, module in modules.items():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            block = _block_around(name, list(module.children()), modules)
            if block:
                blocks[block] = modules[block]
    return {name: blocks[name] for name in blocks if not any(name.startswith(f"{other}.") for other in blocks)}


def mark_leaf_modules(model: nn.Module) -> list[str]:
    """Marks leaf modules of ``model``, before ``deepspeed.initialize``; returns their names.

    These are MoE blocks, heads with LoRA, and tiled MLPs: their parts run once per tile, and all tiles together need
    one gather.
    """
    from deepspeed.utils import set_z3_leaf_module

    blocks = {**moe_blocks(model), **adapted_heads(model)}
    for name, module in model.named_modules():
        if tiled_forward(module) is not None and any(True for _ in module.children()):
            blocks[name] = module
    for block in blocks.values():
        set_z3_leaf_module(block, True)
    return list(blocks)


def adapted_heads(model: nn.Module) -> dict[str, nn.Module]:
    """Output embeddings with LoRA, by name: a loss in tiles needs all their weights together."""
    modules = dict(model.named_modules())
    adapted = {name: module for name, module in modules.items() if hasattr(module, "lora_A")}
    if not adapted:
        return {}
    getters = (getattr(module, "get_output_embeddings", None) for module in modules.values())
    heads = {id(getter()) for getter in getters if callable(getter)}
    return {name: module for name, module in adapted.items() if id(module) in heads}


def delay_leaf_reduction(model: nn.Module) -> None:
    """Delays the reduction of a leaf module's gradients until all of them are computed.

    DeepSpeed 0.19.8 reduces them in the module's full backward hook. PyTorch runs that hook when the gradients of the
    module's positional inputs are known; if none of the inputs requires a gradient, it runs before any parameter has
    its gradient. DeepSpeed then reduces zeros, and the backward pass crashes. So a forward pre-hook passes the input by
    position and makes it require a gradient.
    """
    from deepspeed.utils import get_z3_leaf_modules

    for module in get_z3_leaf_modules(model):
        if any(parameter.requires_grad for parameter in module.parameters()):
            names = [
                name
                for name, parameter in inspect.signature(module.forward).parameters.items()
                if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            ]
            hook = torch.compiler.disable(_InputNeedsGradient(names).prepare)
            module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)


class _InputNeedsGradient:
    """The forward pre-hook; ``names`` are the arguments that can be passed by position."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            return None
        values, rest = list(args), dict(kwargs)
        for name in self._names[len(values) :]:
            if name not in rest:
                break
            values.append(rest.pop(name))
        if not any(isinstance(value, torch.Tensor) and value.requires_grad for value in values):
            for index, value in enumerate(values):
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    values[index] = value.detach().requires_grad_()
                    break
        return tuple(values), rest


def _block_around(name: str, experts: list[nn.Module], modules: dict[str, nn.Module]) -> str:
    """The name of the MoE block that contains the list ``name`` of ``experts``; empty if it is not an MoE block."""
    if len(experts) < 2 or not _are_experts(experts):
        return ""
    own = {id(parameter) for expert in experts for parameter in expert.parameters()}
    widths = {width for parameter in experts[0].parameters() for width in _shape(parameter)}
    around = name
    for _ in range(2):
        around = around.rpartition(".")[0]
        if not around:  # the full model
            return ""
        rest = [p for p in _candidates(modules[around]) if id(p) not in own]
        if any(_shape(p)[0] == len(experts) and _shape(p)[1] in widths for p in rest if len(_shape(p)) == 2):
            return around
    return ""


def _are_experts(modules: list[nn.Module]) -> bool:
    first = _signature(modules[0])
    if not first or any(_signature(module) != first for module in modules[1:]):
        return False
    return all(
        any(len(_shape(p)) > 1 for p in part.parameters(recurse=False))
        for part in modules[0].modules()
        if any(True for _ in part.parameters(recurse=False))
    )


def _signature(module: nn.Module) -> tuple[Any, ...]:
    """The class and the names and shapes of the parameters; empty without parameters."""
    shapes = tuple((name, _shape(parameter)) for name, parameter in module.named_parameters())
    return (type(module), *shapes) if shapes else ()


def _candidates(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that may belong to a router; excludes embeddings."""
    for part in module.modules():
        if not isinstance(part, nn.Embedding):
            yield from part.parameters(recurse=False)


def _shape(parameter: Any) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))  # the full shape of a ZeRO-3 shard
