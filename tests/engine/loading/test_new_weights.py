"""Weights of new models: the distribution that the model itself gives, and the same numbers in every layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ds_trainer.engine.loading import new_weights
from ds_trainer.engine.loading.empty_model import empty_model
from ds_trainer.engine.loading.new_weights import BLOCK, NewWeights
from ds_trainer.parallel.shard_slices import ShardSlice, copy_common
from ds_trainer.utils.errors import ConfigError
from tests.support.new_models import IN_CONSTRUCTOR, PLAIN, TRANSFORMERS, FusedWeights, Rotations, ScaledInConstructor
from tests.support.pool import pool

MODELS = {**TRANSFORMERS, **PLAIN, **IN_CONSTRUCTOR}


def read_slice(
    source: NewWeights, name: str, shard_slice: ShardSlice, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    target = torch.full((len(shard_slice),), 123.0, dtype=dtype)
    source.fill(name, shard_slice, target)
    return target


def weights(model: nn.Module, source: NewWeights) -> dict[str, torch.Tensor]:
    """All parameters of ``model``, whole."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return {name: read_slice(source, name, ShardSlice.whole(shape)).view(shape) for name, shape in shapes.items()}


def built(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make()


# --- distributions


def differences(found: torch.Tensor, wanted: torch.Tensor) -> list[str]:
    """How two samples of what should be one distribution differ."""
    found, wanted = found.detach().double(), wanted.detach().double()
    if wanted.numel() == 1 or (wanted == wanted.flatten()[0]).all():
        return [] if torch.equal(found, wanted) else ["a constant"]
    problems = []
    for value in (0.0, 1.0):  # rows of padding, and other parts that are not random
        if not torch.equal(found == value, wanted == value):
            problems.append(f"which are {value}")
    ours, reference = found.flatten().sort().values, wanted.flatten().sort().values
    everything = torch.cat([ours, reference])
    below = [torch.searchsorted(sample, everything, right=True) / sample.numel() for sample in (ours, reference)]
    # Kolmogorov-Smirnov: a difference this large has a probability of 2e-8.
    if (below[0] - below[1]).abs().max() > 3.05 * math.sqrt(2 / ours.numel()):
        problems.append("quantiles")
    spread = reference.std()
    if ours.numel() >= 1000:
        if not 0.85 < ours.std() / spread < 1.18:
            problems.append(f"standard deviation {ours.std():.4g}, {spread:.4g}")
        if max((ours[0] - reference[0]).abs(), (ours[-1] - reference[-1]).abs()) > 3 * spread:
            problems.append("extremes")
    return problems


@pytest.mark.cases(13, rest="extended")
@pytest.mark.parametrize("name", MODELS)
def test_new_weights_have_the_distribution_of_the_model(name: str) -> None:
    make = MODELS[name]
    real, empty = built(make), empty_model(make)
    before = torch.get_rng_state()
    found = weights(empty, NewWeights(empty, seed=5))
    assert torch.equal(torch.get_rng_state(), before)
    assert list(found) == [key for key, _ in real.named_parameters()]
    problems = {key: differences(found[key], parameter) for key, parameter in real.named_parameters()}
    assert {key: problem for key, problem in problems.items() if problem} == {}


@pytest.mark.parametrize("name", PLAIN)
def test_the_distribution_is_found_from_the_initialization_alone(name: str) -> None:
    """For a model whose construction was not recorded."""
    with torch.device("meta"):
        empty = PLAIN[name]()
    problems = {
        key: said
        for (key, found), wanted in zip(
            weights(empty, NewWeights(empty, 5)).items(), built(PLAIN[name]).parameters(), strict=True
        )
        if (said := differences(found, wanted))
    }
    assert problems == {}


@pytest.mark.cases(8)
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_transformers_model_on_the_meta_device_gets_the_same_weights_and_buffers(name: str) -> None:
    watched, real = empty_model(TRANSFORMERS[name]), built(TRANSFORMERS[name])
    with torch.device("meta"):
        empty = TRANSFORMERS[name]()
    source = NewWeights(empty, 5)
    found, wanted = weights(empty, source), weights(watched, NewWeights(watched, 5))
    assert {key for key in wanted if not torch.equal(found[key], wanted[key])} == set()
    for key, buffer in real.named_buffers():
        shard_slice = ShardSlice.whole(tuple(buffer.shape))
        assert torch.equal(read_slice(source, key, shard_slice, buffer.dtype).view(buffer.shape), buffer), key


@pytest.mark.parametrize("wrong", [1.3, 0.75])
def test_control_a_different_standard_deviation_is_detected(wrong: float) -> None:
    class Wrong(nn.Linear):
        def reset_parameters(self) -> None:
            super().reset_parameters()
            with torch.no_grad():
                self.weight.mul_(wrong)

    empty = empty_model(lambda: Wrong(50, 60))
    found = weights(empty, NewWeights(empty, 5))
    assert differences(found["weight"], nn.Linear(50, 60).weight)
    assert not differences(found["bias"], nn.Linear(50, 60).bias)


def test_control_a_different_constant_or_row_is_detected() -> None:
    assert differences(torch.full((9,), 1.0), torch.full((9,), 1.1))
    rows = nn.Embedding(90, 30, padding_idx=2).weight
    assert differences(rows.roll(1, 0), rows)


# --- layouts


@pytest.fixture(scope="module")
def source_and_weights() -> tuple[NewWeights, dict[str, torch.Tensor]]:
    model = empty_model(lambda: nn.ModuleDict({"pieces": FusedWeights(), "rotations": Rotations(60, 50)}))
    source = NewWeights(model, 3)
    return source, weights(model, source)


SHAPES = {"pieces.fused": (300, 500), "pieces.experts": (3, 40, 50), "rotations.weight": (50, 60)}
assert 2 * BLOCK < 300 * 500


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("name", SHAPES)
def test_shards_of_all_ranks_form_the_full_tensor(name: str, ranks: int, source_and_weights: Any) -> None:
    source, expected = source_and_weights
    shard_slice = ShardSlice.whole(SHAPES[name])
    found = torch.cat([read_slice(source, name, shard_slice.part(rank, ranks)) for rank in range(ranks)])
    assert torch.equal(found, expected[name].flatten())


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_run_of_any_slice_has_the_same_values(data: st.DataObject) -> None:
    model = empty_model(lambda: nn.ModuleDict({"pieces": FusedWeights(), "rotations": Rotations(60, 50)}))
    source = NewWeights(model, 3)
    name = data.draw(st.sampled_from(sorted(SHAPES)))
    shape = SHAPES[name]
    dim = data.draw(st.sampled_from([None, *range(len(shape))]))
    bands: tuple[tuple[int, int], ...] = ()
    if dim is not None:
        boundaries = sorted(data.draw(st.lists(st.integers(0, shape[dim]), min_size=4, max_size=4, unique=True)))
        bands = ((boundaries[0], boundaries[1] - boundaries[0]), (boundaries[2], boundaries[3] - boundaries[2]))
    full_slice = ShardSlice(shape, 0, 0, dim, bands)
    start = data.draw(st.integers(0, full_slice.slice_numel - 1))
    shard_slice = full_slice.run(start, data.draw(st.integers(start + 1, full_slice.slice_numel)))
    wanted = torch.empty(len(shard_slice))
    copy_common(wanted, shard_slice, weights(model, source)[name].flatten(), ShardSlice.whole(shape))
    assert torch.equal(read_slice(NewWeights(model, 3), name, shard_slice), wanted)


def test_different_seeds_and_names_give_different_values() -> None:
    model = empty_model(lambda: nn.ModuleDict({key: Rotations(60, 50) for key in "ab"} | {"c": nn.Linear(300, 300)}))
    first, repeated, other = (weights(model, NewWeights(model, seed)) for seed in (1, 1, 2))
    for name, found in first.items():
        assert torch.equal(found, repeated[name])
        assert not torch.equal(found, other[name])
    assert not torch.equal(first["a.weight"], first["b.weight"])
    blocks = first["c.weight"].flatten().split(BLOCK)
    assert not torch.equal(blocks[0][: len(blocks[1])], blocks[1])


def test_values_do_not_depend_on_other_tensors() -> None:
    """Not on which are asked for, nor in which order, nor on what else the model has."""
    model = empty_model(lambda: nn.ModuleDict({"a": Rotations(60, 50), "b": nn.Linear(8, 8)}))
    larger = empty_model(lambda: nn.ModuleDict({"z": nn.Linear(4, 4), "a": Rotations(60, 50), "b": nn.Linear(8, 8)}))
    found = weights(larger, NewWeights(larger, 1))
    source = NewWeights(model, 1, names=["b.weight", "a.weight", "a.bias"])
    for name in ("b.weight", "a.bias", "a.weight", "a.bias"):
        shape = tuple(model.get_parameter(name).shape)
        assert torch.equal(read_slice(source, name, ShardSlice.whole(shape)).view(shape), found[name])
    assert not source.has("b.bias")


def test_tensors_computed_from_each_other_are_consistent() -> None:
    model = empty_model(lambda: Rotations(60, 50))
    found = weights(model, NewWeights(model, 1))
    weight = found["weight"].clone()
    weight[:, :3] *= 2
    torch.testing.assert_close(weight @ weight.T, 4 * torch.eye(50), atol=1e-5, rtol=0)
    torch.testing.assert_close(found["bias"], weight.sum(1))


def _digests(seed: int) -> dict[str, float]:
    model = empty_model(TRANSFORMERS["Mamba"])
    torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 17)
    return {name: float(found.double().sum()) for name, found in weights(model, NewWeights(model, seed)).items()}


