"""``LogitsToHost``: whole logits of a batch in host memory, without whole logits on the device.

``compute_metrics`` without ``preprocess_logits_for_metrics``, and ``predict``, get the logits of all tokens. These are
computed for a few tokens at a time, gathered from all ranks, and copied to the host before the next ones are made. So
the device holds the logits of :attr:`~ds_trainer.parallel.deferred_logits.HeadReader.chunk_tokens` tokens of each
replica, instead of those of the batch (with ``eval_accumulation_steps=None`` of the whole dataset).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ds_trainer.parallel.deferred_logits import DeferredLogits
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.evaluation.gathering import gather_micro_steps
from ds_trainer.training.evaluation.nested import PADDING
from ds_trainer.utils import distributed


class OnHost(NamedTuple):
    """The logits of a micro-step, of all replicas, in host memory."""

    value: torch.Tensor


class LogitsToHost:
    """Makes the logits of an evaluation.

    Args:
        layout: the parallel layout.
    """

    def __init__(self, layout: ParallelLayout) -> None:
        self._layout = layout

    def of(self, logits: Any, dummy: bool, unshard: Callable[[Any], Any] | None = None) -> OnHost | None:
        """``logits`` ``[B, S, V]`` of all replicas; None if they fit into one piece, or exist already.

        Without gradients. Collective: all ranks have deferred logits or none, as the outputs are of one structure.

        Args:
            logits: the prediction of the model; something can be done if it is :class:`DeferredLogits`.
            dummy: whether this rank's batch does not count.
            unshard: joins an output of the shards of sequences; None if sequences are not sharded. It is applied to the
                inputs of the head, which are much smaller than the logits; every rank of a sequence then computes the
                logits of all its tokens.
        """
        if not isinstance(logits, DeferredLogits) or logits.hidden.dim() != 3:
            return None
        hidden = logits.hidden if unshard is None else unshard(logits.hidden)
        tokens = hidden.shape[1]
        # All ranks make the same pieces; those that have no more tokens give none.
        own = max(1, logits.reader.chunk_tokens // max(1, len(hidden)))
        read = int(logits.known is not None)  # by the model; perhaps on this rank alone
        longest, smallest, exist = distributed.agree(torch.tensor([tokens, -own, read]))
        size = -smallest
        if exist or longest <= size:
            return None

        def use(logits_of: Any) -> torch.Tensor:
            whole = torch.empty(0)
            for start in range(0, longest, size):
                piece = logits_of(slice(min(start, tokens), min(start + size, tokens))).detach()
                piece = gather_micro_steps(piece, dummy, self._layout)
                if start == 0:
                    whole = torch.full((len(piece), longest, piece.shape[2]), PADDING, dtype=piece.dtype)
                whole[:, start : start + piece.shape[1]] = piece
            return whole

        result: torch.Tensor = logits.reader.pieces(hidden, logits.functions, use)
        return OnHost(result)
