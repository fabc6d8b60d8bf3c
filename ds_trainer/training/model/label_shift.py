"""Whether a model predicts the next token, and shifts its labels itself."""

from __future__ import annotations

import inspect

from torch import nn

_SHIFTING_LOSSES = ("ForCausalLM", "ForConditionalGeneration")  # Hugging Face loss types that shift labels


def shifts_labels(model: nn.Module) -> bool:
    """Whether the loss compares output ``t`` with label ``t + 1``, so that label 0 is not a target.

    A custom model declares it with an attribute ``shifts_labels = True``.
    """
    declared = getattr(model, "shifts_labels", None)
    if isinstance(declared, bool):
        return declared
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    kind = getattr(model, "loss_type", "")
    if kind is None:  # no loss type for this class name: transformers then uses the causal LM loss
        return _uses_loss_function(type(model))
    return str(kind).endswith(_SHIFTING_LOSSES)


def _uses_loss_function(model: type) -> bool:
    """Whether ``forward``, or the base class method that it calls, uses ``self.loss_function``."""
    for parent in model.__mro__:
        forward = vars(parent).get("forward")
        if forward is None:
            continue
        code = getattr(inspect.unwrap(forward), "__code__", None)
        names = () if code is None else code.co_names
        if "loss_function" in names:
            return True
        if "super" not in names:
            return False
    return False
