"""Restores the plain attributes of an object after code that is run for its result only."""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

_LARGEST = 10_000  # entries; a larger container is data, not a count
_LEAVES = (int, float, complex, str, bytes, type(None), torch.Tensor)
_looks = 0  # how many of these contexts are open
_LIBRARIES = {__name__.partition(".")[0], "torch", "transformers", "deepspeed"}


class _NotPlainError(Exception):
    """The value holds other objects, or too many."""


def only_looks() -> bool:
    """Whether code runs for its result only, so that what it logs is not recorded."""
    return _looks > 0


@contextmanager
def plain_attributes_restored(owner: object) -> Iterator[None]:
    """Afterwards, attributes of ``owner`` that hold numbers, text, tensors, or small containers of these are as before.

    A subclass's ``compute_loss`` collects metrics in such attributes. One that did not exist is removed if its class
    has a default of this name. Containers of the user's classes are restored too, and unless ``owner`` is a module the
    insides of objects of such classes (meters) and small tensors that are changed in place.
    """
    objects, tensors = ([], []) if isinstance(owner, nn.Module) else _insides(owner)
    kept = [(tensor, tensor._version, tensor.clone()) for tensor in tensors]
    global _looks
    with ExitStack() as stack:
        for part in (owner, *objects):
            stack.enter_context(_restored(part))
        _looks += 1
        try:
            yield
        finally:
            _looks -= 1
            with torch.no_grad():
                for tensor, version, copy in kept:
                    if tensor._version != version:
                        tensor.copy_(copy)


@contextmanager
def _restored(owner: object) -> Iterator[None]:
    shared = [(value, type(value)(value)) for value in _containers(type(owner))]
    names = set(vars(owner))
    before = {}
    for name, value in vars(owner).items():
        try:
            before[name] = _copy(value, [_LARGEST])
        except _NotPlainError:
            continue
    try:
        yield
    finally:
        for value, content in shared:
            if not _same(value, content):
                value.clear()
                (value.extend if isinstance(value, (list, deque)) else value.update)(content)
        for name in vars(owner).keys() - names:
            if isinstance(getattr(type(owner), name, _NotPlainError), _LEAVES):
                delattr(owner, name)
        for name, value in before.items():
            if name not in vars(owner) or not _same(vars(owner)[name], value):
                setattr(owner, name, value)


def _is_of_script(value: Any) -> bool:
    """Whether the class of ``value`` is the user's, or a metric that is a module (torchmetrics).

    Objects of other packages may be in use by their threads (a tracker's run).
    """
    root = type(value).__module__.partition(".")[0]
    if not hasattr(value, "__dict__") or root in _LIBRARIES:
        return False
    return isinstance(value, nn.Module) or not _is_installed(root)


@cache
def _is_installed(root: str) -> bool:
    path = getattr(sys.modules.get(root), "__file__", None) or ""
    return root in sys.stdlib_module_names or "site-packages" in path or "dist-packages" in path


def _insides(owner: object) -> tuple[list[Any], list[torch.Tensor]]:
    """The objects of the script's classes that ``owner`` holds, without models, and small tensors of all of them."""
    objects: list[Any] = []
    tensors: list[torch.Tensor] = []
    seen, ahead = {id(owner)}, list(vars(owner).values())
    while ahead and len(seen) < _LARGEST:
        value = ahead.pop()
        if id(value) in seen or isinstance(value, _LEAVES[:-1]):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.numel() <= _LARGEST and not value.requires_grad and not value.is_inference():
                tensors.append(value)
        elif isinstance(value, (Mapping, list, tuple, deque)):
            if type(value) in (dict, defaultdict, list, tuple, deque) and len(value) <= _LARGEST:
                ahead += value.values() if isinstance(value, Mapping) else value
        elif _is_of_script(value):
            if isinstance(value, nn.Module) and next(value.parameters(), None) is not None:
                continue
            objects.append(value)
            ahead += vars(value).values()
    return objects, tensors


def _containers(kind: type) -> Iterator[Any]:
    """The small plain containers that are attributes of ``kind`` and the classes of the user that it derives from."""
    for part in kind.__mro__:
        if part.__module__.partition(".")[0] in (*_LIBRARIES, "builtins"):
            continue
        for value in vars(part).values():
            if type(value) in (list, dict, set, deque):
                try:
                    _copy(value, [_LARGEST])
                except _NotPlainError:
                    continue
                yield value


def _copy(value: Any, room: list[int]) -> Any:
    room[0] -= 1
    if room[0] < 0:
        raise _NotPlainError
    kind = type(value)
    if kind in _LEAVES or kind is bool or isinstance(value, torch.Tensor):
        return value
    if kind is dict:
        return {_copy(key, room): _copy(entry, room) for key, entry in value.items()}
    if kind is defaultdict:
        return defaultdict(value.default_factory, {key: _copy(entry, room) for key, entry in value.items()})
    if kind is deque:
        return deque((_copy(entry, room) for entry in value), value.maxlen)
    if kind in (list, tuple, set):
        return kind(_copy(entry, room) for entry in value)
    if _is_of_script(value):
        return value
    raise _NotPlainError


def _same(value: Any, copy: Any) -> bool:
    if type(value) is not type(copy):
        return False
    if isinstance(value, dict):
        return value.keys() == copy.keys() and all(_same(value[key], copy[key]) for key in copy)
    if isinstance(value, (list, tuple, deque)):
        return len(value) == len(copy) and all(map(_same, value, copy))
    return value is copy if isinstance(value, torch.Tensor) or _is_of_script(value) else bool(value == copy)
