"""What kind of model it is: whether it can be trained as it is."""

from __future__ import annotations

import inspect
import sys

from torch import nn

from ds_trainer.data.columns import base_model


def head_problems(model: nn.Module) -> list[str]:
    """Why ``model`` can compute no loss, a sentence each; Hugging Face's bodies without a head are known by name."""
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
            f"{name} ends in hidden states: it takes no labels and returns no loss. Train a model with a head for the "
            "task (AutoModelForCausalLM, AutoModelForSequenceClassification ...), pass a compute_loss_func, or "
            "override compute_loss."
        ]
    return []
