"""Sends each token to the ranks that hold its experts, and the results back: two all-to-alls a layer each way.

No token is dropped and nothing is routed anew: the router of the model decides, and each rank multiplies by the weights
of its own tokens. Padding, which nothing attends to, is not sent in training: its result is zero. A rank to which no
token goes, or whose experts get none, runs the same operations on a row of zeros, so that its gradients are zeros and
no other rank waits for it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import ProcessGroup, all_gather_into_tensor, all_to_all_single, get_global_rank
from torch.nn.functional import pad

from ds_trainer.utils.devices import free_bytes
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.plain_attributes import only_looks


class Route(NamedTuple):
    """Which tokens of one forward pass of a layer go where.

    Attributes:
        order: the pairs of token and expert of this rank, sorted by expert, without padding: int64 ``[pairs]``.
        local: the expert, of those of this rank, for each row that arrives, and 0 for the row of zeros after them:
            int64 ``[rows + 1]``.
        sent: rows for each rank of the group.
        received: rows from each rank of the group.
    """

    order: torch.Tensor
    local: torch.Tensor
    sent: list[int]
    received: list[int]


_TOO_MANY = (
    "{}: {:,} rows have arrived for the experts of this rank, {:.1f} for each that it sends, and they have no room. "
    "Routers that prefer few experts (expert_busiest_share in the logs) need an auxiliary loss, or smaller "
    "micro-batches. {}"
)
_COPIED = (
    "expert_parallel_size: {} was copied (copy.deepcopy, AveragedModel), but this rank has a part of its experts, and "
    "nothing would know that of the copy. Keep clones of model.named_parameters() instead, or copy the model before "
    "the training."
)
_SWITCH = "output_router_logits"  # of auxiliary losses of transformers
_NO_ROOM = (
    "{}: {:,} rows would arrive for the experts of rank {}, {:.1f} times the mean of the ranks, and its memory has "
    "room for {:,} of {} bytes. Routers that prefer few experts (expert_busiest_share in the logs) need an auxiliary "
    "loss or gate_bias_rate, or smaller micro-batches."
)
_NO_TEXT: tuple[Sequence[int], Any, Any, int] = ((), None, None, 0)
_running = threading.local()  # backward passes have threads of their own
_calls: Any = None  # makes the collectives of a pass that is rehearsed, or that may begin anew


@contextmanager
def calls_through(calls: Any) -> Iterator[None]:
    """Inside, ``calls.call(name, function, args, kwargs)`` makes the collectives of exchanges.

    If ``calls.completes``, the results of the pass are not used: rows of zeros are sent, and none is kept. Loads are
    those of passes with ``calls.counts``.
    """
    global _calls
    outer, _calls = _calls, calls
    try:
        yield
    finally:
        _calls = outer


@torch.compiler.disable
def note_padding(model: nn.Module, args: Any, keywords: Mapping[str, Any]) -> None:
    """A forward pre-hook of a model: keeps its ``attention_mask [batch, tokens]``, in which padding is 0.

    That of packed rows, which have no such mask, is known from :func:`use_text`. An auxiliary loss counts it.
    """
    mask, (text, positions, rule, padding) = keywords.get("attention_mask"), getattr(_running, "text", _NO_TEXT)
    ids = keywords.get("input_ids") if text and model.training else None
    if isinstance(ids, torch.Tensor) and len(ids) == len(text) and not _reads_all_tokens(model, keywords, rule):
        inside = (torch.arange(ids.shape[1]) if positions is None else positions()) < torch.tensor(text)[:, None]
        if inside.shape == ids.shape:
            # Of pinned memory, so that the host does not wait. A script may have exchanged rows: text is never padding.
            inside = (inside.pin_memory() if ids.is_cuda else inside).to(ids.device, non_blocking=True)
            mask = inside | (ids != padding)
    is_usual = model.training and isinstance(mask, torch.Tensor) and mask.dim() == 2
    _running.mask = mask.flatten() != 0 if is_usual else None  # type: ignore[union-attr]


def _reads_all_tokens(model: nn.Module, keywords: Mapping[str, Any], rule: Any) -> bool:
    """Whether an auxiliary loss may read what the router says of the padding of packed rows."""
    switch, config = keywords.get(_SWITCH), getattr(model, "config", None)
    for part in (
        config,
        config.get_text_config() if config is not None and hasattr(config, "get_text_config") else None,
    ):
        switch = getattr(part, _SWITCH, None) if switch is None else switch
    return not rule.normalized or rule.auxiliary if switch is None else bool(switch)


@contextmanager
def use_text(
    text: Sequence[int], positions: Callable[[], torch.Tensor] | None, rule: Any, pad_token_id: int
) -> Iterator[None]:
    """Inside, the tokens of packed rows that follow the text are padding.

    Args:
        text: tokens of each row before its padding; empty if no rows are packed.
        positions: gives those of the tokens of this rank in a row, on the host; None: it has whole rows.
        rule: ``auxiliary`` says whether the model adds an auxiliary loss, if its configuration does not.
        pad_token_id: the token of the padding.
    """
    outer = getattr(_running, "text", _NO_TEXT)
    _running.text = text, positions, rule, pad_token_id
    try:
        yield
    finally:
        _running.text = outer


@torch.compiler.disable
def forget_padding(*_: Any) -> None:
    """The forward hook of the same model, also after an error."""
    _running.mask = None


def without_padding(experts: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``experts [tokens, k]`` as int64 ``[tokens x k]``, ``number`` for padding, and how often each: ``[number]``."""
    ids, mask = experts.reshape(-1).long(), getattr(_running, "mask", None)
    if mask is not None and len(mask) == len(experts):
        ids = torch.where(mask[:, None], experts, number).reshape(-1).long()  # after all experts
    # Of one size on all devices: bincount would make a GPU wait for the largest number.
    return ids, ids.new_zeros(number + 1).scatter_add_(0, ids, torch.ones_like(ids))[:number]


