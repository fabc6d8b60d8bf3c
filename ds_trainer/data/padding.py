"""``TokenPaddingCollator``: batches of samples of different lengths, with labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from ds_trainer.data.sequence_sharding import IGNORED
from ds_trainer.data.source_ids import SOURCE_IDS


class TokenPaddingCollator:
    """Pads samples on the right to the longest of the batch.

    Args:
        pad_token_id: the token of padding; any one will do, because no token attends to it and it is no target.

    A sample has ``input_ids`` and ``labels``, integers ``[tokens]``; a batch has both and ``attention_mask``, int64
    ``[samples, longest]``, and ``source_ids`` if they have them. Other keys of samples are left out.
    """

    def __init__(self, pad_token_id: int = 0) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """The batch of ``features``."""
        tokens = [torch.as_tensor(sample["input_ids"], dtype=torch.int64) for sample in features]
        labels = [torch.as_tensor(sample["labels"], dtype=torch.int64) for sample in features]
        batch = {
            "input_ids": pad_sequence(tokens, batch_first=True, padding_value=self.pad_token_id),
            "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True),
        }
        if SOURCE_IDS in features[0]:
            batch[SOURCE_IDS] = pad_sequence([sample[SOURCE_IDS] for sample in features], batch_first=True)
        return batch
