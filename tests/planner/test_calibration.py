"""Corrections of predictions: means over runs, a file that is complete or refused, their effect on a search."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_trainer.planner.activations.probed import Probe
from ds_trainer.planner.calibration import (
    Calibration,
    calibration_file,
    read_calibration,
    read_probe,
    record_probe,
    record_run,
)
from ds_trainer.planner.cluster import Cluster
from ds_trainer.planner.planned_model import PlannedModel
from ds_trainer.planner.search import Goal, search
from ds_trainer.utils.errors import ConfigError

LLAMA: dict[str, Any] = {
    **{"model_type": "llama", "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632},
    **{"num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8},
}


def test_runs_are_averaged_by_device_and_family(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "calibration.json"
    assert read_calibration("H100", "llama", path) is None
    record_run("H100", "llama", 1.2, None, path, busiest_expert=0.2)
    record_run("H100", "llama", 1.4, 1.1, path, busiest_expert=0.4)
    record_run("H100", "bert", 3.0, 0.5, path)
    found = read_calibration("H100", "llama", path)
    assert found is not None and found.describe().endswith("busiest expert 30.0 % of tokens")
    assert (found.step_seconds, found.memory, found.runs) == (pytest.approx(1.3), 1.1, 2)
    assert read_calibration("H100", "bert", path) == Calibration(3.0, 0.5, 1)
    assert read_calibration("A100", "llama", path) is None
    assert [item.name for item in path.parent.iterdir()] == [path.name]  # nothing temporary is left


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        (json.dumps({"version": 1, "calibrations": {"a / b": {"step_seconds": "fast"}}}), "cannot be read"),
        (json.dumps({"version": 1, "calibrations": {"a / b": {"step_seconds": 0.0}}}), "cannot be read"),
        (json.dumps({"version": 1, "calibrations": {"a / b": {"step_seconds": 1, "busiest_expert": 2}}}), "cannot"),
        (json.dumps({"version": 2, "calibrations": {}}), "have version 2"),
    ],
)
def test_a_damaged_file_is_refused_and_stays(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=words) as error:
        read_calibration("a", "b", path)
    assert str(path) in str(error.value) and "Delete the file" in str(error.value)
    with pytest.raises(ConfigError, match=words):
        record_run("a", "b", 1.0, None, path)
    assert path.read_text(encoding="utf-8") == content


@pytest.mark.parametrize("ratio", [0.0, 1e-3, 1e3, math.inf, math.nan])
def test_an_impossible_run_is_not_kept(ratio: float, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no calibration"):
        record_run("a", "b", ratio, None, tmp_path / "calibration.json")
    assert not (tmp_path / "calibration.json").exists()


def test_the_file_is_in_the_cache_of_the_user() -> None:
    assert calibration_file({"XDG_CACHE_HOME": "/c"}) == Path("/c/ds_trainer/calibration.json")
    assert calibration_file({}) == Path.home() / ".cache/ds_trainer/calibration.json"


def test_a_search_takes_the_corrections_into_account() -> None:
    model, cluster, goal = PlannedModel.from_config(LLAMA), Cluster.of("H100-24GB", 1, 2), Goal(4096, 16, "bf16")
    plain = search(model, cluster, goal)
    corrected = search(*Calibration(2.0, 1.5).applied(model, cluster, goal))
    assert plain.best is not None and corrected.best is not None
    assert len(corrected.fitting) < len(plain.fitting)
    assert corrected.best.memory.device * 1.5 <= 24e9
    same = next(plan for plan in plain.fitting if plan.candidate == corrected.best.candidate)
    assert corrected.best.time.seconds == pytest.approx(2 * same.time.seconds, rel=0.05)


def test_a_probe_is_kept_by_the_sizes_of_layers(tmp_path: Path) -> None:
    path, model = tmp_path / "calibration.json", PlannedModel.from_config(LLAMA)
    probe = Probe("gpu", "sdpa", "bf16", (64, 128), (100.0, 120.0), 1.1, 2e9, 0.05, 3.0)
    assert read_probe(model, "bf16", path) is None
    record_run("H100", "llama", 1.2, 1.1, path)
    record_probe(model, replace(probe, loss=1.5), path)
    record_probe(model, probe, path)
    record_run("H100", "llama", 1.4, 1.1, path)
    deeper = PlannedModel.from_config({**LLAMA, "num_hidden_layers": 40})
    assert read_probe(model, "bf16", path) == read_probe(deeper, "bf16", path) == probe
    assert read_probe(model, "fp32", path) is None
    assert read_probe(PlannedModel.from_config({**LLAMA, "intermediate_size": 4096}), "bf16", path) is None
    found = read_calibration("H100", "llama", path)
    assert found is not None and found.runs == 2
    content = json.loads(path.read_text(encoding="utf-8"))
    key = next(iter(content["probes"]))
    content["probes"][key]["layer"] = [0.0, 1.0]
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_probe(model, "bf16", path)
