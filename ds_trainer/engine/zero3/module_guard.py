"""``ModuleGuard``: raises an error if ranks are about to run different modules under ZeRO-3, instead of a hang.

ZeRO-3 gathers the parameters of a module when it is called, and reduces gradients in the order in which they arrive.
Both need all ranks. A rank whose micro-batch skips a module (no images for the vision tower) enters a different gather:
the ranks hang or, if sizes are equal, silently receive parameters of different modules.

The guard observes every module before its gather and every gradient before its reduction, forward and backward:

* At a point with only one known continuation, nothing is sent. This is the steady state.
* In the first pass, an all-reduce of two numbers before each gather compares the ranks' events since the previous one.
  The same happens at points where all ranks together have continued in several ways.
* A rank that is about to run something new at a known point detects this before its gather, and queries the others
  (:mod:`ds_trainer.engine.zero3.deviations`). Text-only micro-batches on all ranks are valid.

So no rank ever enters a gather that the others do not enter.
"""

from __future__ import annotations

import itertools
import threading
import zlib
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from ds_trainer.engine.zero3.deviations import Deviations
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import listed

_END, _REDUCED = 0, 1
_FIRST = 2  # from here on, modules have even numbers and gradients odd ones
_guards = itertools.count()

_REMEDY = (
    "ZeRO-3 gathers the parameters of a module on all ranks together, so in each micro-batch all ranks must call the "
    "same modules. Give every micro-batch an input for that module (for images: a blank one, whose features are "
    "multiplied by zero), or train with zero_stage=2, which needs no such thing. Experts that are modules of their own "
    "belong in a ZeRO-3 leaf module (zero_optimization.leaf_module in the DeepSpeed configuration)."
)


LONGEST = 1_000_000
"""Maximum number of nodes. The tree of a model that takes a new path each time (LayerDrop) is reset at this size."""


class ModulesDiffer(RuntimeError):
    """Ranks are about to run different modules under ZeRO-3. The text names ranks, modules, micro-batch and remedy."""


def guard_modules(engine: Any) -> ModuleGuard | None:
    """Returns a guard of DeepSpeed's ``engine``; None if the engine does not gather parameters from other ranks."""
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    if not isinstance(offload, DeepSpeedZeRoOffload) or distributed.group_size(offload.dp_process_group) == 1:
        return None
    return ModuleGuard(engine, offload)


