"""Which trainable tensors got a gradient in the first steps, and whether the loss depends on those that got none.

A hook on a tensor sees its gradient before any reduction, so the same hooks serve every ZeRO stage, offload and
layout. They keep the largest element on the device and go as soon as a gradient was seen.

A tensor without a gradient may be well: a head that this loss does not use, experts without tokens, the factor A of
LoRA while B is zero. So the loss of a micro-batch is computed again with other values in such tensors. If it stays the
same, they are unused. If it changes, it depends on tensors that do not learn.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ds_trainer.utils import distributed
from ds_trainer.utils.errors import listed
from ds_trainer.utils.seeds import random_state, restore_random_state

_MOST_GROUPS = 8  # that are tried one by one
_TENSORS = 3  # that are changed in a group
_ELEMENTS = 1 << 20  # that are changed in a tensor
_CHANGE = 1e-6  # of the loss, relative


class GradientArrivals:
    """Sees the gradients of ``parameters`` from :meth:`listen` on.

    Attributes:
        missing: the numbers of the parameters that no rank has seen a nonzero gradient of.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self.missing = list(range(len(parameters)))
        self._largest: dict[int, torch.Tensor] = {}
        self._hooks: list[Any] = []

    def listen(self) -> None:
        """See the gradients of the missing parameters, until :meth:`look`. Frozen ones get none."""
        for hook in self._hooks:
            hook.remove()
        self.missing = [number for number in self.missing if self._parameters[number].requires_grad]
        self._hooks = [self._parameters[number].register_hook(partial(self._see, number)) for number in self.missing]

    def _see(self, number: int, gradient: torch.Tensor) -> None:
        values = gradient.detach()
        values = values.coalesce().values() if values.is_sparse else values
        if values.numel():
            largest = torch.linalg.vector_norm(values, torch.inf)
            before = self._largest.get(number)
            self._largest[number] = largest if before is None else torch.maximum(before, largest)

    def look(self) -> None:
        """Forget the parameters that got a gradient. Collective; waits for the device."""
        for hook in self._hooks:
            hook.remove()
        seen = torch.zeros(len(self._parameters), dtype=torch.int64)
        if self._largest:
            numbers = list(self._largest)
            seen[numbers] = torch.stack([self._largest[number].float() for number in numbers]).ne(0).long().cpu()
        self._largest, self._hooks = {}, []
        arrived = distributed.agree(seen)
        self.missing = [number for number in self.missing if not arrived[number]]


def grouped(names: Iterable[str], among: Iterable[str]) -> dict[str, list[str]]:
    """``names`` by the largest part of the model that has no other name ``among``, with layers as ``*``.

    ``{"encoder": [...]}`` if all names of the encoder are in it; else ``{"layers.*.bias": [...]}``.
    """
    names = list(names)
    some, every = Counter(_prefixes(names)), Counter(_prefixes(among))
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        part = next(prefix for prefix in _prefixes([name]) if some[prefix] == every[prefix])
        groups[re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", part)].append(name)
    return dict(groups)


def _prefixes(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        parts = name.split(".")
        yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def in_words(groups: dict[str, list[str]]) -> str:
    """``encoder (38 tensors), head.bias``."""
    several = {part: f" ({len(names)} tensors)" if len(names) > 1 else "" for part, names in groups.items()}
    return listed((f"{part}{count}" for part, count in several.items()), most=6)


def groups_in_loss(
    groups: dict[str, list[str]], parameters: Mapping[str, torch.Tensor], loss: Callable[[], float]
) -> dict[str, list[str]]:
    """Those of ``groups`` on whose values the loss depends. Collective; nothing is changed afterwards.

    Args:
        groups: names of parameters, the same on all ranks.
        parameters: by name.
        loss: computes the same loss each time that it is called, with any state of the generators.
    """
    tried = dict(list(groups.items())[:_MOST_GROUPS])
    before = random_state()
    try:

        def run() -> float:
            restore_random_state(before)
            return loss()

        plain = run()
        noise = abs(run() - plain)  # kernels may add in another order each time
        depends = []
        for names in tried.values():
            few = {names[0], names[len(names) // 2], names[-1]} if len(names) > _TENSORS else set(names)
            with _other_values([parameters[name] for name in sorted(few)]):
                changed = abs(run() - plain)
            depends.append(int(not changed <= 10 * noise + _CHANGE * max(abs(plain), 1.0)))
        agreed = distributed.agree(torch.tensor(depends))
        return {part: names for (part, names), one in zip(tried.items(), agreed, strict=True) if one}
    finally:
        restore_random_state(before)


@contextmanager
def _other_values(parameters: Sequence[Any]) -> Iterator[None]:
    """Inside, some elements of each of ``parameters`` have other values: of the shards and of what is gathered."""
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in parameters:
            for tensor in (parameter.data, getattr(parameter, "ds_tensor", None)):
                if tensor is None or not tensor.numel() or not tensor.is_floating_point():
                    continue
                part = tensor.view(-1)[:_ELEMENTS] if tensor.is_contiguous() else tensor[:1]
                held.append((part, part.clone()))
                scale = part.float().square().mean().sqrt().clamp(min=1e-2)
                noise = torch.randn(part.shape, generator=generator).to(part.device)
                part.copy_(part.float() + noise * scale)
    try:
        yield
    finally:
        with torch.no_grad():
            for part, before in reversed(held):  # a shard may be the memory of the whole tensor
                part.copy_(before)
