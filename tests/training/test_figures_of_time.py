"""Seconds, rates, memory, and what is drawn or sent to trackers, in every mode: compared with known work and sleeps.

Every bound holds on a busy machine: what sleeps is in the part that it belongs to, and parts add up to the whole.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.callbacks.integrations.tracker import Tracker
from ds_trainer.monitor.dashboard.screen import screen_lines
from ds_trainer.monitor.report.run_files import RunFiles
from ds_trainer.monitor.step_line import phrases
from tests.support.models import LENGTH, RaggedTokens, tiny_llama
from tests.support.pool import pool
from tests.training.test_figures import (
    BATCH,
    DATA,
    EPOCHS,
    ROW,
    SAMPLES,
    STEPS_OF_EPOCH,
    operations_of_a_token,
    unpadded,
)

READ, COMPUTED, EVALUATED, SAVED = 0.003, 0.01, 0.02, 0.03
"""Seconds that a sample, a forward pass of the training, one of an evaluation, and ``on_save`` sleep."""
STEPS, SAVE_EVERY, EVALUATE_EVERY, PEAK = EPOCHS * STEPS_OF_EPOCH, 5, 4, 0.25
SETS = {"few": 3, "many": 7}


class Slow(Dataset[Any]):
    def __init__(self, rows: list[Any], slept: dict[str, float]) -> None:
        self.rows, self.slept = rows, slept

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        time.sleep(READ)
        self.slept["data"] += READ
        return self.rows[index]


class SlowStream(IterableDataset[Any]):
    def __init__(self, rows: Slow) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return (self.rows[index] for index in range(len(self.rows)))


class Witness(Tracker):
    """A tracker that keeps what it is sent, and reads the memory and the clock itself at the same moments."""

    name = package = install = "json"

    def __init__(self, slept: dict[str, float]) -> None:
        super().__init__()
        self.slept = slept
        self.sent: list[dict[str, Any]] = []
        self.resident: list[tuple[float, float]] = []

    def start(self, args: Any, state: Any, model: Any) -> None: ...

    def write(self, logs: dict[str, Any], state: Any) -> None:
        self.sent.append(logs)
        if "memory_gb" in logs:
            self.resident.append((logs["memory_gb"] * 10**9, float(psutil.Process().memory_info().rss)))


class SlowSave(TrainerCallback):
    def __init__(self, slept: dict[str, float]) -> None:
        self.slept = slept

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.slept.update(dict.fromkeys(self.slept, 0.0))  # packing has read the data before

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(SAVED)
        self.slept["saving"] += SAVED


def run(folder: str, mode: str, given: dict[str, Any]) -> dict[str, Any]:
    """Train in a mode with sleeps; everything that this rank's run says of itself, and what it slept."""
    slept = dict.fromkeys(("data", "forward", "eval_few", "eval_many", "saving"), 0.0)
    running = ["forward"]

    def sleep(module: Any, inputs: Any) -> None:
        kind = "forward" if module.training else running[-1]
        seconds = COMPUTED if module.training else EVALUATED
        time.sleep(seconds)
        slept[kind] += seconds

    class Named(Trainer):
        def evaluation_loop(
            self, loader: Any, about: str, only: Any = None, ignored: Any = None, prefix: str = ""
        ) -> Any:
            running.append(prefix)
            return super().evaluation_loop(loader, about, only, ignored, prefix)

    values: dict[str, Any] = dict(
        use_cpu=True, per_device_train_batch_size=BATCH, num_train_epochs=EPOCHS, logging_steps=3, disable_tqdm=True
    )
    values |= dict(eval_strategy="steps", eval_steps=EVALUATE_EVERY, save_steps=SAVE_EVERY, report_to="none")
    values |= dict(per_device_eval_batch_size=2, include_num_input_tokens_seen="non_padding", hang_timeout=0)
    data: Any = Slow(DATA.rows, slept)
    if mode == "streamed":
        data, values["max_steps"] = SlowStream(data), STEPS
    elif mode == "packed":
        data = Slow(unpadded(), slept)
        values |= dict(packing=True, max_length=ROW)
    args = TrainingArguments(folder, **{**values, **given})
    model = tiny_llama()
    hook = model.register_forward_pre_hook(sleep)
    sets: Any = {name: RaggedTokens(count, seed=3).rows for name, count in SETS.items()}
    witness = Witness(slept)
    trainer = Named(model, args, train_dataset=data, eval_dataset=sets, callbacks=[witness, SlowSave(slept)])
    if mode == "resumed":
        trainer.train()
        trainer.engine.close()
        hook.remove()
        model = tiny_llama()
        model.register_forward_pre_hook(sleep)
        witness = Witness(slept)
        trainer = Named(model, args, train_dataset=data, eval_dataset=sets, callbacks=[witness, SlowSave(slept)])
    before = time.perf_counter()
    metrics = trainer.train(f"{folder}/checkpoint-{SAVE_EVERY}" if mode == "resumed" else None).metrics
    wall = time.perf_counter() - before
    trainer.engine.close()
    return {
        "wall": wall,
        "slept": slept,
        "metrics": metrics,
        "history": trainer.state.log_history,
        "sent": witness.sent,
        "resident": witness.resident,
        "seen": trainer.state.num_input_tokens_seen,
    }


