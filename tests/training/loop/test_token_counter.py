"""What a run records about its speed: tokens, operations and memory are those that were really there."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.monitor.throughput import ThroughputMeter
from ds_trainer.parallel.deferred_mask import DocumentMask
from ds_trainer.parallel.document_attention import Documents
from ds_trainer.utils.errors import ConfigError
from tests.support.models import LENGTH, PlainLanguageModel, RaggedTokens, Regression, regression_rows, tiny_llama
from tests.support.pool import pool
from tests.support.reference import padded, token_rows, train_with_transformers

STEPS: dict[str, Any] = dict(
    num_train_epochs=2,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=3,
    logging_steps=3,
    train_sampling_strategy="sequential",
)
RUNS: dict[str, dict[str, Any]] = {
    "no": {},
    "all": {"include_num_input_tokens_seen": "all"},
    "true": {"include_num_input_tokens_seen": True},
    "mask": {"include_num_input_tokens_seen": "non_padding"},
    "pad token": {"include_num_input_tokens_seen": "non_padding", "mask": False, "padding": 0},
    "neither": {"include_num_input_tokens_seen": "non_padding", "mask": False},
}


def arguments(output_dir: Any, **changes: Any) -> TrainingArguments:
    values: dict[str, Any] = dict(
        max_steps=3, logging_steps=1, save_strategy="no", disable_tqdm=True, use_cpu=True, per_device_train_batch_size=8
    )
    return TrainingArguments(str(output_dir), **{**values, **changes})


class Padding:
    """As much of a tokenizer as is looked at."""

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id


# -- tokens ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train_with_transformers(
        tmp_path_factory.mktemp("transformers"), {name: {**STEPS, **run} for name, run in RUNS.items()}
    )


def count_tokens(output_dir: str, run: dict[str, Any]) -> dict[str, Any]:
    values = {**STEPS, **run}
    mask, padding = values.pop("mask", True), values.pop("padding", None)
    args = arguments(output_dir, **{"max_steps": -1, **values})
    tokenizer: Any = None if padding is None else Padding(padding)
    data: Any = token_rows(mask)
    trainer = Trainer(tiny_llama(), args, train_dataset=data, data_collator=padded, processing_class=tokenizer)
    output = trainer.train()
    return {"logs": trainer.state.log_history, "metrics": output.metrics, "seen": trainer.state.num_input_tokens_seen}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", RUNS)
def test_input_tokens_are_counted_as_transformers_does(name: str, reference: dict[str, Any], tmp_path: Path) -> None:
    found, wanted = pool(1).run(count_tokens, str(tmp_path), RUNS[name])[0], reference[name]
    assert found["seen"] == wanted["seen"]
    assert (found["seen"] == 0) == (name == "no")

    def counts(run: dict[str, Any]) -> list[tuple[int, int | None]]:
        return [(log["step"], log.get("num_input_tokens_seen")) for log in run["logs"] if "loss" in log]

    *others, last = counts(found)
    assert others == counts(wanted)
    assert last[0] == 8  # max_steps: we log the last step too
    assert len(others) == 2
    keys = {"num_input_tokens_seen", "train_tokens_per_second", "train_runtime"}
    also = [log for log in found["logs"] if "loss" not in log or log["step"] != 8]
    for ours, expected in zip(also, wanted["logs"], strict=True):
        if "loss" in expected:
            assert keys & ours.keys() == keys & expected.keys()
    assert found["metrics"].get("num_input_tokens_seen") == wanted["metrics"].get("num_input_tokens_seen")
    assert set(wanted["metrics"]) | {"total_flos"} <= set(found["metrics"])  # its printer takes that one out


def test_control_the_counting_modes_differ(reference: dict[str, Any]) -> None:
    """Negative control: if all runs counted the same, the parity above would show little."""
    seen = {name: reference[name]["seen"] for name in RUNS}
    assert seen["all"] == seen["true"] == seen["neither"] > seen["mask"] == seen["pad token"] > seen["no"] == 0


def seen_by_layout(output_dir: str, mode: str, batch: int) -> tuple[int, float, list[int]]:
    args = arguments(
        output_dir,
        include_num_input_tokens_seen=mode,
        per_device_train_batch_size=batch,
        max_steps=-1,
        num_train_epochs=1,
        logging_steps=2,
    )
    trainer = Trainer(tiny_llama(), args, train_dataset=RaggedTokens(33))
    trainer.train()
    logs = [log["num_input_tokens_seen"] for log in trainer.state.log_history]
    return trainer.state.num_input_tokens_seen, trainer.state.total_flos, logs


@pytest.mark.cases(1)
@pytest.mark.parametrize("mode", ["all", "non_padding"])
def test_two_ranks_count_what_one_does(mode: str, tmp_path: Path) -> None:
    """33 samples on 2 x 4: in the last micro-step one rank has a dummy batch, which counts nothing."""
    one = pool(1).run(seen_by_layout, str(tmp_path / "1"), mode, 8)
    two = pool(2).run(seen_by_layout, str(tmp_path / "2"), mode, 4)
    data = RaggedTokens(33)
    used = sum(int(row["attention_mask"].sum()) for row in data.rows)
    assert one[0][0] == (33 * LENGTH if mode == "all" else used)
    assert two[0] == two[1] == one[0]


def test_a_model_with_unknown_input_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = arguments(tmp_path, include_num_input_tokens_seen="all")
    trainer = Trainer(Regression(), args, train_dataset=regression_rows(40))
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert trainer.state.num_input_tokens_seen == 0
    records = {id(record): record for record in caplog.records}.values()  # one record may reach two loggers
    assert sum("batches have no input_ids" in record.message for record in records) == 1


def test_counts_continue_after_resuming(tmp_path: Path) -> None:
    values: dict[str, Any] = dict(include_num_input_tokens_seen="all", save_strategy="steps", save_steps=2)
    first = Trainer(tiny_llama(), arguments(tmp_path, **values, max_steps=3), train_dataset=RaggedTokens(24))
    first.train()
    second = Trainer(tiny_llama(), arguments(tmp_path, **values, max_steps=3), train_dataset=RaggedTokens(24))
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert second.state.num_input_tokens_seen == first.state.num_input_tokens_seen == 24 * LENGTH
    assert second.state.total_flos == pytest.approx(first.state.total_flos, rel=1e-12)


def test_counting_reads_nothing_from_the_device_until_needed(tmp_path: Path) -> None:
    """Tensors on the meta device have shapes and no values: reading one fails."""
    args = arguments(tmp_path, include_num_input_tokens_seen="non_padding")
    trainer = Trainer(tiny_llama(), args, train_dataset=RaggedTokens(8))
    trainer.train()
    rule, padding = trainer._ds_trainer.telemetry.flop_rule(trainer.model), None
    work = trainer._ds_trainer.telemetry.count_work(
        trainer.model, ThroughputMeter(), trainer.layout, None, padding, None
    )
    assert rule is not None
    batch = {name: torch.ones(3, 5, dtype=torch.long, device="meta") for name in ("input_ids", "attention_mask")}
    for _ in range(2):
        work.add(batch)
    assert trainer.current_flos > 0
    with pytest.raises(RuntimeError, match="meta"):  # negative control: here the count is read
        trainer.store_flos()


# -- operations --------------------------------------------------------------------------------------------------------


def test_flops_of_a_run_are_those_of_its_batches(tmp_path: Path) -> None:
    model = tiny_llama()
    trainer = Trainer(model, arguments(tmp_path), train_dataset=RaggedTokens(24))
    output = trainer.train()
    rule = trainer._ds_trainer.telemetry.flop_rule(trainer.model)
    assert rule is not None and rule.transformer is not None
    assert trainer.state.total_flos == output.metrics["total_flos"] == pytest.approx(rule.flops(24, LENGTH))
    assert json.loads((tmp_path / "trainer_state.json").read_text())["total_flos"] == trainer.state.total_flos


class CountsItself(Regression):
    """Knows what it costs."""

    def floating_point_ops(self, inputs: Any) -> float:
        return 1000.0 * len(inputs["x"])


class TrainerCounts(Trainer):
    def floating_point_ops(self, inputs: Any) -> float:
        return 7.0


def test_models_and_trainers_may_count_for_themselves(tmp_path: Path) -> None:
    for trainer_class, model, wanted in (
        (Trainer, CountsItself(), 1000.0 * 24),
        (TrainerCounts, Regression(), 7.0 * 3),
        (Trainer, Regression(), 0.0),
    ):
        trainer = trainer_class(model, arguments(tmp_path), train_dataset=regression_rows(24))
        trainer.train()
        assert trainer.state.total_flos == wanted
        log = trainer.state.log_history[0]
        assert ("tflops_per_device" in log) == (wanted > 0)
        assert "tokens_per_second" not in log and log["samples_per_second"] > 0


def test_mfu_needs_a_known_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DS_TRAINER_PEAK_TFLOPS", raising=False)
    trainer = Trainer(tiny_llama(), arguments(tmp_path), train_dataset=RaggedTokens(24))
    trainer.train()
    assert all("mfu" not in log for log in trainer.state.log_history)
    assert "counted from the architecture); no MFU: unknown peak" in capsys.readouterr().out

    monkeypatch.setenv("DS_TRAINER_PEAK_TFLOPS", "0.5")
    trainer = Trainer(tiny_llama(), arguments(tmp_path), train_dataset=RaggedTokens(24))
    trainer.train()
    for log in trainer.state.log_history[:3]:
        assert log["mfu"] == pytest.approx(log["tflops_per_device"] / 0.5)
    assert "peak 500 GFLOP/s in fp32" in capsys.readouterr().out

    monkeypatch.setenv("DS_TRAINER_PEAK_TFLOPS", "much")
    with pytest.raises(ConfigError, match="DS_TRAINER_PEAK_TFLOPS='much'"):
        Trainer(tiny_llama(), arguments(tmp_path), train_dataset=RaggedTokens(24)).train()


class Slow(RaggedTokens):
    """Takes its time: 20 ms a sample."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        import time

        time.sleep(0.02)
        return super().__getitem__(index)


