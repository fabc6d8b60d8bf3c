"""The recorded outcomes of ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ds_trainer.cli.main import main
from ds_trainer.utils.outcomes import (
    VARIABLE,
    RankOutcome,
    count_outcomes,
    read_error,
    read_outcomes,
    record_error,
    record_outcome,
)


def test_an_outcome_is_written_and_read(tmp_path: Path) -> None:
    for rank, code in ((1, 137), (0, 75)):
        assert record_outcome(code, {VARIABLE: str(tmp_path), "PMI_RANK": str(rank), "PMI_SIZE": "2"})
    ends = read_outcomes(tmp_path)
    assert {rank: end.code for rank, end in ends.items()} == {0: 75, 1: 137} and list(ends) == [0, 1]
    assert str(ends[1]) == f"rank 1 on {ends[1].host} was killed by SIGKILL"
    assert str(RankOutcome(2, 200, "h", 0.0)) == "rank 2 on h ended with exit code 200"


def test_nothing_is_written_if_the_directory_does_not_exist(tmp_path: Path) -> None:
    assert record_outcome(0, {})
    assert not record_outcome(0, {VARIABLE: str(tmp_path / "elsewhere")})
    assert not (tmp_path / "elsewhere").exists()


def test_a_training_records_its_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert main(["config", "gone.yaml"]) == 2
    assert not list(tmp_path.iterdir())
    assert main(["train", "gone.yaml"]) == 2
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text())["code"] == 2
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert json.loads(path.read_text())["code"] == 0


def test_the_error_of_a_rank_is_kept_for_its_launcher(tmp_path: Path) -> None:
    environment = {"RANK": "3", "WORLD_SIZE": "4", VARIABLE: str(tmp_path)}
    record_error(ValueError("two\nlines"), environment)
    assert read_error(tmp_path, 3) == "ValueError: two\nlines"
    assert read_error(tmp_path, 2) == ""
    assert read_outcomes(tmp_path) == {}
    record_error(ValueError("nowhere"), {"RANK": "3", VARIABLE: str(tmp_path / "missing")})
    record_error(ValueError("no launcher"), {})
    assert [path.name for path in tmp_path.iterdir()] == ["error-3.json"]


def test_only_new_outcomes_are_opened(tmp_path: Path) -> None:
    opened: list[str] = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    environment = {VARIABLE: str(tmp_path), "WORLD_SIZE": "9"}
    for rank in range(3):
        record_outcome(75, {**environment, "RANK": str(rank)})
    assert count_outcomes(tmp_path) == 3 and count_outcomes(tmp_path / "missing") == 0
    known = read_outcomes(tmp_path)
    record_outcome(0, {**environment, "RANK": "3"})
    opened.clear()
    assert count_outcomes(tmp_path) == 4
    assert [path for path in opened if path.startswith(str(tmp_path))] == []
    assert list(read_outcomes(tmp_path, known)) == [0, 1, 2, 3]
    assert [path for path in opened if path.startswith(str(tmp_path))] == [str(tmp_path / "rank-3.json")]


def test_an_error_that_cannot_be_recorded_leaves_nothing_for_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its agent would end with a traceback of its own at the beginning of a file."""
    file = tmp_path / "error.json"
    file.symlink_to("/dev/full")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    record_error(ValueError("x" * 100_000))
    assert not file.is_symlink() and Path("/dev/full").exists()
    assert "the error of this rank could not be recorded" in capfd.readouterr().err
