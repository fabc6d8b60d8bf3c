"""Parameters of a module, which may be on the meta device: equal parameters of repeated layers as one group."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ds_trainer.planner.parameters.groups import ParameterGroup

if TYPE_CHECKING:
    from torch import nn

_INDEX = re.compile(r"(?:^|\.)(\d+)(?=\.)")
_EMBEDDINGS = ("embed", "wte", "wpe", "position", "cls_token", "mask_token", "relative_attention_bias")
_ATTENTION = ("attn", "attention", "q_proj", "k_proj", "v_proj", "o_proj", "qkv", "wqkv")
_HEADS = ("lm_head", "classifier", "score", "qa_outputs", "cls", "head", "lm_predictions", "generator_lm_head")
_ENCODERS_OF_MEDIA = ("vision", "visual", "image", "audio", "speech")


def module_parameters(model: nn.Module) -> list[ParameterGroup]:
    """The parameters of ``model``, tied ones once. Its weights are not read.

    ``stack`` of a group is its index in :func:`layer_lists`.
    ``split`` is None: :mod:`ds_trainer.planner.parameters.modules` adds it. Quantized weights of bitsandbytes have
    the shape of the layer, and the bytes of an element.
    """
    from torch import nn

    stacks = layer_lists(model)
    norms, tables = _owned_by(model, "norm"), set(_tables(model, nn.Embedding))
    head, adapter = _head_name(model), _adapter_prefix(model)
    quantized = dict(_quantized(model))
    counts: Counter[ParameterGroup] = Counter()
    for name, parameter in model.named_parameters():
        stack = next((index for index, prefix in enumerate(stacks) if name.startswith(f"{prefix}.")), None)
        shape, width = quantized.get(name, (whole_shape(parameter), None))
        kind = _kind(name, shape, in_norm=name in norms, in_table=name in tables, inside=stack is not None)
        if adapter is not None and (adapter in name or ".modules_to_save." in name):
            kind = "adapter"
        elif name.startswith(f"{head}."):
            kind = "head"
        short = name if stack is None else _INDEX.sub(".*", name.removeprefix(f"{stacks[stack]}.")).lstrip(".*")
        counts[
            ParameterGroup(short, shape, kind, stack=stack, trained=bool(parameter.requires_grad), element_bytes=width)
        ] += 1
    return [replace(group, copies=copies) for group, copies in counts.items()]


def whole_shape(parameter: Any) -> tuple[int, ...]:
    """Shape of a parameter, also of one that ZeRO 3 has partitioned."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def layer_lists(model: nn.Module) -> list[str]:
    """Names of the lists of layers, encoders of images and sound first.

    A list of layers is a ``ModuleList`` or a ``Sequential`` of modules with parts of their own, outside of another one.
    Where some have attention, those without are no lists of layers (a list of projectors).
    """
    from torch import nn

    names: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or name.startswith(tuple(f"{one}." for one in names)):
            continue
        if _is_stack(module, isinstance(module, nn.Sequential)):
            names.append(name)
    attending = [name for name in names if has_attention(model.get_submodule(name))]
    return sorted(attending or names, key=lambda name: not any(word in name for word in _ENCODERS_OF_MEDIA))


def has_attention(module: nn.Module) -> bool:
    """Whether a part of ``module`` is named as attention is."""
    return any(_is_attention(name) for name, _ in module.named_modules())


def _is_stack(modules: Any, same: bool) -> bool:
    layers = list(modules)
    whole = all(any(True for _ in layer.children()) for layer in layers)
    if same:
        return whole and len(layers) > 1 and len({type(layer) for layer in layers}) == 1
    return whole and (len(layers) > 1 or (len(layers) == 1 and has_attention(layers[0])))


def _owned_by(model: nn.Module, word: str) -> set[str]:
    """Names of the parameters of modules whose class has ``word`` in its name."""
    return {
        f"{name}.{part}"
        for name, module in model.named_modules()
        if word in type(module).__name__.lower()
        for part, _ in module.named_parameters(recurse=False)
    }


def _tables(model: nn.Module, kind: type[nn.Module]) -> Iterator[str]:
    for name, module in model.named_modules():
        if isinstance(module, kind):
            yield from (f"{name}.{part}" for part, _ in module.named_parameters(recurse=False))


def _head_name(model: nn.Module) -> str:
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    return next((name for name, module in model.named_modules() if head is not None and module is head), "lm_head")


