"""Builds models whose parameters take no memory: parameters are on the meta device, buffers are real."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from ds_trainer.engine.loading.construction_record import ConstructionRecorder
from ds_trainer.utils.errors import ConfigError

Model = TypeVar("Model", bound=nn.Module)


def empty_model(build: Callable[[], Model], recorded: bool = True) -> Model:
    """Builds a model with all parameters on meta and all buffers as the constructor computes them.

    Modules that initialize themselves in their constructor, as torch modules do, draw no random numbers, because
    their parameters are already on meta. Weights that the constructor ties stay tied.

    Args:
        build: builds the model on the CPU, such as ``lambda: Model(config)``.
        recorded: record how the constructor initializes the parameters, for
            :class:`~ds_trainer.engine.loading.new_weights.NewWeights`. If files contain all weights,
            False is faster.

    Raises:
        ConfigError: the constructor reads values of a parameter, which do not exist.
    """
    with _meta_errors_explained(), empty_parameters(recorded):
        model = build()
    # A tensor on meta that is neither parameter nor buffer was computed from a parameter.
    computed = [
        f"{type(module).__name__}.{key}"
        for module in model.modules()
        for key, value in vars(module).items()
        if isinstance(value, torch.Tensor) and value.is_meta
    ]
    if computed:
        raise ConfigError(
            f"The constructor computes {', '.join(sorted(set(computed)))} from parameters, which have no values when a "
            f"model is built without its weights. {_REMEDY}"
        )
    return model


@contextmanager
def empty_parameters(recorded: bool = True) -> Iterator[None]:
    """Moves every parameter to the meta device when a module registers it.

    Unlike in accelerate's ``init_empty_weights``, a parameter that is registered twice stays one parameter and keeps
    its attributes, and a large one takes no memory even before it is registered.
    """
    register = nn.Module.register_parameter
    recorder = ConstructionRecorder() if recorded else None
    large = LazyLargeTensors()
    empty = WeakIdKeyDictionary()

    def register_empty(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            if param not in empty:
                data = torch.empty_like(param.detach(), device="meta")
                on_meta = type(param)(data, requires_grad=param.requires_grad)
                on_meta.__dict__.update(param.__dict__)
                empty[param] = on_meta
                if recorder is not None:
                    recorder.register(param, empty[param])
            param = empty[param]
        register(module, name, param)

    nn.Module.register_parameter = register_empty  # type: ignore[assignment, method-assign]
    try:
        with large, recorder or nullcontext():
            yield
        large.fill()
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def _meta_errors_explained() -> Iterator[None]:
    """Converts torch's errors about meta tensors to a ConfigError that names the line of the constructor."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        if "meta" not in str(error).casefold():
            raise
        reader, trace = "the model", error.__traceback__
        while trace is not None:
            owner = trace.tb_frame.f_locals.get("self")
            if isinstance(owner, nn.Module):
                location = f"{Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno}"
                reader = f"{type(owner).__name__} ({location})"
            trace = trace.tb_next
        raise ConfigError(
            f"The constructor of {reader} reads values of a parameter, which do not exist when a model is built "
            f"without its weights ({' '.join(str(error).split())[:120]}). {_REMEDY}"
        ) from error


_REMEDY = (
    "Load the model with its weights (`ModelClass.from_pretrained(...)`, or its constructor) and pass the model itself "
    "to the Trainer."
)


# Defers the memory of large tensors that a constructor creates until they are read or written.


LARGE_BYTES = 2**28
"""Minimum size of a large tensor; a constructor holds only one smaller tensor at a time."""

_aten = torch.ops.aten
_Fill = Callable[[torch.Tensor], Any]


def _ones(*_: Any) -> _Fill:
    return partial(torch.Tensor.fill_, value=1)


def _zeros(*_: Any) -> None:
    """Fresh pages contain zeros."""


def _uniform(*_: Any) -> _Fill:
    return torch.Tensor.uniform_


def _normal(*_: Any) -> _Fill:
    return torch.Tensor.normal_


def _value(args: Any) -> _Fill:
    return lambda tensor: tensor.fill_(args[-1])


# For each factory: the index of its size argument, and the function that fills the tensor.
_FACTORIES: dict[Any, tuple[int, Callable[..., _Fill | None]]] = {
    **dict.fromkeys((_aten.empty, _aten.zeros, _aten.empty_like, _aten.zeros_like), (0, _zeros)),
    **dict.fromkeys((_aten.new_empty, _aten.new_zeros), (1, _zeros)),
    **dict.fromkeys((_aten.ones, _aten.ones_like), (0, _ones)),
    **dict.fromkeys((_aten.full, _aten.full_like), (0, _value)),
    **dict.fromkeys((_aten.rand, _aten.rand_like), (0, _uniform)),
    **dict.fromkeys((_aten.randn, _aten.randn_like), (0, _normal)),
    _aten.new_ones: (1, _ones),
    _aten.new_full: (1, _value),
}


class LazyLargeTensors(TorchDispatchMode):
    """Creates large tensors (``torch.empty``, ``zeros``, ``ones``, ``full``, ``rand``, ``randn`` ...) lazily.

    A large new tensor only reserves address space, without committing memory; the first operation on its values fills
    it. One stack of experts can exceed the memory of a host that is sized for shards. A parameter that moves to the
    meta device is never filled. Buffers are filled when they are used.
    """

    def __init__(self) -> None:
        super().__init__()
        # While a weak reference exists, its storage address is not reused.
        self._unfilled: dict[int, tuple[StorageWeakRef, torch.dtype, _Fill]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        factory = _FACTORIES.get(func.overloadpacket)
        if factory is not None:
            made = self._reserved(func, args, kwargs, *factory)
            return func(*args, **kwargs) if made is None else made
        if self._unfilled and not func.is_view and func.overloadpacket is not _aten.detach:
            self.fill(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        return func(*args, **kwargs)

    def fill(self, tensors: Any = None) -> None:
        """Fill those of ``tensors`` that are not filled yet; None: all that still exist."""
        if tensors is None:
            self._unfilled = {key: entry for key, entry in self._unfilled.items() if not entry[0].expired()}
            storages = {key: torch.UntypedStorage._new_with_weak_ptr(key) for key in self._unfilled}
        else:
            storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        for key, storage in storages.items():
            if key in self._unfilled:
                _, dtype, fill = self._unfilled.pop(key)
                fill(torch.empty(0, dtype=dtype).set_(storage))

    def _reserved(
        self, func: Any, args: Any, kwargs: Any, size_at: int, filling: Callable[..., _Fill | None]
    ) -> torch.Tensor | None:
        size = args[size_at] if len(args) > size_at else ()
        numel = size.numel() if isinstance(size, torch.Tensor) else torch.Size(size).numel()
        if numel * 16 < LARGE_BYTES or kwargs.get("pin_memory") or kwargs.get("generator") is not None:
            return None
        device = kwargs.get("device") or (args[0].device if isinstance(args[0], torch.Tensor) else "cpu")
        if torch.device(device).type != "cpu":
            return None
        like = func(*args, **{**kwargs, "device": "meta"})
        if numel * like.dtype.itemsize < LARGE_BYTES:
            return None
        no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux value; defined by Python since 3.13
        memory = mmap.mmap(-1, numel * like.dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
        made = torch.frombuffer(memory, dtype=like.dtype).as_strided(like.shape, like.stride())
        if (fill := filling(args)) is not None:
            storage = made.untyped_storage()
            self._unfilled[storage._cdata] = (StorageWeakRef(storage), like.dtype, fill)
        return made