MODES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "plain": (1, "plain", {}),
    "accumulated": (1, "plain", {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}),
    "packed": (1, "packed", {}),
    "streamed": (1, "streamed", {}),
    "resumed": (1, "resumed", {}),
    "found batch size": (1, "plain", {"auto_find_batch_size": True}),
    "dp 2, ZeRO 3": (2, "resumed", {"zero_stage": 3, "per_device_train_batch_size": 2}),
    "dp 2, streamed": (2, "streamed", {"per_device_train_batch_size": 2}),
    "tp 2": (2, "plain", {"tensor_parallel_size": 2}),
    "cp 2": (2, "plain", {"context_parallel_size": 2}),
    "sp 2": (2, "streamed", {"sequence_parallel_size": 2}),
}


def samples_until(step: int) -> int:
    epochs, rest = divmod(step, STEPS_OF_EPOCH)
    return epochs * SAMPLES + rest * BATCH


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", MODES)
def test_seconds_and_rates(name: str, tmp_path: Path) -> None:
    world, mode, given = MODES[name]
    found = pool(world).run(run_with_peak, str(tmp_path), mode, given)[0]
    slept, metrics, history = found["slept"], found["metrics"], found["history"]
    first = SAVE_EVERY if mode == "resumed" else 0
    logs = [log for log in history if "loss" in log and log["step"] > first]
    evaluations = {one: [log for log in history if f"eval_{one}_loss" in log and log["step"] > first] for one in SETS}
    training, aside = metrics["train_runtime"], slept["saving"] + slept["eval_few"] + slept["eval_many"]
    evaluating = sum(log[f"eval_{one}_runtime"] for one in SETS for log in evaluations[one])
    assert min(slept.values()) > 0
    assert slept["data"] + slept["forward"] <= training <= found["wall"] - aside
    assert aside <= evaluating + found["wall"] - training and training + evaluating <= found["wall"]

    # Windows of steps: rates times seconds are the work, and the seconds are part of the training.
    steps = [0, *(log["step"] for log in history if "loss" in log)]
    windows = [(steps[steps.index(log["step"]) - 1], log["step"], log) for log in logs]
    windows = [(max(begin, first), end, log) for begin, end, log in windows]
    seconds = [(end - begin) * log["step_seconds"] for begin, end, log in windows]
    assert slept["forward"] + slept["data"] <= sum(seconds) <= training * 1.0001
    work = {"samples": sum(log["samples_per_second"] * spent for log, spent in zip(logs, seconds, strict=True))}
    for (begin, end, log), spent in zip(windows, seconds, strict=True):
        assert log["tflops_per_device"] == pytest.approx(log["mfu"] * PEAK)
        if mode == "packed":
            assert log["tokens_per_second"] == pytest.approx(ROW * log["samples_per_second"])
            continue
        count = samples_until(end) - samples_until(begin)
        if mode == "streamed":
            count = (end - begin) * BATCH if end <= 6 else round(log["samples_per_second"] * spent)
        assert log["samples_per_second"] * spent == pytest.approx(count)
        assert log["tokens_per_second"] * spent == pytest.approx(count * LENGTH)
        operations = operations_of_a_token(tiny_llama()) * count * LENGTH
        assert log["tflops_per_device"] * world * spent * 1e12 == pytest.approx(operations, rel=1e-3)
    waits = [log["data_wait"] * spent for log, spent in zip(logs, seconds, strict=True)]
    assert slept["data"] <= sum(waits) + 1e-6
    total = metrics["train_samples_per_second"] * training
    assert work["samples"] == pytest.approx(total) and max(log["data_wait"] for log in logs) <= 1
    assert metrics["train_steps_per_second"] * training == pytest.approx(logs[-1]["step"] - first)

    # The same key means the same in the logs of steps and in the summary.
    runtimes = [log["train_runtime"] for log in logs] + [training]
    assert runtimes == sorted(runtimes) and runtimes[0] >= seconds[0] - 1e-3
    assert logs[-1]["train_runtime"] + 1e-3 >= sum(seconds)
    assert history[-1]["train_runtime"] == training
    if not first:
        assert metrics["train_tokens_per_second"] * training == pytest.approx(found["seen"])

    # Evaluations.
    for one, count in SETS.items():
        spent = [log[f"eval_{one}_runtime"] for log in evaluations[one]]
        assert sum(spent) >= slept[f"eval_{one}"] > 0
        for log in evaluations[one]:
            rate = log[f"eval_{one}_samples_per_second"]
            rows = count if mode != "packed" else round(rate * log[f"eval_{one}_runtime"])
            assert rate * log[f"eval_{one}_runtime"] == pytest.approx(rows, rel=1e-2) and 0 < rows <= count

    # Memory, and what trackers, files, the report and the dashboard get.
    assert all(abs(logged - read) < 2**25 for logged, read in found["resident"]) and found["resident"]
    assert [{key: value for key, value in log.items() if key != "step"} for log in history if log["step"] > first] == (
        found["sent"]
    )
    check_files(tmp_path, history, slept, first)