def test_rates_in_a_log_are_consistent(tmp_path: Path) -> None:
    trainer = Trainer(tiny_llama(), arguments(tmp_path), train_dataset=Slow(24))
    output = trainer.train()
    rule = trainer._ds_trainer.telemetry.flop_rule(trainer.model)
    assert rule is not None
    steps = trainer.state.log_history[:3]
    for log in steps:
        assert {"loss", "grad_norm", "learning_rate", "epoch", "step", "memory_gb"} <= log.keys()
        assert log["tokens_per_second"] == pytest.approx(LENGTH * log["samples_per_second"])
        wanted = log["samples_per_second"] * rule.flops(1, LENGTH) / 1e12
        assert log["tflops_per_device"] == pytest.approx(wanted)
        assert log["data_wait"] * log["step_seconds"] >= 0.15  # 8 samples of 20 ms
        assert log["data_wait"] <= 1.0
    assert output.metrics["train_tokens_per_second"] == pytest.approx(
        LENGTH * output.metrics["train_samples_per_second"]
    )
    quick = Trainer(tiny_llama(), arguments(tmp_path / "quick"), train_dataset=RaggedTokens(24))
    quick.train()
    assert quick.state.log_history[2]["data_wait"] < 0.3


def rates_of_two(output_dir: str) -> list[dict[str, float]]:
    args = arguments(output_dir, per_device_train_batch_size=4, max_steps=2)
    trainer = Trainer(tiny_llama(), args, train_dataset=RaggedTokens(24))
    trainer.train()
    return [log for log in trainer.state.log_history if "loss" in log]


