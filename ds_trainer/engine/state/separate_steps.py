"""Steps an optimizer without the parameters that have no gradient, as PyTorch does, on DeepSpeed's flat partitions.

PyTorch's optimizers pass over a parameter whose gradient is None: no weight decay, no momentum, and its step counter
stays. ZeRO steps one tensor that holds many parameters, with one counter, and zeros as gradients of unused parameters.
Here the optimizer gets views of that tensor instead: neighboring fragments that were used in the same steps, each with
views of the moments and a counter of its own. A tensor whose parameters were used in every step is stepped whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ds_trainer.engine.state.flat_partitions import FlatPartition, History, UnknownState, flat_partitions


class SeparateSteps:
    """Steps the optimizers of one engine.

    Args:
        engine: DeepSpeed's engine.
        tp_rank: the tensor-parallel rank.

    Attributes:
        needed: some parameters were used in other steps than their neighbors.
        optimizer_name: class of the optimizer.
        inexact: names of parameters whose moments advance in steps without them: their optimizer keeps moments in
            another shape than the parameter's.
    """

    def __init__(self, engine: Any, tp_rank: int) -> None:
        self._engine = engine
        self._tp_rank = tp_rank
        self.optimizer_name = type(engine.basic_optimizer).__name__
        self.needed = False
        self.inexact: set[str] = set()

    def restored(self) -> None:
        """The state of the optimizer was replaced."""
        try:
            partitions = flat_partitions(self._engine, self._tp_rank)
        except UnknownState:
            return
        self.needed = any(partition.histories is not None for partition in partitions)

    @contextmanager
    def without(self, unused: Callable[[], Collection[int]]) -> Iterator[None]:
        """Inside, the optimizers step without some parameters.

        Args:
            unused: returns the ``id`` of these parameters; called when an optimizer steps.
        """
        try:
            partitions = flat_partitions(self._engine, self._tp_rank)
        except UnknownState:  # a step of another kind (ZenFlow)
            yield
            return
        by_tensor = {id(partition.tensor): partition for partition in partitions}
        optimizers: dict[int, Any] = {id(partition.optimizer): partition.optimizer for partition in partitions}
        originals = {key: vars(optimizer).get("step") for key, optimizer in optimizers.items()}
        for optimizer in optimizers.values():
            optimizer.step = _Stepper(optimizer, by_tensor, unused, self.inexact)
        try:
            yield
        finally:
            for key, optimizer in optimizers.items():
                if originals[key] is None:
                    del optimizer.step
                else:
                    optimizer.step = originals[key]
            self.needed = self.needed or any(partition.histories is not None for partition in partitions)


class _Stepper:
    """Takes the place of ``optimizer.step``."""

    def __init__(
        self,
        optimizer: Any,
        partitions: dict[int, FlatPartition],
        unused: Callable[[], Collection[int]],
        inexact: set[str],
    ) -> None:
        self._optimizer = optimizer
        self._step = optimizer.step
        self._partitions = partitions
        self._unused = unused
        self._inexact = inexact

    @torch.no_grad()
    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if args or keywords:  # gradients are passed: a fused LAMB without ZeRO
            return self._step(*args, **keywords)
        unused, groups = self._unused(), self._optimizer.param_groups
        originals = [group["params"] for group in groups]
        whole: list[list[Any]] = [[] for _ in groups]
        views: list[list[_View]] = [[] for _ in groups]
        held: list[_Held] = []
        idle: list[tuple[Any, Any]] = []  # tensors without a gradient now, and their gradients
        for index, tensors in enumerate(originals):
            for tensor in tensors:
                partition = self._partitions.get(id(tensor))
                used = [] if partition is None else [id(f.parameter) not in unused for f in partition.fragments]
                if partition is None or (all(used) and partition.histories is None):
                    whole[index].append(tensor)
                elif not any(used):
                    idle.append((tensor, tensor.grad))
                    whole[index].append(tensor)
                elif partition.histories is None and not _separable(partition):
                    held.append(_Held(partition, used))
                    whole[index].append(tensor)
                else:
                    views[index] += _views(partition, used)
        for tensor, _ in idle:
            tensor.grad = None
        try:
            for turn, history in enumerate(self._turns(views)):
                for index, group in enumerate(groups):
                    now = [view.enter() for view in views[index] if history in (None, view.history)]
                    group["params"] = now + (whole[index] if turn == 0 else [])
                self._step()
        finally:
            for group, tensors in zip(groups, originals, strict=True):
                group["params"] = tensors
            for tensor, gradient in idle:
                tensor.grad = gradient
        for view in (one for of_group in views for one in of_group):
            view.leave()
        for one in held:
            self._inexact.update(one.restore())
        return None

    def _turns(self, views: list[list[_View]]) -> list[History | None]:
        """Which views to step together; None for all: DeepSpeed's fused optimizers have one counter in a call."""
        if not type(self._optimizer).__module__.startswith("deepspeed."):
            return [None]
        histories = list(dict.fromkeys(view.history for of_group in views for view in of_group))
        return [*histories] or [None]


