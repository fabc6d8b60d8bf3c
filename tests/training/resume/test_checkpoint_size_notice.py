"""The size of a checkpoint is said before the first one, and it is the size that it has."""

from __future__ import annotations

import contextlib
import io
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.checkpoint.protocol.retention import bytes_on_disk
from ds_trainer.checkpoint.weights.checkpoint_size import CheckpointSize
from ds_trainer.training.resume import checkpoint_model as save_size
from ds_trainer.training.resume import checkpointer as checkpoints
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import pool

CLOSE = 0.05  # beside the tensors of these small models lie some 50 kB of text and random states
SIZES = {"hidden_size": 128, "intermediate_size": 256}


def half_frozen() -> nn.Module:
    model = tiny_llama(**SIZES)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "layers.0" not in name
    return model


def with_adapters() -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=64, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    model: nn.Module = peft.get_peft_model(tiny_llama(**SIZES), config)
    return model


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "zero 1, bf16": (partial(tiny_llama, **SIZES), {"zero_stage": 1, "bf16": True}),
    "zero 3": (partial(tiny_llama, **SIZES), {"zero_stage": 3}),
    "no model": (partial(tiny_llama, **SIZES), {"zero_stage": 0, "save_model_in_checkpoints": False}),
    "frozen": (half_frozen, {"zero_stage": 2}),
    "adapters": (with_adapters, {"zero_stage": 3}),
}


def announced(output_dir: Path, case: str) -> tuple[str, CheckpointSize | None]:
    make_model, changes = CASES[case]
    seen: list[CheckpointSize] = []
    kept = checkpoints.announce
    checkpoints.announce = lambda size, *rest: (seen.append(size), kept(size, *rest))[1]  # type: ignore[func-returns-value]
    args = TrainingArguments(
        str(output_dir), max_steps=4, save_steps=2, save_strategy="steps", disable_tqdm=True, use_cpu=True, **changes
    )
    trainer = Trainer(make_model(), args, train_dataset=RaggedTokens(64))
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            trainer.train()
    finally:
        checkpoints.announce = kept
    trainer.engine.close()
    lines = [line for line in output.getvalue().splitlines() if line.startswith("A checkpoint takes")]
    return "\n".join(lines), seen[0] if seen else None


@pytest.mark.cases(2)
@pytest.mark.parametrize("case", CASES)
def test_the_announced_size_is_the_actual_size(case: str, tmp_path: Path) -> None:
    (message, size), (others, _) = pool(2).run(announced, tmp_path, case)
    assert others == "" and size is not None
    assert message.startswith("A checkpoint takes ") and "optimizer states; free on the disk of" in message
    first, second = tmp_path / "checkpoint-2", tmp_path / "checkpoint-4"
    assert bytes_on_disk([first]) == pytest.approx(size.total, rel=CLOSE)
    assert bytes_on_disk([first, second]) == pytest.approx(size.of(2), rel=CLOSE)
    assert ("frozen weights, written once" in message) == (case == "frozen") == (size.frozen > 0)


@pytest.mark.parametrize(("limit", "warned"), [(None, False), (2, False), (3, True), ("30GB", False), ("31GB", True)])
def test_a_disk_that_is_too_small_is_reported(
    limit: int | str | None, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    class Usage:
        free = 40 * 10**9

    logging.getLogger("ds_trainer").propagate = True
    monkeypatch.setattr(save_size.shutil, "disk_usage", lambda path: Usage)
    message = save_size.announce(CheckpointSize(4 * 10**9, 8 * 10**9, 2 * 10**9), tmp_path, limit)
    assert message.startswith(
        "A checkpoint takes 12.0 GB: 4.0 GB weights (including 2.0 GB of frozen weights, written once), 8.0 GB"
    )
    assert "40.0 GB" in message
    assert (f"save_total_limit={limit}" in caplog.text) == warned
