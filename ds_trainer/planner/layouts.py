"""Which layouts a model fits into: heads and lengths against ranks. Pure arithmetic: no process group, no weights.

Tensor parallelism (DeepSpeed's AutoTP) hands out whole key heads with the query heads that use them, as evenly as they
can be dealt; ranks beyond the last key head get none, which is exact and only wasteful. Sequence parallelism (Ulysses)
deals the query heads of one tensor-parallel rank out to its ranks and needs equal shares. Both kinds of cut give every
rank two pieces of a sequence (:mod:`ds_trainer.parallel.sequence_plan`), which must be long enough to hold a token.
"""

from __future__ import annotations

from ds_trainer.parallel.layout import ParallelLayout, Sizes, describe_sizes, nearest_sizes
from ds_trainer.planner.model_shape import ModelShape
from ds_trainer.planner.transformer_shape import Stack


def head_shares(stack: Stack, tp: int) -> list[int]:
    """Query heads of each tensor-parallel rank: those of whole key heads, of which the first ranks may get one more."""
    each, more = divmod(stack.kv_heads, tp)
    per_key = stack.heads // stack.kv_heads
    return [(each + (rank < more)) * per_key for rank in range(tp)]


def misfits(shape: ModelShape, layout: ParallelLayout) -> list[str]:
    """Why a model of ``shape`` cannot run in ``layout``, a clause for each reason; none where nothing is known.

    Args:
        shape: what is known of the model.
        layout: where every rank would stand.
    """
    found = []
    stacks = () if shape.transformer is None else shape.transformer.stacks
    for stack in stacks:
        shares = head_shares(stack, layout.tp)
        if any(share % layout.sp for share in shares):
            held = f"{stack.heads} query heads"
            if layout.tp > 1:
                held += f" ({stack.kv_heads} key heads) give the tensor-parallel ranks {_listed(shares)}, which"
            found.append(f"{held} cannot be divided among {layout.sp} sequence-parallel ranks")
    cut = layout.cp * layout.sp > 1
    if cut and shape.max_length is not None and shape.max_length < layout.length_multiple:
        found.append(
            f"sequences of at most {shape.max_length} tokens are shorter than the {layout.length_multiple} pieces "
            f"that context {layout.cp} x sequence {layout.sp} cut them into"
        )
    return list(dict.fromkeys(found))


def fitting_sizes(shape: ModelShape, layout: ParallelLayout, count: int = 3) -> list[Sizes]:
    """The sizes nearest to those of ``layout`` that a model of ``shape`` fits into, in the same world."""
    world = layout.world_size
    return nearest_sizes(
        world, layout.tp, layout.cp, layout.sp, lambda sizes: not misfits(shape, ParallelLayout(world, *sizes)), count
    )


def layout_problems(shape: ModelShape, layout: ParallelLayout, said: str = "") -> list[str]:
    """A sentence for each reason why ``shape`` cannot run in ``layout``, with the nearest layouts that work.

    Args:
        shape: what is known of the model.
        layout: where every rank would stand.
        said: the sizes as they were asked for, with their origins; default: the layout's own words.
    """
    reasons = misfits(shape, layout)
    if not reasons:
        return []
    near = " or ".join(describe_sizes(*sizes) for sizes in fitting_sizes(shape, layout))
    remedy = f"Nearest sizes that this model fits into on {layout.world_size} ranks: {near}."
    return [f"{said or layout.describe()}: {reason}. {remedy}" for reason in reasons]


def _listed(shares: list[int]) -> str:
    different = list(dict.fromkeys(shares))
    return " and ".join(str(share) for share in different)
