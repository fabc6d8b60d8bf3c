"""NEFTune: noise on the input embeddings during training, against overfitting to small instruction datasets.

Source: Jain et al. 2023, arXiv:2310.05914: uniform noise between -1 and 1, times ``alpha / sqrt(L d)`` for sequences
of ``L`` positions and vectors of length ``d``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_trainer.training.model.input_embeddings import input_embeddings


def noise_problems(model: nn.Module) -> list[str]:
    """Reasons why noise cannot be added to ``model``'s embeddings, one sentence each."""
    if input_embeddings(model) is not None:
        return []
    return [
        f"neftune_noise_alpha: the input embeddings of {type(model).__name__} are unknown. Add a method "
        "get_input_embeddings() that returns the module, or set neftune_noise_alpha=None."
    ]


@contextmanager
def noisy_embeddings(model: nn.Module, alpha: float, sequence_shards: int = 1) -> Iterator[None]:
    """Inside, adds noise to the embeddings of ``model`` in training mode.

    Args:
        model: a model with input embeddings.
        alpha: strength of the noise.
        sequence_shards: number of ranks over which each sequence is sharded, so that ``L`` is its full length.

    The noise uses the device's random state, which checkpoints contain, so a resumed run draws the same noise.
    """
    embeddings = input_embeddings(model)
    assert embeddings is not None  # checked when the Trainer was made
    # Before DeepSpeed's hooks: the noise is added to the module's own output.
    handle = embeddings.register_forward_hook(partial(_add_noise, alpha, sequence_shards), prepend=True)
    try:
        yield
    finally:
        handle.remove()


def _add_noise(alpha: float, sequence_shards: int, module: nn.Module, inputs: Any, output: torch.Tensor) -> Any:
    if not module.training:
        return None
    bound = alpha / math.sqrt(output.shape[1] * sequence_shards * output.shape[2])
    return output + torch.empty_like(output).uniform_(-bound, bound)
