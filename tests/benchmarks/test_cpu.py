"""``benchmarks/cpu.py`` runs the scripts, and says on what."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import cpu

pytestmark = pytest.mark.extended  # starts launchers, machines or scripts

ROOT = Path(cpu.HERE).parent


def test_every_script_exists_and_is_listed() -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text()
    for name in cpu.SCRIPTS:
        assert (cpu.HERE / f"{name}.py").is_file()
        assert f"`{name}.py`" in page


def test_results_and_failures_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fine.py").write_text("import sys, pathlib; pathlib.Path(sys.argv[2]).write_text(sys.argv[3])")
    (tmp_path / "broken.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr(cpu, "HERE", tmp_path)
    monkeypatch.setattr(cpu, "SCRIPTS", {"fine": (["--out"], ["--quick"]), "broken": (["--out"], ["--quick"])})
    assert cpu.main(["--quick", "--directory", str(tmp_path / "results")]) == 1
    assert (tmp_path / "results" / "fine.json").read_text() == "--quick"
    report = json.loads((tmp_path / "results" / "machine.json").read_text())
    assert {name: outcome["exit_code"] for name, outcome in report["scripts"].items()} == {"fine": 0, "broken": 3}
    assert {"commit", "date", "torch", "memory_bytes"} <= report.keys()
    assert "1 of 2 passed; failed: broken" in capfd.readouterr().out


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(SystemExit):
        cpu.main(["--only", "nothing"])
