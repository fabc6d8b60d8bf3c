"""The parity matrix: which layouts, stages, optimizers, models and data are tried together."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import NamedTuple

from ds_trainer.parallel.layout import ParallelLayout

WORLDS = (1, 2, 4, 8)
CLIP = 0.35  # below every gradient norm of these runs, so that clipping always acts
KEY_VALUE_HEADS = {"grouped_query": 4, "tied": 8, "multi_head": 8, "plain": 8}


class Case(NamedTuple):
    """One training run of the matrix."""

    layout: ParallelLayout
    stage: int
    optimizer: str
    clip: float
    accumulation: int
    data: str
    model: str

    @property
    def name(self) -> str:
        """For pytest: ``dp2-cp1-sp2-tp2_zero3_adamw_...``."""
        axes = "-".join(f"{axis}{size}" for axis, size in self.layout.sizes._asdict().items())
        clipped = "clipped" if self.clip else "unclipped"
        return (
            f"{axes}_zero{self.stage}_{self.optimizer}_{clipped}_accumulate{self.accumulation}_{self.data}_{self.model}"
        )

    def pairs(self) -> set[tuple[tuple[str, object], tuple[str, object]]]:
        """Every two values that meet in this case."""
        values = [*self.layout.sizes._asdict().items(), *list(self._asdict().items())[1:]]
        return set(itertools.combinations(values, 2))


def layouts(world: int) -> list[ParallelLayout]:
    """Every factorisation of ``world`` into dp x cp x sp x tp."""
    sizes = [size for size in range(1, world + 1) if world % size == 0]
    triples = itertools.product(sizes, repeat=3)
    return [ParallelLayout(world, tp, cp, sp) for tp, cp, sp in triples if world % (tp * cp * sp) == 0]


def possible(case: Case) -> bool:
    """Whether ``case`` is a layout that the model has heads for; the others are refused, which has tests of its own."""
    return case.layout.tp <= KEY_VALUE_HEADS[case.model]


def all_cases() -> Iterator[Case]:
    """The full product."""
    rest = ((0, 1, 2, 3), ("adamw", "sgd"), (0.0, CLIP), (1, 2), ("padded", "packed"), tuple(KEY_VALUE_HEADS))
    for world in WORLDS:
        for layout in layouts(world):
            yield from filter(possible, (Case(layout, *values) for values in itertools.product(*rest)))


def pairwise_cases() -> list[Case]:
    """Every layout at least once, and every two values that can meet at least once (axis sizes count one by one).

    Chosen greedily; small worlds cover what the first pass over all layouts leaves.
    """
    choice = random.Random(0)
    everything = list(all_cases())
    missing = set().union(*(case.pairs() for case in everything))
    by_layout: dict[ParallelLayout, list[Case]] = {}
    for case in everything:
        by_layout.setdefault(case.layout, []).append(case)
    chosen = []
    for cases in by_layout.values():
        best = max(choice.sample(cases, min(len(cases), 80)), key=lambda case: len(case.pairs() & missing))
        missing -= best.pairs()
        chosen.append(best)
    while missing:
        candidates = choice.sample(everything, 300)
        best = max(candidates, key=lambda case: len(case.pairs() & missing) / case.layout.world_size)
        missing -= best.pairs()
        if best not in chosen:
            chosen.append(best)
    return sorted(chosen, key=lambda case: case.layout.world_size)