@pytest.mark.extended
def test_all_processes_get_the_same_values() -> None:
    digests = _digests(4)
    assert pool(2).run(_digests, 4) == [digests, digests]


def test_values_are_drawn_in_the_dtype_of_the_model_and_converted() -> None:
    """Drawn in the type of the model, converted to the one that is asked for."""
    model = empty_model(lambda: nn.Linear(30, 30))
    source, shard_slice = NewWeights(model, 1), ShardSlice.whole((30, 30))
    assert torch.equal(
        read_slice(source, "weight", shard_slice, torch.bfloat16), read_slice(source, "weight", shard_slice).bfloat16()
    )
    half = empty_model(lambda: nn.Linear(30, 30, dtype=torch.bfloat16))
    found = read_slice(NewWeights(half, 1), "weight", shard_slice)
    assert torch.equal(found, found.bfloat16().float())
    model.to(torch.bfloat16)  # on meta, as an engine does
    assert torch.equal(
        read_slice(source, "weight", shard_slice), read_slice(NewWeights(model, 1), "weight", shard_slice)
    )


# --- what it leaves alone, and what it refuses


def test_the_model_is_not_changed() -> None:
    model = empty_model(TRANSFORMERS["Jamba"])
    head = nn.Linear(3, 3)
    model.new = head
    norm = nn.BatchNorm1d(3)
    norm.running_mean.fill_(7.0)
    model.norm = norm
    kept = {name: tensor.clone() for name, tensor in [*head.named_parameters(), *norm.state_dict().items()]}
    parameters = dict(model.named_parameters())
    found = NewWeights(model, 1)
    for name, parameter in parameters.items():
        if parameter.is_meta:
            shape = tuple(parameter.shape)
            read_slice(found, name, ShardSlice.whole(shape))
    assert all(model.get_parameter(name) is parameter for name, parameter in parameters.items())
    for name, tensor in kept.items():
        assert torch.equal({**dict(head.named_parameters()), **norm.state_dict()}[name], tensor)
    assert not found.has("new.weight")


