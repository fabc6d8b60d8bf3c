"""Models with learned temperatures: CLIP, SigLIP, adapters on them, and a language model in every layout."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.checkpoint.export.checkpoint_export import export_checkpoint
from ds_trainer.optim.optimizer_builder import decay_parameter_names
from tests.support.compare import assert_equal
from tests.support.layouts import DATA, Documents, PlainAttention, documents_as_rows, pad
from tests.support.models import regression_rows
from tests.support.oracle import Trajectory, train_plainly
from tests.support.pool import pool
from tests.support.runs import compatibility_of, train_and_report, whole_weights
from tests.support.scalar_models import (
    Line,
    Scalars,
    ScaledAttention,
    clip,
    collate_pairs,
    contrastive_loss,
    pairs,
    siglip,
)

BATCH = 8
SHARDED = {
    "tensor_parallel": {
        "partition_config": {
            "use_default_specs": False,
            "layer_specs": [
                {"patterns": [r".*\.(q_proj|k_proj|v_proj|fc1)\.(weight|bias)$"], "partition_type": "column"},
                {"patterns": [r".*\.(out_proj|fc2)\.weight$"], "partition_type": "row"},
            ],
        }
    }
}


def adapted_clip() -> nn.Module:
    """CLIP with LoRA: its temperature is frozen."""
    from peft import LoraConfig, get_peft_model

    model = clip()
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def temperature_trained() -> nn.Module:
    """CLIP with LoRA, beside which the temperature is trained."""
    model = adapted_clip()
    model.base_model.model.logit_scale.requires_grad_(True)
    return model


MAKE: dict[str, Any] = {
    "clip": clip,
    "siglip": siglip,
    "adapters": adapted_clip,
    "adapters and temperature": temperature_trained,
}
OFFLOAD = {"offload_optimizer": "cpu", "offload_param": "cpu"}
CONTRASTIVE: list[tuple[str, int, dict[str, Any]]] = [
    ("clip", 1, {"zero_stage": 0}),
    ("clip", 2, {"zero_stage": 1}),
    ("clip", 2, {"zero_stage": 2, "offload_optimizer": "cpu"}),
    ("clip", 2, {"zero_stage": 3, **OFFLOAD}),
    ("clip", 4, {"zero_stage": 3}),
    ("clip", 2, {"zero_stage": 0, "tensor_parallel_size": 2, "deepspeed": SHARDED}),
    ("clip", 4, {"zero_stage": 3, "tensor_parallel_size": 2, "deepspeed": SHARDED}),
    ("siglip", 2, {"zero_stage": 0}),
    ("siglip", 4, {"zero_stage": 3}),
    ("adapters", 2, {"zero_stage": 0}),
    ("adapters", 2, {"zero_stage": 3}),
    ("adapters and temperature", 2, {"zero_stage": 3}),
]


def adamw(model: nn.Module, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1.0, eps=1e-4)  # gradients that are rounding alone make no steps


@cache
def reference(model: str, micro_batch: int) -> Trajectory:
    return train_plainly(
        MAKE[model](),
        pairs(32),
        loss=partial(contrastive_loss, micro_batch),
        optimizer=adamw,
        learning_rate=1e-3,
        global_batch=BATCH,
        collate=collate_pairs,
    )


def train_contrastive(model: str, output_dir: str, **arguments: Any) -> Trajectory:
    values = {"learning_rate": 1e-3, "adam_epsilon": 1e-4, "max_grad_norm": 0.0, **arguments}
    return train_and_report(MAKE[model], partial(pairs, 32), output_dir, collator=collate_pairs, **values)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("model", "world", "arguments"), CONTRASTIVE)
def test_contrastive_models(model: str, world: int, arguments: dict[str, Any], tmp_path: Path) -> None:
    micro = BATCH * arguments.get("tensor_parallel_size", 1) // world
    wanted = reference(model, micro)
    job = partial(train_contrastive, model, str(tmp_path), per_device_train_batch_size=micro, **arguments)
    for found in pool(world).run(job):
        assert found.losses == pytest.approx(wanted.losses, rel=1e-6)
        # Sums of float32 in another order. How far apart they are depends on the CPU: up to 2.4e-6 was measured here,
        # 1.8e-6 for weights.
        assert found.grad_norms == pytest.approx(wanted.grad_norms, rel=1e-5)
        assert found.weights.keys() == wanted.weights.keys()
        for name, value in wanted.weights.items():
            assert found.weights[name].shape == value.shape, name
            assert (found.weights[name] - value).abs().max() < 5e-6, name


def test_control_without_its_gradient_the_temperature_differs(tmp_path: Path) -> None:
    """Negative control: the comparison sees a temperature that is not trained."""
    found, wanted = reference("adapters", 4), reference("adapters and temperature", 4)
    name = "base_model.model.logit_scale"
    assert abs(found.weights[name] - wanted.weights[name]) > 1e-3
    assert found.grad_norms != pytest.approx(wanted.grad_norms, rel=1e-4)


def save_clip(output_dir: str, stage: int) -> dict[str, torch.Tensor]:
    args = TrainingArguments(
        output_dir,
        zero_stage=stage,
        bf16=stage == 2,
        per_device_train_batch_size=4,
        max_steps=2,
        save_steps=2,
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(clip(), args, train_dataset=pairs(32), data_collator=collate_pairs)
    trainer.train()
    trainer.save_model(f"{output_dir}/live")
    weights = whole_weights(trainer)
    trainer.engine.close()
    return weights


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_transformers_loads_what_was_saved(stage: int, tmp_path: Path) -> None:
    from transformers import CLIPModel

    weights = pool(2).run(save_clip, str(tmp_path), stage)[0]
    exported = export_checkpoint(tmp_path / "checkpoint-2", tmp_path / "exported", 2**20).directory
    for directory in (exported, tmp_path / "live"):
        model, report = CLIPModel.from_pretrained(directory, output_loading_info=True)
        assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert model.logit_scale.shape == ()
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.float(), weights[name]), name


# -- layouts ----------------------------------------------------------------------------------------------------------

AXES: list[tuple[int, int, dict[str, Any]]] = [
    (1, 2, {}),
    (2, 0, {"tensor_parallel_size": 2}),
    (2, 1, {"sequence_parallel_size": 2}),
    (2, 3, {"context_parallel_size": 2}),
    (4, 3, {"tensor_parallel_size": 2}),
    (4, 2, {"context_parallel_size": 2, "sequence_parallel_size": 2}),
    (4, 0, {"tensor_parallel_size": 2, "context_parallel_size": 2}),
]


@cache
def language_reference() -> Trajectory:
    data = Documents(DATA["padded"]())
    return train_plainly(
        ScaledAttention(), data, optimizer=adamw, clip=0.3, learning_rate=2e-3, collate=documents_as_rows
    )


@pytest.mark.cases(2)
@pytest.mark.parametrize(("world", "stage", "axes"), AXES)
def test_a_language_model_in_every_layout(world: int, stage: int, axes: dict[str, int], tmp_path: Path) -> None:
    replicas = world
    for size in axes.values():
        replicas //= size
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 16 // replicas,
        "learning_rate": 2e-3,
        "adam_epsilon": 1e-4,
        "max_grad_norm": 0.3,
        "zero_stage": stage,
        **axes,
    }
    if "tensor_parallel_size" in axes:
        arguments["deepspeed"] = {"tensor_parallel": {"partition_config": PlainAttention.partition_config}}
    job = partial(train_and_report, ScaledAttention, DATA["padded"], str(tmp_path), Trainer, pad, **arguments)
    wanted = language_reference()
    for found in pool(world).run(job):
        assert_equal(found, wanted)
        assert found.weights["logit_scale"].shape == ()
        assert abs(found.weights["logit_scale"] - wanted.weights["logit_scale"]) < 1e-6


# -- beside training --------------------------------------------------------------------------------------------------


def go_back(output_dir: str, stage: int, bad: bool) -> Trajectory:
    """Four steps in the order of the data; with ``bad``, two more batches are read, the second of which is ruined."""
    rows = regression_rows(48)
    if bad:
        rows[24]["x"] = rows[24]["x"] * torch.nan
    else:
        del rows[16:32]  # what is passed over
    args = TrainingArguments(
        output_dir,
        zero_stage=stage,
        per_device_train_batch_size=4,
        max_steps=4,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        nonfinite_policy="rollback",
        save_strategy="steps",
        save_steps=2,
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(Scalars(), args, train_dataset=rows)
    trainer.train()
    assert trainer.state.global_step == 4
    found = compatibility_of(trainer)
    trainer.engine.close()
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_run_with_scalar_parameters_rolls_back(stage: int, tmp_path: Path) -> None:
    found = pool(2).run(partial(go_back, str(tmp_path / "bad"), stage, True))
    wanted = pool(2).run(partial(go_back, str(tmp_path / "good"), stage, False))
    for ours, expected in zip(found, wanted, strict=True):
        assert ours.losses[-2:] == expected.losses[-2:]
        for name, value in expected.weights.items():
            assert ours.weights[name].shape == value.shape and torch.equal(ours.weights[name], value), name


@pytest.mark.parametrize("make_model", [Line, clip, siglip])
def test_weight_decay_is_that_of_transformers(make_model: Any) -> None:
    """A number is decayed by its name, like any other parameter: transformers leaves out biases and norms alone."""
    import transformers

    model = make_model()
    expected = transformers.Trainer.get_decay_parameter_names(None, model)
    assert set(decay_parameter_names(model)) == set(expected) & {name for name, _ in model.named_parameters()}
