"""Recipes with sentence-transformers: each format and loss, on one and two ranks, to a model that loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds_trainer.cli.main import main
from ds_trainer.recipes.recipe import load_recipe
from ds_trainer.utils.errors import ConfigError
from tests.cli.test_init import PAIRS
from tests.recipes.test_tasks import check_resume, check_two_ranks, recipe, results_of, write_rows
from tests.support.chat_model import chat_tokenizer
from tests.support.pool import pool

ROWS: dict[str, list[dict[str, Any]]] = {
    "pairs": [{"query": f"say {pair}", "document": pair} for pair in PAIRS],
    "triplets": [{"anchor": f"say {pair}", "positive": pair, "negative": pair[::-1]} for pair in PAIRS],
    "scored": [{"sentence1": f"say {pair}", "sentence2": pair, "score": n % 5 / 4} for n, pair in enumerate(PAIRS)],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a BERT without a pooling layer, and data of every format."""
    import torch
    from transformers import BertConfig, BertModel

    path = tmp_path_factory.mktemp("embedding")
    tokenizer = chat_tokenizer()
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
    positions = dict(max_position_embeddings=128, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(tokenizer), initializer_range=0.3, **sizes, **positions)).save_pretrained(
        path / "base"
    )
    tokenizer.save_pretrained(path / "base")
    for name, rows in ROWS.items():
        write_rows(path / f"{name}.jsonl", rows)
    return path


def encoded(directory: Path) -> Any:
    """Vectors of some texts, from the saved model."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(directory), device="cpu", local_files_only=True).encode(["say red cat", "blue"])


@pytest.mark.parametrize(
    ("data", "options", "stages", "figure"),
    [
        ("pairs", {}, (0, 3), "eval_cosine_ndcg@10"),
        ("triplets", {"mini_batch_size": 2}, (0, 1, 2), "eval_cosine_ndcg@10"),
        ("scored", {}, (2, 3), "eval_spearman_cosine"),
        ("scored", {"loss": "AnglE"}, (2,), "eval_spearman_cosine"),
    ],
)
def test_two_ranks_have_the_numbers_of_one(
    data: str, options: dict[str, Any], stages: tuple[int, ...], figure: str, folder: Path
) -> None:
    more = [f"--task.options={json.dumps(options)}", "--arguments.gradient_accumulation_steps=2"]
    results = check_two_ranks(folder, "embedding", f"{data}.jsonl", *more, stages=stages)
    assert figure in results["evaluation"]
    vectors = encoded(folder / "runs" / "embedding")
    assert vectors.shape == (2, 32)
    assert np.abs(vectors[0] - vectors[1]).max() > 1e-3


def test_negatives_of_one_rank_are_another_loss(folder: Path) -> None:
    """The control of the comparison above."""
    options = json.dumps({"loss_options": {"gather_across_devices": False}})
    one = results_of(folder, "embedding", "pairs.jsonl", f"--task.options={options}")
    two = results_of(folder, "embedding", "pairs.jsonl", f"--task.options={options}", ranks=2)
    assert abs(one["train_loss"] - two["train_loss"]) > 0.1


def test_cached_gradients_are_those_of_the_loss(folder: Path) -> None:
    whole = results_of(folder, "embedding", "triplets.jsonl")
    cached = results_of(folder, "embedding", "triplets.jsonl", '--task.options={"mini_batch_size": 2}')
    assert cached["train_loss"] == pytest.approx(whole["train_loss"], rel=1e-5)
    triplet = results_of(folder, "embedding", "triplets.jsonl", '--task.options={"loss": "Triplet"}')
    assert abs(triplet["train_loss"] - whole["train_loss"]) > 0.1


def test_the_recipe_of_the_package_trains_in_small(folder: Path) -> None:
    changes = {
        "model.path": folder / "base",
        "data.train": folder / "triplets.jsonl",
        "data.max_length": 64,
        "data.held_out": 8,
        "data.prepared_dir": folder,
        "arguments.output_dir": folder / "small",
        "arguments.per_device_train_batch_size": 8,
        "arguments.max_steps": 2,
        "arguments.use_cpu": "true",
    }
    path = Path(__file__).parents[2] / "ds_configs" / "recipes" / "embedding.yaml"
    assert pool(1).run(main, ["train", str(path), *(f"--{key}={value}" for key, value in changes.items())]) == [0]
    assert encoded(folder / "small").shape == (2, 32)
    figures = json.loads((folder / "small" / "results.json").read_text())["evaluation"]
    assert 0 < figures["eval_cosine_ndcg@10"] <= 1


def test_it_goes_on_after_an_interruption(folder: Path) -> None:
    check_resume(folder, "embedding", "pairs.jsonl")


def test_adapters_on_a_decoder(folder: Path) -> None:
    from tests.support.chat_model import save_chat_model

    save_chat_model(folder / "decoder", head="CausalLM")
    adapters = json.dumps({"peft_type": "LORA", "r": 4, "target_modules": ["q_proj", "v_proj"]})
    more = [f"--model.peft={adapters}", f"--model.path={folder / 'decoder'}", '--task.options={"pooling": "lasttoken"}']
    results_of(folder, "embedding", "pairs.jsonl", *more)
    assert (folder / "runs" / "embedding" / "adapter_model.safetensors").is_file()
    assert encoded(folder / "runs" / "embedding").shape == (2, 32)


def refusal_of(path: Path, override: str) -> str:
    from ds_trainer.compatibility.replacement import replace_transformers

    replace_transformers()
    from ds_trainer.recipes.jobs import job_of

    try:
        job_of(load_recipe(path, [override])).run()
    except ConfigError as error:
        return str(error)
    return "it ran"


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ("pairs", {"loss": "CoSENT"}, "CoSENTLoss is not for pairs; those are for: MultipleNegativesRankingLoss"),
        ("scored", {"mini_batch_size": 2}, "CoSENTLoss has no argument 'mini_batch_size'"),
        ("pairs", {"mini_batch_size": 2, "zero_stage": 3}, "allows one for each micro-batch"),
        ("pairs", {"batch_samplr": "x"}, "'batch_samplr' is not a field of SentenceTransformerTrainingArguments"),
    ],
)
def test_what_cannot_work(data: str, options: dict[str, Any], message: str, folder: Path) -> None:
    path = recipe(folder, "embedding", f"{data}.jsonl")
    (found,) = pool(1).run(refusal_of, path, f"--task.options={json.dumps(options)}")
    assert message in found


def test_a_dry_run(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = recipe(folder, "embedding", "pairs.jsonl")
    assert main(["train", str(path), "--dry-run", "4", "--arguments.zero_stage=3"]) == 0
    assert "rank 0 of 4 ranks succeeded" in capfd.readouterr().out
