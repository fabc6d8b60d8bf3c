"""What is proposed fits, with the same global batch, and every change is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_trainer.planner.candidate import Candidate
from ds_trainer.planner.cluster import Cluster
from ds_trainer.planner.memory.estimate import estimate_memory
from ds_trainer.planner.plan import Plan
from ds_trainer.planner.planned_model import PlannedModel
from ds_trainer.planner.remedies import changed_arguments, cheapest_changes, describe_change
from tests.planner.test_anchors import LLAMA_8B, LLAMA_70B

MODEL = PlannedModel.from_config(LLAMA_8B, "llama-8b")
NODE = Cluster.of("H100-80GB", 1, 8)


def plan(run: Candidate, model: PlannedModel = MODEL, cluster: Cluster = NODE) -> Plan:
    return Plan(model, run, cluster, estimate_memory(model, run, cluster))


TOO_LARGE = {
    "activations": Candidate(8, 8192, stage=3, micro_batch=6, accumulation=2),
    "model states": Candidate(8, 4096, stage=0, micro_batch=1),
    "both": Candidate(8, 16384, stage=1, micro_batch=4, accumulation=4),
    "long": Candidate(8, 131072, stage=3, micro_batch=1),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_changes_make_it_fit(name: str) -> None:
    before = plan(TOO_LARGE[name])
    assert before.problem
    found = cheapest_changes(before)
    assert len(found) == 3
    for after in found:
        assert not after.problem
        assert after.candidate.global_batch == before.candidate.global_batch
        assert after.candidate.world_size == after.cluster.world_size
        assert after.candidate.length == before.candidate.length
        assert changed_arguments(before.candidate, after.candidate)
    assert found[0].cluster == NODE
    ranks = [(after.cluster.nodes, after.time.seconds) for after in found]
    assert ranks == sorted(ranks)
    kinds = {
        (after.cluster.world_size, frozenset(changed_arguments(before.candidate, after.candidate))) for after in found
    }
    assert len(kinds) == len(found)


def test_one_change_is_enough_where_one_is() -> None:
    before = plan(Candidate(8, 8192, stage=3, micro_batch=2, accumulation=6))
    wanted = replace(before.candidate, checkpointing=True)
    assert not plan(wanted).problem
    found = cheapest_changes(before, 20)
    assert wanted in [after.candidate for after in found]
    for after in found:  # whatever is changed in addition must pay
        is_more = after.candidate.checkpointing and after.candidate != wanted
        assert not is_more or after.time.seconds < plan(wanted).time.seconds


def test_nothing_that_saves_memory_is_reversed() -> None:
    run = Candidate(8, 65536, stage=2, sp=2, micro_batch=1, accumulation=2, checkpointing=True, offload_optimizer=True)
    before = plan(run, cluster=replace(NODE, board=replace(NODE.board, memory=24)))
    assert before.problem
    for after in cheapest_changes(before, 20):
        one = after.candidate
        assert one.checkpointing and one.offload_optimizer and one.stage >= 2 and one.sp % 2 == 0


def test_more_than_two_changes_if_two_do_not_help() -> None:
    before = plan(Candidate(8, 8192, stage=0, micro_batch=4, accumulation=2), PlannedModel.from_config(LLAMA_70B))
    found = cheapest_changes(before)
    assert found and not any(after.problem for after in found)
    assert found[0].cluster == NODE
    assert len(changed_arguments(before.candidate, found[0].candidate)) > 2


def test_more_machines_if_nothing_else_helps() -> None:
    model = PlannedModel.from_config(LLAMA_70B)
    cluster = replace(NODE, host_memory=64.0)
    before = plan(Candidate(8, 8192, micro_batch=1, accumulation=64), model, cluster)
    found = cheapest_changes(before)
    assert [after.cluster.nodes for after in found] == sorted({after.cluster.nodes for after in found})
    assert found[0].cluster.nodes > 1 and found[0].candidate.world_size == found[0].cluster.world_size
    assert not found[0].problem and found[0].candidate.global_batch == 512
    assert describe_change(before, found[0]).startswith(
        f"{found[0].cluster.nodes} x 8 devices, gradient_accumulation_steps="
    )


def test_more_devices_of_a_machine_before_more_machines() -> None:
    run = Candidate(2, 8192, stage=3, micro_batch=1, accumulation=32, checkpointing=True, offload_optimizer=True)
    small = replace(NODE, devices_per_node=2, board=replace(NODE.board, memory=24))
    model = PlannedModel.from_config(LLAMA_70B)
    found = cheapest_changes(Plan(model, run, small, estimate_memory(model, run, small)), 20)
    sizes = [(after.cluster.nodes, after.cluster.devices_per_node) for after in found]
    assert {(1, 4), (1, 8), (2, 8)} & set(sizes) and sizes == sorted(sizes)
    assert all(devices == 8 for nodes, devices in sizes if nodes > 1)


def test_offload_is_reversed_if_the_host_is_too_small() -> None:
    run = Candidate(8, 8192, stage=3, micro_batch=1, accumulation=8, checkpointing=True, offload_optimizer=True)
    before = plan(run, cluster=replace(NODE, host_memory=200.0))
    assert before.host_share > 1 and before.problem.endswith("GB of memory on each machine")
    first = cheapest_changes(before)[0]
    assert changed_arguments(run, first.candidate) == {"offload_optimizer": "none"}


def test_a_large_batch_of_evaluation_is_reduced() -> None:
    run = Candidate(8, 8192, stage=3, micro_batch=1, checkpointing=True, eval_micro_batch=64)
    before = plan(run)
    assert before.memory.peak.name == "evaluation" and before.problem
    first = cheapest_changes(before)[0]
    assert changed_arguments(run, first.candidate) == {"per_device_eval_batch_size": 1}


def test_what_is_not_searched_for_stays() -> None:
    run = Candidate(8, 8192, micro_batch=8, attention="eager", state_bytes=2, float32_sums=True)
    before = plan(run)
    assert before.problem
    for after in cheapest_changes(before):
        one = after.candidate
        assert (one.attention, one.state_bytes, one.float32_sums) == ("eager", 2, True)


def test_changes_in_words() -> None:
    run = Candidate(8, 8192, stage=3, micro_batch=2, accumulation=2)
    after = replace(run, checkpointing=True, offload_optimizer=True, micro_batch=1, accumulation=4)
    assert describe_change(plan(run), plan(after)) == (
        "per_device_train_batch_size=1, gradient_accumulation_steps=4, activation_checkpointing=True, "
        "offload_optimizer='cpu'"
    )
    back = changed_arguments(replace(run, sp=2, offload_param=True), run)
    assert back == {"sequence_parallel_size": 1, "offload_param": "none"}
    assert changed_arguments(run, run) == {}


def test_without_hpz_less_memory_is_needed() -> None:
    """It is a change like others; where it was not, none proposes it, and others keep it."""
    model, cluster = PlannedModel.from_config(LLAMA_70B), Cluster.of("H100-80GB", 16, 8)
    base = Candidate(128, 4096, micro_batch=4, checkpointing=True)
    assert not plan(base, model, cluster).problem
    before = plan(replace(base, hpz=8, micro_batch=8), model, cluster)
    assert before.problem
    found = cheapest_changes(before, 20)
    assert {1, 8} <= {after.candidate.hpz for after in found}
    texts = [describe_change(before, after) for after in found if after.candidate.hpz == 1]
    assert any("'zero_hpz_partition_size': 1" in text for text in texts), texts
    without = cheapest_changes(plan(replace(base, micro_batch=16), model, cluster), 20)
    assert without and all(after.candidate.hpz == 1 for after in without)
