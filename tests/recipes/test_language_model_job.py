"""The built-in job end to end, as a shell runs it: real launchers, real data, real weights."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ds_trainer
from ds_trainer.monitor.metrics_file import read_records
from ds_trainer.recipes.language_model import load_language_model
from ds_trainer.recipes.language_model_job import LanguageModelJob, TokenBlocks
from ds_trainer.recipes.recipe import Recipe, load_recipe
from ds_trainer.utils.errors import ConfigError

RECIPE = """\
model:
  architecture:
    model_type: llama
    hidden_size: 32
    intermediate_size: 64
    num_hidden_layers: 1
    num_attention_heads: 2
    num_key_value_heads: 2
    initializer_range: 0.1
    max_position_embeddings: 32
data:
  train: corpus
  held_out_every: 3
  sequence_length: 32
arguments:
  output_dir: out
  per_device_train_batch_size: 8
  max_steps: 30
  learning_rate: 1e-2
  logging_steps: 10
  save_steps: 30
report:
  sample_prompt: "the "
  sample_tokens: 12
"""
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "then", "a", "dog", "sleeps"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a recipe and a small corpus."""
    path = tmp_path_factory.mktemp("job")
    (path / "corpus").mkdir()
    for number in range(7):
        words = [WORDS[(number * 7 + index * index) % len(WORDS)] for index in range(200)]
        (path / "corpus" / f"{number}.txt").write_text(" ".join(words) + "\n")
    (path / "r.yaml").write_text(RECIPE)
    return path


