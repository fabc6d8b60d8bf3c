"""A new model that is initialized shard by shard trains as one that one process initialized whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer.engine.loading.empty_model import empty_model
from ds_trainer.engine.loading.new_weights import NewWeights
from ds_trainer.engine.loading.weight_source import attach_weight_source
from ds_trainer.parallel.shard_slices import ShardSlice
from tests.support.compare import assert_equal
from tests.support.models import PlainLanguageModel, RaggedTokens, tiny_llama
from tests.support.oracle import Trajectory, train_plainly
from tests.support.pool import pool
from tests.support.runs import train_and_report

make_data = partial(RaggedTokens, 37)
GLOBAL_BATCH, STEPS, SEED = 8, 2, 11
ARGUMENTS: dict[str, Any] = dict(optim="sgd", learning_rate=0.2, weight_decay=0.0, max_grad_norm=0.5, max_steps=STEPS)

CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "ZeRO 1": (tiny_llama, {"zero_stage": 1}),
    "ZeRO 3": (tiny_llama, {"zero_stage": 3}),
    "tied": (partial(tiny_llama, tied=True), {"zero_stage": 3}),
    "tensor parallel": (tiny_llama, {"zero_stage": 3, "tensor_parallel_size": 2}),
    "recurrent": (PlainLanguageModel, {"zero_stage": 3}),
}


def fresh(make: Callable[[], nn.Module]) -> nn.Module:
    model = empty_model(make)
    attach_weight_source(model, NewWeights(model, SEED))
    return model


def filled_model(make: Callable[[], nn.Module]) -> nn.Module:
    empty, model = empty_model(make), make()
    source = NewWeights(empty, SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            source.fill(name, ShardSlice.whole(tuple(parameter.shape)), parameter.view(-1))
    return model


def trajectories(directory: str) -> dict[str, Trajectory]:
    found = {}
    for name, (make, arguments) in CASES.items():
        replicas = torch.distributed.get_world_size() // arguments.get("tensor_parallel_size", 1)
        sizes = {"per_device_train_batch_size": GLOBAL_BATCH // replicas}
        found[name] = train_and_report(
            partial(fresh, make), make_data, f"{directory}/{name}", **{**ARGUMENTS, **sizes, **arguments}
        )
    return found


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: Any) -> list[dict[str, Trajectory]]:
    return pool(2).run(trajectories, str(tmp_path_factory.mktemp("fresh")), timeout=600)


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", CASES)
def test_ranks_train_a_new_model_like_one_process(name: str, two_ranks: list[dict[str, Trajectory]]) -> None:
    wanted = train_plainly(
        filled_model(CASES[name][0]), make_data(), optimizer="sgd", learning_rate=0.2, weight_decay=0.0, clip=0.5,
        steps=STEPS, global_batch=GLOBAL_BATCH
    )  # fmt: skip
    for found in two_ranks:
        assert_equal(found[name], wanted)
