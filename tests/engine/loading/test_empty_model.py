"""Building a model whose parameters take no memory."""

from __future__ import annotations

import resource

import pytest
import torch
from torch import nn

from ds_trainer.engine.loading.empty_model import empty_model
from ds_trainer.engine.loading.fresh_weights import FreshWeights
from ds_trainer.parallel.places import Place
from tests.support.fresh_models import IN_CONSTRUCTOR, PLAIN, TRANSFORMERS

MODELS = {**TRANSFORMERS, **PLAIN, **IN_CONSTRUCTOR}


@pytest.mark.parametrize("name", MODELS)
def test_names_shapes_types_ties_and_buffers_are_those_of_the_model(name: str) -> None:
    real, empty = MODELS[name](), empty_model(MODELS[name])
    described = [
        [
            (key, value.shape, value.dtype, value.requires_grad, type(value))
            for key, value in model.named_parameters(remove_duplicate=duplicates)
        ]
        for duplicates in (True, False)
        for model in (real, empty)
    ]
    assert described[0] == described[1]
    assert described[2] == described[3]  # tied weights are one parameter
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert [key for key, _ in empty.named_buffers()] == [key for key, _ in real.named_buffers()]
    assert list(empty.state_dict()) == list(real.state_dict())
    for (key, mine), (_, theirs) in zip(empty.named_buffers(), real.named_buffers(), strict=True):
        assert torch.equal(mine, theirs), key


def test_no_random_numbers_and_no_memory() -> None:
    """Ten weights of 4 GB each: none is taken, none is drawn."""
    torch.manual_seed(3)
    before, peak = torch.get_rng_state(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = empty_model(lambda: nn.Sequential(*[nn.Linear(2**15, 2**15) for _ in range(10)]))
    assert torch.equal(torch.get_rng_state(), before)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 100_000
    assert sum(parameter.numel() for parameter in model.parameters()) > 10 * 2**30


def test_a_weight_larger_than_the_memory_of_this_host() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2**10, 2**16, 2**16))

        def reset_parameters(self) -> None:
            nn.init.normal_(self.weight, std=0.1)

    model = empty_model(Experts)
    found = torch.empty(100)
    FreshWeights(model, 1).fill("weight", Place.whole((2**10, 2**16, 2**16)).run(2**42 - 100, 2**42), found)
    assert 0.05 < found.std() < 0.15


def test_attributes_of_parameters_stay() -> None:
    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = nn.Parameter(torch.ones(3), requires_grad=False)
            weight.no_decay = True  # type: ignore[attr-defined]
            self.first = self.second = weight

    model = empty_model(Marked)
    assert model.first is model.second
    assert model.first.no_decay
    assert not model.first.requires_grad


def test_the_constructor_of_modules_is_put_back() -> None:
    with pytest.raises(RuntimeError, match="on purpose"), torch.no_grad():
        empty_model(_fails)
    assert not nn.Linear(2, 2).weight.is_meta
    assert nn.init._no_grad_trunc_normal_.__module__ == "torch.nn.init"


def _fails() -> nn.Module:
    nn.Linear(2, 2)
    raise RuntimeError("on purpose")
