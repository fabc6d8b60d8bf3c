"""NEFTune: noise on the input embeddings while training, against overfitting to small instruction data.

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

from ds_trainer.training.model.embeddings import input_embeddings


def noise_problems(model: nn.Module) -> list[str]:
    """Why no noise can be added to ``model``'s embeddings, a sentence each."""
    if input_embeddings(model) is not None:
        return []
    return [
        f"neftune_noise_alpha: {type(model).__name__} does not say where its input embeddings are. Give it a method "
        "get_input_embeddings() that returns the module, or leave neftune_noise_alpha at None."
    ]


@contextmanager
def noisy_embeddings(model: nn.Module, alpha: float, sequence_shards: int = 1) -> Iterator[None]:
    """Noise on the embeddings of ``model`` inside, wherever it is in training mode.

    Args:
        model: a model with input embeddings.
        alpha: strength.
        sequence_shards: ranks over which each sequence is cut, so that ``L`` is its whole length.

    The noise is drawn from the random state of the device, which checkpoints hold: a resumed run draws the same.
    """
    embeddings = input_embeddings(model)
    assert embeddings is not None  # checked when the Trainer was made
    # In front of DeepSpeed's hooks, where there are any: it adds to what the module itself gives.
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
