"""What a training looks at before it begins: the ranks, the machine, the engine's gradient."""

from __future__ import annotations

import json
import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.engine import self_test
from ds_trainer.engine.training_engine import TrainingEngine
from ds_trainer.monitor.doctor import gradients, startup_checks, versions
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import pool
from tests.support.resuming import RunRecord, differences, run


def train(output_dir: Path, **arguments: Any) -> str:
    """Train a step; gives the refusal."""
    values: dict[str, Any] = {"max_steps": 1, "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    args = TrainingArguments(str(output_dir), **{**values, **arguments})
    trainer = Trainer(tiny_llama(), args, train_dataset=RaggedTokens(16))
    try:
        trainer.train()
    except ConfigError as error:
        return str(error)
    trainer.engine.close()
    return ""


def differing_arguments(output_dir: Path) -> tuple[str, str]:
    rank = distributed.rank()
    may = train(
        output_dir, log_level="error" if rank else "info", dataloader_pin_memory=bool(rank), run_name=f"rank {rank}"
    )
    must = train(output_dir, learning_rate=0.1 + rank, max_grad_norm=0.5 * rank)
    return may, must


def test_different_arguments_on_ranks_are_rejected_with_both_values(tmp_path: Path) -> None:
    for may, must in pool(2).run(partial(differing_arguments, tmp_path)):
        assert may == ""
        assert "learning_rate differs: 0.1 on rank 0 (" in must
        assert "but 1.1 on rank 1 (" in must
        assert "deepspeed gradient_clipping differs: 0.0 on rank 0" in must


def differing_versions(output_dir: Path) -> str:
    original = versions.versions
    if distributed.rank() == 1:
        startup_checks.versions = lambda: {**original(), "torch": "2.12.1"}
    try:
        return train(output_dir)
    finally:
        startup_checks.versions = original


def test_a_rank_with_another_version_is_rejected(tmp_path: Path) -> None:
    import torch

    for refusal in pool(2).run(partial(differing_versions, tmp_path)):
        assert refusal.startswith(f"torch differs: {torch.__version__} on rank 0 (")
        assert "but 2.12.1 on rank 1 (" in refusal


def test_output_directories_of_each_machine_may_differ() -> None:
    here = versions.argument_facts(TrainingArguments("a", use_cpu=True))
    there = versions.argument_facts(TrainingArguments("b", use_cpu=True))
    assert {name for name in here if here[name] != there[name]} >= {"output_dir"}
    here = versions.argument_facts(TrainingArguments("a", use_cpu=True, save_on_each_node=True))
    there = versions.argument_facts(TrainingArguments("b", use_cpu=True, save_on_each_node=True))
    assert here == there


# -- the gradient -----------------------------------------------------------------------------------------------------


def wrong_gradient(output_dir: Path, cache: Path, mode: str) -> str:
    original, before = TrainingEngine.backward, dict(os.environ)
    TrainingEngine.backward = lambda self, loss: original(self, loss * 2)  # type: ignore[method-assign]
    os.environ.update(XDG_CACHE_HOME=str(cache), DS_TRAINER_SELF_TEST="auto")
    try:
        return train(output_dir, self_test=mode)
    finally:
        TrainingEngine.backward = original  # type: ignore[method-assign]
        os.environ.update(XDG_CACHE_HOME=before.get("XDG_CACHE_HOME", ""), DS_TRAINER_SELF_TEST="never")


def test_a_wrong_gradient_stops_startup(tmp_path: Path) -> None:
    for mode in ("auto", "always"):
        for refusal in pool(2).run(partial(wrong_gradient, tmp_path / "out", tmp_path / "cache", mode)):
            assert "The engine's gradient is wrong on this installation (ZeRO-1 fp32)" in refusal
            assert "2 times the correct value" in refusal
            assert "self_test=never" in refusal
    assert list(tmp_path.glob("cache/**/self_test/*.json")) == []
    assert pool(2).run(partial(wrong_gradient, tmp_path / "out", tmp_path / "cache", "never")) == ["", ""]


def twice(output_dir: Path, cache: Path) -> list[bool]:
    """Whether each of three starts tested: two alike, one of another stage."""
    before = dict(os.environ)
    os.environ.update(XDG_CACHE_HOME=str(cache), DS_TRAINER_SELF_TEST="auto")
    tested: list[bool] = []
    original = self_test.check_gradient

    def noted(*given: Any) -> Any:
        tested[-1] = True
        return original(*given)

    self_test.check_gradient = noted
    try:
        for stage in (1, 1, 2):
            tested.append(False)
            assert train(output_dir, zero_stage=stage) == ""
    finally:
        self_test.check_gradient = original
        os.environ.update(XDG_CACHE_HOME=before.get("XDG_CACHE_HOME", ""), DS_TRAINER_SELF_TEST="never")
    return tested


def test_the_auto_self_test_runs_once_per_installation_and_stage(tmp_path: Path) -> None:
    assert pool(2).run(partial(twice, tmp_path / "out", tmp_path / "cache")) == [[True, False, True]] * 2
    notes = [json.loads(path.read_text()) for path in (tmp_path / "cache").rglob("self_test/*.json")]
    assert sorted(note["tested"] for note in notes) == ["ZeRO-1 fp32", "ZeRO-2 fp32"]


def test_an_unknown_self_test_mode_in_the_environment_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_TRAINER_SELF_TEST", "sometimes")
    with pytest.raises(ConfigError, match="DS_TRAINER_SELF_TEST='sometimes' must be auto, always or never"):
        gradients.mode_of(TrainingArguments("unused", use_cpu=True))


def run_record(output_dir: Path, mode: str) -> RunRecord:
    return run(str(output_dir / mode), self_test=mode, zero_stage=2, save_strategy="no", max_steps=4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_self_test_does_not_change_the_run(ranks: int, tmp_path: Path) -> None:
    never = pool(ranks).run(partial(run_record, tmp_path, "never"))
    always = pool(ranks).run(partial(run_record, tmp_path, "always"))
    for one, other in zip(always, never, strict=True):
        assert differences(one, other, trained=len(other.batches)) == []


# -- the machine ------------------------------------------------------------------------------------------------------


def test_little_disk_space_is_reported_at_startup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("ds_trainer"), "propagate", True)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    args = TrainingArguments(str(tmp_path / "out"), use_cpu=True)
    assert startup_checks.check_machine(args, 0) == []
    (finding,) = startup_checks.check_machine(args, 2**60)
    assert finding.name == "disk of output_dir"
    assert "At least 1152922 TB are needed" in caplog.text
