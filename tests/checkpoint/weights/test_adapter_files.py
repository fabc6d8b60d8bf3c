"""PEFT models: trained as transformers.Trainer trains them, saved as adapters, resumed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.data.columns import base_model, find_label_names
from tests.support.compare import relative
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import pool
from tests.support.reference_run import OURS, reference_run
from tests.support.runs import compatibility_of, train_and_report
from tests.support.transformers_version import needs_add_adapter

peft = pytest.importorskip("peft")

make_data = partial(RaggedTokens, 64)


def lora_model(**changes: Any) -> nn.Module:
    """Adapters on the attention; the head is trained as a whole beside them."""
    torch.manual_seed(0)
    wanted: dict[str, Any] = dict(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(tiny_llama(), peft.LoraConfig(**{**wanted, **changes}))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at the start, which would hide the gradients of A
            nn.init.normal_(parameter, std=0.02)
    return model


def prompt_model() -> nn.Module:
    torch.manual_seed(0)
    return peft.get_peft_model(tiny_llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def test_the_base_model_inside_a_peft_model_is_found() -> None:
    model = lora_model()
    assert type(base_model(model)).__name__ == "LlamaForCausalLM"
    assert find_label_names(model) == ["labels"]


@pytest.mark.cases(3)
@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3)])
def test_losses_are_those_of_transformers(world: int, stage: int, tmp_path: Path) -> None:
    losses, norms = reference_run(lora_model(), make_data(), tmp_path / "theirs", per_device_train_batch_size=8)
    changes = {**OURS, "per_device_train_batch_size": 8 // world, "zero_stage": stage}
    job = partial(train_and_report, lora_model, make_data, str(tmp_path / "ours"), **changes)
    for found in pool(world).run(job):
        assert relative(found.losses, losses) < 1e-5
        assert relative(found.grad_norms, norms) < 1e-4


def arguments(output_dir: Path, stage: int, **changes: Any) -> TrainingArguments:
    values: dict[str, Any] = dict(
        max_steps=4,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        per_device_train_batch_size=4,
        zero_stage=stage,
        learning_rate=2e-3,
    )
    return TrainingArguments(str(output_dir), **{**values, **changes})


def logits_of(model: nn.Module) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.arange(3, 15)[None]).logits
    return found


def train_and_save(make_model: Any, output_dir: Path, stage: int) -> torch.Tensor:
    job = Trainer(make_model(), arguments(output_dir, stage), train_dataset=make_data())
    job.train()
    job.save_model()
    logits = logits_of(job.model_wrapped)
    job.engine.close()
    return logits


@pytest.mark.cases(3)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("make_model", [lora_model, prompt_model])
def test_only_the_adapter_is_saved(make_model: Any, stage: int, tmp_path: Path) -> None:
    wanted = pool(2).run(partial(train_and_save, make_model, tmp_path, stage))[0]
    assert {path.name for path in tmp_path.glob("*.safetensors")} == {"adapter_model.safetensors"}
    assert (tmp_path / "adapter_config.json").is_file() and not (tmp_path / "config.json").exists()
    saved = load_file(tmp_path / "adapter_model.safetensors")
    full_size = sum(p.numel() for p in tiny_llama().parameters())
    assert 0 < sum(t.numel() for t in saved.values()) < full_size / 3
    loaded = peft.PeftModel.from_pretrained(tiny_llama(), str(tmp_path))
    assert torch.allclose(logits_of(loaded), wanted, atol=1e-6)
    assert not torch.allclose(logits_of(make_model()), wanted, atol=1e-3)  # it has learnt something


def inject_adapters(output_dir: Path, stage: int) -> None:
    model: Any = tiny_llama()
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"]))
    job = Trainer(model, arguments(output_dir, stage, max_steps=1), train_dataset=make_data())
    job.train()
    job.save_model()
    job.engine.close()


@needs_add_adapter
def test_adapters_injected_into_a_hugging_face_model_are_saved(tmp_path: Path) -> None:
    pool(2).run(partial(inject_adapters, tmp_path, 3))
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert len(saved) == 4 and all("lora" in name and tensor.numel() == 128 for name, tensor in saved.items())
    assert not (tmp_path / "model.safetensors").exists()


def stop_and_resume(output_dir: Path, stage: int) -> tuple[list[float], list[float], float]:
    uninterrupted = Trainer(
        lora_model(), arguments(output_dir, stage, save_strategy="steps", save_steps=2), train_dataset=make_data()
    )
    uninterrupted.train()
    wanted = compatibility_of(uninterrupted)
    uninterrupted.engine.close()
    fresh = lora_model()
    with torch.no_grad():
        for parameter in fresh.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    resumed = Trainer(fresh, arguments(output_dir, stage), train_dataset=make_data())
    resumed.train(resume_from_checkpoint=str(output_dir / "checkpoint-2"))
    found = compatibility_of(resumed)
    resumed.engine.close()
    distance = max(float((found.weights[n] - wanted.weights[n]).abs().max()) for n in wanted.weights)
    return wanted.losses, found.losses, distance


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [0, 3])
def test_resume(stage: int, tmp_path: Path) -> None:
    for wanted, found, distance in pool(2).run(partial(stop_and_resume, tmp_path, stage)):
        assert found == pytest.approx(wanted, rel=1e-6)
        assert distance < 1e-6


def test_accepted_columns_are_those_of_the_base_model(tmp_path: Path) -> None:
    import datasets

    rows = [{"input_ids": [3, 4], "labels": [3, 4], "text_length": 2} for _ in range(2)]
    job = Trainer(lora_model(), arguments(tmp_path, 0), train_dataset=datasets.Dataset.from_list(rows))
    assert sorted(next(iter(job.get_train_dataloader()))) == ["input_ids", "labels"]
