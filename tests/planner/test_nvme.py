"""Offload to NVMe in the search: when it is tried, what it needs, what it costs, which configuration it gives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.config.compiler import compile_config
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.planner.candidate import Candidate
from ds_trainer.planner.cluster import Cluster
from ds_trainer.planner.memory.estimate import estimate_memory
from ds_trainer.planner.model_shape import ModelShape
from ds_trainer.planner.plan import Plan
from ds_trainer.planner.planned_model import PlannedModel
from ds_trainer.planner.remedies import cheapest_changes, describe_change
from ds_trainer.planner.search import Goal, fits, search
from ds_trainer.planner.step_time import step_time
from ds_trainer.utils.errors import ConfigError
from tests.planner.test_anchors import LLAMA_8B, LLAMA_70B

MODEL, LARGE = PlannedModel.from_config(LLAMA_8B, "llama-8b"), PlannedModel.from_config(LLAMA_70B, "llama-70b")
NODE = replace(Cluster.of("H100-80GB", 1, 8), host_memory=500.0)
GOAL = Goal(4096, 64, fixed=(("tp", 1), ("cp", 1), ("sp", 1)))
RUN = Candidate(8, 4096, stage=3, offload_optimizer=True, optimizer_on_nvme=True, checkpointing=True)


def test_it_is_tried_where_host_memory_does_not_suffice() -> None:
    """The states of 70B need 846 GB: more than the host has, less than with a larger host."""
    found = search(LARGE, NODE, GOAL)
    assert found.best is not None and found.best.candidate.optimizer_on_nvme
    assert found.best.nvme >= 16 * LARGE.trainable
    assert found.best.host_share <= 1
    assert any(plan.lacks_host_memory for plan in found.rejected)
    more = search(LARGE, replace(NODE, host_memory=3000.0), GOAL)
    assert more.best is not None and not any(plan.candidate.uses_nvme for plan in more.fitting)
    assert more.best.seconds < found.best.seconds
    assert fits(LARGE, NODE, GOAL)
    assert not fits(LARGE, NODE, replace(GOAL, fixed=(*GOAL.fixed, ("optimizer_on_nvme", False))))


def test_a_disk_has_a_size() -> None:
    found = search(LARGE, replace(NODE, nvme=900.0), GOAL)
    assert found.best is None
    lacking = next(plan for plan in found.rejected if plan.nvme_share > 1 and plan.host_share <= 1)
    assert "GB of NVMe on each machine" in lacking.problem
    assert search(LARGE, replace(NODE, nvme=1300.0), GOAL).best is not None


def test_what_is_in_host_memory() -> None:
    """Buffers instead of states: 4 x 4 bytes of a sub-group, and the gradients in bf16."""
    memory, per_rank = estimate_memory(LARGE, RUN), LARGE.trainable / 8
    assert memory.host_items["optimizer buffers"] == pytest.approx(16 * (1e9 + 128256 * 8192 / 8))
    assert memory.host_items["gradients"] == pytest.approx(2 * per_rank)
    assert "master weights" not in memory.host_items
    assert memory.nvme == pytest.approx(16 * per_rank)
    small = estimate_memory(MODEL, replace(RUN, world_size=64))
    assert small.host_items["optimizer buffers"] == pytest.approx(16 * MODEL.trainable / 64)
    both = estimate_memory(LARGE, replace(RUN, offload_param=True, param_on_nvme=True))
    assert both.host_items["weights"] == 2e9  # 10**9 elements
    assert both.host_items["weight buffers"] == pytest.approx(2 * 5 * max(1e8, 128256 * 8192 / 8))
    assert both.nvme == pytest.approx(18 * per_rank)


def test_a_disk_takes_time() -> None:
    kinds = (replace(RUN, optimizer_on_nvme=False), RUN, replace(RUN, offload_param=True, param_on_nvme=True))
    times = [step_time(LARGE, run, NODE) for run in kinds]
    assert times[0].seconds < times[1].seconds < times[2].seconds
    # 16 bytes an element down and up, at 70 % of 1.6 GB/s a device
    assert times[1].parts["optimizer states on NVMe"] == pytest.approx(2 * 16 * LARGE.trainable / 8 / 1.6e9 / 0.7)
    faster = replace(NODE, board=replace(NODE.board, nvme_read=16.0, nvme_write=16.0))
    part = step_time(LARGE, RUN, faster).parts["optimizer states on NVMe"]
    assert part == pytest.approx(times[1].parts["optimizer states on NVMe"] / 10)


def test_a_run_that_lacks_host_memory_gets_a_disk() -> None:
    run = replace(RUN, optimizer_on_nvme=False, accumulation=8)
    plan = Plan(LARGE, run, NODE, estimate_memory(LARGE, run, NODE))
    assert plan.problem.endswith("GB of memory on each machine")
    changes = [describe_change(plan, other) for other in cheapest_changes(plan)]
    assert "offload_optimizer='nvme', nvme_path='/local_nvme'" in changes


@pytest.mark.parametrize("ranks", [1, 8])
def test_the_configuration_of_a_plan(ranks: int) -> None:
    """DeepSpeed asserts that a shard fits a buffer: with one rank those of 8B do not fit the default."""
    run = replace(RUN, world_size=ranks, offload_param=True, param_on_nvme=True)
    args = TrainingArguments("runs", **run.arguments())
    config = compile_config(args, ParallelLayout(ranks), ModelShape.from_config(LLAMA_8B), "cuda")
    zero = "zero_optimization"
    assert config.get(f"{zero}.offload_optimizer.device") == config.get(f"{zero}.offload_param.device") == "nvme"
    assert config.get(f"{zero}.offload_param.nvme_path") == "/local_nvme"
    largest = max(group.numel for group in MODEL.parameters) / ranks
    assert largest <= config.get(f"{zero}.offload_param.buffer_size") <= largest + 2
    assert config.get(f"{zero}.offload_param.buffer_count") == 5
    assert config.get(f"{zero}.stage3_prefetch_bucket_size") == 0
    assert config.get(f"{zero}.stage3_max_reuse_distance") == 0


def test_a_prefetch_of_weights_on_nvme_is_refused() -> None:
    given = {"zero_optimization": {"stage3_prefetch_bucket_size": 1000}}
    args = TrainingArguments("runs", offload_param="nvme", nvme_path="/local_nvme", deepspeed=given)
    with pytest.raises(ConfigError, match=r"stage3_prefetch_bucket_size=1000 .* reads a weight twice"):
        compile_config(args, ParallelLayout(2), ModelShape.from_config(LLAMA_8B), "cuda")


def test_features_and_disks_together() -> None:
    """All combinations are valid candidates with arguments of their own."""
    found = search(
        MODEL,
        replace(NODE, nvme=5000.0),
        Goal(8192, 64, fixed=(("micro_batch", 1), ("stage", 3), ("chunked_loss", True))),
    )
    on_disk = [plan.candidate for plan in found.fitting if plan.candidate.uses_nvme]
    assert {(run.offload_param, run.param_on_nvme) for run in on_disk} == {(False, False), (True, False)}
    assert all(run.arguments()["loss_chunk_tokens"] for run in on_disk)
    assert found.best is not None and not found.best.candidate.uses_nvme
