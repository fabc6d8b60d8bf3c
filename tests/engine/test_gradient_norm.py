"""The gradient norm of ZeRO: DeepSpeed's number, with one all-reduce over the ranks that share a gradient."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from ds_trainer.engine.gradient_norm import reduce_norm_once
from tests.support.collectives import Collectives
from tests.support.plain_deepspeed import make_data, make_engine
from tests.support.pool import pool

BF16 = {"bf16": {"enabled": True}}


def norms(
    stage: int, tp: int = 1, lost: float | None = None, scaled: tuple[int, ...] = (), **settings: Any
) -> tuple[float, float, int, int]:
    """DeepSpeed's norm and ours of the same gradient, and the all-reduces of each.

    Args:
        stage: ZeRO stage.
        tp: tensor-parallel ranks.
        lost: a value that replaces one of the last rank's gradients.
        scaled: groups with an update of Muon, which has no loss scale; the others then have one of 64.
        settings: further settings of DeepSpeed, or of ``make_engine``.
    """
    from deepspeed.runtime.utils import combine_grad_norm_groups

    engine = make_engine(stage, tp, **settings)
    optimizer = engine.optimizer
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    vars(optimizer)["groups_lacking_loss_scale" if stage < 3 else "sub_groups_lacking_loss_scale"] = set(scaled)

    if scaled:
        optimizer.override_loss_scale(64.0)

    def total() -> float:
        if stage < 3:
            return float(optimizer.scaled_global_norm())
        return float(combine_grad_norm_groups(optimizer._get_norm_groups()))

    found: list[float | int] = []

    def both(*args: Any, **keywords: Any) -> None:
        if lost is not None and rank == world - 1:
            optimizer.averaged_gradients[0][0].view(-1)[0] = lost
        for install in (lambda optimizer: None, reduce_norm_once):
            install(optimizer)
            with Collectives() as counted:
                found.append(total())
            found.append(counted["all_reduce"])

    row = make_data()[rank // tp]
    logits = engine(input_ids=row["input_ids"][None]).logits.float()
    engine.backward(logits.logsumexp(-1).square().mean())
    optimizer.step = both
    engine.step()
    engine.destroy()
    theirs, of_theirs, ours, of_ours = found
    return theirs, ours, int(of_theirs), int(of_ours)


@pytest.mark.cases(2)
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", [{}, BF16], ids=["fp32", "bf16"])
def test_the_norm_is_deepspeeds_with_one_all_reduce(stage: int, world: int, precision: dict[str, Any]) -> None:
    for theirs, ours, of_theirs, of_ours in pool(world).run(partial(norms, stage, **precision)):
        assert ours == pytest.approx(theirs, rel=1e-6)
        assert theirs > 0.0
        assert of_theirs == 2  # two groups: with and without weight decay
        assert of_ours == (1 if world > 1 else 0)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_all_ranks_get_the_same_number(stage: int) -> None:
    """The one by which they clip."""
    assert len({ours for _, ours, _, _ in pool(4).run(norms, stage)}) == 1


@pytest.mark.parametrize(("stage", "tp"), [(1, 2), (2, 2), (3, 2), (1, 4), (2, 4)])
def test_slices_of_all_tensor_parallel_ranks_count_and_whole_weights_once(stage: int, tp: int) -> None:
    for theirs, ours, _, _ in pool(4).run(norms, stage, tp):
        assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf])
def test_one_lost_gradient_makes_the_norm_infinite_on_all_ranks(stage: int, lost: float) -> None:
    assert [ours for _, ours, _, _ in pool(2).run(norms, stage, 1, lost)] == [math.inf] * 2


@pytest.mark.cases(6)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("scaled", [(0,), (1,), (0, 1)])
def test_an_update_without_the_loss_scale_is_scaled(stage: int, scaled: tuple[int, ...]) -> None:
    for theirs, ours, _, _ in pool(2).run(norms, stage, 1, None, scaled):
        assert ours == pytest.approx(theirs, rel=1e-6)
    plain = pool(2).run(norms, stage)[0][1]
    assert ours > 1.5 * plain  # the loss scale reached it


def test_a_norm_whose_square_is_too_large_for_float32_is_finite() -> None:
    """DeepSpeed's is infinite here at ZeRO 1 and 2, and it would skip the step."""
    for _, ours, _, _ in pool(2).run(norms, 1, 1, 1e25):
        assert ours == pytest.approx(1e25, rel=1e-5)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_frozen_weights_have_no_part_in_it(stage: int) -> None:
    for theirs, ours, _, _ in pool(2).run(partial(norms, stage, frozen="mlp")):
        assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("stage", [2, 3])
def test_offloaded_gradients_are_left_to_deepspeed(stage: int) -> None:
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}
    for theirs, ours, of_theirs, of_ours in pool(2).run(partial(norms, stage, zero_optimization=zero)):
        assert ours == theirs
        assert of_theirs == of_ours > 0
