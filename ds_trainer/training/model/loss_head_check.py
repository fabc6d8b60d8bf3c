"""Checks that a model has a head that computes a loss."""

from __future__ import annotations

import inspect
import sys

from torch import nn

from ds_trainer.data.columns import base_model


def loss_head_problems(model: nn.Module) -> list[str]:
    """Reasons why ``model`` cannot compute a loss; recognizes Hugging Face's base models without a head by name."""
    model = base_model(model)
    if "transformers" not in sys.modules:
        return []
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    bodies: set[str] = set()
    for names in MODEL_MAPPING_NAMES.values():
        bodies.update([names] if isinstance(names, str) else names)
    name = type(model).__name__
    parameters = inspect.signature(model.forward).parameters
    if name in bodies and not any("label" in p or p == "return_loss" for p in parameters):
        return [
            f"{name} returns hidden states: it takes no labels and returns no loss. Use a model with a head for the "
            "task (AutoModelForCausalLM, AutoModelForSequenceClassification ...), pass a compute_loss_func, or "
            "override compute_loss."
        ]
    return []
