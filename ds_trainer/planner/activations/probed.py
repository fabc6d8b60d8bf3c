"""``Probe``: what one and two layers of a model took on a device, beside what the formulas say."""

from __future__ import annotations

from dataclasses import dataclass

from ds_trainer.planner.activations.formula import BytesPerToken

_LEAST, _MOST = 0.2, 5.0  # a ratio beyond is a defect, not a correction
_NOISE = 0.01  # a smaller change per token between the two lengths is none


@dataclass(frozen=True)
class Probe:
    """Measured activations.

    Attributes:
        device: where they were measured.
        attention: ``sdpa`` or ``eager``.
        number_format: ``bf16`` or ``fp32``.
        lengths: tokens of a sequence in the runs.
        layer: bytes per token that a layer keeps, for each of ``lengths``.
        loss: measured / predicted bytes of logits, loss and their gradients; 1 for a model without an LM head.
        context: bytes of the device that no tensor uses; None on the CPU.
        fragmentation: share that the allocator reserves beyond the tensors; None on the CPU.
        seconds: how long it took.
    """

    device: str
    attention: str
    number_format: str
    lengths: tuple[int, int]
    layer: tuple[float, float]
    loss: float = 1.0
    context: float | None = None
    fragmentation: float | None = None
    seconds: float = 0.0

    def layer_at(self, length: float) -> float:
        """Bytes per token that a layer keeps, on the line through the two runs.

        Args:
            length: tokens of a sequence.
        """
        (first, second), (low, high) = self.lengths, self.layer
        if abs(high - low) <= _NOISE * high:
            return high
        return low + (high - low) * (length - first) / (second - first)

    def corrected(self, size: BytesPerToken, layer: float, length: float) -> BytesPerToken:
        """``found`` in proportion to what was measured; so is what exists during a layer's passes.

        Args:
            size: what the formulas say for a rank.
            layer: bytes per token that a whole layer keeps, of the formulas.
            length: tokens of a sequence.
        """
        factor = self.layer_at(length) / layer
        layer, forward, backward = (factor * value for value in size[:3])
        return BytesPerToken(layer, forward, backward, size.loss * self.loss)

    def is_credible(self, predicted: float) -> bool:
        """Whether the measured bytes of a layer are like the ``predicted`` ones."""
        return _LEAST <= self.layer[1] / predicted <= _MOST and _LEAST <= self.loss <= _MOST
