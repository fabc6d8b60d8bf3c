"""``ParallelLayout``: the one object that owns sizes.

The world is a box of four axes, ``world = dp x cp x sp x tp``. Tensor-parallel ranks are neighbors (they talk most),
then sequence (Ulysses), context (ring attention) and data parallelism::

    rank = ((dp_rank * cp + cp_rank) * sp + sp_rank) * tp + tp_rank

A *replica* is the ``cp x sp x tp`` ranks that work on the same samples. ZeRO shards over the *seq_data_parallel
group*: the ``dp x cp x sp`` ranks with the same tensor-parallel coordinate, which hold the same parameters and see
different tokens. Expert parallelism divides that group: ``ep`` neighbors hold different experts, and every ``ep``-th
rank the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import log2
from typing import TYPE_CHECKING, NamedTuple

from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.units import counted

if TYPE_CHECKING:
    from ds_trainer.arguments.training_arguments import TrainingArguments

AXES: tuple[str, ...] = ("dp", "cp", "sp", "tp")  # outermost first


class Coordinates(NamedTuple):
    """Position of one rank along each axis, outermost axis first."""

    dp: int
    cp: int
    sp: int
    tp: int


Strides = tuple[tuple[int, int], ...]
"""A division of the world into groups of equal form: ``(step between ranks, number of ranks)``, outermost first."""


def groups_of(strides: Strides, world_size: int) -> list[list[int]]:
    """Returns all groups of this form, each in rank order, sorted by first rank."""
    offsets = _offsets(strides)
    firsts = (rank for rank in range(world_size) if not any(rank // step % size for step, size in strides))
    return [[first + offset for offset in offsets] for first in firsts]


def _offsets(strides: Strides) -> list[int]:
    """Ranks of a group, relative to its first rank."""
    return [sum(steps) for steps in itertools.product(*(range(0, step * size, step) for step, size in strides))]


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the four parallel axes and everything derived from them.

    Args:
        world_size: number of ranks.
        tp: tensor-parallel ranks, each holding a slice of every layer.
        cp: context-parallel ranks, each holding a slice of the sequence (ring attention).
        sp: sequence-parallel ranks, each holding a slice of the sequence (Ulysses all-to-all).
        ep: expert-parallel ranks, each holding a part of the experts. They are ranks of the seq_data_parallel group.

    ``dp``, the number of replicas that see different samples, is the quotient ``world_size // (tp * cp * sp)``.

    Raises:
        ConfigError: a size is not a positive integer, the world is not divisible by ``tp * cp * sp``, or the rest of it
            by ``ep``.
    """

    world_size: int
    tp: int = 1
    cp: int = 1
    sp: int = 1
    ep: int = 1
    dp: int = field(init=False)

    def __post_init__(self) -> None:
        problems = [
            f"{name}={getattr(self, name)!r} must be a positive integer."
            for name in ("world_size", "tp", "cp", "sp", "ep")
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1
        ]
        if problems:
            raise ConfigError(problems)
        replica = self.tp * self.cp * self.sp
        if self.world_size % replica:
            nearest = nearest_sizes(self.world_size, self.tp, self.cp, self.sp)
            near = " or ".join(describe_sizes(*sizes) for sizes in nearest)
            ranks = counted(self.world_size, "rank")
            raise ConfigError(
                f"{ranks} cannot be divided by tensor {self.tp} x context {self.cp} x sequence "
                f"{self.sp} = {replica}. Choose {near}, or start "
                f"{counted(replica * max(1, round(self.world_size / replica)), 'rank')}."
            )
        object.__setattr__(self, "dp", self.world_size // replica)
        if (tokens := self.seq_data_parallel_size) % self.ep:
            raise ConfigError(
                f"expert_parallel_size={self.ep} must divide the {counted(tokens, 'rank')} that see different tokens "
                f"({self.describe()}). Set it to {' or '.join(map(str, _nearest_divisors(tokens, self.ep)))}."
            )

    @classmethod
    def of(cls, args: TrainingArguments, world_size: int) -> ParallelLayout:
        """The layout of a world of ``world_size`` ranks with the parallel sizes of ``args``."""
        sizes = (args.tensor_parallel_size, args.context_parallel_size, args.sequence_parallel_size)
        return cls(world_size, *sizes, args.expert_parallel_size)

    # -- coordinates ----------------------------------------------------------------------------------------------

    @property
    def sizes(self) -> Coordinates:
        """Size of each axis, outermost first."""
        return Coordinates(self.dp, self.cp, self.sp, self.tp)

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of ``rank``. Raises ValueError for a rank outside the world."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in a world of {counted(self.world_size, 'rank')}")
        rest, tp = divmod(rank, self.tp)
        rest, sp = divmod(rest, self.sp)
        dp, cp = divmod(rest, self.cp)
        return Coordinates(dp, cp, sp, tp)

    def rank_at(self, dp: int = 0, cp: int = 0, sp: int = 0, tp: int = 0) -> int:
        """The rank at these coordinates. Raises ValueError for coordinates outside the layout."""
        coordinates = Coordinates(dp, cp, sp, tp)
        for axis, index, size in zip(AXES, coordinates, self.sizes, strict=True):
            if not 0 <= index < size:
                raise ValueError(f"{axis}={index} is not in 0..{size - 1}")
        return ((dp * self.cp + cp) * self.sp + sp) * self.tp + tp

    # -- groups ---------------------------------------------------------------------------------------------------

    def strides(self, axes: Sequence[str]) -> Strides:
        """The form of the groups along ``axes``: steps between ranks and their number, outermost first.

        Axes of size 1 are dropped and neighboring axes are merged, so two sets of axes have the same strides exactly
        if they have the same groups. ``()``: every rank is alone. ``((1, world_size),)``: all ranks form one group.
        """
        unknown = [axis for axis in axes if axis not in AXES]
        if unknown:
            raise ValueError(f"unknown axes {unknown}; the axes are {list(AXES)}")
        merged: list[tuple[int, int]] = []  # innermost first
        step = 1
        for axis, size in reversed(list(zip(AXES, self.sizes, strict=True))):
            if axis in axes and size > 1:
                adjacent = bool(merged) and merged[-1][0] * merged[-1][1] == step
                inner, count = merged.pop() if adjacent else (step, 1)
                merged.append((inner, count * size))
            step *= size
        return tuple(reversed(merged))

    def groups(self, axes: Sequence[str]) -> list[list[int]]:
        """All groups whose ranks differ along ``axes`` only, each in rank order; together they cover the world.

        ``groups(["tp"])`` returns the tensor-parallel groups, ``groups(["dp", "cp", "sp"])`` the seq_data_parallel
        groups.
        """
        return groups_of(self.strides(axes), self.world_size)

    def group_of(self, rank: int, axes: Sequence[str]) -> list[int]:
        """The group of :meth:`groups` that contains ``rank``."""
        self.coordinates(rank)  # raises for a rank outside the world
        strides = self.strides(axes)
        first = rank - sum(rank // step % size * step for step, size in strides)
        return [first + offset for offset in _offsets(strides)]

    @property
    def expert_strides(self) -> Strides:
        """The form of the groups of ranks that hold different experts, and exchange tokens: neighbors."""
        return ((self.tp, self.ep),) if self.ep > 1 else ()

    @property
    def expert_replica_strides(self) -> Strides:
        """The form of the groups of ranks that hold the same experts."""
        replicas = self.seq_data_parallel_size // self.ep
        return ((self.tp * self.ep, replicas),) if replicas > 1 else ()

    @property
    def seq_data_parallel_size(self) -> int:
        """Number of ranks over which gradients are averaged and ZeRO shards: ``dp * cp * sp``."""
        return self.dp * self.cp * self.sp

    @property
    def replica_size(self) -> int:
        """Number of ranks that work on the same samples: ``cp * sp * tp``."""
        return self.cp * self.sp * self.tp

    @property
    def length_multiple(self) -> int:
        """A sequence can be sharded if its length is a multiple of this: ``2 * cp * sp``."""
        return 2 * self.cp * self.sp

    @property
    def replica_leaders(self) -> list[int]:
        """The first rank of each replica. Quantities that are equal within a replica are counted on this rank."""
        return [self.rank_at(dp=dp) for dp in range(self.dp)]

    def is_replica_leader(self, rank: int) -> bool:
        """Whether ``rank`` is one of :attr:`replica_leaders`."""
        _, *within_replica = self.coordinates(rank)
        return not any(within_replica)

    def describe(self) -> str:
        """``"dp 4 x cp 1 x sp 1 x tp 2 = 8 ranks"``."""
        product = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, self.sizes, strict=True))
        experts = f", experts over {self.ep}" if self.ep > 1 else ""
        return f"{product} = {self.world_size} rank{'s' if self.world_size > 1 else ''}{experts}"


