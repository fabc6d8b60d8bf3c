"""``ds_trainer.from_pretrained``: the same model as transformers gives, on meta, its numbers from the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ds_trainer
from ds_trainer import ConfigError
from ds_trainer.engine.loading.placement import materialize
from ds_trainer.engine.loading.weight_source import attached_weight_source
from tests.support.models import tiny_llama
from tests.support.saved_models import CLASSES, saved

CPU = torch.device("cpu")


def loaded(model: nn.Module) -> dict[str, torch.Tensor]:
    """All tensors of a model that was on meta."""
    assert all(parameter.is_meta for parameter in model.parameters())
    materialize(model, CPU)
    return model.state_dict()


def differences(model: nn.Module, expected: nn.Module) -> list[str]:
    """Names of tensors that differ in type, shape or value; buffers that are not saved among them."""
    named = dict(expected.named_buffers())
    found = [name for name, buffer in model.named_buffers() if not torch.equal(buffer, named[name])]
    ours, reference = model.state_dict(), expected.state_dict()
    assert ours.keys() == reference.keys()
    return found + [n for n in ours if ours[n].dtype != reference[n].dtype or not torch.equal(ours[n], reference[n])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CLASSES)
def test_from_pretrained_gives_the_model_of_transformers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    import transformers

    directory = saved(name, tmp_path, dtype, max_shard_size="20KB")
    expected = getattr(transformers, CLASSES[name]).from_pretrained(directory)
    model = ds_trainer.from_pretrained(directory)
    assert type(model) is type(expected) and not model.training and model.name_or_path == directory
    assert all(parameter.is_meta for parameter in model.parameters())
    shared = [len({id(p) for p in found.parameters()}) for found in (model, expected)]
    assert shared[0] == shared[1]
    materialize(model, CPU)
    assert [len({id(p) for p in found.parameters()}) for found in (model, expected)] == shared
    assert differences(model, expected) == []
    assert model.config.to_dict() == expected.config.to_dict()


def test_the_dtype_of_the_weights(tmp_path: Path) -> None:
    directory = saved("llama", tmp_path, torch.bfloat16)
    types = {
        requested: ds_trainer.from_pretrained(directory, dtype=requested).dtype
        for requested in (None, "auto", "float32")
    }
    assert types == {None: torch.bfloat16, "auto": torch.bfloat16, "float32": torch.float32}
    assert ds_trainer.from_pretrained(directory, torch_dtype=torch.float16).config.dtype == torch.float16
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"dtype": "bfloat16",', ""))
    assert "bfloat16" not in config.read_text()
    assert ds_trainer.from_pretrained(directory).dtype == torch.bfloat16  # as the file has it


def test_model_and_generation_config_fields_may_be_given(tmp_path: Path) -> None:
    directory = saved("t5", tmp_path)
    settings = tmp_path / "generation_config.json"
    settings.write_text(settings.read_text().replace("{", '{"num_beams": 3,', 1))
    model = ds_trainer.from_pretrained(directory, dropout_rate=0.25, attn_implementation="eager")
    assert (model.config.dropout_rate, model.config._attn_implementation) == (0.25, "eager")
    assert model.generation_config.num_beams == 3
    config = model.config
    config.dropout_rate = 0.5
    assert ds_trainer.from_pretrained(directory, config=config).encoder.block[0].layer[0].dropout.p == 0.5


def test_the_model_is_not_sharded_before_training(tmp_path: Path) -> None:
    from transformers.integrations import HfDeepSpeedConfig

    directory = saved("llama", tmp_path)
    kept = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})
    model = ds_trainer.from_pretrained(directory)
    del kept
    assert not any(hasattr(parameter, "ds_id") for parameter in model.parameters())
    from transformers import AutoModelForCausalLM

    materialize(model, CPU)
    assert differences(model, AutoModelForCausalLM.from_pretrained(directory)) == []


def test_a_subfolder_and_a_bin_file(tmp_path: Path) -> None:
    model: Any = tiny_llama(seed=3)
    model.config.save_pretrained(tmp_path / "inside")
    torch.save(model.state_dict(), tmp_path / "inside" / "pytorch_model.bin")
    read = ds_trainer.from_pretrained(tmp_path, "AutoModelForCausalLM", subfolder="inside")
    materialize(read, CPU)
    assert differences(read, model.eval()) == []


# -- new heads ---------------------------------------------------------------------------------------------------------


def test_a_new_head_is_rejected_with_the_argument_that_allows_it(tmp_path: Path) -> None:
    directory = saved("bert", tmp_path)
    with pytest.raises(ConfigError) as refused:
        ds_trainer.from_pretrained(directory, "AutoModelForSequenceClassification")
    message = str(refused.value)
    assert "classifier.bias" in message and "classifier.weight" in message and "bert.pooler.dense.weight" in message
    assert 'allow_new_weights=["bert.pooler.dense.*", "classifier.*"]' in message and "matches" not in message
    with pytest.raises(ConfigError, match=r"'clasifier.\*' in allow_new_weights matches no tensor that the files lack"):
        ds_trainer.from_pretrained(
            directory, "AutoModelForSequenceClassification", allow_new_weights=["clasifier.*", "bert.pooler.*"]
        )


def test_a_new_head_can_be_allowed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from transformers import AutoModelForMaskedLM

    directory = saved("bert", tmp_path)
    kind, allowed = "AutoModelForSequenceClassification", ["bert.pooler.*", "classifier.*"]

    def weights(seed: int, patterns: Any = tuple(allowed)) -> dict[str, torch.Tensor]:
        return loaded(ds_trainer.from_pretrained(directory, kind, allow_new_weights=patterns, seed=seed))

    first, repeated, other = weights(1), weights(1, True), weights(2)
    base = AutoModelForMaskedLM.from_pretrained(directory).state_dict()
    assert all(torch.equal(first[name], base[name]) for name in first if name in base)
    assert all(torch.equal(first[name], repeated[name]) for name in first)
    head = first["classifier.weight"]
    assert not torch.equal(head, other["classifier.weight"]) and 0.005 < float(head.std()) < 0.05
    assert not first["classifier.bias"].any()
    assert any("Newly initialized" in r.message and "classifier.weight" in r.message for r in caplog.records)


def test_unexpected_names_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = saved("bert", tmp_path)
    ds_trainer.from_pretrained(directory, "AutoModelForSequenceClassification", allow_new_weights=True)
    assert any("does not have, ignored" in r.message and "cls.predictions" in r.message for r in caplog.records)


def test_weights_of_other_shapes_are_rejected(tmp_path: Path) -> None:
    directory = saved("bert classifier", tmp_path)
    with pytest.raises(ConfigError, match=r"classifier.weight.*\[3, 16\].*\[5, 16\].*allow_new_weights=\[\"classifier"):
        ds_trainer.from_pretrained(directory, num_labels=5)
    model = ds_trainer.from_pretrained(directory, num_labels=5, allow_new_weights=["classifier.*"])
    assert loaded(model)["classifier.weight"].shape == (5, 16)


def test_a_renamed_key_is_reported_with_the_nearest_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    directory = saved("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.0.mlp.upp_proj.weight"] = weights.pop("model.layers.0.mlp.up_proj.weight")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    nearest = r"mlp.up_proj.weight \(nearest in the file: model.layers.0.mlp.upp_proj.weight\)"
    with pytest.raises(ConfigError, match=nearest):
        ds_trainer.from_pretrained(directory)
    mapped = ds_trainer.from_pretrained(directory, key_mapping={"upp_proj": "up_proj"})
    assert torch.equal(
        loaded(mapped)["model.layers.0.mlp.up_proj.weight"], weights["model.layers.0.mlp.upp_proj.weight"]
    )


# -- refusals ----------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown class": ({"auto_class": "AutoModelForCausalLMM"}, "Did you mean 'AutoModelForCausalLM'"),
    "a class for other models": ({"auto_class": "AutoModelForObjectDetection"}, "no AutoModelForObjectDetection for"),
    "a model class of another type": ({"auto_class": "BertForMaskedLM"}, "is for bert models, but this model has type"),
    "what is no class": ({"auto_class": nn.Linear}, "auto_class=Linear is not a model class of transformers"),
    "an unknown field": ({"num_hiden_layers": 3}, "num_hiden_layers=3 is neither.*Did you mean 'num_hidden_layers'"),
    "an argument mistyped": (
        {"auto_clas": "AutoModel"},
        "auto_clas='AutoModel' is neither a field.*Did you mean 'auto_class'",
    ),
    "no expression": ({"key_mapping": {"(a": "b"}}, r"'\(a' in key_mapping is not a valid regular expression"),
    "a type that is none": ({"dtype": "bfloat"}, "dtype='bfloat' is not a torch dtype"),
    "a type of integers": ({"dtype": torch.int8}, "cannot be trained. Use bfloat16"),
    "a device map": ({"device_map": "auto"}, "device_map='auto' is not supported.*zero_stage=3"),
    "a folder that is not there": ({"subfolder": "gone"}, "has no subfolder 'gone'"),
    "peft_config of another kind": ({"peft_config": {"r": 4}}, "peft_config is a dict. Pass a PEFT configuration"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_keywords_are_rejected(name: str, llama: str) -> None:
    keywords, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        ds_trainer.from_pretrained(llama, **keywords)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved("llama", tmp_path_factory.mktemp("llama"))


def test_a_checkpoint_with_another_quantization_is_rejected(tmp_path: Path) -> None:
    directory = saved("llama", tmp_path)
    config = tmp_path / "config.json"
    block = '{"quantization_config": {"quant_method": "gptq", "bits": 4},'
    config.write_text(config.read_text().replace("{", block, 1))
    with pytest.raises(ConfigError, match=r"quantized by gptq.*Pass the unquantized model"):
        ds_trainer.from_pretrained(directory)


def test_directories_without_a_model_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a directory .working directory"):
        ds_trainer.from_pretrained(str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"there is no config.json in"):
        ds_trainer.from_pretrained(tmp_path)
    model: Any = tiny_llama()
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"has no weights: found none of model.safetensors"):
        ds_trainer.from_pretrained(tmp_path)
    saved("llama", tmp_path)
    with pytest.raises(ConfigError, match=r"is a file. Pass the directory"):
        ds_trainer.from_pretrained(tmp_path / "model.safetensors")
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"LlamaForCausalLM"', '"LamaModel"'))
    with pytest.raises(ConfigError, match=r"has no LamaModel .architectures"):
        ds_trainer.from_pretrained(tmp_path)
    config.write_text(config.read_text().replace('"LamaModel"', ""))
    with pytest.raises(ConfigError, match=r"its configuration names no class"):
        ds_trainer.from_pretrained(tmp_path)
    assert attached_weight_source(ds_trainer.from_pretrained(tmp_path, "AutoModelForCausalLM")) is not None
    config.write_text("{")
    with pytest.raises(ConfigError, match=r"its config.json cannot be loaded"):
        ds_trainer.from_pretrained(tmp_path)


def test_the_given_configuration_is_not_modified(llama: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(llama)
    before = config.to_dict()
    model = ds_trainer.from_pretrained(llama, config=config, dtype=torch.bfloat16, num_hidden_layers=1, use_cache=False)
    assert config.to_dict() == before and model.config is not config
    assert (model.config.num_hidden_layers, model.config.use_cache, model.dtype) == (1, False, torch.bfloat16)
