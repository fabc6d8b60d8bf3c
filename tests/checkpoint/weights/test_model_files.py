"""A checkpoint is a model: ``from_pretrained`` reads what the ranks hold, bit for bit, whatever layout wrote it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.checkpoint.export.checkpoint_export import export_checkpoint
from ds_trainer.checkpoint.export.inspection import checkpoint_problems
from ds_trainer.checkpoint.protocol.manifest import Manifest
from ds_trainer.checkpoint.shards.shard_file import ShardFile
from ds_trainer.checkpoint.weights.model_description import ModelDescription, description_files
from ds_trainer.engine.weights import gathered, saved_tensors
from ds_trainer.recipes.tokenizers import load_tokenizer
from tests.support.experts import mixtral, qwen3_moe
from tests.support.file_access import opened
from tests.support.layouts import PlainAttention
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import pool
from tests.support.runs import compatibility_of
from tests.support.scalar_models import clip, collate_pairs, pairs
from tests.support.tensor_models import of_family

SHARD = 8_000  # bytes: several files for a model of some 20,000 parameters
TP, SP, CP = {"tensor_parallel_size": 2}, {"sequence_parallel_size": 2}, {"context_parallel_size": 2}
BF16 = {"bf16": True}

_T5: dict[str, Any] = dict(d_model=32, d_ff=48, d_kv=8, num_heads=4, num_layers=2, decoder_start_token_id=0)
_BERT: dict[str, Any] = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)


class Buffered(PlainAttention):
    """No model of transformers, with a buffer and a frozen weight that are parts of it."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.register_buffer("kept", torch.arange(3.0))
        self.positions.weight.requires_grad_(False)


def frozen_llama() -> nn.Module:
    """Of one layer every second parameter is trained."""
    model = tiny_llama()
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 2 == 0)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": tiny_llama,
    "tied": partial(tiny_llama, tied=True),
    "frozen": frozen_llama,
    "moe": qwen3_moe,
    "mixtral": mixtral,
    "t5": partial(of_family, "T5", "T5ForConditionalGeneration", **_T5),
    "bert": partial(of_family, "Bert", "BertForMaskedLM", **_BERT),
    "clip": clip,
    "buffered": Buffered,
}

Case = tuple[str, dict[str, Any]]
CASES: dict[int, dict[str, Case]] = {
    1: {
        "one process": ("llama", {"zero_stage": 0}),
        "bf16, zero 0": ("tied", {"zero_stage": 0, **BF16}),
        "autocast": ("llama", {"zero_stage": 0, "torch_autocast": "bf16"}),
        "t5": ("t5", {"zero_stage": 1, **BF16}),
        "moe": ("moe", {"zero_stage": 0}),
        "mixtral, zero 3": ("mixtral", {"zero_stage": 3, **BF16}),
    },
    2: {
        "zero 0": ("tied", {"zero_stage": 0}),
        "zero 1": ("llama", {"zero_stage": 1}),
        "zero 2": ("frozen", {"zero_stage": 2}),
        "zero 3": ("llama", {"zero_stage": 3}),
        "zero 3, tied": ("tied", {"zero_stage": 3}),
        "bf16, zero 0": ("tied", {"zero_stage": 0, **BF16}),
        "bf16, zero 1": ("llama", {"zero_stage": 1, **BF16}),
        "bf16, zero 1, sums in float32": ("llama", {"zero_stage": 1, "grad_accum_dtype": "fp32", **BF16}),
        "bf16, zero 2": ("frozen", {"zero_stage": 2, **BF16}),
        "bf16, zero 3": ("tied", {"zero_stage": 3, **BF16}),
        "bf16, zero 3, frozen": ("frozen", {"zero_stage": 3, **BF16}),
        "autocast, zero 2": ("llama", {"zero_stage": 2, "torch_autocast": "bf16"}),
        "offload": ("llama", {"zero_stage": 2, "offload_optimizer": "cpu", **BF16}),
        "offload of both": ("llama", {"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu", **BF16}),
        "while training waits": ("frozen", {"zero_stage": 3, "save_async": False, **BF16}),
        "tp 2": ("tied", {"zero_stage": 0, **TP}),
        "tp 2, zero 3": ("llama", {"zero_stage": 3, **TP}),
        "bf16, tp 2, zero 1": ("llama", {"zero_stage": 1, **TP, **BF16}),
        "sp 2, zero 3": ("llama", {"zero_stage": 3, **SP}),
        "cp 2, zero 2": ("llama", {"zero_stage": 2, **CP, **BF16}),
        "moe": ("moe", {"zero_stage": 2, **BF16}),
        "moe, zero 3": ("moe", {"zero_stage": 3}),
        "mixtral": ("mixtral", {"zero_stage": 0}),
        "mixtral, zero 3": ("mixtral", {"zero_stage": 3, **BF16}),
        "t5, zero 3": ("t5", {"zero_stage": 3}),
        "bert": ("bert", {"zero_stage": 1, **BF16}),
        "bert, zero 3": ("bert", {"zero_stage": 3, **BF16}),
        "clip, zero 2": ("clip", {"zero_stage": 2, **BF16}),
        "clip, zero 3": ("clip", {"zero_stage": 3}),
        "no transformers": ("buffered", {"zero_stage": 2, **BF16}),
        "no transformers, zero 3": ("buffered", {"zero_stage": 3}),
    },
    4: {
        "tp 2 x dp 2, zero 1": ("llama", {"zero_stage": 1, **TP}),
        "tp 2 x dp 2, zero 3": ("tied", {"zero_stage": 3, **TP, **BF16}),
        "tp 2 x sp 2": ("llama", {"zero_stage": 1, **TP, **SP, **BF16}),
        "zero 3": ("llama", {"zero_stage": 3}),
    },
}


