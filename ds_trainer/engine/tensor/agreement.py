"""What tensor-parallel ranks hold whole must get the same gradient on all of them: looked at in the first step.

A weight that is left whole but applied to what is sliced (the norm of a head, in a plan of one's own) gets a part of
its gradient on each rank. Nothing would stop: the ranks' copies would drift apart, and one of them would be saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ds_trainer.engine.tensor.slices import is_sliced
from ds_trainer.parallel.groups import ParallelGroups
from ds_trainer.utils.errors import ConfigError

_SAME = 0.01  # of a gradient's norm; kernels that add up in another order differ far less, in bf16 too
_NOTHING = 1e-5  # of the largest norm: a gradient below that may be rounding alone


class GradientAgreement:
    """Looks at the gradients of the first step, then takes itself away.

    Args:
        model: cut by DeepSpeed.
        groups: whose ``tp`` group must agree.
    """

    def __init__(self, model: nn.Module, groups: ParallelGroups) -> None:
        self._group = groups.tp
        whole = [(name, p) for name, p in model.named_parameters() if p.requires_grad and not is_sliced(p)]
        self._names = [name for name, _ in whole]
        self._norms: list[torch.Tensor | None] = [None] * len(whole)
        self._hooks = [p.register_hook(self._keeper(index)) for index, (_, p) in enumerate(whole)]

    def _keeper(self, index: int) -> Any:
        def keep(gradient: torch.Tensor) -> None:
            norm = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32)
            kept = self._norms[index]
            self._norms[index] = norm if kept is None else kept + norm

        return keep

    def check(self, device: torch.device) -> bool:
        """Compare what was seen; True where that is done, False where gradients were not finite. Collective.

        Raises:
            ConfigError: ranks disagree.
        """
        kept = [torch.zeros(()) if norm is None else norm for norm in self._norms]
        norms = torch.stack([norm.to(device) for norm in kept]) if kept else torch.zeros(0, device=device)
        largest, smallest = norms.clone(), norms.clone()
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=self._group)
        torch.distributed.all_reduce(smallest, op=torch.distributed.ReduceOp.MIN, group=self._group)
        self._norms = [None] * len(self._norms)
        if not bool(torch.isfinite(largest).all() and torch.isfinite(smallest).all()):
            return False
        for hook in self._hooks:
            hook.remove()
        if not kept:
            return True
        apart = largest - smallest
        wrong = (apart > _SAME * largest) & (apart > _NOTHING * largest.max())
        names = [name for name, bad in zip(self._names, wrong.tolist(), strict=True) if bad]
        if names:
            raise ConfigError(
                f"Tensor-parallel ranks hold {', '.join(names[:4])}{' and others' if names[4:] else ''} whole, but "
                "their gradients differ: a layer that is left whole is applied to what is sliced. In "
                'tensor_parallel.partition_config give it partition_type "skip" with "grad_allreduce": true where its '
                "gradients are to be added up, or leave the layers around it whole, too."
            )
        return True