def _separable(partition: FlatPartition) -> bool:
    """Whether all states are one number per element or per tensor, so that a fragment can have its own."""
    if partition.group.get("use_muon") or not partition.states:
        return False
    return all(_is_elementwise(partition.tensor, value) or _is_scalar(value) for value in partition.states.values())


def _is_elementwise(tensor: torch.Tensor, value: Any) -> bool:
    return type(value) is torch.Tensor and value.shape == tensor.shape


def _is_scalar(value: Any) -> bool:
    return (not isinstance(value, torch.Tensor) and isinstance(value, (type(None), bool, int, float, str))) or (
        type(value) is torch.Tensor and value.dim() == 0
    )


def _copied(scalars: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in scalars.items()}


def _scalars_of(partition: FlatPartition) -> dict[str, Any]:
    return {key: value for key, value in partition.states.items() if _is_scalar(value)}


class _Held:
    """A partition that is stepped whole: the fragments that the step does not use get their weights back.

    It has no states yet, or some that cannot be divided.
    """

    def __init__(self, partition: FlatPartition, used: list[bool]) -> None:
        self._partition = partition
        self._used = used
        self._first = not partition.states
        self._kept = [(part, part.clone()) for part in self._parts(partition.tensor.detach())]

    def _parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        fragments = zip(self._partition.fragments, self._used, strict=True)
        return [flat[f.offset : f.offset + len(f.slice)] for f, is_used in fragments if not is_used]

    def restore(self) -> list[str]:
        """After the step; returns the names of parameters whose states have changed."""
        for part, value in self._kept:
            part.copy_(value)
        partition = self._partition
        if not partition.states:  # the optimizer has none
            return []
        if not (self._first and _separable(partition)):
            return [f.name for f, used in zip(partition.fragments, self._used, strict=True) if not used]
        for value in partition.states.values():
            if _is_elementwise(partition.tensor, value):
                for part in self._parts(value):
                    part.zero_()
        used, unused = History(_scalars_of(partition), True), History({}, False)
        partition.histories = [used if is_used else unused for is_used in self._used]
        return []


def _views(partition: FlatPartition, used: list[bool]) -> list[_View]:
    """The views to step: one for neighboring fragments with the same history."""
    histories = partition.histories
    if histories is None:
        histories = [History(_scalars_of(partition), True)] * len(used)
    # The histories of fragments after a step: those that it used part from those that it did not.
    idle = {id(one) for one, is_used in zip(histories, used, strict=True) if not is_used}
    new: dict[int, History] = {}
    for one in histories:
        if id(one) in idle and id(one) not in new:
            new[id(one)] = History(_copied(one.scalars), one.began)
    partition.histories = histories = [
        new.get(id(one), one) if is_used else one for one, is_used in zip(histories, used, strict=True)
    ]
    views: list[_View] = []
    for fragment, history, is_used in zip(partition.fragments, histories, used, strict=True):
        if not is_used:
            continue
        start, stop = fragment.offset, fragment.offset + len(fragment.slice)
        if views and views[-1].history is history and views[-1].stop == start:
            views[-1].stop = stop
        else:
            views.append(_View(partition, history, start, stop))
    return views


class _View:
    """Elements ``[start, stop)`` of a partition, as a tensor that an optimizer steps."""

    def __init__(self, partition: FlatPartition, history: History, start: int, stop: int) -> None:
        self._partition = partition
        self.history = history
        self.start, self.stop = start, stop

    def enter(self) -> torch.Tensor:
        """The tensor; its states are in the optimizer until :meth:`leave`."""
        partition, part = self._partition, slice(self.start, self.stop)
        flat, gradient = partition.tensor, partition.tensor.grad
        self._tensor = flat.detach()[part].requires_grad_(flat.requires_grad)
        self._tensor.grad = None if gradient is None else gradient[part]
        if self.history.began:
            parts = {k: v[part] for k, v in partition.states.items() if _is_elementwise(flat, v)}
            partition.optimizer.state[self._tensor] = {**parts, **_copied(self.history.scalars)}
        return self._tensor

    def leave(self) -> None:
        """Keeps the new states. Those of a tensor that had none before, or that the optimizer replaced, are copied."""
        partition, part = self._partition, slice(self.start, self.stop)
        states = partition.optimizer.state.pop(self._tensor, {})
        for key, value in states.items():
            if _is_elementwise(self._tensor, value):
                kept = partition.states[key][part]
                if kept.data_ptr() != value.data_ptr():
                    kept.copy_(value)
        scalars = {key: value for key, value in states.items() if _is_scalar(value)}
        self.history.scalars, self.history.began = scalars, True
        partition.states.update(_copied(scalars))
