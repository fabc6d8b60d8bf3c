"""Weights that bitsandbytes stores in 4 or 8 bits: which parameters they are, and how many weights they represent.

A 4-bit parameter is a column of packed numbers with its scales in ``quant_state``; an 8-bit parameter has the shape of
its weight and its scales in ``SCB``. Neither is trained. Source: bitsandbytes 0.50 (``nn/modules.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from ds_trainer.engine.weights import full_numel


def quantized_bits(parameter: Any) -> int | None:
    """4 or 8; None for an ordinary parameter."""
    package = sys.modules.get("bitsandbytes")
    if package is None:
        return None
    if isinstance(parameter, package.nn.Params4bit):
        return 4
    # With has_fp16_weights it holds 16-bit floats.
    return 8 if isinstance(parameter, package.nn.Int8Params) and parameter.element_size() == 1 else None


def quantized_parameters(model: nn.Module) -> dict[str, Any]:
    """The quantized parameters of ``model``, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if quantized_bits(parameter) is not None}


def represented_numel(parameter: Any) -> int:
    """Number of weights that ``parameter`` represents, even if it is sharded, partitioned or packed."""
    state = getattr(parameter, "quant_state", None)
    return int(state.shape.numel()) if state is not None else full_numel(parameter)


def scale_names(name: str) -> set[str]:
    """The parameters whose scales a tensor called ``name`` in a file may hold."""
    module, _, last = name.rpartition(".")
    if last in ("SCB", "weight_format"):
        return {f"{module}.weight"}
    parts = name.split(".")
    return {".".join(parts[:length]) for length in range(1, len(parts)) if parts[length - 1] == "weight"}


def is_packed_for_inference(parameter: Any) -> bool:
    """Whether bitsandbytes has repacked a 4-bit weight for its CPU kernel, which has no backward pass."""
    return bool(getattr(getattr(parameter, "quant_state", None), "packing_format_for_cpu", False))


def disable_cpu_repacking(model: nn.Module) -> None:
    """Prevents the 4-bit layers of ``model`` from being repacked during evaluation on a CPU.

    On a CPU with AVX512-BF16, their first forward pass in evaluation mode rounds the scales to bfloat16 and repacks the
    weights for an inference kernel. Training would then continue with those, without gradients.
    """
    for layer in _four_bit_layers(model):
        layer.support_avx512bf16_for_cpu = False


def _four_bit_layers(model: nn.Module) -> Iterator[Any]:
    package = sys.modules.get("bitsandbytes")
    if package is not None:
        yield from (module for module in model.modules() if isinstance(module, package.nn.Linear4bit))