class _CheckpointedCall:
    """One call of a checkpointed function, whose routes are kept for the pass that computes it again.

    A router that decides differently the second time would send other numbers of rows than the ranks expect.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._routes: list[Route] = []
        self._next = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outer, _running.call, self._next = getattr(_running, "call", None), self, 0
        try:
            return self._function(*args, **kwargs)
        finally:
            _running.call = outer

    def route(self, new: Callable[[], Route]) -> Route:
        """The next route of this pass."""
        if self._next == len(self._routes):
            self._routes.append(new())
        self._next += 1
        return self._routes[self._next - 1]


def keep_routes(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """``checkpoint``, torch's or one with its signature, which computes again with the routes of the forward pass."""

    def keeping(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return checkpoint(_CheckpointedCall(function), *args, **kwargs)

    return keeping


class ExpertExchange:
    """Runs the experts of one layer over the ranks of a group, each of which holds ``local_experts`` of them.

    Args:
        name: the name of the layer, for errors.
        group: the ranks, in the order of their experts.
        local_experts: how many a rank holds.
        product: computes ``(module, rows [n, hidden], experts [n, 1], weights [n, 1]) -> [n, hidden]`` with the experts
            of this rank.
        free_bytes: memory of a device that rows may use.

    Attributes:
        group: see above.
        calls: how often it has run.
    """

    def __init__(
        self,
        name: str,
        group: ProcessGroup,
        local_experts: int,
        product: Callable[..., Any],
        free_bytes: Callable[[torch.device], int] = free_bytes,
    ) -> None:
        self._name = name
        self.group = group
        self._ranks = group.size()
        self._local_experts = local_experts
        self._product = product
        self._free_bytes = free_bytes
        self.calls = 0
        self._rank = group.rank()
        self._counts = False  # whether this is training, whose loads are logged
        self._load: torch.Tensor | None = None
        self._bytes_sent = 0
        self._seconds = 0.0
        self._events: deque[tuple[Any, Any]] = deque()  # before and after exchanges that a GPU may not have reached

    def __deepcopy__(self, memo: Any) -> Any:
        raise ConfigError(_COPIED.format(self._name))

    def __call__(
        self, module: nn.Module, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """The sum over a token's experts of their results, times their weights. Collective.

        Args:
            module: holds the weights of this rank's experts.
            hidden: the tokens of this rank, ``[tokens, hidden]``.
            experts: which experts of all each token goes through, int ``[tokens, k]``.
            weights: ``[tokens, k]``.

        Returns:
            ``[tokens, hidden]``, in the dtype of ``hidden``.
        """
        self.calls += 1
        self._counts = module.training and not only_looks() and (_calls is None or _calls.counts)
        tokens, k = experts.shape
        call: _CheckpointedCall | None = getattr(_running, "call", None)
        row_bytes = 2 * hidden.shape[-1] * hidden.element_size()  # with its result
        new_route = partial(self._new_route, experts, row_bytes)
        route = new_route() if call is None else call.route(new_route)
        if _calls is not None and _calls.completes:
            row = _Zeros.apply(hidden, self, route.sent, route.received, 1)
            result = self._product(module, row, route.local[-1:, None], row.new_ones(1, 1))
            whole = _Zeros.apply(result, self, route.received, route.sent, tokens)
            return (whole * weights.sum(1, keepdim=True)).to(hidden.dtype)
        try:
            rows = _Exchanged.apply(hidden[route.order // k], self, route.sent, route.received, 1)
            results = self._product(module, rows, route.local[:, None], rows.new_ones(len(rows), 1))
        except torch.OutOfMemoryError as error:
            share = sum(route.received) / max(1, len(route.order))
            raise torch.OutOfMemoryError(_TOO_MANY.format(self._name, sum(route.received), share, error)) from error
        results = _Exchanged.apply(results[:-1], self, route.received, route.sent, 0)
        whole = results.new_zeros(tokens * k, results.shape[-1])
        pairs = whole.index_copy(0, route.order, results).view(tokens, k, results.shape[-1])
        return (pairs * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)

    def send(
        self,
        arriving: torch.Tensor,
        rows: torch.Tensor,
        received: list[int] | None = None,
        sent: list[int] | None = None,
    ) -> None:
        """Rows to the ranks of the experts, or the same ``rows`` to all of them; an error names the layer."""
        if self._counts and sent is not None and received is not None:
            elsewhere = len(rows) - sent[self._rank]
            self._bytes_sent += elsewhere * rows.shape[-1] * rows.element_size()
        with self._timed(rows.device) if self._counts else nullcontext():
            try:
                if sent is None:
                    _call("counts", all_gather_into_tensor, arriving, rows, group=self.group)
                else:
                    _call("rows", all_to_all_single, arriving, rows, received, sent, group=self.group)
            except RuntimeError as error:
                raise RuntimeError(
                    f"{self._name}: the exchange of tokens with other ranks has failed. {error}"
                ) from error

    @contextmanager
    def _timed(self, device: torch.device) -> Iterator[None]:
        """Adds the time inside: of a GPU by its events, for which nothing waits."""
        if device.type == "cpu":
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began
            return
        before, after = (torch.Event(device, enable_timing=True) for _ in range(2))
        before.record()
        yield
        after.record()
        self._events.append((before, after))
        self._add_finished()

    def _add_finished(self) -> None:
        while self._events and self._events[0][1].query():
            before, after = self._events.popleft()
            self._seconds += before.elapsed_time(after) / 1000

    def take_load(self, device: torch.device) -> torch.Tensor:
        """Pairs of token and expert of this rank in training since the last call, for each expert of all: int64."""
        load, self._load = self._load, None
        empty = torch.zeros(self._ranks * self._local_experts, dtype=torch.int64, device=device)
        return empty if load is None else load

    def take_seconds(self) -> float:
        """Seconds of exchanges in training since the last call, with waits for other ranks, as far as they ended."""
        self._add_finished()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def take_bytes_sent(self) -> int:
        """Bytes of rows that this rank has sent to others in training since the last call."""
        sent, self._bytes_sent = self._bytes_sent, 0
        return sent

    @torch.no_grad()
    def _new_route(self, experts: torch.Tensor, row_bytes: int) -> Route:
        ids, counts = without_padding(experts, self._ranks * self._local_experts)
        order = torch.argsort(ids, stable=True)
        own = pad(counts, (0, 1), value=self._free_bytes(ids.device) // row_bytes)
        if self._counts:
            self._load = counts if self._load is None else self._load.add_(counts)
        # Where rows had no room, all ranks of the group begin the pass anew with fewer, and tell each other again.
        for again in (True, False) if _calls is not None and _calls.completes else (False,):
            gathered = own.new_empty(self._ranks * len(own))
            self.send(gathered, own)
            gathered = gathered.view(self._ranks, -1)
            by_rank = gathered[:, :-1].view(self._ranks, self._ranks, -1)  # from, to, expert
            arriving = by_rank[:, self._rank]
            rows = by_rank[self._rank].sum(1), arriving.sum(1), by_rank.sum((0, 2)), gathered[:, -1]
            sent, received, totals, rooms = torch.stack(rows).tolist()  # the one wait of the host
            short = [rank for rank in range(self._ranks) if totals[rank] > rooms[rank]]
            if short and not again:  # as all ranks know, so that none waits for another
                total, share, rank = totals[short[0]], totals[short[0]] * self._ranks / sum(totals), short[0]
                values = total, get_global_rank(self.group, rank), share, rooms[rank], row_bytes
                raise torch.OutOfMemoryError(_NO_ROOM.format(self._name, *values))
            if not short:
                break
        local = torch.arange(self._local_experts, device=ids.device).repeat(self._ranks)
        local = torch.repeat_interleave(local, arriving.flatten(), output_size=sum(received))
        return Route(order[: sum(sent)], torch.cat([local, local.new_zeros(1)]), sent, received)


class _Exchanged(torch.autograd.Function):
    """``all_to_all_single`` of rows, with ``padding`` rows of zeros after those that arrive."""

    @staticmethod
    def forward(
        context: Any, rows: torch.Tensor, exchange: ExpertExchange, sent: list[int], received: list[int], padding: int
    ) -> torch.Tensor:
        context.exchange, context.sent, context.received = exchange, sent, received
        return _all_to_all(rows, exchange, sent, received, padding)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        arrived = gradient[: sum(context.received)]
        return _all_to_all(arrived, context.exchange, context.received, context.sent, 0), None, None, None, None


class _Zeros(torch.autograd.Function):
    """The same for ``kept`` rows of zeros, whatever arrives: for ranks that use the results. Nothing is kept."""

    @staticmethod
    def forward(
        context: Any, rows: torch.Tensor, exchange: ExpertExchange, sent: list[int], received: list[int], kept: int
    ) -> torch.Tensor:
        context.shape, context.exchange, context.sent, context.received = rows.shape, exchange, sent, received
        _all_to_all(rows.new_zeros(sum(sent), rows.shape[-1]), exchange, sent, received, 0)
        return rows.new_zeros(kept, rows.shape[-1])

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        zeros = gradients[0].new_zeros(sum(context.received), gradients[0].shape[-1])
        _all_to_all(zeros, context.exchange, context.received, context.sent, 0)
        return zeros.new_zeros(context.shape), None, None, None, None


def _call(name: str, function: Any, *args: Any, **kwargs: Any) -> None:
    if _calls is None:
        function(*args, **kwargs)
    else:
        _calls.call(name, function, args, kwargs)


def _all_to_all(
    rows: torch.Tensor, exchange: ExpertExchange, sent: list[int], received: list[int], padding: int
) -> torch.Tensor:
    arriving = sum(received)
    result = rows.new_empty((arriving + padding, *rows.shape[1:]))
    result[arriving:].zero_()
    exchange.send(result[:arriving], rows.contiguous(), received, sent)
    return result
