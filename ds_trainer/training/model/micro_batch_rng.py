"""Random numbers of the model that depend on the place of a rank (dropout, NEFTune noise, sampled tokens).

Ranks of a tensor-parallel group work on the same activations and must draw the same numbers (for partitioned
activations see :mod:`ds_trainer.engine.tensor_parallel.partitioning`). Ranks with different dp, cp or sp
coordinates see different tokens and must draw different numbers. The current generator state guarantees neither: one
rank of a replica reads the data, and may draw numbers while doing so.

So the numbers of a micro-batch depend only on the seed, the step, the micro-batch and the rank's coordinates, and a
resumed run draws the same numbers. With pure data parallelism the generators are not changed unless the argument
``replica_specific_rng`` asks for it: all ranks then go on from the same seed, as in transformers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.parallel.layout import Coordinates, ParallelLayout
from ds_trainer.utils.seeds import random_state, restore_random_state, seed_this_process

_SEEDS = 62  # bits, as many as every generator takes


def micro_batch_seed(seed: int, step: int, micro_batch: int, coordinates: Coordinates) -> int:
    """The seed of a micro-batch on a rank: the same on all ranks of a tensor-parallel group."""
    name = "/".join(map(str, (seed, step, micro_batch, coordinates.dp, coordinates.cp, coordinates.sp)))
    return random.Random(name).getrandbits(_SEEDS)


def seed_of_micro_batches(args: TrainingArguments, layout: ParallelLayout) -> int | None:
    """The seed of the run; None if the generators of this process are to go on from micro-batch to micro-batch."""
    return args.seed if layout.replica_size > 1 or args.replica_specific_rng else None


@contextmanager
def micro_batch_rng(seed: int | None, coordinates: Coordinates, step: int, micro_batch: int) -> Iterator[None]:
    """Inside, all generators of this process are seeded for one micro-batch; afterwards their states are restored.

    Args:
        seed: :func:`seed_of_micro_batches`; None: nothing happens.
        coordinates: this rank's coordinates.
        step: number of finished optimizer steps.
        micro_batch: index within the step.
    """
    if seed is None:
        yield
        return
    outside = random_state()
    seed_this_process(micro_batch_seed(seed, step, micro_batch, coordinates))
    try:
        yield
    finally:
        restore_random_state(outside)
