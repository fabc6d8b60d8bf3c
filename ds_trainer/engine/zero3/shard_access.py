"""Refuses that a script uses a weight of which ZeRO 3 has released the data, which would be an empty tensor, and in
callbacks a gradient that ZeRO has partitioned: ``parameter.grad`` is empty or that of one rank.

Where a script may use them (callbacks, overridden methods, functions that it has passed, its own model), a released
parameter has a class of its own, which sees each function of torch that gets it, in whatever step. The models of
libraries are looked at in the first micro-batch, and those that are compiled in callbacks only. ``state_dict()``, which
overridden ``save_model`` methods write to files, and copies of the model have hooks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass, _disabled_torch_function_impl
from torch.overrides import TorchFunctionMode

from ds_trainer.engine.expert_parallel import expert_slice
from ds_trainer.engine.weights import is_released
from ds_trainer.utils.errors import ConfigError

_LOOKS = frozenset(
    (
        *("__hash__", "__repr__", "__len__", "data_ptr", "device", "dim", "dtype", "element_size", "grad", "grad_fn"),
        *("is_complex", "is_contiguous", "is_cuda", "is_floating_point", "is_leaf", "is_meta", "is_sparse", "layout"),
        *("names", "ndim", "nelement", "numel", "register_hook", "requires_grad", "requires_grad_", "retains_grad"),
        *("shape", "size", "storage_offset", "stride", "type", "untyped_storage", "_version"),
    )
)
"""Functions and attributes of tensors that do not use values."""
_SIZES = frozenset(("__len__", "dim", "ndim", "nelement", "numel", "shape", "size"))
_OFTEN: Any = [vars(torch._C.TensorBase)[name] for name in ("grad", "requires_grad", "dtype", "device")]
_OFTEN = frozenset(function for one in _OFTEN for function in (one.__get__, one.__set__))
"""What DeepSpeed calls for each parameter in each step."""
_NAME = "watched_name"  # attribute of a parameter
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
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
        if name not in ("torch", "copy", "contextlib", "functools") and frame.f_globals is not globals():
            return name not in ("deepspeed", "ds_trainer")
        frame = frame.f_back
    return False


def refuse_released(what: str, parameters: Iterable[Any], model: nn.Module | None = None) -> None:
    """Refuse that a script has called the caller of this function, ``what``, for a released parameter of ``model``.

    Raises:
        ReleasedWeight: names it.
    """
    for parameter in parameters:
        if is_released(parameter) and called_by_script(2):
            name = vars(parameter).get(_NAME) or (model and _name(parameter, model)) or "a weight"
            raise ReleasedWeight(_USED.format(what=what, name=name))


def _name(parameter: Any, model: nn.Module) -> str | None:
    return next((name for name, one in model.named_parameters() if one is parameter), None)


class ShardAccess(TorchFunctionMode):
    """Inside, a script cannot use released weights of ``model``.

    Args:
        model: the model.
        at_exit: called at the end, if there was no error.
        gradients: refuse ``parameter.grad``, too.
    """

    def __init__(self, model: nn.Module, at_exit: Callable[[], Any] = int, gradients: bool = False) -> None:
        super().__init__()
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


class ReleasedParameter(nn.Parameter):
    """The class of a parameter while ZeRO 3 has released its data: a script gets its whole sizes, and no values.

    It is not looked at while it is whole, so that a pass costs nothing but the change of the class.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OFTEN:
            return _disabled_torch_function_impl(func, types, args, kwargs or {})
        name, kwargs = func.__name__, kwargs or {}
        name = func.__self__.__name__ if name in ("__get__", "__set__") else name
        with DisableTorchFunctionSubclass():
            if name in _SIZES and is_released(args[0]) and called_by_script(1):
                return func(torch.empty(args[0].ds_shape, dtype=args[0].dtype, device="meta"), *args[1:], **kwargs)
            if name not in _LOOKS:
                first = args[0] if args and isinstance(args[0], (list, tuple)) else ()
                refuse_released(name, (*args, *first))
                if func == _SET_DATA and type(args[0]) is ReleasedParameter:  # it is gathered
                    args[0].__class__ = nn.Parameter  # type: ignore[assignment]
            return func(*args, **kwargs)


def watch_released(model: nn.Module) -> None:
    """Refuse that a script uses weights of ``model`` that ZeRO 3 has released, wherever it does and in whatever step.

    Compiled models are not watched: they would be compiled twice.
    """
    from deepspeed.runtime.zero import partition_parameters as library

    if is_compiled(model):
        return
    if not hasattr(library.free_param, "theirs"):
        library.free_param = _freeing(library.free_param)
    for name, parameter in model.named_parameters():
        if type(parameter) is nn.Parameter:
            vars(parameter)[_NAME] = name
            if is_released(parameter):
                parameter.__class__ = ReleasedParameter


def _freeing(theirs: Callable[[Any], None]) -> Callable[[Any], None]:
    def free_param(param: Any) -> None:
        theirs(param)
        if type(param) is nn.Parameter and _NAME in vars(param):
            param.__class__ = ReleasedParameter

    free_param.theirs = theirs  # type: ignore[attr-defined]
    return free_param


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
