"""Bytes per token of a layer whose MLP and norms run on a tile of tokens at a time.

A tiled module keeps its input; what it makes exists for a tile, as many tokens as the model is wide, in its forward and
again in its backward pass. A norm that is composed in Python (Llama's) keeps its input and output instead of two more
tensors of 4 bytes; one that is a single kernel keeps nothing else anyway.

Source: ``ds_trainer.engine.tiling``; allocations of a layer of 8B were counted with fake tensors
(``tests/planner/memory/test_tiled.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ds_trainer.planner.activations.formula import Activations, BytesPerToken
from ds_trainer.planner.planned_model import PlannedModel

_NORM_KEEPS = 4  # bytes of an element beyond input and output, for each of two norms
_SUMS = 9  # bytes of an element of the MLP's matrices: sums of gradients in float32, a tile's, most final ones


@dataclass(frozen=True)
class TiledLayer:
    """Bytes per token.

    Attributes:
        found: what the layer keeps, and what exists in its passes and in the loss.
        sizes: the dimensions, the inner one for a tile.
        norms: whether the norms are tiled too.
    """

    found: BytesPerToken
    sizes: Mapping[str, float]
    norms: bool


def tiled_layer(
    model: PlannedModel, sizes: Mapping[str, float], kind: tuple[str, str], width: int, tokens: float
) -> TiledLayer:
    """A layer with a tiled MLP, and tiled norms if they are composed in Python.

    Args:
        model: the model.
        sizes: dimensions of a layer of a rank.
        kind: attention and number format.
        width: bytes of a weight.
        tokens: of a rank in a micro-batch.
    """
    formulas, _ = model.activations(*kind)
    share = min(1.0, sizes["hidden"] / tokens)
    whole = model.bytes_per_token(sizes, *kind).layer
    kept = model.bytes_per_token({**sizes, "inner": 0}, *kind).layer
    small = {**sizes, "inner": share * sizes["inner"]}
    found, tile = model.bytes_per_token(small, *kind), share * (whole - kept)
    norms = _are_composed(formulas, width) and share < 1
    if not norms:
        return TiledLayer(found._replace(layer=kept, backward=found.backward + tile), small, False)
    hidden, queries, keys = sizes["hidden"], sizes["queries"], sizes["keys"]
    kept -= 2 * _NORM_KEEPS * hidden
    attention = width * (hidden + queries + 2 * keys)  # gradients of the residual, of queries, keys and values
    matrices = model.stack.mlp_matrices * hidden * sizes["inner"]
    mlp = 2 * width * hidden + tile + _SUMS * matrices / tokens
    loss = formulas.bytes_per_token({**small, "hidden": 0.0}).loss + 2 * width * hidden
    return TiledLayer(BytesPerToken(kept, kept + width * hidden, max(attention, mlp), loss), small, True)


def _are_composed(formulas: Activations, width: int) -> bool:
    """Whether two norms of a layer keep more than a single kernel would: input, output and two numbers a token."""
    return formulas.layer.terms.get("hidden", 0) >= 2 * (_NORM_KEEPS + 2 * width)
