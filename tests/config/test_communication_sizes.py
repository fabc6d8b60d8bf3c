"""Buckets, prefetch and overlap in the compiled configuration; in a run they change the number of messages only."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.config.compiler import compile_config
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.planner.cluster import Cluster
from ds_trainer.planner.model_shape import ModelShape
from tests.support.pool import pool

WIDTH, LAYERS = 500, 64  # 16 million elements in 64 matrices and as many biases


class Chain(nn.Module):
    """Many small parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(hidden_size=WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = x
        for layer in self.layers:
            found = found + 0.1 * torch.tanh(layer(found))
        return {"loss": nn.functional.mse_loss(found.mean(1), labels)}


def sizes(stage: int, world: int, cluster: Cluster | None, **file: Any) -> CompiledConfig:
    args = TrainingArguments("out", zero_stage=stage, deepspeed={"zero_optimization": file} if file else None)
    shape = ModelShape.from_model(Chain())
    return compile_config(args, ParallelLayout(world), shape, "cuda", cluster=cluster)


def node(world: int) -> Cluster:
    return Cluster.of("H100", 1, world)


def test_each_value_has_its_reason_and_the_file_wins() -> None:
    section = "zero_optimization"
    config = sizes(2, 8, node(8))
    count = LAYERS * WIDTH * (WIDTH + 1)
    assert config.get(f"{section}.reduce_bucket_size") == config.get(f"{section}.allgather_bucket_size") == count
    assert f"all {count} trained elements" in str(config.origin(f"{section}.reduce_bucket_size"))
    assert f"{section}.overlap_comm" not in config
    config = sizes(3, 8, node(8), stage3_prefetch_bucket_size=7, overlap_comm=False, reduce_bucket_size="auto")
    assert config.get(f"{section}.reduce_bucket_size") == count // 8
    assert config.get(f"{section}.stage3_prefetch_bucket_size") == 7 and config.get(f"{section}.overlap_comm") is False
    assert "for auto in" in str(config.origin(f"{section}.reduce_bucket_size"))
    assert sizes(3, 8, node(8)).get(f"{section}.overlap_comm") is True
    unknown = sizes(2, 8, None)
    assert unknown.get(f"{section}.reduce_bucket_size") == 2**20 and f"{section}.overlap_comm" not in unknown


def test_the_elements_of_a_rank_are_those_of_its_slice() -> None:
    args = TrainingArguments("out", zero_stage=2, tensor_parallel_size=2)
    shape = ModelShape.from_model(Chain())
    config = compile_config(args, ParallelLayout(8, tp=2), shape, "cuda", cluster=node(8))
    assert config.get("zero_optimization.reduce_bucket_size") == LAYERS * WIDTH * (WIDTH + 1) // 2


def counted(zero: dict[str, Any], world: int) -> tuple[Counter[str], Counter[str], list[torch.Tensor]]:
    """Messages and bytes of one of three steps, by collective; the weights afterwards."""
    import deepspeed
    from deepspeed.comm import comm

    from ds_trainer.engine.topology import reset_deepspeed_groups
    from ds_trainer.engine.weights import gathered

    reset_deepspeed_groups()
    model = Chain()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.0,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
        },
    )
    backend, messages, sent = comm.cdb, Counter[str](), Counter[str]()

    def counting(name: str) -> Any:
        function = getattr(backend, name)

        def call(*args: Any, **keywords: Any) -> Any:
            tensors = [value for value in [*args, *keywords.values()] if isinstance(value, torch.Tensor)]
            messages[name] += 1
            sent[name] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            return function(*args, **keywords)

        return call

    names = ("all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor")
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for step in range(3):
        if step == 2:  # the first two record what ZeRO 3 prefetches
            for name in names:
                setattr(backend, name, counting(name))
        loss = engine(torch.randn(2, WIDTH, generator=generator), torch.zeros(2))["loss"]
        engine.backward(loss)
        engine.step()
    for name in names:
        delattr(backend, name)
    parameters = list(model.parameters())
    with gathered(parameters):
        weights = [parameter.detach().clone() for parameter in parameters[:40]]
    engine.destroy()
    return messages, sent, weights


@pytest.mark.extended
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("world", "stage"),
    [(2, 1), (2, 3), *(pytest.param(*case, marks=pytest.mark.extended) for case in ((2, 2), (4, 1), (4, 2), (4, 3)))],
)
def test_fewer_messages_of_the_same_bytes_and_the_same_weights(world: int, stage: int) -> None:
    before, chosen = (
        dict(sizes(stage, world, cluster).to_dict()["zero_optimization"]) for cluster in (None, node(world))
    )
    before["overlap_comm"] = chosen["overlap_comm"] = stage == 3
    default = {"stage": stage, "overlap_comm": stage == 3}
    found = [pool(world).run(counted, zero, world, timeout=120) for zero in (before, chosen, default)]
    for (old, old_bytes, old_weights), (new, new_bytes, new_weights), (_, _, weights) in zip(*found, strict=True):
        kind = "reduce_scatter_tensor" if stage == 3 else "all_reduce"
        assert new[kind] < old[kind] * (0.8 if stage == 3 else 0.3)
        assert new_bytes == old_bytes
        for one, other, third in zip(old_weights, new_weights, weights, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(one, third, rtol=1e-6, atol=1e-7)
