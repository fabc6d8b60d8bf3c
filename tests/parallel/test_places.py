"""Pieces of tensors: what two of them share, against plain indexing."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from ds_trainer.parallel.places import Place, copy_common

SHAPES = [(7,), (6, 5), (4, 6, 3), (1, 9), (12, 1), (3, 8, 2, 2)]


def slices(shape: tuple[int, ...]) -> list[Place]:
    """The whole, halves, uneven and fused cuts along each dimension, an empty one."""
    found = [Place.whole(shape)]
    for dim, size in enumerate(shape):
        half = size // 2
        cuts = [((0, half),), ((half, size - half),), ((0, 0),)]
        if size > 1:
            cuts += [((size - 1, 1), (0, half)), ((0, 1), (max(1, half), size - max(1, half)))]
        for bands in cuts:
            place = Place(shape, 0, 0, dim, bands)
            found.append(place.run(0, place.slice_numel))
    return found


def indices(place: Place) -> torch.Tensor:
    """Which elements of the whole tensor a piece holds, by plain indexing."""
    whole = torch.arange(torch.Size(place.shape).numel()).view(place.shape)
    if place.dim is not None:
        kept = [i for first, length in place.bands for i in range(first, first + length)]
        whole = whole.index_select(place.dim, torch.tensor(kept, dtype=torch.int64))
    return whole.flatten()[place.start : place.stop]


def runs(place: Place, generator: random.Random) -> list[Place]:
    numel = place.slice_numel
    cuts = [tuple(sorted((generator.randint(0, numel), generator.randint(0, numel)))) for _ in range(3)]
    return [place, *(place.run(*cut) for cut in cuts)]


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_shared(shape: tuple[int, ...]) -> None:
    generator = random.Random(0)
    pieces = [run for place in slices(shape) for run in runs(place, generator)]
    checked = 0
    for wanted, given in itertools.product(pieces, pieces):
        if None not in (wanted.dim, given.dim) and wanted.dim != given.dim:
            with pytest.raises(ValueError, match="different dimensions"):
                list(wanted.common(given))
            continue
        source, target = indices(given), torch.full((len(wanted),), -1)
        copied = copy_common(target, wanted, source, given)
        held = set(source.tolist())
        expected = torch.tensor([i if i in held else -1 for i in indices(wanted).tolist()], dtype=torch.int64)
        assert torch.equal(target, expected), (wanted, given)
        assert copied == int((expected >= 0).sum())
        checked += 1
    assert checked > 100


def test_a_run_of_a_view_of_a_larger_tensor() -> None:
    """Targets are views into an engine's flat tensors: offsets count from where the view begins."""
    place = Place.whole((4, 3))
    whole = torch.arange(12.0)
    buffer = torch.zeros(20)
    copy_common(buffer[5:11], place.run(2, 8), whole, place)
    assert buffer.tolist() == [0.0] * 5 + [2.0, 3.0, 4.0, 5.0, 6.0, 7.0] + [0.0] * 9


@pytest.mark.parametrize(("numel", "count"), [(10, 3), (2, 4), (0, 2), (8, 1)])
def test_shares_cover_the_run_once(numel: int, count: int) -> None:
    place = Place((numel + 5,), 3, 3 + numel)
    parts = [place.share(index, count) for index in range(count)]
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(3, 3 + numel))


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3,\) and \(4,\)"):
        list(Place.whole((3,)).common(Place.whole((4,))))


@pytest.mark.parametrize("shape", SHAPES)
def test_as_plain_data(shape: tuple[int, ...]) -> None:
    for place in slices(shape):
        assert Place.from_json(place.to_json()) == place
