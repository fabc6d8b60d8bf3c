"""The dimensions of a transformer's layers: stacks of equal layers, and what is around them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Stack:
    """A stack of equal transformer layers. Widths are in elements.

    Args:
        layers: number of layers.
        hidden_size: width of the residual stream.
        heads: query heads.
        kv_heads: key and value heads (fewer than ``heads`` in grouped-query attention).
        head_dim: width of one head.
        intermediate_size: inner width of the MLP (of one expert, if there are experts).
        mlp_matrices: weight matrices of the MLP: 3 with a gate, 2 without.
        causal: whether a position attends only to itself and earlier positions.
        window: size of the sliding attention window.
        windowed_layers: number of layers with the window.
        cross_attention: whether each layer also attends to the output of another stack.
        experts: experts per expert layer; 1 without experts.
        experts_per_token: experts that process a token.
        expert_layers: number of layers with experts; the others have one MLP of ``dense_intermediate_size``.
        dense_intermediate_size: inner width of the MLP of the layers without experts.
        shared_intermediate_size: inner width of the shared expert, which processes every token; 0 without one.
        family: key of its formulas of activations; empty for that of the model.
        positions: positions of a sample, if they do not follow from the length of a sequence: patches of an image.
        projection_weights: weights of the attention's projections of a layer, where they are not four matrices between
            the residual stream and the heads (latent attention, relative positions, state spaces).
        outside_weights: weights of matrix products outside of layers that each position passes, on average: patch
            embedding, projector.
    """

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    mlp_matrices: int
    causal: bool
    window: int | None = None
    windowed_layers: int = 0
    cross_attention: bool = False
    experts: int = 1
    experts_per_token: int = 1
    expert_layers: int = 0
    dense_intermediate_size: int = 0
    shared_intermediate_size: int = 0
    family: str = ""
    positions: int | None = None
    projection_weights: int | None = None
    outside_weights: float = 0.0

    @property
    def query_width(self) -> int:
        """Total width of all query heads."""
        return self.heads * self.head_dim

    @property
    def attention_weights(self) -> int:
        """Weights of the query, key, value and output projections of one layer, without cross attention."""
        if self.projection_weights is not None:
            return self.projection_weights
        return self.hidden_size * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def routed_weights(self) -> int:
        """Weights of the experts of all layers that process a token, without shared ones."""
        return (
            self.expert_layers * self.experts_per_token * self.mlp_matrices * self.hidden_size * self.intermediate_size
        )

    def mlp_weights(self, experts: int) -> int:
        """Weights of the MLPs of all layers, counting ``experts`` experts per expert layer."""
        one = self.mlp_matrices * self.hidden_size
        if not self.expert_layers:
            return self.layers * one * self.intermediate_size
        shared = one * self.shared_intermediate_size + (self.hidden_size if self.shared_intermediate_size else 0)
        router = self.hidden_size * self.experts
        layer = experts * one * self.intermediate_size + shared + router
        return self.expert_layers * layer + (self.layers - self.expert_layers) * one * self.dense_intermediate_size


@dataclass(frozen=True)
class Transformer:
    """A whole model: one stack, an encoder and a decoder, or towers and a decoder.

    Args:
        kind: ``decoder``, ``encoder``, ``encoder-decoder``, ``vision-language``, or ``other`` for several stacks that
            are none of these.
        stacks: one, or encoder then decoder, or towers then the decoder; the LM head follows the last one.
        vocabulary: rows of the LM head, applied at every position; 0 without an LM head.
        head_transform: whether a square matrix precedes the head (BERT).
    """

    kind: str
    stacks: tuple[Stack, ...]
    vocabulary: int
    head_transform: bool = False

    @property
    def head_weights(self) -> int:
        """Weights of the head after the last stack."""
        hidden = self.stacks[-1].hidden_size
        return hidden * self.vocabulary + (hidden * hidden if self.head_transform else 0)

    @property
    def largest_matrix(self) -> int:
        """Elements that the largest parameter may have: embedding, gate and up projection together, of all experts."""
        mlps = (2 * stack.hidden_size * stack.intermediate_size * stack.experts for stack in self.stacks)
        return max(self.stacks[-1].hidden_size * self.vocabulary, *mlps)

    @property
    def weights(self) -> int:
        """All weights of matrix products, including all experts and excluding embeddings."""
        total = self.head_weights
        for stack in self.stacks:
            attentions = 2 if stack.cross_attention else 1
            total += int(stack.outside_weights)
            total += stack.layers * stack.attention_weights * attentions + stack.mlp_weights(stack.experts)
        return total

    @property
    def weights_without_vocabulary(self) -> int:
        """:attr:`weights` without those of the vocabulary, for models whose head is the embedding matrix."""
        return self.weights - self.stacks[-1].hidden_size * self.vocabulary


def window_of(config: Mapping[str, Any], layers: int) -> dict[str, int]:
    """``window`` and ``windowed_layers`` of a stack of ``layers`` layers; empty without a window."""
    window = config.get("sliding_window") or config.get("window_size")
    if not isinstance(window, int) or not _is_count(window) or config.get("use_sliding_window") is False:
        return {}
    kinds = config.get("layer_types") or config.get("attention_layers")
    windowed = layers
    if kinds is not None:
        windowed = sum(kind in ("sliding_attention", "local") for kind in kinds)
    return {"window": window, "windowed_layers": windowed} if windowed else {}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def first_count(config: Mapping[str, Any], names: Iterable[str]) -> int | None:
    """The first of ``names`` that is a positive number."""
    return next((int(config[name]) for name in names if _is_count(config.get(name))), None)
