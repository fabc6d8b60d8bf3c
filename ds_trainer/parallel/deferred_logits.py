"""``DeferredLogits``: the logits of a linear head, computed only when something other than a cross-entropy reads them.

A model computes logits, scales or caps them, changes their shape, and passes them to ``F.cross_entropy``. These tensors
record the first steps, and compute the last one in tiles (:mod:`ds_trainer.parallel.linear_cross_entropy`). So whatever
a model or a loss function of the user does between head and loss needs no knowledge of it. Everything else that is done
with such a tensor gets the real logits, with their graph: they are computed once, and kept for other readers.

* Shapes: views that keep the last dimension, slices and masks of the other ones. They are applied to the input of the
  head instead.
* Functions of single logits: scales, ``tanh``, clamps, and sums with a vector over the vocabulary that has no gradient.
  They are computed in float32 in each tile.
* Casts of floating-point numbers, except to float64: the tiles are float32 whatever the dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from ds_trainer.parallel.linear_cross_entropy import ElementwiseFunction


class Cast:
    """A cast to another floating-point dtype, which a tile does not need."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, logits: torch.Tensor, rows: slice) -> torch.Tensor:
        """The logits in the other dtype."""
        return logits.to(self._dtype)


class HeadReader(Protocol):
    """Calls a head, for :class:`DeferredLogits`."""

    chunk_tokens: int
    """Tokens whose logits may exist together."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits ``[..., V]`` of ``hidden`` ``[..., H]``."""
        ...

    def pieces(
        self,
        hidden: torch.Tensor,
        functions: tuple[ElementwiseFunction, ...],
        use: Callable[[Callable[[Any], torch.Tensor]], Any],
    ) -> Any:
        """``use(logits_of)``, called once, in the head; ``logits_of(index)`` are the logits of ``hidden[:, index]``."""
        ...

    def in_head(
        self,
        hidden: torch.Tensor,
        compute: Callable[[Sequence[tuple[torch.Tensor, torch.Tensor]], torch.Tensor | None], torch.Tensor],
    ) -> torch.Tensor:
        """``compute(terms, bias)``, called once, in the head: inputs and weights of its products, and its bias."""
        ...

    def losses(
        self,
        hidden: torch.Tensor,
        functions: tuple[ElementwiseFunction, ...],
        targets: torch.Tensor,
        ignore_index: int,
        label_smoothing: float,
        summed: bool,
    ) -> torch.Tensor:
        """The loss of each token, float32 ``[T]``, or their sum, for ``hidden`` ``[T, H]`` and ``targets`` ``[T]``."""
        ...


class DeferredLogits(torch.Tensor):
    """Logits ``[..., V]`` of ``hidden`` ``[..., H]``."""

    reader: HeadReader
    hidden: torch.Tensor
    functions: tuple[ElementwiseFunction, ...]
    known: torch.Tensor | None
    """The real logits, once something has read them."""

    @staticmethod
    def of(
        reader: HeadReader,
        hidden: torch.Tensor,
        classes: int,
        dtype: torch.dtype,
        functions: tuple[ElementwiseFunction, ...] = (),
    ) -> DeferredLogits:
        """Logits of ``classes`` columns that claim to have ``dtype``."""
        shape = (*hidden.shape[:-1], classes)
        new: DeferredLogits = torch.Tensor._make_wrapper_subclass(
            DeferredLogits, shape, dtype=dtype, device=hidden.device
        )
        new.reader, new.hidden, new.functions, new.known = reader, hidden, functions, None
        new.classes = classes  # type: ignore[attr-defined]
        return new

    def changed(
        self,
        hidden: torch.Tensor | None = None,
        function: ElementwiseFunction | None = None,
        dtype: torch.dtype | None = None,
    ) -> DeferredLogits:
        """These logits with another input, one more function, or another dtype."""
        functions = self.functions if function is None else (*self.functions, function)
        if dtype is not None and dtype != _dtype(self):
            functions = (*functions, Cast(dtype))
        source = self.hidden if hidden is None else hidden
        return DeferredLogits.of(self.reader, source, _classes(self), dtype or _dtype(self), functions)

    def read(self) -> torch.Tensor:
        """The real logits, with their graph."""
        if self.known is None or not self.has_known():
            logits = self.reader.logits(self.hidden)
            for function in self.functions:
                logits = function(logits, slice(0, _classes(self)))
            self.known = logits
        return self.known

    def has_known(self) -> bool:
        """Whether the real logits are known, with a graph if one is recorded now."""
        known, graph = self.known, torch.is_grad_enabled() and self.hidden.requires_grad
        return known is not None and (known.requires_grad or not graph)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record ``func``, or call it with the real logits."""
        kwargs = dict(kwargs or {})
        if "input" in kwargs:
            args = (kwargs.pop("input"), *args)
        if func in _ABOUT_SHAPES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        record = _RECORDED.get(func)
        if record is not None:
            logits = next((value for value in args if isinstance(value, DeferredLogits)), None)
            if logits is not None and not logits.has_known():
                result = record(func, args, kwargs)
                if result is not NotImplemented:
                    return result
        return func(*tree_map(_real, args), **tree_map(_real, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Operations that reach the dispatcher without a Python call, such as those of a custom function."""
        return func(*tree_map(_real, args), **tree_map(_real, kwargs or {}))


