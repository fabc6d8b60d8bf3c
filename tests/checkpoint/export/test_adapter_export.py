"""Export of adapters from a checkpoint on disk: alone as ``save_model`` writes them, and merged as peft merges them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.checkpoint.export.checkpoint_export import export_checkpoint
from ds_trainer.engine.weights import gathered
from ds_trainer.utils.errors import ConfigError
from tests.checkpoint.export.test_checkpoint_export import SHARD, files_of
from tests.checkpoint.weights.test_adapter_files import lora_model, prompt_model
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import pool
from tests.support.transformers_version import needs_add_adapter

peft = pytest.importorskip("peft")


def embedding_model() -> nn.Module:
    """DoRA on everything linear, LoRA on the embedding, which is tied to the head."""
    torch.manual_seed(0)
    targets = ["q_proj", "down_proj", "embed_tokens"]
    config = peft.LoraConfig(
        r=4, target_modules=targets, use_rslora=True, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(tiny_llama(tied=True), config)


def dora_model() -> nn.Module:
    return lora_model(use_dora=True, target_modules=["q_proj", "down_proj"])


def put_in_model() -> nn.Module:
    """Adapters that transformers has put in: no class of peft is around the model."""
    model: Any = tiny_llama()
    torch.manual_seed(0)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    return model  # type: ignore[no-any-return]


def tp_model() -> nn.Module:
    return lora_model(modules_to_save=None, target_modules=["q_proj", "o_proj"])


CASES: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "lora, one process": (lora_model, 1, {"zero_stage": 0}),
    "lora, zero 2": (lora_model, 2, {"zero_stage": 2}),
    "lora, zero 3": (lora_model, 2, {"zero_stage": 3}),
    "lora, bf16, zero 3": (lora_model, 2, {"zero_stage": 3, "bf16": True}),
    "lora, tp 2, zero 3": (tp_model, 2, {"zero_stage": 3, "tensor_parallel_size": 2}),
    "dora, zero 1": (dora_model, 2, {"zero_stage": 1}),
    "embedding, zero 3": (embedding_model, 2, {"zero_stage": 3}),
    "put in, zero 3": (put_in_model, 2, {"zero_stage": 3}),
}


def saved_both_ways(make_model: Any, output_dir: str, **arguments: Any) -> dict[str, torch.Tensor]:
    """A checkpoint and a live ``save_model`` of the same step; all weights that the ranks hold, in their types."""
    values: dict[str, Any] = dict(
        max_steps=2,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        save_strategy="steps",
        save_steps=2,
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(
        make_model(), TrainingArguments(output_dir, **{**values, **arguments}), train_dataset=RaggedTokens(32)
    )
    trainer.train()
    trainer.save_model(f"{output_dir}/live")
    parameters = list(trainer.model.named_parameters())
    with gathered([p for _, p in parameters]):
        full_weights = {name: p.detach().cpu().clone() for name, p in parameters}
    trainer.engine.close()
    return full_weights


def assert_same_files(found: Path, wanted: Path) -> None:
    """Bit for bit, but for the order in which peft writes its sets."""
    ours, reference = files_of(found), files_of(wanted)
    assert sorted_lists(ours.pop("adapter_config.json")) == sorted_lists(reference.pop("adapter_config.json"))
    assert ours == reference and "adapter_model.safetensors" in ours


def sorted_lists(text: bytes) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(text)
    values["base_model_name_or_path"] = values["base_model_name_or_path"] or None  # peft 0.20 writes either
    return {key: sorted(value) if isinstance(value, list) else value for key, value in values.items()}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=needs_add_adapter if case.startswith("put in") else ()) for case in CASES]
)
def test_adapters_are_exported_alone_and_merged(case: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    make_model, world, changes = CASES[case]
    untouched: Any = make_model()
    untouched = untouched.unload() if hasattr(untouched, "unload") else tiny_llama()
    untouched.save_pretrained(tmp_path / "base")
    full = pool(world).run(partial(saved_both_ways, make_model, str(tmp_path), **changes))[0]
    checkpoint = tmp_path / "checkpoint-2"
    assert not (checkpoint / "model.safetensors").exists()
    # The checkpoint itself is what peft loads, to the bit.
    ours, reference = files_of(checkpoint), files_of(tmp_path / "live")
    assert sorted_lists(ours["adapter_config.json"]) == sorted_lists(reference["adapter_config.json"])
    assert ours["adapter_model.safetensors"] == reference["adapter_model.safetensors"]
    export_checkpoint(checkpoint, tmp_path / "alone", SHARD)
    assert_same_files(tmp_path / "alone", tmp_path / "live")

    with pytest.raises(ConfigError, match=r"without their base model.*--model"):
        export_checkpoint(checkpoint, tmp_path / "merged", SHARD, merge_lora=True)
    export_checkpoint(checkpoint, tmp_path / "merged", SHARD, merge_lora=True, model=tmp_path / "base")
    wanted: Any = make_model()
    if "bf16" in changes:
        wanted.to(torch.bfloat16)
    wanted.load_state_dict(full, strict=False)
    if not hasattr(wanted, "merge_and_unload"):
        wanted = peft.PeftModel.from_pretrained(tiny_llama(), str(tmp_path / "live"))
    before = {name: p.clone() for name, p in wanted.get_base_model().named_parameters() if "lora" not in name}
    expected = dict(wanted.merge_and_unload().named_parameters())
    found = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").named_parameters())
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == p.dtype and torch.equal(found[name], p) for name, p in expected.items())
    changed = [n for n, p in before.items() if not torch.equal(p, found.get(n.replace(".base_layer", ""), p))]
    assert len(changed) >= 2  # merging has changed something
    assert not (tmp_path / "merged" / "adapter_config.json").exists()


def test_a_prompt_is_exported_and_cannot_be_merged(tmp_path: Path) -> None:
    pool(2).run(partial(saved_both_ways, prompt_model, str(tmp_path), zero_stage=3))
    export_checkpoint(tmp_path / "checkpoint-2", tmp_path / "out", SHARD)
    assert_same_files(tmp_path / "out", tmp_path / "live")
    with pytest.raises(ConfigError, match="PROMPT_TUNING cannot be merged"):
        export_checkpoint(tmp_path / "checkpoint-2", tmp_path / "merged", SHARD, merge_lora=True)


def test_adapters_in_another_type(tmp_path: Path) -> None:
    pool(2).run(partial(saved_both_ways, lora_model, str(tmp_path), zero_stage=3))
    export_checkpoint(tmp_path / "checkpoint-2", tmp_path / "out", SHARD, dtype=torch.bfloat16)
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    wanted = load_file(tmp_path / "live" / "adapter_model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in wanted.items())