def test_weights_without_an_initialization_are_rejected() -> None:
    class Forgotten(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.gain = nn.Parameter(torch.empty(5))
            self.part = nn.Parameter(torch.empty(4, 4))
            with torch.no_grad():
                self.part[:2].zero_()

    model = empty_model(Forgotten)
    with pytest.raises(ConfigError, match=r"Nothing initializes gain, part: .*reset_parameters"):
        NewWeights(model, 1)
    assert NewWeights(model, 1, names=["linear.weight"]).has("linear.weight")


def test_a_self_initializing_constructor_that_was_not_recorded_is_rejected() -> None:
    with torch.device("meta"):
        model = ScaledInConstructor()
    with pytest.raises(ConfigError, match=r"ScaledInConstructor initializes itself.*empty_model"):
        NewWeights(model, 1)


def test_a_failing_initialization_is_rejected() -> None:
    class Broken(nn.Linear):
        def reset_parameters(self) -> None:
            if self.weight.sum().item() != 0:
                raise RuntimeError("no zeros")

    with torch.device("meta"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Broken, "reset_parameters", lambda self: None)
        model = Broken(3, 3)
    source = NewWeights(model, 1)
    with pytest.raises(ConfigError, match=r"Broken.reset_parameters\(\) failed to initialize bias, weight: no zeros"):
        read_slice(source, "weight", ShardSlice.whole((3, 3)))
    assert model.weight.is_meta


@pytest.mark.parametrize(
    ("names", "message"),
    [(["wieght"], r"no tensor named 'wieght'. Did you mean 'weight'"), (["bias"], "bias cannot be .*not on the meta")],
)
def test_unknown_names_are_rejected(names: list[str], message: str) -> None:
    model = empty_model(lambda: nn.Linear(3, 3))
    model.bias = nn.Parameter(torch.zeros(3))
    with pytest.raises(ConfigError, match=message):
        NewWeights(model, 1, names)


def test_another_shape_is_refused() -> None:
    model = empty_model(lambda: nn.Linear(3, 4))
    with pytest.raises(ConfigError, match=r"weight has shape \(4, 3\) in the model, but shape \(3, 4\)"):
        read_slice(NewWeights(model, 1), "weight", ShardSlice.whole((3, 4)))


# --- the work of a rank


def llama_405b() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, vocab_size=128256)
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=128, num_key_value_heads=8))  # type: ignore[arg-type]


