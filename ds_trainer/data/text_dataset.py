"""Text as samples of a fixed number of tokens, cut so that every token is predicted exactly once.

The documents are laid end to end, each with the separator token before it::

    <sep> d0 d0 d0 <sep> d1 d1 ...

and cut into blocks of ``sequence_length`` tokens, of which each begins with the last token of the one before::

    block 0: t0 t1 t2 t3        a causal language model shifts inside: the first token of a block is context only,
    block 1:          t3 t4 t5 t6   each other one is a target. So t1, t2, ... are targets once; t0 is the separator.

Hence the summed loss over all blocks is the model's code length of the whole text (every byte, and the separators
between documents on top), which is what bits per byte needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from ds_trainer.data.readers import Document
from ds_trainer.data.tokenizer import Tokenizer
from ds_trainer.utils.errors import ConfigError


@dataclass(frozen=True)
class TokenStream:
    """Documents as one run of tokens.

    Attributes:
        tokens: uint16 or uint32 of shape [tokens].
        documents: number of documents.
        bytes: their size, separators not counted.
    """

    tokens: np.ndarray
    documents: int
    bytes: int

    @property
    def targets(self) -> int:
        """Tokens that are predicted: all but the first, which is a separator."""
        return max(len(self.tokens) - 1, 0)


def tokenize(documents: Iterable[Document], tokenizer: Tokenizer) -> TokenStream:
    """All ``documents`` end to end, each with the tokenizer's separator before it."""
    kind = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    separator = np.asarray([tokenizer.separator_id], dtype=kind)
    pieces: list[np.ndarray] = []
    count = size = 0
    for document in documents:
        pieces += (separator, tokenizer.encode(document).astype(kind, copy=False))
        count += 1
        size += len(document.data)
    return TokenStream(np.concatenate(pieces) if pieces else np.empty(0, kind), count, size)


class TokenBlocks(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Blocks of ``sequence_length`` tokens that overlap by one; see the module's page for the cut.

    Args:
        tokens: the run of tokens, any unsigned integers of shape [tokens].
        sequence_length: tokens of a block, 2 or more.
        keep_ragged: keep what remains at the end as a block padded with id 0 and label -100, so that evaluation
            covers every token. Padding stands on the right, where a causal model cannot see it from a real token,
            so no attention mask is needed.

    A sample is ``{"input_ids": int64[sequence_length], "labels": int64[sequence_length]}``, labels not shifted.

    Raises:
        ConfigError: the tokens do not fill a single block (with ``keep_ragged``: there is nothing to predict).
    """

    def __init__(self, tokens: np.ndarray, sequence_length: int, *, keep_ragged: bool = False) -> None:
        self.tokens = tokens
        self.sequence_length = sequence_length
        self._stride = sequence_length - 1
        targets = max(len(tokens) - 1, 0)
        self._blocks = -(-targets // self._stride) if keep_ragged else targets // self._stride
        if self._blocks == 0:
            raise ConfigError(
                f"data: {len(tokens)} tokens are too few for samples of data.sequence_length={sequence_length}; "
                "give more text or a smaller length."
            )

    def __len__(self) -> int:
        return self._blocks

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self._blocks:
            raise IndexError(f"block {index} of {self._blocks}")
        start = index * self._stride
        piece = self.tokens[start : start + self.sequence_length]
        input_ids = torch.zeros(self.sequence_length, dtype=torch.int64)
        input_ids[: len(piece)] = torch.from_numpy(piece.astype(np.int64))
        labels = input_ids.clone()
        labels[len(piece) :] = -100
        return {"input_ids": input_ids, "labels": labels}
