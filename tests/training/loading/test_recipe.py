"""The recipe that fine-tunes a model by its path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ds_trainer
from ds_trainer import ConfigError
from ds_trainer.recipes.jobs import job_of
from ds_trainer.recipes.language_model import language_model_config, tokenizer_of
from ds_trainer.recipes.recipe import load_recipe
from ds_trainer.recipes.tokenizers import ByteTokenizer
from tests.recipes.test_tokenizers import word_tokenizer
from tests.support.hub_server import HubServer, Repository, pointed_at
from tests.support.models import tiny_llama
from tests.support.pool import pool

RECIPE = Path(ds_trainer.__file__).parents[1] / "ds_configs" / "recipes" / "finetune_adapters.yaml"

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def finetune(argv: list[str]) -> dict[str, Any]:
    return job_of(load_recipe(RECIPE, argv)).run()


def argv_for(base: object, text: Path, out: Path, **more: object) -> list[str]:
    given = {
        **{"model.path": base, "data.train": text, "data.held_out_every": "null"},
        **{"data.file_pattern": "null", "arguments.output_dir": out, "arguments.max_steps": 2},
        **{"arguments.use_cpu": "true", "arguments.self_test": "never"},
        **{name.replace("__", "."): value for name, value in more.items()},
    }
    return [argument for name, value in given.items() for argument in (f"--{name}", str(value))]


def test_a_recipe_trains_adapters_on_a_model_path(tmp_path: Path) -> None:
    model: Any = tiny_llama(vocab_size=257, max_position_embeddings=128)
    model.save_pretrained(tmp_path / "base")
    ByteTokenizer().save_pretrained(tmp_path / "base")
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    argv = argv_for(tmp_path / "base", tmp_path / "text.txt", tmp_path / "out")
    results = pool(1).run(finetune, argv)[0]
    assert results["steps"] == 2 and results["train_metrics"]["load_bytes_read"] > 0
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "out" / ByteTokenizer.FILE_NAME).is_file()
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a Hugging Face tokenizer and a chat template."""
    from transformers import AutoTokenizer

    directory = tmp_path_factory.mktemp("base")
    model: Any = tiny_llama(max_position_embeddings=128)
    model.save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(word_tokenizer(directory))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


@pytest.mark.cases(1)
@pytest.mark.parametrize("adapters", [True, False])
def test_the_tokenizer_of_the_model_is_in_every_checkpoint(adapters: bool, base: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "text.txt").write_text("hello world " * 500)
    more = {"arguments__save_strategy": "steps", **({} if adapters else {"model__peft": "null"})}
    argv = argv_for(
        base, tmp_path / "text.txt", tmp_path / "out", arguments__save_steps=1, data__sequence_length=16, **more
    )
    assert pool(1).run(finetune, argv)[0]["steps"] == 2
    for name in ("", "checkpoint-1", "checkpoint-2"):
        saved = AutoTokenizer.from_pretrained(tmp_path / "out" / name)
        assert saved.chat_template == TEMPLATE and saved("hello world")["input_ids"] == [1, 2]


def test_a_model_and_its_tokenizer_by_hub_name(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    recipe = load_recipe(RECIPE, argv_for("me/base", tmp_path / "text.txt", tmp_path / "out"))
    with pytest.raises(ConfigError, match=r"model.path: 'me/base' is not a directory.*hf download me/base"):
        tokenizer_of(recipe)  # the tests run offline
    with HubServer() as hub, pointed_at(hub.url):
        repository = hub.repositories["me/base"] = Repository(private=False)
        repository.branches["main"].update({path.name: path.read_bytes() for path in base.iterdir()})
        tokenizer = tokenizer_of(recipe)
        assert tokenizer.vocab_size == 4 and language_model_config(recipe, tokenizer).vocab_size == 61
        assert not any("safetensors" in request for request in hub.requests)  # weights come when they are wanted
        named = load_recipe(RECIPE, argv_for(base, tmp_path, tmp_path, data__tokenizer="me/base"))
        assert tokenizer_of(named).vocab_size == 4
        assert tokenizer_of(load_recipe(RECIPE, argv_for(base, tmp_path, tmp_path))).vocab_size == 4


def test_a_new_architecture_reads_bytes() -> None:
    assert isinstance(tokenizer_of(load_recipe(RECIPE.parent / "quickstart.yaml", [])), ByteTokenizer)
