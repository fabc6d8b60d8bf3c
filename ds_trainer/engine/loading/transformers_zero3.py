"""Sets transformers' global ZeRO-3 state: enabled for sharded models, disabled while models are loaded.

``transformers.integrations.is_deepspeed_zero3_enabled()`` serves two purposes. ``generate`` and the forward passes of
speech models check whether all ranks must run the same passes, which is true while an engine shards the model.
``from_pretrained`` checks whether to build the model under ``deepspeed.zero.Init`` and load it with collectives of all
ranks. A model that a callback loads during training does not belong to the engine: it is loaded whole, without
DeepSpeed, on any number of ranks.

Source: transformers 5.23, ``integrations/deepspeed.py`` (a weak reference to an object with ``is_zero3()`` and
``config``), ``modeling_utils.py``, ``generation/utils.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

_MODULE = "transformers.integrations.deepspeed"
_MODELS = "transformers.modeling_utils"
_LOADERS = ("from_pretrained", "_from_config")
_loading: ContextVar[bool] = ContextVar("_loading", default=False)
_independent: ContextVar[bool] = ContextVar("_independent", default=False)


class Zero3Registration:
    """Registers with transformers, until it is closed or deleted, that a model is sharded by ZeRO-3.

    Does nothing if transformers is not imported.

    Args:
        config: the DeepSpeed configuration that ``transformers.integrations.deepspeed_config()`` returns.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self._open = True
        library: Any = sys.modules.get(_MODULE)
        if library is None:
            return
        _patch_loaders()
        self._previous = library._hf_deepspeed_config_weak_ref
        library.set_hf_deepspeed_config(self)

    def is_zero3(self) -> bool:
        """Whether ZeRO-3 is enabled: the registration is open, no model is being loaded, ranks are not independent."""
        return self._open and not _loading.get() and not _independent.get()

    def close(self) -> None:
        """End the registration and restore the previous one."""
        library: Any = sys.modules.get(_MODULE)
        reference = getattr(library, "_hf_deepspeed_config_weak_ref", None)
        if self._open and reference is not None and reference() is self:
            library._hf_deepspeed_config_weak_ref = self._previous
        self._open = False


def end_registrations() -> None:
    """A new engine does not shard its model: end what earlier engines, which nothing has closed yet, have registered.

    Libraries ask transformers, and would gather weights that are whole.
    """
    library: Any = sys.modules.get(_MODULE)
    reference = getattr(library, "_hf_deepspeed_config_weak_ref", None)
    while reference is not None and isinstance(registered := reference(), Zero3Registration):
        reference = library._hf_deepspeed_config_weak_ref = registered._previous
        registered.close()


@contextmanager
def independent_ranks() -> Iterator[None]:
    """Inside, ``generate`` does not wait for other ranks after every token: each rank holds all weights."""
    token = _independent.set(True)
    try:
        yield
    finally:
        _independent.reset(token)


def _patch_loaders() -> None:
    """Patch transformers to load models without DeepSpeed, even during a registration. Idempotent."""
    models: Any = sys.modules.get(_MODELS)
    if models is None:
        return
    for name in _LOADERS:
        original = vars(models.PreTrainedModel)[name].__func__
        if not hasattr(original, "loads_without_zero3"):
            setattr(models.PreTrainedModel, name, classmethod(_without_zero3(original)))


def _without_zero3(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def load(cls: Any, *args: Any, **kwargs: Any) -> Any:
        token = _loading.set(True)
        try:
            return original(cls, *args, **kwargs)
        finally:
            _loading.reset(token)

    load.loads_without_zero3 = True  # type: ignore[attr-defined]
    return load