class ModuleGuard:
    """Guards one engine until :meth:`close`.

    Args:
        engine: DeepSpeed's engine with ZeRO-3, for training or evaluation.
        offload: DeepSpeed's object that gathers its parameters.

    Attributes:
        step, micro_batch: current step and micro-batch, counted from 1; for messages.
    """

    def __init__(self, engine: Any, offload: Any) -> None:
        self._module: nn.Module = engine.module
        self._group: Any = offload.dp_process_group
        self._device = distributed.collective_device()
        self._paths = ModulePaths()
        self._reached = self._paths.node  # where a micro-batch that begins anew was interrupted
        self._new: list[int] = []  # events that the ranks have not compared yet
        self._passes = 0
        # What the current micro-batch has done so far, in passes and events, and what is left of it to be done again.
        self._begun = self._events = self._begins_again = self._events_again = 0
        self._closed = False
        self._inputs: tuple[str, ...] = ()
        self._lock = threading.Lock()  # a leaf module's hooks may run in several threads of the backward pass
        self.step = self.micro_batch = 0
        ranks = torch.distributed.get_process_group_ranks(self._group)
        name = f"ds_trainer/modules/{next(_guards)}/{ranks[0]}"
        self._deviations = Deviations(name, len(ranks), self._position, self._describe)
        begin = torch.compiler.disable(self._begin)  # torch compiles a module together with its hooks
        self._hook = self._module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
        # Removed together with DeepSpeed's hooks when all weights are gathered: then ranks may run different modules.
        offload.forward_hooks.append(self._hook)
        self._watch_gathers(offload.get_param_coordinator())
        if offload is not engine.optimizer:
            self._watch_reductions(engine.optimizer)

    def close(self) -> None:
        """Stops guarding."""
        self._deviations.close()
        self._hook.remove()
        self._closed = True

    def begin_micro_batch(self) -> None:
        """Called before a micro-batch that may be begun anew."""
        self._begun, self._events = 0, -self._paths.node.depth

    def restart_micro_batch(self) -> None:
        """The micro-batch begins anew on this rank alone: what the ranks have compared is not compared again."""
        self._begins_again, self._events_again = self._begun, self._events + self._paths.node.depth
        if self._events_again:
            self._reached, self._paths.node = self._paths.node, Node()

    # -- what happens -------------------------------------------------------------------------------------------------

    # These run for each module and each gradient of every micro-batch: what is known costs one comparison.

    def _watch_gathers(self, coordinator: Any) -> None:
        prologue, paths, lock = coordinator.trace_prologue, self._paths, self._lock

        def watched(module: Any) -> None:
            event = _FIRST + 2 * module.ds_id
            with lock:
                node = paths.node
                if node.only == event:
                    paths.node = node.then
                else:
                    self._agree(event, module)
            prologue(module)

        coordinator.trace_prologue = watched

    def _watch_reductions(self, optimizer: Any) -> None:
        reduce, finish, paths, lock = (
            optimizer.reduce_ready_partitions_and_remove_grads,
            optimizer.overlapping_partition_gradients_reduce_epilogue,
            self._paths,
            self._lock,
        )

        def reduced(parameter: Any) -> None:
            event = _FIRST + 1 + 2 * parameter.ds_id
            with lock:
                node = paths.node
                if node.only == event:
                    paths.node = node.then
                else:
                    self._agree(event)
            reduce(parameter)

        def finished() -> None:
            self._follow(_REDUCED)
            finish()

        optimizer.reduce_ready_partitions_and_remove_grads = reduced
        optimizer.overlapping_partition_gradients_reduce_epilogue = finished

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._passes > self._begins_again:
            self._follow(_END)
        if self._begins_again:
            self._begins_again -= 1
            return
        self._inputs = tuple(name for name, value in kwargs.items() if value is not None)
        self._passes += 1
        self._begun += 1
        self._events += self._paths.node.depth
        self._paths.begin((module.training, torch.is_grad_enabled()))

    def _follow(self, event: int) -> None:
        with self._lock:
            if self._paths.node.only == event:
                self._paths.node = self._paths.node.then
            else:
                self._agree(event)

    # -- an event that no earlier pass had ----------------------------------------------------------------------------

    def _agree(self, event: int, module: nn.Module | None = None) -> None:
        """Verifies that all ranks continue with ``event``, before a gather or reduction.

        Raises:
            ModulesDiffer: they do not.
        """
        if self._closed:
            return
        if self._events_again:
            self._events_again -= 1
            if not self._events_again:
                self._paths.node = self._reached
            return
        known = self._paths.node.known
        if len(known) == 1:
            other = self._deviations.ask(self._position(), event)
            if other is not None:
                does = other.get("event", next(iter(known)))
                self._raise([(self._describe(), event), (other, does)])
        else:
            self._new.append(event)
            # Events without a gather can be compared later.
            if known or module is None or _gathers(module):
                self._compare()
        self._paths.take(event)

    def _compare(self) -> None:
        """Compares the ranks' events since the last comparison. Collective; synchronizes the device."""
        checksum = zlib.crc32(repr(self._new).encode())
        maxima = torch.tensor([checksum, -checksum], device=self._device)
        # Not DeepSpeed's function, whose calls an interrupted micro-batch counts.
        torch.distributed.all_reduce(maxima, op=torch.distributed.ReduceOp.MAX, group=self._group)
        if maxima.tolist() != [checksum, -checksum]:
            reports: list[Any] = [None] * distributed.group_size(self._group)
            torch.distributed.all_gather_object(reports, (self._describe(), self._new), group=self._group)
            first = next(i for i in itertools.count() if len({tuple(new[i : i + 1]) for _, new in reports}) > 1)
            different: dict[int, dict[str, Any]] = {}  # one rank for each continuation
            for rank, new in reports:
                different.setdefault(new[first] if first < len(new) else _END, rank)
            self._raise([(rank, event) for event, rank in different.items()])
        self._new.clear()

    # -- the error ----------------------------------------------------------------------------------------------------

    def _position(self) -> tuple[int, int]:
        return self._passes, self._paths.node.depth

    def _describe(self) -> dict[str, Any]:
        return {"rank": distributed.rank(), "inputs": list(self._inputs)}

    def _raise(self, events: list[tuple[dict[str, Any], int]]) -> None:
        where = f"optimizer step {self.step}, micro-batch {self.micro_batch}" if self._module.training else "evaluation"
        events = sorted(events, key=lambda entry: entry[0]["rank"])
        actions = listed((f"rank {one['rank']} {self._name(event)}" for one, event in events), 8, "; ")
        named = (f"rank {one['rank']}: {', '.join(one['inputs']) or 'positional'}" for one, _ in events)
        inputs = listed(named, 8, "; ")
        raise ModulesDiffer(
            f"Ranks are about to run different modules under ZeRO-3 ({where}): {actions}. Inputs of their "
            f"micro-batches: {inputs}. {_REMEDY}"
        )

    def _name(self, event: int) -> str:
        if event < _FIRST:
            return "ends its pass" if event == _END else "ends its backward pass"
        number, is_gradient = divmod(event - _FIRST, 2)
        if is_gradient:
            owners: Any = self._module.named_parameters()
        else:
            owners = self._module.named_modules()
        name = next((name for name, owner in owners if getattr(owner, "ds_id", None) == number), "?")
        return f"has a gradient of '{name}'" if is_gradient else f"runs '{name or 'the whole model'}'"


def _gathers(module: nn.Module) -> bool:
    """Whether parameters of ``module`` must be gathered before it can run."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
    from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
    from deepspeed.utils import z3_leaf_module

    return any(
        parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE
        for parameter in iter_params(module, recurse=z3_leaf_module(module))
    )


class Node:
    """A point in a pass.

    Attributes:
        depth: events since the start of the pass.
        only: the event after it if only one is known, else None.
        then: the node after that event.
        known: the nodes after all known events, by event.
    """

    __slots__ = ("depth", "known", "only", "then")

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth
        self.known: dict[int, Node] = {}
        self.only: int | None = None
        self.then = self


# A tree whose nodes are points in a forward and backward pass, and whose edges are the next event: a module, a
# gradient, or the end. All ranks hold the same tree and are at the same node, so each of them knows without
# communication whether the others may have done something else.


class ModulePaths:
    """The tree, and this rank's position in it.

    Attributes:
        node: the position. Where an event is its ``only`` one, ``then`` is the next position, and nobody is asked.
    """

    def __init__(self) -> None:
        self._roots: dict[Hashable, Node] = {}
        self._size = 0
        self.node = Node()

    def begin(self, kind: Hashable) -> None:
        """Starts a pass; passes of each ``kind`` (training, evaluation) have a separate tree."""
        if self._size > LONGEST:
            self._roots, self._size = {}, 0
        self.node = self._roots.setdefault(kind, Node())

    def take(self, event: int) -> None:
        """Follows ``event``, which may be new."""
        node = self.node
        if event not in node.known:
            node.known[event] = Node(node.depth + 1)
            node.only, node.then = (event, node.known[event]) if len(node.known) == 1 else (None, node)
            self._size += 1
        self.node = node.known[event]
