"""A model in whose forward pass tokens meet otherwise than by our attention must not be cut: measured at the start.

A convolution, a recurrent layer, positions counted inside of the model, a mask of its own, statistics over the tokens:
nothing tells them all from the outside. So the head of the first batch goes through the model whole and cut, and both
must give the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from ds_trainer.parallel.attention import use_cut
from ds_trainer.parallel.groups import ParallelGroups
from ds_trainer.parallel.sequence_plan import SequencePlan
from ds_trainer.utils.errors import ConfigError

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}


def check_cut_model(
    model: nn.Module,
    whole: Callable[[], torch.Tensor],
    cut: Callable[[], torch.Tensor],
    plan: SequencePlan,
    groups: ParallelGroups,
) -> float:
    """Compare the results of ``model`` for whole sequences with those for cut ones. Collective in a replica.

    A few tokens tell: ``plan`` for the first ``4 x cp x sp`` tokens of the first batch leaves 4 to each rank, with
    borders between all of them. Every rank of a replica must hold the same whole tokens.

    Args:
        model: set to evaluation for the comparison, and back.
        whole: computes the logits ``[batch, plan.length, ...]`` of whole sequences as training without a cut would
            (``use_cache=False``: beside a KV cache, transformers does not look for documents in position_ids).
        cut: computes the logits ``[batch, local length, ...]`` of this rank's part. ``plan`` is in force for it.
        plan: the cut.
        groups: the process groups of its layout.

    Returns:
        The difference: root mean square of (cut - whole) over the valid tokens of a rank, divided by that of whole;
        the largest of the replica's ranks.

    Raises:
        ConfigError: on all ranks of the replica: the difference is more than rounding, the forward pass called our
            attention nowhere, or it gives no result for each token.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), use_cut(None, None):
            expected = whole().detach()
        with torch.no_grad(), use_cut(plan, groups) as running:
            result = cut().detach()
    finally:
        for module, training in modes:
            module.training = training
    assert running is not None  # there is a plan
    part = plan.positions(groups.place.cp, groups.place.sp)
    each_token = expected.shape[1:2] == (plan.length,) and result.shape[1:2] == (len(part),)
    found = _difference(expected, result, plan, part) if each_token else 0.0
    # one answer for all ranks; what is not a number counts as infinite
    answer = torch.tensor(
        [found if found == found else float("inf"), running.calls == 0, not each_token], dtype=torch.float64
    )
    dist.all_reduce(answer, dist.ReduceOp.MAX, group=groups.replica_host)
    found, without, misshapen = answer.tolist()
    allowed = _TOLERANCE.get(result.dtype, 1e-3)
    if misshapen:
        why = (
            f"its result of shape {list(expected.shape)} for {plan.length} tokens ({list(result.shape)} for "
            f"{len(part)}) is not one for each token. Set both to 1."
        )
    elif without:
        why = (
            "its forward pass never called our attention, so that tokens of different ranks would not see each other. "
            "Call ds_trainer.attention(query, key, value) in it, or set both to 1."
        )
    elif found > allowed:
        why = (
            f"the results of a cut sequence differ from those of the whole one by {found:.2g} of their size (rounding "
            f"allows {allowed:.0e}): tokens are mixed otherwise than by our attention (a convolution, a recurrent "
            "layer, positions or masks of its own). Set both to 1."
        )
    else:
        return found
    layout = plan.layout
    raise ConfigError(
        f"{type(model).__name__}: context_parallel_size={layout.cp} and sequence_parallel_size={layout.sp} cut every "
        f"sequence, but {why}"
    )


def _difference(expected: torch.Tensor, result: torch.Tensor, plan: SequencePlan, part: torch.Tensor) -> float:
    kept = torch.ones(expected.shape[0], len(part), dtype=torch.bool)
    if plan.valid is not None:  # nobody reads what a padding token gives
        kept = plan.valid[:, part]
    theirs = expected[:, part.to(expected.device)][kept.to(expected.device)].double().cpu()
    ours = result[kept.to(result.device)].double().cpu()
    size = expected.double().square().mean().sqrt().item()
    if not theirs.numel() or size == 0:
        return 0.0 if not theirs.numel() else ours.abs().max().item()
    return (ours - theirs).square().mean().sqrt().item() / size
