"""Attention masks of packed rows that are made when something reads them.

The mask of a packed row has one element for each pair of tokens: 1 GiB at 32,768 tokens. Attention that computes the
samples of the row one by one needs to know which mask it would be, and none of its elements.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_map_only

from ds_trainer.parallel.document_attention import Documents

_aten = torch.ops.aten
_CONTIGUOUS = (None, torch.preserve_format, torch.contiguous_format)


@dataclass(frozen=True)
class RequestedMask:
    """The kind of mask that a model requested, apart from documents and padding. With sequence sharding it takes the
    place of the mask.

    Attributes:
        causal: tokens do not attend to later tokens.
        window: the sliding window, or None.
    """

    causal: bool
    window: int | None


class DeferredMask(torch.Tensor):
    """A mask ``[rows, 1, tokens, tokens]`` without memory. Operations on it make the mask, once, and run on that.

    Args:
        make: returns the mask.
        documents: the samples of the rows.
        request: which mask it is, apart from the borders of the samples.
        device: where the mask is.

    Attributes:
        documents, request: see above.
    """

    documents: Documents
    request: RequestedMask
    _make: Callable[[], torch.Tensor]
    _made: list[torch.Tensor]  # empty at first; aliases share it

    # A result is a tensor of its own, not another deferred mask.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, make: Callable[[], torch.Tensor], documents: Documents, request: RequestedMask, device: torch.device
    ) -> DeferredMask:
        """See the class."""
        rows, tokens = documents.shape
        shape = (rows, 1, tokens, tokens)
        with torch.inference_mode(False):  # a tensor of inference mode does not count its changes
            mask: DeferredMask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.documents, mask.request = documents, request
        mask._make, mask._made = make, []
        return mask

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, {self.request})"

    def made(self) -> torch.Tensor:
        """The mask."""
        if not self._made:
            with torch.inference_mode(False):  # where it was made does not matter for where it is used
                self._made.append(self._make())
        return self._made[0]

    @property
    def changed(self) -> bool:
        """Whether something wrote to the mask, so that :attr:`documents` and :attr:`request` do not describe it."""
        return self._version != 0  # counts what is written to the mask, its views and its aliases

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The mask; what is written to that of a tensor is not counted."""
        return self.detach()

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.clone()

    def numpy(self, *, force: bool = False) -> Any:
        """As that of a tensor, which refuses subclasses."""
        increment_version(self)  # what is written to an array is not counted
        return self.made().numpy(force=force)

    def tolist(self) -> Any:
        """As that of a tensor, which refuses subclasses."""
        return self.made().tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), keywords: Any = None
    ) -> Any:
        """Run ``function`` on the mask; for what does not read it, see :meth:`unread`."""
        keywords = keywords or {}
        inference = torch.is_inference_mode_enabled()
        if inference:  # changes are not counted there, so each operation may be one
            increment_version([arg for arg in args if isinstance(arg, DeferredMask)])
        if args and isinstance(args[0], DeferredMask) and not args[0].changed:
            result = args[0].unread(function, keywords)
            if result is not NotImplemented:
                return result
        args, keywords = tree_map_only(DeferredMask, DeferredMask.made, (args, keywords))
        with torch.inference_mode(False) if inference and function.is_view else nullcontext():  # torch wants it so
            return function(*args, **keywords)

    def unread(self, function: Any, keywords: dict[str, Any]) -> Any:
        """The result of ``function`` on this mask if that takes none of its elements, else ``NotImplemented``."""
        if function in (_aten.detach.default, _aten.alias.default):  # activation checkpointing
            alias = DeferredMask.__new__(type(self), self._make, self.documents, self.request, self.device)
            alias._made = self._made
            return alias
        return NotImplemented


class DocumentMask(DeferredMask):
    """The mask with which tokens attend to all tokens of their sample, as a collator makes it.

    It can be pickled, copied, moved to another device, and cut into rows without being made.

    Args:
        documents: the samples of the rows.
        device: where the mask is.
    """

    @staticmethod
    def __new__(cls, documents: Documents, device: torch.device = torch.device("cpu")) -> DocumentMask:  # noqa: B008
        """See the class."""
        request = RequestedMask(causal=False, window=None)
        mask = DeferredMask.__new__(cls, partial(pairs_of, documents, device), documents, request, device)
        assert isinstance(mask, DocumentMask)
        return mask

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (_itself, (self.made(),)) if self.changed else (DocumentMask, (self.documents, self.device))

    def rows(self, rows: slice) -> torch.Tensor:
        """The mask of some of the rows, without memory of its own or of the others."""
        return self.made()[rows] if self.changed else DocumentMask(self.documents.rows(rows), self.device)

    def unread(self, function: Any, keywords: dict[str, Any]) -> Any:
        """See the base class. There is nothing that page-locked memory or a wait could be for."""
        if function is _aten.is_pinned.default:
            return False
        if function is _aten.record_stream.default and not self._made:
            return None
        copies = (_aten.clone.default, _aten._pin_memory.default, _aten._to_copy.default)
        same = (
            keywords.get("dtype") in (None, torch.bool)
            and keywords.get("layout") in (None, torch.strided)
            and keywords.get("memory_format") in _CONTIGUOUS
        )
        if function in copies and same:
            device = keywords.get("device") if function is _aten._to_copy.default else None
            return DocumentMask(self.documents, device or self.device)
        return super().unread(function, keywords)


def pairs_of(documents: Documents, device: torch.device) -> torch.Tensor:
    """Which tokens belong to the same sample: bool ``[rows, 1, tokens, tokens]``."""
    lengths = torch.tensor(documents.lengths)
    host = torch.arange(len(lengths)).repeat_interleave(lengths).view(documents.shape)
    pinned = host.pin_memory() if device.type == "cuda" else host  # so that the host does not wait
    numbers = pinned.to(device, non_blocking=True)
    return (numbers[:, :, None] == numbers[:, None, :])[:, None]


def _itself(mask: torch.Tensor) -> torch.Tensor:
    return mask
