"""Export of a checkpoint on disk: bit for bit the weights of the model, whatever layout wrote it."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.checkpoint.export.checkpoint_export import export_checkpoint
from ds_trainer.utils.errors import ConfigError
from tests.support.models import PlainLanguageModel, RaggedTokens, tiny_llama
from tests.support.pool import pool
from tests.support.runs import whole_weights

SHARD = 8_000  # bytes: several files for a model of some 20,000 parameters
TP = {"tensor_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {"zero_stage": 0}),
    "zero 0": (2, {"zero_stage": 0}),
    "zero 1": (2, {"zero_stage": 1}),
    "zero 2": (2, {"zero_stage": 2}),
    "zero 3": (2, {"zero_stage": 3}),
    "tp 2": (2, {"zero_stage": 0, **TP}),
    "tp 2, zero 3": (2, {"zero_stage": 3, **TP}),
    "tp 2 x dp 2, zero 1": (4, {"zero_stage": 1, **TP}),
    "tp 2 x dp 2, zero 3": (4, {"zero_stage": 3, **TP}),
    "sp 2, zero 3": (2, {"zero_stage": 3, "sequence_parallel_size": 2}),
    "bf16, zero 0": (2, {"zero_stage": 0, "bf16": True}),
    "bf16, zero 1": (2, {"zero_stage": 1, "bf16": True}),
    "bf16, zero 3": (2, {"zero_stage": 3, "bf16": True}),
    "bf16, tp 2, zero 2": (2, {"zero_stage": 2, "bf16": True, **TP}),
}


def buffered(seed: int = 0) -> nn.Module:
    """No model of transformers, with a buffer that is a part of it."""
    model = PlainLanguageModel(seed)
    model.register_buffer("kept", torch.arange(3.0))
    return model


def trainer_of(make_model: Any, output_dir: str, **arguments: Any) -> Trainer:
    values: dict[str, Any] = dict(
        max_steps=2,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=1,  # the first step changes nothing
        save_strategy="steps",
        save_steps=1,
        disable_tqdm=True,
        use_cpu=True,
        max_shard_size=f"{SHARD}B",
    )
    args = TrainingArguments(output_dir, **{**values, **arguments})
    return Trainer(make_model(), args, train_dataset=RaggedTokens(32))


def saved_both_ways(make_model: Any, output_dir: str, **arguments: Any) -> dict[str, torch.Tensor]:
    """A checkpoint, a live ``save_model`` of the same step, and the weights that the ranks hold."""
    trainer = trainer_of(make_model, output_dir, **arguments)
    trainer.train()
    trainer.save_model(f"{output_dir}/live")
    weights = whole_weights(trainer)
    trainer.engine.close()
    return weights


def files_of(directory: Path) -> dict[str, bytes]:
    paths = [path for path in directory.rglob("*") if path.is_file()]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


@pytest.mark.cases(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_export_is_the_live_save_and_the_single_process_save(layout: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    world, changes = LAYOUTS[layout]
    make_model = partial(tiny_llama, tied="tp" in layout)
    weights = pool(world).run(partial(saved_both_ways, make_model, str(tmp_path / "trained"), **changes))[0]
    checkpoint, live = tmp_path / "trained" / "checkpoint-2", tmp_path / "trained" / "live"
    exported = export_checkpoint(checkpoint, tmp_path / "out", SHARD)
    assert files_of(exported.directory) == files_of(live)
    assert len(exported.files) > 5
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    found = dict(loaded.named_parameters())
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name].float(), weights[name]) for name in weights)
    assert not any(torch.equal(found[name].float(), p) for name, p in make_model().named_parameters())  # it was trained

    # After a step that changes nothing, every layout exports what one process has.
    export_checkpoint(tmp_path / "trained" / "checkpoint-1", tmp_path / "same", SHARD)
    truth = make_model().to(torch.bfloat16 if "bf16" in layout else torch.float32)
    truth.save_pretrained(tmp_path / "wanted")  # type: ignore[operator]
    wanted = load_file(tmp_path / "wanted" / "model.safetensors")
    same: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "same").glob("*.safetensors"):
        same.update(load_file(path))
    assert same.keys() == wanted.keys()
    assert all(same[name].dtype == t.dtype and torch.equal(same[name], t) for name, t in wanted.items())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ZeRO-3 run in bf16 on two ranks, with ``checkpoint-2`` and ``live`` in it."""
    path = tmp_path_factory.mktemp("run")
    pool(2).run(partial(saved_both_ways, tiny_llama, str(path), zero_stage=3, bf16=True))
    return path


