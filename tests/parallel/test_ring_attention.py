"""Ring attention on real ranks against attention by its definition in float64, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_trainer.parallel import ring_attention as ring
from ds_trainer.parallel.attention_kernels import Math
from ds_trainer.parallel.groups import parallel_groups
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.parallel.ring_attention import ring_attention
from ds_trainer.parallel.sequence_plan import SequencePlan
from tests.support.attention import dense_attention, plan_of
from tests.support.pool import pool
from tests.support.ring_cases import RESULTS, TOLERANCE, Case, errors, failing_cases, run_case, run_cases


def layouts(world: int) -> list[ParallelLayout]:
    """Layouts of a world with a ring; rings of neighbours and of ranks far from each other."""
    some = [ParallelLayout(world, cp=world)]
    if world >= 4:
        some += [ParallelLayout(world, cp=world // 2), ParallelLayout(world, tp=2, cp=world // 2)]
    return some


def cases(world: int) -> st.SearchStrategy[Case]:
    """Random shapes, masks and dtypes."""
    heads = st.sampled_from([(1, 1), (2, 2), (4, 2), (4, 1), (6, 3)])
    return st.builds(
        lambda heads, **rest: Case(heads=heads[0], key_heads=heads[1], **rest),
        heads,
        layout=st.sampled_from(layouts(world)),
        chunk=st.integers(1, 9),
        batch=st.integers(1, 3),
        head_dim=st.sampled_from([4, 5, 8, 16]),
        causal=st.booleans(),
        window=st.one_of(st.none(), st.integers(1, 40)),
        documents=st.booleans(),
        padding=st.booleans(),
        dtype=st.sampled_from(["float64", "float64", "float64", "float32", "bfloat16"]),
        mask_elements=st.sampled_from([1 << 30, 64, 9]),
        seed=st.integers(0, 99),
    )


def drawn(world: int, number: int) -> list[Case]:
    """Random cases for one run of a pool, the same at every run of the suite."""
    found: list[Case] = []

    @settings(max_examples=number, derandomize=True, database=None, phases=[Phase.generate])
    @given(cases(world))
    def draw(case: Case) -> None:
        found.append(case)

    draw()
    return found


@pytest.mark.cases(2)
@pytest.mark.parametrize(("world", "number"), [(1, 40), (2, 40), (4, 24), (8, 8)])
def test_random_cases_match_the_definition(world: int, number: int) -> None:
    some = drawn(world, number)
    assert len(some) == number
    assert failing_cases(some) == []


@pytest.mark.cases(1, "2", "4")
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_feature_matches_the_definition(world: int) -> None:
    """What must work whatever hypothesis draws."""
    plain = Case(ParallelLayout(world, cp=world), chunk=6)
    some = [
        replace(plain, causal=causal, window=window, documents=documents, padding=padding, dtype=dtype, seed=seed)
        for causal in (True, False)
        for seed, (window, documents, padding) in enumerate(
            [(None, False, False), (5, False, False), (None, True, False), (None, False, True), (5, True, True)]
        )
        for dtype in (TOLERANCE if world < 4 else ["float64"])
    ]
    assert failing_cases([*some, *(replace(case, mask_elements=9) for case in some)]) == []


@pytest.mark.parametrize(
    ("fault", "sees"),
    [("merge by mean", ("out", "query", "key")), ("gradients stay", ("key", "value")), ("plain order", RESULTS)],
)
def test_control_faults_are_detected(fault: str, sees: tuple[str, ...]) -> None:
    """Negative controls."""
    case = Case(ParallelLayout(2, cp=2))
    assert failing_cases([case]) == []
    ((_, found),) = failing_cases([replace(case, fault=fault)])
    assert all(found[name] > 1e-2 for name in sees), found


def test_float32_sums_are_better_than_sums_in_bfloat16() -> None:
    """Negative control of the dtype of sums: many blocks of bfloat16 summed in bfloat16 lose digits."""
    case = Case(ParallelLayout(2, cp=2), chunk=64, dtype="bfloat16", mask_elements=256, window=100)
    right, wrong = (pool(2).run(run_cases, [replace(case, fault=fault)]) for fault in (None, "sums in 16 bits"))
    good, bad = (errors(case, [results[0] for results in found], torch.mean) for found in (right, wrong))
    assert all(bad[name] > 1.05 * good[name] for name in RESULTS), (good, bad)


def events(case: Case) -> list[tuple[Any, ...]]:
    """On a rank: what is sent, waited for and computed, in order."""
    log: list[tuple[Any, ...]] = []
    passed_on, choose = ring._Ring.pass_on, ring.kernel_for

    def pass_on(self: Any, buffer: Tensor, tag: int, distance: int) -> Any:
        what = {ring._KEYS_AND_VALUES: "keys", ring._GRADIENTS: "gradients"}[tag]
        log.append(("send", what, buffer.numel(), buffer.dtype))
        transfer = passed_on(self, buffer, tag, distance)
        wait = transfer.wait
        transfer.wait = lambda: (log.append(("wait", what)), wait())[1]
        return transfer

    def kernel_for(*args: Any, **options: Any) -> Any:
        log.append(("compute",))
        return choose(*args, **options)

    with mock.patch.object(ring._Ring, "pass_on", pass_on), mock.patch.object(ring, "kernel_for", kernel_for):
        run_case(case)
    return log


def test_the_next_block_is_sent_while_one_is_computed() -> None:
    """Keys and values travel with their own few heads in their dtype; gradients in float32, one block behind."""
    case = Case(ParallelLayout(2, cp=2), dtype="bfloat16")
    size = 2 * case.batch * case.key_heads * 2 * case.chunk * case.head_dim
    keys, gradients = ("send", "keys", size, torch.bfloat16), ("send", "gradients", size, torch.float32)
    compute, wait_keys, wait_gradients = ("compute",), ("wait", "keys"), ("wait", "gradients")
    forward = [keys, compute, wait_keys, compute]
    backward = [keys, compute, gradients, wait_keys, compute, wait_gradients, gradients, wait_gradients]
    assert pool(2).run(events, case) == [forward + backward] * 2


def near(causal: bool, window: int | None, chunks: list[int] | None = None) -> Case:
    """A case of four ranks whose documents, if any, end after these chunks of eight."""
    return Case(ParallelLayout(4, cp=4), chunk=6, causal=causal, window=window, ends=tuple(chunks or ()))


@pytest.mark.parametrize(
    ("case", "keys", "gradients"),
    [
        (near(True, None), 3, 4),
        (near(True, 5), 2, 3),  # neighbors of a rank's two chunks: on the next rank and on the one before
        (near(False, 5), 2, 3),
        (near(True, None, [0, 1, 2, 3, 4, 5, 6, 7]), 0, 0),  # a document for each chunk
        (near(True, None, [0, 1, 2, 4, 5, 6, 7]), 0, 0),  # one of two chunks, both on rank 3
        (near(True, None, [0, 2, 3, 4, 5, 6, 7]), 1, 2),  # one on ranks 1 and 2, which sends its gradients home
    ],
)
def test_steps_that_no_rank_needs_are_left_out(case: Case, keys: int, gradients: int) -> None:
    """Keys are sent once more in the backward pass; their gradients travel behind them, and home."""
    assert failing_cases([case]) == []
    for log in pool(4).run(events, case):
        sent = [event[1] for event in log if event[0] == "send"]
        assert (sent.count("keys"), sent.count("gradients")) == (2 * keys, gradients)
        if keys:  # the transfer begins before the computation
            assert log[0][:2] == ("send", "keys") and log[1] == ("compute",)


def test_control_a_step_that_is_needed_is_missed() -> None:
    """Negative control: the last step of a window is left out too."""
    assert failing_cases([near(True, 5)]) == []
    ((_, found),) = failing_cases([replace(near(True, 5), fault="first steps only")])
    assert all(found[name] > 1e-2 for name in RESULTS), found


def wrong_rank() -> str:
    """On a rank: the error of ring attention for a wrong rank in the ring."""
    layout = ParallelLayout(2, cp=2)
    groups, x = parallel_groups(layout), torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError) as refusal:
        plan = SequencePlan(layout, 8)
        ring_attention(x, x, x, plan=plan, group=groups.cp, cp_rank=1 - groups.coordinates.cp, causal=True)
    return str(refusal.value)


def test_a_wrong_rank_in_the_ring_is_rejected() -> None:
    messages = [f"cp_rank={1 - rank}, but this is rank {rank} of the group" for rank in range(2)]
    assert pool(2).run(wrong_rank) == messages


def refusals() -> list[str]:
    """On a rank alone: what ring attention says to wrong inputs."""
    plan = SequencePlan(ParallelLayout(2, cp=2), 8)
    alone = plan_of(ParallelLayout(1), 4, torch.zeros(2, 4, dtype=torch.int64))
    good: dict[str, Any] = dict(plan=alone, group=None, cp_rank=0, causal=True)
    x = torch.zeros(2, 4, 4, 8)
    wrong: list[tuple[list[Tensor], dict[str, Any]]] = [
        ([x, x, x[:, :, :3]], {}),
        ([x[..., 0], x, x], {}),
        ([x, x[:, :3], x[:, :3]], {}),
        ([x, x[:, :2], x], {}),
        ([x, x[..., :4], x], {}),
        ([x, x, x.double()], {}),
        ([x[:1], x[:1], x[:1]], {}),
        ([x, x, x], {"plan": plan}),
        ([x, x, x], {"plan": plan, "cp_rank": 2}),
        ([x, x, x], {"window": 0}),
    ]
    messages = []
    for tensors, options in wrong:
        with pytest.raises(ValueError) as refusal:
            ring_attention(*tensors, **{**good, **options})
        messages.append(str(refusal.value))
    return messages


def test_wrong_inputs_are_refused() -> None:
    messages = refusals()
    for expected, message in zip(
        [
            "[batch, heads, 4, head_dim] (4 tokens over 1",
            "query [2, 4, 4]",
            "4 query heads are not a multiple of 3 key heads",
            "key [2, 2, 4, 8], value [2, 4, 4, 8]",
            "key [2, 4, 4, 4]",
            "value torch.float64",
            "plan.documents is [2, 4], but the batch is [1, 4]",
            "the plan has 2 context-parallel ranks, the group 1",
            "cp_rank=2 is not in 0..1",
            "window=0 must be at least 1 token",
        ],
        messages,
        strict=True,
    ):
        assert expected in message


def alone(tensors: list[Tensor], **options: Any) -> Tensor:
    """Ring attention of one rank, without a process group."""
    return ring_attention(
        *tensors,
        plan=SequencePlan(ParallelLayout(1), tensors[0].shape[2]),
        group=None,
        cp_rank=0,
        causal=True,
        **options,
    )


def test_queries_that_attend_to_nothing_give_zero_and_no_gradient() -> None:
    valid = torch.zeros(2, 6, dtype=torch.bool)
    valid[1, 2:] = True  # the first sequence is padding all over; in the second, the first two queries see nothing
    tensors = [torch.randn(2, 2, 6, 8).requires_grad_() for _ in range(3)]
    plan = plan_of(ParallelLayout(1), 6, valid=valid)
    out = ring_attention(*tensors, plan=plan, group=None, cp_rank=0, causal=True)
    assert not out[0].any() and not out[1, :, :2].any() and out[1, :, 2:].all()
    grads = torch.autograd.grad(out.square().sum() + out.sum(), tensors)
    assert not any(grad[0].any() or grad[1, :, :2].any() or grad.isnan().any() for grad in grads)


def test_scale_and_value_width_may_be_given() -> None:
    query, key = torch.randn(2, 1, 4, 6, 8, dtype=torch.float64)
    value = torch.randn(1, 4, 6, 12, dtype=torch.float64)
    wanted, _ = dense_attention(query, key, value, torch.ones(1, 6, 6, dtype=torch.bool).tril(), 0.7)
    torch.testing.assert_close(alone([query, key, value], scale=0.7), wanted, rtol=0, atol=1e-12)


def test_autocast_casts_like_torch_attention() -> None:
    query, key, value = torch.randn(3, 1, 4, 6, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = alone([query, key, value.bfloat16()])
        wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value.bfloat16(), is_causal=True)
    assert out.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(out, wanted)


def test_no_softmax_in_16_bits_under_autocast() -> None:
    """The fallback multiplies matrices; autocast must not reach them."""
    query, key, value = torch.randn(3, 1, 4, 6, 8, dtype=torch.float64)
    leaves = [query.requires_grad_(), key, value]
    with mock.patch.object(ring, "kernel_for", lambda *_, **__: Math()), torch.autocast("cpu", dtype=torch.bfloat16):
        out = alone(leaves)
        (grad,) = torch.autograd.grad(out.sum(), query)
    wanted, _ = dense_attention(*leaves, torch.ones(1, 6, 6, dtype=torch.bool).tril(), 8**-0.5)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(grad, torch.autograd.grad(wanted.sum(), query)[0], rtol=0, atol=1e-12)


def test_there_is_no_second_derivative() -> None:
    tensors = [torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3)]
    (grad,) = torch.autograd.grad(alone(tensors).square().sum(), tensors[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_only_inputs_output_and_lse_are_saved() -> None:
    """No scores, no mask: memory for backward grows with the tokens, not with their square."""
    plan = plan_of(ParallelLayout(1), 64, torch.arange(4).repeat_interleave(16)[None])
    tensors = [torch.randn(1, 2, 64, 8, requires_grad=True) for _ in range(3)]
    saved: list[tuple[int, ...]] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ring_attention(*tensors, plan=plan, group=None, cp_rank=0, causal=True)
    assert sorted(saved) == sorted([(1, 2, 64, 8)] * 4 + [(1, 2, 64)])
