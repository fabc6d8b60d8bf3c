"""Model FLOPs: the floating-point operations that training needs, counted from the architecture. Pure arithmetic.

A multiply and an add are two operations. Only matrix products are counted; norms, activations, softmax, biases,
embedding look-ups, the loss and the optimizer are not. For one token, with ``S`` positions in its sequence::

    forward          2 x weights that the token is multiplied with  +  4 x S x (heads x head_dim) a layer
    backward         twice the forward pass: gradient of the activations, gradient of the weights
    together         6 x weights  +  12 x layers x heads x head_dim x S

which is appendix B of PaLM (Chowdhery et al. 2022) and the formula of Megatron (Narayanan et al. 2021), with grouped
heads, gates, experts and the head counted as they are. Conventions:

- *Causal attention is counted as if every position saw all ``S``*, as both papers do, so that figures compare with
  theirs; ``halve_causal`` counts half of it instead. In a layer with a sliding window a position sees
  ``min(S, window)``.
- *What is recomputed* by activation checkpointing is not counted: these are the model's operations, not the hardware's.
- *A frozen weight* needs no gradient of its own: 4 operations instead of 6.
- *Experts*: those that a token passes through.
- Padding is counted: the hardware works on it too.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_trainer.planner.model_shape import ModelShape
from ds_trainer.planner.transformer_shape import Stack, Transformer

# A configuration that says one thing while the model is another (a changed class, added towers) shows in the number of
# weights: a gate more is a third of it. Biases, norms, small heads and adapters are within this share.
_AGREES_WITHIN = 0.1


@dataclass(frozen=True)
class Weights:
    """Parameters of a real model outside its embedding layers."""

    total: int
    trainable: int

    @property
    def trainable_share(self) -> float:
        """Part of the parameters that is trained."""
        return self.trainable / self.total if self.total else 1.0


@dataclass(frozen=True)
class FlopRule:
    """How the model FLOPs of a batch are counted.

    Args:
        weights: parameters of the model; None where only its shape is known (all of them are trained then).
        transformer: its layers; None counts ``6 x trainable + 4 x frozen`` parameters for each token instead, without
            an attention term.
        source: how it is counted, for the header.
    """

    weights: Weights | None
    transformer: Transformer | None
    source: str

    @classmethod
    def of(cls, shape: ModelShape, weights: Weights | None = None) -> FlopRule | None:
        """The rule for a model; None for one that nothing is known of.

        A shape that does not explain the number of parameters is not trusted; 10 % are allowed for biases, norms, small
        heads and adapters.
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
        """Forward and backward pass of a micro-batch.

        Args:
            samples: rows of the batch.
            length: positions of a row, padding included; of the encoder's where there are two stacks.
            target_length: positions of a row of the decoder, in a model with two stacks.
            halve_causal: count causal attention as the half of it that is not masked.
        """
        share = 1.0 if self.weights is None else self.weights.trainable_share
        if self.transformer is None:
            assert self.weights is not None  # of() makes no rule without either
            frozen = self.weights.total - self.weights.trainable
            return float(samples * length * (6 * self.weights.trainable + 4 * frozen))
        products, attention = _forward(self.transformer, length, target_length, halve_causal)
        # Products of two activations have two gradients however many weights are frozen.
        return samples * (products * (2.0 + share) + attention * 3.0)

    def flops_per_token(self, length: int) -> float:
        """:meth:`flops` for one token of a sequence of ``length`` positions (each stack, where there are two).

        A length of 1 leaves no attention to speak of.
        """
        return self.flops(1, length, length) / length


def _forward(model: Transformer, length: int, target_length: int, halve_causal: bool) -> tuple[float, float]:
    """FLOPs of one sample's forward pass: products with weights, and products of queries, keys and values."""
    lengths = (length, target_length) if len(model.stacks) > 1 else (length,)
    products = attention = 0.0
    for stack, here in zip(model.stacks, lengths, strict=True):
        active = stack.layers * stack.attention_weights + stack.mlp_weights(stack.experts_per_token)
        products += 2.0 * here * active
        attention += _attention(stack, here, halve_causal)
        if stack.cross_attention:
            queries = 2.0 * stack.hidden_size * stack.query_width * here
            keys = 2.0 * stack.hidden_size * stack.kv_heads * stack.head_dim * length
            products += 2.0 * stack.layers * (queries + keys)
            attention += 4.0 * stack.layers * stack.query_width * here * length
    products += 2.0 * lengths[-1] * model.head_weights
    return products, attention


def _attention(stack: Stack, length: int, halve_causal: bool) -> float:
    """Queries times keys and weights times values, of one sample in all layers."""

    def seen(positions: int) -> float:
        """Positions that one sees on average, of the ``positions`` that it could."""
        masked = positions**2 / (2 * length) if halve_causal and stack.causal else 0.0
        return positions - masked

    everywhere = (stack.layers - stack.windowed_layers) * seen(length)
    nearby = stack.windowed_layers * seen(min(length, stack.window or length))
    return 4.0 * stack.query_width * length * (everywhere + nearby)
