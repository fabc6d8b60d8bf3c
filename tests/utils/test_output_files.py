"""What a user has in the output directory under the name of a file that runs write is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.training.resume.output_directory import AUTO_RESUME, OutputDirectory
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import write_text_atomic
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import pool


def trained_beside(output_dir: str, deepspeed: str | None) -> str:
    args = TrainingArguments(output_dir, max_steps=1, use_cpu=True, deepspeed=deepspeed)
    trainer = Trainer(tiny_llama(), args, train_dataset=RaggedTokens(8))
    try:
        trainer.save_metrics("train", trainer.train().metrics)
        trainer.create_model_card()
        trainer.engine.close()
    except ConfigError as error:
        return str(error)
    return ""


NAMES = """ds_config.json ds_config.previous.json metrics.jsonl metrics.previous.jsonl run_history.jsonl latest.previous
run_history.previous.jsonl report.html report.json report.previous.html trainer_state.json latest train_results.json
all_results.json README.md"""


def test_no_file_of_the_user_is_replaced(tmp_path: Path) -> None:
    """In a new directory, in that of a run, after a start that ended early; files of runs do not heap up."""
    mine = {f'{{"mine": "{name}"}}' for name in NAMES.split()}
    for before in ((), ("run_history.jsonl", "latest", "report.html")):
        for name in before:  # as if it had ended early, and the user put another file there
            (tmp_path / name).unlink(missing_ok=True)
        for name in NAMES.split() if not before else before[-1:]:
            write_text_atomic(tmp_path / name, f'{{"mine": "{name}"}}')
        assert pool(1).run(trained_beside, str(tmp_path), None) == [""]
        texts = [path.read_bytes().decode(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
        assert mine <= set(texts), before
    assert texts.count('{"mine": "report.html"}') == 2  # each of them
    left = {path.name for path in tmp_path.iterdir()}
    assert left >= {"report.previous-3.html", "metrics.previous-3.jsonl", "latest.previous-2", "ds_config.json"}
    assert not left & {"ds_config.previous-3.json", "report.previous-4.html", "trainer_state.previous-2.json"}


def test_a_configuration_that_is_named_is_not_replaced(tmp_path: Path) -> None:
    theirs = tmp_path / "ds_config.json"
    theirs.write_text('{"zero_optimization": {"stage": 1}}')
    (said,) = pool(1).run(trained_beside, str(tmp_path), str(theirs))
    assert "would be replaced" in said and theirs.read_text() == '{"zero_optimization": {"stage": 1}}'


@pytest.mark.parametrize(("value", "resumes"), [("", False), ("0", False), ("False", False), ("1", True), ("on", True)])
def test_a_variable_says_whether_a_run_resumes(value: str, resumes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = OutputDirectory(TrainingArguments("out", use_cpu=True))
    monkeypatch.setenv(AUTO_RESUME, value)
    assert directory.resumes_automatically is resumes
    monkeypatch.setenv(AUTO_RESUME, f"{value}maybe")
    with pytest.raises(ConfigError, match=r"DS_TRAINER_AUTO_RESUME='.*maybe' must be 1 or 0"):
        _ = directory.resumes_automatically
