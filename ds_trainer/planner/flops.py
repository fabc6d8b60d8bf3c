"""Model FLOPs: the floating-point operations of training, counted from the architecture. Pure arithmetic.

A multiplication and an addition are two operations. Only matrix products are counted; norms, activations, softmax,
biases, embedding lookups, the loss and the optimizer are not. For one token, with ``S`` positions in its sequence::

    forward          2 x weights that multiply the token  +  4 x S x (heads x head_dim) per layer
    backward         twice the forward pass: gradient of the activations, gradient of the weights
    together         6 x weights  +  12 x layers x heads x head_dim x S

This is appendix B of PaLM (Chowdhery et al. 2022) and the formula of Megatron (Narayanan et al. 2021), with the actual
grouped heads, gates, experts and LM head. Conventions:

- *Causal attention is counted as if every position attended to all ``S``*, as in both papers, so that figures are
  comparable; ``halve_causal`` counts half of it instead. In a layer with a sliding window a position attends to
  ``min(S, window)`` positions.
- *Recomputation* by activation checkpointing is not counted: these are model FLOPs, not hardware FLOPs.
- *A frozen weight* needs no weight gradient: 4 operations instead of 6.
- *Experts*: only those that process a token.
- Padding is counted: the hardware processes it too.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_trainer.planner.model_shape import ModelShape
from ds_trainer.planner.transformer_shape import Stack, Transformer

# If a model differs from its configuration (a changed class, added towers), its number of weights differs too: one more
# gate adds a third. Biases, norms, small heads and adapters stay within this fraction.
_AGREES_WITHIN = 0.1


@dataclass(frozen=True)
class Weights:
    """Parameters of a real model outside its embedding layers."""

    total: int
    trainable: int

    @property
    def trainable_fraction(self) -> float:
        """Trainable fraction of the parameters."""
        return self.trainable / self.total if self.total else 1.0


@dataclass(frozen=True)
class FlopRule:
    """Counts the model FLOPs of a batch.

    Args:
        weights: parameters of the model; None if only its shape is known (then all of them are trained).
        transformer: its layers; None counts ``6 x trainable + 4 x frozen`` parameters per token instead, without an
            attention term.
        source: description of the method, for the header.
    """

    weights: Weights | None
    transformer: Transformer | None
    source: str

    @classmethod
    def of(cls, shape: ModelShape, weights: Weights | None = None) -> FlopRule | None:
        """The rule for a model; None for an unknown model.

        The shape is used only if it explains the number of parameters, within 10 % for biases, norms, small heads and
        adapters.
        """
        transformer = shape.transformer
        if transformer is not None:
            if weights is None:
                return cls(None, transformer, "counted from the architecture")
            expected = (transformer.weights, transformer.weights_without_vocabulary)
            if any(abs(weights.total - number) <= _AGREES_WITHIN * number for number in expected):
                return cls(weights, transformer, "counted from the architecture")
        if weights is None or not weights.total:
            return None
        return cls(weights, None, "6 x parameters outside the embeddings, without attention")

    def flops(self, samples: int, length: int, target_length: int = 0, *, halve_causal: bool = False) -> float:
        """FLOPs of the forward and backward pass of a micro-batch.

        Args:
            samples: rows of the batch.
            length: positions per row, including padding; for two stacks those of the encoder.
            target_length: positions per row of the decoder, for two stacks.
            halve_causal: count only the half of causal attention that is not masked.
        """
        trained = 1.0 if self.weights is None else self.weights.trainable_fraction
        if self.transformer is None:
            assert self.weights is not None  # of() needs one of the two
            frozen = self.weights.total - self.weights.trainable
            return float(samples * length * (6 * self.weights.trainable + 4 * frozen))
        products, attention = forward_flops(self.transformer, length, target_length, halve_causal)
        # Products of two activations always have two gradients, also if weights are frozen.
        return samples * (products * (2.0 + trained) + attention * 3.0)

    def flops_per_token(self, length: int) -> float:
        """:meth:`flops` per token of a sequence of ``length`` positions (in each of two stacks).

        With a length of 1 the attention term is negligible.
        """
        return self.flops(1, length, length) / length


def forward_flops(model: Transformer, length: int, target_length: int, halve_causal: bool) -> tuple[float, float]:
    """FLOPs of the forward pass of one sample: products with weights; products of queries, keys and values.

    A stack with its own positions has those of one image.
    """
    decoder = target_length if model.kind == "encoder-decoder" else length
    lengths = [stack.positions or length for stack in model.stacks[:-1]] + [model.stacks[-1].positions or decoder]
    products = attention = 0.0
    for stack, here in zip(model.stacks, lengths, strict=True):
        active = stack.layers * stack.attention_weights + stack.mlp_weights(stack.experts_per_token)
        products += 2.0 * here * (active + stack.outside_weights)
        attention += _attention(stack, here, halve_causal)
        if stack.cross_attention:
            queries = 2.0 * stack.hidden_size * stack.query_width * here
            keys = 2.0 * stack.hidden_size * stack.kv_heads * stack.head_dim * length
            products += 2.0 * stack.layers * (queries + keys)
            attention += 4.0 * stack.layers * stack.query_width * here * length
    products += 2.0 * lengths[-1] * model.head_weights
    return products, attention


def _attention(stack: Stack, length: int, halve_causal: bool) -> float:
    """FLOPs of queries times keys and scores times values, for one sample in all layers."""

    def attended(positions: int) -> float:
        """Positions that one position attends to on average, out of ``positions``."""
        masked = positions**2 / (2 * length) if halve_causal and stack.causal else 0.0
        return positions - masked

    everywhere = (stack.layers - stack.windowed_layers) * attended(length)
    nearby = stack.windowed_layers * attended(min(length, stack.window or length))
    return 4.0 * stack.query_width * length * (everywhere + nearby)
