"""The norm of the global gradient at ZeRO 1, 2 and 3: in one pass, with one all-reduce.

DeepSpeed 0.19.8 copies each gradient to float64 and launches a kernel for its norm, and every parameter group (at ZeRO
3 every sub-group) has an all-reduce of its own. Here the norms of all gradients are one foreach operation, which reads
them in their own dtype and adds in float64 too, and the squares of all groups are reduced together, in float64. Other
cases (gradients offloaded to the CPU, DeepSpeed's own expert parallelism) are left to DeepSpeed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ReduceOp

from ds_trainer.engine.expert_parallel import has_foreign_experts, is_expert


def reduce_norm_once(optimizer: Any) -> GradientNorm | None:
    """Makes ``optimizer``, DeepSpeed's wrapper, compute the gradient norm this way where it can.

    Returns the norm, if every step computes it.
    """
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    if type(optimizer) is DeepSpeedZeroOptimizer:
        if not optimizer.cpu_offload and not has_foreign_experts(p for group in optimizer.bit16_groups for p in group):
            norm = GradientNorm(optimizer, optimizer.params_in_partition, optimizer.dp_process_group, spans_all=False)
            optimizer.scaled_global_norm = lambda norm_type=2: norm().float()
            return norm if optimizer.compute_grad_norm else None
    elif type(optimizer) is DeepSpeedZeroOptimizer_Stage3 and not optimizer.offload_optimizer:
        dense = [p for group in optimizer.fp16_groups for p in group if not is_expert(p)]
        groups = {optimizer._get_param_partition_group(p) for p in dense}
        if len(groups) == 1 and not has_foreign_experts(p for group in optimizer.fp16_groups for p in group):
            (group,) = groups  # experts are divided among its ranks too
            spans_all = optimizer._grad_norm_counts_every_rank(dense[:1], group)
            norm = GradientNorm(optimizer, optimizer.fp16_groups, group, spans_all)
            optimizer._get_norm_groups = lambda: [norm()]
            return norm
    return None


class GradientNorm:
    """Computes the norm, and counts ranks with it.

    Args:
        optimizer: DeepSpeed's wrapper.
        parameters: for each of its groups, the parameters of its ``averaged_gradients`` on this rank.
        group: the ranks that hold different parts of the gradient.
        spans_all: whether ``group`` contains the model-parallel ranks. Otherwise their squares are added, and a
            parameter that all of them hold counts on the first.

    Attributes:
        vote: whether this rank counts in the next norm.
        votes: how many ranks of ``group`` counted in the last one: a scalar on the device; None on one rank.
    """

    def __init__(self, optimizer: Any, parameters: list[list[torch.Tensor]], group: Any, spans_all: bool) -> None:
        from deepspeed import comm
        from deepspeed.runtime.utils import is_model_parallel_parameter
        from deepspeed.runtime.zero.utils import get_norm_dtype

        self._optimizer = optimizer
        self._group = group if comm.get_world_size(group=group) > 1 else None
        self._spans_all = spans_all
        self._dtype = get_norm_dtype()
        every = spans_all or optimizer.model_parallel_rank == 0
        self._ballots = torch.tensor([0.0, 1.0], dtype=self._dtype, device=optimizer.device).unbind()
        self.vote = False
        self.votes: torch.Tensor | None = None
        self._counted = [[every or is_model_parallel_parameter(p) for p in group] for group in parameters]

    def __call__(self) -> torch.Tensor:
        """The norm times the loss scale: a scalar, positive infinity if it is not finite. Collective."""
        from deepspeed import comm

        optimizer = self._optimizer
        square = self._own_square()
        if self._group is not None:
            square_and_votes = torch.stack((square, self._ballots[self.vote]))
            comm.all_reduce(square_and_votes, op=ReduceOp.SUM, group=self._group)
            square, self.votes = square_and_votes.unbind()
        if not self._spans_all:
            optimizer._model_parallel_all_reduce(tensor=square, op=ReduceOp.SUM)
        return square.sqrt_().nan_to_num_(nan=torch.inf, posinf=torch.inf)

    def _own_square(self) -> torch.Tensor:
        """The sum of the squares of the gradients that this rank counts."""
        optimizer = self._optimizer
        gradients: list[torch.Tensor] = []
        scaled: list[torch.Tensor] = []
        for index, counted in enumerate(self._counted):
            parts = [part for part in optimizer.averaged_gradients[index] if not getattr(part, "_zero_padding", False)]
            own = [part for part, counts in zip(parts, counted, strict=False) if counts]
            # A Muon update has no loss scale, which the norm of all others has.
            (scaled if optimizer._muon_update_lacks_loss_scale(index) else gradients).extend(own)
        square = _sum_of_squares(gradients, self._dtype, optimizer.device)
        if scaled:
            square += _sum_of_squares(scaled, self._dtype, optimizer.device) * float(optimizer.loss_scale) ** 2
        return square


def _sum_of_squares(tensors: list[torch.Tensor], dtype: torch.dtype, device: Any) -> torch.Tensor:
    if not tensors:
        return torch.zeros((), dtype=dtype, device=device)
    return torch.stack(torch._foreach_norm(tensors, 2, dtype)).square_().sum()
