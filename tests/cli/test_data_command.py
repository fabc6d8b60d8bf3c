"""``ds-trainer data show`` with recipes, files and tokenizers made here."""

import io
import json
import re
import sys

import pytest

from ds_trainer.cli.main import main
from tests.samples.chat.families import FAMILIES, make_tokenizer

RECIPE = """
model:
  architecture: {model_type: llama, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2}
data:
  train:
    - {path: faq.jsonl, weight: 2}
    - {path: sums.jsonl, weight: 1}
  tokenizer: tokenizer
  max_length: 48
arguments:
  output_dir: out
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_tokenizer(FAMILIES["chatml"]).save_pretrained("tokenizer")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    for name, question in (("faq.jsonl", "Why"), ("sums.jsonl", "How much is")):
        lines = [
            {"messages": [{"role": "user", "content": f"{question} {n}?"}, {"role": "assistant", "content": f"N{n}."}]}
            for n in range(6)
        ]
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def show(capsys, *args):
    code = main(["data", "show", "recipe.yaml", *args])
    return code, capsys.readouterr().out


def test_all_sources(folder, capsys):
    code, text = show(capsys, "--samples", "2")
    assert code == 0
    assert text.count("\n--- faq.jsonl, ") + text.startswith("--- faq.jsonl, ") == 2
    assert "user\nHow much is 1?<|im_end|>\n<|im_start|>assistant\n⟦N1.<|im_end|>⟧" in text
    assert "=== faq.jsonl ===\n6 records, 6 samples" in text
    assert "=== sums.jsonl ===\n6 records, 6 samples" in text
    assert "\x1b" not in text


def test_one_source_token_by_token(folder, capsys):
    code, text = show(capsys, "--source", "sums.jsonl", "--tokens", "--samples", "1", "--data.train_on=[user]")
    assert code == 0
    assert "faq.jsonl" not in text
    lines = [line.split() for line in text.splitlines()]
    assert ["trained", "'<|im_end|>'"] in [line[2:] for line in lines]
    assert ["-", "'<|im_start|>'"] in [line[2:] for line in lines]
    assert main(["data", "show", "recipe.yaml", "--source", "sum.jsonl"]) == 2
    assert "'sum.jsonl' is none of faq.jsonl, sums.jsonl. Did you mean 'sums.jsonl'?" in capsys.readouterr().err


def test_held_out_samples_and_weights(folder, capsys):
    code, text = show(capsys, "--data.held_out", "0.4", "--samples", "9", "--arguments.num_train_epochs", "2")
    assert code == 0
    titles = [line.split(", ")[:2] for line in text.splitlines() if line.startswith("--- ")]
    assert sum(held == "held out" for _, held in titles) > 0
    shown = [line for line in text.splitlines() if "⟦N" in line]
    assert len(shown) == len(titles) == 12  # every record once
    counts = [int(line.split()[0]) for line in text.splitlines() if re.match(r"\d+ records?, ", line)]
    assert sum(counts) == 12 and "=== faq.jsonl, held out ===" in text
    samples = sum(counts[:2])
    part = round(samples * 2 / 3)
    for name, own, drawn in zip(("faq.jsonl", "sums.jsonl"), counts, (part, samples - part), strict=False):
        assert f"{name}: {drawn:,} of {samples:,} samples of an epoch ({drawn / samples:.1%}), from {own}; each" in text
        assert f"each is seen {2 * drawn / own:.2f} times in 2 epochs" in text


def test_evaluation_data(folder, capsys):
    (folder / "eval.jsonl").write_text((folder / "faq.jsonl").read_text().replace("Why", "When"))
    (folder / "recipe.yaml").write_text(RECIPE.replace("  tokenizer:", "  eval: eval.jsonl\n  tokenizer:"))
    code, text = show(capsys, "--arguments.packing", "true")
    assert code == 0 and "=== eval.jsonl, evaluation ===" in text and "user\nWhen 1?" in text
    assert "packed: 12 samples in " in text  # not those of the evaluation


def test_what_is_trained_on(folder, capsys):
    """A word is one of the choices, a list names roles."""
    for given, part in (
        ("last_turn", "⟦N0.<|im_end|>⟧"),
        ("all", "⟦<|im_start|>user"),
        ("[user]", "⟦Why 0?<|im_end|>⟧"),
    ):
        code, text = show(capsys, f"--data.train_on={given}", "--samples", "1", "--source", "faq.jsonl")
        assert code == 0 and part in text


def test_sources_of_one_name_are_told_apart(folder, capsys):
    (folder / "more").mkdir()
    (folder / "sums.jsonl").rename(folder / "more" / "faq.jsonl")
    (folder / "recipe.yaml").write_text(RECIPE.replace("sums.jsonl", "more/faq.jsonl"))
    _, text = show(capsys)
    assert "=== faq.jsonl (data.train[0]) ===" in text and "=== faq.jsonl (data.train[1]) ===" in text


def test_rows_of_a_packing_recipe(folder, capsys):
    _, text = show(capsys, "--arguments.packing", "true")
    assert "packed: 12 samples in " in text
    assert "; row 0, tokens 0 to " in text or "; row 1, tokens 0 to " in text


def test_what_has_to_be_mended(folder, capsys):
    """Bad lines and samples that cannot be encoded are listed, and the exit code says that there are some."""
    template = "{% for m in messages %}{{ m.content }}{{ raise_exception('no') if m.content == 'Why 3?' }}{% endfor %}"
    with open("faq.jsonl", "a") as stream:
        stream.write('{"messages": [{"role": "user", "content": "Unanswered"}]}\n')
    code, text = show(capsys, "--data.chat_template", template)
    assert code == 2
    assert "refused       1: " in text and "faq.jsonl:4: the chat template refuses it: no" in text
    assert "faq.jsonl:7: " in text
    code, text = show(capsys, "--data.chat_template", template, "--data.bad_lines", "skip")
    assert code == 0


def test_samples_longer_than_the_model_are_refused_as_in_the_training(folder, capsys):
    assert main(["data", "show", "recipe.yaml", "--data.max_length", "100000"]) == 2
    assert "max_length=100000 is longer than the model's max_position_embeddings" in capsys.readouterr().err


def test_data_without_a_record_is_an_error(folder, capsys):
    (folder / "empty.jsonl").write_text("\n")
    assert main(["data", "show", "recipe.yaml", "--data.train", "empty.jsonl"]) == 2
    assert "empty.jsonl: there are no records in it." in capsys.readouterr().err


def test_rows_are_those_of_the_training(folder, capsys, monkeypatch):
    """With weighted sources and a split: where a sample is shown to be is where the training packs it."""
    from ds_trainer.recipes.jobs import job_of
    from ds_trainer.recipes.recipe import load_recipe

    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    words = ["--arguments.packing", "true", "--data.held_out", "3", "--arguments.use_cpu", "true"]
    _, text = show(capsys, *words, "--samples", "9")
    job = job_of(load_recipe("recipe.yaml", words))
    job.prepare(args := job.arguments())
    rows = job.make_trainer(args).get_train_dataloader().dataset
    packed = set()
    for number in range(len(rows)):
        place = 0
        for piece in rows[number]:
            packed.add(f"row {number}, tokens {place} to {place + piece.length - 1}")
            place += piece.length
    places = [line for line in text.splitlines() if "; row" in line]
    assert places and {line.split("; ")[2].split(" with ")[0].removesuffix(" ---") for line in places} <= packed


def test_recipes_of_text_in_blocks(folder, capsys):
    recipe = RECIPE.replace("max_length", "sequence_length").replace(", weight: 2", "").replace(", weight: 1", "")
    (folder / "recipe.yaml").write_text(recipe)
    assert main(["data", "show", "recipe.yaml"]) == 2
    assert "set data.max_length for conversations" in capsys.readouterr().err
    assert main(["data", "shwo", "recipe.yaml"]) == 2
    assert "Did you mean 'show'?" in capsys.readouterr().err


def test_preparing_checks_all_data(folder, capsys):
    for name in ("faq.jsonl", "sums.jsonl"):
        (folder / name).write_text('{"prompt": "Why?", "completion": " So."}\n' * 6)
    assert main(["data", "prepare", "recipe.yaml", "--data.prepared_dir", "prepared"]) == 0
    text = capsys.readouterr().out
    assert "faq.jsonl" in text and "sums.jsonl" in text
    with open("sums.jsonl", "a") as stream:
        stream.write("no json\n")
    assert main(["data", "prepare", "recipe.yaml", "--data.prepared_dir", "prepared"]) == 2
    assert "sums.jsonl:7: " in capsys.readouterr().err


def test_a_stream_that_lacks_characters(folder, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["data", "show", "recipe.yaml", "--samples", "1"]) == 0
    stream.flush()
    assert b"?N0.<|im_end|>?" in stream.buffer.getvalue()


def test_control_characters_of_the_data_do_not_reach_the_terminal(folder, capsys):
    turns = [{"role": "user", "content": "a\x1b[2J\rb\x9b"}, {"role": "assistant", "content": "tab\tis\none"}]
    (folder / "faq.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    _, text = show(capsys, "--samples", "1")
    assert "a␛[2J␍b�" in text and "tab\tis\none" in text
    assert not {"\x1b", "\r", "\x9b"} & set(text)


def test_files_of_the_same_name_are_all_shown(folder, capsys):
    for file, name in (("faq.jsonl", "one"), ("sums.jsonl", "two")):
        (folder / name).mkdir()
        (folder / file).rename(folder / name / "x.jsonl")
    recipe = RECIPE.replace("{path: faq.jsonl, weight: 2}", "one/x.jsonl").replace(
        "{path: sums.jsonl, weight: 1}", "two/x.jsonl"
    )
    (folder / "recipe.yaml").write_text(recipe)
    _, text = show(capsys, "--samples", "0")
    assert text.count("6 records, 6 samples") == 2
    code, _ = show(capsys, "--samples", "0", "--source", "x.jsonl (data.train, 2)")
    assert code == 0


def test_keys_that_no_rule_reads_are_named_once(folder, capsys):
    turns = [{"role": "user", "content": "a", "id": 1}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": turns, "article": "x", **({"label": True, "by": 1} if n else {})} for n in range(3)]
    (folder / "faq.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, text = show(capsys, "--samples", "1")
    assert code == 0
    assert text.count("keys not used") == 1  # the other source has none
    assert "keys not used: article, messages[].id (in 3 samples), by (in 2 samples)\n" in text
