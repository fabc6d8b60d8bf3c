"""Refuses that a script uses a weight of which ZeRO 3 has released the data: it would be an empty tensor.

Inside of callbacks every function of torch is looked at (an average of the weights, a mask, a copy of the model), in
the rest of a training ``state_dict()``, which overridden ``save_model`` methods write to files.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from ds_trainer.engine.weights import is_released
from ds_trainer.utils.errors import ConfigError

_LOOKS = frozenset(
    (
        *("__hash__", "__repr__", "__len__", "data_ptr", "device", "dim", "dtype", "element_size", "grad", "grad_fn"),
        *("is_complex", "is_contiguous", "is_cuda", "is_floating_point", "is_leaf", "is_meta", "is_sparse", "layout"),
        *("names", "ndim", "numel", "register_hook", "requires_grad", "requires_grad_", "retains_grad", "shape"),
        *("size", "stride", "type", "_version"),
    )
)
"""Functions and attributes of tensors that do not use values."""
_USED = (
    "{what} was called for {name}, but ZeRO 3 has only a part of each weight on a rank, so that this tensor is empty. "
    "Read all weights with self.accelerator.get_state_dict(self.model) on all ranks, use some inside of "
    "deepspeed.zero.GatheredParameters(parameters, modifier_rank=0), save them with an overridden _save(output_dir, "
    "state_dict), or set zero_stage=2."
)


def called_by_script(depth: int) -> bool:
    """Whether a function was called by a script, perhaps through torch, and not by DeepSpeed or this package.

    Args:
        depth: 1 for the function that asks, 2 for the one that called it.
    """
    frame: Any = sys._getframe(depth + 1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "").partition(".")[0]
        if name not in ("torch", "copy", "contextlib", "functools"):
            return name not in ("deepspeed", "ds_trainer")
        frame = frame.f_back
    return False


def refuse_released(what: str, parameters: Iterable[Any], model: nn.Module) -> None:
    """Refuse that a script has called the caller of this function, ``what``, for a released parameter of ``model``.

    Raises:
        ConfigError: names it.
    """
    for parameter in parameters:
        if is_released(parameter) and called_by_script(2):
            name = next((name for name, one in model.named_parameters() if one is parameter), "a weight")
            raise ConfigError(_USED.format(what=what, name=name))


class ShardAccess(TorchFunctionMode):
    """Inside, a script cannot use released weights of ``model``.

    Args:
        model: the model.
        at_exit: called at the end.
    """

    def __init__(self, model: nn.Module, at_exit: Callable[[], None]) -> None:
        super().__init__()
        self._model = model
        self._at_exit = at_exit

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._at_exit()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name in ("__get__", "__set__"):
            name = func.__self__.__name__
        if name not in _LOOKS:
            first = args[0] if args and isinstance(args[0], (list, tuple)) else ()
            refuse_released(name, (*args, *first), self._model)
        return func(*args, **(kwargs or {}))


def watch_state_dicts(model: nn.Module) -> None:
    """Refuse ``state_dict()`` of a script for released weights of ``model``, without an engine of its own."""
    for module in model.modules():
        module.register_state_dict_pre_hook(partial(_before_state_dict, model))


def _before_state_dict(model: nn.Module, module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if not keep_vars:
        refuse_released("state_dict()", module._parameters.values(), model)
