"""A CUDA graph writes the outputs of a forward pass over those of the pass before: nothing may be kept there."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ds_trainer import Trainer, TrainingArguments
from tests.support.models import PlainLanguageModel, RaggedTokens, tiny_llama
from tests.support.pool import pool


def reuses_outputs(model: nn.Module) -> nn.Module:
    """``model``, whose outputs become NaN when its next forward pass begins."""
    last: list[torch.Tensor] = []

    def forget(module: nn.Module, inputs: Any) -> None:
        for tensor in last:
            tensor.fill_(math.nan)
        last.clear()

    def remember(module: nn.Module, inputs: Any, outputs: Any) -> None:
        last.extend(outputs[name].detach() for name in ("loss", "logits"))

    model.register_forward_pre_hook(forget)
    model.register_forward_hook(remember)
    return model


def run(output_dir: Path, make_model: Any, reuses: bool, stage: int) -> tuple[list[float], float, np.ndarray]:
    """Logged losses, loss and predictions of an evaluation."""
    model = make_model()
    args = TrainingArguments(
        str(output_dir),
        learning_rate=1e-2,
        max_steps=4,
        logging_steps=2,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        zero_stage=stage,
        gradient_accumulation_steps=2,
        loss_spike_factor=100.0,
        eval_accumulation_steps=100,
        report_to="none",
    )
    trainer = Trainer(reuses_outputs(model) if reuses else model, args, train_dataset=RaggedTokens(80))
    trainer.train()
    args.torch_compile = True  # that the engine was compiled would change nothing here
    found = trainer.predict(RaggedTokens(40))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    trainer.engine.close()
    return losses, found.metrics["test_loss"], found.predictions


@pytest.mark.cases(2)
@pytest.mark.parametrize("make_model", [tiny_llama, PlainLanguageModel])
@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 2)])
def test_reused_outputs_do_not_change_losses(make_model: Any, world: int, stage: int, tmp_path: Path) -> None:
    wanted = pool(world).run(partial(run, tmp_path, make_model, False, stage))
    for found, expected in zip(pool(world).run(partial(run, tmp_path, make_model, True, stage)), wanted, strict=True):
        assert found[0] == expected[0]
        assert found[1] == pytest.approx(expected[1], rel=1e-6)  # logits that nobody reads are made in pieces
        np.testing.assert_allclose(found[2], expected[2], rtol=1e-5, atol=1e-6)
