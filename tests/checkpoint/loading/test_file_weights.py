"""Weights that are read in parts are, bit by bit, those that ``from_pretrained`` of transformers loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from ds_trainer.checkpoint.loading.file_weights import FileWeights, open_weights
from ds_trainer.parallel.shard_slices import ShardSlice
from ds_trainer.utils.errors import ConfigError
from tests.checkpoint.loading.tiny_models import KINDS, make, on_meta


def full_weight(weights: FileWeights, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    target = torch.full((shape.numel(),), 7, dtype=dtype)
    weights.fill(name, ShardSlice.whole(shape), target)
    return target.view(shape)


def check_equal(weights: FileWeights, wanted: nn.Module) -> int:
    """Every tensor of the state of ``wanted`` is what is read; how many there are."""
    state = wanted.state_dict()
    for name, tensor in state.items():
        assert weights.has(name), name
        assert torch.equal(full_weight(weights, name, tensor.shape, tensor.dtype), tensor), name
    return len(state)


def opened(directory: Path, kind: str, model_class: Any = None, **more: Any) -> tuple[FileWeights, Any]:
    """The weights for a model on meta, and the model that transformers loads."""
    own_class, config = KINDS[kind]()
    wanted = (model_class or own_class).from_pretrained(directory, **more)
    return open_weights(directory, on_meta(model_class or own_class, config), more.get("key_mapping")), wanted


@pytest.mark.cases(15, rest="extended")
@pytest.mark.parametrize("original", [True, False], ids=["as published", "as in memory"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_are_those_of_from_pretrained(kind: str, original: bool, tmp_path: Path) -> None:
    model = make(kind)
    model.save_pretrained(tmp_path, save_original_format=original)
    weights, wanted = opened(tmp_path, kind)
    assert (weights.missing, weights.unexpected, weights.mismatched) == ([], [], [])
    assert check_equal(weights, wanted) > 10
    assert check_equal(weights, model) > 10  # from_pretrained of this version is right, too


@pytest.mark.parametrize("kind", ["llama, tied", "qwen3_moe", "deepseek_v3", "gpt2"])
def test_sharded_files(kind: str, tmp_path: Path) -> None:
    model = make(kind)
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    weights, wanted = opened(tmp_path, kind)
    check_equal(weights, wanted)
    weights.close()
    check_equal(weights, wanted)  # opened again


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", ["llama, tied", "mixtral", "t5"])
def test_bin_files(kind: str, sharded: bool, tmp_path: Path) -> None:
    """``torch.save`` keeps tied tensors under all their names, and transposed ones as they are."""
    model = make(kind)
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    state: dict[str, Any] = dict(model.state_dict())
    name = next(name for name, tensor in state.items() if tensor.ndim == 2)
    state[name] = state[name].t().contiguous().t()
    if not sharded:
        torch.save(state, tmp_path / "pytorch_model.bin")
    else:
        names = list(state)
        files = {"a.bin": names[::2], "b.bin": names[1::2]}
        for file, keys in files.items():
            torch.save({key: state[key] for key in keys}, tmp_path / file)
        index = {"metadata": {}, "weight_map": {key: file for file, keys in files.items() for key in keys}}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    weights, wanted = opened(tmp_path, kind)
    assert (weights.missing, weights.unexpected, weights.mismatched) == ([], [], [])
    check_equal(weights, wanted)


def test_dtypes_are_converted(tmp_path: Path) -> None:
    make("qwen3_moe", torch.bfloat16).save_pretrained(tmp_path)
    weights, wanted = opened(tmp_path, "qwen3_moe", dtype=torch.float32)
    check_equal(weights, wanted)
    make("qwen3_moe").save_pretrained(tmp_path)
    weights, wanted = opened(tmp_path, "qwen3_moe", dtype=torch.bfloat16)
    check_equal(weights, wanted)


def test_base_model_and_head_model_load_from_each_other(tmp_path: Path) -> None:
    bert = make("bert")
    bert.bert.save_pretrained(tmp_path / "base")
    classifier = transformers.BertForSequenceClassification
    _, config = KINDS["bert"]()
    weights = open_weights(tmp_path / "base", on_meta(classifier, config))
    _, info = classifier.from_pretrained(tmp_path / "base", output_loading_info=True)
    assert sorted(weights.missing) == sorted(info["missing_keys"])
    assert {name for name in weights.missing if "classifier" in name} == {"classifier.weight", "classifier.bias"}
    query = "bert.encoder.layer.1.attention.self.query.weight"
    assert torch.equal(full_weight(weights, query, torch.Size((16, 16)), torch.float32), bert.state_dict()[query])

    bert.save_pretrained(tmp_path / "head")
    weights = open_weights(tmp_path / "head", on_meta(transformers.BertModel, config))
    base, info = transformers.BertModel.from_pretrained(tmp_path / "head", output_loading_info=True)
    assert sorted(weights.missing) == sorted(info["missing_keys"]) == ["pooler.dense.bias", "pooler.dense.weight"]
    assert sorted(weights.unexpected) == sorted(info["unexpected_keys"])
    query = query.removeprefix("bert.")
    assert torch.equal(full_weight(weights, query, torch.Size((16, 16)), torch.float32), base.state_dict()[query])


def test_names_in_old_files_are_converted(tmp_path: Path) -> None:
    """TensorFlow's gamma and beta, torch's old weight norm, a key mapping of the user."""
    for kind, renamed in (
        ("bert", {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}),
        (
            "wav2vec2",
            {"parametrizations.weight.original0": "weight_g", "parametrizations.weight.original1": "weight_v"},
        ),
    ):
        make(kind).save_pretrained(tmp_path)
        state = {}
        for key, tensor in make(kind).state_dict().items():
            for new, old in renamed.items():
                key = key.replace(new, old)
            state[key] = tensor.clone()
        assert any(old in key for old in renamed.values() for key in state)
        save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
        weights, wanted = opened(tmp_path, kind)
        assert weights.missing == weights.unexpected == []
        check_equal(weights, wanted)
    model = make("llama")
    model.save_pretrained(tmp_path)
    state = {"net." + key: tensor.clone() for key, tensor in model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    weights, wanted = opened(tmp_path, "llama", key_mapping={r"^net\.": ""})
    assert weights.missing == weights.unexpected == []
    check_equal(weights, model)
    check_equal(weights, wanted)


def test_save_pretrained_writes_the_published_format(tmp_path: Path) -> None:
    """A model whose weights were read in parts remembers the conversion, as one of from_pretrained does."""
    make("mixtral").save_pretrained(tmp_path / "a")
    weights, wanted = opened(tmp_path / "a", "mixtral")
    model_class, config = KINDS["mixtral"]()
    ours = on_meta(model_class, config)
    open_weights(tmp_path / "a", ours)
    ours.to_empty(device="cpu")
    for name, tensor in ours.state_dict().items():
        weights.fill(name, ShardSlice.whole(tensor.shape), tensor.view(-1))
    ours.save_pretrained(tmp_path / "b")
    wanted.save_pretrained(tmp_path / "c")
    b, c = load_file(tmp_path / "b/model.safetensors"), load_file(tmp_path / "c/model.safetensors")
    assert b.keys() == c.keys()
    assert any("experts.0" in key for key in b)
    assert all(torch.equal(b[key], c[key]) for key in b)


def test_weights_of_a_plain_module_are_read(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    weights = open_weights(tmp_path, nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)).to("meta"))
    assert weights.missing == weights.unexpected == []
    assert check_equal(weights, model) == 7  # with the buffers, one of which is a scalar of int64
    with pytest.raises(ConfigError, match="key_mapping requires a transformers model"):
        open_weights(tmp_path, model, {"a": "b"})


class TestTiedWeights:
    EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"

    def directory(self, path: Path, kind: str, keep: set[str], change: bool = False) -> Path:
        model = make(kind)
        model.save_pretrained(path)
        state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        if change:
            state[self.HEAD][3, 5] += 1
        dropped = {self.EMBED, self.HEAD} - keep
        state = {key: tensor for key, tensor in state.items() if key not in dropped}
        save_file(state, path / "model.safetensors", metadata={"format": "pt"})
        return path

    @pytest.mark.parametrize("keep", [("embed",), ("head",), ("embed", "head")])
    def test_a_tied_weight_is_found_under_either_name(self, keep: tuple[str, ...], tmp_path: Path) -> None:
        names = {self.EMBED if one == "embed" else self.HEAD for one in keep}
        weights, wanted = opened(self.directory(tmp_path, "llama, tied", names), "llama, tied")
        assert weights.missing == weights.unexpected == []
        check_equal(weights, wanted)

    def test_tied_weights_with_different_elements_are_rejected(self, tmp_path: Path) -> None:
        _, config = KINDS["llama, tied"]()
        directory = self.directory(tmp_path, "llama, tied", {self.EMBED, self.HEAD}, change=True)
        weights = open_weights(directory, on_meta(transformers.LlamaForCausalLM, config))
        shard_slice = ShardSlice.whole((40, 16))
        weights.fill(self.EMBED, shard_slice.run(0, 40), torch.empty(40))  # alike here
        with pytest.raises(ConfigError, match=r"ties model.embed_tokens.weight and lm_head.weight.*different"):
            weights.fill(self.EMBED, shard_slice, torch.empty(640))

    def test_an_untied_model_misses_the_weight_that_the_file_lacks(self, tmp_path: Path) -> None:
        _, config = KINDS["llama"]()
        directory = self.directory(tmp_path, "llama", {self.EMBED})
        weights = open_weights(directory, on_meta(transformers.LlamaForCausalLM, config))
        assert weights.missing == [self.HEAD]
        assert not weights.has(self.HEAD)

    def test_a_missing_tied_weight_is_reported_once(self, tmp_path: Path) -> None:
        _, config = KINDS["llama, tied"]()
        directory = self.directory(tmp_path, "llama, tied", set())
        weights = open_weights(directory, on_meta(transformers.LlamaForCausalLM, config))
        assert weights.missing == [self.EMBED]


class TestNegativeControls:
    def changed(self, path: Path, change: Any, kind: str = "llama") -> FileWeights:
        make(kind).save_pretrained(path)
        state = load_file(path / "model.safetensors")
        change(state)
        save_file(state, path / "model.safetensors", metadata={"format": "pt"})
        return open_weights(path, on_meta(*KINDS[kind]()))

    def test_a_renamed_key(self, tmp_path: Path) -> None:
        old, new = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.upp_proj.weight"
        weights = self.changed(tmp_path, lambda state: state.update({new: state.pop(old)}))
        assert (weights.missing, weights.unexpected) == ([old], [new])
        assert weights.nearest(old) == f" Did you mean '{new}'?"
        assert weights.nearest(new) == f" Did you mean '{old}'?"
        with pytest.raises(ConfigError, match=rf"has no {old}. Did you mean '{new}'\?"):
            weights.fill(old, ShardSlice.whole((24, 16)), torch.empty(24 * 16))

    def test_a_missing_expert(self, tmp_path: Path) -> None:
        key = "model.layers.1.mlp.experts.7.down_proj.weight"
        weights = self.changed(tmp_path, lambda state: state.pop(key), "qwen3_moe")
        name = "model.layers.1.mlp.experts.down_proj"
        assert [str(one) for one in weights.mismatched] == [
            f"{name} is [11, 16, 8] in the files and [12, 16, 8] in the model"
        ]

    def test_an_expert_of_another_shape_is_rejected(self, tmp_path: Path) -> None:
        key = "model.layers.1.mlp.experts.7.down_proj.weight"
        with pytest.raises(ConfigError, match=r"experts\.down_proj cannot be converted from model\.layers\.1"):
            self.changed(tmp_path, lambda state: state.update({key: torch.zeros(3, 3)}), "qwen3_moe")

    def test_a_weight_of_another_shape_is_a_mismatch(self, tmp_path: Path) -> None:
        weights = self.changed(tmp_path, lambda state: state.update({"lm_head.weight": torch.zeros(41, 16)}))
        assert weights.mismatched == [("lm_head.weight", (41, 16), (40, 16))]
        assert weights.missing == weights.unexpected == []
        with pytest.raises(ConfigError, match=r"shape \[40, 16\] in the model but \[41, 16\]"):
            weights.fill("lm_head.weight", ShardSlice.whole((40, 16)), torch.empty(640))

    def test_weights_that_cannot_be_converted_are_reported(self, tmp_path: Path) -> None:
        def change(state: dict[str, torch.Tensor]) -> None:
            state["lm_head.weight"] = state["lm_head.weight"].to(torch.float8_e4m3fn)
            state["model.norm.weight"] = torch.ones(16, dtype=torch.int8)

        weights = self.changed(tmp_path, change)
        for name, shape, kind in (("lm_head.weight", (40, 16), "F8_E4M3"), ("model.norm.weight", (16,), "I8")):
            shard_slice = ShardSlice.whole(shape)
            with pytest.raises(ConfigError, match=rf"type {kind}, which cannot be read as torch.bfloat16"):
                weights.fill(name, shard_slice, torch.empty(len(shard_slice), dtype=torch.bfloat16))
        weights.fill("model.norm.weight", ShardSlice.whole((16,)), torch.empty(16, dtype=torch.int8))  # as it is: yes


def test_a_directory_without_weights_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").touch()
    with pytest.raises(ConfigError, match=r"found none of model.safetensors.* It contains weights.safetensors"):
        open_weights(tmp_path, nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="The directory does not exist"):
        open_weights(tmp_path / "absent", nn.Linear(1, 1))


def test_opening_reads_headers_only(tmp_path: Path) -> None:
    """Opening takes no elements: a file of holes, far larger than the memory, opens at once."""
    make("llama").save_pretrained(tmp_path)
    weights, _ = opened(tmp_path, "llama")
    assert weights.bytes_read == 0
    shutil.rmtree(tmp_path)
    header = {"big": {"dtype": "BF16", "shape": [1 << 20, 1 << 20], "data_offsets": [0, 1 << 41]}}
    text = json.dumps(header).encode()
    tmp_path.mkdir()
    with (tmp_path / "model.safetensors").open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + (1 << 41))
    model = nn.Module()
    model.big = nn.Parameter(torch.empty(1 << 20, 1 << 20, device="meta"))
    weights = open_weights(tmp_path, model)
    target = torch.ones(16)
    weights.fill("big", ShardSlice.whole((1 << 20, 1 << 20)).run(1 << 39, (1 << 39) + 16), target)
    assert target.sum() == 0
    assert weights.bytes_read == 32
