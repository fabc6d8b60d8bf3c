"""``ds-trainer support`` and ``ds-trainer arguments``: pages made from the tables that the package works by."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from ds_trainer.arguments.checks.unsupported import ENGINE
from ds_trainer.cli.main import main
from ds_trainer.cli.support import support_matrix
from ds_trainer.config.rules import RULES

DOCS = Path(__file__).parents[2] / "docs"


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 0
    return capsys.readouterr().out


def test_the_page_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """When this fails: ds-trainer support > docs/reference/support.md"""
    assert (DOCS / "reference" / "support.md").read_text(encoding="utf-8") == printed(capsys, "support")


def test_every_row_is_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    page = printed(capsys, "support")
    for rule in RULES:
        assert f"| `{rule.name}` | {rule.needs} |" in page
    for limit in ENGINE:
        assert f"| `{limit.field}` | " in page


def test_arguments_by_topic(capsys: pytest.CaptureFixture[str]) -> None:
    everything = printed(capsys, "arguments")
    assert "Precision:" in everything and "Data loading:" in everything
    one = printed(capsys, "arguments", "zero_stage")
    assert one.startswith("DeepSpeed engine:") and "Data loading:" not in one


def test_wrong_command_line_arguments_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["arguments", "zero_stge"]) == 2
    assert "Did you mean 'zero_stage'?" in capsys.readouterr().err
    assert main(["support", "--all"]) == 2


def test_in_a_terminal_the_matrix_is_text(tmp_path: Path) -> None:
    """Every word of the page, without Markdown, in lines that fit; in a file it stays Markdown."""
    ours, theirs = os.openpty()
    code = "from ds_trainer.cli.main import main; main(['support'])"
    shown = subprocess.Popen([sys.executable, "-c", code], stdout=theirs, env={**os.environ, "COLUMNS": "80"})
    os.close(theirs)
    pieces = []
    with suppress(OSError):  # Linux says so when the other side is closed
        while piece := os.read(ours, 65536):
            pieces.append(piece)
    assert shown.wait(60) == 0
    text = b"".join(pieces).decode().replace("\r\n", "\n")
    assert not re.search(r"^[|#]|`", text, flags=re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 80
    words = [set(re.findall(r"[a-z0-9]{4,}", page.lower())) for page in (support_matrix(), text)]
    assert words[0] - words[1] <= {"rule", "field"}, "heads of names, which stand for themselves"
