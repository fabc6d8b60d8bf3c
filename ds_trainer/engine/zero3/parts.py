"""``Zero3Parts``: what an engine with ZeRO-3 has besides DeepSpeed's own, for training and for evaluation.

Closed engines are released here, because DeepSpeed keeps them, with shards and buffers, until the process ends. Source:
DeepSpeed 0.19: each engine stays in the global stack of modules in a forward pass
(``runtime/zero/parameter_offload.py``), and the cache of a method refers to its coordinator
(``runtime/zero/partitioned_param_coordinator.py``). The functions that gather and release the weights of a module in
the backward pass stay at the module, so the next engine would gather with the coordinator of the closed one, and frozen
weights are missing when their layer is computed again.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import nn

from ds_trainer.engine.loading.transformers_zero3 import Zero3Registration
from ds_trainer.engine.tensor_parallel.repairs import allow_empty_slices
from ds_trainer.engine.weights import is_released
from ds_trainer.engine.zero3.coalesced_collectives import is_left_to_deepspeed, vectorize_collectives
from ds_trainer.engine.zero3.leaf_modules import delay_leaf_reduction, mark_leaf_modules
from ds_trainer.engine.zero3.module_guard import guard_modules
from ds_trainer.engine.zero3.registered_hooks import restore_hooks_when_registered, zero3_hooks

_CACHED = "_PartitionedParameterCoordinator__params_to_release"
_MADE_FOR_BACKWARD = ("pre_bwd_fn", "post_bwd_fn", "applied_pre_backward_ref_cnt", "ds_grads_remaining")


# ZeRO-3's module hooks with less Python: what they decide and communicate is DeepSpeed's, in DeepSpeed's order.
#
# DeepSpeed 0.19.8 runs four hooks for each module of a micro-batch. Most of their time goes into what has no effect:
#
# * messages that are formatted and not printed (``release_sub_module``, ``see_memory_usage``);
# * decorators around decorators: for each hook several changes of the gradient mode and of the compiler's state;
# * ``inspect.signature`` in each ``autograd.Function`` that has a ``setup_context`` (torch).
#
# Here :class:`LeanHooks` replaces the functions that these hooks call, for one engine until it is closed. The first
# passes, in which DeepSpeed records the order of modules, run its own functions, and so do leaf modules and recomputed
# frozen weights. Left to DeepSpeed as a whole: compiled models (the decorators are for the compiler), weights on NVMe,
# ZenFlow, ``stage3_module_granularity_threshold``, and its debug log.


_OF_BACKWARD = ("pre_bwd_fn", "post_bwd_fn")


class LeanHooks:
    """The hooks of one ZeRO-3 engine, until :meth:`close`.

    Args:
        offload: DeepSpeed's object that holds the module hooks.
    """

    def __init__(self, offload: Any) -> None:
        self._offload = offload
        self._coordinator = offload.get_param_coordinator()
        self._theirs = type(self._coordinator)
        self._coordinator.__class__ = _lean_coordinator()
        owned = [vars(part) for part in offload.module.modules()]  # parts of leaf modules have no hooks
        self._functions = [part[name] for part in owned for name in _OF_BACKWARD if name in part]
        for function in self._functions:
            function.apply = _apply_of(function)
        vars(offload).update(_module_functions(self._coordinator))

    def close(self) -> None:
        """Gives the engine DeepSpeed's functions again."""
        self._coordinator.__class__ = self._theirs
        for name in _module_functions(self._coordinator):
            vars(self._offload).pop(name, None)
        for function in self._functions:
            del function.apply
        self._functions = []


def lean_hooks(engine: Any, compiled: bool) -> LeanHooks | None:
    """Shortens the hooks of DeepSpeed's ``engine`` with ZeRO-3; None where they are left to DeepSpeed.

    Args:
        engine: DeepSpeed's engine, for training or evaluation, with all hooks in place.
        compiled: it will be compiled.
    """
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
    from deepspeed.utils.logging import logger

    offload = zero3_hooks(engine)
    left = (
        compiled,
        is_left_to_deepspeed(),
        any(getattr(part, "_compiled_call_impl", None) is not None for part in offload.module.modules()),
        offload.offload_device == OffloadDeviceEnum.nvme,
        offload.zenflow,
        offload.fast_sharding_for_leaf_module,
        logger.isEnabledFor(logging.DEBUG),
    )
    return None if any(left) else LeanHooks(offload)


