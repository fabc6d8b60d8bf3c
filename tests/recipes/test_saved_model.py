"""What is in a directory: full weights, adapters, checkpoints; and how to make a model of what is not one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ds_trainer.recipes.adapter_merging import merge_adapters
from ds_trainer.recipes.next_steps import load_lines, next_steps
from ds_trainer.recipes.saved_model import find_saved_model, load_for_generation
from ds_trainer.utils.errors import ConfigError
from tests.support.chat_model import save_adapters, save_chat_model
from tests.support.checkpoints import save

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with ``base`` and with ``lora``, its adapters."""
    folder = tmp_path_factory.mktemp("models")
    save_adapters(folder / "lora", save_chat_model(folder / "base"))
    return folder


def logits(model: torch.nn.Module) -> torch.Tensor:
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        return model(input_ids=tokens).logits  # type: ignore[no-any-return]


def run_lines(directory: Path) -> torch.nn.Module:
    """The model that the printed lines load."""
    names: dict[str, object] = {}
    exec("\n".join(load_lines(directory, find_saved_model(str(directory)))), names)
    assert getattr(names["tokenizer"], "chat_template", None)
    return names["model"]  # type: ignore[return-value]


def test_merged_adapters_give_the_same_logits(models: Path, tmp_path: Path) -> None:
    adapted = logits(load_for_generation(find_saved_model(str(models / "lora")), CPU))
    base = logits(load_for_generation(find_saved_model(str(models / "base")), CPU))
    assert (adapted - base).abs().max() > 1e-2  # the adapters do something
    merge_adapters(find_saved_model(str(models / "lora")), tmp_path / "merged", 40_000)
    merged = find_saved_model(str(tmp_path / "merged"))
    assert merged.base is None
    assert len(list((tmp_path / "merged").glob("*.safetensors"))) > 1  # in files of the size that was asked for
    torch.testing.assert_close(logits(load_for_generation(merged, CPU)), adapted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits(run_lines(tmp_path / "merged")), adapted, rtol=1e-5, atol=1e-5)


def test_the_printed_lines_load_the_model_and_its_tokenizer(models: Path) -> None:
    for name in ("base", "lora"):
        expected = logits(load_for_generation(find_saved_model(str(models / name)), CPU))
        torch.testing.assert_close(logits(run_lines(models / name).eval()), expected, rtol=0, atol=0)


def test_what_is_printed(models: Path) -> None:
    full, adapters = next_steps(models / "base"), next_steps(models / "lora")
    for text, name in ((full, "base"), (adapters, "lora")):
        assert f"ds-trainer chat {models / name}\n" in text
        assert f"hf upload USER/{name} {models / name} . --exclude 'checkpoint-*/*'" in text
    assert f"vllm serve {models / 'base'}\n" in full
    assert "merge" not in full
    assert f"ds-trainer checkpoint merge {models / 'lora'} --to {models / 'lora-merged'}" in adapters
    assert f"vllm serve {models / 'base'} --enable-lora --lora-modules lora={models / 'lora'}" in adapters


def test_merging_needs_adapters_and_an_empty_directory(models: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="full weights"):
        merge_adapters(find_saved_model(str(models / "base")), tmp_path / "new", 10**9)
    with pytest.raises(ConfigError, match="not empty"):
        merge_adapters(find_saved_model(str(models / "lora")), models, 10**9)


def test_adapters_whose_base_has_moved(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "lora", tmp_path / "lora")
    config = tmp_path / "lora" / "adapter_config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps({**values, "base_model_name_or_path": "/gone/base"}))
    with pytest.raises(ConfigError, match=r"base model '/gone/base'.*--base DIR"):
        find_saved_model(str(tmp_path / "lora"))
    found = find_saved_model(str(tmp_path / "lora"), base=str(models / "base"))
    merge_adapters(found, tmp_path / "merged", 10**9)
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    with pytest.raises(ConfigError, match="not adapters"):
        find_saved_model(str(models / "base"), base="x")


def nothing(directory: Path) -> None:
    directory.mkdir()


def only_a_configuration(directory: Path) -> None:
    (save_chat_model(directory) / "model.safetensors").unlink()


def a_deepspeed_checkpoint(directory: Path) -> None:
    (directory / "global_step10").mkdir(parents=True)
    (directory / "latest").write_text("global_step10")


def only_training_state(directory: Path) -> None:
    (directory / "checkpoint-5").mkdir(parents=True)
    (directory / "checkpoint-5" / "manifest.json").write_text("{}")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (nothing, "There is no model in .* It contains nothing"),
        (only_a_configuration, "no weights"),
        (a_deepspeed_checkpoint, r"ds-trainer checkpoint convert .*\n.*ds-trainer checkpoint export .* --model DIR"),
        (only_training_state, "ds-trainer checkpoint export .*there --to there-model"),
    ],
)
def test_what_is_no_model_is_said_with_the_remedy(make: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    make(tmp_path / "there")
    with pytest.raises(ConfigError, match=message):
        find_saved_model(str(tmp_path / "there"))


def test_the_newest_checkpoint_of_a_run(tmp_path: Path) -> None:
    for step in (5, 10):
        save_chat_model(save(tmp_path, step), seed=step)
    found = find_saved_model(str(tmp_path))
    assert found.directory.name == "checkpoint-10"
    assert "checkpoint-10" in found.note


def test_a_model_that_gives_no_text_is_refused(tmp_path: Path) -> None:
    saved = find_saved_model(str(save_chat_model(tmp_path / "model", head="SequenceClassification")))
    with pytest.raises(ConfigError, match="classifies sequences; it does not generate text"):
        load_for_generation(saved, CPU)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors", b"abc", "model.safetensors is not a safetensors file, or is damaged"),
        ("model.safetensors", b"\xff" * 8 + b"{}", "model.safetensors is not a safetensors file, or is damaged"),
        ("generation_config.json", b"[1]", "cannot be loaded"),
        ("generation_config.json", b'{"max_new_tokens": "x", "top_p": -3}', "cannot be loaded"),
    ],
)
def test_damaged_files_are_one_error(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (save_chat_model(tmp_path / "model") / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_for_generation(find_saved_model(str(tmp_path / "model")), CPU)
