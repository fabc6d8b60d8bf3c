"""Which parameters have had a gradient on this rank in a step, as what reduces them knows it, at every ZeRO stage."""

from __future__ import annotations

from typing import Any

import torch

from ds_trainer.engine.whole_reduction import WholeReduction


class SeenGradients:
    """The gradients of one step on this rank.

    Args:
        parameters: those that the optimizer steps, in the same order on all ranks.

    Attributes:
        unseen: indices of the parameters without a gradient in this step; None before its first backward pass.
        ignored: indices whose gradient does not count in this pass.
        same_on_ranks: all ranks see gradients of the same parameters.
        elsewhere: for each parameter, a positive number if some rank has a gradient, if that came with the gradients.
    """

    same_on_ranks = False

    def __init__(self, parameters: list[Any]) -> None:
        self.parameters = parameters
        self.unseen: set[int] | None = None
        self.ignored: set[int] = set()
        self.elsewhere: torch.Tensor | None = None

    def without_gradient(self) -> set[int]:
        """Indices of the parameters that have no gradient now, which a later reduction would include."""
        return {index for index, p in enumerate(self.parameters) if not _has_gradient(p)}

    def forget(self, indices: set[int]) -> None:
        """Removes gradients, unless they were reduced."""
        for index in indices:
            self.parameters[index].grad = None
            if hasattr(self.parameters[index], "grad_accum"):
                self.parameters[index].grad_accum = None

    def interrupted(self) -> None:
        """A pass has ended in the middle."""
        self.ignored = set()

    def close(self) -> None:
        """Remove hooks from the parameters."""

    def passed(self, unseen: set[int]) -> None:
        """A reduction has not seen gradients of ``unseen``."""
        unseen |= self.ignored
        self.ignored = set()
        self.unseen = unseen if self.unseen is None else self.unseen & unseen


def _has_gradient(parameter: Any) -> bool:
    return parameter.grad is not None or getattr(parameter, "grad_accum", None) is not None


class WholeGradients(SeenGradients):
    """Without ZeRO: gradients are reduced whole, and then a number for each parameter.

    Args:
        engine: DeepSpeed's engine.
        ranks: over which gradients are reduced.
        overlaps: whether they are reduced while the backward pass runs.
    """

    def __init__(self, engine: Any, ranks: int, overlaps: bool) -> None:
        super().__init__([p for p in engine.module.parameters() if p.requires_grad])
        self._reduction: WholeReduction | None = WholeReduction(engine, ranks, overlaps)
        self._report(engine, "_get_gradients_for_reduction", ranks)

    def interrupted(self) -> None:
        """See :class:`SeenGradients`."""
        super().interrupted()
        if self._reduction is not None:
            self._reduction.interrupted()

    def close(self) -> None:
        """See :class:`SeenGradients`."""
        if self._reduction is not None:
            self._reduction.close()

    def _report(self, owner: Any, name: str, ranks: int) -> None:
        """Extends the method that returns the gradients of a step when they are reduced."""
        original = getattr(owner, name)

        def extended() -> tuple[list[Any], Any]:
            unseen = self.without_gradient()
            gradients, of_experts = original()
            self.passed(unseen)
            if ranks > 1 and self.parameters:
                like = gradients[0] if gradients else self.parameters[0].grad
                self.elsewhere = torch.ones(len(self.parameters), dtype=like.dtype, device=like.device)
                if self.unseen:
                    self.elsewhere[sorted(self.unseen)] = 0
                gradients = [*gradients, self.elsewhere]
            return gradients, of_experts

        setattr(owner, name, extended)


class Float32Gradients(WholeGradients):
    """DeepSpeed's bf16 optimizer with float32 gradients, which keeps account of them itself.

    It leaves parameters without a gradient on this rank out of this rank's norm, so ranks would clip by different
    norms. Here they are included.
    """

    def __init__(self, optimizer: Any, ranks: int) -> None:
        SeenGradients.__init__(self, [p for group in optimizer.bf16_groups for p in group])
        self._reduction = None
        self._optimizer = optimizer
        self._report(optimizer, "get_grads_for_reduction", ranks)
        self._norm = optimizer.get_grads_for_norm
        optimizer.get_grads_for_norm = self._all_for_norm

    def without_gradient(self) -> set[int]:
        """See :class:`SeenGradients`."""
        has = [flag for flags in self._optimizer.fp32_groups_has_gradients for flag in flags]
        return {index for index, flag in enumerate(has) if not flag}

    def forget(self, indices: set[int]) -> None:
        """See :class:`SeenGradients`."""
        flags = iter(range(len(self.parameters)))
        self._optimizer.fp32_groups_has_gradients = [
            [has & (next(flags) not in indices) for has in group] for group in self._optimizer.fp32_groups_has_gradients
        ]

    def _all_for_norm(self, for_clipping: bool = False) -> Any:
        self._optimizer.fp32_groups_has_gradients = [[True] * len(group) for group in self._optimizer.bf16_groups]
        return self._norm(for_clipping=for_clipping)


