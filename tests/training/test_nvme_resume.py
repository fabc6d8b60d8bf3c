"""Checkpoints of runs whose optimizer states and weights lie on a disk (ZeRO-Infinity)."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import hjson
import pytest
import torch

from ds_trainer import Trainer, TrainingArguments
from tests.support.compare import weight_distance
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.oracle import Trajectory
from tests.support.pool import pool
from tests.support.runs import compatibility_of

CONFIG = Path(__file__).parents[2] / "ds_configs" / "zero3_nvme.json"
STOP, STEPS = 2, 4

pytestmark = [pytest.mark.jit, pytest.mark.needs("libaio.h")]


def run(output_dir: Path, extensions: str | None, resume: str | None = None, **changes: Any) -> Trajectory:
    """With ``extensions`` on the disk, else in memory at ZeRO 0."""
    frozen = changes.pop("frozen", False)
    values: dict[str, Any] = dict(
        learning_rate=1e-2,
        adam_epsilon=1e-5,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=4,
    )
    if extensions is None:
        values["zero_stage"] = 0
    else:
        os.environ["TORCH_EXTENSIONS_DIR"] = extensions
        (output_dir / "nvme").mkdir(parents=True, exist_ok=True)
        config = hjson.loads(CONFIG.read_text())
        # Pinned buffers of 2 GB for each engine, by default: the ranks of a pool have one after the other.
        config["zero_optimization"]["offload_param"]["buffer_size"] = 1_000_000
        values.update(deepspeed=config, nvme_path=str(output_dir / "nvme"))
    model = tiny_llama(hidden_size=256, initializer_range=0.06)
    if frozen:
        model.get_input_embeddings().weight.requires_grad_(False)
    args = TrainingArguments(str(output_dir), **{**values, **changes})
    trainer = Trainer(model, args, train_dataset=RaggedTokens(60))
    trainer.train(resume_from_checkpoint=resume)
    found = compatibility_of(trainer)
    trainer.engine.close()
    return found


@pytest.mark.extended
@pytest.mark.cases(1)
@pytest.mark.parametrize("frozen", [False, True], ids=["all trained", "embedding frozen"])
def test_nvme_states_resume_on_nvme_and_in_memory(extensions: str, frozen: bool, tmp_path: Path) -> None:
    """From the disk to the disk, from the disk into memory, from memory to the disk."""
    saving = {"save_strategy": "steps", "save_steps": STOP, "frozen": frozen}
    wanted = {
        "disk": pool(2).run(partial(run, tmp_path / "disk", extensions, **saving))[0],
        "memory": pool(2).run(partial(run, tmp_path / "memory", None, **saving))[0],
    }
    assert wanted["disk"].losses == pytest.approx(wanted["memory"].losses, rel=1e-5)
    for old, new in (("disk", "disk"), ("disk", "memory"), ("memory", "disk")):
        checkpoint = str(tmp_path / old / f"checkpoint-{STOP}")
        there = extensions if new == "disk" else None
        for found in pool(2).run(partial(run, tmp_path / f"{old}-{new}", there, checkpoint, frozen=frozen)):
            assert found.losses[STOP:] == pytest.approx(wanted[old].losses[STOP:], rel=0, abs=1e-6), (old, new)
            assert found.grad_norms[STOP:] == pytest.approx(wanted[old].grad_norms[STOP:], rel=2e-6), (old, new)
            assert weight_distance(found.weights, wanted[old].weights) < 1e-5, (old, new)
            if old == new:
                assert all(torch.equal(found.weights[key], value) for key, value in wanted[old].weights.items())
