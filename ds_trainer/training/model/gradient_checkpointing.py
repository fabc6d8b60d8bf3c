"""Gradient (activation) checkpointing: layers discard their activations and recompute them in the backward pass.

*Re-entrant* checkpointing runs a layer without recording and builds its graph later, only if an input of the layer
requires a gradient. With frozen embeddings (adapters) no input does, and the layer's weights would silently get no
gradient. So the embeddings' output is made to require one, as in peft and transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ds_trainer.data.columns import base_model
from ds_trainer.training.model.activation_offload import offload_activations
from ds_trainer.training.signatures import accepted_arguments
from ds_trainer.utils.errors import ConfigError

_HOOKED = "_ds_trainer_needs_gradient"


def gradient_checkpointing_problems(
    model: nn.Module, arguments: dict[str, Any] | None, reentrant: bool, device_type: str | None = None
) -> list[str]:
    """Reasons why ``model`` cannot use gradient checkpointing, one sentence each.

    Args:
        model: the model that the user passed.
        arguments: ``activation_checkpointing_kwargs``.
        reentrant: whether checkpointing is re-entrant regardless of ``arguments``.
        device_type: device type of the run, if known.
    """
    name = type(model).__name__
    if _method(model) is None:
        return [
            f"activation_checkpointing=True, but {name} has no activation_checkpointing_enable(). Set it to False, or "
            "give the model that method."
        ]
    if getattr(model, "supports_gradient_checkpointing", True) is False:
        return [f"activation_checkpointing=True, but {name} does not support it. Set it to False."]
    if (arguments or {}).get("offload") and device_type == "cpu":
        return [
            "activation_checkpointing_kwargs: offload moves activations from the GPU to the host, but this run is on "
            "the CPU. Remove offload."
        ]
    frozen = any(not p.requires_grad for p in model.parameters())
    if frozen and (reentrant or (arguments or {}).get("use_reentrant")) and not all_input_embeddings(model):
        return [
            f"Re-entrant activation checkpointing with frozen parameters needs get_input_embeddings(), which {name} "
            "does not have: a layer gets gradients only if its input requires one. Set "
            'activation_checkpointing_kwargs={"use_reentrant": false}, or add the method to the model.'
        ]
    return []


def enable_gradient_checkpointing(
    model: nn.Module, arguments: dict[str, Any] | None = None, reentrant: bool = False, offload: bool = False
) -> None:
    """Makes ``model`` recompute activations in the backward pass.

    Args:
        model: a model with ``activation_checkpointing_enable`` (transformers since 5.23) or its older name
            ``gradient_checkpointing_enable``.
        arguments: arguments of that method (``every_n_layers``, ``offload``) and of ``torch.utils.checkpoint``;
            ``use_reentrant`` defaults to False.
        reentrant: checkpointing is re-entrant regardless of ``arguments``.
        offload: keep the inputs of layers in host memory (:mod:`ds_trainer.training.model.activation_offload`).

    Raises:
        ConfigError: with the sentences of :func:`gradient_checkpointing_problems`.
    """
    problems = gradient_checkpointing_problems(model, arguments, reentrant)
    if problems:
        raise ConfigError(problems)
    keywords = {"use_reentrant": False, **(arguments or {})}
    reentrant = reentrant or bool(keywords["use_reentrant"])
    method, takes = _method(model)
    # Some belong to the method; the rest go to torch.utils.checkpoint.
    own = {name: keywords.pop(name) for name in ("every_n_layers", "offload") if name in keywords}
    refused = sorted(set(own) - accepted_arguments(method, set(own)))
    if refused:
        raise ConfigError(
            f"activation_checkpointing_kwargs: {type(model).__name__}.{method.__name__}() does not take "
            f"{' and '.join(refused)}. Remove {'it' if len(refused) == 1 else 'them'}."
        )
    method(**{takes: keywords}, **own)
    if offload:
        offload_activations(model)
    if reentrant and any(not p.requires_grad for p in model.parameters()):
        for embeddings in all_input_embeddings(model):
            if not hasattr(embeddings, _HOOKED):
                setattr(embeddings, _HOOKED, embeddings.register_forward_hook(_need_gradient))


def takes_every_n_layers(model: nn.Module) -> bool:
    """Whether some of the layers of ``model`` can be checkpointed, as transformers' can since 5.23."""
    method = _method(model)
    return method is not None and bool(accepted_arguments(method[0], {"every_n_layers"}))


def _method(model: nn.Module) -> Any:
    """The method that enables checkpointing and the name of its argument for torch's function, or None."""
    for kind in ("activation", "gradient"):
        method = getattr(model, f"{kind}_checkpointing_enable", None)
        if method is not None:
            return method, f"{kind}_checkpointing_kwargs"
    return None


def _need_gradient(module: nn.Module, inputs: Any, output: Any) -> None:
    if isinstance(output, torch.Tensor) and torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_(True)


# Finds the input embeddings of a model.


def input_embeddings(model: nn.Module) -> nn.Module | None:
    """The result of ``get_input_embeddings()`` of ``model`` (of the base model if it is a PEFT model), or None."""
    return _embeddings_of(base_model(model))


def all_input_embeddings(model: nn.Module) -> list[nn.Module]:
    """The input embeddings of all submodules of ``model``, each once."""
    embeddings = (_embeddings_of(part) for part in model.modules())
    return list(dict.fromkeys(module for module in embeddings if module is not None))


def _embeddings_of(model: Any) -> nn.Module | None:
    getter = getattr(model, "get_input_embeddings", None)
    if getter is None:
        return None
    try:
        module = getter()
    except NotImplementedError:  # transformers' base class has the method for every model
        return None
    return module if isinstance(module, nn.Module) else None
