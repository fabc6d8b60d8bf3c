"""Cases of ring attention for pools of ranks, their distance to the definition, and faults that it must see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from ds_trainer.parallel import attention_blocks
from ds_trainer.parallel import ring_attention as ring
from ds_trainer.parallel.groups import parallel_groups
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.parallel.ring_attention import ring_attention
from ds_trainer.parallel.sequence_plan import SequencePlan
from tests.support.attention import allowed_pairs, dense_attention, plan_of
from tests.support.pool import pool

RESULTS = ("out", "query", "key", "value")  # the output and the gradients
TOLERANCE = {"float64": 1e-10, "float32": 2e-6, "bfloat16": 2e-2}


@dataclass(frozen=True)
class Case:
    """One attention: everything follows from these numbers on every rank, and in the process of the test."""

    layout: ParallelLayout
    chunk: int = 4
    batch: int = 2
    heads: int = 4
    key_heads: int = 2
    head_dim: int = 8
    causal: bool = True
    window: int | None = None
    documents: bool = False
    ends: tuple[int, ...] = ()  # chunks after which a document ends
    padding: bool = False
    dtype: str = "float64"
    mask_elements: int = attention_blocks.MASK_ELEMENTS
    seed: int = 0
    fault: str | None = None

    def plan(self) -> SequencePlan:
        length = 2 * self.layout.cp * self.chunk
        draw = torch.Generator().manual_seed(self.seed)
        documents = valid = None
        if self.documents:
            documents = (torch.rand(self.batch, length, generator=draw) < 0.2).long().cumsum(1)
        if self.ends:
            last = torch.zeros(length // self.chunk, dtype=torch.int64)
            last[list(self.ends)] = 1
            documents = (last.cumsum(0) - last).repeat_interleave(self.chunk).expand(self.batch, -1)
        if self.padding:
            lengths = torch.randint(0, length + 1, (self.batch, 1), generator=draw)
            valid = torch.arange(length) < lengths
            if self.seed % 2:
                valid = valid.flip(1)
        return plan_of(self.layout, length, documents, valid)

    def tensors(self, replica: int) -> list[Tensor]:
        """Query, key, value and gradient of the output of the whole sequences, in the order of the sequence."""
        draw = torch.Generator().manual_seed(1000 * self.seed + replica)
        length = 2 * self.layout.cp * self.chunk
        heads = (self.heads, self.key_heads, self.key_heads, self.heads)
        shapes = [(self.batch, number, length, self.head_dim) for number in heads]
        made = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
        return [tensor.to(getattr(torch, self.dtype)) for tensor in made]


def replica_of(layout: ParallelLayout, rank: int) -> int:
    """A number alike on the ranks of one ring and different on others."""
    coordinates = layout.coordinates(rank)
    return layout.rank_at(coordinates.dp, 0, coordinates.sp, coordinates.tp)


def run_cases(cases: list[Case]) -> list[list[np.ndarray[Any, Any]]]:
    """On a rank: its part of output and gradients, for each case."""
    return [run_case(case) for case in cases]


def run_case(case: Case) -> list[np.ndarray[Any, Any]]:
    groups, plan = parallel_groups(case.layout), case.plan()
    cp_rank, replica = groups.coordinates.cp, replica_of(case.layout, torch.distributed.get_rank())
    positions = plan.context_positions(cp_rank)
    if case.fault == "plain order":
        positions = torch.arange(plan.length).chunk(case.layout.cp)[cp_rank]
    query, key, value, grad_out = (tensor[:, :, positions] for tensor in case.tensors(replica))
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    with mock.patch.object(attention_blocks, "MASK_ELEMENTS", case.mask_elements), FAULTS[case.fault]():
        out = ring_attention(
            *leaves, plan=plan, group=groups.cp, cp_rank=cp_rank, causal=case.causal, window=case.window
        )
        assert out.dtype == query.dtype
        grads = torch.autograd.grad(out, leaves, grad_out)
    return [tensor.detach().double().numpy() for tensor in (out, *grads)]


def errors(
    case: Case, results: list[list[np.ndarray[Any, Any]]], measure: Callable[[Tensor], Tensor] = torch.max
) -> dict[str, float]:
    """Largest difference to the definition over all rings, relative to the largest value; or another measure of it."""
    plan, layout = case.plan(), case.layout
    allowed = allowed_pairs(plan, case.batch, case.causal, case.window)
    worst = dict.fromkeys(RESULTS, 0.0)
    for ranks in layout.groups(["cp"]):
        *inputs, grad_out = (tensor.double() for tensor in case.tensors(replica_of(layout, ranks[0])))
        leaves = [tensor.requires_grad_() for tensor in inputs]
        out, _ = dense_attention(*leaves, allowed, case.head_dim**-0.5)
        wanted = (out.detach(), *torch.autograd.grad(out, leaves, grad_out))
        for number, name in enumerate(RESULTS):
            found = torch.empty_like(wanted[number])
            for cp_rank, rank in enumerate(ranks):
                found[:, :, plan.context_positions(cp_rank)] = torch.from_numpy(results[rank][number])
            difference = float(measure((found - wanted[number]).abs()) / wanted[number].abs().max().clamp_min(1.0))
            worst[name] = max(worst[name], difference if difference == difference else float("inf"))
    return worst


def failing_cases(cases: list[Case]) -> list[tuple[Case, dict[str, float]]]:
    """The cases that differ from the definition."""
    of_ranks = pool(cases[0].layout.world_size).run(run_cases, cases)
    found = []
    for number, case in enumerate(cases):
        of_case = errors(case, [results[number] for results in of_ranks])
        if max(of_case.values()) > TOLERANCE[case.dtype]:
            found.append((case, of_case))
    return found


# -- faults that the comparison must see ---------------------------------------------------------------------------


@contextmanager
def no_fault() -> Iterator[None]:
    yield


@contextmanager
def merge_by_mean() -> Iterator[None]:
    def add(self: Any, rows: slice, out: Tensor, lse: Tensor) -> None:
        merged, merged_lse = self._accumulators()
        met = merged_lse[:, :, rows, None] > -torch.inf
        merged[:, :, rows] = torch.where(met, (merged[:, :, rows] + out) / 2, out)
        merged_lse[:, :, rows] = torch.logaddexp(merged_lse[:, :, rows], lse)

    with mock.patch.object(ring._MergedOutput, "add", add):
        yield


@contextmanager
def gradients_stay() -> Iterator[None]:
    passed_on = ring._Ring.pass_on

    def pass_on(self: Any, buffer: Tensor, tag: int, distance: int) -> Any:
        transfer = passed_on(self, buffer, tag, distance)
        if tag == ring._GRADIENTS:
            transfer.wait()
            return ring._Transfer(buffer, buffer, [])
        return transfer

    with mock.patch.object(ring._Ring, "pass_on", pass_on):
        yield


def first_steps_only() -> Any:
    return mock.patch.object(attention_blocks.AttentionBlocks, "_needed_steps", lambda self: (0, 1))


@contextmanager
def sums_in_16_bits() -> Iterator[None]:
    total, accumulators = ring._GradientSum.total, ring._MergedOutput._accumulators

    def rounded(self: Any) -> tuple[Tensor, Tensor]:
        out, lse = accumulators(self)
        return out.copy_(out.bfloat16()), lse

    with (
        mock.patch.object(ring._GradientSum, "total", lambda self: total(self).bfloat16().float()),
        mock.patch.object(ring._MergedOutput, "_accumulators", rounded),
    ):
        yield


FAULTS: dict[str | None, Callable[[], Any]] = {
    None: no_fault,
    "plain order": no_fault,
    "merge by mean": merge_by_mean,
    "gradients stay": gradients_stay,
    "sums in 16 bits": sums_in_16_bits,
    "first steps only": first_steps_only,
}