def start(folder: Path, launcher: list[str], *argv: str) -> subprocess.CompletedProcess[str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    return subprocess.run(
        [sys.executable, *launcher, "ds_trainer", "train", "r.yaml", "--arguments.use_cpu", "true", *argv],
        capture_output=True,
        text=True,
        cwd=folder,
        env=clean | {"PYTHONPATH": str(Path(ds_trainer.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
        check=False,
        timeout=400,
    )


def read_results(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "results.json").read_text())  # type: ignore[no-any-return]


def held_out_nats(model_directory: Path, blocks: TokenBlocks) -> float:
    """Summed loss over all targets of ``blocks``, one block at a time, by plain PyTorch: the oracle."""
    model = load_language_model(str(model_directory)).eval()
    total = 0.0
    with torch.no_grad():
        for index in range(len(blocks)):
            sample = blocks[index]
            real = int((sample["labels"] != -100).sum())
            ids = sample["input_ids"][:real]
            logits = model(input_ids=ids[None]).logits[0, :-1].double()
            total += float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))
    return total


@pytest.fixture(scope="module")
def one_process(folder: Path) -> subprocess.CompletedProcess[str]:
    """The job in one process, started by plain python."""
    done = start(folder, ["-m"])
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.extended
def test_the_output_directory_is_complete(folder: Path, one_process: subprocess.CompletedProcess[str]) -> None:
    names = {path.name for path in (folder / "out").iterdir()}
    wanted = {"results.json", "metrics.jsonl", "loss.svg", "trainer_state.json", "ds_config.json", "config.json"}
    assert wanted | {"model.safetensors", "byte_tokenizer.json"} <= names
    newest = max((folder / "out").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert newest.name == "results.json"
    checkpoint = folder / "out" / "checkpoint-30"  # a model like that, with what reads text for it
    for name in ("model.safetensors", "byte_tokenizer.json", "config.json", "generation_config.json"):
        assert (checkpoint / name).read_bytes() == (folder / "out" / name).read_bytes(), name
    load_language_model(str(checkpoint))


def prepared(recipe: Recipe) -> LanguageModelJob:
    """The job of ``recipe`` with its data, without training."""
    job = LanguageModelJob(recipe)
    job.prepare(job.arguments())
    return job


@pytest.mark.extended
def test_bits_per_byte_are_exact(folder: Path, one_process: subprocess.CompletedProcess[str]) -> None:
    evaluation = read_results(folder / "out")["evaluation"]
    recipe = load_recipe(folder / "r.yaml", [f"--data.train={folder / 'corpus'}"])
    job = prepared(recipe)
    assert job.eval is not None
    assert job.eval_blocks is not None
    texts = [(folder / "corpus" / f"{number}.txt").read_bytes() for number in (0, 3, 6)]
    assert job.eval_text == b"".join(texts)
    assert evaluation["eval_bytes"] == sum(map(len, texts))
    assert evaluation["eval_target_tokens"] == evaluation["eval_bytes"] + 2
    nats = held_out_nats(folder / "out", job.eval_blocks)
    assert evaluation["eval_loss"] == pytest.approx(nats / evaluation["eval_target_tokens"], rel=1e-5)
    assert evaluation["bits_per_byte"] == pytest.approx(nats / math.log(2) / evaluation["eval_bytes"], rel=1e-5)


def test_the_model_has_learned(folder: Path, one_process: subprocess.CompletedProcess[str]) -> None:
    results = read_results(folder / "out")
    assert results["steps"] == 30
    assert results["evaluation"]["bits_per_byte"] < 4.5  # a uniform guess is 8


def test_the_report_is_printed(folder: Path, one_process: subprocess.CompletedProcess[str]) -> None:
    results = read_results(folder / "out")
    assert "gzip -9" in one_process.stdout
    assert results["evaluation"]["verdict"] in one_process.stdout
    assert results["sample"]["prompt"] + results["sample"]["text"] in one_process.stdout
    assert results["recipe"]["arguments"]["max_steps"] == 30
    seconds = results["seconds"]
    assert seconds.pop("total") == pytest.approx(sum(seconds.values()))
    assert min(seconds.values()) > 0 and seconds["train"] == results["train_metrics"]["train_runtime"]
    evaluated = [log["eval_runtime"] for log in read_records(folder / "out" / "metrics.jsonl") if "eval_runtime" in log]
    assert evaluated and seconds["evaluate"] >= sum(evaluated)  # also those during the training


@pytest.mark.extended
def test_two_ranks_continue_from_the_saved_model_with_zero_3(
    folder: Path, one_process: subprocess.CompletedProcess[str]
) -> None:
    before = read_results(folder / "out")["evaluation"]["bits_per_byte"]
    launcher = [
        "-m",
        "deepspeed.launcher.runner",
        "--hostfile",
        "",
        "--num_gpus",
        "2",
        "--master_port",
        "29518",
        "--module",
    ]
    words = ["--model.architecture", "null", "--model.path", "out", "--arguments.output_dir", "out2"]
    done = start(folder, launcher, *words, "--arguments.zero_stage", "3", "--arguments.max_steps", "10")
    assert done.returncode == 0, done.stderr
    results = read_results(folder / "out2")
    assert results["evaluation"]["bits_per_byte"] < before
    assert done.stdout.count("Held-out text") == 1
    job = prepared(load_recipe(folder / "r.yaml", [f"--data.train={folder / 'corpus'}"]))
    assert job.eval_blocks is not None
    nats = held_out_nats(folder / "out2", job.eval_blocks)  # the weights of both ranks are combined
    assert results["evaluation"]["bits_per_byte"] == pytest.approx(
        nats / math.log(2) / results["evaluation"]["eval_bytes"], rel=1e-5
    )


@pytest.mark.extended
def test_a_diverged_run_fails(folder: Path) -> None:
    words = ["--arguments.output_dir", "out3", "--arguments.learning_rate", "1e30", "--arguments.max_grad_norm", "0"]
    done = start(folder, ["-m"], *words, "--arguments.max_steps", "5", "--report.sample_tokens", "0")
    assert done.returncode != 0
    assert not (folder / "out3" / "results.json").exists()


# -- what is refused before an engine starts ---------------------------------------------------------------------------


def refused(folder: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        prepared(load_recipe(folder / "r.yaml", [f"--data.train={folder / 'corpus'}", *overrides]))
    return caught.value.problems


def test_problems_of_data_and_model_are_reported_together(folder: Path) -> None:
    problems = refused(folder, "--data.train=gone", "--model.architecture.hiden_size", "5")
    assert "data.train: 'gone' does not exist" in problems[0]
    assert problems[1].startswith("command line: unknown key 'model.architecture.hiden_size'")


def test_too_little_text(folder: Path) -> None:
    assert (
        "tokens are too few for samples"
        in refused(folder, "--data.sequence_length=100000", "--model.architecture.max_position_embeddings=100000")[0]
    )


def test_no_text_at_all(folder: Path, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("")
    assert "there is no text in 2 files" in refused(folder, f"--data.train={tmp_path}")[0]
    (tmp_path / "b.txt").write_text("text " * 50)
    assert "the evaluation data has no text" in refused(folder, f"--data.train={tmp_path}")[0]


def test_without_evaluation_data(folder: Path) -> None:
    words = [f"--data.train={folder / 'corpus'}", "--data.held_out_every", "null"]
    job = prepared(load_recipe(folder / "r.yaml", words))
    assert job.eval is None
    assert job.eval_blocks is None
    assert job.train.documents == 7


def test_an_unreadable_line_is_reported(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "fine"}\n{"text": \n')
    assert refused(folder, f"--data.train={path}")[0].startswith(f"{path}:2: not valid JSON")