def test_one_rank_of_512_draws_only_its_shard_of_405b_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most its shard and one block per tensor; counted, not drawn."""
    model = empty_model(llama_405b)
    source = NewWeights(model, 1)
    drawn: list[int] = []

    def count(self: NewWeights, name: str, record: Any, start: int, stop: int) -> torch.Tensor:
        drawn.append(stop - start)
        return torch.empty(stop - start)

    monkeypatch.setattr(new_weights.NewWeights, "_draw", count)
    monkeypatch.setattr(new_weights, "copy_common", lambda *arguments: 0)
    shapes = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    assert sum(map(math.prod, (shape for _, shape in shapes))) == 405_853_388_800
    for rank in (0, 200, 511):
        drawn.clear()
        rank_elements = 0
        for name, shape in shapes:
            shard_slice = ShardSlice.whole(shape).part(rank, 512)
            rank_elements += len(shard_slice)
            source.fill(name, shard_slice, torch.empty(1).expand(len(shard_slice)))
        assert rank_elements <= sum(drawn) <= rank_elements + BLOCK * len(shapes)


def test_a_slice_of_rows_draws_only_its_rows(source_and_weights: Any) -> None:
    source = NewWeights(empty_model(partial(nn.Linear, 256, 8 * 256)), 1)
    rows = ShardSlice((8 * 256, 256), 0, 2 * 256 * 256, 0, ((512, 512),))
    read_slice(source, "weight", rows)
    assert source.drawn == 2 * BLOCK
