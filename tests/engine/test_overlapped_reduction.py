"""Stages 0 to 2 reduce beside the backward pass: early, in one order, and with the bits of a reduction that waits."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_trainer.engine import overlapped_reduction, whole_reduction
from tests.support.expert_models import maker
from tests.support.layouts import grouped_query, tied
from tests.support.mixed_batches import Images, Rows, TwoTowers, collate
from tests.support.models import RaggedTokens, regression_rows, tiny_llama
from tests.support.pool import RankFailure, pool
from tests.support.runs import train_and_report

BUCKET = 2000  # elements: a few parameters


def frozen() -> nn.Module:
    """A Llama whose first layer and embeddings are not trained."""
    model = tiny_llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name or "lm_head" in name)
    return model


def some_images() -> Rows:
    """Two ranks of which one often has no image, so that it does not run a tower."""
    return Rows(48, Images([0, 3, 5, 17, 20, 41]))


TOKENS = partial(RaggedTokens, 64)
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (tiny_llama, TOKENS, {}),
    "tied": (tied, TOKENS, {}),
    "frozen": (frozen, TOKENS, {}),
    "bf16": (tiny_llama, TOKENS, {"bf16": True}),
    "bf16, float32 sums": (tiny_llama, TOKENS, {"bf16": True, "grad_accum_dtype": "fp32"}),
    "float32 messages": (tiny_llama, TOKENS, {"bf16": True, "communication_data_type": "fp32"}),
    "autocast": (tiny_llama, TOKENS, {"torch_autocast": "bf16"}),
    "recomputed": (tiny_llama, TOKENS, {"activation_checkpointing": True}),
    "unused modules": (TwoTowers, some_images, {"collator": collate, "remove_unused_columns": False}),
    "tensor parallel": (grouped_query, TOKENS, {"tensor_parallel_size": 2}),
    "sequence parallel": (grouped_query, TOKENS, {"sequence_parallel_size": 2}),
    "experts": (maker("qwen3_moe"), TOKENS, {"expert_parallel_size": 2}),
}


def run(model: str, stage: int, accumulation: int, overlaps: bool, directory: str) -> Any:
    make, data, arguments = MODELS[model]
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": accumulation}
    zero = {"zero_optimization": {"reduce_bucket_size": BUCKET, "overlap_comm": overlaps}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_reduction, "BUCKET", BUCKET)
        return train_and_report(make, data, directory, zero_stage=stage, deepspeed=zero, **sizes, **arguments)


def run_twice(model: str, stage: int, accumulation: int, directory: str) -> bool:
    """Whether both ways have the same bits."""
    one, other = (run(model, stage, accumulation, overlaps, directory) for overlaps in (True, False))
    alike = [torch.equal(weight, other.weights[name]) for name, weight in one.weights.items()]
    return all(alike) and one.losses == other.losses and one.grad_norms == other.grad_norms


@pytest.mark.cases(20, "tied-2-1-4", "experts-2-3-2", "bf16, float32 sums-2-3-2", "tensor parallel-1-3-4")
@pytest.mark.parametrize(
    ("model", "stage", "accumulation", "world"),
    [
        *(("tied", 2, 1, 4), ("bf16", 0, 1, 4)),
        *((model, stage, accumulation, 2) for model in MODELS for stage in (0, 1, 2) for accumulation in (1, 3)),
        *((model, stage, 3, 4) for model in MODELS for stage in (0, 1, 2)),
    ],
)
def test_the_bits_are_those_of_a_reduction_that_waits(
    model: str, stage: int, accumulation: int, world: int, tmp_path: Any
) -> None:
    assert pool(world).run(partial(run_twice, model, stage, accumulation, str(tmp_path)), timeout=120) == [True] * world


def train_again(directory: str) -> bool:
    """Train a model that an earlier Trainer has trained; whether the bits are those of a model without a past."""
    first = tiny_llama()
    run_of = partial(train_and_report, zero_stage=0, per_device_train_batch_size=2)
    run_of(lambda: first, TOKENS, directory)
    copy = tiny_llama()
    copy.load_state_dict(first.state_dict())
    one, other = (run_of(lambda: model, TOKENS, directory) for model in (first, copy))  # noqa: B023
    return one.losses == other.losses and all(
        torch.equal(one.weights[name], other.weights[name]) for name in one.weights
    )


def test_a_second_training_of_a_model(tmp_path: Any) -> None:
    assert pool(2).run(train_again, str(tmp_path)) == [True] * 2


# -- order of events --------------------------------------------------------------------------------------------------


def share_sent_early(stage: int, accumulation: int, overlaps: bool, directory: str) -> float:
    """The share of the gradients that were sent before the gradient of the embedding, the last one, was there."""
    sent, state = {True: 0, False: 0}, {"complete": False}
    MODELS["watched"] = (lambda: watched(state), TOKENS, {})
    owner: Any = overlapped_reduction.OverlappedReduction if stage else whole_reduction.WholeReduction
    send = owner._send

    def counted(self: Any, bucket: Any, *given: Any, **named: Any) -> None:
        sent[not state["complete"]] += bucket.elements if stage else sum(one.numel() for one in bucket)
        send(self, bucket, *given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, "_send", counted)
        run("watched", stage, accumulation, overlaps, directory)
    return sent[True] / sum(sent.values())


def watched(state: dict[str, bool]) -> nn.Module:
    model: Any = tiny_llama()
    model.register_forward_pre_hook(lambda *_: state.update(complete=False))
    model.model.embed_tokens.weight.register_post_accumulate_grad_hook(lambda _: state.update(complete=True))
    return model


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_most_gradients_are_sent_while_the_backward_pass_runs(stage: int, tmp_path: Any) -> None:
    early, late = (
        pool(2).run(partial(share_sent_early, stage, 2, overlaps, str(tmp_path))) for overlaps in (True, False)
    )
    assert min(early) > 0.6  # all but the embedding and what is in a bucket with it
    assert max(late) == 0 if stage < 2 else min(late) > 0.6  # stage 2 waits for each


# -- passes that end in the middle, and gradients that come twice -----------------------------------------------------


class Twice(nn.Module):
    """A layer that is used by two blocks, which are recomputed alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.shared, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(x)
        for _ in range(2):
            hidden = checkpoint(lambda value: torch.tanh(self.shared(value)), hidden, use_reentrant=True)
        found = self.last(hidden)
        return ((found - labels) ** 2).mean(), found


def twice(stage: int, directory: str) -> Any:
    rows = partial(regression_rows, 32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_reduction, "BUCKET", 10)
        return train_and_report(Twice, rows, directory, zero_stage=stage, per_device_train_batch_size=2)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_gradient_that_comes_twice_is_one_error(stage: int, tmp_path: Any) -> None:
    job = partial(twice, stage, str(tmp_path))
    with pytest.raises(
        RankFailure, match=r"The gradient of shared\.\w+ was computed a second time.*use_reentrant=False"
    ):
        pool(2).run(job)
