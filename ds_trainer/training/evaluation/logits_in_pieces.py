"""``LogitPieces``: applies ``preprocess_logits_for_metrics`` to the logits of a few tokens at a time.

A function like ``logits.argmax(-1)`` treats each token alone, so the logits of a whole batch need not exist. That a
function is such a one is verified on tokens of the first batch: applied to all of them, and to two parts of them, its
results must be equal. Otherwise it gets whole logits, as without this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ds_trainer.data.sequence_sharding import IGNORED
from ds_trainer.parallel.deferred_logits import DeferredLogits
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.evaluation.gathering import gather_micro_steps
from ds_trainer.training.evaluation.nested import PADDING, detached, leaves_of, map_leaves
from ds_trainer.utils import distributed
from ds_trainer.utils.logging import get_logger

if TYPE_CHECKING:
    from ds_trainer.parallel.attention import ActiveSharding

logger = get_logger(__name__)

_TOLERANCE = 1e-5


class Preprocessed(NamedTuple):
    """What ``preprocess_logits_for_metrics`` made of the logits of a batch."""

    value: Any


class LogitPieces:
    """The pieces of one evaluation.

    Args:
        function: ``preprocess_logits_for_metrics``.
    """

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self._function = function
        self._is_token_wise: bool | None = None

    def apply(self, logits: Any, labels: Any, sharding: ActiveSharding | None) -> Preprocessed | None:
        """The result of the function for ``logits``, or None if it needs whole logits.

        Without gradients. With sequence sharding collective over the sequence group.

        Args:
            logits: the prediction of the model; something can be done if it is :class:`DeferredLogits` ``[B, S, V]``.
            labels: labels of the whole batch, ``[B, tokens]``, or None.
            sharding: the sharding of the batch; the result is that of this rank's shard.
        """
        if self._is_token_wise is False or not isinstance(logits, DeferredLogits) or logits.known is not None:
            return None
        hidden = logits.hidden
        if hidden.dim() != 3 or hidden.shape[1] < 2 or not (labels is None or _per_token(labels, len(hidden))):
            return None
        if labels is not None and sharding is not None:
            labels = _of_shard(labels, sharding)
        if labels is not None and labels.shape[1] != hidden.shape[1]:
            return None

        def use(logits_of: Callable[[Any], torch.Tensor]) -> Any:
            tokens, size = hidden.shape[1], max(2, logits.reader.chunk_tokens // len(hidden))
            if self._is_token_wise is None:
                self._is_token_wise = self._verify(logits_of, labels, tokens, size, sharding)
            if not self._is_token_wise:
                return None
            places = [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]
            return Preprocessed(_joined([self._of(logits_of(place), labels, place) for place in places]))

        result: Preprocessed | None = logits.reader.pieces(hidden, logits.functions, use)
        return result

    def _of(self, logits: torch.Tensor, labels: torch.Tensor | None, place: Any) -> Any:
        return detached(self._function(logits, None if labels is None else labels[:, place]))

    def _verify(
        self,
        logits_of: Callable[[Any], torch.Tensor],
        labels: torch.Tensor | None,
        tokens: int,
        size: int,
        sharding: ActiveSharding | None,
    ) -> bool:
        """Whether the function treats each token alone, on at most ``size`` tokens of each row."""
        place = _sample(labels, tokens, size)
        logits, border = logits_of(place), len(place) // 3 or 1
        chosen = None if labels is None else labels[:, place]
        whole = self._of(logits, chosen, slice(None))
        problem = _shape_problem(whole, logits)
        if problem is None:
            try:
                parts = [self._of(logits[:, at], chosen, at) for at in (slice(0, border), slice(border, None))]
                problem = _difference(whole, _joined(parts))
            except Exception as error:  # the function of the user: with whole logits it may work
                problem = f"it fails on a part of the tokens ({type(error).__name__}: {error})"
        vote = torch.tensor(int(problem is not None))
        if sharding is not None:  # all ranks of a sequence take the same path
            vote = vote.to(distributed.collective_device())
            dist.all_reduce(vote, dist.ReduceOp.MAX, group=sharding.groups.sequence)
        if problem is not None:
            logger.info("preprocess_logits_for_metrics gets whole logits: %s.", problem)
        return not int(vote)


def _per_token(labels: Any, rows: int) -> bool:
    return isinstance(labels, torch.Tensor) and labels.dim() >= 2 and labels.shape[0] == rows


def _of_shard(labels: torch.Tensor, sharding: ActiveSharding) -> torch.Tensor:
    """The labels of this rank's tokens; those of padding are ignored."""
    own = sharding.groups.coordinates
    positions = sharding.plan.positions(own.cp, own.sp).to(labels.device)
    part = labels.index_select(1, positions.clamp(max=labels.shape[1] - 1))
    part[:, int((positions < labels.shape[1]).sum()) :] = IGNORED
    return part


def _sample(labels: torch.Tensor | None, tokens: int, size: int) -> torch.Tensor:
    """At most ``size`` of ``tokens`` places, in order: first those that have labels in some row."""
    if labels is None:
        return torch.arange(min(tokens, size))
    used = (labels != IGNORED).flatten(2).any(2).any(0) if labels.dim() > 2 else (labels != IGNORED).any(0)
    by_use = torch.argsort(used.cpu().logical_not().to(torch.int8), stable=True)
    return by_use[:size].sort().values.to(labels.device)


def _shape_problem(result: Any, logits: torch.Tensor) -> str | None:
    leaves = leaves_of(result)
    if not leaves or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return "it does not return tensors"
    shape = logits.shape[:2]
    wrong = next((leaf for leaf in leaves if leaf.shape[:2] != shape), None)
    return None if wrong is None else f"of logits of {list(shape)} tokens it makes {list(wrong.shape)}"


def _joined(pieces: list[Any]) -> Any:
    """``pieces`` concatenated along the tokens, leaf by leaf."""
    leaves = [leaves_of(piece) for piece in pieces]
    columns = iter([torch.cat(parts, dim=1) for parts in zip(*leaves, strict=True)])
    return map_leaves(lambda _: next(columns), pieces[0])


def _difference(whole: Any, joined: Any) -> str | None:
    for one, other in zip(leaves_of(whole), leaves_of(joined), strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"a part of the tokens has results of another kind ({list(other.shape)}, not {list(one.shape)})"
        if not torch.allclose(one.double(), other.double(), rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True):
            return "its result for a token depends on other tokens"
    return None


# ``LogitsToHost``: whole logits of a batch in host memory, without whole logits on the device.
#
# ``compute_metrics`` without ``preprocess_logits_for_metrics``, and ``predict``, get the logits of all tokens. These
# are computed for a few tokens at a time, gathered from all ranks, and copied to the host before the next ones are
# made. So the device holds the logits of :attr:`~ds_trainer.parallel.deferred_logits.HeadReader.chunk_tokens` tokens of
# each replica, instead of those of the batch (with ``eval_accumulation_steps=None`` of the whole dataset).


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
