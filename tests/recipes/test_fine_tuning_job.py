"""Fine-tuning from files, end to end in this process: data, training, evaluation, results."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer.recipes.fine_tuning_data import FineTuningData
from ds_trainer.recipes.fine_tuning_job import FineTuningJob
from ds_trainer.recipes.jobs import job_of
from ds_trainer.recipes.recipe import load_recipe
from ds_trainer.utils.errors import ConfigError

RECIPE = """\
model:
  path: model
data:
  train:
    - path: questions.jsonl
      weight: 3
    - {path: "notes/*.txt", name: notes, weight: 1}
  held_out: 5
  max_length: 48
arguments:
  output_dir: out
  per_device_train_batch_size: 4
  num_train_epochs: 2
  learning_rate: 1e-2
  logging_steps: 5
  save_strategy: "no"
  use_cpu: true
  report_to: none
"""
QUESTIONS = 37


def save_model(directory: Path) -> Any:
    """A one-layer Llama with a byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
    config = LlamaConfig(vocab_size=len(fast), max_position_embeddings=96, initializer_range=0.1, **sizes)
    LlamaForCausalLM(config).save_pretrained(directory)
    fast.save_pretrained(directory)
    return fast


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_model(tmp_path / "model")
    rows = [
        {"prompt": f"{number} plus one is ", "completion": f"{number + 1}.", "id": number, "topic": "sums"}
        for number in range(QUESTIONS)
    ]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "notes").mkdir()
    for number in range(6):
        (tmp_path / "notes" / f"{number}.txt").write_text(f"note {number} " * 8)
    (tmp_path / "r.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.extended
def test_a_run_from_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = job_of(load_recipe("r.yaml")).run()
    assert json.loads(json.dumps(results)) == json.loads((folder / "out" / "results.json").read_text())
    questions, notes = results["data"]["sources"]
    assert [questions[key] for key in ("name", "kind", "files")] == ["questions.jsonl", "prompt_completion", 1]
    assert [notes[key] for key in ("name", "kind", "files")] == ["notes", "text", 6]
    assert questions["records"] + notes["records"] + 5 == QUESTIONS + 6
    assert results["data"]["eval_samples"] == 5
    assert questions["unread"] == {"id": questions["records"], "topic": questions["records"]}
    assert questions["notices"].keys().isdisjoint(questions["unread"]) and notes["unread"] == {}
    assert notes["tokens"] == 48 * notes["samples"]  # truncated
    assert notes["notices"]["truncated"] == notes["samples"]
    assert notes["trained_tokens"] == 47 * notes["samples"]  # nothing predicts the first token
    held_out = results["data"]["eval_target_tokens"] - 47 * (6 - notes["samples"])
    assert questions["trained_tokens"] + held_out == sum(len(f"{n + 1}.") + 1 for n in range(QUESTIONS))
    samples = QUESTIONS + 6 - 5
    assert questions["samples_per_epoch"] + notes["samples_per_epoch"] == samples
    assert abs(questions["samples_per_epoch"] - samples * 0.75) < 1
    assert results["steps"] == 2 * math.ceil(samples / 4)
    assert results["evaluation"]["eval_loss"] < math.log(258)
    printed = capsys.readouterr().out
    assert "gzip" not in printed
    assert "questions.jsonl: " in printed
    assert "of the tokens of a sample are trained on" in printed
    card = json.loads((folder / "out" / "data_card.json").read_text())
    assert [row["name"] for row in card["sources"]] == ["questions.jsonl", "notes"]
    assert sum(card["lengths"]["counts"]) == samples and card["lengths"]["edges"][-1] > 48
    first = card["samples"][0]
    assert first["source"].startswith("questions.jsonl: ") and ".jsonl:" in first["source"]
    asked, answered = first["pieces"]
    assert asked["text"].endswith(" plus one is ") and not asked["trained"]
    assert answered == {"text": f"{int(asked['text'].split()[0]) + 1}.<end>", "trained": True}
    report = (folder / "out" / "report.html").read_text()
    assert '<span class="trained">' in report and "plus one is" in report
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(folder / "out")
    assert AutoTokenizer.from_pretrained(folder / "out").eos_token == "<end>"


def test_the_evaluation_loss_is_that_of_plain_pytorch(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    results = job_of(load_recipe("r.yaml", ["--arguments.max_steps", "3", "--arguments.packing", "true"])).run()
    held_out = prepared().eval
    assert held_out is not None
    model = AutoModelForCausalLM.from_pretrained(folder / "out").eval()
    total, targets = 0.0, 0
    with torch.no_grad():
        for index in range(len(held_out)):
            sample = held_out[index]
            logits = model(input_ids=sample["input_ids"][None]).logits[0, :-1].double()
            wanted = sample["labels"][1:]
            total += float(torch.nn.functional.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum"))
            targets += int((wanted != -100).sum())
    assert results["evaluation"]["eval_loss"] == pytest.approx(total / targets, rel=1e-4)


def test_all_bad_lines_are_reported_before_training(folder: Path) -> None:
    with (folder / "questions.jsonl").open("a") as file:
        file.write('{"prompt": "x"}\n{"prompt": 5, "completion": "y"}\n')
    (folder / "notes" / "bad.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError) as caught:
        job_of(load_recipe("r.yaml", ["--data.held_out", "0.2"])).run()
    problems = caught.value.problems
    assert [problem.split(": ")[0].rsplit("/", 1)[1] for problem in problems] == [
        f"questions.jsonl:{QUESTIONS + 1}",
        f"questions.jsonl:{QUESTIONS + 2}",
        "bad.txt",
    ]
    assert problems[-1].endswith("set data.bad_lines to skip, which counts them and leaves them out.")
    assert not (folder / "out").exists()
    skipped = prepared("--data.bad_lines=skip").to_dict()
    assert skipped["bad_lines"] == 3
    assert sum(source["records"] for source in skipped["sources"]) + skipped["eval_samples"] == QUESTIONS + 6


def prepared(*words: str) -> FineTuningData:
    """The data of the recipe, without training."""
    job = FineTuningJob(load_recipe("r.yaml", words))
    job.prepare(job.arguments())
    return job.data


def test_conversations_train_on_answers_only(folder: Path) -> None:
    turns = [{"from": "human", "value": "one?"}, {"from": "gpt", "value": "two"}]
    lines = [json.dumps({"conversations": turns, "id": number}) for number in range(3)]
    (folder / "chats.jsonl").write_text("\n".join(lines))
    words = ("--data.train=chats.jsonl", "--data.held_out=null", "--data.max_length=96", "--data.chat_template=chatml")
    data = prepared(*words)
    (figures,) = data.sources
    assert (figures.format, figures.kind, figures.samples) == ("conversations (ShareGPT)", "messages", 3)
    assert data.lines[0].startswith("data.train (chats.jsonl): 3 records of conversations (ShareGPT) in 1 file; ")
    assert "  keys not used: id (in 3 samples)" in data.lines
    sample = data.train[0]
    trained = sample["input_ids"][sample["labels"] != -100]
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained("model").decode(trained).strip() == "two<|im_end|>"
    everything = prepared(*words, "--data.train_on=all").train[0]["labels"]
    assert bool((everything[1:] != -100).all())


def test_samples_are_tokenized_once(folder: Path) -> None:
    first, again = prepared(), prepared()
    assert [dataset.report is None for dataset in first.train.datasets] == [False, False]
    assert [dataset.report is None for dataset in again.train.datasets] == [True, True]
    assert all(torch.equal(first.train[n]["input_ids"], again.train[n]["input_ids"]) for n in range(len(first.train)))
    with (folder / "questions.jsonl").open("a") as file:
        file.write('{"prompt": "new", "completion": "sample"}\n')
    changed = prepared()
    assert changed.train.datasets[0].report is not None
    assert changed.sources[0].records + changed.sources[1].records + 5 == QUESTIONS + 7


def test_data_for_other_jobs_is_refused(folder: Path) -> None:
    (folder / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}')
    (folder / "empty").mkdir()
    with pytest.raises(ConfigError) as caught:
        prepared("--data.train=[pairs.jsonl, empty, gone.jsonl]")
    assert [problem[:50] for problem in caught.value.problems] == [
        "data.train: preferences (chosen and rejected) are ",
        "data.train: empty: no file in it matches '*'.",
        "data.train: 'gone.jsonl' does not exist (working d",
    ]


def test_long_samples_follow_the_policy(folder: Path) -> None:
    words = ("--data.train=notes", "--data.held_out=null")
    assert prepared(*words).sources[0].tokens == 6 * 48
    assert prepared(*words, "--data.long_samples=split").sources[0].samples == 12
    for policy, reason in (
        ("error", "has 57 tokens; max_length is 48"),
        ("drop", "data.train: There is nothing to train on: 6 records"),
    ):
        with pytest.raises(ConfigError) as caught:
            prepared(*words, f"--data.long_samples={policy}")
        assert reason in str(caught.value)


# -- streams -----------------------------------------------------------------------------------------------------------

STREAMED = ["--data.streaming", "true", "--arguments.max_steps", "6", "--arguments.logging_steps", "2"]


def test_a_streamed_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "more.jsonl").write_text('{"prompt": "100 plus one is ", "completion": "101."}\n' * 4)
    recipe = RECIPE.replace("  held_out: 5\n", "  eval: more.jsonl\n")
    (folder / "r.yaml").write_text(recipe)
    results = job_of(load_recipe("r.yaml", STREAMED)).run()
    assert results["steps"] == 6 and results["evaluation"]["eval_samples"] == 4
    assert [row["share"] for row in results["data"]["sources"]] == [0.75, 0.25]
    assert "notes: 25.0% of the samples, streamed" in capsys.readouterr().out
    data = prepared(*STREAMED)
    assert f"  keys not used: id, topic (in {QUESTIONS} samples), of the first {QUESTIONS} records" in data.lines
    logs = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    assert {"loss/questions.jsonl", "loss/notes"} <= set().union(*logs)
    report = json.loads((folder / "out" / "report.json").read_text())
    assert set(report["sources"]["loss"]) == {"questions.jsonl", "notes"}
    assert [row["name"] for row in report["data"]["sources"]] == ["questions.jsonl", "notes"]


def test_a_stream_needs_what_its_size_would_tell(folder: Path) -> None:
    text = RECIPE.replace("      weight: 3\n", "").replace(", weight: 1", "")
    (folder / "r.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_recipe("r.yaml", ["--data.streaming", "true", "--data.shuffle_window", "0", "--task.name", "dpo"])
    words = " ".join(caught.value.problems)
    for part in ("shuffle_window=0 must be", "held_out=5 would have to read all", "need a weight each",
                 "set arguments.max_steps", "task dpo cannot stream"):  # fmt: skip
        assert part in words


def test_losses_of_sources_are_logged_for_both_sides(folder: Path) -> None:
    words = ["--arguments.logging_steps", "1", "--arguments.eval_strategy", "epoch", "--data.held_out", "0.3"]
    job_of(load_recipe("r.yaml", words)).run()
    logs = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    assert {"eval_loss/questions.jsonl", "eval_loss/notes"} <= set().union(*logs)
    for entry in logs:
        by_source = [value for key, value in entry.items() if key.startswith("eval_loss/")]
        assert not by_source or min(by_source) <= entry["eval_loss"] <= max(by_source)
