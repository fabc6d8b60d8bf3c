"""The recipe that fine-tunes a model by its path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ds_trainer
from ds_trainer.arguments.recipe import load_recipe
from ds_trainer.data.byte_tokenizer import ByteTokenizer
from ds_trainer.training.language_model_job import run
from tests.support.models import tiny_llama
from tests.support.pool import pool

RECIPE = Path(ds_trainer.__file__).parents[1] / "ds_configs" / "recipes" / "finetune_adapters.yaml"


def finetune(words: list[str]) -> dict[str, Any]:
    return run(load_recipe(RECIPE, words))


def test_adapters_are_trained_on_a_model_by_its_path(tmp_path: Path) -> None:
    model: Any = tiny_llama(vocab_size=257, max_position_embeddings=128)
    model.save_pretrained(tmp_path / "base")
    ByteTokenizer().save_pretrained(tmp_path / "base")
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    given = {
        **{"model.path": tmp_path / "base", "data.train": tmp_path / "text.txt", "data.held_out_every": "null"},
        **{"data.file_pattern": "null", "arguments.output_dir": tmp_path / "out", "arguments.max_steps": 2},
        **{"arguments.use_cpu": "true", "arguments.self_test": "never"},
    }
    results = pool(1).run(finetune, [word for name, value in given.items() for word in (f"--{name}", str(value))])[0]
    assert results["steps"] == 2 and results["train_metrics"]["load_bytes_read"] > 0
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    assert not (tmp_path / "out" / "model.safetensors").exists()