def test_another_type(run: Path, tmp_path: Path) -> None:
    """The masters are rounded once: float32 holds more than the bf16 weights, and rounds to them."""
    from transformers import AutoModelForCausalLM

    export_checkpoint(run / "checkpoint-2", tmp_path / "out", 10**9, dtype=torch.float32)
    masters = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    live: dict[str, torch.Tensor] = {}
    for path in (run / "live").glob("*.safetensors"):
        live.update(load_file(path))
    assert all(torch.equal(tensor.bfloat16(), live[name]) for name, tensor in masters.items())
    assert any(not torch.equal(tensor, live[name].float()) for name, tensor in masters.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.float32


def copied(run: Path, tmp_path: Path) -> Path:
    shutil.copytree(run / "checkpoint-2", tmp_path / "checkpoint-2")
    return tmp_path / "checkpoint-2"


def test_a_missing_rank_file_is_detected(run: Path, tmp_path: Path) -> None:
    checkpoint = copied(run, tmp_path)
    (checkpoint / "rank_00001.safetensors").unlink()
    with pytest.raises(ConfigError) as caught:
        export_checkpoint(checkpoint, tmp_path / "out", SHARD)
    assert any(re.match(r"lm_head.weight: .* contains \d+ of \d+ elements", text) for text in caught.value.problems)
    assert not list(tmp_path.glob("*out*"))


def test_a_truncated_file_is_detected(run: Path, tmp_path: Path) -> None:
    checkpoint = copied(run, tmp_path)
    path = checkpoint / "rank_00001.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ConfigError, match="is truncated or damaged"):
        export_checkpoint(checkpoint, tmp_path / "out", SHARD)


def test_a_changed_model_config_is_detected(run: Path, tmp_path: Path) -> None:
    checkpoint = copied(run, tmp_path)
    path = checkpoint / "config.json"
    path.write_text(path.read_text().replace('"intermediate_size": 48', '"intermediate_size": 64'))
    with pytest.raises(ConfigError, match=r"mlp.up_proj.weight has shape \[48, 32\] in .*, but \[64, 32\]"):
        export_checkpoint(checkpoint, tmp_path / "out", SHARD)
    assert not list(tmp_path.glob("*out*"))  # the partial directory is gone too


def test_impossible_exports_are_rejected(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not empty"):
        export_checkpoint(run / "checkpoint-2", run, SHARD)
    with pytest.raises(ConfigError, match="has no adapters"):
        export_checkpoint(run / "checkpoint-2", tmp_path / "out", SHARD, merge_lora=True)
    with pytest.raises(ConfigError, match="does not describe its model"):
        export_checkpoint(tmp_path, tmp_path / "out", SHARD)
    with pytest.raises(ConfigError, match="nothing to export"):
        export_checkpoint(run / "live", tmp_path / "out", SHARD)


def test_any_module_with_a_buffer_is_exported(tmp_path: Path) -> None:
    pool(2).run(partial(saved_both_ways, buffered, str(tmp_path), zero_stage=3, max_shard_size="1GB"))
    export_checkpoint(tmp_path / "checkpoint-2", tmp_path / "out", 10**9)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "live")
    model = buffered(seed=9)
    model.get_buffer("kept").zero_()
    model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    assert model.get_buffer("kept").tolist() == [0.0, 1.0, 2.0]


def with_tokenizer(output_dir: str) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    trainer = trainer_of(tiny_llama, output_dir, zero_stage=2)
    vocabulary = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, eos_token="b", pad_token="a")
    tokenizer.chat_template = {"default": "{{ messages }}", "other": "x"}  # the second goes into a folder of its own
    trainer.processing_class = tokenizer
    trainer.train()
    trainer.save_model(f"{output_dir}/live")
    trainer.engine.close()


def test_the_tokenizer_is_exported(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    pool(2).run(with_tokenizer, str(tmp_path))
    export_checkpoint(tmp_path / "checkpoint-2", tmp_path / "out", SHARD)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "live")
    assert any("/" in name for name in files_of(tmp_path / "out"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.convert_tokens_to_ids(["b", "a"]) == [1, 0] and tokenizer.eos_token == "b"
    assert tokenizer.chat_template == {"default": "{{ messages }}", "other": "x"}


def schedule_free(output_dir: str) -> None:
    trainer = trainer_of(tiny_llama, output_dir, optim="schedule_free_adamw")
    trainer.train()
    trainer.engine.close()


def test_training_only_weights_are_rejected(tmp_path: Path) -> None:
    pytest.importorskip("schedulefree")
    pool(1).run(schedule_free, str(tmp_path))
    with pytest.raises(ConfigError, match="schedule-free"):
        export_checkpoint(tmp_path / "checkpoint-2", tmp_path / "out", SHARD)
