"""What is said about the installed libraries: at the start of a training, and by the doctor."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.config.compiler import compile_config
from ds_trainer.engine import library_functions
from ds_trainer.engine.library_functions import known_digests
from ds_trainer.engine.process_group import start_process_group
from ds_trainer.monitor.doctor import gradients, library_changes
from ds_trainer.monitor.doctor.findings import Level
from ds_trainer.monitor.doctor.library_changes import library_findings, versions_finding, warn_of_changes
from ds_trainer.parallel.layout import ParallelLayout

STEP = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.step"


@pytest.fixture
def another_step(monkeypatch: pytest.MonkeyPatch) -> str:
    """As if the source of DeepSpeed's step were another one."""
    known = {**known_digests(), STEP: {"0123456789ab": ["0.19.7"]}}
    monkeypatch.setattr(library_functions, "known_digests", lambda: known)
    return STEP


def test_known_functions_are_compared_once_and_not_mentioned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert not warn_of_changes(tmp_path, "auto")
    monkeypatch.setattr(library_changes, "changed_functions", lambda: pytest.fail("compared again"))
    assert not warn_of_changes(tmp_path, "auto")
    assert caplog.records == []


def test_a_changed_function_is_named_with_its_risk_at_every_start(
    tmp_path: Path, another_step: str, caplog: pytest.LogCaptureFixture
) -> None:
    for new in (True, False):
        caplog.clear()
        assert warn_of_changes(tmp_path, "auto") is new
        (text,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        for part in (another_step, "tested with 0.19.7", "engine/finite_step.py", "reach the weights", "self-test"):
            assert part in text
    caplog.clear()
    warn_of_changes(tmp_path, "never")
    assert "nothing checks them" in caplog.text


def test_a_changed_file_is_compared_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the same version: an installation that is edited, or reinstalled from a branch."""
    file = tmp_path / "engine.py"
    file.write_text("one")
    monkeypatch.setattr(library_changes, "source_files", lambda: [file])
    compared: list[int] = []
    monkeypatch.setattr(library_changes, "changed_functions", lambda: compared.append(1) or [])
    for _ in range(2):
        warn_of_changes(tmp_path, "auto")
    file.write_text("another")
    warn_of_changes(tmp_path, "auto")
    assert len(compared) == 2


def test_a_damaged_record_is_replaced(tmp_path: Path) -> None:
    warn_of_changes(tmp_path, "auto")
    (record,) = tmp_path.iterdir()
    record.write_text("{")
    warn_of_changes(tmp_path, "auto")
    assert json.loads(record.read_text()) == {"changes": []}


def test_the_self_test_runs_again_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("DS_TRAINER_SELF_TEST", "auto")
    start_process_group("cpu")
    args, layout = TrainingArguments("unused", use_cpu=True), ParallelLayout(1)
    compiled = compile_config(args, layout, client_optimizer="a test")
    ran = [gradients.self_test_once(args, compiled, layout) is not None for _ in range(2)]
    request.getfixturevalue("another_step")
    (file,) = (tmp_path / "ds_trainer" / "libraries").iterdir()
    file.unlink()  # as an edited installation has another one
    ran += [gradients.self_test_once(args, compiled, layout) is not None for _ in range(2)]
    assert ran == [True, False, True, False]


@pytest.mark.parametrize(
    ("package", "version", "outside"),
    [
        ("torch", "2.11.0", True),
        ("torch", "2.9.1", True),
        ("torch", "2.12.0a0+a1b2c3", False),  # NVIDIA's containers
        ("torch", "2.15.0", False),
        ("deepspeed", "0.20.0", True),
        ("transformers", "5.19.2", True),
        ("peft", "0.19.0", True),
        ("peft", None, False),
    ],
)
def test_a_version_outside_the_bounds_is_named_at_start_and_by_the_doctor(
    package: str,
    version: str | None,
    outside: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    installed = library_changes.installed_version
    monkeypatch.setattr(
        library_changes, "installed_version", lambda name: version if name == package else installed(name)
    )
    monkeypatch.setattr(library_changes, "changed_functions", list)  # takes seconds
    warn_of_changes(tmp_path, "never")
    found = [finding.message for finding in library_findings() if finding.name == "bounds"]
    assert bool(caplog.records) == bool(found) == outside
    for text in [caplog.text, *found] if outside else []:
        assert f"{package} {version} is installed, and ds_trainer asks for {package}>=" in text


def test_the_bounds_are_those_of_pyproject() -> None:
    """When this fails: tools/versions.sh page"""
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    bounds = json.loads(library_changes.TESTED.read_text(encoding="utf-8"))["bounds"]
    assert len(bounds) > 20 and {"torch", "deepspeed", "transformers", "accelerate", "peft", "wandb"} <= bounds.keys()
    lines = re.findall(r'"([\w.-]+)(?:\[\w+\])?(>=[^"]+)"', text)
    assert set(bounds.items()) <= set(lines)
    first = text[text.index("dependencies = [") : text.index("[project.optional")]
    assert set(re.findall(r'"([\w.-]+)(>=[^"]+)"', first)) <= set(bounds.items())


SETS: list[dict[str, Any]] = [
    {"name": "old", "date": "2026-11-26", "packages": {"torch": "2.11.0", "peft": "0.18.0"}, "passed": 9, "failed": []},
    {"name": "new", "date": "2026-11-26", "packages": {"torch": "2.14.1"}, "passed": 8, "failed": ["test_one"]},
]


def test_the_installed_set_is_compared_with_the_tested_ones() -> None:
    good = versions_finding({"torch": "2.11.0", "peft": "0.18.0"}, SETS)
    assert good.level == Level.OK and "the set 'old' of 2026-11-26, with which 9 tests passed" in good.message
    bad = versions_finding({"torch": "2.14.1"}, SETS)
    assert bad.level == Level.WARN and "1 failed" in bad.message and "test_one" in bad.remedy
    mixed = versions_finding({"torch": "2.14.1", "peft": "0.18.0"}, SETS)
    assert mixed.level == Level.OK and "not together" in mixed.message
    between = versions_finding({"torch": "2.12.0", "peft": "0.18.0"}, SETS)
    assert between.level == Level.OK and "torch 2.12.0 (between the tested 2.11.0, 2.14.1)" in between.message
    outside = versions_finding({"torch": "2.15.0", "peft": "0.18.0"}, SETS)
    assert outside.level == Level.WARN and "torch 2.15.0 (outside" in outside.message and outside.remedy


def test_the_doctor_names_what_the_self_test_does_not_cover(monkeypatch: pytest.MonkeyPatch, another_step: str) -> None:
    of_step = [finding for finding in library_findings() if another_step in finding.message]
    assert [finding.level for finding in of_step] == [Level.WARN] and "covers it" in of_step[0].remedy
    uncovered = "deepspeed.runtime.fp16.unfused_optimizer:FP16_UnfusedOptimizer.initialize_optimizer_states"
    known = {**known_digests(), uncovered: {}}
    monkeypatch.setattr(library_functions, "known_digests", lambda: known)
    (found,) = [finding for finding in library_findings() if uncovered in finding.message]
    assert "does not cover it: compare a short run" in found.remedy
