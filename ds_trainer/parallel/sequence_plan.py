"""``SequencePlan``: which rank holds which tokens of a batch, and which tokens may attend to each other.

A sequence of ``length`` tokens is divided into ``2 * cp`` chunks of equal size. Context-parallel rank ``i`` holds
chunks ``i`` and ``2 * cp - 1 - i``: under a causal mask early tokens attend to few keys and late tokens to many, so
every rank has the same amount of work (*zig-zag* order). The tokens of a context-parallel rank are divided further into
``sp`` equal, contiguous parts, one for each sequence-parallel (Ulysses) rank.

The plan lives on the host: the empty blocks of an attention matrix are known before a kernel is launched, without a
device synchronization.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds_trainer.parallel.document_runs import DocumentRuns
from ds_trainer.parallel.layout import ParallelLayout


@dataclass(frozen=True, eq=False)
class SequencePlan:
    """How the sequences of one batch are sharded. It is small, unless there are many documents.

    Args:
        layout: owner of ``cp`` and ``sp``.
        length: tokens of each sequence, padding included; a multiple of :attr:`ParallelLayout.length_multiple`.
        documents: the packed documents, within which attention stays, and the padding, which no token may attend to.
            None if every sequence is one document without padding.
        last_position: the largest position of a token in the batch; default: that of the last token.

    Raises:
        ValueError: ``length`` is not a multiple of :attr:`ParallelLayout.length_multiple`.
    """

    layout: ParallelLayout
    length: int
    documents: DocumentRuns | None = None
    last_position: int = -1

    def __post_init__(self) -> None:
        if self.last_position < 0:
            object.__setattr__(self, "last_position", self.length - 1)
        if self.length % self.layout.length_multiple:
            raise ValueError(f"a length of {self.length} is not a multiple of {self.layout.length_multiple}")

    def context_positions(self, cp_rank: int) -> torch.Tensor:
        """Sequence positions of the tokens that the ``sp`` ranks of ``cp_rank`` hold together: int64, ascending."""
        chunk = self.length // (2 * self.layout.cp)
        first, last = cp_rank * chunk, (2 * self.layout.cp - 1 - cp_rank) * chunk
        return torch.cat([torch.arange(first, first + chunk), torch.arange(last, last + chunk)])

    def positions(self, cp_rank: int, sp_rank: int) -> torch.Tensor:
        """Sequence positions of the tokens that one rank holds: int64 ``[length / (cp * sp)]``, ascending."""
        chunk = self.length // (2 * self.layout.cp)
        share = 2 * chunk // self.layout.sp
        begin, end = sp_rank * share, (sp_rank + 1) * share  # in the tokens of both chunks
        first, last = cp_rank * chunk, (2 * self.layout.cp - 2 - cp_rank) * chunk  # begin of each, as if it were first
        parts = [(first + begin, first + min(end, chunk)), (last + max(begin, chunk), last + end)]
        return torch.cat([torch.arange(start, stop) for start, stop in parts if start < stop])

    def order(self) -> torch.Tensor:
        """Sequence positions of all tokens after concatenating the ranks' shards: int64 ``[length]``."""
        return torch.cat([self.context_positions(cp_rank) for cp_rank in range(self.layout.cp)])
