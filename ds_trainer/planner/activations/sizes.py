"""The dimensions of a layer, as formulas of activations need them, whole or on one rank."""

from __future__ import annotations

from ds_trainer.planner.transformer_shape import Stack


def sizes_of(stack: Stack, vocabulary: int, length: int, *, tp: int = 1, cp: int = 1, sp: int = 1) -> dict[str, float]:
    """A number for each name of :data:`~ds_trainer.planner.activations.formula.DIMENSIONS`.

    Tensor parallelism divides heads and inner width, and leaves the residual stream whole (DeepSpeed's AutoTP). A
    sequence that is sharded has as many positions per rank, and its attention scores, if there are any, are those of
    ``length / cp`` positions (a block of the ring) with all heads of the rank divided by ``sp``.

    Args:
        stack: dimensions of the model's layers.
        vocabulary: rows of the LM head.
        length: positions of a sequence.
        tp: ranks that share a layer.
        cp: ranks that share a sequence by ring attention.
        sp: ranks that share a sequence by exchanging heads.
    """
    return {
        "hidden": stack.hidden_size,
        "inner": stack.intermediate_size / tp,
        "queries": stack.query_width / tp,
        "keys": stack.kv_heads * stack.head_dim / tp,
        "heads": stack.heads / tp,
        "key_heads": stack.kv_heads / tp,
        "vocabulary": vocabulary / tp,
        "length": length / cp,
        "experts": stack.experts,
        "active": stack.experts_per_token,
        "one": 1,
    }
