"""The model of a recipe: transformers configs checked against the recipe."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer.engine.loading.placement import materialize
from ds_trainer.recipes.language_model import build_language_model, language_model_config, load_language_model
from ds_trainer.recipes.recipe import DataSpec, ModelSpec, Recipe
from ds_trainer.recipes.tokenizers import ByteTokenizer
from ds_trainer.utils.errors import ConfigError

TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def recipe(path: str | None = None, length: int = 8, tokenizer: str = "bytes", **architecture: Any) -> Recipe:
    model = ModelSpec(path=path) if path is not None else ModelSpec(architecture={**TINY, **architecture})
    return Recipe(model=model, data=DataSpec(train=("x",), sequence_length=length, tokenizer=tokenizer), path="r.yaml")


def refused(wanted: Recipe) -> str:
    with pytest.raises(ConfigError) as caught:
        language_model_config(wanted, ByteTokenizer())
    return str(caught.value)


def loaded(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights of a model that was created on meta."""
    materialize(model, torch.device("cpu"))
    return model.state_dict()


def test_adapters_of_a_recipe() -> None:
    config = language_model_config(recipe(), ByteTokenizer())
    spec = ModelSpec(architecture=TINY, peft={"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]})
    wanted = replace(recipe(), model=spec)
    model = build_language_model(wanted, config)
    assert {name.split(".")[-3] for name, p in model.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}
    for peft, words in (({"peft_type": "LORE"}, "Did you mean 'LORA'"), ({"peft_type": "LORA", "rr": 2}, "'rr' is no")):
        with pytest.raises(ConfigError, match=words):
            build_language_model(replace(wanted, model=replace(spec, peft=peft)), config)


def test_an_architecture_follows_the_tokenizer() -> None:
    config = language_model_config(recipe(), ByteTokenizer())
    assert (config.vocab_size, config.bos_token_id, config.eos_token_id) == (257, 256, 256)
    assert language_model_config(recipe(vocab_size=320, eos_token_id=5), ByteTokenizer()).eos_token_id == 5


def test_the_recipe_is_not_changed() -> None:
    wanted = recipe()
    language_model_config(wanted, ByteTokenizer())
    assert wanted == recipe()


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        (
            {"hiden_size": 5},
            r"r.yaml: unknown key 'model.architecture.hiden_size' for a llama .* Did you mean 'hidden_s",
        ),
        (
            {"wings": 2},
            r"r.yaml: unknown key 'model.architecture.wings' for a llama model. LlamaConfig in transformers",
        ),
        ({"model_type": "lama"}, r"r.yaml: .* no causal language model of type 'lama'. Did you mean 'llama'\?"),
        ({"model_type": "vit"}, r"r.yaml: .* no causal language model of type 'vit'"),
        ({"hidden_size": "wide"}, r"r.yaml: model.architecture: .*'hidden_size' expected int, got str"),
        ({"hidden_size": 0}, r"r.yaml: model.architecture.hidden_size=0 must be 1 or more."),
        ({"hidden_size": -16}, r"r.yaml: model.architecture.hidden_size=-16 must be 1 or more."),
        ({"num_hidden_layers": -1}, r"r.yaml: model.architecture.num_hidden_layers=-1 must be 1 or more."),
        ({"num_attention_heads": 0}, r"r.yaml: model.architecture.num_attention_heads=0 must be 1 or more."),
        ({"num_attention_heads": 3}, r"r.yaml: model.architecture: .*not a multiple of the number of attention heads"),
        ({"vocab_size": 100}, r"r.yaml: the model's vocab_size=100 is smaller than the 257 tokens"),
        ({"max_position_embeddings": 4}, r"r.yaml: data.sequence_length=8 is longer than .*max_position_embeddings=4"),
    ],
)
def test_invalid_architectures(architecture: dict[str, Any], message: str) -> None:
    assert re.match(message, refused(recipe(**architecture)))


def test_all_unknown_keys_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        language_model_config(recipe(hiden_size=1, wings=2), ByteTokenizer())
    assert len(caught.value.problems) == 2


def test_aliases_of_keys_are_accepted() -> None:
    assert language_model_config(recipe(rope_theta=5e5), ByteTokenizer()).rope_parameters["rope_theta"] == 5e5
    wanted = Recipe(
        model=ModelSpec(architecture={"model_type": "gpt2", "hidden_size": 16, "n_layer": 1, "n_head": 2}),
        data=DataSpec(train=("x",), sequence_length=8),
    )
    assert language_model_config(wanted, ByteTokenizer()).n_embd == 16


def test_random_weights_follow_the_seed() -> None:
    config = language_model_config(recipe(), ByteTokenizer())
    first = loaded(build_language_model(recipe(), config, seed=1))
    second = loaded(build_language_model(recipe(), config, seed=1))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(tensor.dtype == torch.float32 for tensor in first.values())
    third = loaded(build_language_model(recipe(), config, seed=2))
    assert not torch.equal(first["model.embed_tokens.weight"], third["model.embed_tokens.weight"])


def test_a_saved_model(tmp_path: Path) -> None:
    config = language_model_config(recipe(), ByteTokenizer())
    model = build_language_model(recipe(), config)
    materialize(model, torch.device("cpu"))
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    ByteTokenizer().save_pretrained(tmp_path)
    wanted = recipe(path=str(tmp_path))
    read = build_language_model(wanted, language_model_config(wanted, ByteTokenizer()))
    for name, tensor in loaded(read).items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, model.state_dict()[name].float())


def test_directories_without_a_model(tmp_path: Path) -> None:
    assert "is not a directory" in refused(recipe(path=str(tmp_path / "gone")))
    assert "has no config.json" in refused(recipe(path=str(tmp_path)))
    (tmp_path / "config.json").write_text("{")
    ByteTokenizer().save_pretrained(tmp_path)
    assert "r.yaml: model.path: " in refused(recipe(path=str(tmp_path)))
    language_model_config(recipe(), ByteTokenizer()).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has no model that can be loaded"):
        load_language_model(str(tmp_path))


def test_bytes_are_rejected_for_a_model_with_another_tokenizer(tmp_path: Path) -> None:
    language_model_config(recipe(), ByteTokenizer()).save_pretrained(tmp_path)
    assert "was not trained on bytes (no byte_tokenizer.json)" in refused(recipe(path=str(tmp_path)))