def _real(value: Any) -> Any:
    return value.read() if isinstance(value, DeferredLogits) else value


def _classes(logits: Any) -> int:
    return int(logits.__dict__["classes"])


def _dtype(logits: torch.Tensor) -> torch.dtype:
    with torch._C.DisableTorchFunctionSubclass():
        return logits.dtype


# -- what is recorded ------------------------------------------------------------------------------------------------


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    logits, *sizes = args
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = list(sizes[0])
    if kwargs or not sizes or not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    classes, leading = _classes(logits), sizes[:-1]
    whole = logits.hidden.shape[:-1].numel()
    if sizes[-1] == -1:
        known = -1 not in leading and torch.Size(leading).numel() == whole
    else:
        known = sizes[-1] == classes and (-1 in leading or torch.Size(leading).numel() == whole)
    if not known or (-1 in leading and (leading.count(-1) > 1 or whole == 0)):
        return NotImplemented
    return logits.changed(logits.hidden.reshape(*leading, logits.hidden.shape[-1]))


def _flatten(func: Any, args: Any, kwargs: Any) -> Any:
    def given(logits: DeferredLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
        dimensions = logits.hidden.dim()
        if end_dim % dimensions == dimensions - 1 and start_dim % dimensions != dimensions - 1:
            return NotImplemented
        return logits.changed(logits.hidden.flatten(start_dim, end_dim))

    return given(*args, **kwargs)


def _same(func: Any, args: Any, kwargs: Any) -> Any:
    return args[0]


def _detach(func: Any, args: Any, kwargs: Any) -> Any:
    return args[0].changed(args[0].hidden.detach())


def _item(func: Any, args: Any, kwargs: Any) -> Any:
    logits, index = args
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, (list, bool)) for part in parts):
        return NotImplemented
    if not any(part is Ellipsis for part in parts):
        parts = (*parts, Ellipsis)

    def consumed(part: Any) -> int:
        if part is None:
            return 0
        return part.dim() if isinstance(part, torch.Tensor) and part.dtype == torch.bool else 1

    at = next(i for i, part in enumerate(parts) if part is Ellipsis)
    before, after = parts[:at], parts[at + 1 :]
    if after and after[-1] is None:
        return NotImplemented
    if after:  # the last index is that of the vocabulary
        classes = _classes(logits)
        last = after[-1]
        if not isinstance(last, slice) or last.indices(classes) != (0, classes, 1):
            return NotImplemented
        after = (*after[:-1], slice(None))
    dimensions = sum(map(consumed, before)) + sum(map(consumed, after))
    if dimensions > logits.hidden.dim() or (not after and dimensions > logits.hidden.dim() - 1):
        return NotImplemented
    if sum(isinstance(part, torch.Tensor) for part in parts) > 1:
        return NotImplemented  # where the indexed dimension goes depends on what is between them
    return logits.changed(logits.hidden[(*before, Ellipsis, *after)])


def _cast(dtype: torch.dtype | None) -> Callable[[Any, Any, Any], Any]:
    def record(func: Any, args: Any, kwargs: Any) -> Any:
        return args[0].changed(dtype=dtype) if len(args) == 1 else NotImplemented

    return record


def _to(func: Any, args: Any, kwargs: Any) -> Any:
    logits, *targets = args
    options = {"non_blocking", "copy", "memory_format"}
    targets += [value for name, value in kwargs.items() if name not in options]
    dtype = _dtype(logits)
    for target in targets:
        if isinstance(target, bool):
            continue
        if isinstance(target, torch.dtype):
            dtype = target
        elif isinstance(target, torch.Tensor):
            if target.device != logits.hidden.device:
                return NotImplemented
            dtype = target.dtype
        elif torch.device(target) not in (logits.hidden.device, torch.device(logits.hidden.device.type)):
            return NotImplemented
    exact = dtype == torch.float64 and logits.hidden.dtype != torch.float64
    return NotImplemented if exact or not dtype.is_floating_point else logits.changed(dtype=dtype)


