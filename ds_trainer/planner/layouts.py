"""Which layouts a model supports: attention heads and sequence length against ranks. Pure arithmetic.

Tensor parallelism (DeepSpeed's AutoTP) partitions whole key heads with their query heads, as evenly as possible. Ranks
beyond the last key head get none, which is exact but wasteful. Sequence parallelism (Ulysses) divides the query heads
of a tensor-parallel rank among its ranks, in equal numbers. Context and sequence parallelism both give every rank two
chunks of a sequence (:mod:`ds_trainer.parallel.sequence_plan`), each of at least one token.
"""

from __future__ import annotations

from ds_trainer.parallel.layout import ParallelLayout, Sizes, describe_sizes, nearest_sizes
from ds_trainer.planner.model_shape import ModelShape
from ds_trainer.planner.transformer_shape import Stack
from ds_trainer.utils.units import counted


def query_heads_per_rank(stack: Stack, tp: int) -> list[int]:
    """Query heads of each tensor-parallel rank: those of its key heads. The first ranks may have one key head more."""
    per_rank, remainder = divmod(stack.kv_heads, tp)
    queries_per_key = stack.heads // stack.kv_heads
    return [(per_rank + (rank < remainder)) * queries_per_key for rank in range(tp)]


def layout_conflicts(shape: ModelShape, layout: ParallelLayout) -> list[str]:
    """Why a model of ``shape`` cannot run in ``layout``, one clause for each reason. Empty for an unknown shape."""
    conflicts = []
    stacks = () if shape.transformer is None else shape.transformer.stacks
    for stack in stacks:
        heads = query_heads_per_rank(stack, layout.tp)
        if any(number % layout.sp for number in heads):
            clause = f"{stack.heads} query heads"
            if layout.tp > 1:
                clause += f" ({stack.kv_heads} key heads) give the tensor-parallel ranks {_listed(heads)}, which"
            conflicts.append(f"{clause} cannot be divided among {layout.sp} sequence-parallel ranks")
    sharded = layout.cp * layout.sp > 1
    if sharded and shape.max_length is not None and shape.max_length < layout.length_multiple:
        conflicts.append(
            f"sequences of at most {shape.max_length} tokens are too short for the {layout.length_multiple} chunks "
            f"of context {layout.cp} x sequence {layout.sp}"
        )
    return list(dict.fromkeys(conflicts))


def supported_sizes(shape: ModelShape, layout: ParallelLayout, count: int = 3) -> list[Sizes]:
    """The parallel sizes nearest to those of ``layout`` that a model of ``shape`` supports, for the same world size."""
    world = layout.world_size

    def is_supported(sizes: Sizes) -> bool:
        return not layout_conflicts(shape, ParallelLayout(world, *sizes))

    return nearest_sizes(world, layout.tp, layout.cp, layout.sp, is_supported, count)


def layout_problems(shape: ModelShape, layout: ParallelLayout, requested: str = "") -> list[str]:
    """One sentence for each reason why ``shape`` cannot run in ``layout``, with the nearest supported layouts.

    Args:
        shape: the model's shape, as far as it is known.
        layout: the parallel layout.
        requested: the requested sizes with their sources; default: the layout's description.
    """
    reasons = layout_conflicts(shape, layout)
    if not reasons:
        return []
    near = " or ".join(describe_sizes(*sizes) for sizes in supported_sizes(shape, layout))
    remedy = f"Nearest sizes that this model supports on {counted(layout.world_size, 'rank')}: {near}."
    return [f"{requested or layout.describe()}: {reason}. {remedy}" for reason in reasons]


def _listed(numbers: list[int]) -> str:
    return " and ".join(str(number) for number in dict.fromkeys(numbers))
