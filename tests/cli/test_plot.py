"""``ds-trainer plot``."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from ds_trainer.cli.main import main
from ds_trainer.monitor.metrics_file import MetricsWriter


def test_the_records_of_a_running_training_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        writer.write({"step": step, "loss": 1.0 / step, "learning_rate": 0.1, "eval_accuracy": 0.5})
    assert main(["plot", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "loss.svg"), str(tmp_path / "metrics.svg")]
    for name, charts in (("loss.svg", 1), ("metrics.svg", 2)):
        document = ElementTree.fromstring((tmp_path / name).read_text())
        titles = [one.text for one in document.iter() if one.get("class") == "title"]
        assert len(titles) == charts, titles


def test_a_directory_without_records_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(tmp_path)]) == 2
    assert "has no metrics.jsonl: pass the output directory of a training" in capsys.readouterr().err
    assert main(["plot", str(tmp_path), "--colour", "red"]) == 2
    assert "--colour" in capsys.readouterr().err
