"""Features that save activations: what they cost, and that they are tried only where they are needed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.planner import candidate
from ds_trainer.planner.candidate import CHUNK_TOKENS, FEATURES, Candidate
from ds_trainer.planner.cluster import Cluster
from ds_trainer.planner.memory.estimate import estimate_memory
from ds_trainer.planner.plan import Plan
from ds_trainer.planner.planned_model import PlannedModel
from ds_trainer.planner.remedies import cheapest_changes
from ds_trainer.planner.search import Goal, candidates, feature_sets, search
from ds_trainer.planner.step_time import step_time
from tests.planner.test_anchors import LLAMA_8B

MODEL = PlannedModel.from_config(LLAMA_8B, "llama-8b")
ONE, NODE = Cluster.of("H100-80GB", 1, 1), Cluster.of("H100-80GB", 1, 8)


@pytest.fixture
def all_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidate, "SEARCHED_FEATURES", tuple(FEATURES))


def test_features_that_can_be_started_are_searched() -> None:
    fields = TrainingArguments.__dataclass_fields__.keys()
    assert set(candidate.SEARCHED_FEATURES) == {name for name, found in FEATURES.items() if found.keys() <= fields}


@pytest.mark.usefixtures("all_features")
def test_arguments_have_the_features() -> None:
    run = Candidate(8, 4096, checkpointing=True, chunked_loss=True, tiled_mlp=True, offload_activations=True)
    wanted = {"loss_chunk_tokens": CHUNK_TOKENS, "tiled_mlp": True, "activation_offload": True}
    assert run.arguments().items() >= wanted.items()
    assert not replace(run, chunked_loss=False, tiled_mlp=False, offload_activations=False).arguments().keys() & wanted
    assert run.describe().endswith("activation checkpointing, chunked loss, tiled MLP, offload activations")


@pytest.mark.cases(1)
@pytest.mark.usefixtures("all_features")
@pytest.mark.parametrize(("cluster", "length", "batch"), [(ONE, 98304, 2), (NODE, 32768, 16)])
def test_a_feature_is_tried_only_where_fewer_do_not_fit(cluster: Cluster, length: int, batch: int) -> None:
    goal = Goal(length, batch)
    found = {replace(plan.candidate, one_pass=False) for plan in search(MODEL, cluster, goal).fitting}
    assert len({sum(getattr(run, name) for name in FEATURES) for run in found}) > 2
    for base in candidates(MODEL, cluster, goal, []):
        runs = [replace(base, **dict.fromkeys(names, True)) for names in feature_sets(MODEL, base, ())]
        fitting = [run for run in runs if Plan(MODEL, run, cluster, estimate_memory(MODEL, run, cluster)).fits]
        every = max(runs, key=lambda run: sum(getattr(run, name) for name in FEATURES))
        if not fitting:
            assert not found & set(runs)
            continue
        fewest = min(sum(getattr(run, name) for name in FEATURES) for run in fitting)
        needed = {run for run in fitting if sum(getattr(run, name) for name in FEATURES) == fewest}
        assert needed <= found
        assert found & set(runs) <= needed | {every}


@pytest.mark.usefixtures("all_features")
def test_longer_sequences_fit_with_them() -> None:
    goal = Goal(131072, 1)
    best = search(MODEL, ONE, goal).best
    assert best is not None and best.candidate.chunked_loss
    fixed = tuple(dict.fromkeys(FEATURES, False).items())
    assert search(MODEL, ONE, replace(goal, fixed=fixed)).best is None


@pytest.mark.usefixtures("all_features")
def test_a_feature_is_a_remedy() -> None:
    run = Candidate(1, 65536, stage=3, checkpointing=True, offload_optimizer=True, offload_param=True)
    before = Plan(MODEL, run, ONE, estimate_memory(MODEL, run, ONE))
    assert not before.fits
    found = [after.candidate for after in cheapest_changes(before)]
    assert replace(run, chunked_loss=True) in found
    assert all(one.checkpointing and one.offload_param for one in found if one.world_size == 1)


def test_what_they_cost() -> None:
    run = Candidate(8, 32768, stage=3, checkpointing=True, sp=2)
    base = step_time(MODEL, run, NODE)
    layers, rows = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336), 128256 * 4096
    chunked = step_time(MODEL, replace(run, chunked_loss=True), NODE).parts["matrix products"]
    # Logits are computed again: a fourth product with the head.
    assert chunked / base.parts["matrix products"] - 1 == pytest.approx(rows / (4 * layers + 3 * rows), rel=0.02)
    tiled = step_time(MODEL, replace(run, tiled_mlp=True), NODE)
    mlp = 3 * 4096 * 14336 / (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)  # of the products of a layer
    head = 1 - 128256 * 4096 / (32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128256 * 4096)
    more = tiled.parts["matrix products"] / base.parts["matrix products"] - 1
    assert more == pytest.approx(mlp * head / 4, rel=0.02)  # of four forward passes
    moved = step_time(MODEL, replace(run, offload_activations=True), NODE).parts["offloaded activations"]
    size = 32 * 16384 * 4096 * 2  # inputs of 32 layers, 16,384 tokens of a rank
    assert 0 < moved < 2 * size / (64e9 * 0.7)  # a part is hidden


def test_what_they_save() -> None:
    run = Candidate(1, 65536, stage=3, checkpointing=True, offload_optimizer=True, offload_param=True)

    def at(name: str, **features: bool) -> float:
        memory = estimate_memory(MODEL, replace(run, **features))  # type: ignore[arg-type]
        return next(moment.total for moment in memory.moments if moment.name == name)

    saved = at("logits and loss") - at("logits and loss", chunked_loss=True)
    logits, output = 65536 * 128256 * 12, 65536 * 4096 * 2
    # Then the last norm is the largest moment.
    assert saved == pytest.approx(logits + output - 9 * output, rel=0.001)
    layer = "backward pass of the first layer"
    tiled = at(layer) - at(layer, tiled_mlp=True)
    assert tiled == pytest.approx(65536 * 14336 * 12 * (1 - 4096 / 65536), rel=0.35)
    assert at("a layer's forward pass") - at("a layer's forward pass", offload_activations=True) == 30 * output
    short = Candidate(1, 512, stage=3)
    assert feature_sets(MODEL, short, ()) == [()]  # neither is it longer than a chunk, nor than a tile


def test_a_chunked_loss_has_one_pass_where_there_is_room_for_the_gradient_of_the_head() -> None:
    found = [plan for plan in search(MODEL, NODE, Goal(32768, 16)).fitting if plan.candidate.chunked_loss]
    assert {plan.candidate.one_pass for plan in found} == {True, False}
    for plan in found:
        run = replace(plan.candidate, one_pass=not plan.candidate.one_pass)
        other = Plan(MODEL, run, NODE, estimate_memory(MODEL, run, NODE))
        if plan.candidate.one_pass:
            assert plan.time.seconds < other.time.seconds and plan.memory.tensors >= other.memory.tensors
        else:
            assert not other.fits


def test_one_pass_has_a_float32_gradient_of_a_trained_head_between_the_passes() -> None:
    run = Candidate(8, 4096, stage=3, checkpointing=True, chunked_loss=True)
    before, after = (estimate_memory(MODEL, one, NODE).moments for one in (run, replace(run, one_pass=True)))
    more = {a.name: a.total - b.total for a, b in zip(after, before, strict=True)}
    assert {size for size in more.values() if size} == {4.0 * 128256 * 4096}
    assert [name for name, size in more.items() if size] == ["logits and loss", "gradient of the LM head"]
