"""The oracle: plain PyTorch in one process, float32, written without any of our code.

A global batch is a run of consecutive samples of the epoch's order; its loss is the sum of the token losses over the
number of target tokens; clip, step, schedule. Nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class Trajectory:
    """What is compared: per step loss, gradient norm before clipping and learning rate in it; final weights."""

    losses: list[float]
    grad_norms: list[float]
    learning_rates: list[float]
    weights: dict[str, torch.Tensor]


def stack(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Rows of equal shapes as one batch."""
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def token_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy summed over the predicted tokens, divided by their number."""
    outputs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"])
    logits = outputs["logits"].float()
    targets = batch["labels"][:, 1:].flatten()
    total = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, ignore_index=-100, reduction="sum")
    return total / (targets != -100).sum()


def sample_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's own mean over the whole global batch."""
    loss: torch.Tensor = model(**batch)[0]
    return loss


def train_plainly(
    model: nn.Module,
    data: Any,
    *,
    loss: Any = token_loss,
    optimizer: Any = "adamw",
    learning_rate: float = 1e-2,
    weight_decay: float = 0.1,
    clip: float = 0.0,
    global_batch: int = 16,
    steps: int = 4,
    seed: int | None = 42,
    autocast: bool = False,
    collate: Any = stack,
) -> Trajectory:
    """Train ``model`` in place and record what happened. The learning rate falls linearly to zero.

    ``optimizer`` is adamw, sgd, or ``f(model, groups)`` that makes one. Without a ``seed`` the data keeps its order.
    """
    decayed = [p for n, p in model.named_parameters() if "norm" not in n and "bias" not in n]
    rest = [p for n, p in model.named_parameters() if "norm" in n or "bias" in n]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if callable(optimizer):
        updater: Any = optimizer(model, groups)
    elif optimizer == "adamw":
        updater = torch.optim.AdamW(groups, lr=learning_rate)
    else:
        updater = torch.optim.SGD(groups, lr=learning_rate)
    record = Trajectory([], [], [], {})
    epoch, done = 0, 0
    while done < steps:
        order = list(range(len(data)))
        if seed is not None:
            order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        for start in range(0, len(data), global_batch):
            if done == steps:
                break
            batch = collate([data[index] for index in order[start : start + global_batch]])
            for group in updater.param_groups:
                group["lr"] = learning_rate * (steps - done) / steps
            updater.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                value = loss(model, batch)
            value.backward()
            bound = clip if clip > 0 else float("inf")
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), bound)
            updater.step()
            record.learning_rates.append(learning_rate * (steps - done) / steps)
            done += 1
            record.losses.append(value.item())
            record.grad_norms.append(norm.item())
        epoch += 1
    record.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return record
