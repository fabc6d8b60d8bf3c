"""Records the operations by which a model initializes each of its tensors.

The calls run once on meta tensors, which costs nothing. Their operations are recorded, to be repeated on any shard of a
tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_trainer.engine.loading.initialization import (
    Initializer,
    all_tensors,
    global_generator_unchanged,
    initializers,
    marked_uninitialized,
    untied,
)
from ds_trainer.engine.loading.initialization_steps import ComputedStep, Region, Step, TensorRecord

aten = torch.ops.aten
_IS_META: Any = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]

_RANDOM = {
    aten.normal_,
    aten.uniform_,
    aten.exponential_,
    aten.log_normal_,
    aten.cauchy_,
    aten.geometric_,
}
_CONSTANT = {aten.zero_, aten.fill_}
_OVERWRITING = {*_RANDOM, *_CONSTANT, aten.copy_}
_ELEMENTWISE = {
    *(aten.add_, aten.sub_, aten.mul_, aten.div_, aten.pow_, aten.clamp_, aten.clamp_min_, aten.clamp_max_),
    *(aten.erf_, aten.erfinv_, aten.exp_, aten.expm1_, aten.log_, aten.log1p_, aten.log2_, aten.sqrt_, aten.rsqrt_),
    *(aten.neg_, aten.abs_, aten.reciprocal_, aten.square_, aten.tanh_, aten.sigmoid_, aten.floor_, aten.round_),
    *(aten.sin_, aten.cos_, aten.sign_, aten.trunc_, aten.ceil_),
}
_KINDS: dict[Any, str] = {
    **dict.fromkeys(_RANDOM, "random"),
    **dict.fromkeys(_CONSTANT, "constant"),
    **dict.fromkeys(_ELEMENTWISE, "elementwise"),
}


@dataclass
class InitializationRecord:
    """The recorded operations by tensor name, and the tensors that each call reads or writes."""

    tensors: dict[str, TensorRecord]
    calls: list[tuple[Initializer, set[str]]] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)


def record_initialization(model: nn.Module, names: Mapping[str, torch.Tensor]) -> InitializationRecord:
    """Records how ``model`` initializes the tensors ``names``, which are on meta.

    The model does not change: its other tensors keep their values.
    """
    wanted = {storage_of(tensor) for tensor in names.values()}
    recorder = InitializationRecorder(
        names, [tensor for tensor in all_tensors(model) if storage_of(tensor) not in wanted]
    )
    record = InitializationRecord(recorder.tensors)
    with untied(model), marked_uninitialized(model), torch.no_grad(), global_generator_unchanged():
        for initializer in initializers(model):
            recorder.start_call()
            with _tensors_restored(initializer.module) as replaced:
                try:
                    with recorder:
                        initializer.call()
                except Exception as error:
                    # Its effect is unknown; unless a later call overwrites it, the call is repeated on real tensors.
                    broken = recorder.unknown(all_tensors(initializer.module))
                    record.errors |= dict.fromkeys(broken, f"{initializer.description}: {error}")
            recorder.unknown(replaced)
            if recorder.touched:
                record.calls.append((initializer, recorder.touched))
    return record


@contextmanager
def _tensors_restored(module: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Restores replaced parameters and buffers after the block; yields the list of those that were replaced."""
    before = [(tensors, dict(tensors)) for tensors in (module._parameters, module._buffers)]
    replaced: list[torch.Tensor] = []
    yield replaced
    for tensors, old in before:
        for key, tensor in old.items():
            if tensor is not None and tensors.get(key) is not tensor:
                replaced.append(tensor)
                tensors[key] = tensor  # type: ignore[assignment]


