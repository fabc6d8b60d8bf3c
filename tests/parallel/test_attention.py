"""Attention over sharded sequences compared with one process, forward and backward, on real ranks."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_trainer.parallel.attention import active_sharding, attention, use_sharding
from ds_trainer.parallel.groups import parallel_groups
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.parallel.sequence_plan import SequencePlan
from tests.support.attention import plan_of
from tests.support.full_attention import full_attention, packed, padded
from tests.support.pool import pool

LENGTH, BATCH, DIM = 32, 2, 4
LAYOUTS = [(1, 2), (1, 4), (2, 2), (2, 4), (4, 2)]  # cp, sp
RULES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "both ways": {"causal": False},
    "window": {"causal": True, "window": 5},
    "window both ways": {"causal": False, "window": 3},
    "scale": {"causal": True, "scale": 0.3},
}


def case(cp: int, sp: int, queries: int, keys: int, rule: str, rows: str, double: bool, shift: int = 0) -> float:
    """The greatest difference of this rank's results and gradients from one process's, relative to the greatest value.

    ``shift`` breaks it on purpose: heads come back in another order.
    """
    layout = ParallelLayout(dist.get_world_size(), cp=cp, sp=sp)
    groups = parallel_groups(layout)
    documents = packed(BATCH, LENGTH)[0] if rows == "packed" else None
    valid = padded(BATCH, LENGTH) if rows == "padded" else None
    plan = plan_of(layout, LENGTH, documents, valid)
    generator = torch.Generator().manual_seed(3)
    dtype = torch.float64 if double else torch.float32
    full = [torch.randn(BATCH, n, LENGTH, DIM, generator=generator).to(dtype) for n in (queries, keys, keys, queries)]
    weights = full.pop()
    positions = plan.positions(groups.coordinates.cp, groups.coordinates.sp)
    local = [tensor[:, :, positions].clone().requires_grad_() for tensor in full]
    with use_sharding(plan, groups) as sharding:
        result = attention(*local, **RULES[rule])
        (result.roll(shift, 1) * weights[:, :, positions]).sum().backward()
    assert sharding is not None and sharding.calls == 1 and active_sharding() is None
    full = [tensor.double().requires_grad_() for tensor in full]
    expected = full_attention(*full, **RULES[rule], documents=documents, valid=valid)
    (expected * weights).sum().backward()
    pairs = [(result, expected)] + [(ours.grad, reference.grad) for ours, reference in zip(local, full, strict=True)]
    return max(
        float((ours - reference[:, :, positions]).abs().max() / reference.abs().max())  # type: ignore[union-attr, index, operator]
        for ours, reference in pairs
    )


def cases(cp: int, sp: int) -> dict[tuple[Any, ...], float]:
    """Every division of heads with every rule in one go."""
    found = {}
    for index, (queries, keys) in enumerate([(8, 8), (8, 2), (8, 1), (12, 6), (24, 3)]):
        for rule in RULES:
            rows = ("whole", "packed", "padded")[index % 3] if rule != "causal" else "whole"
            found[queries, keys, rule, rows] = case(cp, sp, queries, keys, rule, rows, True)
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize(("cp", "sp"), LAYOUTS)
def test_attention_over_a_sharded_sequence_is_that_of_one_process(cp: int, sp: int) -> None:
    for answer in pool(cp * sp).run(cases, cp, sp):
        assert max(answer.values()) < 1e-10, answer


@pytest.mark.parametrize("rows", ["whole", "packed", "padded"])
@pytest.mark.parametrize("rule", ["causal", "both ways", "window"])
def test_documents_and_padding(rule: str, rows: str) -> None:
    for cp, sp in [(1, 4), (2, 2)]:
        assert max(pool(4).run(case, cp, sp, 8, 2, rule, rows, True)) < 1e-10
    assert max(pool(4).run(case, 2, 2, 8, 4, rule, rows, False)) < 1e-5


def test_replicas_do_not_mix() -> None:
    assert max(pool(4).run(case, 1, 2, 8, 2, "causal", "packed", True)) < 1e-10


def autocast_case() -> tuple[list[str], float]:
    """What travels under autocast, and how far the result is from attention of one process under autocast."""
    layout = ParallelLayout(2, sp=2)
    groups = parallel_groups(layout)
    plan = SequencePlan(layout, LENGTH)
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 4, LENGTH, DIM)  # rotary embeddings leave float32 behind, a linear layer does not
    value = torch.randn(1, 2, LENGTH, DIM, dtype=torch.bfloat16)
    positions = plan.positions(0, groups.coordinates.sp)
    sent: list[str] = []
    real = dist.all_to_all_single
    dist.all_to_all_single = lambda out, given, **rest: (sent.append(str(given.dtype)), real(out, given, **rest))[1]
    try:
        with torch.autocast("cpu", torch.bfloat16), use_sharding(plan, groups):
            result = attention(*(tensor[:, :, positions] for tensor in (query, key[:, :2], value)))
    finally:
        dist.all_to_all_single = real
    with torch.autocast("cpu", torch.bfloat16):
        expected = attention(query, key[:, :2], value)
    assert result.dtype == expected.dtype == torch.bfloat16
    return sent, float((result - expected[:, :, positions]).abs().max())


def test_autocast_halves_the_communication() -> None:
    for sent, apart in pool(2).run(autocast_case):
        assert sent == ["torch.bfloat16"] * 2 and apart < 0.03


def test_a_different_order_of_heads_is_detected() -> None:
    assert min(pool(2).run(case, 1, 2, 8, 2, "causal", "whole", True, 1)) > 0.1


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("rows", ["whole", "packed", "padded", "padded left"])
def test_without_sharding_the_mask_is_built_from_the_batch(rule: str, rows: str) -> None:
    torch.manual_seed(0)
    full = [torch.randn(BATCH, heads, LENGTH, DIM, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    documents = valid = positions = None
    if rows == "packed":
        documents, positions = packed(BATCH, LENGTH)
    if rows.startswith("padded"):
        valid = padded(BATCH, LENGTH)
        valid = valid.flip(-1) if rows.endswith("left") else valid
        positions = (valid.long().cumsum(-1) - 1).clamp(min=0)  # breaks at the padding, which is no document
    mask = None if valid is None else valid.long()
    result = attention(*full, **RULES[rule], attention_mask=mask, position_ids=positions)
    expected = full_attention(*full, **RULES[rule], documents=documents, valid=valid)
    assert (result - expected).abs().max() < 1e-12
    ours = torch.autograd.grad(result.square().sum(), full)
    reference = torch.autograd.grad(expected.square().sum(), full)
    for one, other in zip(ours, reference, strict=True):
        assert (one - other).abs().max() < 1e-12


def test_consecutive_positions_need_no_mask() -> None:
    full = [torch.randn(1, 2, LENGTH, DIM) for _ in range(3)]
    assert torch.equal(attention(*full, position_ids=torch.arange(LENGTH)[None]), attention(*full))


def test_nested_sharding_restores_the_outer_sharding() -> None:
    assert [inner for inner in pool(2).run(nesting_case)] == [(True, False, True)] * 2


def nesting_case() -> tuple[bool, bool, bool]:
    layout = ParallelLayout(2, sp=2)
    with use_sharding(SequencePlan(layout, 8), parallel_groups(layout)) as sharding:
        outer = active_sharding() is sharding
        with pytest.raises(RuntimeError, match="inside"), use_sharding(None, None):
            inner = active_sharding() is not None
            raise RuntimeError("inside")
        return outer, inner, active_sharding() is sharding


def wrong_length_case() -> list[str]:
    layout = ParallelLayout(2, sp=2)
    messages = []
    with use_sharding(SequencePlan(layout, 8), parallel_groups(layout)) as sharding:
        for queries, keys in ((8, 8), (4, 8)):
            with pytest.raises(ValueError) as caught:
                attention(*(torch.zeros(1, 2, n, 4) for n in (queries, keys, keys)))
            messages.append(str(caught.value))
        assert sharding is not None and sharding.calls == 0
    return messages


def test_tokens_of_the_wrong_length_are_rejected() -> None:
    for whole, cross in pool(2).run(wrong_length_case):
        assert "8 tokens" in whole and "4 of 8" in whole
        assert "4 query tokens over 8 key tokens" in cross


def test_a_sequence_plan_needs_its_groups() -> None:
    with (
        pytest.raises(ValueError, match="needs process groups"),
        use_sharding(SequencePlan(ParallelLayout(1), 4), None),
    ):
        pass


def test_attention_is_exported_by_the_package() -> None:
    code = "import sys, ds_trainer; assert 'torch' not in sys.modules; from ds_trainer import attention as a; "
    code += "from ds_trainer.parallel.attention import attention as b; assert a is b"
    subprocess.run([sys.executable, "-c", code], check=True)
