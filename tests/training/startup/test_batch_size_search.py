"""``auto_find_batch_size``: all ranks halve together, whichever ran out of memory, and no number changes.

Memory is bounded by a module that refuses more than so many samples, as an allocator does: in the forward or in the
backward pass, on one rank only.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.parallel.batch_plan import smaller_micro_batch
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from tests.support.compare import assert_equal
from tests.support.models import PlainLanguageModel, RaggedTokens, tiny_llama
from tests.support.oracle import Trajectory
from tests.support.pool import pool
from tests.support.runs import compatibility_of


class OutOfMemoryAbove(torch.autograd.Function):
    """Passes its input on; the pass that is short of memory raises for more than ``limit`` samples."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, limit: int, backward: bool) -> torch.Tensor:
        ctx.limit, ctx.short = limit, backward
        if not backward and hidden.shape[0] > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.short and grads[0].shape[0] > ctx.limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return grads[0], None, None


class Bounded(nn.Module):
    """A language model in which ``limit`` samples fit on rank ``rank``, any number elsewhere."""

    def __init__(self, limit: int, rank: int = 0, backward: bool = False) -> None:
        super().__init__()
        self.model = tiny_llama()
        self.statistics = nn.BatchNorm1d(61, affine=False)  # running means: worthless numbers must not reach them
        self.limit, self.rank, self.short = limit, rank, backward
        self.model.model.layers[0].register_forward_hook(self._bounded)
        self.loss_type = self.model.loss_type

    def _bounded(self, module: nn.Module, args: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        limit = self.limit if distributed.rank() == self.rank else 10**6
        hidden = OutOfMemoryAbove.apply(hidden, limit, self.short)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    def forward(self, num_items_in_batch: Any = None, **inputs: Any) -> Any:
        outputs = self.model(**inputs, num_items_in_batch=num_items_in_batch)
        self.statistics(outputs.logits.detach().float().flatten(0, 1))
        return outputs


def train(directory: str, limit: int, **changes: Any) -> tuple[Trajectory, dict[str, Any]]:
    """Train; the trajectory, and what micro-batch and accumulation it came to."""
    model_changes = {key: changes.pop(key) for key in ("rank", "backward") if key in changes}
    values: dict[str, Any] = dict(
        max_steps=3,
        per_device_train_batch_size=6,
        optim="sgd",  # Adam enlarges rounding where a gradient is almost zero
        learning_rate=0.1,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        auto_find_batch_size=True,
    )
    args = TrainingArguments(directory, **{**values, **changes})
    trainer = Trainer(Bounded(limit, **model_changes), args, train_dataset=RaggedTokens(40))
    trainer.train()
    report = compatibility_of(trainer)
    model: Any = trainer.model
    facts = {
        "micro": trainer.args.per_device_train_batch_size,
        "accumulation": trainer.args.gradient_accumulation_steps,
        "total": trainer.get_total_train_batch_size(trainer.args),
        "json": trainer._ds_trainer.compiled.get("train_micro_batch_size_per_gpu"),
        "state": trainer.state.train_batch_size,
        "given": args.per_device_train_batch_size,
        "finite": bool(torch.isfinite(model.statistics.running_mean).all()),
        "batches seen": int(model.statistics.num_batches_tracked),
    }
    trainer.engine.close()
    return report, facts


@pytest.mark.cases(1)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_smaller_micro_batch_gives_the_same_losses(stage: int, backward: bool, tmp_path: Path) -> None:
    """Rank 1 of two can hold 3 samples only, in the forward or the backward pass: both take 3 x 2 instead of 6 x 1."""
    free = pool(2).run(train, str(tmp_path / "free"), 6)[0][0]
    for report, facts in pool(2).run(_on_rank_1, str(tmp_path / "bounded"), stage, backward):
        assert facts == {
            "micro": 3,
            "accumulation": 2,
            "total": 12,
            "json": 3,
            "state": 3,
            "given": 6,
            "finite": True,
            "batches seen": 6,
        }
        assert_equal(report, free)


def _on_rank_1(directory: str, stage: int, backward: bool) -> Any:
    return train(directory, 3, rank=1, backward=backward, zero_stage=stage)


@pytest.mark.extended
def test_one_process_reduces_its_micro_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        report, facts = train(str(tmp_path / "bounded"), 1, gradient_accumulation_steps=2)
    free, unchanged = train(str(tmp_path / "free"), 6, gradient_accumulation_steps=2)
    assert (facts["micro"], facts["accumulation"]) == (1, 12)
    assert (unchanged["micro"], unchanged["accumulation"]) == (6, 2)
    assert_equal(report, free)
    assert "with 6 samples in a micro-batch; now 3, with 4 instead of 2 accumulation steps" in caplog.text
    assert "The global batch stays at 12." in caplog.text


def test_running_out_of_memory_with_one_sample_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="out of memory on rank 0 with one sample in a micro-batch"):
        train(str(tmp_path), 0)


def test_other_errors_are_not_hidden(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, auto_find_batch_size=True, disable_tqdm=True, max_steps=1)

    def broken(samples: Any) -> Any:
        return {"input_ids": torch.full((2, 3), 1000), "labels": torch.ones(2, 3, dtype=torch.int64)}

    with pytest.raises(IndexError):
        Trainer(PlainLanguageModel(), args, broken, train_dataset=RaggedTokens(4)).train()


def test_a_given_optimizer_is_rejected(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, auto_find_batch_size=True, disable_tqdm=True, max_steps=1)
    model = PlainLanguageModel()
    given = (torch.optim.SGD(model.parameters(), lr=0.1), None)
    with pytest.raises(ConfigError, match="optimizer_cls_and_kwargs"):
        Trainer(model, args, train_dataset=RaggedTokens(4), optimizers=given).train()


@pytest.mark.parametrize(("micro", "accumulation"), [(8, 1), (6, 1), (5, 1), (5, 2), (7, 4), (3, 1), (2, 3), (12, 5)])
def test_a_smaller_micro_batch_keeps_the_product(micro: int, accumulation: int) -> None:
    size, steps = smaller_micro_batch(micro, accumulation)
    assert size * steps == micro * accumulation and 1 <= size <= micro // 2
    assert not any(micro * accumulation % larger == 0 for larger in range(size + 1, micro // 2 + 1))
