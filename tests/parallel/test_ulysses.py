"""The all-to-all over heads: which heads, which tokens, how many elements, and its gradient, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ds_trainer.parallel.groups import parallel_groups
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.parallel.ulysses import HeadPartition, gather_heads, scatter_heads
from tests.support.pool import pool

HEADS = [(8, 8), (8, 4), (8, 2), (8, 1), (12, 6), (24, 6), (12, 3), (20, 10)]


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6))
def test_every_query_head_is_with_its_key_head(queries: int, keys: int, group: int) -> None:
    sp = queries
    partition = HeadPartition(query_heads=sp * keys * group, key_heads=keys, sp=sp)
    seen = 0
    for rank, start in enumerate(partition.starts()):
        received = list(range(start, start + partition.keys))
        assert start >= 0 and received[-1] < partition.key_heads
        local = partition.local_keys(rank)
        if local is None:  # equal runs in order, which is what GQA means by fewer key heads
            local = [head // (partition.queries // partition.keys) for head in range(partition.queries)]
        wanted = [
            (rank * partition.queries + head) // (partition.query_heads // partition.key_heads)
            for head in range(partition.queries)
        ]
        assert [received[index] for index in local] == wanted
        seen = max(seen, len(set(wanted)))
    assert partition.keys == seen  # nothing unused is sent, except to make the splits equal


def test_key_heads_are_sent_without_repeats_where_they_divide() -> None:
    assert HeadPartition(32, 8, 4).starts() == [0, 2, 4, 6] and HeadPartition(32, 8, 4).keys == 2
    assert HeadPartition(32, 2, 8).starts() == [0, 0, 0, 0, 1, 1, 1, 1] and HeadPartition(32, 2, 8).keys == 1
    assert HeadPartition(12, 6, 4).starts() == [0, 1, 3, 4] and HeadPartition(12, 6, 4).local_keys(1) == [0, 1, 1]


@pytest.mark.parametrize(("queries", "keys", "sp", "message"), [(6, 2, 4, "6 query heads.*sp=4"), (8, 3, 2, "8.*3")])
def test_heads_that_cannot_be_divided_are_reported(queries: int, keys: int, sp: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HeadPartition(queries, keys, sp)


def labelled(heads: int, tokens: int, dim: int, kind: int) -> torch.Tensor:
    """A tensor whose every element says where it belongs."""
    indices = [torch.arange(2.0), torch.arange(float(heads)), torch.arange(float(tokens)), torch.arange(float(dim))]
    b, h, s, d = torch.meshgrid(*indices, indexing="ij")
    return kind * 1e6 + b * 1e5 + h * 1e3 + s * 10 + d / 10


def exchange_case(queries: int, keys: int, value_dim: int, transposed: bool) -> dict[str, Any]:
    """Every rank shards the same full tensors; what it gets is compared with the full ones."""
    sp, tokens, dim = dist.get_world_size(), 6, 4
    group = parallel_groups(ParallelLayout(sp, sp=sp)).sp
    rank = dist.get_rank(group)
    positions = slice(rank * tokens, (rank + 1) * tokens)
    full = [labelled(queries, tokens * sp, dim, 1), labelled(keys, tokens * sp, dim, 2)]
    full.append(labelled(keys, tokens * sp, value_dim, 3))
    local = [tensor[:, :, positions] for tensor in full]
    if transposed:  # as models make them: [batch, tokens, heads, dim] seen the other way round
        local = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in local]
    calls: list[int] = []
    real = dist.all_to_all_single
    dist.all_to_all_single = lambda out, given, **rest: (calls.append(given.numel()), real(out, given, **rest))[1]
    try:
        got = scatter_heads(*local, group)
        back = gather_heads(got[0], group)
    finally:
        dist.all_to_all_single = real
    partition = HeadPartition(queries, keys, sp)
    mapped = [(rank * partition.queries + head) // (queries // keys) for head in range(partition.queries)]
    repeat = partition.queries // got[1].shape[1]
    return {
        "query": torch.equal(got[0], full[0][:, rank * partition.queries : (rank + 1) * partition.queries]),
        "key": torch.equal(got[1].repeat_interleave(repeat, 1), full[1][:, mapped]),
        "value": torch.equal(got[2].repeat_interleave(repeat, 1), full[2][:, mapped]),
        "back": torch.equal(back, full[0][:, :, positions]),
        "elements": sum(calls) == partition.elements(2, tokens, dim, value_dim) if value_dim == dim else True,
        "collectives": len(calls) == (2 if value_dim == dim else 3),
    }


@pytest.mark.cases(11, rest="extended")
@pytest.mark.parametrize("sp", [2, 4])
@pytest.mark.parametrize(("queries", "keys"), HEADS)
def test_ranks_exchange_heads_for_tokens_and_back(sp: int, queries: int, keys: int) -> None:
    for value_dim in (4, 3):
        for transposed in (False, True):
            for answer in pool(sp).run(exchange_case, queries, keys, value_dim, transposed):
                assert all(answer.values()), (value_dim, transposed, answer)


def gradient_case(queries: int, keys: int) -> dict[str, float]:
    """The gradient of a function of the received tensors, against the same function of the whole tensors."""
    sp, tokens, dim = dist.get_world_size(), 3, 4
    group = parallel_groups(ParallelLayout(sp, sp=sp)).sp
    rank = dist.get_rank(group)
    generator = torch.Generator().manual_seed(5)
    shape = (2, queries, tokens * sp, dim)
    full = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(1)]
    full += [torch.randn(2, keys, *shape[2:], generator=generator, dtype=torch.float64) for _ in range(2)]
    weights = torch.randn(shape, generator=generator, dtype=torch.float64)
    positions = slice(rank * tokens, (rank + 1) * tokens)
    local = [tensor[:, :, positions].clone().requires_grad_() for tensor in full]
    got = scatter_heads(*local, group)
    repeat = got[0].shape[1] // got[1].shape[1]
    mixed = got[0] * got[1].repeat_interleave(repeat, 1).sin() + got[2].repeat_interleave(repeat, 1) ** 2
    (gather_heads(mixed, group) * weights[:, :, positions]).sum().backward()
    for tensor in full:
        tensor.requires_grad_()
    key, value = (tensor.repeat_interleave(queries // keys, 1) for tensor in full[1:])
    ((full[0] * key.sin() + value**2) * weights).sum().backward()
    return {
        name: float((ours.grad - reference.grad[:, :, positions]).abs().max())  # type: ignore[operator, index]
        for name, ours, reference in zip(("query", "key", "value"), local, full, strict=True)
    }


@pytest.mark.parametrize("sp", [2, 4])
@pytest.mark.parametrize(("queries", "keys"), HEADS)
def test_gradients_return_to_their_tokens(sp: int, queries: int, keys: int) -> None:
    for answer in pool(sp).run(gradient_case, queries, keys):
        assert max(answer.values()) < 1e-12, answer


def refusal_case() -> str:
    group = parallel_groups(ParallelLayout(2, sp=2)).sp
    with pytest.raises(ValueError) as caught:
        scatter_heads(torch.zeros(1, 3, 4, 2), torch.zeros(1, 3, 4, 2), torch.zeros(1, 3, 4, 2), group)
    return str(caught.value)


def test_three_heads_on_two_ranks_are_rejected() -> None:
    assert all("3 query heads" in answer and "sp=2" in answer for answer in pool(2).run(refusal_case))
