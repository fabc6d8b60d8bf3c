"""Liger: fused Triton kernels for a model's norms, activations, rotary embeddings and loss.

Source: the ``liger-kernel`` package (Hsu et al. 2024, arXiv:2410.10989).
"""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

from torch import nn

from ds_trainer.data.columns import base_model
from ds_trainer.utils.errors import ConfigError, did_you_mean


def liger_problems(model: nn.Module, kernels: dict[str, bool] | None, device_type: str) -> list[str]:
    """Reasons why the kernels cannot be used, one sentence each.

    Args:
        model: the model that the user passed.
        kernels: ``liger_kernel_config``: whether to use each kernel, by name.
        device_type: ``"cuda"`` or ``"cpu"``.
    """
    problems = []
    if device_type != "cuda":
        problems.append(
            "use_liger_kernel=True: Liger's kernels run on GPUs, but this run is on the CPU. Set it to False."
        )
    if importlib.util.find_spec("liger_kernel") is None:
        return [
            *problems,
            "use_liger_kernel=True needs a package that is not installed: run pip install liger-kernel.",
        ]
    return problems + _unknown_problems(model, kernels or {})


def apply_liger(model: nn.Module, kernels: dict[str, bool] | None) -> None:
    """Replaces the parts of ``model`` for which there are kernels; its weights stay in place.

    Raises:
        ConfigError: there are no kernels for this model type, or no kernel of that name.
    """
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    problems = _unknown_problems(model, kernels or {})
    if problems:
        raise ConfigError(problems)
    _apply_liger_kernel_to_instance(model=base_model(model), **(kernels or {}))


def _unknown_problems(model: nn.Module, kernels: dict[str, bool]) -> list[str]:
    """Unknown model types and kernel names, which Liger silently ignores."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    kind: Any = getattr(getattr(base_model(model), "config", None), "model_type", None)
    apply = MODEL_TYPE_TO_APPLY_LIGER_FN.get(kind)
    if apply is None:
        what = f"models of type {kind}" if kind else f"{type(model).__name__}, which has no config.model_type"
        return [f"use_liger_kernel=True: Liger has no kernels for {what}. Set it to False."]
    known = [name for name in inspect.signature(apply).parameters if name != "model"]
    return [
        f"liger_kernel_config: '{name}' is not a kernel for {kind} models; kernels: {', '.join(known)}."
        f"{did_you_mean(name, known)}"
        for name in kernels
        if name not in known
    ]
