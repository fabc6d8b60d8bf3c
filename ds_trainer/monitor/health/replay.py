"""The micro-batches of a skipped step: saved to a file, and run again to find the first non-finite value.

::

    from ds_trainer.monitor.health.replay import replay

    model = AutoModelForCausalLM.from_pretrained("out/checkpoint-1000")  # the nearest weights before
    print(replay("out/divergence/step-1012/rank_1.pt", model))

A file is read with ``torch.load(weights_only=True)``: it holds tensors and plain values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_trainer.parallel.deferred_mask import DeferredMask


@dataclass
class ReplayFinding:
    """The result of one micro-batch.

    Attributes:
        loss: the loss that the model returned.
        first: the first module with a non-finite output; empty if all outputs are finite.
        gradients: parameters with a non-finite gradient.
    """

    loss: float
    first: str = ""
    gradients: list[str] = field(default_factory=list)

    @property
    def is_finite(self) -> bool:
        """Whether loss, outputs and gradients are finite."""
        return math.isfinite(self.loss) and not self.first and not self.gradients


def save_batches(path: Path, facts: Mapping[str, Any], batches: list[Any]) -> None:
    """Write ``batches`` with ``facts`` (plain values and tensors) to ``path``.

    Only the tensors of a batch are written, so that reading the file runs no code.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = [
        {name: _plain(value).detach().cpu() for name, value in batch.items() if isinstance(value, torch.Tensor)}
        for batch in batches
        if isinstance(batch, Mapping)
    ]
    try:
        torch.save({**facts, "batches": tensors}, path)
    except (OSError, RuntimeError) as error:  # torch's exception for a full disk is the second
        path.unlink(missing_ok=True)
        raise OSError(str(error)) from error


def replay(path: str | Path, model: nn.Module) -> list[ReplayFinding]:
    """Run the micro-batches in ``path`` through ``model``, forward and backward; one :class:`ReplayFinding` each.

    Args:
        path: a ``rank_K.pt`` file.
        model: has weights from before the step; not sharded, on any device. Its gradients are cleared.
    """
    saved = torch.load(path, weights_only=True, map_location="cpu")
    if saved.get("random") is not None:
        torch.set_rng_state(saved["random"])
    device = next(model.parameters()).device
    model.train()
    return [_run(model, {name: value.to(device) for name, value in batch.items()}) for batch in saved["batches"]]


def _plain(value: torch.Tensor) -> torch.Tensor:
    return value.made() if isinstance(value, DeferredMask) else value


def _run(model: nn.Module, batch: dict[str, torch.Tensor]) -> ReplayFinding:
    seen: list[str] = []

    def look(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if not seen and any(not tensor.isfinite().all() for tensor in _floats(output)):
                seen.append(name or type(module).__name__)

        return hook

    handles = [module.register_forward_hook(look(name)) for name, module in model.named_modules()]
    try:
        model.zero_grad(set_to_none=True)
        output = model(**batch)
    finally:
        for handle in handles:
            handle.remove()
    loss = output["loss"] if isinstance(output, Mapping) else output[0] if isinstance(output, tuple) else output
    loss.backward()
    bad = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    model.zero_grad(set_to_none=True)
    return ReplayFinding(float(loss.detach()), seen[0] if seen else "", bad)


def _floats(value: Any) -> list[torch.Tensor]:
    """Floating-point tensors in ``value``, at any depth."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, Mapping):
        value = list(value.values())
    return [tensor for item in value for tensor in _floats(item)] if isinstance(value, list | tuple) else []
