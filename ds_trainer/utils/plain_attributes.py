"""Restores what a script keeps beside its weights after code that is run for its result only."""

from __future__ import annotations

import copy
import functools
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from ds_trainer.utils.logging import get_logger

_LARGEST = 10_000  # entries; a larger container is data, not a count
_ROOM = 2**25  # entries of all tensors and arrays that are copied
_LEAVES = (bool, int, float, complex, str, bytes, type(None), np.generic)
_SEQUENCES, _MAPPINGS = (list, deque), (dict, defaultdict, OrderedDict, Counter)
_CONTAINERS = (*_SEQUENCES, *_MAPPINGS, set, tuple)
_LIBRARIES = {__name__.partition(".")[0], "torch", "transformers", "deepspeed"}
_OF_TORCH = {*vars(nn.Module()), "_external_params"}  # hooks, weights and buffers of a module
_TOO_LARGE = (
    "Code of a script that was run once more for its result only has changed tensors of %s entries, too large "
    "to be put back: they have one change more than without this."
)
logger = get_logger(__name__)
_looks = 0  # how many of these contexts are open


def only_looks() -> bool:
    """Whether code runs for its result only, so that what it logs is not recorded."""
    return _looks > 0


def owner_of(method: Any) -> Any:
    """The object of a method; a function itself, which may keep something in its attributes or around it."""
    return getattr(method, "__self__", method)


@contextmanager
def plain_attributes_restored(*owners: object) -> Iterator[None]:
    """Afterwards, numbers, text, small containers, tensors and arrays that ``owners`` keep are as before, as are
    generators of random numbers and the iterators in their attributes.

    A subclass's ``compute_loss`` collects metrics in such attributes, in objects of classes of the script (meters), in
    variables of the script and of functions around it. Containers keep their identity, because others may hold them. Of
    tensors and arrays 32 million entries are copied; a warning names the size of others that have changed.
    Attributes that did not exist are removed. Of modules of a model only their own attributes, those of their classes
    and the script's variables are restored, and what did not exist stays unless the class has a default of this name.
    """
    global _looks
    kept = _Kept(owners)
    _looks += 1
    try:
        yield
    finally:
        _looks -= 1
        kept.restore()


