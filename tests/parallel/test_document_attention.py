"""Attention within the samples of packed rows: equal to a mask of all pairs, in values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from ds_trainer.parallel import document_attention as module
from ds_trainer.parallel.attention import attention
from ds_trainer.parallel.document_attention import Documents, can_attend, document_attention, use_documents

LENGTHS = ((5, 1, 1, 9, 8), (24,), (13, 11))


def positions() -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])


def inputs(heads: int, key_heads: int, dim: int = 8, value_dim: int = 8) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((heads, dim), (key_heads, dim), (key_heads, value_dim))
    return [torch.randn(3, count, 24, size, dtype=torch.float64, requires_grad=True) for count, size in shapes]


def with_mask(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: int | None, scale: float | None
) -> torch.Tensor:
    numbers = (positions() == 0).cumsum(1)
    mask = numbers[:, None, :, None] == numbers[:, None, None, :]
    distance = torch.arange(24)[:, None] - torch.arange(24)[None, :]
    if causal:
        mask = mask & (distance >= 0)
    if window is not None:
        mask = mask & (distance.abs() < window if causal else distance.abs() <= window)
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def assert_equal(compute: Any, tensors: list[torch.Tensor], *options: Any) -> None:
    found, wanted = compute(*tensors), with_mask(*tensors, *options)  # type: ignore[arg-type]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(wanted)
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), tensors),
        torch.autograd.grad((wanted * weights).sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 4, 8, 30])
def test_samples_one_by_one(heads: tuple[int, int], causal: bool, window: int | None) -> None:
    tensors, documents = inputs(*heads), Documents.of(positions())
    assert documents.lengths == [5, 1, 1, 9, 8, 24, 13, 11]
    assert can_attend(documents, *tensors)
    assert_equal(
        lambda q, k, v: document_attention(q, k, v, documents, causal, window, 0.3), tensors, causal, window, 0.3
    )


def test_values_of_another_width_and_the_default_scale() -> None:
    tensors, documents = inputs(4, 2, value_dim=6), Documents.of(positions())
    assert_equal(lambda q, k, v: document_attention(q, k, v, documents, True, None, None), tensors, True, None, None)


def test_our_attention_for_custom_models_uses_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, masks = inputs(4, 2), []
    original = F.scaled_dot_product_attention

    def recorded(*args: Any, attn_mask: Any = None, **rest: Any) -> torch.Tensor:
        masks.append(attn_mask)
        return original(*args, attn_mask=attn_mask, **rest)

    monkeypatch.setattr(module, "scaled_dot_product_attention", recorded)
    with use_documents(Documents.of(positions())):
        assert_equal(lambda q, k, v: attention(q, k, v, position_ids=positions()), tensors, True, None, None)
    assert masks == [None] * 8
    assert_equal(lambda q, k, v: attention(q, k, v, position_ids=positions()), tensors, True, None, None)
    assert len(masks) == 8  # outside it is the mask


def test_compiled_code_does_not_depend_on_the_samples() -> None:
    def knows(x: torch.Tensor) -> torch.Tensor:
        return x if module.active_documents() is None else x + 1

    with use_documents(Documents.of(positions())):
        assert knows(torch.zeros(1)) == 1
        assert torch.compile(knows, backend="eager", fullgraph=True)(torch.zeros(1)) == 0


def test_other_shapes_are_left_to_a_mask() -> None:
    documents = Documents.of(positions())
    q, k, v = inputs(4, 2)
    assert not can_attend(documents, q[:2], k[:2], v[:2])
    assert not can_attend(documents, q, k[:, :, :12], v[:, :, :12])
    assert not can_attend(documents, *(tensor.to("meta") for tensor in (q, k, v)))


@pytest.mark.parametrize("accepts_groups", [True, False])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 4), (False, None), (False, 3)])
def test_what_the_gpu_kernel_is_given(
    causal: bool, window: int | None, accepts_groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel runs on GPUs only; a stand-in with its documented interface computes from its arguments."""
    import torch.nn.attention.varlen as library

    def varlen(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = not accepts_groups,
    ) -> torch.Tensor:
        assert enable_gqa and cu_seq_q.dtype == torch.int32 and max_q == max_k == 24
        assert all(tensor.is_contiguous() for tensor in (query, key, value))
        outputs = []
        for start, end in zip(cu_seq_q[:-1].tolist(), cu_seq_k[1:].tolist(), strict=True):
            part = [tensor[start:end].transpose(0, 1) for tensor in (query, key, value)]
            distance = torch.arange(end - start)[:, None] - torch.arange(end - start)[None, :]
            left, right = window_size
            mask = torch.ones_like(distance, dtype=torch.bool) if left < 0 else distance <= left
            mask = mask if right < 0 else mask & (-distance <= right)
            outputs.append(
                F.scaled_dot_product_attention(*part, attn_mask=mask, scale=scale, enable_gqa=True).transpose(0, 1)
            )
        return torch.cat(outputs)

    def older(*args: Any, scale: float | None = None, window_size: tuple[int, int] = (-1, -1)) -> torch.Tensor:
        return varlen(*args, scale=scale, window_size=window_size)

    monkeypatch.setattr(library, "varlen_attn", varlen if accepts_groups else older)
    module._varlen_arguments.cache_clear()
    documents = Documents.of(positions())
    flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in inputs(4, 2)]
    try:
        out = module._varlen(*flat, documents, causal, window, 0.3)
    finally:
        module._varlen_arguments.cache_clear()
    found = out.unflatten(0, (3, 24)).transpose(1, 2)
    torch.testing.assert_close(found, with_mask(*inputs(4, 2), causal, window, 0.3))  # type: ignore[arg-type]


def test_the_kernel_of_this_torch_has_the_interface() -> None:
    assert {"scale", "window_size"} <= set(module._varlen_arguments())
