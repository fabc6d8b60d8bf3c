"""Frozen weights of a model that is not saved as adapters: written once, then linked, always complete."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.checkpoint.export.checkpoint_weights import CheckpointWeights
from ds_trainer.checkpoint.protocol import disk
from ds_trainer.checkpoint.shards import frozen_weights as frozen
from ds_trainer.utils.errors import ConfigError
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import pool


def half_frozen() -> nn.Module:
    """A frozen backbone under a trained head."""
    torch.manual_seed(0)
    model = tiny_llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "lm_head" in name or "layers.1" in name
    return model


class Averaging(TrainerCallback):
    """Frozen weights that follow the trained ones, as those of a teacher do."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with torch.no_grad():
            model.model.norm.weight.mul_(0.9)


def trained(output_dir: Path, resume: str | None = None, moving: bool = False, **changes: Any) -> list[float]:
    values: dict[str, Any] = dict(
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="steps",
        save_steps=2,
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(
        half_frozen(),
        TrainingArguments(str(output_dir), **{**values, **changes}),
        train_dataset=RaggedTokens(64),
        callbacks=[Averaging()] if moving else None,
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.engine.close()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def frozen_files(checkpoint: Path) -> list[Path]:
    """Files with frozen weights only: the model's, or the ranks' if there is no model."""
    files = []
    names = {name for name, parameter in half_frozen().named_parameters() if not parameter.requires_grad}
    for path in sorted(checkpoint.glob("*.safetensors")):
        keys = {key.removesuffix("/weight") for key in load_file(path)}
        if keys and keys <= names:
            files.append(path)
    return files


def inodes(checkpoint: Path) -> list[int]:
    return [path.stat().st_ino for path in frozen_files(checkpoint)]


@pytest.mark.cases(1)
@pytest.mark.parametrize("model", [True, False])
@pytest.mark.parametrize(("stage", "in_background"), [(0, True), (3, True), (2, False)])
def test_frozen_weights_are_written_once(stage: int, in_background: bool, model: bool, tmp_path: Path) -> None:
    out = tmp_path / "out"
    changes = dict(zero_stage=stage, save_async=in_background, save_model_in_checkpoints=model)
    wanted = pool(2).run(partial(trained, out, **changes))[0]
    first, second, third = (out / f"checkpoint-{step}" for step in (2, 4, 6))
    numel = sum(p.numel() for p in half_frozen().parameters() if not p.requires_grad)
    assert sum(tensor.numel() for path in frozen_files(first) for tensor in load_file(path).values()) == numel
    assert len(inodes(first)) == (1 if model else 2) and inodes(first) == inodes(second) == inodes(third)
    # The second save wrote no frozen weights, neither in the model nor in shards.
    new = [path for path in second.glob("*.safetensors") if path.stat().st_nlink == 1]
    written = sum(path.stat().st_size for path in new) - sum(_header_size(path) for path in new)
    steps = sum(p.numel() for p in half_frozen().parameters() if p.requires_grad)
    assert written == 4 * 3 * steps, "masters or weights, and two moments"
    assert not any(key.endswith("/weight") for path in new for key in load_file(path))
    if model:
        from transformers import AutoModelForCausalLM

        assert AutoModelForCausalLM.from_pretrained(third).num_parameters() == half_frozen().num_parameters()

    # Retention removes the earlier names; what is left is complete, in any layout, and later saves link to it.
    shutil.rmtree(first)
    shutil.rmtree(third)
    resumed = pool(2).run(partial(trained, out, str(second), **changes))[0]
    assert resumed == pytest.approx(wanted, rel=1e-6) and inodes(second) == inodes(out / "checkpoint-6")
    elsewhere = {**changes, "zero_stage": 1, "per_device_train_batch_size": 8}
    assert pool(1).run(partial(trained, tmp_path / "one", str(second), **elsewhere))[0] == pytest.approx(
        wanted, rel=1e-5
    )
    assert inodes(tmp_path / "one" / "checkpoint-6") == (
        inodes(second) if model else inodes(tmp_path / "one" / "checkpoint-6")
    )
    assert CheckpointWeights(second).bytes_by_kind()["weight"] == 4 * numel


def _header_size(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_changed_weights_are_written_again(tmp_path: Path) -> None:
    wanted = pool(2).run(partial(trained, tmp_path, moving=True, zero_stage=1))[0]
    assert len({*inodes(tmp_path / "checkpoint-2"), *inodes(tmp_path / "checkpoint-4")}) == 2
    resumed = pool(2).run(partial(trained, tmp_path, str(tmp_path / "checkpoint-4"), moving=True, zero_stage=1))[0]
    assert resumed == pytest.approx(wanted, rel=1e-6)
    # Control: without checksums, the earlier file would be linked.
    pool(2).run(without_checksums, tmp_path / "blind")
    assert inodes(tmp_path / "blind" / "checkpoint-2") == inodes(tmp_path / "blind" / "checkpoint-4")


def without_checksums(output_dir: Path) -> None:
    original = frozen.integer_sums
    frozen.integer_sums = lambda shards: (0,)
    try:
        trained(output_dir, moving=True, zero_stage=1)
    finally:
        frozen.integer_sums = original


def without_links(output_dir: Path) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError("Invalid cross-device link")

    original, disk.link = disk.link, refuse
    try:
        trained(output_dir, zero_stage=3)
    finally:
        disk.link = original


def test_without_links_the_weights_are_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    pool(2).run(without_links, out)
    first, second = out / "checkpoint-2", out / "checkpoint-4"
    assert len({*inodes(first), *inodes(second)}) == 2
    for path in frozen_files(first):
        assert path.read_bytes() == (second / path.name).read_bytes()


def rejection(output_dir: Path, checkpoint: str) -> str:
    try:
        trained(output_dir, checkpoint, zero_stage=3)
    except ConfigError as error:
        return str(error)
    return ""


def test_damage_to_a_shared_file_is_detected(tmp_path: Path) -> None:
    pool(2).run(partial(trained, tmp_path, zero_stage=3))
    (path,) = frozen_files(tmp_path / "checkpoint-2")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    with path.open("r+b") as stream:
        stream.write(data)
    for step in (2, 6):
        message = pool(2).run(rejection, tmp_path, str(tmp_path / f"checkpoint-{step}"))[0]
        assert f"{path.name} is damaged" in message
