"""Plans with divided experts: memory of a rank, what is sent, and where whole experts are faster."""

from __future__ import annotations

import itertools
from functools import cache

import pytest

from ds_trainer.planner.calibration import Calibration
from ds_trainer.planner.candidate import Candidate
from ds_trainer.planner.cluster import Cluster
from ds_trainer.planner.memory.estimate import estimate_memory
from ds_trainer.planner.planned_model import PlannedModel
from ds_trainer.planner.search import Goal, candidates
from ds_trainer.planner.step_time import exchange_seconds, exchanged_bytes, usual_seconds


@cache
def model(kind: str = "Qwen3MoeConfig") -> PlannedModel:
    """Qwen3-30B-A3B."""
    import transformers

    shape = dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32)
    experts = dict(moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8) if "Moe" in kind else {}
    rest = dict(num_key_value_heads=4, head_dim=128, vocab_size=151936, tie_word_embeddings=False)
    return PlannedModel.from_config(getattr(transformers, kind)(**shape, **experts, **rest).to_dict())


def run(devices: int = 8, micro_batch: int = 1, **values: object) -> Candidate:
    return Candidate(devices, 4096, micro_batch=micro_batch, checkpointing=True, chunked_loss=True, **values)  # type: ignore[arg-type]


EXPERTS = 48 * 128 * 3 * 2048 * 768


def test_the_experts_of_a_model_are_found() -> None:
    assert (model().stacked_experts, model().expert_elements) == (128, (EXPERTS, EXPERTS))
    assert (model("Qwen3Config").stacked_experts, model("Qwen3Config").expert_elements) == (1, (0, 0))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_holds_its_part_of_the_experts(stage: int) -> None:
    """Weights by ep; states of ZeRO as without it, because a part is divided among as many ranks fewer."""
    precision = "bf16" if stage else "fp32"
    whole, divided = (
        estimate_memory(model(), run(stage=stage, ep=ep, precision=precision)).shared.states for ep in (1, 4)
    )
    lacking = 0 if stage == 3 else (2 if stage else 4) * EXPERTS * 3 // 4
    assert whole["weights"] - divided["weights"] == pytest.approx(lacking, rel=1e-6)
    if stage:
        assert divided["optimizer states"] == whole["optimizer states"]
    else:
        assert whole["optimizer states"] - divided["optimizer states"] == pytest.approx(8 * EXPERTS * 3 / 4)


def test_what_is_sent() -> None:
    """Of 8 chosen experts of a token 7/8 are on other ranks."""
    divided = run(stage=1, ep=8)
    assert exchanged_bytes(model(), divided) == 4096 * 8 * 2048 * 2 * 7 / 8
    one, two = Cluster.of("H100-80GB", 1, 8), Cluster.of("H100-80GB", 2, 8)
    in_machine, over_network = exchange_seconds(model(), divided, one), exchange_seconds(model(), run(16, ep=16), two)
    assert over_network > 3 * in_machine > 0
    assert exchange_seconds(model(), run(), one) == 0


@pytest.mark.parametrize("nodes", [1, 8])
def test_whole_experts_are_faster_with_many_tokens(nodes: int) -> None:
    cluster = Cluster.of("H100-80GB", nodes, 8)
    ratio = [
        usual_seconds(model(), run(8 * nodes, size, ep=8), cluster)
        / usual_seconds(model(), run(8 * nodes, size), cluster)
        for size in (1, 2, 4, 16)
    ]
    assert ratio[0] < 1 < ratio[1]
    assert ratio == sorted(ratio)


def test_routing_is_taken_from_runs() -> None:
    """The share of the busiest of 128 experts, 16 of which are on a rank: even, four times the mean, everything."""
    cluster, divided, found = Cluster.of("H100-80GB", 1, 8), run(8, 16, stage=1, ep=8), []
    for share, imbalance in ((1 / 128, 1.0), (4 / 128, 8 * (4 / 128 + 124 / 128 * 15 / 127)), (None, 1.3), (1.0, 8.0)):
        learned, _, _ = Calibration(1.0, busiest_expert=share).applied(model(), cluster, Goal(4096))
        assert learned.imbalance(8) == pytest.approx(imbalance)
        times = exchange_seconds(learned, divided, cluster), usual_seconds(learned, divided, cluster)
        found.append((imbalance, *times, estimate_memory(learned, divided).tensors))
    for one, other in itertools.pairwise(sorted(found)):
        assert all(small < large for small, large in zip(one, other, strict=True))


def test_what_is_searched() -> None:
    """Nothing that a rule refuses, and only a part of a machine unless another size was given."""
    cluster = Cluster.of("H100-80GB", 2, 8)
    found = list(candidates(model(), cluster, Goal(4096), []))
    divided = [one for one in found if one.ep > 1]
    assert {one.ep for one in divided if one.tp == 1} == {8}
    assert {one.ep for one in divided if one.tp == 4} == {2}
    assert not any(one.stage == 0 or one.offload_optimizer or one.offload_param or one.hpz > 1 for one in divided)
    assert divided[0].arguments()["expert_parallel_size"] == divided[0].ep
    assert f"ep {divided[0].ep}" in divided[0].describe()
    fixed = {one.ep for one in candidates(model(), cluster, Goal(4096, fixed=(("ep", 16),)), [])}
    assert fixed == {16}
    assert {one.ep for one in candidates(model("Qwen3Config"), cluster, Goal(4096), [])} == {1}