def run_with_peak(folder: str, mode: str, given: dict[str, Any]) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_TRAINER_PEAK_TFLOPS", str(PEAK))
        return run(folder, mode, given)


def check_files(directory: Path, history: list[dict[str, Any]], slept: dict[str, float], first: int) -> None:
    """``metrics.jsonl``, ``report.json`` and the dashboard say what was logged."""
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [{k: v for k, v in record.items() if k != "time"} for record in records] == history
    times = [record["time"] for record in records]
    assert times == sorted(times)
    report = json.loads((directory / "report.json").read_text())
    for name in ("loss", "grad_norm", "tokens_per_second", "samples_per_second", "step_seconds", "mfu", "memory_gb"):
        assert report["curves"][name] == [[log["step"], log[name]] for log in history if name in log], name
    for one in SETS:
        name = f"eval_{one}_loss"
        assert report["evaluations"][name] == [[log["step"], log[name]] for log in history if name in log]
    assert f"{sum(SETS.values())} for evaluation" in dict(report["header"])["data"]
    parts = {part["name"]: part["seconds"] for part in report["time"]["parts"]}
    assert sum(parts.values()) == pytest.approx(report["time"]["total_seconds"])
    lost = parts.get("lost to restarts", 0.0)
    whole = {
        "evaluation": slept["eval_few"] + slept["eval_many"],
        **{k: slept[k] for k in ("data", "forward", "saving")},
    }
    parts["forward"] += parts.get("checks of the first batch", 0.0)
    for part, at_least in whole.items():
        assert parts[part] >= at_least - 0.002 or lost, part
    speed = report["summary"]["speed"]
    assert speed["data_wait"] <= 1 and speed["step_seconds"] >= COMPUTED
    last = [log for log in history if "loss" in log][-1]
    shown = " ".join(screen_lines(RunFiles.read(directory), 200, 60, 0.0))
    for name in ("loss", "tokens_per_second", "samples_per_second", "mfu", "data_wait"):
        assert phrases({name: last[name]})[0] in shown, name


def peaks(folder: str, given: dict[str, Any]) -> dict[str, int]:
    """The memory figures of a training whose second evaluation holds a block of known size for a moment."""
    calls: list[int] = []

    def hold(module: Any, inputs: Any) -> None:
        calls.append(0 if module.training else 1)
        if sum(calls) == 2:
            block = torch.ones(BLOCK // 4)
            time.sleep(0.2)  # the peak is sampled
            del block

    args = TrainingArguments(
        folder, use_cpu=True, max_steps=4, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=3,
        report_to="none", disable_tqdm=True, skip_memory_metrics=False, save_steps=2, **given
    )  # fmt: skip
    model = tiny_llama()
    model.register_forward_pre_hook(hold)
    trainer = Trainer(model, args, train_dataset=DATA, eval_dataset=RaggedTokens(6).rows)
    found = {name: int(value) for name, value in trainer.train().metrics.items() if "_mem_" in name}
    trainer.engine.close()
    return found


BLOCK = 2**28


@pytest.mark.parametrize(("world", "given"), [(1, {}), (2, {"zero_stage": 3})])
def test_peak_of_host_memory(world: int, given: dict[str, Any], tmp_path: Path) -> None:
    for found in pool(world).run(peaks, str(tmp_path), given):
        needed = found["train_mem_cpu_alloc_delta"] + found["train_mem_cpu_peaked_delta"]
        assert 0.9 * BLOCK < needed < 2 * BLOCK
        assert not any(name.startswith("eval") for name in found)  # counted toward the training