def _module_functions(coordinator: Any) -> dict[str, Any]:
    """What DeepSpeed's hooks call (``DeepSpeedZeRoOffload``), without messages about memory."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    def before(module: nn.Module, forward: bool) -> None:
        coordinator.trace_prologue(module)
        if coordinator.is_record_trace():
            coordinator.record_module(module)
        coordinator.fetch_sub_module(module, forward=forward)

    def before_forward(module: nn.Module) -> None:
        FWD_MODULE_STACK.append(module)
        before(module, True)

    return {
        "pre_sub_module_forward_function": before_forward,
        "post_sub_module_forward_function": lambda module: coordinator.release_sub_module(module, forward=True),
        "pre_sub_module_backward_function": lambda module: before(module, False),
        "post_sub_module_backward_function": lambda module: coordinator.release_sub_module(module, forward=False),
    }


def _apply_of(function: Any) -> Any:
    """``function.apply`` of an ``autograd.Function`` of one argument, without looking at the signature each time."""
    general, quick = function.apply, super(torch.autograd.Function, function).apply

    def apply(value: torch.Tensor) -> Any:
        return general(value) if torch._C._are_functorch_transforms_active() else quick(value)

    return apply


@cache
def _lean_coordinator() -> Any:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero import partitioned_param_coordinator as library

    missing, available = library.ZeroParamStatus.NOT_AVAILABLE, library.ZeroParamStatus.AVAILABLE
    accelerator = get_accelerator()

    # With the name of its base class, private names (self.__step_id) are those of the base class.
    class PartitionedParameterCoordinator(library.PartitionedParameterCoordinator):
        """DeepSpeed's coordinator; the order of modules is known from earlier passes."""

        def fetch_sub_module(self, current_submodule: Any, forward: bool) -> None:
            """Gathers the weights of a module and of those after it."""
            if not self.is_complete_trace() or vars(current_submodule).get("_z3_leaf"):
                super().fetch_sub_module(current_submodule, forward)
                return
            if not forward:
                self.__active_backward_submodules[current_submodule.ds_id] = current_submodule
            params = _own_parameters(current_submodule)
            if params:
                self.__await(current_submodule, params, forward)
                self.__take_from_queue(params)
            if self.__prefetch_bucket_sz > 0:
                self.__prefetch(forward)
            self.__step_id += 1

        def __gather(self, params: Any, forward: bool) -> None:
            with torch.no_grad():
                self.__all_gather_params(params, forward)

        def __await(self, module: Any, params: list[Any], forward: bool) -> None:
            wanted = [param for param in params if param.ds_status is missing]
            if any(param.ds_tensor.ds_numel for param in wanted):
                self.__gather(wanted, forward)
            recomputes = forward and self.__active_backward_submodules and torch._C._current_graph_task_id() != -1
            events, inflight = self.__ongoing_fetch_events, self.__inflight_param_registry
            for param in params:
                param.ds_active_sub_modules.add(module.ds_id)
                if recomputes and not param.requires_grad:
                    owner = next(reversed(self.__active_backward_submodules.values()))
                    library.update_recompute_parameters(owner, param)
                if param in inflight.data:
                    with accelerator.stream(self.__allgather_stream):
                        while events and events[0].query():
                            events.popleft()
                        if len(events) > self.__max_ongoing_fetch_events:
                            events.popleft().synchronize()
                        inflight.data.pop(param).wait(handle_dependency=True)
                        if not accelerator.handles_memory_backpressure():
                            event = accelerator.Event()
                            event.record()
                            events.append(event)
                assert param.ds_status is available, param.ds_summary()
            if not accelerator.resolves_data_dependency():
                accelerator.current_stream().wait_stream(self.__allgather_stream)

        def __take_from_queue(self, params: list[Any]) -> None:
            """Removes ``params`` from what will be prefetched, unless an earlier prefetch has removed them."""
            fetched, queue = self.__most_recent_step_id_param_fetched_for, self.__param_queue
            expected = {param for param in params if fetched[param] < self.__step_id}
            taken: set[Any] = set()
            while queue and len(taken) < len(expected):
                entry = queue.popleft()
                fetched[entry.param] = entry.step_id_last_used_at
                taken.add(entry.param)
            if taken != expected:
                wrong = [param.ds_summary(use_debug_name=True) for param in taken ^ expected]
                raise RuntimeError(f"tracing error at step {self.__step_id}: fetched, but not expected next: {wrong}")

        def __prefetch(self, forward: bool) -> None:
            room = min(self.__max_n_available_params - self.__n_available_params, self.__prefetch_bucket_sz)
            fetched, queue = self.__most_recent_step_id_param_fetched_for, self.__param_queue
            chosen: set[Any] = set()
            elements = 0
            while queue and elements < room:
                entry = queue.popleft()
                param = entry.param
                fetched[param] = max(fetched[param], entry.step_id_last_used_at)
                if param.ds_status is missing and param not in chosen:
                    chosen.add(param)
                    elements += param.ds_numel
            if elements:
                self.__gather(chosen, forward)

        def release_sub_module(self, submodule: Any, forward: bool = False) -> None:
            """Frees the weights of a module that nothing needs soon."""
            mine = vars(submodule)
            if not self.is_complete_trace() or mine.get("_z3_leaf") or submodule.ds_recompute_parameters:
                super().release_sub_module(submodule, forward)
                return
            if not forward:
                assert self.__active_backward_submodules, "active_backward_submodules is empty during backward pass"
                self.__active_backward_submodules.pop(submodule.ds_id, None)
            released = None
            for param in _own_parameters(submodule):
                param.ds_active_sub_modules.discard(submodule.ds_id)
                if param.is_external_param or param.ds_status is not available or param.ds_active_sub_modules:
                    continue
                if released is None:
                    released = self.__params_to_release(submodule, self.__step_id)
                if param.ds_id in released:
                    param.partition(free_data=True)
                    self.__n_available_params -= param.ds_numel

    return PartitionedParameterCoordinator


