"""The prediction of a run: its inputs, what it says if something is unknown, and its comparison at the end.

The speed of CPUs is not predicted, so times are compared for a run that is said to be on H100s.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.planner.calibration import Calibration, calibration_file, read_calibration
from ds_trainer.planner.candidate import Candidate
from ds_trainer.planner.memory.elements import elements_of
from ds_trainer.planner.planned_model import PlannedModel
from ds_trainer.recipes.language_model_job import TokenBlocks
from ds_trainer.training.job_devices import JobDevices, cpu_cluster, gpu_cluster
from ds_trainer.training.planning.candidates import SequenceLength, sequence_length, state_bytes
from ds_trainer.training.planning.run_estimator import RunEstimate
from tests.support.models import Regression, regression_rows
from tests.support.pool import pool

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **HEADS, **changes}))


def run(model: nn.Module, rows: Any, folder: Path, **given: Any) -> tuple[Trainer, dict[str, float]]:
    values: dict[str, Any] = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    args = TrainingArguments(str(folder), **{"max_steps": 3, **values, **given})
    trainer = Trainer(model, args, train_dataset=rows)
    return trainer, trainer.train().metrics


def tokens(*lengths: int) -> list[dict[str, torch.Tensor]]:
    ones = [torch.ones(length, dtype=torch.int64) for length in lengths]
    return [{"input_ids": row, "labels": row} for row in ones]


def test_the_length_of_samples_comes_before_limits() -> None:
    import numpy as np
    from datasets import Dataset

    args, bare = SimpleNamespace(max_length=512), SimpleNamespace()
    blocks = TokenBlocks(np.zeros(100, dtype=np.uint8), 33)
    assert sequence_length(args, blocks, "input_ids", 64) == SequenceLength(33, "the training data", True)
    found = sequence_length(args, tokens(3, 9, 5), "input_ids", 64)
    assert (found.tokens, found.of_data) == (9, True)
    table = Dataset.from_dict({"input_ids": [[1] * 4, [1] * 7]})
    assert sequence_length(args, table, "input_ids", 64).tokens == 7
    assert sequence_length(args, iter(tokens(9)), "input_ids", 64) == SequenceLength(512, "max_length", False)
    assert sequence_length(bare, tokens(9), "pixel_values", 64).tokens == 64
    assert sequence_length(bare, None, "input_ids", 131072).tokens == 8192


def test_samples_whose_reading_runs_code_of_the_user_are_not_read() -> None:
    from datasets import Dataset

    def transform(rows: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError("was read")

    table = Dataset.from_dict({"input_ids": [[1, 2]]}).with_transform(transform)
    assert sequence_length(SimpleNamespace(), table, "input_ids", 64) == SequenceLength(
        64, "the positions of the model", False
    )


def test_figures_of_devices() -> None:
    cluster, is_gpu, is_known = gpu_cluster("NVIDIA H100 80GB HBM3", 85_017_493_504, 2, 8)
    assert (cluster.board.memory, cluster.world_size, is_gpu, is_known) == (85, 16, True, True)
    other, _, is_known = gpu_cluster("Somebody's GPU", 10_000_000_001, 1, 2)
    assert (other.device, other.board.memory, is_known) == ("Somebody's GPU", 10, False)
    assert cpu_cluster(1, 2, 8.0, 4).peaks.fp32 == pytest.approx(0.2)


def test_optimizers_have_states_of_different_sizes() -> None:
    names = ("AdamW", "adamw_torch_fused", "Lion", "adamw_bnb_8bit", "SGD", "Somebody's")
    assert [state_bytes(name) for name in names] == [8, 8, 4, 2, 0, 8]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_module_has_the_elements_of_its_configuration(tp: int) -> None:
    model = llama(tie_word_embeddings=False)
    of_module = elements_of(PlannedModel.from_module(model), tp)
    assert of_module == elements_of(PlannedModel.from_config(model.config.to_dict()), tp)


def test_a_run_on_cpus_has_its_memory_predicted_and_no_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, metrics = run(llama(), tokens(*[16] * 40), tmp_path, max_steps=4, logging_steps=1)
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("  estimate ")]
    assert " of tensors on a rank (largest: " in line and "a step" not in line
    assert not [name for name in metrics if name.startswith(("predicted_", "measured_")) or name.endswith("_error")]
    assert "predicted" not in (tmp_path / "metrics.jsonl").read_text()
    last = out.rstrip().splitlines()[-1]
    assert last.startswith("step 4/4") and "train time" in last
    assert all(len(line) <= 110 for line in out.splitlines() if line.startswith("step "))
    estimate = trainer._ds_trainer.estimator.estimate
    assert estimate is not None and estimate.candidate.global_batch == trainer.get_total_train_batch_size()


def on_gpus(folder: Path) -> Any:
    """The estimator of a run, with an estimate for H100s instead of CPUs."""
    trainer, _ = run(llama(), tokens(*[16] * 40), folder, max_steps=1)
    estimator = trainer._ds_trainer.estimator
    estimator.estimate = replace(estimator.estimate, devices=JobDevices(*gpu_cluster("NVIDIA H100", 85 * 10**9, 1, 8)))
    return estimator


def test_times_and_memory_of_gpus_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    estimator = on_gpus(tmp_path)
    assert " a step (" in estimator.text()
    found = estimator.metrics(0.5, 10**9)
    assert found["step_seconds_error"] == pytest.approx(0.5 / found["predicted_step_seconds"] - 1, rel=0.01)
    assert found["measured_step_seconds"] == 0.5
    capsys.readouterr()
    estimator.print_comparison(True)
    assert capsys.readouterr().out.startswith("ds_trainer: a step took 500 ms (predicted: ")
    without = estimator.metrics(None, None)  # one step alone is not measured
    assert "measured_step_seconds" not in without and "predicted_step_seconds" in without
    assert estimator.comparison() is None


@pytest.mark.parametrize(
    ("memory", "is_gpu", "unknown", "one_pass"),
    [
        (80, True, "", True),
        (0.5, True, "", False),
        (80, True, "the layers are not known", False),
        (0.1, False, "", True),
    ],
)
def test_a_chunked_loss_has_one_pass_where_a_device_has_room(
    memory: float, is_gpu: bool, unknown: str, one_pass: bool
) -> None:
    cluster = gpu_cluster("NVIDIA H100 80GB HBM3", int(memory * 1e9) or 1, 1, 1)[0]
    cluster = replace(cluster, board=replace(cluster.board, memory=memory))
    model = PlannedModel.from_module(llama(vocab_size=4096))
    run = Candidate(1, 64, stage=1, chunked_loss=True)
    estimate = RunEstimate(model, run, JobDevices(cluster, is_gpu, is_gpu), unknown)
    assert estimate.in_one_pass().candidate.one_pass == one_pass
    whole = replace(estimate, candidate=replace(run, chunked_loss=False))
    assert not whole.in_one_pass().candidate.one_pass


def test_what_is_not_known_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, metrics = run(Regression(), regression_rows(40), tmp_path)
    assert "because the layers of Regression are not known" in capsys.readouterr().out
    assert not [name for name in metrics if name.startswith("predicted_")]
    run(llama(), Stream(), tmp_path)
    assert "because the length of the samples is not known" in capsys.readouterr().out
    run(llama(), tokens(*[16] * 40), tmp_path, torch_autocast="bf16")
    assert "because with autocast they have several dtypes" in capsys.readouterr().out


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([{"input_ids": torch.ones(8, dtype=torch.int64), "labels": torch.ones(8, dtype=torch.int64)}] * 40)


class Unreadable(Regression):
    """Its configuration is an object of the user that raises."""

    @property
    def config(self) -> Any:
        raise RuntimeError("no such thing")


def test_a_model_that_cannot_be_read_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, _ = run(Regression(), regression_rows(40), tmp_path)
    assert trainer._ds_trainer.estimator.read(trainer.model) is trainer._ds_trainer.estimator.read(trainer.model)
    estimator = trainer._ds_trainer.estimator
    estimator.release()
    trainer.model = Unreadable()
    assert estimator.predict(trainer._ds_trainer.inputs(), trainer._ds_trainer.compiled, trainer.layout) is None
    assert estimator.text() == "none, because Unreadable cannot be planned: RuntimeError no such thing"
    assert estimator.metrics(1.0, None) == {} and estimator.comparison() is None


def peak_of_ranks(folder: str) -> dict[str, float]:
    """What a rank reports whose GPU had 10 or 20 GB; the last rank has no estimate."""
    trainer, _ = run(Regression(), regression_rows(40), Path(folder))
    if trainer.args.process_index == 1:
        trainer._ds_trainer.estimator.estimate = None
    return trainer._ds_trainer.estimator.metrics(1.0, 10**10 * (1 + trainer.args.process_index))


def test_a_rank_without_an_estimate_keeps_no_other_waiting(tmp_path: Path) -> None:
    with_estimate, without = pool(2).run(peak_of_ranks, str(tmp_path))
    assert with_estimate["measured_peak_memory_bytes"] == 2e10
    assert without == {}


def test_a_calibrated_prediction_is_nearer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    estimator = on_gpus(tmp_path)
    plain, name = estimator.estimate, estimator.estimate.devices.cluster.device
    first = estimator.metrics(0.04, None)["predicted_step_seconds"]
    assert not calibration_file().exists()

    def calibrated(seconds: float) -> Calibration:
        estimator._records = True
        estimator.metrics(seconds, None, 0.25)
        kept = read_calibration(name, "llama")
        assert kept is not None
        return kept

    kept = calibrated(2 * first)
    assert (kept.runs, kept.busiest_expert) == (1, 0.25) and kept.step_seconds == pytest.approx(2, rel=1e-3)
    estimator.estimate = replace(plain, calibration=kept)
    assert "corrected by 1 run: time x 2.00" in estimator.text()
    assert estimator.metrics(None, None)["predicted_step_seconds"] == pytest.approx(2 * first, rel=1e-3)
    # A second run adds its ratio to the uncorrected prediction, not to the corrected one.
    assert calibrated(4 * first).step_seconds == pytest.approx(3, rel=1e-2)


def test_a_calibration_on_cpus_keeps_nothing_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run(llama(), tokens(*[16] * 40), tmp_path, calibrate_planner=True)
    assert "calibrate_planner=True: nothing was kept" in caplog.text
    assert not calibration_file().exists()


def test_a_damaged_file_stops_no_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    calibration_file().parent.mkdir(parents=True)
    calibration_file().write_text("{", encoding="utf-8")
    run(llama(), tokens(*[16] * 40), tmp_path)
    assert "cannot be read: JSONDecodeError" in capsys.readouterr().out
