"""PEFT adapters around a model on meta: the numbers that PEFT gives them, the base's from its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ds_trainer
from ds_trainer import ConfigError
from ds_trainer.engine.loading.placement import materialize
from ds_trainer.training.loading.peft_adapters import add_adapters
from tests.support.saved_models import CLASSES, saved

CPU = torch.device("cpu")


def lora(**values: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(**{"r": 2, "target_modules": ["q_proj", "up_proj"], "task_type": "CAUSAL_LM", **values})


def expected(directory: str, peft_config: Any, seed: int, kind: str = "AutoModelForCausalLM") -> Any:
    """The same by the libraries themselves, from a base that has its weights."""
    import transformers
    from peft import get_peft_model

    base = getattr(transformers, kind).from_pretrained(directory)
    torch.manual_seed(seed)
    return get_peft_model(base, peft_config)


def check_equal(model: nn.Module, other: nn.Module) -> None:
    materialize(model, CPU)
    ours, reference = dict(model.named_parameters()), dict(other.named_parameters())
    assert ours.keys() == reference.keys()
    assert [n for n in ours if ours[n].dtype != reference[n].dtype or not torch.equal(ours[n], reference[n])] == []
    assert [n for n in ours if ours[n].requires_grad != reference[n].requires_grad] == []


def ia3() -> Any:
    from peft import IA3Config

    return IA3Config(target_modules=["q_proj", "up_proj"], feedforward_modules=["up_proj"], task_type="CAUSAL_LM")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        lora,
        lambda: lora(init_lora_weights="gaussian"),
        lambda: lora(modules_to_save=["lm_head"], target_modules=["embed_tokens", "q_proj"]),
        ia3,
    ],
    ids=["lora", "gaussian", "a head and embeddings", "ia3"],
)
def test_adapters_are_those_of_peft(make: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    directory = saved("llama", tmp_path, dtype)
    model = ds_trainer.from_pretrained(directory, peft_config=make(), seed=7)
    on_meta = {name for name, p in model.named_parameters() if p.is_meta}
    assert not any("lora_" in name or "ia3_" in name for name in on_meta)
    assert any("base_layer.weight" in name for name in on_meta)
    check_equal(model, expected(directory, make(), 7))
    first = next(p for name, p in model.named_parameters() if "lora_A" in name or "ia3_" in name)
    assert not first.is_meta and not first.isnan().any()


def test_prompt_tuning_works(tmp_path: Path) -> None:
    from peft import PromptTuningConfig

    directory = saved("llama", tmp_path)
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    check_equal(ds_trainer.from_pretrained(directory, peft_config=config, seed=3), expected(directory, config, 3))


def test_a_classifier_with_adapters_trains(tmp_path: Path) -> None:
    directory = saved("bert classifier", tmp_path)
    config = lora(task_type="SEQ_CLS", target_modules=["query"])
    model = ds_trainer.from_pretrained(directory, peft_config=config, seed=3)
    check_equal(model, expected(directory, config, 3, CLASSES["bert classifier"]))


def test_saved_adapters_can_be_trained_further(tmp_path: Path) -> None:
    base = saved("bert", tmp_path / "base")
    config = lora(task_type="SEQ_CLS", target_modules=["query"])
    made = expected(base, config, 3, "AutoModelForSequenceClassification")
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    made.save_pretrained(str(tmp_path / "adapters"))
    model = ds_trainer.from_pretrained(tmp_path / "adapters", allow_new_weights=["bert.pooler.*"])
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name, p in made.named_parameters() if p.requires_grad}
    materialize(model, CPU)
    reference = dict(made.named_parameters())
    unused = "classifier.original_module"  # of a head that the base did not have
    of_base = {n for n in reference if "pooler" not in n and unused not in n}
    found = dict(model.named_parameters())
    assert [name for name in of_base if not torch.equal(found[name], reference[name])] == []
    assert type(model.get_base_model()).__name__ == "BertForSequenceClassification"


def test_adapters_on_a_model_that_is_already_loaded() -> None:
    from tests.support.models import tiny_llama

    model, source = add_adapters(tiny_llama(), None, lora(), seed=3)
    assert source is None and not any(p.is_meta for p in model.parameters())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"use_dora": True}, "lora_magnitude_vector.*from the base weights, which are not loaded"),
        ({"init_lora_weights": "pissa"}, "Load the base with AutoModel...from_pretrained"),
        ({"init_lora_weights": "olora"}, "Load the base with AutoModel...from_pretrained"),
        ({"target_modules": ["quux"]}, "PEFT cannot apply LoraConfig to LlamaForCausalLM.*quux"),
    ],
)
def test_adapters_that_need_the_base_weights_are_rejected(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    directory = saved("llama", tmp_path)
    with pytest.raises(ConfigError, match=message):
        ds_trainer.from_pretrained(directory, peft_config=lora(**values))


def test_contradictions_about_adapters_are_rejected(tmp_path: Path) -> None:
    base = saved("llama", tmp_path / "base")
    made = expected(base, lora(), 3)
    made.save_pretrained(str(tmp_path / "adapters"))
    with pytest.raises(ConfigError, match=r"Remove peft_config to continue training"):
        ds_trainer.from_pretrained(tmp_path / "adapters", peft_config=lora())
    settings = tmp_path / "adapters" / "adapter_config.json"
    settings.write_text(
        settings.read_text().replace(f'"base_model_name_or_path": "{base}"', '"base_model_name_or_path": null')
    )
    with pytest.raises(ConfigError, match=r"does not name the base model"):
        ds_trainer.from_pretrained(tmp_path / "adapters")
