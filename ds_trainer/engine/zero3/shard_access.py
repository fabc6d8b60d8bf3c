"""Refuses that a script uses a weight of which ZeRO 3 has released the data, which would be an empty tensor, and in
callbacks a gradient that ZeRO has partitioned: ``parameter.grad`` is empty or that of one rank.

Inside of callbacks every function of torch is looked at (an average of the weights, a mask), and in an overridden loss
or step outside of the engine's forward passes (a penalty, a head that is applied outside of its module), and inside of
these in the first micro-batch; in the rest of a training ``state_dict()``, which overridden ``save_model`` methods
write to files, and copies of the model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from weakref import ref

from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from ds_trainer.engine.expert_parallel import expert_slice
from ds_trainer.engine.weights import is_released
from ds_trainer.utils.errors import ConfigError

_LOOKS = frozenset(
    (
        *("__hash__", "__repr__", "__len__", "data_ptr", "device", "dim", "dtype", "element_size", "grad", "grad_fn"),
        *("is_complex", "is_contiguous", "is_cuda", "is_floating_point", "is_leaf", "is_meta", "is_sparse", "layout"),
        *("names", "ndim", "numel", "register_hook", "requires_grad", "requires_grad_", "retains_grad", "shape"),
        *("size", "storage_offset", "stride", "type", "untyped_storage", "_version"),
    )
)
"""Functions and attributes of tensors that do not use values."""
WITH_GRADIENTS = frozenset(("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step"))
"""Events at which parameters have gradients in transformers."""
_EXPERTS = (
    "state_dict() was called for {name}, but expert_parallel_size divides the experts, so that this rank has a part of "
    "them. Read all weights with self.accelerator.get_state_dict(self.model) on all ranks, or save them with an "
    "overridden _save(output_dir, state_dict)."
)
_GRADIENT = (
    "A callback uses parameter.grad ({name}), which is not the gradient of one process here: ZeRO and 16-bit "
    "optimizers keep gradients in buffers of their own. Read it in on_pre_optimizer_step, on all ranks, with "
    "deepspeed.utils.safe_get_full_grad(parameter), and change it with safe_set_full_grad(parameter, value)."
)
_USED = (
    "{what} was called for {name}, but ZeRO 3 has only a part of each weight on a rank, so that this tensor is empty. "
    "Compute what a loss needs of a weight in the forward of the model (`module.weight` is gathered there, "
    "`module.parameters()` is not; 0 * weight.sum() of unused weights is not needed), copy a model before train(), "
    "read all weights with self.accelerator.get_state_dict(self.model) on all ranks, use some inside of "
    "deepspeed.zero.GatheredParameters(parameters, modifier_rank=0), save them with an overridden _save(output_dir, "
    "state_dict), or set zero_stage=2."
)


class ReleasedWeight(ConfigError):
    """A script has used a weight of which ZeRO 3 has released the data."""


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
        ReleasedWeight: names it.
    """
    for parameter in parameters:
        if is_released(parameter) and called_by_script(2):
            raise ReleasedWeight(_USED.format(what=what, name=_name(parameter, model) or "a weight"))


def _name(parameter: Any, model: nn.Module) -> str | None:
    return next((name for name, one in model.named_parameters() if one is parameter), None)


class ShardAccess(TorchFunctionMode):
    """Inside, a script cannot use released weights of ``model``.

    Args:
        model: the model.
        at_exit: called at the end, if there was no error.
        gradients: refuse ``parameter.grad``, too.
        everywhere: also inside of the engine's forward passes.
    """

    def __init__(
        self, model: nn.Module, at_exit: Callable[[], Any] = int, gradients: bool = False, everywhere: bool = False
    ) -> None:
        super().__init__()
        self.everywhere = everywhere
        self._gradients = gradients
        self._model = model
        self._at_exit = at_exit

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is None:
            self._at_exit()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name in ("__get__", "__set__"):
            name = func.__self__.__name__
        if self._gradients and name == "grad" and called_by_script(1) and (used := _name(args[0], self._model)):
            raise ConfigError(_GRADIENT.format(name=used))
        if name not in _LOOKS:
            first = args[0] if args and isinstance(args[0], (list, tuple)) else ()
            refuse_released(name, (*args, *first), self._model)
        return func(*args, **(kwargs or {}))


def is_compiled(model: nn.Module) -> bool:
    """Whether a module of ``model`` is compiled."""
    return any(module._compiled_call_impl is not None for module in model.modules())


class WatchedUses:
    """Contexts of the losses and steps of a script, in which it cannot use released weights.

    What the engine's own forward passes compute is not looked at. Compiled models are not watched: they would be
    compiled twice.

    Args:
        engine: DeepSpeed's engine.
    """

    def __init__(self, engine: nn.Module) -> None:
        self._model: nn.Module = engine.module  # type: ignore[assignment]
        self._compiled = is_compiled(self._model)
        self._paused: list[ShardAccess] = []
        engine.register_forward_pre_hook(self._pause, prepend=True)
        engine.register_forward_hook(self._go_on, always_call=True)

    def __call__(self) -> AbstractContextManager[Any]:
        """A context."""
        return nullcontext() if self._compiled else ShardAccess(self._model)

    def _pause(self, *ignored: Any) -> None:
        # There may be others of the script.
        while isinstance(innermost := _get_current_function_mode(), ShardAccess) and not innermost.everywhere:
            TorchFunctionMode.__exit__(innermost, None, None, None)
            self._paused.append(innermost)

    def _go_on(self, *ignored: Any) -> None:
        while self._paused:
            TorchFunctionMode.__enter__(self._paused.pop())


def watch_copies(model: nn.Module, stage: int) -> None:
    """Let a script pickle parameters, without what DeepSpeed has put into them; refuse copies of ZeRO 3's shards."""
    for name, parameter in model.named_parameters():
        parameter.__reduce_ex__ = partial(_reduced, name, ref(parameter))  # type: ignore[method-assign]
        if stage == 3:
            parameter.__deepcopy__ = partial(_copied, name, ref(parameter))  # type: ignore[method-assign]


def _copied(name: str, parameter: Any, memo: dict[int, Any]) -> Any:
    if called_by_script(1):
        raise ReleasedWeight(_USED.format(what="copy.deepcopy", name=name))
    return nn.Parameter.__deepcopy__(parameter(), memo)


def _reduced(name: str, parameter: Any, protocol: int) -> Any:
    if is_released(parameter()):
        raise ReleasedWeight(_USED.format(what="pickle", name=name))
    return nn.Parameter(parameter().data, parameter().requires_grad).__reduce_ex__(protocol)


def watch_state_dicts(model: nn.Module) -> None:
    """Refuse ``state_dict()`` of a script for released weights and divided experts of ``model``, without an engine."""
    for module in model.modules():
        module.register_state_dict_pre_hook(partial(_before_state_dict, model))


def _before_state_dict(model: nn.Module, module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if not keep_vars:
        refuse_released("state_dict()", module._parameters.values(), model)
        for parameter in module._parameters.values():
            if parameter is not None and expert_slice(parameter) is not None and called_by_script(1):
                raise ConfigError(_EXPERTS.format(name=_name(parameter, model)))
