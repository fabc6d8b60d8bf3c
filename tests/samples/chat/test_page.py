import io

import numpy as np

from ds_trainer.arguments.enums import PackingStrategy
from ds_trainer.samples.chat.encoder import Encoder
from ds_trainer.samples.chat.options import EncodeOptions
from ds_trainer.samples.chat.page import (
    Figures,
    PageOptions,
    histogram,
    sample_text,
    token_lines,
    uses_color,
    write_page,
)
from ds_trainer.samples.sources.record import Record
from tests.samples.chat.families import tokenizer_of


def chat(number, answer="Yes"):
    messages = [{"role": "user", "content": f"Question {number}?"}, {"role": "assistant", "content": answer}]
    return Record(f"chat.jsonl:{number}", "messages", {"messages": messages})


def page(records, options=PageOptions(), **encoding):  # noqa: B008
    lines: list[str] = []
    encoder = Encoder(tokenizer_of("chatml"), EncodeOptions(**encoding))
    figures = write_page([("chat.jsonl", records)], encoder, options, lines.append)
    return "\n".join(lines), figures["chat.jsonl"]


def test_samples_without_color():
    text, _ = page([chat(1), chat(2)], PageOptions(samples=1))
    assert text.startswith("--- chat.jsonl, chat.jsonl:1; ")
    assert "user\nQuestion 1?<|im_end|>\n<|im_start|>assistant\n⟦Yes<|im_end|>⟧\n" in text
    assert "Question 2" not in text
    assert "2 records, 2 samples" in text


def test_figures():
    records = [chat(1), chat(1), chat(2), chat(3, "Yes " * 200), Record("chat.jsonl:9", "messages", {"messages": []})]
    text, figures = page(records, PageOptions(samples=0), max_length=64)
    assert (figures.records, len(figures.lengths), figures.duplicates) == (5, 4, 1)
    assert figures.notices == {"truncated": 1}
    assert figures.refused == {"bad_messages": 1}
    assert "refused       1: chat.jsonl:9: the conversation has no messages." in text
    assert "1 sample: longer than max_length; their first tokens are kept (chat.jsonl:3)" in text
    assert "max 64" in text
    trained = sum(figures.trained)
    assert f"trained on {trained:,} ({trained / sum(figures.lengths):.1%};" in text


def test_both_answers_of_a_preference_count():
    answers = [[{"role": "assistant", "content": text}] for text in ("good", "bad")]
    question = [{"role": "user", "content": "Which?"}]
    fields = {"prompt": question, "chosen": answers[0], "rejected": answers[1]}
    other = {**fields, "rejected": [{"role": "assistant", "content": "worse"}]}
    text, figures = page([Record(f"a:{number}", "preference", one) for number, one in enumerate((fields, other), 1)])
    assert len(figures.lengths) == 4
    assert "2 records, 2 samples of two answers" in text and figures.duplicates == 0  # one answer of them is equal
    assert page([Record("a:1", "preference", fields)] * 2)[1].duplicates == 1
    assert "a:1, chosen; " in text and "a:1, rejected; " in text
    assert "⟦good<|im_end|>⟧" in text and "⟦bad<|im_end|>⟧" in text


def test_rows_of_packing():
    packing = PageOptions(samples=8, packing=PackingStrategy.BEST_FIT, row_length=64, seed=7)
    text, figures = page([chat(number) for number in range(8)], packing)
    assert len(set(figures.lengths)) == 1
    per_row = 64 // figures.lengths[0]
    assert per_row >= 2
    assert f"8 samples in {-(-8 // per_row)} rows of 64 tokens" in text
    assert text.count("; row 0, tokens 0 to ") == 1
    assert text.count("; row 0, tokens ") == per_row
    assert "samples of an epoch" not in text  # shares of sources are shown where sources have weights


def test_token_by_token():
    tokenizer = tokenizer_of("chatml")
    sample = Encoder(tokenizer)(chat(1))[0]
    lines = token_lines(tokenizer, **dict(zip(("ids", "labels"), sample.values(), strict=True)), color=False)
    assert len(lines) == len(sample["input_ids"])
    assert lines[0].split() == ["0", str(sample["input_ids"][0]), "-", "'<|im_start|>'"]
    assert [line.split()[3] for line in lines if " trained " in line][-1] == "'<|im_end|>'"


def test_color_only_changes_the_look():
    tokenizer = tokenizer_of("chatml")
    ids, labels = Encoder(tokenizer)(chat(1))[0].values()
    colored = sample_text(tokenizer, ids, labels, color=True)
    assert "\x1b[1;32mYes<|im_end|>\x1b[0m" in colored
    assert "⟦" not in colored
    stripped = colored
    for code in ("\x1b[1;32m", "\x1b[2m", "\x1b[0m"):
        stripped = stripped.replace(code, "")
    assert stripped == tokenizer.decode(ids)


def test_color_on_terminals_that_want_it():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    assert uses_color(Terminal(), {})
    assert not uses_color(Terminal(), {"NO_COLOR": "1"})
    assert not uses_color(Terminal(), {"TERM": "dumb"})
    assert not uses_color(io.StringIO(), {})


def test_histogram():
    assert [line.split()[-1] for line in histogram(np.asarray([1, 2, 3, 9]))] == ["1", "2", "0", "1"]
    assert Figures().lines() == ["0 records, 0 samples"]
