"""Elements of converted tensors, followed back to where they came from."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from ds_trainer.checkpoint.weights.element_tracer import ElementTracer, UntraceableOperation


def experts(t: list[torch.Tensor]) -> torch.Tensor:
    gates, ups = torch.stack(t[:3], dim=0), torch.stack(t[3:6], dim=0)
    return torch.cat([gates, ups], dim=1).transpose(1, 2).contiguous()


def halves(t: list[torch.Tensor]) -> torch.Tensor:
    return torch.chunk(torch.cat(t[:3], dim=-1), 2, dim=0)[1].contiguous().to(torch.float32)


def rotated(t: list[torch.Tensor]) -> torch.Tensor:
    return t[0].view(2, 2, 3, 4).transpose(1, 2).reshape(12, 4).t().clone()


def one_of_many(t: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([torch.cat([t[0], t[1]]), torch.cat([t[2], t[3]])], dim=1)[:, 1].unbind(0)[5].squeeze()


@pytest.mark.parametrize("moved", [experts, halves, rotated, one_of_many, lambda t: t[0]])
def test_traced_elements_are_those_of_the_operation(moved: Callable[[list[torch.Tensor]], torch.Tensor]) -> None:
    real = [torch.randn(12, 4, generator=torch.Generator().manual_seed(n)) for n in range(6)]
    origins = ElementTracer()
    sources = [origins.source(str(n), (12, 4), torch.float32) for n in range(6)]
    with origins:
        made = moved(sources)
    wanted = moved(real)
    assert made.shape == wanted.shape
    every = np.random.default_rng(0).permutation(wanted.numel())
    found = torch.full((wanted.numel(),), float("nan"))
    for origin in origins.trace(made, every):
        found[torch.from_numpy(origin.positions)] = real[int(origin.name)].flatten()[torch.from_numpy(origin.indices)]
    assert torch.equal(found, wanted.flatten()[torch.from_numpy(every)])


def nested(t: list[torch.Tensor]) -> torch.Tensor:
    gates, ups = torch.stack([x.t() for x in t[:3]]), torch.stack([x.t() for x in t[3:]])
    return torch.cat([gates, ups], dim=2).split([5, 19], dim=2)[1][1:].contiguous().narrow(0, 1, 1).squeeze(0)[1:3]


@pytest.mark.parametrize(
    "moved", [experts, halves, one_of_many, nested, lambda t: t[0], lambda t: t[2][1:5, 3].clone()]
)
def test_boxes_hold_all_elements(moved: Callable[[list[torch.Tensor]], torch.Tensor]) -> None:
    real = [torch.randn(12, 4, generator=torch.Generator().manual_seed(n)) for n in range(6)]
    real[1] = real[1].t().contiguous().t()  # a file may hold another order
    tracer = ElementTracer()
    sources = [tracer.source(str(n), (12, 4), torch.float32, real[n].stride()) for n in range(6)]
    with tracer:
        made = moved(sources)
        torch.empty(3, device="meta")  # conversions ask for the shapes of parameters
    wanted, traced = moved(real), tracer.boxes(made)
    assert traced.shape == tuple(wanted.shape)
    filled = torch.full(wanted.shape, float("nan"))
    for source, (origin, view) in traced.parts:
        box = filled[tuple(slice(first, first + size) for first, size in zip(origin, view.shape, strict=True))]
        assert box.isnan().all()  # every element once
        box.copy_(real[int(source)].as_strided(view.shape, view.strides, view.offset))
    assert torch.equal(filled, wanted)


@pytest.mark.parametrize(
    "mixed", [rotated, lambda t: torch.cat(t).view(-1)[2:9], lambda t: torch.stack(t).view(12, 24)]
)
def test_parts_that_are_no_boxes_are_refused(mixed: Callable[[list[torch.Tensor]], torch.Tensor]) -> None:
    tracer = ElementTracer()
    with tracer:
        made = mixed([tracer.source(str(n), (12, 4), torch.float32) for n in range(6)])
    with pytest.raises(UntraceableOperation):
        tracer.boxes(made)


@pytest.mark.parametrize("computed", [lambda t: t * 2, lambda t: t.flip(0), lambda t: t.mul_(2), lambda t: t[[1, 0]]])
def test_operations_that_compute_values_are_rejected(computed: Callable[[torch.Tensor], torch.Tensor]) -> None:
    origins = ElementTracer()
    source = origins.source("a", (4, 3), torch.float32)
    with pytest.raises(UntraceableOperation), origins:
        computed(source)
