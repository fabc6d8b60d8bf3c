"""What a loss and its model keep is as before after a measurement, and what cannot be put back is said."""

from __future__ import annotations

import collections
import itertools
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ds_trainer.training.loop.loss_measurement import LossMeasurement
from ds_trainer.training.loop.loss_rule import ItemCounter
from ds_trainer.utils import plain_attributes


class Meter:
    def __init__(self) -> None:
        self.total, self.seen = 0.0, [1, 2]


def numbers() -> Iterator[int]:
    yield from range(10_000)


def loader() -> Iterator[Any]:
    return iter(torch.utils.data.DataLoader(torch.arange(2_000), batch_size=2))


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def add(values: Any) -> None:
    values += 1


class Momentum(nn.Module):
    """A teacher and a center as buffers, a queue as a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(4))
        self.norm, self.passes = nn.BatchNorm1d(4), Meter()
        self.queue, self.filled = torch.zeros(200, 100), 0
        self.noise = torch.Generator().manual_seed(1)
        self.layer = nn.Linear(4, 4)
        self.layer.register_forward_hook(self.count)

    def count(self, *given: Any) -> None:
        self.passes.total += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.layer(self.norm(x))
        self.center.mul_(0.9).add_(found.mean(0), alpha=0.1)
        self.queue[self.filled : self.filled + len(x), :4] = found
        self.filled += len(x)
        return found + torch.rand(1, generator=self.noise)


def state_of_model(model: Momentum) -> tuple[Any, ...]:
    buffers = {name: value.clone() for name, value in model.state_dict().items()}
    return buffers, model.passes.total, model.queue.sum(), model.filled, model.noise.get_state()


# What a loss keeps: how it is made, what the loss does with it, and what shows its state.
KEPT: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "generator of torch": (torch.Generator, lambda it: torch.rand(1, generator=it), lambda it: it.get_state()),
    "generator of NumPy": (np.random.default_rng, lambda it: it.random(), lambda it: str(it.bit_generator.state)),
    "older generator of NumPy": (lambda: np.random.RandomState(1), lambda it: it.rand(), lambda it: it.get_state()[2]),
    "generator of Python": (lambda: random.Random(1), lambda it: it.random(), lambda it: it.getstate()),
    "counter of itertools": (itertools.count, next, repr),
    "generator function": (numbers, next, None),
    "iterator of a list": (lambda: iter(list(range(999))), next, None),
    "iterator of a loader": (loader, next, None),
    "large array": (lambda: np.zeros(500_000), add, lambda it: it.sum()),
    "large tensor": (lambda: torch.zeros(500_000), add, lambda it: it.sum()),
    "queue": (lambda: collections.deque([0], maxlen=3), lambda it: it.append(9), list),
    "meter": (Meter, lambda it: vars(it).update(total=it.total + 1, seen=[]), lambda it: (it.total, it.seen)),
}  # fmt: skip


class Script:
    """Stands for a Trainer of a script, whose ``compute_loss`` uses ``kept``."""

    def __init__(self, name: str) -> None:
        make, self.use, _ = KEPT[name]
        self.kept = make()

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.use(self.kept)
        return model(batch["x"]).square().mean()


def measure(script: Script, model: nn.Module) -> None:
    batch = {"x": torch.randn(4, 4, generator=torch.Generator().manual_seed(3))}
    items = ItemCounter(["labels"], False)
    LossMeasurement(
        lambda part: script.loss(model, part), model, batch, items, owners=(script,), training=True
    ).weighting()


@pytest.mark.parametrize("name", KEPT)
def test_what_a_loss_keeps_is_as_before(name: str) -> None:
    script, fresh, show = Script(name), Script(name), KEPT[name][2]
    before = None if show is None else show(script.kept)
    model = Momentum()
    world = torch.get_rng_state(), np.random.get_state()[2], random.getstate()
    wanted = state_of_model(model)
    measure(script, model)
    if show is None:
        assert same(next(script.kept), next(fresh.kept))
    else:
        after = next(script.kept) if name.startswith("counter") else show(script.kept)
        assert same(after, 0 if name.startswith("counter") else before)
    now = torch.get_rng_state(), np.random.get_state()[2], random.getstate()
    assert torch.equal(world[0], now[0]) and world[1:] == now[1:]
    for one, other in zip(wanted, state_of_model(model), strict=True):
        if isinstance(one, dict):
            assert all(torch.equal(value, other[key]) for key, value in one.items())
        else:
            assert same(one, other)


def echoes() -> Iterator[Any]:
    given = None
    while True:
        given = yield given


@pytest.mark.parametrize("reads", [0, 1, 2])
def test_an_iterator_is_the_own_object_again(reads: int) -> None:
    """A generator is more than what it gives: a script sends to it and closes it."""
    script = Script("generator function")
    generator = script.kept = echoes()
    script.use = lambda it: [next(it) for _ in range(reads)]
    measure(script, nn.Linear(4, 4))
    measure(script, nn.Linear(4, 4))
    for _ in range(10 * reads):  # what was read comes once more
        assert next(script.kept) is None
    assert script.kept is generator or not reads
    assert reads == 0 or script.kept.send(3) == 3
    script.kept.close()
    assert list(generator) == []


def test_what_is_too_large_to_be_put_back_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plain_attributes, "_ROOM", 400_000)
    logging.getLogger("ds_trainer").propagate = True
    with caplog.at_level(logging.WARNING, "ds_trainer"):
        measure(Script("large tensor"), nn.Linear(4, 4))
    assert "has changed tensors of 500,000 entries" in caplog.text
