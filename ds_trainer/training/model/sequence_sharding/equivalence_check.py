"""Verifies before training that a model gives the same results for sharded and for full sequences.

A model must not be sharded if its forward pass mixes tokens by anything other than our attention: a convolution, a
recurrent layer, positions counted inside the model, a custom mask, statistics over the tokens. There is no way to
detect all of these from the outside. So a prefix of the first batch runs through the model in full and sharded, and the
results are compared.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from ds_trainer.parallel.attention import use_sharding
from ds_trainer.parallel.groups import ParallelGroups
from ds_trainer.parallel.sequence_plan import SequencePlan
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.two_runs import first_difference, rms
from ds_trainer.utils.undisturbed import evaluation_mode

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}


def check_sharded_model(
    model: nn.Module,
    full: Callable[[], torch.Tensor],
    sharded: Callable[[], torch.Tensor],
    plan: SequencePlan,
    groups: ParallelGroups,
) -> float:
    """Compares the results of ``model`` for full sequences with those for sharded ones. Collective in a replica.

    A few tokens suffice: a ``plan`` for the first ``4 * cp * sp`` tokens of the first batch gives 4 tokens to each
    rank, with borders between all of them. Every rank of a replica must hold the same full sequences.

    Args:
        model: switched to evaluation mode for the comparison, then restored.
        full: computes the logits ``[batch, plan.length, ...]`` of full sequences as in unsharded training
            (``use_cache=False``: with a KV cache, transformers does not look for documents in position_ids).
        sharded: computes the logits ``[batch, local length, ...]`` of this rank's shard, with ``plan`` active.
        plan: how the sequences are sharded.
        groups: the process groups of its layout.

    Returns:
        The relative difference: root mean square of (sharded - full) over the valid tokens of a rank, divided by the
        root mean square of full; the maximum over the replica's ranks.

    Raises:
        ConfigError: on all ranks of the replica, if the difference exceeds rounding errors, the forward pass never
            calls our attention, or it does not return one result per token.
    """
    part = plan.positions(groups.coordinates.cp, groups.coordinates.sp)
    calls = 0

    def whole_pass() -> torch.Tensor:
        with use_sharding(None, None):
            return full().detach()

    def sharded_pass() -> torch.Tensor:
        nonlocal calls
        with use_sharding(plan, groups) as sharding:
            shard = sharded().detach()
        assert sharding is not None  # there is a plan
        calls = sharding.calls
        return shard

    with evaluation_mode(model), torch.no_grad():
        expected, result = whole_pass(), sharded_pass()
    per_token = expected.shape[1:2] == (plan.length,) and result.shape[1:2] == (len(part),)
    difference = _difference(expected, result, plan, part) if per_token else 0.0
    # All ranks use the maximum; nan counts as infinite.
    outcome = torch.tensor(
        [difference if difference == difference else float("inf"), calls == 0, not per_token],
        dtype=torch.float64,
    )
    dist.all_reduce(outcome, dist.ReduceOp.MAX, group=groups.replica_host)
    difference, without, misshapen = outcome.tolist()
    allowed = _TOLERANCE.get(result.dtype, 1e-3)
    if misshapen:
        why = (
            f"its result of shape {list(expected.shape)} for {plan.length} tokens ({list(result.shape)} for "
            f"{len(part)}) does not have one value per token. Set both to 1."
        )
    elif without:
        why = (
            "its forward pass never called our attention, so tokens of different ranks would not attend to each other. "
            "Call ds_trainer.attention(query, key, value) in it, or set both to 1."
        )
    elif difference > allowed:

        def of_module(one: torch.Tensor, two: torch.Tensor) -> float:
            per_token = two.shape == (len(expected), len(part), *one.shape[2:]) and len(one) == len(expected)
            if not per_token or not len(part) < one.shape[1] <= plan.length:
                return 0.0
            missing = plan.length - one.shape[1]  # padding, which is not compared
            return _difference(nn.functional.pad(one, (0, 0) * (one.dim() - 2) + (0, missing)), two, plan, part)

        with evaluation_mode(model), torch.no_grad():
            own = first_difference(model, whole_pass, sharded_pass, of_module, allowed, through_inputs=True)
        names: list[str | None] = [None] * groups.replica_host.size()
        dist.all_gather_object(names, own, group=groups.replica_host)
        module = next((name for name in names if name), "none with one value per token")
        why = (
            f"the results of a sharded sequence differ from those of the full one by a relative {difference:.2g} "
            f"(rounding allows {allowed:.0e}): something other than our attention mixes tokens (a convolution, a "
            f"recurrent layer, custom positions or masks). The first module with another output: {module}. Set both to "
            "1."
        )
    else:
        return difference
    layout = plan.layout
    raise ConfigError(
        f"{type(getattr(model, 'module', model)).__name__}: context_parallel_size={layout.cp} and "
        f"sequence_parallel_size={layout.sp} shard every sequence, but {why}"
    )


def _difference(expected: torch.Tensor, result: torch.Tensor, plan: SequencePlan, part: torch.Tensor) -> float:
    valid = torch.ones(expected.shape[0], len(part), dtype=torch.bool)
    if plan.documents is not None:  # results for padding do not matter
        valid = plan.documents.valid_at(part)
    full = expected[:, part.to(expected.device)][valid.to(expected.device)].double().cpu()
    sharded = result[valid.to(result.device)].double().cpu()
    size = rms(expected)
    if not full.numel() or size == 0:
        return 0.0 if not full.numel() else sharded.abs().max().item()
    return rms(sharded - full) / size