def test_samples_count_for_the_job_and_flops_per_device(tmp_path: Path) -> None:
    for log in pool(2).run(rates_of_two, str(tmp_path))[0]:
        job_flops = log["samples_per_second"] * Trainer(
            tiny_llama(), arguments(tmp_path / "x"), train_dataset=RaggedTokens(4)
        ).floating_point_ops({"input_ids": torch.ones(1, LENGTH, dtype=torch.long)})
        assert log["tflops_per_device"] == pytest.approx(job_flops / 2 / 1e12)


def test_flops_of_packed_samples_exclude_attention_between_them(tmp_path: Path) -> None:
    trainer = Trainer(tiny_llama(), arguments(tmp_path), train_dataset=RaggedTokens(8))
    rule = trainer._ds_trainer.telemetry.flop_rule(trainer.model)
    assert rule is not None
    tokens = torch.ones(2, 12, dtype=torch.long)
    positions = torch.tensor([[*range(5), *range(7)], [*range(12)]])
    kept = positions.clone()
    wanted = rule.flops(1, 5) + rule.flops(1, 7) + rule.flops(1, 12)
    assert trainer.floating_point_ops({"input_ids": tokens, "position_ids": positions}) == pytest.approx(wanted)
    assert torch.equal(positions, kept)
    unpacked = rule.flops(2, 12)
    assert unpacked > wanted
    mask = torch.ones_like(tokens)  # rules the attention instead
    assert (
        trainer.floating_point_ops({"input_ids": tokens, "position_ids": positions, "attention_mask": mask}) == unpacked
    )
    assert trainer.floating_point_ops({"input_ids": tokens, "position_ids": positions.to("meta")}) == unpacked
    mask = DocumentMask(Documents.of(positions))  # of a bidirectional model, whose positions may begin at 2
    batch = {"input_ids": tokens, "position_ids": positions + 2, "attention_mask": mask}
    assert trainer.floating_point_ops(batch) == pytest.approx(wanted)