class _Kept:
    def __init__(self, owners: Iterable[object]) -> None:
        self._deep = not all(isinstance(owner, nn.Module) for owner in owners)
        self._contents: list[tuple[Any, Any]] = []
        self._lengths: list[tuple[list[Any], int]] = []
        self._names: list[tuple[Any, dict[str, Any], set[str]]] = []
        self._tensors: list[tuple[torch.Tensor, int, torch.Tensor]] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._large: list[tuple[torch.Tensor, int]] = []
        self._random: list[tuple[Callable[[Any], object], Any]] = []
        self._iterators: list[_Replayed] = []
        self._room = _ROOM
        self._cells: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()
        self._ahead: deque[Any] = deque()  # nearest first
        for owner in owners:
            self._keep_object(owner)
        room = len(self._seen) + _LARGEST
        while self._ahead and len(self._seen) < room:
            self._keep(self._ahead.popleft())

    def _keep(self, value: Any) -> None:
        if isinstance(value, _LEAVES) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if type(value) in _CONTAINERS:
            self._keep_container(value)
        elif isinstance(value, np.ndarray):
            if self._has_room(value.size) and value.dtype != object:
                self._arrays.append((value, value.copy()))
        elif isinstance(value, torch.Generator):
            self._random.append((value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self._random.append((value.setstate, value.getstate()))
        elif isinstance(value, (np.random.Generator, np.random.RandomState)):
            bits: Any = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", None)
            self._random.append((functools.partial(setattr, bits, "state"), copy.deepcopy(bits.state)))
        elif isinstance(value, torch.Tensor):
            if not (value.requires_grad or value.is_inference() or hasattr(value, "ds_id")):
                if self._has_room(value.numel()):
                    self._tensors.append((value, value._version, value.clone()))
                else:
                    self._large.append((value, value._version))
        elif isinstance(value, FunctionType):
            self._keep_function(value)
        elif not self._deep and isinstance(value, nn.Module):
            return
        elif isinstance(value, (MethodType, functools.partial)):
            parts = [value.__func__, value.__self__] if isinstance(value, MethodType) else [value.func, *value.args]
            self._ahead += parts
        elif _is_of_script(value) and not (isinstance(value, nn.Module) and any(True for _ in value.parameters())):
            self._keep_object(value)

    def _has_room(self, entries: int) -> bool:
        fits = entries <= self._room
        self._room -= entries if fits else 0
        return fits

    def _keep_iterators(self, owner: Any, own: Mapping[str, Any]) -> None:
        for name, value in own.items():
            if isinstance(value, Iterator) and not (_is_of_script(value) or hasattr(value, "read")):  # no files
                self._iterators.append(_Replayed(owner, name, value))
                setattr(owner, name, self._iterators[-1])

    def _keep_container(self, value: Any) -> None:
        entries = value.values() if isinstance(value, Mapping) else value
        if len(value) > _LARGEST:
            if isinstance(value, list):
                self._lengths.append((value, len(value)))
            return
        if not isinstance(value, tuple) and all(map(_is_plain, entries)):
            self._contents.append((value, value.copy()))
        self._ahead += entries

    def _keep_function(self, function: Any) -> None:
        if _is_library(function.__module__):
            return
        for cell in function.__closure__ or ():
            try:
                self._cells.append((cell, cell.cell_contents))
            except ValueError:  # not set yet
                continue
            self._ahead.append(cell.cell_contents)
        self._keep_object(function)

    def _keep_object(self, owner: Any) -> None:
        self._seen.add(id(owner))
        skipped = () if self._deep else _OF_TORCH
        own = {name: value for name, value in vars(owner).items() if name not in skipped}
        self._names.append((owner, {name: value for name, value in own.items() if _is_plain(value)}, {*vars(owner)}))
        self._keep_iterators(owner, own)
        self._ahead += own.values()
        kinds = [owner] if isinstance(owner, FunctionType) else type(owner).__mro__
        for kind in kinds:
            if not _is_library(kind.__module__) and id(kind) not in self._seen:
                self._seen.add(id(kind))
                self._ahead += [value for name, value in vars(kind).items() if not name.startswith("__")]
                self._keep_variables(sys.modules.get(kind.__module__))

    def _keep_variables(self, module: Any) -> None:
        """Those of a script that its functions may change."""
        if module is not None and id(module) not in self._seen:
            self._seen.add(id(module))
            own = {name: value for name, value in vars(module).items() if not name.startswith("__")}
            self._names.append((module, {name: value for name, value in own.items() if _is_plain(value)}, set()))
            self._keep_iterators(module, own)
            self._ahead += own.values()

    def restore(self) -> None:
        """Put everything back."""
        for value, content in self._contents:
            if len(value) != len(content) or not _same_entries(value, content):
                value.clear()
                (value.extend if isinstance(value, _SEQUENCES) else value.update)(content)
        for values, length in self._lengths:
            del values[length:]
        for owner, before, names in self._names:
            _restore_names(owner, before, names, self._deep)
        with torch.no_grad():
            for tensor, version, clone in self._tensors:
                if tensor._version != version and tensor.shape == clone.shape:
                    tensor.copy_(clone)
        for array, numbers in self._arrays:
            if not np.array_equal(array, numbers):
                array[...] = numbers
        for put_back, state in self._random:
            put_back(state)
        for iterator in self._iterators:
            iterator.replay()
        if changed := [tensor.numel() for tensor, version in self._large if tensor._version != version]:
            logger.warning(_TOO_LARGE, ", ".join(f"{size:,}" for size in changed))
        for cell, value in self._cells:
            if cell.cell_contents is not value and _is_plain(value):
                cell.cell_contents = value


class _Replayed(Iterator[Any]):
    """Stands for an iterator in an attribute: records what is read, gives that once more, and puts the iterator back.

    While it records it has none of its other methods: what ``send`` or ``close`` do to a generator stays done.
    """

    def __init__(self, owner: Any, name: str, source: Iterator[Any]) -> None:
        self._owner, self._name, self._source = owner, name, source
        self._read: deque[Any] = deque()
        self._records = True

    def replay(self) -> None:
        """Give what was read once more."""
        self._records = False
        while isinstance(self._source, _Replayed) and not (self._source._records or self._source._read):
            self._source = self._source._source
        setattr(self._owner, self._name, self if self._read else self._source)

    def __next__(self) -> Any:
        if self._records:
            self._read.append(next(self._source))
            return self._read[-1]
        if not self._read:  # of a script that holds this object
            return next(self._source)
        if len(self._read) == 1 and getattr(self._owner, self._name, None) is self:
            setattr(self._owner, self._name, self._source)
        return self._read.popleft()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or self._records:
            raise AttributeError(f"{name!r} of an iterator whose items are recorded")
        return getattr(self._source, name)


def _restore_names(owner: Any, before: dict[str, Any], names: set[str], deep: bool) -> None:
    now = vars(owner)
    for name in () if isinstance(owner, ModuleType) else now.keys() - names:
        if _is_plain(now[name]) if deep else isinstance(getattr(type(owner), name, owner), _LEAVES):
            delattr(owner, name)
    for name, value in before.items():
        if name not in now or now[name] is not value:
            setattr(owner, name, value)


def _same_entries(value: Any, content: Any) -> bool:
    if isinstance(value, set):
        return value == content
    if isinstance(value, Mapping):
        return all(a is b and value[a] is content[b] for a, b in zip(value, content, strict=True))
    return all(a is b for a, b in zip(value, content, strict=True))


def _is_plain(value: Any) -> bool:
    """Whether it is a number, text, a tensor, an array, a container, or an object of the script without weights."""
    if isinstance(value, (*_LEAVES, torch.Tensor, np.ndarray)) or type(value) in _CONTAINERS:
        return True
    return _is_of_script(value) and not isinstance(value, (type, nn.Module))


def _is_of_script(value: Any) -> bool:
    """Whether the class of ``value`` is the user's, or a metric that is a module (torchmetrics).

    Objects of other packages may be in use by their threads (a tracker's run). A data set is no meter.
    """
    kind = type(value)
    root = str(kind.__module__).partition(".")[0]  # of Cython it is no text
    if not hasattr(value, "__dict__") or root in _LIBRARIES or isinstance(value, (type, ModuleType, Dataset)):
        return False
    return isinstance(value, nn.Module) or not _is_library(kind.__module__)


@functools.cache
def _is_library(module: str) -> bool:
    """Whether a module belongs to Python, to this package or to an installed one."""
    root = (module or "builtins").partition(".")[0]
    path = getattr(sys.modules.get(root), "__file__", None) or ""
    libraries = root in sys.builtin_module_names or root in sys.stdlib_module_names or root in _LIBRARIES
    return (libraries and root != "__main__") or "site-packages" in path or "dist-packages" in path
