"""Every sentence of the pages on policies (saves, hangs, divergence, retention, resuming) has a test: policies.txt.

A line there is a checksum of the sentence, its beginning, and the tests that hold it. So a sentence that is changed or
added fails here until somebody has looked for its test. Advice and facts about other programs have a word instead.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = (Path(__file__).with_name("policies.txt")).read_text(encoding="utf-8")
WITHOUT_TEST = ("advice", "definition", "heading", "limitation", "of another program")
_SENTENCE_END = re.compile(r"(?<=[.:!?)*])\s+(?=[A-Z`*\"(])")
_LABEL = re.compile(r"\*\*[^*]+\*\*[.:]?|[^.]+:")


def sentences(text: str) -> list[str]:
    """The sentences and the rows of tables of a part of a page, without code and headings."""
    found: list[str] = []
    paragraph: list[str] = []

    def end() -> None:
        pieces = _SENTENCE_END.split(re.sub(r"^(- |\d\. )", "", " ".join(paragraph))) if paragraph else []
        paragraph.clear()
        while pieces:
            sentence = pieces.pop(0)
            while pieces and _LABEL.fullmatch(sentence):
                sentence += f" {pieces.pop(0)}"
            found.append(sentence)

    for line in re.sub(r"```.*?```\n|^\|[^\n]*\|\n(?=\| ?---)", "", text, flags=re.DOTALL | re.MULTILINE).splitlines():
        if not line.strip() or line.startswith(("#", "|", "    ")):
            end()
            found += [line] if line.startswith("|") and not re.match(r"\| ?---", line) else []
            continue
        if re.match(r"(- |\d\. )", line):
            end()
        paragraph.append(line.strip())
    end()
    return found


def sections() -> dict[str, list[str]]:
    """The lines of the table below each ``== page | begin | end``."""
    parts = re.split(r"^== (.+)\n", TABLE, flags=re.MULTILINE)[1:]
    return {head: body.splitlines() for head, body in zip(parts[::2], parts[1::2], strict=True)}


def line_of(sentence: str) -> str:
    beginning = sentence if len(sentence) <= 60 else sentence[:60].rpartition(" ")[0]
    return f"{zlib.crc32(sentence.encode()) & 0xFFFF:04x} {beginning} "


@pytest.mark.parametrize("section", sections())
def test_every_sentence_has_its_tests(section: str) -> None:
    page, begin, end = section.split(" | ")
    text = (ROOT / page).read_text(encoding="utf-8")
    start = text.index(begin)
    wanted = [line_of(sentence) for sentence in sentences(text[start : text.index(end, start + 1)])]
    found = [line.rpartition(">> ")[0] for line in sections()[section]]
    assert found == wanted


def test_the_tests_exist() -> None:
    files = list((ROOT / "tests").rglob("test_*.py"))
    for line in (line for lines in sections().values() for line in lines):
        for reference in line.rpartition(">> ")[2].split(", "):
            if reference in WITHOUT_TEST:
                continue
            file, _, function = reference.partition("::")
            (found,) = [path for path in files if path.as_posix().endswith(f"/{file}.py")]
            assert f"def {function}(" in found.read_text(encoding="utf-8"), line