def _nearest_divisors(number: int, wanted: int) -> list[int]:
    """The next smaller and the next larger divisor of ``number``."""
    divisors = [size for size in range(1, number + 1) if number % size == 0]
    below = [size for size in divisors if size < wanted][-1:]
    return below + [size for size in divisors if size > wanted][:1]


Sizes = tuple[int, int, int]
"""Sizes of tensor, context and sequence parallelism; the rest of the world is data parallel."""


def nearest_sizes(
    world_size: int, tp: int, cp: int, sp: int, fits: Callable[[Sizes], bool] = lambda sizes: True, count: int = 3
) -> list[Sizes]:
    """The sizes nearest to the requested ones that divide a world of ``world_size`` ranks, nearest first.

    The distance is the number of doublings, summed over the axes. An axis requested as 1 stays 1 if any other choice
    fits. At equal distance the larger replica comes first, because it holds a larger model.

    Args:
        world_size: number of ranks.
        tp, cp, sp: the requested sizes.
        fits: an additional condition on the sizes.
        count: maximum number of results.
    """
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    requested = (tp, cp, sp)

    def distance(sizes: Sizes) -> tuple[int, float, int]:
        new_axes = sum(size > 1 == wanted for size, wanted in zip(sizes, requested, strict=True))
        doublings = sum(abs(log2(size / wanted)) for size, wanted in zip(sizes, requested, strict=True))
        replica = sizes[0] * sizes[1] * sizes[2]
        return new_axes, round(doublings, 6), -replica

    candidates = [
        (a, b, c)
        for a, b, c in itertools.product(divisors, repeat=3)
        if world_size % (a * b * c) == 0 and (a, b, c) != requested and fits((a, b, c))
    ]
    return sorted(candidates, key=distance)[:count]


def describe_sizes(tp: int, cp: int, sp: int) -> str:
    """``"tensor 2 x sequence 2"``: the axes that have more than one rank."""
    named = (("tensor", tp), ("context", cp), ("sequence", sp))
    return " x ".join(f"{name} {size}" for name, size in named if size > 1) or "data parallelism alone"