def _adapter_prefix(model: nn.Module) -> str | None:
    """What the names of a PEFT model's own parameters contain; None for another model."""
    if getattr(model, "peft_config", None) is None:
        return None
    prefix = getattr(getattr(model, "base_model", None), "prefix", None)
    return prefix if isinstance(prefix, str) and prefix else "prompt_encoder"


def _quantized(model: nn.Module) -> Iterator[tuple[str, tuple[tuple[int, ...], float]]]:
    """Name, shape and bytes of an element of each linear layer's weight that is stored as integers."""
    for name, module in model.named_modules():
        own = {**module._buffers, **module._parameters, **vars(module)}  # a parametrization would be computed
        weight: Any = own.get("weight")
        outputs, inputs = getattr(module, "out_features", None), getattr(module, "in_features", None)
        dtype = getattr(weight, "dtype", None)
        if dtype is None or dtype.is_floating_point or not outputs or not inputs:
            continue
        elements = outputs * inputs
        stored = weight.numel() * weight.element_size() + _scale_bytes(weight)
        if stored > elements:  # packed later, when the weights reach a device: half a byte or one
            stored = elements / 2 if type(weight).__name__ == "Params4bit" else elements
        yield f"{name}.weight", ((outputs, inputs), stored / elements)


def _scale_bytes(weight: Any) -> int:
    """Bytes of the scales that bitsandbytes keeps beside a weight."""
    import torch

    state = getattr(weight, "quant_state", None)
    nested = getattr(state, "state2", None)
    parts = (getattr(state, "absmax", None), getattr(nested, "absmax", None), getattr(weight, "SCB", None))
    return sum(part.numel() * part.element_size() for part in parts if isinstance(part, torch.Tensor))


def _is_attention(name: str) -> bool:
    return any(part.lower().startswith(_ATTENTION) or part.lower().endswith(_ATTENTION) for part in name.split("."))


def _kind(name: str, shape: tuple[int, ...], *, in_norm: bool, in_table: bool, inside: bool) -> str:
    if in_norm:
        return "norm"
    if in_table:
        return "embedding"
    if inside and ("expert" in name or "router" in name or (name.endswith("gate.weight") and len(shape) == 2)):
        return "experts"
    if inside:
        return "attention" if _is_attention(name) else "mlp"
    if any(word in name for word in _EMBEDDINGS):
        return "embedding"
    return "head" if name.split(".")[0] in _HEADS or "lm_head" in name else "other"


_ROW = re.compile(
    r"(?:^|\.)(?:o|wo|Wo|w2|o_proj|out_proj|down_proj|c_proj|fc2|fc_out|out_lin|lin2|dense_4h_to_h|output\.dense|"
    r"attention\.dense)\.bias$"
)
"""Biases of layers whose inputs are partitioned: every rank adds them, as a whole, to the sum."""


def with_partition(groups: Iterable[ParameterGroup], has_plan: bool) -> tuple[ParameterGroup, ...]:
    """``groups`` with the dimension that is partitioned.

    Those are the linear layers of attention and MLP, the biases of layers whose outputs are partitioned, embeddings
    inside of layers (relative positions), and with a plan the LM head. Which dimension of a matrix it is makes no
    difference to sizes.

    Args:
        groups: parameters without adapters.
        has_plan: the model has a plan for tensor parallelism; otherwise layers are found by their names.
    """
    return tuple(replace(group, split=_split(group, has_plan)) for group in groups)


def has_tensor_parallel_plan(model: Any) -> bool:
    """Whether a transformers model says what to partition (``_tp_plan``, ``base_model_tp_plan``)."""
    config = getattr(model, "config", None)
    plans = (getattr(config, "base_model_tp_plan", None), getattr(type(model), "_tp_plan", None))
    return any(isinstance(plan, dict) and plan for plan in plans)


def _split(group: ParameterGroup, has_plan: bool) -> int | None:
    if len(group.shape) == 2:
        if group.kind == "head":
            return 0 if has_plan and group.name.endswith("lm_head.weight") else None
        if group.kind == "embedding":
            return None if group.stack is None else 1
        return 0 if group.kind in ("attention", "mlp") and group.stack is not None else None
    is_bias = group.stack is not None and group.kind in ("attention", "mlp") and group.name.endswith("bias")
    return 0 if is_bias and len(group.shape) == 1 and not _ROW.search(group.name) else None
