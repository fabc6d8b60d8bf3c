"""The evaluation loop: the exact mean loss over all items of a dataset, equal for every layout."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_trainer.data.loader import FillerBatch
from ds_trainer.data.stream import length_of
from ds_trainer.training.batches import number_of_samples
from ds_trainer.training.item_count import ItemCount
from ds_trainer.utils import distributed

if TYPE_CHECKING:
    from ds_trainer.training.hooks.step import StepHooks


@dataclass(frozen=True)
class EvalResult:
    """Outcome of one pass: mean loss per item (nats where the loss is a cross-entropy), items, samples, seconds."""

    loss: float
    items: int
    samples: int
    seconds: float


def evaluate_loss(trainer: StepHooks, model: nn.Module, loader: Any) -> EvalResult:
    """Mean loss of ``model`` over everything that ``loader`` gives on all ranks.

    Losses are summed per item and divided once, at the end, by the number of all items: batches of different sizes,
    padding and the number of ranks change nothing. No gradient, no dropout; the model is left in evaluation mode.
    """
    start = time.perf_counter()
    model.eval()
    device = trainer.device
    # Sums run in float64 where the device has it: thousands of batches must not cost digits.
    total = torch.zeros((), dtype=torch.float64, device=device)
    items = torch.zeros((), dtype=torch.int64, device=device)
    one = torch.ones((), device=device)
    samples = 0
    with torch.no_grad():
        for inputs in loader:
            own = trainer.loss_rule.count(inputs).to(device)
            filler = isinstance(inputs, FillerBatch)
            prepared = trainer._prepare_inputs(inputs)
            loss = trainer.loss_of(model, dict(prepared), one)
            if not trainer.loss_rule.verified:
                trainer.loss_rule.verify(loss, one, partial(trainer.loss_of, model, dict(prepared)))
            # With an item count of 1 a normalised loss is the sum over the items; a mean is weighted with its own.
            share = trainer.loss_rule.contribution(loss, own, ItemCount(one))
            total += torch.zeros_like(total) if filler else share.double()
            items += own
            samples += 0 if filler else number_of_samples(inputs)
            trainer.control = trainer.callback_handler.on_prediction_step(trainer.args, trainer.state, trainer.control)
    sums = torch.stack([total, items.double(), torch.tensor(samples, dtype=torch.float64, device=device)])
    distributed.all_reduce_sum(sums)
    all_loss, all_items, all_samples = sums.tolist()
    known = length_of(getattr(loader, "dataset", None))  # a collator may have joined samples
    mean = all_loss / all_items if all_items else float("nan")
    return EvalResult(mean, int(all_items), int(all_samples) if known is None else known, time.perf_counter() - start)
