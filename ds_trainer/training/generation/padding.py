"""Pads generated tokens and labels to one length.

The length and the token are those of transformers' ``Seq2SeqTrainer``, so that most batches have equal shapes. Longer
rows stay; if batches or ranks still differ, rows are padded with -100 when they are concatenated
(:mod:`ds_trainer.training.evaluation.nested`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ds_trainer.utils.errors import ConfigError

_DEFAULT_LENGTH = 20
"""The default maximum length of transformers."""


def padded(tokens: torch.Tensor, model: nn.Module, processing_class: Any) -> torch.Tensor:
    """``tokens`` ``[samples, length]``, padded to the length in the model's generation configuration.

    That length is ``generation_config.max_length`` (20 if it is not set); for longer rows ``max_new_tokens`` plus one.

    Raises:
        ConfigError: padding is needed, and there is no padding token.
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
    """The padding token of the tokenizer (or its end token), or else of the model.

    Raises:
        ConfigError: neither has one.
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
        f"predict_with_generate=True pads generated sequences, but neither the processing_class nor the configuration "
        f"of {type(model).__name__} has a pad_token_id. Set model.config.pad_token_id."
    )
