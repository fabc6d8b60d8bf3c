"""The search tries every valid way to run, ranks what fits, and says why the rest does not."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from ds_trainer.planner.candidate import FEATURES, Candidate
from ds_trainer.planner.cluster import Cluster
from ds_trainer.planner.memory.estimate import estimate_memory
from ds_trainer.planner.plan import Plan
from ds_trainer.planner.planned_model import PlannedModel
from ds_trainer.planner.search import Goal, candidates, fits, nearest_batches, search
from ds_trainer.planner.step_time import _zero
from tests.planner.test_anchors import LLAMA_8B, LLAMA_70B

MODEL = PlannedModel.from_config(LLAMA_8B, "llama-8b")
NODE = Cluster.of("H100-80GB", 1, 8)


def test_every_plan_has_the_global_batch_and_fits() -> None:
    result = search(MODEL, NODE, Goal(8192, 64))
    assert result.fitting and result.rejected
    assert {plan.candidate.global_batch for plan in (*result.fitting, *result.rejected)} == {64}
    assert all(plan.memory.device <= plan.limit for plan in result.fitting)
    assert all(plan.memory.device > plan.limit for plan in result.rejected)
    speeds = [plan.tokens_per_second for plan in result.fitting]
    assert speeds == sorted(speeds, reverse=True)


def test_candidates_differ_and_are_valid() -> None:
    conflicts: list[str] = []
    found = list(candidates(MODEL, NODE, Goal(8192, 64), conflicts))
    assert len(set(found)) == len(found)
    assert {one.tp for one in found} == {1, 2, 4, 8}
    assert all(one.tp * one.cp * one.sp * one.replicas == 8 for one in found)
    assert not any(one.offload_param and one.stage != 3 for one in found)
    assert not any(one.stage == 0 and one.tp > 1 for one in found)  # 16 bits


def test_what_is_fixed_is_kept() -> None:
    fixed = (("stage", 3), ("tp", 2), ("checkpointing", True), ("offload_optimizer", False))
    found = list(candidates(MODEL, NODE, Goal(8192, 64, fixed=fixed), []))
    assert found and all(getattr(one, name) == value for one in found for name, value in fixed)


def test_what_is_known_of_a_run_counts() -> None:
    fixed = (("stage", 0), ("micro_batch", 1), ("tp", 1), ("cp", 1), ("sp", 1), ("checkpointing", False))
    [adam] = candidates(MODEL, NODE, Goal(2048, 8, fixed=fixed), [])
    [lion] = candidates(MODEL, NODE, Goal(2048, 8, fixed=(*fixed, ("state_bytes", 4.0), ("attention", "eager"))), [])
    assert (adam.state_bytes, adam.attention, lion.state_bytes, lion.attention) == (8, "sdpa", 4, "eager")
    states = [estimate_memory(MODEL, one).moments[0].items["optimizer states"] for one in (adam, lion)]
    assert states[0] == 2 * states[1]
    assert (
        estimate_memory(MODEL, lion).moments[0].items["activations"]
        > 2e9 + (estimate_memory(MODEL, adam).moments[0].items["activations"])
    )


def test_impossible_layouts_are_named() -> None:
    few_heads = {**LLAMA_8B, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 1024}
    result = search(PlannedModel.from_config(few_heads), NODE, Goal(8192, 64))
    assert any("4 query heads" in reason for reason in result.conflicts)
    assert any("2 key heads are fewer than 4" in reason for reason in result.conflicts)


def test_nothing_fits() -> None:
    result = search(PlannedModel.from_config(LLAMA_70B), replace(NODE, host_memory=64.0), Goal(8192, 64))
    assert result.best is None and result.rejected
    problems = [plan.problem for plan in result.rejected]
    assert any("GB of a device" in problem for problem in problems)
    assert any("GB of memory on each machine" in problem for problem in problems)
    assert result.rejected[0].excess == pytest.approx(min(plan.excess for plan in result.rejected), abs=1e-3)
    assert min(plan.excess for plan in result.rejected) > 1


@pytest.mark.parametrize("change", ["longer", "fewer devices", "smaller devices"])
def test_less_room_never_fits_more(change: str) -> None:
    goal, cluster = Goal(8192, 64), NODE
    if change == "longer":
        harder = (goal.__class__(32768, 64), cluster)
    elif change == "fewer devices":
        harder = (goal, replace(cluster, devices_per_node=4))
    else:
        harder = (goal, replace(cluster, board=replace(cluster.board, memory=40.0)))
    fixed = [("stage", 3), ("checkpointing", True), ("tp", 1), ("cp", 1), ("sp", 1), ("micro_batch", 1)]
    fixed += [(name, False) for name in ("offload_optimizer", *FEATURES)]
    easy = search(MODEL, cluster, replace(goal, fixed=tuple(fixed)))
    hard = search(MODEL, harder[1], replace(harder[0], fixed=tuple(fixed)))
    assert len(hard.fitting) <= len(easy.fitting)
    smallest = [min(plan.memory.device for plan in (*one.fitting, *one.rejected)) for one in (easy, hard)]
    if change != "smaller devices":
        assert smallest[0] < smallest[1]


def test_thousands_of_candidates_take_a_moment() -> None:
    began = time.process_time()
    result = search(MODEL, Cluster.of("H100", 16, 8), Goal(32768, 1024))
    assert result.tried > 3000
    assert time.process_time() - began < 10  # about 1 s; a loop that allocates would take minutes


@pytest.mark.parametrize(
    ("length", "global_batch", "memory"),
    [
        (8192, 64, 80.0),
        (1024, 512, 56.0),  # gradients are added in float32 if the micro-batch is small enough
    ],
)
def test_what_is_not_evaluated_does_not_fit(length: int, global_batch: int, memory: float) -> None:
    cluster = replace(NODE, board=replace(NODE.board, memory=memory))
    fixed = {**dict.fromkeys(FEATURES, False), "every_n_layers": 1}
    goal = Goal(length, global_batch, fixed=tuple(fixed.items()))
    result = search(MODEL, cluster, goal)
    every = [
        Plan(MODEL, one, cluster, estimate_memory(MODEL, one, cluster)) for one in candidates(MODEL, cluster, goal, [])
    ]
    assert len(every) == result.tried > len(result.fitting) + len(result.rejected)
    assert {plan.candidate for plan in result.fitting} == {plan.candidate for plan in every if not plan.problem}


def test_a_micro_batch_is_any_divisor() -> None:
    found = candidates(MODEL, NODE, Goal(8192, 8 * 12, fixed=(("tp", 1), ("cp", 1), ("sp", 1))), [])
    assert {(one.micro_batch, one.accumulation) for one in found} == {(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)}


def test_a_candidate_as_arguments() -> None:
    run = Candidate(8, 4096, stage=3, micro_batch=2, accumulation=4, tp=2, offload_optimizer=True, checkpointing=True)
    assert run.arguments() == {
        "zero_stage": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "activation_checkpointing": True,
        "bf16": True,
        "tensor_parallel_size": 2,
        "offload_optimizer": "cpu",
    }
    assert run.replicas == 4 and run.global_batch == 32


@pytest.mark.parametrize(
    ("wanted", "fixed", "nearest"),
    [
        (7, {"tp": 1, "cp": 1, "sp": 1}, [8]),
        (13, {"tp": 1, "cp": 1, "sp": 1}, [8, 16]),
        (13, {"tp": 2, "cp": 1, "sp": 1}, [12, 16]),
        (64, {"tp": 1, "cp": 1, "sp": 1, "micro_batch": 3}, [48, 72]),
        (13, {}, [13]),
    ],
)
def test_global_batches_that_work(wanted: int, fixed: dict[str, int], nearest: list[int]) -> None:
    goal = Goal(8192, wanted, fixed=tuple(fixed.items()))
    assert nearest_batches(MODEL, NODE, goal) == nearest
    assert bool(list(candidates(MODEL, NODE, goal, []))) == (wanted in nearest)
    for batch in nearest:
        assert list(candidates(MODEL, NODE, replace(goal, global_batch=batch), []))


def test_fits_is_what_search_finds() -> None:
    goal = Goal(8192, fixed=(("offload_optimizer", False),))
    for model in (MODEL, PlannedModel.from_config(LLAMA_70B)):
        assert fits(model, NODE, goal) == (search(model, NODE, goal).best is not None)
    assert fits(MODEL, NODE, goal) and not fits(PlannedModel.from_config(LLAMA_70B), NODE, goal)


def test_some_layers_are_recomputed_where_all_need_not() -> None:
    """The search finds what brute force over the number of recomputed layers finds, and it is faster than all."""
    fixed = (("stage", 3), ("tp", 1), ("cp", 1), ("sp", 1), ("offload_optimizer", False), ("micro_batch", 1))
    goal = Goal(8192, 8, fixed=(*fixed, *((name, False) for name in FEATURES)))
    result = search(MODEL, NODE, goal)
    every = [
        replace(one, every_n_layers=layers)
        for one in candidates(MODEL, NODE, goal, [])
        for layers in ((1, 2, 4) if one.checkpointing else (1,))
    ]
    fitting = [plan for one in every if (plan := Plan(MODEL, one, NODE, estimate_memory(MODEL, one, NODE))).fits]
    assert result.best is not None and result.best.candidate.every_n_layers > 1
    assert result.best.candidate == min(fitting, key=lambda plan: plan.seconds).candidate
    layers = result.best.candidate.every_n_layers
    assert result.best.candidate.arguments()["activation_checkpointing_kwargs"] == {"every_n_layers": layers}
    whole = replace(result.best.candidate, every_n_layers=1)
    assert result.best.seconds < Plan(MODEL, whole, NODE, estimate_memory(MODEL, whole, NODE)).seconds


HPZ_MODEL = PlannedModel.from_config(LLAMA_70B)


def test_hpz_is_a_candidate_on_several_machines_with_zero_3() -> None:
    cluster = Cluster.of("H100-80GB", 128, 8)
    result = search(HPZ_MODEL, cluster, Goal(4096, 4096, fixed=(("tp", 1),)))
    assert result.best is not None
    assert (result.best.candidate.stage, result.best.candidate.hpz) == (3, 8)
    assert result.best.candidate.arguments()["deepspeed"] == {"zero_optimization": {"zero_hpz_partition_size": 8}}
    assert "hpZ 8" in result.best.candidate.describe()
    without = search(HPZ_MODEL, cluster, Goal(4096, 4096, fixed=(("tp", 1), ("hpz", 1)))).best
    assert without is not None and result.best.seconds < without.seconds
    found = list(candidates(HPZ_MODEL, cluster, Goal(4096, 4096), []))
    assert {(run.tp, run.hpz) for run in found if run.hpz > 1} == {(1, 8), (2, 4), (4, 2)}
    assert all(run.stage == 3 and not run.offload_param for run in found if run.hpz > 1)


@pytest.mark.parametrize(("nodes", "devices"), [(1, 8), (4, 1), (4, 7)])
def test_hpz_stays_within_a_machine(nodes: int, devices: int) -> None:
    cluster = Cluster.of("H100-80GB", nodes, devices)
    found = {(run.tp, run.hpz) for run in candidates(HPZ_MODEL, cluster, Goal(4096), [])}
    assert {size for size in found if size[1] > 1} == ({(1, 7)} if devices == 7 else set())


@pytest.mark.parametrize(("given", "wanted"), [(1, {1}), (4, {4}), (3, set())])
def test_a_given_hpz_is_kept(given: int, wanted: set[int]) -> None:
    cluster = Cluster.of("H100-80GB", 4, 8)
    assert {run.hpz for run in candidates(HPZ_MODEL, cluster, Goal(4096, fixed=(("hpz", given),)), [])} == wanted


def test_the_second_shards_are_counted_where_the_first_are() -> None:
    cluster, run = Cluster.of("H100-80GB", 128, 8), Candidate(1024, 4096, checkpointing=True)
    second = 2 * HPZ_MODEL.total / 8
    for more, place in (({}, "device"), ({"offload_optimizer": True, "offload_param": True}, "host")):
        before, after = (
            estimate_memory(HPZ_MODEL, replace(run, hpz=hpz, **more), cluster)  # type: ignore[arg-type]
            for hpz in (1, 8)
        )
        assert after.tensors - before.tensors == pytest.approx(second if place == "device" else 0, abs=1)
        assert after.host - before.host == pytest.approx(second if place == "host" else 0, abs=1)


def test_one_gather_of_a_step_leaves_the_machine() -> None:
    """Of 2 in each micro-batch. Frozen weights, whose second shards stay, are gathered within it only."""
    model = PlannedModel.from_config(LLAMA_70B, lora_rank=8)
    slow = Cluster.of("H100-80GB", 2, 8)
    slow = replace(slow, board=replace(slow.board, network=1e-6))  # nothing else counts
    for each, share in ((HPZ_MODEL, 1.0), (model, model.trainable / model.total)):
        for accumulation in (1, 4):
            run = Candidate(16, 4096, accumulation=accumulation)
            flat, second = (_zero(each, replace(run, hpz=hpz), slow)[0] for hpz in (1, 8))
            assert second / flat == pytest.approx(share / (2 * accumulation), rel=1e-2)
