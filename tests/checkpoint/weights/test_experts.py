"""Stacked experts, which files have one by one: every reader of a checkpoint or a saved model gets the same numbers."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.checkpoint.export.checkpoint_export import export_checkpoint
from ds_trainer.checkpoint.export.inspection import checkpoint_problems
from ds_trainer.checkpoint.weights.model_description import DESCRIPTION_FILE
from ds_trainer.utils import distributed
from tests.checkpoint.weights.test_model_files import equal, in_files
from tests.support.experts import qwen3_moe
from tests.support.models import RaggedTokens
from tests.support.oracle import Trajectory
from tests.support.pool import pool
from tests.support.runs import compatibility_of, whole_weights

ONE = "model.layers.1.mlp.experts.2.up_proj.weight"


class Results(NamedTuple):
    uninterrupted: Trajectory
    resumed: Trajectory
    restarted: dict[str, dict[str, torch.Tensor]]


def run(output_dir: str, model: Any = None, resume: str | None = None, **arguments: Any) -> Trainer:
    values: dict[str, Any] = dict(
        max_steps=3,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="steps",
        save_steps=1,
        disable_tqdm=True,
        use_cpu=True,
        zero_stage=3,
        max_shard_size="8KB",
    )
    args = TrainingArguments(output_dir, **{**values, **arguments})
    trainer = Trainer(qwen3_moe() if model is None else model, args, train_dataset=RaggedTokens(32))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def unchanged(output_dir: str, model: Any = None, **arguments: Any) -> dict[str, torch.Tensor]:
    """The weights that a run begins with."""
    still = dict(max_steps=1, learning_rate=0.0, weight_decay=0.0, save_strategy="no")
    trainer = run(output_dir, model, **still, **arguments)
    found = whole_weights(trainer)
    trainer.engine.close()
    return found


def save_every_way(to: str) -> Results:
    """In float32, where no master is written beside the model's files."""
    trainer = run(f"{to}/whole")
    uninterrupted = compatibility_of(trainer)
    trainer.save_model(f"{to}/saved")
    trainer.engine.close()
    trainer = run(f"{to}/resumed", resume=f"{to}/whole/checkpoint-2")
    resumed = compatibility_of(trainer)
    trainer.engine.close()
    restarted = {
        "from a checkpoint": unchanged(f"{to}/a", model=f"{to}/whole/checkpoint-3"),
        "from what was saved": unchanged(f"{to}/b", model=f"{to}/saved", zero_stage=2),
        "with the weights of a checkpoint": unchanged(f"{to}/c", start_from_weights=f"{to}/whole/checkpoint-3"),
        "with the weights that were saved": unchanged(f"{to}/d", start_from_weights=f"{to}/saved"),
    }
    return Results(uninterrupted, resumed, restarted)


def resumed_elsewhere(to: str) -> list[float]:
    arguments: dict[str, Any] = {"zero_stage": 1, "gradient_accumulation_steps": 2}  # the same micro-batches
    trainer = run(f"{to}/alone", resume=f"{to}/whole/checkpoint-2", **arguments)
    found = compatibility_of(trainer).losses
    trainer.engine.close()
    return found


@pytest.mark.extended
def test_every_reader_gets_the_experts(tmp_path: Path) -> None:
    results = pool(2).run(partial(save_every_way, str(tmp_path)))[0]
    assert results.resumed.losses == results.uninterrupted.losses
    assert equal(results.resumed.weights, results.uninterrupted.weights)
    for way, found in results.restarted.items():
        assert equal(found, results.uninterrupted.weights), way
    assert pool(1).run(partial(resumed_elsewhere, str(tmp_path)))[0] == pytest.approx(
        results.uninterrupted.losses, abs=1e-5
    )
    checkpoint = tmp_path / "whole" / "checkpoint-3"
    export_checkpoint(checkpoint, tmp_path / "exported", 8_000)
    saved = in_files(tmp_path / "saved")
    assert ONE in saved and equal(in_files(checkpoint), saved) and equal(in_files(tmp_path / "exported"), saved)
    assert len(list((tmp_path / "exported").glob("model-*.safetensors"))) > 2
    assert checkpoint_problems(checkpoint) == []
    # One of a version that described no sections is exported with the tensors of the model.
    described = checkpoint / DESCRIPTION_FILE
    values = json.loads(described.read_text())
    assert len(values.pop("sections")) == 4
    described.write_text(json.dumps({**values, "format": 1}))
    export_checkpoint(checkpoint, tmp_path / "as before", 10**9)
    assert equal(in_files(tmp_path / "as before"), results.uninterrupted.weights)


def unlike(to: str) -> None:
    model: Any = qwen3_moe()
    if distributed.rank() == 1:
        model._weight_conversions = []  # as from_pretrained leaves it that has read stacked experts
    run(to, model, zero_stage=2, max_steps=1).engine.close()


def test_without_equal_names_on_all_ranks_a_checkpoint_has_no_model(tmp_path: Path) -> None:
    """They would write to different offsets of the same files: such a checkpoint has no model."""
    pool(2).run(partial(unlike, str(tmp_path)))
    checkpoint = tmp_path / "checkpoint-1"
    assert checkpoint_problems(checkpoint) == [] and not list(checkpoint.glob("model*.safetensors"))


peft: Any = pytest.importorskip("peft")


def adapted(to: str) -> None:
    from transformers import Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    base: Any = Qwen3MoeForCausalLM.from_pretrained(f"{to}/base")
    run(f"{to}/out", peft.get_peft_model(base, config)).engine.close()


def test_adapters_are_merged_into_a_published_model(tmp_path: Path) -> None:
    from transformers import Qwen3MoeForCausalLM

    qwen3_moe().save_pretrained(tmp_path / "base")  # type: ignore[operator]
    pool(2).run(partial(adapted, str(tmp_path)))
    checkpoint = tmp_path / "out" / "checkpoint-3"
    export_checkpoint(checkpoint, tmp_path / "merged", 10**9, merge_lora=True)
    model: Any = peft.PeftModel.from_pretrained(Qwen3MoeForCausalLM.from_pretrained(tmp_path / "base"), checkpoint)
    model.merge_and_unload().save_pretrained(tmp_path / "wanted")
    found, wanted = in_files(tmp_path / "merged"), in_files(tmp_path / "wanted")
    assert ONE in found and equal(found, wanted)