def test_encoder_and_decoder_lengths_are_counted_separately(tmp_path: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config)
    rows = [{"input_ids": torch.arange(3, 15), "labels": torch.arange(3, 8)} for _ in range(8)]
    trainer = Trainer(model, arguments(tmp_path, max_steps=1), train_dataset=rows)
    trainer.train()
    rule = trainer._ds_trainer.telemetry.flop_rule(trainer.model)
    assert rule is not None and rule.transformer is not None
    assert trainer.state.total_flos == pytest.approx(rule.flops(8, 12, 5))


def test_a_custom_model_counts_six_flops_per_parameter(tmp_path: Path) -> None:
    model = PlainLanguageModel()
    trainer = Trainer(model, arguments(tmp_path), train_dataset=RaggedTokens(24))
    parameters = sum(p.numel() for p in model.parameters()) - model.embedding.weight.numel()
    batch = {"input_ids": torch.ones(3, 5, dtype=torch.long)}
    assert trainer.floating_point_ops(batch) == 6 * parameters * 15
    assert trainer.floating_point_ops({"input_ids": torch.ones(3, 5)}) == 0.0  # no token numbers
    model.head.requires_grad_(False)
    assert trainer.floating_point_ops(batch) == 6 * parameters * 15  # asked once a training


# -- memory and metrics ------------------------------------------------------------------------------------------------


class TakesMemory(nn.Module):
    """Keeps 64 MB from its first step on, and needs as much again for a moment in each."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Regression()
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        import time

        if self.kept is None:
            self.kept = torch.ones(16, 2**20)
        brief = torch.ones(16, 2**20)
        time.sleep(0.05)  # long enough to be noticed
        del brief
        return self.model(x, labels)


def memory_of_a_run(output_dir: str, **changes: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    args = arguments(output_dir, **{"skip_memory_metrics": False, "eval_strategy": "steps", "eval_steps": 2, **changes})
    rows = regression_rows(24)
    trainer = Trainer(TakesMemory(), args, train_dataset=rows, eval_dataset=rows)
    trained = trainer.train().metrics
    inside = next(log for log in trainer.state.log_history if "eval_loss" in log)
    return trained, inside, trainer.evaluate()


def memory_keys(metrics: dict[str, Any]) -> set[str]:
    return {name for name in metrics if "_mem_" in name}


def test_memory_of_every_stage_is_reported(tmp_path: Path) -> None:
    trained, inside, evaluated = pool(1).run(memory_of_a_run, str(tmp_path))[0]
    stages = {f"{stage}_mem_cpu_{what}_delta" for stage in ("init", "train") for what in ("alloc", "peaked")}
    assert memory_keys(trained) == {*stages, "before_init_mem_cpu"}
    assert memory_keys(inside) == set()  # within the training, and counted to it
    assert memory_keys(evaluated) == {"eval_mem_cpu_alloc_delta", "eval_mem_cpu_peaked_delta"}
    assert trained["train_mem_cpu_alloc_delta"] > 60 * 2**20
    assert trained["train_mem_cpu_peaked_delta"] > 60 * 2**20
    assert all(type(trained[name]) is int for name in memory_keys(trained))


def memory_without(output_dir: str) -> set[str]:
    trained, _, evaluated = memory_of_a_run(output_dir, skip_memory_metrics=True)
    return memory_keys(trained) | memory_keys(evaluated)


def test_memory_is_left_out_by_default(tmp_path: Path) -> None:
    assert pool(1).run(memory_without, str(tmp_path))[0] == set()


def test_metrics_are_printed_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(Regression(), arguments(tmp_path), train_dataset=regression_rows(4))
    trainer.log_metrics("train", {"train_runtime": 61.234, "train_loss": 0.123456, "epoch": 1.0})
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "***** train metrics *****",
        "  epoch         =        1.0",
        "  train_loss    =     0.1235",
        "  train_runtime = 0:01:01.23",
    ]
    trainer.save_metrics("train", {"train_loss": 0.123456, "epoch": 1.0})
    trainer.save_metrics("eval", {"eval_loss": 0.5, "epoch": 2.0})
    trainer.save_metrics("test", {"test_loss": 0.7}, combined=False)
    assert json.loads((tmp_path / "train_results.json").read_text()) == {"train_loss": 0.123456, "epoch": 1.0}
    assert json.loads((tmp_path / "test_results.json").read_text()) == {"test_loss": 0.7}
    together = {"train_loss": 0.123456, "eval_loss": 0.5, "epoch": 2.0}
    assert json.loads((tmp_path / "all_results.json").read_text()) == together
