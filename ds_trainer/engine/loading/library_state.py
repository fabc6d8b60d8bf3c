"""What transformers believes of ZeRO-3: true for models that are sharded, false for models that are loaded.

``transformers.integrations.is_deepspeed_zero3_enabled()`` is asked for two things. ``generate`` and the forward passes
of speech models ask whether all ranks must take the same passes, which is so while an engine shards the model.
``from_pretrained`` asks whether to build the model under ``deepspeed.zero.Init`` and to load it by collectives of all
ranks. A model that a callback loads in the middle of training is not the engine's: it is loaded whole and plainly, on
any number of ranks.

Source: transformers 5.23, ``integrations/deepspeed.py`` (a weak reference to an object with ``is_zero3()`` and
``config``), ``modeling_utils.py``, ``generation/utils.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any

_MODULE = "transformers.integrations.deepspeed"
_MODELS = "transformers.modeling_utils"
_LOADERS = ("from_pretrained", "_from_config")
_loads: ContextVar[bool] = ContextVar("_loads", default=False)


class ShardsModels:
    """While it lives and is not closed, transformers knows that a model is sharded by ZeRO-3.

    Nothing happens where transformers is not imported.

    Args:
        config: DeepSpeed's configuration, for ``transformers.integrations.deepspeed_config()``.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self._open = True
        library: Any = sys.modules.get(_MODULE)
        if library is None:
            return
        _loading_is_plain()
        self._before = library._hf_deepspeed_config_weak_ref
        library.set_hf_deepspeed_config(self)

    def is_zero3(self) -> bool:
        """Whether what is asked about is the sharded model."""
        return self._open and not _loads.get()

    def close(self) -> None:
        """The model is sharded no more; what transformers was told before holds again."""
        library: Any = sys.modules.get(_MODULE)
        reference = getattr(library, "_hf_deepspeed_config_weak_ref", None)
        if self._open and reference is not None and reference() is self:
            library._hf_deepspeed_config_weak_ref = self._before
        self._open = False


def _loading_is_plain() -> None:
    """Have transformers load models as without DeepSpeed, whatever is sharded. May be called again."""
    models: Any = sys.modules.get(_MODELS)
    if models is None:
        return
    for name in _LOADERS:
        original = vars(models.PreTrainedModel)[name].__func__
        if not hasattr(original, "loads_plainly"):
            setattr(models.PreTrainedModel, name, classmethod(_plainly(original)))


def _plainly(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def load(cls: Any, *args: Any, **kwargs: Any) -> Any:
        token = _loads.set(True)
        try:
            return original(cls, *args, **kwargs)
        finally:
            _loads.reset(token)

    load.loads_plainly = True  # type: ignore[attr-defined]
    return load
