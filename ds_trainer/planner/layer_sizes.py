"""The dimensions of a layer on one rank, as formulas of activations need them."""

from __future__ import annotations

import math

from ds_trainer.planner.transformer_shape import Stack


def layer_sizes(stack: Stack, rows: int, length: int, *, tp: int = 1, cp: int = 1) -> dict[str, float]:
    """A number for each name of :data:`~ds_trainer.planner.activations.formula.DIMENSIONS`.

    Tensor parallelism divides heads and inner width; the residual stream is whole, and so are the logits, which are
    gathered for the loss. The numbers are those of a rank that has most. Attention scores, if there are any, are those
    of a block of the ring. A decoder's source is as long as its target.

    Args:
        stack: dimensions of the model's layers.
        rows: rows of the LM head.
        length: tokens of a sequence.
        tp: ranks that share a layer.
        cp: ranks that share a sequence by ring attention.
    """
    keys = math.ceil(stack.kv_heads / tp)
    queries = keys * (stack.heads // stack.kv_heads)
    return {
        "hidden": stack.hidden_size,
        "inner": math.ceil(stack.intermediate_size / tp),
        "queries": queries * stack.head_dim,
        "keys": keys * stack.head_dim,
        "heads": queries,
        "key_heads": keys,
        "vocabulary": rows,
        "length": length / cp,
        "source": 1.0,
        "experts": stack.experts,
        "active": stack.experts_per_token,
        "one": 1,
    }
