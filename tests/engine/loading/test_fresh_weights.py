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

from ds_trainer.engine.loading import fresh_weights
from ds_trainer.engine.loading.empty_model import empty_model
from ds_trainer.engine.loading.fresh_weights import BLOCK, FreshWeights
from ds_trainer.parallel.places import Place, copy_common
from ds_trainer.utils.errors import ConfigError
from tests.support.fresh_models import IN_CONSTRUCTOR, PLAIN, TRANSFORMERS, Pieces, Rotations, ScaledInConstructor
from tests.support.pool import pool

MODELS = {**TRANSFORMERS, **PLAIN, **IN_CONSTRUCTOR}


def piece(source: FreshWeights, name: str, place: Place, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    target = torch.full((len(place),), 123.0, dtype=dtype)
    source.fill(name, place, target)
    return target


def weights(model: nn.Module, source: FreshWeights) -> dict[str, torch.Tensor]:
    """All parameters of ``model``, whole."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return {name: piece(source, name, Place.whole(shape)).view(shape) for name, shape in shapes.items()}


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
    mine, theirs = found.flatten().sort().values, wanted.flatten().sort().values
    everything = torch.cat([mine, theirs])
    below = [torch.searchsorted(sample, everything, right=True) / sample.numel() for sample in (mine, theirs)]
    # Kolmogorov-Smirnov: a difference this large has a probability of 2e-8.
    if (below[0] - below[1]).abs().max() > 3.05 * math.sqrt(2 / mine.numel()):
        problems.append("quantiles")
    spread = theirs.std()
    if mine.numel() >= 1000:
        if not 0.85 < mine.std() / spread < 1.18:
            problems.append(f"standard deviation {mine.std():.4g}, {spread:.4g}")
        if max((mine[0] - theirs[0]).abs(), (mine[-1] - theirs[-1]).abs()) > 3 * spread:
            problems.append("extremes")
    return problems


@pytest.mark.parametrize("name", MODELS)
def test_the_distribution_is_that_of_the_model(name: str) -> None:
    make = MODELS[name]
    real, empty = built(make), empty_model(make)
    before = torch.get_rng_state()
    found = weights(empty, FreshWeights(empty, seed=5))
    assert torch.equal(torch.get_rng_state(), before)
    assert list(found) == [key for key, _ in real.named_parameters()]
    problems = {key: differences(found[key], parameter) for key, parameter in real.named_parameters()}
    assert {key: said for key, said in problems.items() if said} == {}


@pytest.mark.parametrize("name", PLAIN)
def test_the_initialization_alone_says_it_too(name: str) -> None:
    """Of a model that nobody watched when it was built."""
    with torch.device("meta"):
        empty = PLAIN[name]()
    problems = {
        key: said
        for (key, found), wanted in zip(
            weights(empty, FreshWeights(empty, 5)).items(), built(PLAIN[name]).parameters(), strict=True
        )
        if (said := differences(found, wanted))
    }
    assert problems == {}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_model_of_transformers_on_meta_gets_the_same_numbers_and_its_buffers(name: str) -> None:
    watched, real = empty_model(TRANSFORMERS[name]), built(TRANSFORMERS[name])
    with torch.device("meta"):
        empty = TRANSFORMERS[name]()
    source = FreshWeights(empty, 5)
    found, wanted = weights(empty, source), weights(watched, FreshWeights(watched, 5))
    assert {key for key in wanted if not torch.equal(found[key], wanted[key])} == set()
    for key, buffer in real.named_buffers():
        place = Place.whole(tuple(buffer.shape))
        assert torch.equal(piece(source, key, place, buffer.dtype).view(buffer.shape), buffer), key


@pytest.mark.parametrize("wrong", [1.3, 0.75])
def test_control_another_spread_is_noticed(wrong: float) -> None:
    class Wrong(nn.Linear):
        def reset_parameters(self) -> None:
            super().reset_parameters()
            with torch.no_grad():
                self.weight.mul_(wrong)

    empty = empty_model(lambda: Wrong(50, 60))
    found = weights(empty, FreshWeights(empty, 5))
    assert differences(found["weight"], nn.Linear(50, 60).weight)
    assert not differences(found["bias"], nn.Linear(50, 60).bias)


def test_control_another_constant_and_another_row_are_noticed() -> None:
    assert differences(torch.full((9,), 1.0), torch.full((9,), 1.1))
    rows = nn.Embedding(90, 30, padding_idx=2).weight
    assert differences(rows.roll(1, 0), rows)


# --- layouts


@pytest.fixture(scope="module")
def pieces() -> tuple[FreshWeights, dict[str, torch.Tensor]]:
    model = empty_model(lambda: nn.ModuleDict({"pieces": Pieces(), "rotations": Rotations(60, 50)}))
    source = FreshWeights(model, 3)
    return source, weights(model, source)


SHAPES = {"pieces.fused": (300, 500), "pieces.experts": (3, 40, 50), "rotations.weight": (50, 60)}
assert 2 * BLOCK < 300 * 500


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("name", SHAPES)
def test_shares_of_ranks_are_the_whole(name: str, ranks: int, pieces: Any) -> None:
    source, whole = pieces
    place = Place.whole(SHAPES[name])
    found = torch.cat([piece(source, name, place.share(rank, ranks)) for rank in range(ranks)])
    assert torch.equal(found, whole[name].flatten())


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_piece_of_any_slice(data: st.DataObject) -> None:
    model = empty_model(lambda: nn.ModuleDict({"pieces": Pieces(), "rotations": Rotations(60, 50)}))
    source = FreshWeights(model, 3)
    name = data.draw(st.sampled_from(sorted(SHAPES)))
    shape = SHAPES[name]
    dim = data.draw(st.sampled_from([None, *range(len(shape))]))
    bands: tuple[tuple[int, int], ...] = ()
    if dim is not None:
        cuts = sorted(data.draw(st.lists(st.integers(0, shape[dim]), min_size=4, max_size=4, unique=True)))
        bands = ((cuts[0], cuts[1] - cuts[0]), (cuts[2], cuts[3] - cuts[2]))
    everything = Place(shape, 0, 0, dim, bands)
    start = data.draw(st.integers(0, everything.slice_numel - 1))
    place = everything.run(start, data.draw(st.integers(start + 1, everything.slice_numel)))
    wanted = torch.empty(len(place))
    copy_common(wanted, place, weights(model, source)[name].flatten(), Place.whole(shape))
    assert torch.equal(piece(FreshWeights(model, 3), name, place), wanted)


def test_other_seeds_and_other_names_give_other_numbers() -> None:
    model = empty_model(lambda: nn.ModuleDict({key: Rotations(60, 50) for key in "ab"} | {"c": nn.Linear(300, 300)}))
    first, again, other = (weights(model, FreshWeights(model, seed)) for seed in (1, 1, 2))
    for name, found in first.items():
        assert torch.equal(found, again[name])
        assert not torch.equal(found, other[name])
    assert not torch.equal(first["a.weight"], first["b.weight"])
    blocks = first["c.weight"].flatten().split(BLOCK)
    assert not torch.equal(blocks[0][: len(blocks[1])], blocks[1])


def test_numbers_depend_on_no_other_tensor() -> None:
    """Not on which are asked for, nor in which order, nor on what else the model has."""
    model = empty_model(lambda: nn.ModuleDict({"a": Rotations(60, 50), "b": nn.Linear(8, 8)}))
    larger = empty_model(lambda: nn.ModuleDict({"z": nn.Linear(4, 4), "a": Rotations(60, 50), "b": nn.Linear(8, 8)}))
    found = weights(larger, FreshWeights(larger, 1))
    source = FreshWeights(model, 1, names=["b.weight", "a.weight", "a.bias"])
    for name in ("b.weight", "a.bias", "a.weight", "a.bias"):
        shape = tuple(model.get_parameter(name).shape)
        assert torch.equal(piece(source, name, Place.whole(shape)).view(shape), found[name])
    assert not source.has("b.bias")


def test_tensors_that_are_computed_from_each_other_fit() -> None:
    model = empty_model(lambda: Rotations(60, 50))
    found = weights(model, FreshWeights(model, 1))
    weight = found["weight"].clone()
    weight[:, :3] *= 2
    torch.testing.assert_close(weight @ weight.T, 4 * torch.eye(50), atol=1e-5, rtol=0)
    torch.testing.assert_close(found["bias"], weight.sum(1))


def _digests(seed: int) -> dict[str, float]:
    model = empty_model(TRANSFORMERS["Mamba"])
    torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 17)
    return {name: float(found.double().sum()) for name, found in weights(model, FreshWeights(model, seed)).items()}


def test_processes_have_the_same_numbers() -> None:
    mine = _digests(4)
    assert pool(2).run(_digests, 4) == [mine, mine]


def test_types() -> None:
    """Drawn in the type of the model, converted to the one that is asked for."""
    model = empty_model(lambda: nn.Linear(30, 30))
    source, place = FreshWeights(model, 1), Place.whole((30, 30))
    assert torch.equal(piece(source, "weight", place, torch.bfloat16), piece(source, "weight", place).bfloat16())
    half = empty_model(lambda: nn.Linear(30, 30, dtype=torch.bfloat16))
    found = piece(FreshWeights(half, 1), "weight", place)
    assert torch.equal(found, found.bfloat16().float())
    model.to(torch.bfloat16)  # on meta, as an engine does
    assert torch.equal(piece(source, "weight", place), piece(FreshWeights(model, 1), "weight", place))


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
    found = FreshWeights(model, 1)
    for name, parameter in parameters.items():
        if parameter.is_meta:
            shape = tuple(parameter.shape)
            piece(found, name, Place.whole(shape))
    assert all(model.get_parameter(name) is parameter for name, parameter in parameters.items())
    for name, tensor in kept.items():
        assert torch.equal({**dict(head.named_parameters()), **norm.state_dict()}[name], tensor)
    assert not found.has("new.weight")


def test_weights_that_nothing_initializes_are_refused() -> None:
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
        FreshWeights(model, 1)
    assert FreshWeights(model, 1, names=["linear.weight"]).has("linear.weight")


def test_a_constructor_that_nobody_watched_is_refused() -> None:
    with torch.device("meta"):
        model = ScaledInConstructor()
    with pytest.raises(ConfigError, match=r"ScaledInConstructor initializes itself.*empty_model"):
        FreshWeights(model, 1)


def test_an_initialization_that_fails_is_refused() -> None:
    class Broken(nn.Linear):
        def reset_parameters(self) -> None:
            if self.weight.sum().item() != 0:
                raise RuntimeError("no zeros")

    with torch.device("meta"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Broken, "reset_parameters", lambda self: None)
        model = Broken(3, 3)
    source = FreshWeights(model, 1)
    with pytest.raises(ConfigError, match=r"Broken.reset_parameters\(\) does not initialize bias, weight: no zeros"):
        piece(source, "weight", Place.whole((3, 3)))
    assert model.weight.is_meta


@pytest.mark.parametrize(
    ("names", "message"),
    [(["wieght"], r"no weight named 'wieght'. Did you mean 'weight'"), (["bias"], "bias cannot be .*not on the meta")],
)
def test_names_that_cannot_be(names: list[str], message: str) -> None:
    model = empty_model(lambda: nn.Linear(3, 3))
    model.bias = nn.Parameter(torch.zeros(3))
    with pytest.raises(ConfigError, match=message):
        FreshWeights(model, 1, names)


def test_another_shape_is_refused() -> None:
    model = empty_model(lambda: nn.Linear(3, 4))
    with pytest.raises(ConfigError, match=r"weight has shape \(4, 3\) in the model, but \(3, 4\)"):
        piece(FreshWeights(model, 1), "weight", Place.whole((3, 4)))


# --- the work of a rank


def llama_405b() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, vocab_size=128256)
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=128, num_key_value_heads=8))  # type: ignore[arg-type]


def test_a_rank_of_512_draws_its_share_of_405b(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most its share and one block a tensor; counted, not drawn."""
    model = empty_model(llama_405b)
    source = FreshWeights(model, 1)
    asked: list[int] = []

    def count(self: FreshWeights, name: str, record: Any, start: int, stop: int) -> torch.Tensor:
        asked.append(stop - start)
        return torch.empty(stop - start)

    monkeypatch.setattr(fresh_weights.FreshWeights, "_draw", count)
    monkeypatch.setattr(fresh_weights, "copy_common", lambda *arguments: 0)
    shapes = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    assert sum(map(math.prod, (shape for _, shape in shapes))) == 405_853_388_800
    for rank in (0, 200, 511):
        asked.clear()
        share = 0
        for name, shape in shapes:
            place = Place.whole(shape).share(rank, 512)
            share += len(place)
            source.fill(name, place, torch.empty(1).expand(len(place)))
        assert share <= sum(asked) <= share + BLOCK * len(shapes)


def test_a_slice_by_rows_draws_its_rows(pieces: Any) -> None:
    source = FreshWeights(empty_model(partial(nn.Linear, 256, 8 * 256)), 1)
    rows = Place((8 * 256, 256), 0, 2 * 256 * 256, 0, ((512, 512),))
    piece(source, "weight", rows)
    assert source.drawn == 2 * BLOCK
