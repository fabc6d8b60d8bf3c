"""Loads of divided experts in metrics and report: those that the routers decide, counted once, without padding.

And what happens on one rank alone and ends or changes a step of all: no room for rows, an overflow.
"""

from __future__ import annotations

import itertools
import math
import re
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.config.rules.precision_rules import PRECISION
from ds_trainer.monitor.report.contents import report_of
from ds_trainer.monitor.report.page import report_page
from ds_trainer.monitor.report.run_files import RunFiles
from ds_trainer.parallel import expert_exchange
from ds_trainer.training.model import expert_division
from ds_trainer.training.planning.run_estimator import RunEstimator
from tests.support.compare import assert_equal, weight_distance
from tests.support.expert_models import maker, mixture
from tests.support.pool import pool
from tests.support.runs import compatibility_of, train_and_report
from tests.training.test_expert_parallel import samples


def _train(directory: Path, to_one: bool, arguments: dict[str, Any]) -> list[torch.Tensor]:
    """Trains; the experts that this rank's routers have chosen in training, ``[layers][n]``."""
    model = mixture("qwen3_moe", to_one_expert=to_one)
    chosen: list[list[torch.Tensor]] = [[], []]
    every: list[int] = []
    masks: list[torch.Tensor] = []

    def record(calls: list[torch.Tensor], module: torch.nn.Module, args: Any, output: Any) -> None:
        if module.training and torch.is_grad_enabled():  # else it is a comparison
            calls.append(output[-1][masks[-1]].flatten())
            every.append(output[-1].numel())

    values = dict(per_device_train_batch_size=4, max_steps=2, logging_steps=2, learning_rate=0.0, save_strategy="no")
    values |= dict(expert_parallel_size=2, self_test="never", use_cpu=True, **arguments)
    trainer = Trainer(model, TrainingArguments(str(directory), **values), train_dataset=samples())
    trainer.evaluate(samples()[:4])  # is not counted
    gates = [layer.mlp.gate for layer in model.model.layers]
    model.register_forward_pre_hook(lambda *a: masks.append(a[2]["input_ids"].flatten() != 0), with_kwargs=True)
    hooks = [gate.register_forward_hook(partial(record, calls)) for gate, calls in zip(gates, chosen, strict=True)]
    with (
        mock.patch.object(expert_exchange, "time", SimpleNamespace(perf_counter=itertools.count().__next__)),
        mock.patch.object(RunEstimator, "metrics", return_value={}) as metrics,
    ):
        trainer.train()
    (share,) = [row["expert_busiest_share"] for row in trainer.state.log_history if "loss" in row]
    assert metrics.call_args.args[2] == share  # for later plans
    for hook in hooks:
        hook.remove()
    trainer.engine.close()
    assert sum(map(torch.numel, chosen[0])) < sum(every) / 2  # there is padding
    step = 2 if arguments.get("activation_checkpointing") else 1  # the second time is the recomputation
    return [torch.cat(calls[::step]) for calls in chosen]


PACKED = {"packing": True, "max_length": 34, "zero_stage": 1, "per_device_train_batch_size": 2}


