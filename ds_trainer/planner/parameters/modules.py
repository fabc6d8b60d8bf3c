"""Parameters of a module, which may be on the meta device: equal parameters of repeated layers as one group."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from ds_trainer.planner.parameters.groups import ParameterGroup

if TYPE_CHECKING:
    from torch import nn

_INDEX = re.compile(r"(?:^|\.)(\d+)(?=\.)")
_EMBEDDINGS = ("embed", "wte", "wpe", "shared", "position")
_ATTENTION = ("attn", "attention", "q_proj", "k_proj", "v_proj", "o_proj")


def module_parameters(model: nn.Module) -> list[ParameterGroup]:
    """The parameters of ``model``, tied ones once. Its weights are not read.

    A stack is a list of modules with at least two entries. The partition of a tensor-parallel model is not known here:
    ``split`` is None.
    """
    from torch import nn

    norms = {
        f"{name}.{part}"
        for name, module in model.named_modules()
        if "norm" in type(module).__name__.lower()
        for part, _ in module.named_parameters(recurse=False)
    }
    stacks = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1 and not _INDEX.search(f"{name}.")
    ]
    head = _head_name(model)
    found: Counter[ParameterGroup] = Counter()
    for name, parameter in model.named_parameters():
        stack = next((index for index, prefix in enumerate(stacks) if name.startswith(f"{prefix}.")), None)
        kind = _kind(name, tuple(parameter.shape), is_norm=name in norms, is_head=name.startswith(f"{head}."))
        short = name if stack is None else _INDEX.sub(".*", name.removeprefix(f"{stacks[stack]}.")).lstrip(".*")
        found[ParameterGroup(short, tuple(parameter.shape), kind, stack=stack)] += 1
    return [
        ParameterGroup(group.name, group.shape, group.kind, copies, stack=group.stack)
        for group, copies in found.items()
    ]


def _head_name(model: nn.Module) -> str:
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    return next((name for name, module in model.named_modules() if module is head), "lm_head")


def _kind(name: str, shape: tuple[int, ...], *, is_norm: bool, is_head: bool) -> str:
    if is_norm:
        return "norm"
    if is_head:
        return "head"
    if "expert" in name or (name.endswith("gate.weight") and "mlp" in name):
        return "experts"
    parts = name.split(".")
    if any(part.startswith(_ATTENTION) or part.endswith(_ATTENTION) for part in parts):
        return "attention"
    if len(shape) == 2 and any(word in name for word in _EMBEDDINGS):
        return "embedding"
    return "mlp" if _INDEX.search(name) else "other"
