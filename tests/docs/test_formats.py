"""Every example of docs/reference/formats.md, read by the reader of the recipes, gives what the page shows."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ds_trainer.samples.chat.encoder import Encoder
from ds_trainer.samples.chat.options import EncodeOptions
from ds_trainer.samples.chat.problems import SampleProblem, unread_lines
from ds_trainer.samples.sources.record import BadLines
from ds_trainer.samples.sources.source import Source
from ds_trainer.samples.sources.spec import SourceSpec
from tests.samples.chat.families import FAMILIES, make_tokenizer, marked

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "formats.md"
_EXAMPLE = re.compile(r"^### ([^\n]+)\n\n```json\n(.*?)```\n\n```text\n(.*?)```\n", re.MULTILINE | re.DOTALL)


def examples() -> list[tuple[str, str, str]]:
    """Title, lines of the file, and what becomes of them."""
    section, found = "", []
    for part in re.split(r"^(?=## )", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE):
        section = part.partition("\n")[0].removeprefix("## ")
        found += [(f"{section}: {title}", rows, shown) for title, rows, shown in _EXAMPLE.findall(part)]
    return found


def rows_of(text: str) -> Iterator[Any]:
    """The JSON values in ``text``, one after the other."""
    while text := text.strip():
        value, end = json.JSONDecoder().raw_decode(text)
        text = text[end:]
        yield value


def read_example(rows: str, folder: Path, spec: dict[str, Any]) -> str:
    """What a job makes of a file: the trained text in ⟦ ⟧, or the sentence that refuses it."""
    Image.new("RGB", (4, 4)).save(folder / "cat.png")
    path = folder / "example.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(rows)), encoding="utf-8")
    source = Source(SourceSpec(path=(str(path),), **spec), "data.train")
    bad = BadLines("error")
    records = list(source.read(bad))
    encoder = Encoder(make_tokenizer(FAMILIES["chatml"]), EncodeOptions(chat_template="chatml"))
    lines = [f"{source.format_name}:"] if records else []
    for record in records:
        try:
            (sample,) = encoder(record)
        except SampleProblem as problem:
            lines.append(f"refused: {problem.message}")
            continue
        for side in ("chosen_", "rejected_", ""):
            if f"{side}input_ids" in sample:
                text = marked(encoder.tokenizer, {key: sample[f"{side}{key}"] for key in ("input_ids", "labels")})
                lines.append((f"{side.removesuffix('_')}: " if side else "") + text.rstrip("\n"))
        lines += unread_lines(dict.fromkeys(record.unread, 1))
    problems = [re.sub(r" Correct them, or set data\.bad_lines.*", "", problem) for problem in bad.problems()]
    lines += [f"refused: {problem.partition(': ')[2]}" for problem in problems]
    wrapped = [textwrap.fill(line, 120, subsequent_indent="    ") if line[:8] == "refused:" else line for line in lines]
    return "\n".join(wrapped) + "\n"


@pytest.mark.parametrize(("title", "rows", "shown"), examples(), ids=lambda value: None if "\n" in value else value)
def test_an_example(title: str, rows: str, shown: str, tmp_path: Path) -> None:
    assert read_example(rows, tmp_path, {"kind": "messages"} if "kind: messages" in title else {}) == shown


def test_the_page_has_every_example() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.count("```json\n") == text.count("```text\n") == len(examples()) > 50
    titles = [title for title, _, _ in examples()]
    assert len(set(titles)) == len(titles)
    for project in ("axolotl", "LLaMA-Factory", "ms-swift", "TRL"):
        assert sum(title.startswith(project) for title in titles) >= 7
