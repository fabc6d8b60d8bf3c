"""``ds-trainer support`` and ``ds-trainer arguments``: pages made from the tables that the package works by."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_trainer.arguments.checks.unsupported import ENGINE
from ds_trainer.cli.main import main
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
