"""Verifies the loss in tiles before training: a prefix of the first batch runs through the model in both ways.

:mod:`ds_trainer.training.model.chunked_loss.head_check` compares what the head computes. This compares what comes out
of the whole model or loss function, with its division by the items, for a prefix of the first sample: a loss that
misses a token, or is divided by one more, differs by more than a hundredth. Liger's fused loss, if there is one, is
compared with ours in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ds_trainer.data.columns import base_model
from ds_trainer.data.sequence_sharding import IGNORED
from ds_trainer.data.source_ids import SOURCE_IDS
from ds_trainer.training.loop.batches import labels_in
from ds_trainer.training.loop.loss_computation import LossComputation
from ds_trainer.training.model.fp8 import check_band, in_bfloat16
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.seeds import random_state, restore_random_state

_ITEMS = 32  # of the prefix; a wrong one changes the loss by 3 %
_TOLERANCE = 1e-2  # bf16 rounds the logits of one way only
_TEXT = frozenset(
    (
        *("input_ids", "labels", "attention_mask", "token_type_ids", "position_ids"),
        *("decoder_input_ids", "decoder_attention_mask", SOURCE_IDS),
    )
)


def check_first_loss(
    losses: LossComputation, model: nn.Module, batch: Any, prepare: Callable[[Any], dict[str, Any]], fused: bool
) -> None:
    """Compare the loss of a prefix of ``batch`` in tiles with that of whole logits, in fp8 with bfloat16. Collective.

    Tiles are not compared if no rank would use tiles, or the batch is more than text.

    Args:
        losses: computes them.
        model: the engine.
        batch: the first micro-batch of this rank's replica.
        prepare: moves a batch to the device.
        fused: whether Liger's loss is in the model.

    Raises:
        ConfigError: the losses differ by more than rounding; with the difference.
    """
    check_fp8_loss(losses, model, batch, prepare)
    prefix = prefix_of(batch, losses.label_names) if losses.sharder is None else None
    labels = batch.get(labels_in(batch, losses.label_names) or "") if isinstance(batch, Mapping) else None
    tokens = labels.numel() if isinstance(labels, torch.Tensor) else 0
    wanted = prefix is not None and (fused or losses.chunked.uses_tiles(model, tokens))
    missing, any_wants = distributed.agree(torch.tensor([int(prefix is None), int(wanted)]))
    if missing or not any_wants or prefix is None:
        return

    random = random_state()

    def loss(chunk_tokens: int) -> float:
        restore_random_state(random)
        inputs = prepare(prefix)
        items = losses.rule.count(inputs).clamp(min=1).to(torch.float32)
        before, losses.for_loop = losses.for_loop, True
        try:
            with torch.no_grad(), losses.chunked.forced(chunk_tokens), losses.chunked.deferring(model):
                found, _ = losses.default(model, inputs, items)
        finally:
            losses.for_loop = before
        return float(found)

    few = max(1, _ITEMS // 3)
    try:
        if fused:
            theirs = loss(0)
            with _own_forward(base_model(model)):
                _compare("Liger's fused loss", theirs, loss(few), _LIGER_REMEDY)
        else:
            _compare("The loss of whole logits", loss(0), loss(few), _REMEDY)
    finally:
        restore_random_state(random)


def check_fp8_loss(
    losses: LossComputation, model: nn.Module, batch: Any, prepare: Callable[[Any], dict[str, Any]]
) -> None:
    """Compare the loss of ``batch``, or of a prefix of it, in fp8 with that in bfloat16. Collective if there is fp8.

    Raises:
        ConfigError: they differ by more than rounding; with the difference.
    """
    prefix = prefix_of(batch, losses.label_names) if losses.sharder is None else None
    random, found = random_state(), []
    try:
        with in_bfloat16(base_model(model)) as converted:
            if not converted:
                return
            found.append(_loss_of(losses, model, batch if prefix is None else prefix, prepare))
        restore_random_state(random)
        found.append(_loss_of(losses, model, batch if prefix is None else prefix, prepare))
    finally:
        restore_random_state(random)
    check_band(found[1], found[0])


def _loss_of(losses: LossComputation, model: nn.Module, batch: Any, prepare: Callable[[Any], dict[str, Any]]) -> float:
    with losses.sharded(batch) as local, torch.no_grad():
        inputs = prepare(local)
        items = losses.rule.count(inputs).clamp(min=1).to(torch.float32)
        before, losses.for_loop = losses.for_loop, True
        try:
            found, _ = losses.default(model, inputs, items)
        finally:
            losses.for_loop = before
    return float(found)


_REMEDY = "Set loss_chunk_tokens=0 to compute the loss from whole logits, and report this, with the model."
_LIGER_REMEDY = (
    "It is not right for this model: set liger_kernel_config={'fused_linear_cross_entropy': false}, and the loss is "
    "computed in chunks without Liger."
)


def _compare(name: str, expected: float, found: float, remedy: str) -> None:
    both_finite = expected - expected == 0 == found - found
    if not both_finite:  # other checks report what is not finite
        return
    difference = abs(found - expected) / max(abs(expected), 1e-6)
    if difference > _TOLERANCE:
        raise ConfigError(
            f"{name} of a prefix of the first batch, {expected:.6g}, differs from the loss in chunks, {found:.6g}, by "
            f"a relative {difference:.2g} (rounding allows {_TOLERANCE:.0e}). {remedy}"
        )


def prefix_of(batch: Any, label_names: tuple[str, ...]) -> dict[str, torch.Tensor] | None:
    """The first sample of ``batch`` from its first target on, at most 32 tokens; None if it is more than text."""
    if not isinstance(batch, Mapping) or not batch.keys() <= _TEXT:
        return None
    name = labels_in(batch, label_names)
    labels = batch.get(name) if name is not None else None
    if not isinstance(labels, torch.Tensor) or labels.dim() != 2 or labels.is_floating_point():
        return None
    if not all(isinstance(value, torch.Tensor) and value.dim() == 2 for value in batch.values()):
        return None
    targets = (labels[0] != IGNORED).nonzero()
    first = max(0, int(targets[0]) - 1) if len(targets) else 0
    if any(value.shape[1] != labels.shape[1] for value in batch.values()):
        first = 0  # the source of a translation has its own length
    return {key: value[:1, first : first + _ITEMS + 1] for key, value in batch.items()}


@contextmanager
def _own_forward(model: nn.Module) -> Iterator[None]:
    """Inside, ``model`` has the ``forward`` of its class, without one that was put in its place."""
    replaced = vars(model).pop("forward", None)
    try:
        yield
    finally:
        if replaced is not None:
            model.forward = replaced