def trainer_of(model: str, output_dir: str, **arguments: Any) -> Trainer:
    values: dict[str, Any] = dict(
        max_steps=2,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        save_strategy="steps",
        save_steps=1,
        disable_tqdm=True,
        use_cpu=True,
        max_shard_size=f"{SHARD}B",
    )
    args = TrainingArguments(output_dir, **{**values, **arguments})
    if model == "clip":
        return Trainer(MODELS[model](), args, data_collator=collate_pairs, train_dataset=pairs(32))
    return Trainer(MODELS[model](), args, train_dataset=RaggedTokens(32))


def live(trainer: Trainer) -> dict[str, torch.Tensor]:
    """What the ranks hold, as they compute with it: whole, by the names of a weight file."""
    tensors = saved_tensors(trainer.model)
    with gathered([tensor for tensor in tensors.values() if isinstance(tensor, nn.Parameter)]):
        return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def trained(cases: dict[str, Case], output_dir: str) -> dict[str, dict[str, torch.Tensor]]:
    """The weights of each case after two steps; checkpoints of both are in directories of their names."""
    found = {}
    for name, (model, arguments) in cases.items():
        trainer = trainer_of(model, f"{output_dir}/{name}", **arguments)
        trainer.train()
        found[name] = live(trainer)
        trainer.engine.close()
    return found


