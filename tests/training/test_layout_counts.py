"""Samples, tokens, operations and steps of a run: every layout counts what one process does for the same batches."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_trainer import Trainer
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.config.compiler import compile_config
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.loop.run_plan import RunPlan, batch_plan_of
from ds_trainer.training.overrides.data_loading import DataLoading
from ds_trainer.utils.errors import ConfigError
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import pool
from tests.support.predictions import arguments
from tests.training.test_own_steps import Classifier

SAMPLES = 21  # with global batches of 8: the last one is ragged, and the last micro-step too


def counts(output_dir: str, sizes: dict[str, int], micro_batch: int, mode: str, smoothing: float) -> dict[str, Any]:
    args = arguments(
        output_dir,
        **sizes,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        max_grad_norm=0.0,
        include_num_input_tokens_seen=mode,
        label_smoothing_factor=smoothing,
    )
    trainer = Trainer(tiny_llama(), args, train_dataset=RaggedTokens(SAMPLES))
    metrics = trainer.train().metrics
    logs = [log for log in trainer.state.log_history if "loss" in log]
    found: dict[str, Any] = {
        "steps": (trainer.state.global_step, trainer.state.max_steps, trainer.state.epoch),
        "tokens seen": [log.get("num_input_tokens_seen") for log in logs],
        "operations": (trainer.state.total_flos, metrics["total_flos"]),
        "batch": trainer.get_total_train_batch_size(args),
        "of the engine": trainer.engine.deepspeed.train_batch_size(),
        "losses": [log["loss"] for log in logs],
        "grad_norms": [log["grad_norm"] for log in logs],
    }
    for what in ("samples", "tokens"):
        found[what] = round(metrics[f"train_{what}_per_second"] * metrics["train_runtime"])
    trainer.engine.close()
    return found


LAYOUTS = {
    "dp 2": (2, {}, 2),
    "tp 2": (2, {"tensor_parallel_size": 2}, 4),
    "sp 2": (2, {"sequence_parallel_size": 2}, 4),
    "cp 2": (2, {"context_parallel_size": 2}, 4),
    "dp 2 x tp 2": (4, {"tensor_parallel_size": 2}, 2),
    "tp 2 x sp 2": (4, {"tensor_parallel_size": 2, "sequence_parallel_size": 2}, 4),
}


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (found,) = pool(1).run(counts, str(tmp_path_factory.mktemp("one")), {}, 4, "non_padding", 0.1)
    return dict(found)


def test_one_process_counts_correctly(of_one_process: dict[str, Any]) -> None:
    rows = RaggedTokens(SAMPLES).rows
    tokens = sum(int(row["attention_mask"].sum()) for row in rows)  # without padding, as asked for
    assert of_one_process["samples"] == SAMPLES and of_one_process["tokens"] == tokens
    assert of_one_process["tokens seen"][-1] == tokens
    assert of_one_process["batch"] == of_one_process["of the engine"] == 8
    assert of_one_process["steps"] == (3, 3, 1.0)


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_counts_like_one_process(name: str, of_one_process: dict[str, Any], tmp_path: Path) -> None:
    """Also with label smoothing, whose sums over tokens are sharded too."""
    world, sizes, micro_batch = LAYOUTS[name]
    numbers = ("losses", "grad_norms", "operations")
    for found in pool(world).run(counts, str(tmp_path), sizes, micro_batch, "non_padding", 0.1):
        for what, wanted in of_one_process.items():
            assert found[what] == (pytest.approx(wanted, rel=1e-5) if what in numbers else wanted), what


def all_ranks_count(*job: Any) -> dict[str, Any]:
    is_replica_leader = ParallelLayout.is_replica_leader
    ParallelLayout.is_replica_leader = lambda self, rank: True  # type: ignore[method-assign]
    try:
        return counts(*job)
    finally:
        ParallelLayout.is_replica_leader = is_replica_leader  # type: ignore[method-assign]


def test_control_a_replica_that_counts_on_all_ranks_is_detected(of_one_process: dict[str, Any], tmp_path: Path) -> None:
    """Negative control."""
    job = (str(tmp_path), {"tensor_parallel_size": 2}, 4, "non_padding", 0.1)
    for found in pool(2).run(all_ranks_count, *job):
        assert found["tokens"] == 2 * of_one_process["tokens"]


def test_impossible_layouts_are_rejected_before_a_process_group_exists(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def must_not_start(device_type: str) -> None:
        raise AssertionError("a process group was started")

    monkeypatch.setattr("ds_trainer.training.startup.process_setup.start_process_group", must_not_start)

    def refusal(world: int, **sizes: Any) -> str:
        for name, value in dict(WORLD_SIZE=world, RANK=0, LOCAL_RANK=0, MASTER_ADDR="nowhere", MASTER_PORT=1).items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(ConfigError) as error:
            Trainer(tiny_llama(), arguments(tmp_path, **sizes), train_dataset=RaggedTokens(8))
        return str(error.value)

    assert "Choose tensor 4 or tensor 2 or tensor 8, or start 9 ranks." in refusal(8, tensor_parallel_size=3)
    message = refusal(8, sequence_parallel_size=8)
    assert "sequence_parallel_size=8 (argument): 4 query heads cannot be divided among 8" in message
    assert "Nearest sizes that this model supports on 8 ranks: sequence 4 or sequence 2 or data" in message
    assert "of at most 64 tokens are too short for the 128 chunks" in refusal(64, context_parallel_size=64)
    assert "auto_find_batch_size=True" in refusal(2, tensor_parallel_size=2, auto_find_batch_size=True)


# -- arithmetic --------------------------------------------------------------------------------------------------------

small = st.integers(1, 4)


@given(small, small, small, small, st.integers(1, 9), st.integers(1, 5), st.integers(1, 500), st.booleans())
def test_all_batch_sizes_come_from_the_batch_plan(
    dp: int, tp: int, cp: int, sp: int, micro_batch: int, accumulation: int, samples: int, drop_last: bool
) -> None:
    world = dp * tp * cp * sp
    sizes = {"tensor_parallel_size": tp, "context_parallel_size": cp, "sequence_parallel_size": sp}
    batch = {"per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": accumulation}
    wanted = micro_batch * accumulation * world // (tp * cp * sp)
    args = TrainingArguments("out", **sizes, **batch, dataloader_drop_last=drop_last, use_cpu=True)  # type: ignore[arg-type]
    layout = ParallelLayout.of(args, world)
    plan = batch_plan_of(args, layout)
    hooks = DataLoading()
    hooks._ds_trainer = SimpleNamespace(layout=layout)  # type: ignore[assignment]
    assert hooks.get_total_train_batch_size(args) == plan.global_batch_size == wanted
    assert plan.describe().startswith(f"{wanted} = {micro_batch} per device x {accumulation} accumulation x {dp} ")
    # The configuration: DeepSpeed multiplies these by the size of the data-parallel world that our mpu tells it.
    compiled = compile_config(args, layout)
    configured = compiled.get("train_micro_batch_size_per_gpu") * compiled.get("gradient_accumulation_steps")
    assert configured * layout.dp == wanted
    # Steps: as those of one process with the same global batch.
    alone = BatchPlan(ParallelLayout(1), micro_batch * dp, accumulation, drop_last)
    assert plan.micro_steps(samples) == alone.micro_steps(samples) and plan.steps(samples) == alone.steps(samples)
    if plan.micro_steps(samples):
        assert RunPlan.of(args, plan.micro_steps(samples)) == RunPlan.of(args, alone.micro_steps(samples))
    # Samples: those of all replicas in a micro-step are those of one process.
    for index in range(min(3, plan.micro_steps(samples))):
        positions = [position for rank in range(dp) for position in plan.rank_samples(index, rank, samples)]
        assert positions == list(alone.rank_samples(index, 0, samples))


@given(small, small, small, small, st.integers(1, 9), st.integers(1, 5), st.integers(1, 400))
def test_a_batch_size_in_the_file_must_match_the_batch_plan(
    dp: int, tp: int, cp: int, sp: int, micro_batch: int, accumulation: int, configured: int
) -> None:
    sizes = {"tensor_parallel_size": tp, "context_parallel_size": cp, "sequence_parallel_size": sp}
    batch = {"per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": accumulation}

    def compiled(size: int) -> None:
        args = TrainingArguments("out", **sizes, **batch, deepspeed={"train_batch_size": size})  # type: ignore[arg-type]
        compile_config(args, ParallelLayout.of(args, dp * tp * cp * sp))

    right = micro_batch * accumulation * dp
    compiled(right)
    if configured != right:
        with pytest.raises(ConfigError, match=f"= {right}. Write"):
            compiled(configured)


def batches_of_this_rank(library: str, output_dir: str, changes: dict[str, Any]) -> list[list[int]]:
    library_of = importlib.import_module(library)
    found: list[list[int]] = []

    def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        found.append([sample["index"] for sample in samples])
        return {"x": torch.ones(len(samples), 4), "labels": torch.zeros(len(samples), dtype=torch.int64)}

    values: dict[str, Any] = dict(num_train_epochs=2, per_device_train_batch_size=2, seed=5, use_cpu=True)
    values |= dict(report_to="none", disable_tqdm=True, save_strategy="no", remove_unused_columns=False)
    args = library_of.TrainingArguments(output_dir, **{**values, **changes})
    data = [{"index": index} for index in range(22)]
    trainer = library_of.Trainer(Classifier(), args, train_dataset=data, data_collator=collate)
    trainer.train()
    if library == "ds_trainer":
        trainer.engine.close()
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"data_seed": 9, "gradient_accumulation_steps": 2},
        {"train_sampling_strategy": "sequential"},
        {"dataloader_drop_last": True},
    ],
)
def test_two_ranks_have_the_batches_that_transformers_gives_them(changes: dict[str, Any], tmp_path: Any) -> None:
    """But for the end of an epoch, which transformers fills with samples that were there before."""
    theirs, ours = (
        pool(2).run(batches_of_this_rank, library, str(tmp_path / library), changes)
        for library in ("transformers", "ds_trainer")
    )
    steps = 5 if "dataloader_drop_last" in changes else 6
    for one, other in zip(theirs, ours, strict=True):
        assert len(one) == len(other) == 2 * steps
        whole = [index for index in range(2 * steps) if index % steps < 5]
        assert [one[index] for index in whole] == [other[index] for index in whole]
    if steps == 6:
        samples = [[index for rank in ours for batch in rank[6 * e : 6 * e + 6] for index in batch] for e in (0, 1)]
        assert [sorted(one) for one in samples] == [list(range(22))] * 2
