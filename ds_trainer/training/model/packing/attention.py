"""Packed rows in transformers' ``sdpa`` attention: each sample is computed alone, instead of all pairs with a mask.

Two functions replace transformers' own under the name ``sdpa``, and call these outside of packed batches. The mask of a
packed batch is made when something reads it (:mod:`ds_trainer.parallel.deferred_mask`); that of a bidirectional model
comes with the batch. A layer that gets this very mask does not need it. A model that changes the mask, or adds
something to the scores, reads it, and gets what it would get without us.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from ds_trainer.data.packing.batch import POSITIONS
from ds_trainer.data.packing.token_counts import MASK
from ds_trainer.parallel.deferred_mask import DeferredMask, DocumentMask
from ds_trainer.parallel.document_attention import Documents, active_documents, can_attend, document_attention
from ds_trainer.training.model.sequence_sharding.attention_modules import UNSUPPORTED, requested_mask
from ds_trainer.utils.errors import ConfigError

_NAME = "sdpa"
_SIZES = ("batch_size", "q_length", "kv_length")
_SKIPS = ("allow_is_causal_skip", "allow_is_bidirectional_skip")


def documents_of(batch: Any) -> Documents | None:
    """The samples of a packed batch, for :func:`~ds_trainer.parallel.document_attention.use_documents`.

    None if ``batch`` has no positions, or a mask that says more than the borders of samples.
    """
    if not isinstance(batch, Mapping):
        return None
    mask, positions = batch.get(MASK), batch.get(POSITIONS)
    if isinstance(mask, DocumentMask):
        _register()
        return mask.documents
    if not isinstance(positions, torch.Tensor) or positions.dim() != 2 or positions.is_meta or MASK in batch:
        return None
    _register()
    return Documents.of(positions.cpu())


@lru_cache(maxsize=1)
def _register() -> None:
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError:  # models of the user alone
        return
    AttentionInterface.register(_NAME, _attention_function(AttentionInterface()[_NAME]))
    AttentionMaskInterface.register(_NAME, _mask_function(AttentionMaskInterface()[_NAME]))


def _mask_function(original: Callable[..., Any]) -> Callable[..., Any]:
    def packed_mask(*args: Any, **rest: Any) -> Any:
        make = partial(original, *args, **rest)
        documents, function = active_documents(), rest.get("mask_function")
        skips = any(rest.get(name) for name in _SKIPS)  # then there may be no mask at all
        if documents is None or function is None or skips or rest.get("attention_mask") is not None:
            return make()
        rows, tokens = documents.shape
        if [rest.get(name) for name in _SIZES] != [rows, tokens, tokens] or "device" not in rest:
            return make()
        try:
            request = requested_mask(function)
        except ConfigError:  # a mask that we do not know
            return make()
        return DeferredMask(make, documents, request, torch.device(rest["device"]))

    return packed_mask


def _attention_function(original: Callable[..., Any]) -> Callable[..., Any]:
    def packed_attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **rest: Any,
    ) -> Any:
        if (
            active_documents() is None
            or not isinstance(attention_mask, DeferredMask)
            or attention_mask.changed
            or dropout
            or any(rest.get(name) is not None for name in UNSUPPORTED)
            or not can_attend(attention_mask.documents, query, key, value)
        ):
            if isinstance(attention_mask, DeferredMask):
                attention_mask = attention_mask.made()
            return original(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **rest
            )
        documents, request = attention_mask.documents, attention_mask.request
        out = document_attention(
            query=query,
            key=key,
            value=value,
            documents=documents,
            causal=request.causal,
            window=request.window,
            scale=scaling,
        )
        return out.transpose(1, 2).contiguous(), None

    return packed_attention
