"""What one rank holds, measured: ZeRO-3 states fall with dp x cp x sp, activations with cp x sp, weights with tp."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.parallel.layout import ParallelLayout
from tests.support.models import VOCABULARY, tiny_llama
from tests.support.pool import pool

LENGTH = 256
make_model = partial(
    tiny_llama, hidden_size=64, num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=LENGTH
)


class Held(NamedTuple):
    """Bytes on one rank."""

    states: int
    """Weights, master weights and optimizer states that stay between steps."""
    activations: int
    """What the forward pass keeps for the backward pass, weights aside."""


class Weighs(Trainer):
    """Adds up what autograd keeps in the forward pass of a micro-batch."""

    kept = 0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        weights = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        seen: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            # Under ZeRO-3 gathered weights have storages of their own: told by their shape, which no activation has.
            if storage.data_ptr() not in weights and tensor.dim() > 2:
                seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = super().compute_loss(*args, **kwargs)
        self.kept = sum(seen.values())
        return result


def held(output_dir: str, layout: ParallelLayout, stage: int) -> Held:
    generator = torch.Generator().manual_seed(0)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(3, VOCABULARY, (8, LENGTH), generator=generator)]
    args = TrainingArguments(
        output_dir,
        per_device_train_batch_size=1,
        max_steps=1,
        zero_stage=stage,
        tensor_parallel_size=layout.tp,
        context_parallel_size=layout.cp,
        sequence_parallel_size=layout.sp,
        deepspeed={"zero_optimization": {"stage3_param_persistence_threshold": 0}} if stage == 3 else None,
        optim="adamw_torch_fused",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Weighs(make_model(), args, train_dataset=rows)
    trainer.train()
    tensors = [getattr(p, "ds_tensor", p) for p in trainer.model.parameters()]
    optimizer = trainer.engine.basic_optimizer
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            tensors += [parameter, *(v for v in optimizer.state[parameter].values() if isinstance(v, torch.Tensor))]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    result = Held(sum(storages.values()), trainer.kept)
    trainer.engine.close()
    return result


def most(layout: ParallelLayout, stage: int, tmp_path: Any) -> Held:
    """The most that any rank holds."""
    of_ranks = pool(layout.world_size).run(held, str(tmp_path), layout, stage)
    return Held(*(max(values) for values in zip(*of_ranks, strict=True)))


ALONE = ParallelLayout(1)
SHARED = [ParallelLayout(2, cp=2), ParallelLayout(2, sp=2), ParallelLayout(4, cp=2, sp=2), ParallelLayout(4, sp=2)]


@pytest.mark.cases(2)
@pytest.mark.parametrize("layout", SHARED, ids=lambda layout: layout.describe())
def test_states_shrink_with_zero_ranks_and_activations_with_sequence_sharding(
    layout: ParallelLayout, tmp_path: Any
) -> None:
    alone, found = most(ALONE, 3, tmp_path), most(layout, 3, tmp_path)
    assert found.states == pytest.approx(alone.states / layout.seq_data_parallel_size, rel=0.05)
    assert found.activations == pytest.approx(alone.activations / (layout.cp * layout.sp), rel=0.1)


def test_memory_of_tensor_parallel_partitions(tmp_path: Any) -> None:
    """Matrices of the layers are halved, embeddings and norms are not (docs/explanation/parallelism.md)."""
    alone, found = most(ALONE, 0, tmp_path), most(ParallelLayout(2, tp=2), 0, tmp_path)
    model = make_model()
    replicated = sum(p.numel() for n, p in model.named_parameters() if "embed" in n or "norm" in n)
    sliced = sum(p.numel() for p in model.parameters()) - replicated
    assert found.states / alone.states == pytest.approx((replicated + sliced / 2) / (replicated + sliced), rel=0.02)
    assert 0.4 < found.activations / alone.activations < 0.8


def test_control_a_rank_that_holds_everything_is_detected(tmp_path: Any) -> None:
    """Negative control: on ZeRO 0 nothing falls."""
    alone, found = most(ALONE, 0, tmp_path), most(ParallelLayout(2), 0, tmp_path)
    assert found.states == pytest.approx(alone.states, rel=0.01)
