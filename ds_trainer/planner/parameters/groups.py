"""``ParameterGroup``: tensors of a model that are equal in shape, one per layer. A model is a list of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

KINDS = ("embedding", "attention", "mlp", "experts", "norm", "head", "other", "adapter")
"""What a parameter belongs to. Biases belong to the kind of their layer, routers and shared experts to the experts,
LoRA matrices and other modules of PEFT to the adapters."""


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters of the same shape and role.

    Args:
        name: name without the index of the layer, such as ``self_attn.q_proj.weight``.
        shape: shape of one of them, in elements.
        kind: one of :data:`KINDS`.
        copies: how many there are: the number of layers for those of a layer, otherwise 1.
        split: the dimension that tensor parallelism partitions; None if every rank has all of it.
        stack: index of the stack of layers that they belong to; None outside of layers.
        unit: elements that ``split`` keeps together, such as the width of a head.
        trained: whether they have gradients.
        element_bytes: bytes of an element of quantized weights, with their scales; None for weights in the precision
            of the run.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    copies: int = 1
    split: int | None = None
    stack: int | None = None
    unit: int = 1
    trained: bool = True
    element_bytes: float | None = None

    @property
    def numel(self) -> int:
        """Elements of one parameter."""
        return math.prod(self.shape)

    @property
    def is_stacked_experts(self) -> bool:
        """Whether each holds the weights of all experts of a layer: what ``expert_parallel_size`` divides."""
        return self.kind == "experts" and len(self.shape) == 3

    @property
    def total(self) -> int:
        """Elements of all of them."""
        return self.copies * self.numel


def total(groups: Iterable[ParameterGroup]) -> int:
    """Elements of all groups together."""
    return sum(group.total for group in groups)


def total_by_kind(groups: Iterable[ParameterGroup]) -> dict[str, int]:
    """Elements of each kind that occurs, in the order of :data:`KINDS`."""
    totals: Counter[str] = Counter()
    for group in groups:
        totals[group.kind] += group.total
    return {kind: totals[kind] for kind in KINDS if totals[kind]}
