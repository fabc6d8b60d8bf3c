"""Stages 0 to 2 train with DeepSpeed's bits, ZeRO 1 and 2 with structures whose size does not depend on the ranks."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from ds_trainer import TrainingArguments
from ds_trainer.config.compiler import compile_config
from ds_trainer.engine import reduction_order, seen_gradients, training_engine, whole_reduction
from ds_trainer.engine.gradient_partitions import own_gradient_partition
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.utils import distributed
from tests.support.pool import pool

STRUCTURES = ("grad_start_offset", "grad_partition_insertion_offset", "is_grad_computed")
OTHERS = (
    "param_to_partition_ids",
    "is_partition_reduced",
    "total_grads_in_partition",
    "first_param_index_in_partition",
)


class Odd(nn.Module):
    """Sizes that no number of ranks divides, a scalar, an unused and a frozen layer, a matrix larger than a bucket."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.inner, self.wide, self.outer = nn.Linear(7, 11), nn.Linear(11, 29), nn.Linear(29, 5)
        self.unused, self.frozen = nn.Linear(3, 2), nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.wide(torch.tanh(self.inner(x))))
        return (self.frozen(self.outer(hidden)) * self.scale).float().square().sum()


ZERO: dict[str, dict[str, Any]] = {
    "": {},
    "small buckets": {"reduce_bucket_size": 330},
    "smaller buckets": {"reduce_bucket_size": 130},  # a matrix is larger
    "round robin": {"round_robin_gradients": True},
    "no overlap": {"overlap_comm": False},
    "no overlap, small buckets": {"reduce_bucket_size": 330, "overlap_comm": False},
    "separate gradients": {"contiguous_gradients": False},
    "one reduction a rank": {"use_multi_rank_bucket_allreduce": False},
    "all-reduce": {"reduce_scatter": False},
    "offload": {"offload_optimizer": {"device": "cpu"}},
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "autocast": {"torch_autocast": "bf16"},
    "float32 communication": {"bf16": True, "deepspeed": {"communication_data_type": "fp32"}},
    "divided before": {"deepspeed": {"prescale_gradients": True}},
    "divided twice": {"deepspeed": {"gradient_predivide_factor": 4.0}},
    "float32 accumulation": {"bf16": True, "deepspeed": {"data_types": {"grad_accum_dtype": "fp32"}}},
}


def trained(deepspeeds: bool, stage: int, zero: str, precision: str, groups: int) -> tuple[list[torch.Tensor], Any]:
    """Losses, norms, weights and gradients of three steps, and what is known about this rank's partition."""
    settings = dict(PRECISIONS[precision])
    # DeepSpeed adds a matrix that is larger than a bucket in pieces.
    waits = {"overlap_comm": False} if deepspeeds and zero == "smaller buckets" else {}
    config = {"zero_allow_untested_optimizer": True, **settings.pop("deepspeed", {})}
    args = TrainingArguments(
        "unused",
        use_cpu=True,
        zero_stage=stage,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        deepspeed={**config, "zero_optimization": {"stage": stage, **ZERO.get(zero, {}), **waits}},
        **settings,
    )
    layout = ParallelLayout(distributed.world_size())
    compiled = compile_config(args, layout, device="cpu", client_optimizer="a test")
    patch = pytest.MonkeyPatch()
    patch.setattr(whole_reduction, "BUCKET", 130)
    if deepspeeds:
        patch.setattr(seen_gradients, "WholeReduction", lambda *_: None)
        patch.setattr(training_engine, "own_gradient_partition", nullcontext)
        patch.setattr(training_engine, "step_all_at_once", lambda *_: None)
        if zero != "smaller buckets":
            patch.setattr(reduction_order, "can_overlap", lambda optimizer: False)
    model, later = Odd(), zero == "a layer is trained later"
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad or later]
    parts: Any = [{"params": trainable[i::groups], "weight_decay": 0.01 * i} for i in range(groups)]
    engine = training_engine.TrainingEngine(model, torch.optim.AdamW(parts, lr=0.1), compiled, layout)
    patch.undo()
    generator = torch.Generator().manual_seed(distributed.rank())
    found: list[torch.Tensor] = []
    for micro_batch in range(6):
        model.frozen.requires_grad_(later and micro_batch > 1)
        engine.begin_micro_batch(last=micro_batch % 2 == 1)
        loss = engine.deepspeed(torch.randn(2, 7, generator=generator).to(next(model.parameters()).dtype))
        engine.backward(loss / distributed.world_size())
        found.append(loss.detach())
        if micro_batch % 2:
            engine.step()
            found.append(torch.tensor(engine.grad_norm()))
    found += [parameter.detach().clone() for parameter in model.parameters()]
    optimizer: Any = engine.deepspeed.optimizer
    own: list[Any] = []
    # float32 accumulation of bf16 at stage 1 is DeepSpeed's BF16_Optimizer, which has no such structures.
    for group in range(len(getattr(optimizer, "bit16_groups", ()))):
        rank = distributed.rank()
        own.append([getattr(optimizer, name)[group][rank] for name in STRUCTURES])
        own.append(optimizer.first_param_index_in_partition[group][rank])
        own.append(optimizer.total_grads_in_partition[group][rank])
        holders = optimizer.param_to_partition_ids[group]
        own.append([(number, rank in holders[number]) for number in holders])
    engine.close()
    return found, own


