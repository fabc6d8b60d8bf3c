"""Building a model whose parameters take no memory."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer.engine.loading import construction_record, placement
from ds_trainer.engine.loading.empty_model import empty_model
from ds_trainer.engine.loading.new_weights import NewWeights
from ds_trainer.parallel.shard_slices import ShardSlice
from ds_trainer.utils.errors import ConfigError
from tests.support.new_models import IN_CONSTRUCTOR, PLAIN, TRANSFORMERS

MODELS = {**TRANSFORMERS, **PLAIN, **IN_CONSTRUCTOR}


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_an_empty_model_has_the_names_shapes_dtypes_ties_and_buffers_of_the_real_one(name: str, recorded: bool) -> None:
    real, empty = MODELS[name](), empty_model(MODELS[name], recorded)
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
    for (key, ours), (_, reference) in zip(empty.named_buffers(), real.named_buffers(), strict=True):
        assert torch.equal(ours, reference), key


def test_an_empty_model_draws_no_random_numbers_and_takes_no_memory() -> None:
    """Ten weights of 4 GB each: none is taken, none is drawn."""
    torch.manual_seed(3)
    before, peak = torch.get_rng_state(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = empty_model(lambda: nn.Sequential(*[nn.Linear(2**15, 2**15) for _ in range(10)]))
    assert torch.equal(torch.get_rng_state(), before)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 100_000
    assert sum(parameter.numel() for parameter in model.parameters()) > 10 * 2**30


def test_a_weight_larger_than_host_memory_can_be_created_empty() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2**10, 2**16, 2**16))

        def reset_parameters(self) -> None:
            nn.init.normal_(self.weight, std=0.1)

    model = empty_model(Experts)
    found = torch.empty(100)
    NewWeights(model, 1).fill("weight", ShardSlice.whole((2**10, 2**16, 2**16)).run(2**42 - 100, 2**42), found)
    assert 0.05 < found.std() < 0.15


class Large(nn.Module):
    """Each weight has 512 GB."""

    def __init__(self, make: Callable[[int, int], torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(make(2**19, 2**18))
        self.tied = self.weight


LARGE: dict[str, Callable[[int, int], torch.Tensor]] = {
    "empty": torch.empty,
    "zeros": torch.zeros,
    "ones": torch.ones,
    "full": lambda *size: torch.full(size, 0.5),
    "rand": torch.rand,
    "randn": lambda *size: torch.randn(*size, dtype=torch.float32),
    "randn_like": lambda *size: torch.randn_like(torch.empty(*size).t()).t(),
    "new_ones": lambda *size: torch.empty(0).new_ones(size),
    "transposed": lambda rows, columns: torch.rand(columns, rows).t(),
}


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("kind", LARGE)
def test_a_large_tensor_takes_no_memory_before_it_is_registered_as_a_parameter(kind: str, recorded: bool) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = empty_model(lambda: Large(LARGE[kind]), recorded)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 100_000
    assert model.weight.shape == (2**19, 2**18) and model.weight.is_meta and model.tied is model.weight


def test_a_large_buffer_keeps_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("causal", torch.ones(300, 300).tril())
            self.register_buffer("ones", torch.ones(300, 300))
            self.register_buffer("part", torch.full((300, 300), 0.5)[1:])
            self.register_buffer("scaled", torch.zeros(300, 300, dtype=torch.float64).add_(2).double() * 2)
            self.register_buffer("drawn", torch.randn(300, 300))
            self.register_buffer("true", torch.full((600, 600), True))
            self.register_buffer("counted", torch.full((300, 300), 3))

    monkeypatch.setattr("ds_trainer.engine.loading.empty_model.LARGE_BYTES", 300_000)
    real, empty = Masks(), empty_model(Masks)
    for name, wanted in real.named_buffers():
        found = empty.get_buffer(name)
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), name
        assert name == "drawn" or torch.equal(found, wanted), name
    assert 0.9 < empty.drawn.std() < 1.1


class Norm(nn.Linear):
    """Its constructor uses the numbers of its weight."""

    def __init__(self, use: Callable[[nn.Module], Any]) -> None:
        super().__init__(3, 3)
        self.use(use)

    def use(self, use: Callable[[nn.Module], Any]) -> None:
        use(self)


READS: dict[str, Callable[[Any], Any]] = {
    "item": lambda module: module.weight.sum().item(),
    "condition": lambda module: 1 if (module.weight > 0).all() else 2,
    "list": lambda module: module.weight.tolist(),
    "numpy": lambda module: module.weight.detach().numpy(),
    "cpu": lambda module: module.weight.detach().cpu(),
    "equal": lambda module: torch.equal(module.weight, module.weight),
}


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("kind", READS)
def test_a_constructor_that_reads_parameter_values_is_rejected(kind: str, recorded: bool) -> None:
    with pytest.raises(
        ConfigError, match=r"constructor of Norm \(test_empty_model.py, line \d+\) reads .*pass the model"
    ):
        empty_model(lambda: nn.Sequential(Norm(READS[kind])), recorded)
    assert not nn.Linear(2, 2).weight.is_meta


def test_a_tensor_computed_from_a_parameter_in_a_constructor_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"computes Norm.scale from parameters.*pass the model"):
        empty_model(lambda: Norm(lambda module: setattr(module, "scale", module.weight.detach().norm())))


def test_other_errors_in_a_constructor_are_not_changed() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        empty_model(lambda: Norm(lambda module: torch.ones(2, 2) @ torch.ones(3, 3)))


def test_parameter_attributes_are_kept() -> None:
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


def test_the_module_constructor_is_restored_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="on purpose"), torch.no_grad():
        empty_model(_fails)
    assert not nn.Linear(2, 2).weight.is_meta
    assert nn.init._no_grad_trunc_normal_.__module__ == "torch.nn.init"


def _fails() -> nn.Module:
    nn.Linear(2, 2)
    raise RuntimeError("on purpose")


@pytest.mark.parametrize(("numel", "kept"), [(8, True), (9, False)])
def test_values_of_a_constructor_are_kept_up_to_a_size(numel: int, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(construction_record, "_MAX_RECORDED_NUMEL", 8)
    on_meta = nn.Parameter(torch.empty(numel, device="meta"))
    construction_record.ConstructionRecorder().register(torch.arange(float(numel)), on_meta)
    record = construction_record.construction_record(on_meta)
    assert (record is not None) == kept


def test_states_of_weights_that_exist_are_not_made_again() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizers = [torch.optim.Adagrad([weight]), torch.optim.SGD([weight], lr=0.1, momentum=0.9)]
    for optimizer in optimizers:
        weight.grad = torch.full_like(weight, 2.0)
        optimizer.step()
        before = {name: state.clone() for name, state in optimizer.state[weight].items()}
        placement._allocate_optimizer_states(optimizer)
        assert all(torch.equal(optimizer.state[weight][name], state) for name, state in before.items())