def _own_parameters(module: Any) -> list[Any]:
    """What DeepSpeed gathers for a module that is no leaf (``iter_params``), each once."""
    own = vars(module)
    parameters = [parameter for parameter in own["_parameters"].values() if parameter is not None]
    external = own["_external_params"]
    return list(dict.fromkeys([*parameters, *external.values()])) if external or len(parameters) > 1 else parameters


class Zero3Parts:
    """Created before DeepSpeed's engine, and told when it exists and when it is complete.

    Args:
        model: the module that will be sharded.

    Attributes:
        guard: stops all ranks if they are about to run different modules; None on one rank.
    """

    def __init__(self, model: nn.Module) -> None:
        mark_leaf_modules(model)
        self._model = model
        self.guard: Any = None
        self._parts: list[Any] = []

    def created(self, engine: Any, settings: dict[str, Any]) -> None:
        """DeepSpeed's ``engine`` exists; ``settings`` are what transformers' ``deepspeed_config()`` returns."""
        self._parts.append(Zero3Registration(settings))
        allow_empty_slices(engine)

    def trains(self) -> None:
        """The engine will run backward passes. Called before it watches gradients."""
        delay_leaf_reduction(self._model)

    def complete(self, engine: Any, compiled: bool) -> None:
        """The engine is complete; with ``compiled`` its model will be compiled."""
        self.guard = guard_modules(engine)
        restore_hooks_when_registered(engine)
        parts = (self.guard, vectorize_collectives(engine), lean_hooks(engine, compiled))
        self._parts += [part for part in parts if part is not None]

    def close(self) -> None:
        """Remove hooks, before DeepSpeed's engine is destroyed; shard what is whole: scripts may change it."""
        for parameter in self._model.parameters():
            shard: Any = getattr(parameter, "ds_tensor", None)
            if shard is not None and not is_released(parameter) and shard.status.name == "AVAILABLE":
                parameter.partition(has_been_updated=True)  # type: ignore[attr-defined]
        for part in self._parts:
            part.close()

    def release(self, module: nn.Module) -> None:
        """Release the destroyed engine of ``module``. Other engines fill the cache again."""
        from deepspeed.runtime.zero import parameter_offload
        from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

        stack = parameter_offload.FWD_MODULE_STACK
        stack[:] = [entry for entry in stack if entry is not module]
        cached = vars(PartitionedParameterCoordinator).get(_CACHED)
        for function in (cached, *(cell.cell_contents for cell in getattr(cached, "__closure__", None) or ())):
            if hasattr(function, "cache_clear"):
                function.cache_clear()
        for part in module.modules():
            for name in _MADE_FOR_BACKWARD:
                vars(part).pop(name, None)
