"""``DeferredMask``: an attention mask that is made when something reads it.

The mask of a packed row has one element for each pair of tokens: 1 GiB at 32,768 tokens. Attention that computes the
samples of the row one by one needs to know which mask it would be, and none of its elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ds_trainer.training.model.sequence_sharding.attention_modules import RequestedMask


class DeferredMask(torch.Tensor):
    """A tensor with a shape and without memory. Every operation on it makes the mask, once, and runs on that.

    Args:
        make: returns the mask.
        request: which mask it is, apart from the borders of the samples.
        shape: of the mask.
        device: of the mask.
    """

    request: RequestedMask
    _make: Callable[[], torch.Tensor]
    _made: torch.Tensor | None

    # A result is a tensor of its own, not another deferred mask.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, make: Callable[[], torch.Tensor], request: RequestedMask, shape: Sequence[int], device: torch.device
    ) -> DeferredMask:
        """See the class."""
        mask: DeferredMask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.request, mask._make, mask._made = request, make, None
        return mask

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeferredMask({tuple(self.shape)}, {self.request})"

    def made(self) -> torch.Tensor:
        """The mask."""
        if self._made is None:
            self._made = self._make()
        return self._made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), keywords: Any = None
    ) -> Any:
        """Run ``function`` on the mask."""
        args, keywords = tree_map_only(DeferredMask, DeferredMask.made, (args, keywords or {}))
        return function(*args, **keywords)
