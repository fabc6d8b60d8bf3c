"""Frozen weights of a model that is not saved as adapters: written once, linked to, and never half of them."""

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
from ds_trainer.checkpoint.pieces import frozen
from ds_trainer.checkpoint.protocol import disk
from ds_trainer.utils.errors import ConfigError
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import pool


def half_frozen() -> nn.Module:
    """A backbone that stays, under a head that is trained."""
    torch.manual_seed(0)
    model = tiny_llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "lm_head" in name or "layers.1" in name
    return model


class Averaging(TrainerCallback):
    """Frozen weights that follow the others, as those of a teacher do."""

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


def staying(checkpoint: Path) -> list[Path]:
    """Files with frozen weights only: the model's, or the ranks' where there is no model."""
    found = []
    names = {name for name, parameter in half_frozen().named_parameters() if not parameter.requires_grad}
    for path in sorted(checkpoint.glob("*.safetensors")):
        keys = {key.removesuffix("/weight") for key in load_file(path)}
        if keys and keys <= names:
            found.append(path)
    return found


def inodes(checkpoint: Path) -> list[int]:
    return [path.stat().st_ino for path in staying(checkpoint)]


@pytest.mark.parametrize("model", [True, False])
@pytest.mark.parametrize(("stage", "in_background"), [(0, True), (3, True), (2, False)])
def test_they_are_written_once(stage: int, in_background: bool, model: bool, tmp_path: Path) -> None:
    out = tmp_path / "out"
    changes = dict(zero_stage=stage, save_async=in_background, save_model_in_checkpoints=model)
    wanted = pool(2).run(partial(trained, out, **changes))[0]
    first, second, third = (out / f"checkpoint-{step}" for step in (2, 4, 6))
    numel = sum(p.numel() for p in half_frozen().parameters() if not p.requires_grad)
    assert sum(tensor.numel() for path in staying(first) for tensor in load_file(path).values()) == numel
    assert len(inodes(first)) == (1 if model else 2) and inodes(first) == inodes(second) == inodes(third)
    # What the second save has written itself: nothing of them, neither in the model nor in pieces.
    own = [path for path in second.glob("*.safetensors") if path.stat().st_nlink == 1]
    written = sum(path.stat().st_size for path in own) - sum(_head(path) for path in own)
    steps = sum(p.numel() for p in half_frozen().parameters() if p.requires_grad)
    assert written == 4 * 3 * steps, "masters or weights, and two moments"
    assert not any(key.endswith("/weight") for path in own for key in load_file(path))
    if model:
        from transformers import AutoModelForCausalLM

        assert AutoModelForCausalLM.from_pretrained(third).num_parameters() == half_frozen().num_parameters()

    # Retention takes the earlier names; what is left is whole, in any layout, and goes on linking.
    shutil.rmtree(first)
    shutil.rmtree(third)
    again = pool(2).run(partial(trained, out, str(second), **changes))[0]
    assert again == pytest.approx(wanted, rel=1e-6) and inodes(second) == inodes(out / "checkpoint-6")
    elsewhere = {**changes, "zero_stage": 1, "per_device_train_batch_size": 8}
    assert pool(1).run(partial(trained, tmp_path / "one", str(second), **elsewhere))[0] == pytest.approx(
        wanted, rel=1e-5
    )
    assert inodes(tmp_path / "one" / "checkpoint-6") == (
        inodes(second) if model else inodes(tmp_path / "one" / "checkpoint-6")
    )
    assert CheckpointWeights(second).kinds()["weight"] == 4 * numel


def _head(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_what_changes_is_written_anew(tmp_path: Path) -> None:
    wanted = pool(2).run(partial(trained, tmp_path, moving=True, zero_stage=1))[0]
    assert len({*inodes(tmp_path / "checkpoint-2"), *inodes(tmp_path / "checkpoint-4")}) == 2
    again = pool(2).run(partial(trained, tmp_path, str(tmp_path / "checkpoint-4"), moving=True, zero_stage=1))[0]
    assert again == pytest.approx(wanted, rel=1e-6)
    # Control: without a look at them the earlier file would be taken.
    pool(2).run(without_looking, tmp_path / "blind")
    assert inodes(tmp_path / "blind" / "checkpoint-2") == inodes(tmp_path / "blind" / "checkpoint-4")


def without_looking(output_dir: Path) -> None:
    kept = frozen.sum_of
    frozen.sum_of = lambda pieces: (0,)
    try:
        trained(output_dir, moving=True, zero_stage=1)
    finally:
        frozen.sum_of = kept


def without_links(output_dir: Path) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError("Invalid cross-device link")

    kept, disk.link = disk.link, refuse
    try:
        trained(output_dir, zero_stage=3)
    finally:
        disk.link = kept


def test_where_nothing_can_be_linked_it_is_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    pool(2).run(without_links, out)
    first, second = out / "checkpoint-2", out / "checkpoint-4"
    assert len({*inodes(first), *inodes(second)}) == 2
    for path in staying(first):
        assert path.read_bytes() == (second / path.name).read_bytes()


def refused(output_dir: Path, checkpoint: str) -> str:
    try:
        trained(output_dir, checkpoint, zero_stage=3)
    except ConfigError as error:
        return str(error)
    return ""


def test_damage_of_what_they_share_is_noticed(tmp_path: Path) -> None:
    pool(2).run(partial(trained, tmp_path, zero_stage=3))
    (path,) = staying(tmp_path / "checkpoint-2")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    with path.open("r+b") as stream:
        stream.write(data)
    for step in (2, 6):
        said = pool(2).run(refused, tmp_path, str(tmp_path / f"checkpoint-{step}"))[0]
        assert f"{path.name} is damaged" in said