def trained_alike(*case: Any) -> tuple[bool, bool]:
    theirs, expected = trained(True, *case)
    found, own = trained(False, *case)
    same = [one.dtype == other.dtype and torch.equal(one, other) for one, other in zip(found, theirs, strict=True)]
    return all(same), own == expected


STAGE_0 = ("fp32", "bf16", "autocast", "float32 communication", "divided before", "divided twice")
SHARDED = [precision for precision in PRECISIONS if "divided" not in precision]
DEFAULT = [
    *((2, 0, "", precision, 2) for precision in STAGE_0),
    (2, 0, "a layer is trained later", "fp32", 2),
    *((3, 2, zero, "bf16", 2) for zero in ("", "small buckets", "round robin", "one reduction a rank")),
    *((3, 2, "small buckets", precision, 1) for precision in SHARDED[2:]),
    (3, 1, "offload", "fp32", 2),
]
CASES = [
    pytest.param(*case, marks=() if case in DEFAULT else pytest.mark.extended)
    for case in dict.fromkeys(
        [
            *DEFAULT,
            *(
                (world, stage, zero, "bf16", 2)
                for world in (1, 2, 3, 8)
                for stage in (1, 2)
                for zero in ZERO
                if "later" not in zero
            ),
            *((2, stage, zero, one, 2) for stage in (1, 2) for zero in ("", "round robin") for one in SHARDED),
            *((1, 0, "", precision, 2) for precision in STAGE_0),
        ]
    )
]


@pytest.mark.parametrize(("world", "stage", "zero", "precision", "groups"), CASES)
def test_training_has_deepspeeds_bits(world: int, stage: int, zero: str, precision: str, groups: int) -> None:
    assert pool(world).run(partial(trained_alike, stage, zero, precision, groups)) == [(True, True)] * world


# -- structures -------------------------------------------------------------------------------------------------------


def structures(deepspeeds: bool, rank: int, ranks: int, bucket: int, padding: int = 0) -> Any:
    """What an optimizer of ``ranks`` knows about two groups of parameters, one with empty and large ones."""
    from deepspeed import comm

    groups = [[torch.empty(size) for size in (5, 1, 0, 40, 3, 7, 0, 2)], [torch.empty(size) for size in (64, 1, 1, 1)]]
    optimizer: Any = SimpleNamespace(
        **{name: {} for name in (*STRUCTURES, *OTHERS, "remaining_grads_in_partition")},
        bit16_groups=groups,
        round_robin_bit16_groups=groups,
        round_robin_bit16_padding=[[padding] * len(group) for group in groups],
        real_dp_process_group=[None, None],
        partition_size=[-(-sum(one.numel() + padding for one in group) // ranks) for group in groups],
        param_id={id(one): number for number, one in enumerate(one for group in groups for one in group)},
        reduce_bucket_size=bucket,
        zenflow=False,
        use_multi_rank_bucket_allreduce=True,
    )
    for name in ("get_param_id", "initialize_gradient_partition", "get_first_param_index"):
        setattr(optimizer, name, partial(getattr(DeepSpeedZeroOptimizer, name), optimizer))
    patch = pytest.MonkeyPatch()
    patch.setattr(comm, "get_world_size", lambda group=None: ranks)
    patch.setattr(comm, "get_rank", lambda group=None: rank)
    with nullcontext() if deepspeeds else own_gradient_partition():
        DeepSpeedZeroOptimizer.initialize_gradient_partitioning_data_structures(optimizer)
    patch.undo()
    return optimizer


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 50, 200])
def test_structures_are_deepspeeds(ranks: int, padding: int) -> None:
    expected = structures(True, 0, ranks, 0, padding)
    every = structures(False, 0, ranks, -1, padding)  # all parameters are larger than a bucket
    assert all(getattr(every, name) == getattr(expected, name) for name in (*STRUCTURES, *OTHERS))
    for rank in range(ranks):
        found = structures(False, rank, ranks, 1000, padding)
        for group in range(2):
            for name in (*STRUCTURES, "total_grads_in_partition", "first_param_index_in_partition"):
                assert getattr(found, name)[group][rank] == getattr(expected, name)[group][rank]
            for number, holders in found.param_to_partition_ids[group].items():
                theirs = expected.param_to_partition_ids[group][number]
                assert (rank in holders) == (rank in theirs)
                assert len(holders) <= 3
                assert holders == sorted(holders)
                starts = [found.grad_start_offset[group][holder][number] for holder in holders]
                assert starts == sorted(starts)
                if rank in theirs and theirs[-1] > rank:  # where the part of this rank ends
                    after = expected.grad_start_offset[group][rank + 1][number]
                    assert found.grad_start_offset[group][rank + 1][number] == after


def test_the_context_ends() -> None:
    before = DeepSpeedZeroOptimizer.initialize_gradient_partitioning_data_structures
    with own_gradient_partition():
        assert DeepSpeedZeroOptimizer.initialize_gradient_partitioning_data_structures is not before
    assert DeepSpeedZeroOptimizer.initialize_gradient_partitioning_data_structures is before
