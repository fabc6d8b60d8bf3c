"""However a model comes (with its weights, on meta with a source of them, made under zero.Init), it trains the same.

Every case is trained by ranks and compared with plain PyTorch in one process: losses, gradient norms, weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer.engine.loading.weight_source import attached_weights
from tests.support import layouts
from tests.support.compare import assert_equal
from tests.support.loading import on_meta, under_zero_init
from tests.support.models import PlainLanguageModel, RaggedTokens, tiny_llama
from tests.support.oracle import Trajectory, train_plainly
from tests.support.pool import pool
from tests.support.runs import train_and_report
from tests.support.tensor_models import FAMILIES

make_data = partial(RaggedTokens, 37)
GLOBAL_BATCH, STEPS = 8, 3
ARGUMENTS: dict[str, Any] = dict(optim="sgd", learning_rate=0.2, weight_decay=0.0, max_grad_norm=0.5, max_steps=STEPS)

HOW: dict[str, Callable[[Callable[[], nn.Module]], nn.Module]] = {
    "handed in": lambda make: make(),
    "on meta": lambda make: on_meta(make()),
    "shifted": lambda make: on_meta(make(), shift=1),
    "zero.Init": under_zero_init,
}


def report(directory: str, make: Any, how: str, arguments: dict[str, Any]) -> tuple[Trajectory, dict[str, int]]:
    """The trajectory of this rank, and how many elements of each tensor it asked for."""
    model = HOW[how](make)
    source: Any = attached_weights(model)
    replicas = torch.distributed.get_world_size() // arguments.get("tensor_parallel_size", 1)
    sizes = {"per_device_train_batch_size": GLOBAL_BATCH // replicas}
    found = train_and_report(lambda: model, make_data, directory, **{**ARGUMENTS, **sizes, **arguments})
    return found, {} if source is None else source.asked


def expected(make: Callable[[], nn.Module]) -> Trajectory:
    return train_plainly(
        make(), make_data(), optimizer="sgd", learning_rate=0.2, weight_decay=0.0, clip=0.5, steps=STEPS,
        global_batch=GLOBAL_BATCH,
    )  # fmt: skip


KEPT = {"deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 0}}}
OFFLOADED = {"deepspeed": {"zero_optimization": {"offload_param": {"device": "cpu"}}}}
TWO_RANKS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "handed in, ZeRO 3": (tiny_llama, "handed in", {"zero_stage": 3}),
    **{f"on meta, ZeRO {stage}": (tiny_llama, "on meta", {"zero_stage": stage}) for stage in range(4)},
    **{f"zero.Init, ZeRO {stage}": (tiny_llama, "zero.Init", {"zero_stage": stage}) for stage in (0, 2, 3)},
    "offloaded": (tiny_llama, "on meta", {"zero_stage": 3, **OFFLOADED}),
    "handed in, offloaded": (tiny_llama, "handed in", {"zero_stage": 3, **OFFLOADED}),
    "nothing persists": (tiny_llama, "on meta", {"zero_stage": 3, **KEPT}),
    "tied": (partial(tiny_llama, tied=True), "on meta", {"zero_stage": 3}),
    "recurrent": (PlainLanguageModel, "on meta", {"zero_stage": 3}),
    "recurrent, ZeRO 1": (PlainLanguageModel, "on meta", {"zero_stage": 1}),
    "tp": (tiny_llama, "on meta", {"zero_stage": 3, "tensor_parallel_size": 2}),
    "tp, ZeRO 1": (tiny_llama, "on meta", {"zero_stage": 1, "tensor_parallel_size": 2}),
    "tp, handed in": (tiny_llama, "handed in", {"zero_stage": 3, "tensor_parallel_size": 2}),
    "tp, handed in, ZeRO 0": (tiny_llama, "handed in", {"zero_stage": 0, "tensor_parallel_size": 2}),
    "tp, zero.Init": (tiny_llama, "zero.Init", {"zero_stage": 3, "tensor_parallel_size": 2}),
    "tp, norms of heads": (FAMILIES["qwen3"], "on meta", {"zero_stage": 3, "tensor_parallel_size": 2}),
    "tp, norms of heads, ZeRO 2": (FAMILIES["qwen3"], "on meta", {"zero_stage": 2, "tensor_parallel_size": 2}),
    "tp, tied": (layouts.tied, "on meta", {"zero_stage": 3, "tensor_parallel_size": 2}),
    "tp, empty slices": (
        FAMILIES["llama with 1 key-value head"], "on meta", {"zero_stage": 3, "tensor_parallel_size": 2},
    ),
}  # fmt: skip


def all_reports(directory: str, cases: dict[str, Any]) -> dict[str, Any]:
    return {name: report(f"{directory}/{name}", *case) for name, case in cases.items()}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: Any) -> list[dict[str, Any]]:
    return pool(2).run(partial(all_reports, str(tmp_path_factory.mktemp("two"))), TWO_RANKS, timeout=900)


@pytest.mark.parametrize("name", TWO_RANKS)
def test_every_way_in_gives_the_numbers_of_one_process(name: str, two_ranks: list[dict[str, Any]]) -> None:
    wanted = expected(TWO_RANKS[name][0])
    for found in two_ranks:
        assert_equal(found[name][0], wanted)