def _elementwise(func: Any, args: Any, kwargs: Any) -> Any:
    at = next(i for i, value in enumerate(args) if isinstance(value, DeferredLogits))
    logits, classes = args[at], _classes(args[at])
    vectors: dict[int, torch.Tensor] = {}
    dtype = _dtype(logits)
    for index, value in enumerate(args):
        if index == at or value is None or isinstance(value, (int, float)):
            continue
        if not isinstance(value, torch.Tensor) or value.requires_grad or isinstance(value, DeferredLogits):
            return NotImplemented
        if value.dtype == torch.float64 != logits.hidden.dtype:
            return NotImplemented
        if value.numel() == classes and value.dim() and value.shape[-1] == classes:
            vectors[index] = value.reshape(classes)
            dtype = torch.promote_types(dtype, value.dtype)
        elif value.numel() != 1 or value.dim() > logits.hidden.dim():
            return NotImplemented
    if any(isinstance(value, torch.Tensor) for value in kwargs.values()):
        return NotImplemented

    def function(tile: torch.Tensor, rows: slice) -> torch.Tensor:
        values = [vectors[i][rows] if i in vectors else value for i, value in enumerate(args)]
        values[at] = tile
        result: torch.Tensor = func(*values, **kwargs)
        return result

    changed = logits.changed(function=function)
    return changed if dtype == _dtype(logits) else changed.changed(dtype=dtype)


def _in_place(func: Any, args: Any, kwargs: Any) -> Any:
    changed = _elementwise(_IN_PLACE[func], args, kwargs)
    if changed is NotImplemented or _dtype(changed) != _dtype(args[0]):
        return NotImplemented
    args[0].functions = changed.functions
    return args[0]


def _cross_entropy(func: Any, args: Any, kwargs: Any) -> Any:
    def given(
        logits: Any,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        if not isinstance(logits, DeferredLogits) or weight is not None or not (size_average is reduce is None):
            return NotImplemented
        if logits.hidden.dim() != 2 or target.shape != logits.hidden.shape[:1] or target.is_floating_point():
            return NotImplemented
        functions = tuple(function for function in logits.functions if not isinstance(function, Cast))
        summed = reduction != "none"
        loss = logits.reader.losses(logits.hidden, functions, target, ignore_index, label_smoothing, summed)
        return loss / target.ne(ignore_index).sum() if reduction == "mean" else loss

    return given(*args, **kwargs)


_Tensor: Any = torch.Tensor
_ABOUT_SHAPES = {
    *(getattr(_Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_meta")),
    *(_Tensor.size, _Tensor.dim, _Tensor.numel, _Tensor.nelement, _Tensor.is_floating_point, _Tensor.ndimension),
    *(_Tensor.__len__, _Tensor.get_device, _Tensor.is_complex, torch.is_floating_point, torch.numel, torch.is_complex),
}
_IN_PLACE: dict[Any, Any] = {
    **dict.fromkeys((_Tensor.mul_, _Tensor.__imul__), _Tensor.mul),
    **dict.fromkeys((_Tensor.div_, _Tensor.__itruediv__), _Tensor.div),
    **dict.fromkeys((_Tensor.add_, _Tensor.__iadd__), _Tensor.add),
    **dict.fromkeys((_Tensor.sub_, _Tensor.__isub__), _Tensor.sub),
    _Tensor.tanh_: _Tensor.tanh,
    _Tensor.clamp_: _Tensor.clamp,
}
_RECORDED: dict[Any, Callable[[Any, Any, Any], Any]] = {
    **dict.fromkeys((_Tensor.view, _Tensor.reshape, torch.reshape), _view),
    **dict.fromkeys((_Tensor.flatten, torch.flatten), _flatten),
    _Tensor.contiguous: _same,
    _Tensor.detach: _detach,
    _Tensor.__getitem__: _item,
    _Tensor.float: _cast(torch.float32),
    _Tensor.half: _cast(torch.float16),
    _Tensor.bfloat16: _cast(torch.bfloat16),
    _Tensor.to: _to,
    F.cross_entropy: _cross_entropy,
    **dict.fromkeys(
        (
            *(_Tensor.mul, _Tensor.__mul__, _Tensor.__rmul__, torch.mul, torch.multiply, _Tensor.multiply),
            *(_Tensor.div, _Tensor.__truediv__, torch.div, torch.true_divide, _Tensor.true_divide, torch.divide),
            *(_Tensor.add, _Tensor.__add__, _Tensor.__radd__, torch.add),
            *(_Tensor.sub, _Tensor.__sub__, torch.sub),
            *(_Tensor.neg, _Tensor.__neg__, torch.neg),
            *(_Tensor.tanh, torch.tanh, F.tanh),
            *(_Tensor.clamp, torch.clamp),
        ),
        _elementwise,
    ),
    **dict.fromkeys(_IN_PLACE, _in_place),
}
