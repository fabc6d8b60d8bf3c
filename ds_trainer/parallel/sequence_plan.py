"""``SequencePlan``: who holds which token of the sequences of one batch, and which tokens may see each other.

A sequence of ``length`` tokens is cut into ``2 x cp`` chunks of equal size. Context-parallel rank ``i`` holds chunks
``i`` and ``2 cp - 1 - i``: under a causal mask early tokens have little to do and late ones much, and so every rank has
the same work (*zig-zag*). What one context rank holds is cut once more, into ``sp`` equal parts in a row, one for each
sequence-parallel (Ulysses) rank.

Everything here is on the host: which blocks of an attention matrix are empty is known before a kernel is called,
and nobody waits for a device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds_trainer.parallel.layout import ParallelLayout


@dataclass(frozen=True, eq=False)
class SequencePlan:
    """The cut of one batch along its sequences. All tensors are on the host and in the order of the sequence.

    Args:
        layout: owner of ``cp`` and ``sp``.
        length: tokens of each sequence, padding included; a multiple of :attr:`ParallelLayout.length_multiple`.
        documents: ``[batch, length]`` int64, a number for each packed document: attention stays inside a document;
            None where every sequence is one document.
        valid: ``[batch, length]`` bool, false where a token is padding that nobody may attend to; None without padding.
    """

    layout: ParallelLayout
    length: int
    documents: torch.Tensor | None = None
    valid: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.length % self.layout.length_multiple:
            raise ValueError(f"a length of {self.length} is no multiple of {self.layout.length_multiple}")

    def context_positions(self, cp_rank: int) -> torch.Tensor:
        """Places in the sequence of the tokens that the ``sp`` ranks of ``cp_rank`` hold together: int64, ascending."""
        chunk = self.length // (2 * self.layout.cp)
        first, last = cp_rank * chunk, (2 * self.layout.cp - 1 - cp_rank) * chunk
        return torch.cat([torch.arange(first, first + chunk), torch.arange(last, last + chunk)])

    def positions(self, cp_rank: int, sp_rank: int) -> torch.Tensor:
        """Places in the sequence of the tokens that one rank holds: int64 ``[length / (cp x sp)]``, ascending."""
        return self.context_positions(cp_rank).chunk(self.layout.sp)[sp_rank]

    def order(self) -> torch.Tensor:
        """Places in the sequence of all tokens when the ranks' parts are laid side by side: int64 ``[length]``."""
        return torch.cat([self.context_positions(cp_rank) for cp_rank in range(self.layout.cp)])