def in_files(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of all weight files."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("model*.safetensors")):
        found.update(load_file(path))
    return found


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether both have the same names, types, shapes and bits."""
    return one.keys() == other.keys() and all(
        one[name].dtype == t.dtype and one[name].shape == t.shape and torch.equal(one[name], t)
        for name, t in other.items()
    )


def as_saved(model: str, weights: dict[str, torch.Tensor], to: Path) -> dict[str, torch.Tensor]:
    """What ``save_pretrained`` of a model with these weights writes."""
    made = MODELS[model]()
    if model == "buffered":
        return weights
    made.load_state_dict(weights, strict=False, assign=True)
    made.tie_weights()  # type: ignore[operator]
    made.save_pretrained(to)  # type: ignore[operator]
    return in_files(to)


def written_twice(checkpoint: Path) -> list[str]:
    """Weights whose elements are both in a shard file and in the model files."""
    model: dict[str, str] = {}
    for tensor in ModelDescription.read(checkpoint).tensors:
        model[str(tensor.kept_as)] = tensor.dtype
    found = []
    for path in sorted(checkpoint.glob("rank_*.safetensors")):
        shard_file = ShardFile(path)
        for key, shard_slice in shard_file.slices.items():
            name, _, kind = key.rpartition("/")
            duplicated = kind in ("master", "weight") and len(shard_slice) > 0 and key not in shard_file.in_model
            if duplicated and {"BF16": torch.bfloat16, "F32": torch.float32}.get(
                model.get(name, "")
            ) == shard_file.dtype(key):
                found.append(f"{path.name}: {key}")
    return found


@pytest.mark.extended
@pytest.mark.cases(1)
@pytest.mark.parametrize("world", CASES)
def test_from_pretrained_gives_the_live_weights(world: int, tmp_path: Path) -> None:
    import transformers

    cases = CASES[world]
    weights = pool(world).run(partial(trained, cases, str(tmp_path)))
    for name, (model, arguments) in cases.items():
        checkpoint, wanted = tmp_path / name / "checkpoint-2", weights[0][name]
        written = as_saved(model, wanted, tmp_path / name / "saved")
        assert equal(in_files(checkpoint), written), name
        assert not equal(in_files(tmp_path / name / "checkpoint-1"), written), name  # control: another step's differ
        assert any(".experts.3." in key for key in written) == (model in ("moe", "mixtral")), name
        assert written_twice(checkpoint) == [], name
        listed = Manifest.read(checkpoint).files
        assert all(path.name in listed for path in checkpoint.glob("model*")), name
        if model == "buffered":
            continue
        made = MODELS[model]()
        loaded, report = getattr(transformers, type(made).__name__).from_pretrained(
            checkpoint, output_loading_info=True, dtype="auto"
        )
        assert not any(report.values()), (name, report)
        dtype = torch.bfloat16 if "bf16" in arguments else torch.float32
        assert loaded.dtype == dtype, name
        assert equal({key: tensor.detach() for key, tensor in saved_tensors(loaded).items()}, wanted), name
        assert json.loads((checkpoint / "config.json").read_text())["architectures"] == [type(made).__name__]


def kept(output_dir: str, checkpoint: str | None, files: str, **arguments: Any) -> tuple[list[str], list[str], Any]:
    """The files of a checkpoint, the shard and model files that this rank opened to resume, and the final weights."""
    trainer = trainer_of("llama", output_dir, **{"max_steps": 3, "logging_steps": 1, **arguments})
    with opened(Path(checkpoint or output_dir).resolve()) as names:
        trainer.train(resume_from_checkpoint=checkpoint)
    found = compatibility_of(trainer)
    trainer.engine.close()
    read = sorted({name for name in names if name.startswith(("rank_", "model-"))})
    return sorted(path.name for path in Path(files).iterdir()), read, found


def test_checkpoints_without_a_model_resume(tmp_path: Path) -> None:
    """The argument leaves the model out; both kinds of checkpoints resume, in another layout too."""
    results = []
    for name, model in (("with", True), ("without", False)):
        first = tmp_path / name / "checkpoint-2"
        arguments: dict[str, Any] = {"zero_stage": 2, "save_model_in_checkpoints": model}
        names, _, uninterrupted = pool(2).run(partial(kept, str(tmp_path / name), None, str(first), **arguments))[0]
        weights = [file for file in names if file.startswith("model") and file != "model.json"]
        assert (len(weights) > 3) == model
        resumed = pool(2).run(partial(kept, str(tmp_path / f"{name} again"), str(first), str(first), **arguments))
        for rank, (_, read, end) in enumerate(resumed):
            assert [file for file in read if file.startswith("rank_")] == [f"rank_{rank:05d}.safetensors"]
            assert set(read) <= {f"rank_{rank:05d}.safetensors", *weights}
            assert any(file.startswith("model-") for file in read) == model
            assert end.losses == uninterrupted.losses
            assert all(torch.equal(end.weights[key], weight) for key, weight in uninterrupted.weights.items())
        arguments.update(zero_stage=3, per_device_train_batch_size=8)
        ((_, _, end),) = pool(1).run(
            partial(kept, str(tmp_path / f"{name} alone"), str(first), str(first), **arguments)
        )
        assert end.losses == pytest.approx(uninterrupted.losses, abs=1e-5)
        results.append(uninterrupted)
    assert results[0].losses == results[1].losses


def test_a_model_in_the_checkpoint_adds_only_the_weights(tmp_path: Path) -> None:
    """Nothing more in float32, the weights in bf16; headers aside."""
    sizes: dict[str, int] = {}
    numel = sum(p.numel() for p in tiny_llama().parameters())
    for name, dtype, model in [(f"{d}{m}", d, m) for d in ("fp32", "bf16") for m in (True, False)]:
        arguments: dict[str, Any] = {"save_model_in_checkpoints": model, "bf16": dtype == "bf16", "zero_stage": 1}
        pool(1).run(partial(trained, {name: ("llama", {**arguments, "max_shard_size": "1GB"})}, str(tmp_path)))
        files = Manifest.read(tmp_path / name / "checkpoint-2").files.values()
        tensors = [record for record in files if record.name.endswith(".safetensors")]
        headers = [
            8 + int.from_bytes((tmp_path / name / "checkpoint-2" / r.name).read_bytes()[:8], "little") for r in tensors
        ]
        sizes[name] = sum(record.size for record in tensors) - sum(headers)
    assert sizes["fp32True"] == sizes["fp32False"] == sizes["bf16False"] == 12 * numel
    assert sizes["bf16True"] == 14 * numel


def test_a_checkpoint_with_a_model_is_exported(tmp_path: Path) -> None:
    """In float32 the masters are in the model's files only."""
    pool(2).run(partial(trained, {"x": ("llama", {"zero_stage": 3})}, str(tmp_path)))
    checkpoint = tmp_path / "x" / "checkpoint-2"
    export_checkpoint(checkpoint, tmp_path / "out", 10**9)
    assert equal(in_files(tmp_path / "out"), in_files(checkpoint))
    assert checkpoint_problems(checkpoint) == []
    path = max(checkpoint.glob("model-*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert f"{path.name} is damaged" in checkpoint_problems(checkpoint)[0]


def test_tokenizer_files_are_copied_unchanged(tmp_path: Path) -> None:
    """The files that it has itself, under their own names."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    vocabulary = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, eos_token="b", pad_token="a")
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= names
    found = description_files(tiny_llama(), load_tokenizer(str(tmp_path)))
    contents = {content.name: content.data for content in found}
    assert names | {"model.json", "config.json", "generation_config.json"} == contents.keys()
    assert contents["chat_template.jinja"] == b"{{ messages }}"
    of_bytes = {content.name for content in description_files(tiny_llama(), load_tokenizer("bytes"))}
    assert of_bytes - contents.keys() == {"byte_tokenizer.json"}
