"""Dropout: the same masks on tensor-parallel ranks where a tensor is whole, others where it is sliced."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.engine.tensor_parallel import partitioning
from ds_trainer.parallel.layout import Coordinates
from ds_trainer.training.model.micro_batch_rng import micro_batch_seed
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import RankFailure, pool
from tests.support.tensor_models import MIXER_CUT, Mixer


class Recomputing(Mixer):
    """The gated MLP is computed again in the backward pass."""

    supports_gradient_checkpointing = True

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
        self.how = gradient_checkpointing_kwargs

    def block(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.outer(self.narrow(self.inner(torch.tanh(self.wide(hidden)))))
        return torch.tanh(hidden)  # a repetition stops where it has all it needs: after the masks

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        hidden = self.embedding(input_ids)
        hidden = hidden + torch.utils.checkpoint.checkpoint(self.block, hidden, **self.how)
        logits = self.head(self.norm(hidden))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


class SameRegion(partitioning.SlicedRegion):
    """Negative control: nothing is separated."""

    def enter(self, module: nn.Module, arguments: Any, output: Any) -> None:
        return


def masks(output_dir: str, recompute: bool, separated: bool = True, **arguments: Any) -> dict[str, list[torch.Tensor]]:
    """Every mask that this rank draws in two steps, of what is sliced (inner) and of what is whole (outer)."""
    args = TrainingArguments(
        output_dir,
        **{"tensor_parallel_size": 2, "max_steps": 2, **arguments},
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        activation_checkpointing=recompute,
        deepspeed=MIXER_CUT,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    found: dict[str, list[torch.Tensor]] = {"inner": [], "outer": []}
    model = (Recomputing if recompute else Mixer)(dropout=0.5)
    for name, kept in found.items():

        def keep(module: Any, inputs: Any, output: torch.Tensor, kept: list[torch.Tensor] = kept) -> None:
            if torch.is_grad_enabled():  # not in the passes that measure the loss
                kept.append((output != 0).detach().clone())

        model.get_submodule(name).register_forward_hook(keep)
    if "replica_specific_rng" not in arguments:
        torch.manual_seed(torch.distributed.get_rank())  # whatever state the data or a user has left
    original = partitioning.SlicedRegion
    partitioning.SlicedRegion = original if separated else SameRegion  # type: ignore[misc]
    trainer = Trainer(model, args, train_dataset=RaggedTokens(37))
    try:
        trainer.train()
    finally:
        partitioning.SlicedRegion = original  # type: ignore[misc]
    trainer.engine.close()
    return found


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> list[bool]:
    """Mask by mask, over the columns that both ranks have."""
    width = min(one[0].shape[-1], other[0].shape[-1])
    return [torch.equal(a[..., :width], b[..., :width]) for a, b in zip(one, other, strict=True)]


@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_masks_differ_only_where_tensors_are_partitioned(recompute: bool, tmp_path: Any) -> None:
    first, second = pool(2).run(masks, str(tmp_path), recompute)
    assert all(same(first["outer"], second["outer"]))
    assert not any(same(first["inner"], second["inner"]))
    for found in (first, second):
        for name in ("inner", "outer"):
            drawn = found[name]
            if recompute:
                assert len(drawn) == 8
                assert all(same(drawn[0::2], drawn[1::2]))  # the forward pass and its repetition
                drawn = drawn[0::2]
            assert not any(same(drawn[:-1], drawn[1:]))  # every micro-batch has its own


def test_without_separate_rng_states_partitions_of_unequal_width_change_replicated_tensors(tmp_path: Any) -> None:
    """Negative control: 19 columns here and 18 there use up other numbers, and the first gradients show it."""
    with pytest.raises(RankFailure, match=r"are replicated .* but their gradients differ"):
        pool(2).run(masks, str(tmp_path), False, False)


def test_replicas_draw_different_masks(tmp_path: Any) -> None:
    ranks = pool(4).run(masks, str(tmp_path), False)
    assert all(same(ranks[0]["outer"], ranks[1]["outer"]))
    assert all(same(ranks[2]["outer"], ranks[3]["outer"]))
    assert not any(same(ranks[0]["outer"], ranks[2]["outer"]))
    assert not any(same(ranks[0]["inner"], ranks[2]["inner"]))


@pytest.mark.parametrize(("specific", "recompute"), [(False, False), (True, False), (True, True)])
def test_masks_of_each_replica(specific: bool, recompute: bool, tmp_path: Any) -> None:
    run = partial(masks, str(tmp_path), recompute, tensor_parallel_size=1, replica_specific_rng=specific, max_steps=1)
    first, second = (found["outer"] for found in pool(2).run(run))
    if recompute:
        assert all(same(first[0::2], first[1::2]))
        first, second = first[0::2], second[0::2]
    assert same(first, second) == [not specific] * 2
    assert not any(same(first[:-1], first[1:]))


def test_seeds_depend_on_coordinates_step_and_micro_batch() -> None:
    coordinates = Coordinates(0, 0, 0, 0)
    assert micro_batch_seed(42, 3, 1, coordinates) == micro_batch_seed(42, 3, 1, coordinates._replace(tp=1))
    others = {
        micro_batch_seed(43, 3, 1, coordinates),
        micro_batch_seed(42, 4, 1, coordinates),
        micro_batch_seed(42, 3, 0, coordinates),
        *(micro_batch_seed(42, 3, 1, coordinates._replace(**{axis: 1})) for axis in ("dp", "cp", "sp")),
    }
    assert len(others) == 6
    assert micro_batch_seed(42, 3, 1, coordinates) not in others


def attention_run(output_dir: str, steps: list[int], **arguments: Any) -> list[float]:
    """Losses of a Llama with attention dropout; each number of ``steps`` is a run to there, resumed from the last."""
    for count in steps:
        args = TrainingArguments(
            output_dir,
            **arguments,
            max_steps=count,
            lr_scheduler_type="constant",
            tensor_parallel_size=2,
            per_device_train_batch_size=8,
            logging_steps=1,
            save_strategy="steps",
            save_steps=2,
            disable_tqdm=True,
            use_cpu=True,
        )
        model = tiny_llama(
            attention_dropout=0.5, num_attention_heads=6, num_key_value_heads=3, head_dim=8, hidden_size=48
        )
        trainer = Trainer(model, args, train_dataset=RaggedTokens(37))
        trainer.train(resume_from_checkpoint=count != steps[0])
        trainer.engine.close()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.cases(1)
@pytest.mark.parametrize("arguments", [{}, {"activation_checkpointing": True}, {"zero_stage": 3}])
def test_attention_dropout_is_resumed_and_recomputed_exactly(arguments: dict[str, Any], tmp_path: Any) -> None:
    through = pool(2).run(partial(attention_run, str(tmp_path / "a"), [4], **arguments))
    halves = pool(2).run(partial(attention_run, str(tmp_path / "b"), [2, 4], **arguments))
    plain = pool(2).run(partial(attention_run, str(tmp_path / "c"), [4]))
    assert through == halves
    assert through[0] == through[1]
    assert through[0] == pytest.approx(plain[0], rel=1e-6)
