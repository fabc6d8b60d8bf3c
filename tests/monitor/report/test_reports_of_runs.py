"""Real runs, however they end, and the reports that they leave."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.cli.main import main
from ds_trainer.monitor.health.divergence import TrainingDiverged
from ds_trainer.monitor.metrics_file import MetricsWriter
from ds_trainer.monitor.report.writing import write_report
from ds_trainer.training.stopping.stop_controller import TrainingStopped
from ds_trainer.utils import distributed, failures
from tests.support.diverging import Rows, make
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import RankFailure, pool

STEPS = 8


class Ends(TrainerCallback):
    """Does something at the end of a step."""

    def __init__(self, step: int, action: Any) -> None:
        self.step, self.action = step, action

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        if state.global_step == self.step:
            self.action()


def arguments(directory: Path, **changes: Any) -> TrainingArguments:
    values = {"per_device_train_batch_size": 2, "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    return TrainingArguments(str(directory), **{**values, "self_test": "never", **changes})


def fail() -> None:
    raise RuntimeError("the disk of hf_abcdefghijklmnopqrstuv is <full> & gone")


def train(directory: Path, callbacks: list[Any] | None = None, resume: bool = False, **changes: Any) -> Trainer:
    values = {"max_steps": STEPS, "logging_steps": 1, "zero_stage": 1, **changes}
    data = RaggedTokens(64)
    trainer = Trainer(
        tiny_llama(),
        arguments(directory, **values),
        train_dataset=data,
        eval_dataset=RaggedTokens(8),
        callbacks=callbacks,
    )
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


def report(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "report.json").read_text())  # type: ignore[no-any-return]


def page(directory: Path) -> str:
    return (directory / "report.html").read_text()


def test_a_finished_run(tmp_path: Path) -> None:
    trainer = train(
        tmp_path, report_device_hour_price=3.5, eval_strategy="steps", eval_steps=4, hub_token="hf_secret_token"
    )
    found = report(tmp_path)
    summary = found["summary"]
    assert summary["outcome"]["state"] == "finished"
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [value for _, value in found["curves"]["loss"]] == losses
    assert summary["quality"]["first_loss"] == losses[0] and summary["quality"]["last_loss"] == losses[-1]
    evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert summary["quality"]["evaluations"]["eval_loss"]["last"] == evaluated[-1]
    cost = summary["cost"]
    assert cost["price"] == pytest.approx(3.5 * cost["device_hours"])
    assert cost["device_hours"] == pytest.approx(cost["wall_seconds"] / 3600)
    names = {row["name"]: row for row in found["arguments"]}
    assert names["report_device_hour_price"]["value"] == 3.5 and names["max_steps"]["origin"] == "argument"
    assert "learning_rate" not in names or names["learning_rate"]["value"] != names["learning_rate"]["default"]
    for name in ("report.json", "report.html", "run_history.jsonl"):
        assert "hf_secret_token" not in (tmp_path / name).read_text(), name
    parts = {part["name"]: part["seconds"] for part in found["time"]["parts"]}
    assert sum(parts.values()) == pytest.approx(found["time"]["total_seconds"])
    assert {"forward", "backward", "optimizer", "data", "evaluation"} <= parts.keys()
    # An evaluation after the training is in the report too.
    again = trainer.evaluate()
    assert report(tmp_path)["evaluations"]["eval_loss"][-1] == [STEPS, again["eval_loss"]]
    assert report(tmp_path)["summary"]["outcome"]["state"] == "finished"


def test_no_report_is_written_with_run_report_false(tmp_path: Path) -> None:
    train(tmp_path, max_steps=1, run_report=False)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(("report", "run_history"))]


def test_an_exception_in_a_callback_is_reported_and_raised(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="is <full> & gone"):
        train(tmp_path, [Ends(3, fail)])
    outcome = report(tmp_path)["summary"]["outcome"]
    assert outcome["state"] == "failed" and outcome["text"].startswith("Failed at step 3 of 8: RuntimeError: the disk")
    assert "on_step_end" in outcome["details"]
    assert "hf_abcdefghijklmnopqrstuv" not in page(tmp_path) + json.dumps(report(tmp_path))
    assert "is &lt;full&gt; &amp; gone" in page(tmp_path) and "<full>" not in page(tmp_path)


def test_a_report_that_cannot_be_written_does_not_hide_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Any
) -> None:
    def broken(directory: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("ds_trainer.monitor.report.writing.write_report", broken)
    with pytest.raises(RuntimeError, match="gone"):
        train(tmp_path, [Ends(3, fail)])
    assert "The report of the run was not written" in log.text and "ds-trainer report" in log.text
    assert write_report(tmp_path).exists() and report(tmp_path)["summary"]["outcome"]["state"] == "failed"


def test_a_full_disk_ends_the_record_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Any
) -> None:
    original = MetricsWriter.write

    def write(self: MetricsWriter, values: Any) -> None:
        if self.path.name == "run_history.jsonl":
            raise OSError("no space left")
        original(self, values)

    monkeypatch.setattr(MetricsWriter, "write", write)
    train(tmp_path, max_steps=3)
    assert log.text.count("run_history.jsonl cannot be written") == 1
    assert report(tmp_path)["summary"]["outcome"]["state"] == "finished"  # from the metrics


def test_a_diverged_run_names_the_samples(tmp_path: Path) -> None:
    with pytest.raises(TrainingDiverged):
        make(str(tmp_path), Rows(6, 8, bad=(3,)), nonfinite_policy="stop", self_test="never").train()
    found = report(tmp_path)
    assert found["summary"]["outcome"]["state"] == "diverged"
    assert "Lower learning_rate" in found["summary"]["advice"][0]["change"]
    assert "samples" in found["incidents"][-1]["text"]
    assert any(name.startswith("divergence/step-") for name in found["incident_files"])


def killed(directory: str, number: int, saves: bool) -> int:
    """Train in this rank until a signal ends it; the exit code if it ends in order."""
    changes = {"save_strategy": "steps", "save_steps": 2, "save_async": False} if saves else {}
    try:
        train(Path(directory), [Ends(5, partial(os.kill, os.getpid(), number))], max_steps=40, **changes)
    except TrainingStopped as stopped:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return int(stopped.code)
    return 0


def test_sigterm_that_stops_a_run_leaves_a_report(tmp_path: Path) -> None:
    assert pool(1).run(killed, str(tmp_path), signal.SIGTERM, True) == [75]
    found = report(tmp_path)["summary"]["outcome"]
    assert (found["state"], found["exit_code"]) == ("stopped", 75)
    assert "by SIGTERM" in found["text"] and "checkpoint" in found["text"]


def test_sigterm_that_kills_a_run_leaves_a_report(tmp_path: Path) -> None:
    with pytest.raises(RankFailure):
        pool(1).run(killed, str(tmp_path), signal.SIGTERM, False)
    found = report(tmp_path)["summary"]["outcome"]
    assert found["state"] == "killed" and found["text"].endswith("killed by SIGTERM.")


def test_sigkill_leaves_what_the_command_needs_and_a_restart_counts_what_was_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RankFailure):
        pool(1).run(killed, str(tmp_path), signal.SIGKILL, True)
    assert not (tmp_path / "report.json").exists()
    assert main(["report", str(tmp_path), "--device-hour-price", "2"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    found = report(tmp_path)
    assert found["summary"]["outcome"]["state"] == "killed" and found["summary"]["cost"]["price"] is not None
    assert found["summary"]["quality"]["steps"] >= 4

    pool(1).run(resumed, str(tmp_path))
    found = report(tmp_path)
    assert found["summary"]["outcome"]["state"] == "finished"
    assert [process["first_step"] for process in found["processes"]] == [0, 4]
    assert found["processes"][0]["outcome"] == "no word about its end"
    assert [one["kind"] for one in found["incidents"] if one["kind"] == "restart"] == ["restart"]
    assert [step for step, _ in found["curves"]["loss"]] == list(range(1, 13))
    assert any(check["check"] == "resume" for check in found["checks"])


def resumed(directory: str) -> None:
    train(Path(directory), resume=True, max_steps=12)


def test_only_the_main_process_writes_and_a_failure_elsewhere_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="rank 1 fails"):
        pool(2).run(fails_on_rank_1, str(tmp_path))
    found = report(tmp_path)
    assert found["summary"]["outcome"]["state"] in ("failed", "killed")
    assert "rank 1 failed with RuntimeError: rank 1 fails" in found["summary"]["outcome"]["text"]
    assert found["summary"]["cost"]["devices"] == 2
    starts = [json.loads(line) for line in (tmp_path / "run_history.jsonl").read_text().splitlines()]
    assert [line["event"] for line in starts].count("start") == 1


def fails_on_rank_1(directory: str) -> None:
    failures.GRACE_SECONDS, failures.EXIT_SECONDS = 1.0, 4.0  # these ranks serve no other test

    def action() -> None:
        if distributed.rank() == 1:
            raise RuntimeError("rank 1 fails")

    train(Path(directory), [Ends(3, action)])


def test_two_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "one", learning_rate=1e-3)
    train(tmp_path / "two", learning_rate=2e-3, max_steps=6)
    target = tmp_path / "both.html"
    assert main(["report", str(tmp_path / "one"), str(tmp_path / "two"), "--output", str(target)]) == 0
    found = json.loads(target.with_suffix(".json").read_text())
    differing = {row["name"]: row["values"] for row in found["arguments"]}
    assert differing.pop("learning_rate") == [1e-3, 2e-3] and differing.pop("max_steps") == [8, 6]
    assert set(differing) <= {"output_dir"}
    assert [len(points) for points in found["curves"]["loss"]] == [8, 6]
    assert target.read_text().count('class="line c1"') >= 3


def test_bad_arguments_end_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv, words in (
        ([str(tmp_path)], "has neither metrics.jsonl nor run_history.jsonl"),
        ([str(tmp_path / "none")], "is not a directory"),
        ([str(tmp_path), "--device-hour-price", "-1"], "must be a number that is not negative"),
        ([str(tmp_path), "--output", "x.html"], "--output x.html is for a comparison"),
    ):
        assert main(["report", *argv]) == 2
        assert words in capsys.readouterr().err


# -- before the header -------------------------------------------------------------------------------------------------


class Unbuilt(Trainer):
    """Fails while the engine is built."""

    def create_optimizer(self, model: Any = None) -> Any:
        raise RuntimeError("no optimizer for hf_abcdefghijklmnopqrstuv")


def unbuilt(directory: Path, **changes: Any) -> None:
    Unbuilt(tiny_llama(), arguments(directory, max_steps=STEPS, **changes), train_dataset=RaggedTokens(64)).train()


def test_a_run_that_fails_before_its_header_leaves_a_report(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no optimizer"):
        unbuilt(tmp_path)
    found = report(tmp_path)
    outcome = found["summary"]["outcome"]
    assert outcome["state"] == "failed" and outcome["text"].startswith("Failed before its first step: RuntimeError: no")
    assert "create_optimizer" in outcome["details"] and "hf_abcdefghijklmnopqrstuv" not in page(tmp_path)
    assert {row["name"] for row in found["arguments"]} >= {"max_steps"} and found["versions"]
    assert "Failed before its first step" in page(tmp_path)
    train(tmp_path)  # a new run, which forgets the failed start
    assert report(tmp_path)["summary"]["outcome"]["state"] == "finished" and len(report(tmp_path)["processes"]) == 1


def test_a_failed_start_keeps_what_an_earlier_run_left(tmp_path: Path) -> None:
    train(tmp_path, save_strategy="steps", save_steps=4)
    metrics = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(RuntimeError, match="no optimizer"):
        unbuilt(tmp_path)
    found = report(tmp_path)
    assert found["summary"]["outcome"]["state"] == "failed" and len(found["curves"]["loss"]) == STEPS
    assert [process["outcome"] for process in found["processes"]] == ["finished", "failed"]
    assert (tmp_path / "metrics.jsonl").read_bytes() == metrics
    assert "did not reach a step" in " ".join(str(one["text"]) for one in found["incidents"])
    train(tmp_path, resume=True, max_steps=12)
    assert report(tmp_path)["time"]["repeated_steps"] == 0


def test_a_failed_start_beside_another_training_touches_nothing(tmp_path: Path) -> None:
    before: dict[str, bytes] = {}

    def look() -> None:
        before.update({path.name: path.read_bytes() for path in tmp_path.glob("r*")})
        with pytest.raises(RankFailure, match="is in use by another training"):
            pool(1).run(unbuilt, tmp_path)
        assert {path.name: path.read_bytes() for path in tmp_path.glob("r*")} == before

    train(tmp_path, [Ends(3, look)])
    assert "report.json" not in before and report(tmp_path)["summary"]["outcome"]["state"] == "finished"


def test_no_report_of_a_failed_start_with_run_report_false(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no optimizer"):
        unbuilt(tmp_path, run_report=False)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(("report", "run_history"))]


def test_sources_are_in_the_report(tmp_path: Path) -> None:
    names = [f"source <{number}>" for number in range(8)]
    lines = []
    for step in range(1, 301):
        lines.append(
            {"step": step, "loss": 2.0, **{f"loss/{name}": 3.0 + n - step / 300 for n, name in enumerate(names)}}
        )
        if step % 100 == 0:
            lines.append({"step": step, "eval_loss": 2.5, "eval_loss/rest": 2.5, "eval_more_loss/rest": 1.0})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report(tmp_path)
    found = report(tmp_path)
    assert list(found["sources"]) == ["loss", "eval_loss", "eval_more_loss"]
    assert found["sources"]["loss"][names[7]][-1] == [300, 9.0] and len(found["sources"]["loss"][names[0]]) <= 110
    assert found["sources"]["eval_loss"] == {"rest": [[100, 2.5], [200, 2.5], [300, 2.5]]}
    assert "loss" in found["curves"] and not any("/" in name for name in found["curves"])
    assert found["summary"]["quality"]["metrics"] == {} and list(found["evaluations"]) == ["eval_loss"]
    text = page(tmp_path)
    assert "Loss of each source" in text and "loss, the 6 highest of 8 sources" in text
    assert "source &lt;7&gt;" in text and "<7>" not in text and text.count("<td>source &lt;") == 8
