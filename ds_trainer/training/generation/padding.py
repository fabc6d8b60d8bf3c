"""Generated tokens and labels, filled up to one length.

The length and the token are those of transformers' ``Seq2SeqTrainer``: batches come out equally wide, so that most
predictions are one array without holes. What is longer stays, and where batches or ranks differ all the same, rows are
filled up with -100 when they are joined (:mod:`ds_trainer.training.evaluation.nested`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ds_trainer.utils.errors import ConfigError

_DEFAULT_LENGTH = 20
"""What transformers generates at most where nobody says a length."""


def padded(tokens: torch.Tensor, model: nn.Module, processing_class: Any) -> torch.Tensor:
    """``tokens`` ``[samples, length]``, filled up with the padding token to the length of the model's configuration.

    That length is ``generation_config.max_length`` (20 where it is not set); for longer ones ``max_new_tokens`` and
    the start.

    Raises:
        ConfigError: something must be filled up, and nobody knows a padding token.
    """
    config: Any = model.generation_config
    length = _DEFAULT_LENGTH if config.max_length is None else config.max_length
    if tokens.shape[-1] >= length and config.max_new_tokens is not None:
        length = config.max_new_tokens + 1
    missing = length - tokens.shape[-1]
    if missing <= 0:
        return tokens
    return F.pad(tokens, (0, missing), value=padding_token(model, processing_class))


def padding_token(model: nn.Module, processing_class: Any) -> int:
    """The padding token of the tokenizer (or its end token), else of the model.

    Raises:
        ConfigError: none of them has one.
    """
    owners = [(processing_class, "pad_token_id"), (processing_class, "eos_token_id")]
    if not hasattr(processing_class, "pad_token_id"):
        owners = []
    configs = [getattr(model, name, None) for name in ("config", "generation_config")]
    for owner, name in [*owners, *((config, "pad_token_id") for config in configs)]:
        token = getattr(owner, name, None)
        if token is not None:
            return int(token)
    raise ConfigError(
        f"predict_with_generate=True: generated sequences are filled up to one length, but neither the "
        f"processing_class nor the configuration of {type(model).__name__} has a pad_token_id. Set "
        "model.config.pad_token_id."
    )
