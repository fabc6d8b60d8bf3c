"""Runs ``generate`` of a model in a context of the Trainer, whoever calls it: a step, a callback, a library.

The model gets an attribute of its own, a bound method. So copies of the model (``copy.deepcopy`` makes one whose method
is bound to the copy) are not affected, and neither are other models of the class.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod

from torch import nn

Context = Callable[[tuple[Any, ...], dict[str, Any]], AbstractContextManager[None]]

# Weak references: a context knows the engine, and the engine its model, which would never be freed.
_contexts: WeakKeyDictionary[nn.Module, WeakMethod[Context]] = WeakKeyDictionary()


def generate_in_context(model: Any, context: Context) -> None:
    """Let ``model.generate(*args, **kwargs)`` run inside ``context(args, kwargs)``, a bound method, while it exists.

    Does nothing for a model without such a method, or with one that is an attribute of the object already.
    """
    if callable(getattr(type(model), "generate", None)) and "generate" not in vars(model):
        _contexts[model] = WeakMethod(context)
        model.generate = MethodType(generate, model)


def generate_as_before(model: Any) -> None:
    """Undo :func:`generate_in_context`."""
    if _contexts.pop(model, None) is not None:
        del model.generate


def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """``generate`` of the model's class, in the context of this object, if it has one."""
    original = type(model).generate
    reference = _contexts.get(model)
    context = None if reference is None else reference()
    if context is None:
        return original(model, *args, **kwargs)
    with context(args, kwargs):
        return original(model, *args, **kwargs)
