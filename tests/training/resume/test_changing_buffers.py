"""Buffers that grow, appear and vanish while a model trains: in checkpoints, exports and resumed runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from tests.support.pool import pool


class Bank(nn.Module):
    """Keeps what it has seen, which its loss depends on; the ranks see different numbers of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 2)
        self.register_buffer("seen", torch.empty(0))
        self.register_buffer("mean", None)  # appears in the second step
        self.register_buffer("warm", torch.ones(3))  # vanishes in the third one
        self.calls = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        if self.training:
            if len(self.seen):
                self.mean = self.seen.mean()
            if len(self.seen) > 2:
                self.warm = None
            self.seen = torch.cat([self.seen, x[labels > 0, 0].detach()])
        shift = self.seen.sum() if self.mean is None else self.mean
        return {"loss": F.cross_entropy(logits + shift * torch.tensor([1.0, 0.0]), labels), "logits": logits}


def rows() -> list[dict[str, Any]]:
    xs = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    return [{"x": x, "labels": int(index % 8 < 5 or index % 3 == 0)} for index, x in enumerate(xs)]


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def train(directory: str, until: int = 6, resume: bool = False, **changes: Any) -> Any:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            control.should_training_stop = state.global_step == until

    values: dict[str, Any] = dict(
        max_steps=6,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        save_steps=1,
        logging_steps=1,
        learning_rate=0.05,
        disable_tqdm=True,
        use_cpu=True,
        train_sampling_strategy="sequential",
    )
    args = TrainingArguments(directory, **{**values, **changes})
    trainer = Trainer(Bank(), args, train_dataset=rows(), eval_dataset=rows()[:8], callbacks=[Stop()])
    trainer.train(resume_from_checkpoint=resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "grad_norm" in entry]
    found = losses, buffers_of(trainer.model), trainer.state.best_global_step
    trainer.engine.close()
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_resumed_run_has_the_buffers_of_each_rank(stage: int, ranks: int, tmp_path: Path) -> None:
    whole = pool(ranks).run(partial(train, str(tmp_path / "whole"), zero_stage=stage))
    pool(ranks).run(partial(train, str(tmp_path / "parts"), 4, zero_stage=stage))
    resumed = pool(ranks).run(partial(train, str(tmp_path / "parts"), resume=True, zero_stage=stage))
    for (losses, buffers, _), (again, found, _) in zip(whole, resumed, strict=True):
        assert again == losses
        assert found.keys() - {"warm"} == buffers.keys() == {"seen", "mean"}
        assert all(torch.equal(found[name], buffers[name]) for name in buffers)
    assert ranks == 1 or len(whole[0][1]["seen"]) != len(whole[1][1]["seen"])
    saved = load_file(tmp_path / "whole" / "checkpoint-6" / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in whole[0][1].items())
    first = load_file(tmp_path / "whole" / "checkpoint-1" / "model.safetensors")
    assert "warm" in first and len(first["seen"]) < len(saved["seen"])


@pytest.mark.cases(1)
@pytest.mark.parametrize("changes", [{}, {"save_only_model": True}, {"save_async": False}], ids=str)
def test_the_best_model_has_its_buffers(changes: dict[str, Any], tmp_path: Path) -> None:
    """The loss grows with the bank, so the best evaluation is an early one."""
    changes = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, **changes}
    for _, buffers, best in pool(2).run(partial(train, str(tmp_path), learning_rate=0.0, zero_stage=1, **changes)):
        saved = load_file(tmp_path / f"checkpoint-{best}" / "model.safetensors")
        assert best < 6 and len(buffers["seen"]) < 20
        if "save_only_model" in changes:
            assert torch.equal(buffers["seen"], saved["seen"])


def test_another_layout_has_the_buffers_of_rank_0(tmp_path: Path) -> None:
    pool(2).run(partial(train, str(tmp_path), 4, zero_stage=1))
    saved = load_file(tmp_path / "checkpoint-4" / "model.safetensors")
    (found,) = pool(1).run(partial(train, str(tmp_path), 5, resume=True, zero_stage=0, per_device_train_batch_size=4))
    assert torch.equal(found[1]["seen"][: len(saved["seen"])], saved["seen"])


def test_weights_are_exported_with_them(tmp_path: Path) -> None:
    from ds_trainer.checkpoint.export.checkpoint_export import export_checkpoint

    train(str(tmp_path), 3, zero_stage=0)
    export_checkpoint(tmp_path / "checkpoint-3", tmp_path / "out", 2**30)
    saved = load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["seen"], saved["seen"])
