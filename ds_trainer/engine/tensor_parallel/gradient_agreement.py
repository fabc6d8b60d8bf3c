"""Verifies in the first step that replicated weights have the same gradient on all tensor-parallel ranks.

A replicated weight that is applied to partitioned activations (the norm of a head, in a custom plan) gets only part of
its gradient on each rank. Training would continue: the ranks' copies would drift apart, and one of them would be saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ds_trainer.engine.tensor_parallel.slices import is_sliced
from ds_trainer.parallel.groups import ParallelGroups
from ds_trainer.utils.errors import ConfigError

_TOLERANCE = 0.01  # relative to a gradient's norm; a different summation order changes far less, also in bf16
_NEGLIGIBLE = 1e-5  # relative to the largest norm: smaller gradients may be rounding errors


class GradientAgreement:
    """Compares the gradients of the first step across ranks, then removes its hooks.

    Args:
        model: the model that DeepSpeed has partitioned.
        groups: the process groups; the ranks of ``tp`` must agree.
    """

    def __init__(self, model: nn.Module, groups: ParallelGroups) -> None:
        self._group = groups.tp
        replicated = [(name, p) for name, p in model.named_parameters() if p.requires_grad and not is_sliced(p)]
        self._names = [name for name, _ in replicated]
        self._norms: list[torch.Tensor | None] = [None] * len(replicated)
        self._hooks = [p.register_hook(self._recorder(index)) for index, (_, p) in enumerate(replicated)]

    def _recorder(self, index: int) -> Any:
        def record(gradient: torch.Tensor) -> None:
            norm = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32)
            previous = self._norms[index]
            self._norms[index] = norm if previous is None else previous + norm

        return record

    def check(self, device: torch.device) -> bool:
        """Compares the recorded norms. Collective.

        Returns:
            True if the comparison is complete; False if gradients were not finite.

        Raises:
            ConfigError: the gradients differ across ranks.
        """
        recorded = [torch.zeros(()) if norm is None else norm for norm in self._norms]
        norms = torch.stack([norm.to(device) for norm in recorded]) if recorded else torch.zeros(0, device=device)
        largest, smallest = norms.clone(), norms.clone()
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=self._group)
        torch.distributed.all_reduce(smallest, op=torch.distributed.ReduceOp.MIN, group=self._group)
        self._norms = [None] * len(self._norms)
        if not bool(torch.isfinite(largest).all() and torch.isfinite(smallest).all()):
            return False
        for hook in self._hooks:
            hook.remove()
        if not recorded:
            return True
        difference = largest - smallest
        wrong = (difference > _TOLERANCE * largest) & (difference > _NEGLIGIBLE * largest.max())
        names = [name for name, bad in zip(self._names, wrong.tolist(), strict=True) if bad]
        if names:
            raise ConfigError(
                f"{', '.join(names[:4])}{' and others' if names[4:] else ''} are replicated on the tensor-parallel "
                "ranks, but their gradients differ: a replicated layer is applied to partitioned activations. In "
                'tensor_parallel.partition_config give it partition_type "skip" with "grad_allreduce": true to add up '
                "its gradients, or do not partition the layers around it."
            )
        return True