class KeepValues(TorchDispatchMode):
    """Skips operations that would write to one of the given tensors, whose values are already set."""

    def __init__(self, protected: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._kept = {storage_of(tensor): tensor for tensor in protected}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = _written(func, args, kwargs or {})
        if any(storage_of(tensor) in self._kept for tensor in written):
            return written[0] if len(written) == 1 else tuple(written)
        return self.execute(func, args, kwargs or {}, written)

    def execute(self, func: Any, args: Any, kwargs: Any, written: list[torch.Tensor]) -> Any:
        """Run the operation, which writes to the tensors ``written``."""
        return func(*args, **kwargs)


class _NotOnMeta(TorchFunctionMode):
    """Makes ``is_meta`` False: some functions of ``torch.nn.init`` do nothing on meta tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _IS_META:
            return False
        return func(*args, **(kwargs or {}))


class InitializationRecorder(KeepValues):
    """Records the operations on ``tensors``, which are on meta; the tensors ``protected`` keep their values.

    Attributes:
        tensors: the records by name.
        touched: names of the tensors that were read or written since :meth:`start_call`.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], protected: Iterable[torch.Tensor] = ()) -> None:
        super().__init__(protected)
        self.tensors: dict[str, TensorRecord] = {}
        self.touched: set[str] = set()
        self._names: dict[int, str] = {}
        # The sources of other tensors. While a weak reference exists, its storage address is not reused.
        self._temporary: dict[int, tuple[StorageWeakRef, frozenset[str | int]]] = {}
        self._draws = 0
        self._not_on_meta = _NotOnMeta()
        for name, tensor in tensors.items():
            self.tensors[name] = TensorRecord(tensor.dtype, tensor.numel())
            self._names[storage_of(tensor)] = name

    def __enter__(self) -> InitializationRecorder:
        # On meta, torch draws no truncated normal values; elsewhere it redraws until all fit. Recorded as one step.
        self._truncated_normal = nn.init._no_grad_trunc_normal_
        nn.init._no_grad_trunc_normal_ = self._record_truncated_normal
        self._not_on_meta.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._not_on_meta.__exit__(*error)
        nn.init._no_grad_trunc_normal_ = self._truncated_normal

    def execute(self, func: Any, args: Any, kwargs: Any, written: list[torch.Tensor]) -> Any:
        """Execute an operation on meta tensors and record it."""
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self.touched |= {self._names[storage_of(item)] for item in inputs if storage_of(item) in self._names}
        step = self._step(func, args, kwargs)
        if step is not None:
            self._add(self._names[storage_of(args[0])], step)
            return args[0]
        if func.overloadpacket in _OVERWRITING and _is_whole_storage(inputs[0]):
            inputs = inputs[1:]
        sources = frozenset[str | int]().union(*(self.sources_of(tensor) for tensor in inputs))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._draws += 1
            sources |= {self._draws}
        output = func(*args, **kwargs)
        for tensor in written:
            if (name := self._names.get(storage_of(tensor))) is not None:
                self.tensors[name].steps.append(ComputedStep(sources | {name}))
            self.set_sources(tensor, sources)
        for tensor in tree_leaves(output) if sources else ():
            self.set_sources(tensor, sources)
        return output

    def start_call(self) -> None:
        """Reset the state of the previous call."""
        self.touched = set()
        self._temporary = {}

    def unknown(self, tensors: Iterable[torch.Tensor]) -> set[str]:
        """Mark tensors whose operations are unknown; returns their names."""
        storages = {storage_of(tensor) for tensor in tensors}
        names = {self._names[storage] for storage in storages if storage in self._names}
        for name in names:
            self.tensors[name].steps.append(ComputedStep(frozenset(names)))
        self.touched |= names
        return names

    def _record_truncated_normal(
        self,
        tensor: torch.Tensor,
        mean: float,
        std: float,
        a: float,
        b: float,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        name = self._names.get(storage_of(tensor))
        if name is None or generator is not None:
            return self._truncated_normal(tensor, mean, std, a, b, generator=generator)
        self.touched.add(name)
        view = self._view(name, tensor)
        computed = ComputedStep(frozenset({name}))
        self._add(
            name, computed if view is None else Step("random", nn.init.trunc_normal_, (mean, std, a, b), {}, view)
        )
        return tensor

    def _add(self, name: str, step: Step | ComputedStep) -> None:
        record = self.tensors[name]
        if isinstance(step, Step) and step.kind != "elementwise":
            if step.view.size is None:
                record.steps.clear()
            elif step.view.has_holes and not record.initialized:
                step = ComputedStep(frozenset({name}))
        record.steps.append(step)

    def sources_of(self, tensor: torch.Tensor) -> frozenset[str | int]:
        """Returns the sources of its values: names of recorded tensors, and numbers of random draws."""
        storage = storage_of(tensor)
        if storage in self._names:
            return frozenset({self._names[storage]})
        return self._temporary[storage][1] if storage in self._temporary else frozenset()

    def set_sources(self, tensor: Any, sources: frozenset[str | int]) -> None:
        """Record what the values of a tensor that is no parameter were computed from."""
        if isinstance(tensor, torch.Tensor) and storage_of(tensor) not in self._names:
            self._temporary[storage_of(tensor)] = (StorageWeakRef(tensor.untyped_storage()), sources)

    def _view(self, name: str, tensor: torch.Tensor) -> Region | None:
        """Returns the elements of the whole tensor that a view covers; None if :class:`Region` cannot express them."""
        dims = [dim for dim in zip(tensor.shape, tensor.stride(), strict=True) if dim[0] != 1]
        inner = 0
        for size, stride in sorted(dims, key=lambda dim: dim[1]):
            if stride <= inner:
                return None
            inner += (size - 1) * stride
        if tensor.numel() == self.tensors[name].numel:
            return Region()
        return Region(
            tuple(size for size, _ in dims), tuple(stride for _, stride in dims), int(tensor.storage_offset())
        )

    def _step(self, func: Any, args: Any, kwargs: Any) -> Step | None:
        """Returns the operation as an elementwise step on a recorded tensor; None for any other operation."""
        packet = func.overloadpacket
        if packet not in _KINDS and packet is not aten.copy_:
            return None
        name = self._names.get(storage_of(args[0]))
        if name is None or args[0].dtype != self.tensors[name].dtype or kwargs.get("generator") is not None:
            return None
        if packet in (aten.copy_, aten.fill_) and isinstance(value := args[1], torch.Tensor):
            # A scalar given as a tensor, as in ``fill_(torch.tensor(1.0))``.
            if value.numel() != 1 or value.device.type == "meta" or self.sources_of(value):
                return None
            func, packet, args, kwargs = aten.fill_.Scalar, aten.fill_, (args[0], value.item()), {}
        if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((args[1:], kwargs))):
            return None
        view = self._view(name, args[0])
        return None if view is None else Step(_KINDS[packet], func, tuple(args[1:]), dict(kwargs), view)


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Returns the arguments that the operation writes to."""
    schema = func._schema
    if not schema.is_mutable:
        return []
    written = []
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return written


def _is_whole_storage(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def storage_of(tensor: torch.Tensor) -> int:
    """Returns the storage id, which views of one tensor and tied weights share."""
    return tensor.untyped_storage()._cdata


def groups_of_computed(record: InitializationRecord) -> dict[str, frozenset[str]]:
    """Groups tensors that are computed from each other or from the same random draws, to compute them together."""
    sources = {
        name: frozenset[str | int]().union(*(step.sources for step in tensor.steps if isinstance(step, ComputedStep)))
        for name, tensor in record.tensors.items()
        if tensor.computed
    }
    groups: list[set[str | int]] = []
    for name, found in sources.items():
        joined = {name, *found}
        apart = []
        for group in groups:
            if joined & group:
                joined |= group
            else:
                apart.append(group)
        groups = [*apart, joined]
    return {
        name: frozenset(names)
        for group in groups
        for names in [[item for item in group if isinstance(item, str)]]
        for name in names
    }