class PartitionedGradients(SeenGradients):
    """ZeRO-3: a parameter that a pass does not use would keep the gradient of an earlier step."""

    def __init__(self, optimizer: Any) -> None:
        from deepspeed.utils.z3_leaf_module import z3_leaf_parameter

        super().__init__([p for group in optimizer.fp16_groups for p in group if p.requires_grad])
        self._optimizer = optimizer
        self._index = {p.ds_id: index for index, p in enumerate(self.parameters)}
        leaves: dict[int, list[Any]] = {}
        for parameter in self.parameters:
            if z3_leaf_parameter(parameter):
                leaves.setdefault(id(parameter.ds_z3_leaf_module), []).append(parameter)
        self.same_on_ranks = not leaves  # elsewhere ranks must run the same modules
        self._filled: set[int] = set()
        self._arrived: set[int] = set()
        for parameters in leaves.values():
            parameters[0].ds_z3_leaf_module.register_full_backward_hook(self._before_fill(parameters), prepend=True)
        self._replace_reduction()

    def without_gradient(self) -> set[int]:
        """Ranks run the same modules also for a dummy batch, so its gradients are of parameters in use."""
        return set()

    def interrupted(self) -> None:
        """See :class:`SeenGradients`."""
        self._arrived.clear()
        self._filled.clear()

    def _before_fill(self, parameters: list[Any]) -> Any:
        """A hook: DeepSpeed is about to fill in zeros for the missing gradients of a leaf module."""
        return lambda *_: self._filled.update(p.ds_id for p in parameters if p.grad is None)

    def _replace_reduction(self) -> None:
        """The method that DeepSpeed calls for each gradient does nothing but this, so this is no call more."""
        optimizer, index, count = self._optimizer, self._index, len(self.parameters)
        reduce = optimizer.reduce_independent_p_g_buckets_and_remove_grads
        finish = optimizer.overlapping_partition_gradients_reduce_epilogue
        seen = self._arrived

        def reduced(parameter: Any) -> None:
            if not optimizer._coalesce_grad_reduction:
                seen.add(parameter.ds_id)
                reduce(parameter)

        def finished() -> None:
            finish()
            if len(seen) == count and not self._filled:
                self.unseen = set()
            else:
                self._pass_ended({at for key, at in index.items() if key not in seen})
            seen.clear()
            self._filled.clear()

        optimizer.reduce_ready_partitions_and_remove_grads = reduced
        optimizer.overlapping_partition_gradients_reduce_epilogue = finished

    def _pass_ended(self, missing: set[int]) -> None:
        """Some gradients are missing in a pass."""
        optimizer = self._optimizer
        buffers = optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        if self.unseen is None:  # the first pass of a step: later ones add to the buffer
            for at in missing:
                buffers[self.parameters[at].ds_id].zero_()
        self.passed(missing | {self._index[key] for key in self._filled})
        self._keep_frozen(missing, buffers)
        if not (optimizer.offload_optimizer and optimizer.is_gradient_accumulation_boundary()):
            return
        # DeepSpeed copies gradients to the host when they arrive in the last pass; those of earlier passes stay behind.
        tensors: dict[int, Any] = {}
        offsets: dict[int, Any] = {}
        for at in missing:
            parameter = self.parameters[at]
            buffer = buffers[parameter.ds_id]
            optimizer._offload_grad_partition_at_boundary(parameter, buffer, tensors, offsets)
        optimizer._swap_out_offload_fp32_gradients(tensors, offsets)

    def _keep_frozen(self, missing: set[int], buffers: Any) -> None:
        """DeepSpeed replaces gradients of an earlier pass by zeros where a script has frozen the parameter since then,
        as it does with a discriminator while the generator gets its gradient.
        """
        optimizer = self._optimizer
        for at in missing:
            parameter = self.parameters[at]
            if not (parameter.requires_grad or at in (self.unseen or ()) or optimizer.offload_optimizer):
                group = optimizer.grad_position[optimizer.get_param_id(parameter)][0]
                place = next(i for i, one in enumerate(optimizer.fp16_groups[group]) if one is parameter)
                optimizer.averaged_gradients[group][place] = buffers[parameter.ds_id]


def seen_gradients(engine: Any, fixed_order: SeenGradients | None, ranks: int, overlaps: bool) -> SeenGradients | None:
    """What knows the gradients of DeepSpeed's ``engine``; None for optimizers that step in another way.

    Args:
        engine: DeepSpeed's engine.
        fixed_order: that of ZeRO 1 and 2.
        ranks: over which gradients are reduced.
        overlaps: whether gradients of stage 0 are reduced while the backward pass runs.
    """
    from deepspeed.runtime.base_optimizer import ZeROOptimizer
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    optimizer = engine.optimizer
    if fixed_order is not None:
        return fixed_order
    if isinstance(optimizer, BF16_Optimizer):
        return Float32Gradients(optimizer, ranks)
    if type(optimizer) is DeepSpeedZeroOptimizer_Stage3:
        return PartitionedGradients(optimizer)
    return None if isinstance(optimizer, ZeROOptimizer) else WholeGradients(engine, ranks, overlaps)
