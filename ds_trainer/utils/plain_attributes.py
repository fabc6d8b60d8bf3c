"""Restores the plain attributes of an object after code that is run for its result only."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_LARGEST = 10_000  # entries; a larger container is data, not a count
_LEAVES = (int, float, complex, str, bytes, type(None), torch.Tensor)


class _NotPlainError(Exception):
    """The value holds other objects, or too many."""


@contextmanager
def plain_attributes_restored(owner: object) -> Iterator[None]:
    """Afterwards, attributes of ``owner`` that hold numbers, text, tensors, or small containers of these are as before.

    A subclass's ``compute_loss`` collects metrics in such attributes. Tensors are not copied: in-place changes stay.
    One that did not exist is removed if its class has a default of this name. Containers of the user's classes are
    restored too.
    """
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


def _containers(kind: type) -> Iterator[Any]:
    """The small plain containers that are attributes of ``kind`` and the classes of the user that it derives from."""
    library = __name__.partition(".")[0]
    for part in kind.__mro__:
        if part.__module__.partition(".")[0] in (library, "torch", "transformers", "deepspeed", "builtins"):
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
    raise _NotPlainError


def _same(value: Any, copy: Any) -> bool:
    if type(value) is not type(copy):
        return False
    if isinstance(value, dict):
        return value.keys() == copy.keys() and all(_same(value[key], copy[key]) for key in copy)
    if isinstance(value, (list, tuple, deque)):
        return len(value) == len(copy) and all(map(_same, value, copy))
    return value is copy if isinstance(value, torch.Tensor) else bool(value == copy)