@pytest.mark.parametrize(
    "arguments",
    [
        {"zero_stage": 1, "activation_checkpointing": False},
        {"zero_stage": 1, "activation_checkpointing": True, "gradient_accumulation_steps": 2},
        PACKED,
        {**PACKED, "context_parallel_size": 2},
    ],
    ids=["plain", "recomputed", "packed", "packed-cp2"],
)
def test_loads_are_those_of_the_routers(arguments: dict[str, Any], tmp_path: Path) -> None:
    recomputes = bool(arguments.get("activation_checkpointing"))
    found = pool(2).run(partial(_train, tmp_path, False, arguments))
    files = RunFiles.read(tmp_path)
    (record,) = [one for one in files.records if "loss" in one]
    for layer in range(2):
        counts = sum(torch.bincount(chosen[layer], minlength=4) for chosen in found).double()
        share = counts / counts.sum()
        key = f"experts/model.layers.{layer}.mlp.experts/"
        entropy = float(-(share * share.log()).nansum() / torch.tensor(4.0).log())
        assert record[f"{key}entropy"] == pytest.approx(entropy, rel=1e-6)
        assert record[f"{key}busiest_share"] == pytest.approx(float(share.max()))
        assert record[f"{key}dead"] == int((counts == 0).sum())
    assert record["expert_load_entropy"] == min(record[f"experts/model.layers.{n}.mlp.experts/entropy"] for n in (0, 1))
    # To the other rank, per layer: rows of 32 numbers in the forward and in the backward pass, there and back.
    layer_bytes = 0.0
    for layer in range(2):
        mine, other = ((found[rank][layer] // 2 == 1 - rank).sum() for rank in (0, 1))
        layer_bytes += float(mine + other) * 32 * 4
    assert record["expert_exchange_gb"] == pytest.approx(layer_bytes * (3 if recomputes else 2) / 2 / 1e9, rel=1e-6)
    # An exchange takes a second on the clock of the test: of counts, and there and back in each pass.
    seconds = (7 if recomputes else 5) * arguments.get("gradient_accumulation_steps", 1)
    assert [record[f"experts/model.layers.{layer}.mlp.experts/exchange_seconds"] for layer in (0, 1)] == [seconds] * 2
    assert record["expert_exchange_seconds"] == 2 * seconds
    assert "experts over 2" in str(report_of(files)["header"])
    page = report_page(report_of(files))
    assert "<h2>Experts</h2>" in page and "model.layers.1.mlp.experts" in page
    assert not any(name.startswith("experts/") for name in report_of(files)["curves"])


def test_dead_experts_are_counted(tmp_path: Path) -> None:
    pool(2).run(partial(_train, tmp_path, True, {"zero_stage": 3}))
    (record,) = [one for one in RunFiles.read(tmp_path).records if "loss" in one]
    assert (record["dead_experts"], record["expert_busiest_share"], record["expert_load_entropy"]) == (4, 0.5, 0.5)


def _with_little_memory(directory: str, rows: int) -> str:
    """Rank 1, to whose experts all tokens go, has room for ``rows``; the error of this rank."""
    limits = {0: 2**40, 1: rows * 2 * 32 * 4}
    arguments = {"expert_parallel_size": 2, "zero_stage": 3, "max_steps": 1, "self_test": "never"}
    make = maker("qwen3_moe", to_one_expert=True)
    with mock.patch.object(expert_division, "free_bytes", lambda _: limits[torch.distributed.get_rank()]):
        try:
            train_and_report(make, samples, directory, **arguments)
        except torch.OutOfMemoryError as error:
            return str(error).partition(" in a micro-batch: ")[2].partition("\n")[0]
    return ""


def test_a_rank_without_room_ends_all_before_rows_are_sent(tmp_path: Any) -> None:
    text, other = pool(2).run(_with_little_memory, str(tmp_path), 10)
    wanted = r"model\.layers\.0\.mlp\.experts: (\d+) rows would arrive for the experts of rank 1, 2\.0 times the mean "
    found = re.match(wanted + ".* room for 10 of 256 bytes.*smaller micro-batches", text)
    assert found is not None and other == text
    rows = int(found[1])
    assert pool(2).run(_with_little_memory, str(tmp_path), rows - 1) == [text.replace(" 10 ", f" {rows - 1} ")] * 2
    assert pool(2).run(_with_little_memory, str(tmp_path), rows) == ["", ""]


class _FurtherPasses(Trainer):
    """Runs its model on some of the rows, and on embeddings, too."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            model(input_ids=inputs["input_ids"][:1])
            model(inputs_embeds=model.get_input_embeddings()(inputs["input_ids"]))
        return super().compute_loss(model, inputs, *args, **kwargs)


@pytest.mark.parametrize("trainer", [Trainer, _FurtherPasses])
def test_scripts_run_divided_experts_on_more_than_packed_rows(trainer: type[Trainer], tmp_path: Path) -> None:
    values = {**PACKED, "max_steps": 2, "self_test": "never", "optim": "sgd", "learning_rate": 0.5}
    job = partial(train_and_report, maker("qwen3_moe"), samples, str(tmp_path), trainer, **values)
    (divided, _), (whole, _) = (pool(2).run(partial(job, expert_parallel_size=size)) for size in (2, 1))
    assert_equal(divided, whole, 1e-6)


class _Overflow(TrainerCallback):
    """In step 3, the gradient of the last expert, which the last rank has, is infinite there."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._now = False
        weight.register_hook(self._changed)

    def on_step_begin(self, args: Any, state: Any, control: Any, **ignored: Any) -> None:
        self._now = state.global_step == 2

    def _changed(self, gradient: torch.Tensor) -> torch.Tensor:
        last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        return gradient.index_fill(0, torch.tensor([len(gradient) - 1]), torch.inf) if self._now and last else gradient


def _overflowing(directory: str, arguments: dict[str, Any]) -> Any:
    values = dict(optim="sgd", learning_rate=0.1, max_grad_norm=0.3, max_steps=5, logging_steps=1, save_strategy="no")
    args = TrainingArguments(directory, use_cpu=True, self_test="never", **values, **arguments)
    model = mixture("qwen3_moe")
    callback = _Overflow(model.model.layers[1].mlp.experts.gate_up_proj)
    with ExitStack() as stack:
        if arguments.get("fp16"):  # which is refused on CPUs: they are slow
            (rule,) = (one for one in PRECISION if one.name == "fp16-needs-gpu")
            stack.enter_context(mock.patch.dict(vars(rule), broken=lambda _: False))
            stack.enter_context(mock.patch.object(type(get_accelerator()), "is_fp16_supported", lambda _: True))
        trainer = Trainer(model, args, train_dataset=samples(), callbacks=[callback])
        trainer.train()
    report = compatibility_of(trainer)
    trainer.engine.close()
    return report


@pytest.mark.extended
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_an_overflow_of_one_expert_skips_the_step_of_all(precision: str, stage: int, tmp_path: Path) -> None:
    arguments = {"zero_stage": stage, **({precision: True} if precision != "fp32" else {})}
    if precision == "fp16":
        arguments["deepspeed"] = {"fp16": {"initial_scale_power": 10}}
    whole, divided = (
        pool(2).run(partial(_overflowing, str(tmp_path), {**arguments, "expert_parallel_size": size}))
        for size in (1, 2)
    )
    bound = {"fp32": 2e-6, "bf16": 1e-4, "fp16": 1e-3}[precision]
    for found in divided:
        assert [math.isfinite(norm) for norm in found.grad_norms] == [True, True, False, True, True]
        assert found.losses == pytest.approx(whole[0].losses, abs=bound)
        assert weight_distance(found.weights, divided[0].weights) == 0
        assert weight_distance(found.weights, whole[0].weights) <= bound
