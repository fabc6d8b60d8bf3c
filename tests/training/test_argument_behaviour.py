"""Arguments whose effect is seen in a run only: each is trained with, and without."""

from __future__ import annotations

import dataclasses
import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.callbacks.state import ExportableState
from ds_trainer.training.loop.loss_window import LossWindow
from ds_trainer.training.startup.process_setup import configure_process
from ds_trainer.training.train_loop import TrainLoop
from ds_trainer.utils.errors import ConfigError
from tests.support.models import RaggedTokens, Regression, regression_rows, tiny_llama
from tests.support.pool import pool


def arguments(output_dir: Any, **changes: Any) -> TrainingArguments:
    values: dict[str, Any] = dict(
        max_steps=2, logging_steps=1, save_strategy="no", disable_tqdm=True, use_cpu=True, per_device_train_batch_size=4
    )
    return TrainingArguments(str(output_dir), **{**values, **changes})


def trainer(output_dir: Any, model: nn.Module | None = None, callbacks: Any = None, **changes: Any) -> Trainer:
    data = regression_rows(16)
    return Trainer(
        model or Regression(),
        arguments(output_dir, **changes),
        train_dataset=data,
        eval_dataset=data[:4],
        callbacks=callbacks,
    )


class Events(TrainerCallback):
    """Notes the order of events."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.names.append(f"evaluate {state.global_step}")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.names.append(f"step {state.global_step}")


def run_and_note_events(output_dir: Path, **changes: Any) -> list[str]:
    events = Events()
    job = trainer(output_dir, callbacks=[events], **changes)
    job.train()
    job.engine.close()
    return events.names


def test_eval_on_start(tmp_path: Path) -> None:
    (names,) = pool(1).run(partial(run_and_note_events, tmp_path, eval_on_start=True))
    assert names == ["evaluate 0", "step 1", "step 2"]
    (names,) = pool(1).run(partial(run_and_note_events, tmp_path))
    assert names == ["step 1", "step 2"]


def train_checkpointed(output_dir: Path, **changes: Any) -> tuple[bool, Any, float]:
    """Whether the layers recompute, the arguments of the recomputation, and the first loss."""
    model = tiny_llama()
    job = Trainer(model, arguments(output_dir, **changes), train_dataset=RaggedTokens(8))
    job.train()
    job.engine.close()
    layer: Any = model.model.layers[0]
    function = getattr(layer, "_gradient_checkpointing_func", None)
    return bool(model.is_gradient_checkpointing), getattr(function, "keywords", None), job.state.log_history[0]["loss"]


@pytest.mark.parametrize("name", ["activation_checkpointing", "gradient_checkpointing"])
def test_activation_checkpointing(tmp_path: Path, name: str) -> None:
    ((off, _, plain),) = pool(1).run(partial(train_checkpointed, tmp_path))
    ((on, keywords, same),) = pool(1).run(partial(train_checkpointed, tmp_path, **{name: True}))
    assert not off and on and keywords["use_reentrant"] is False
    assert same == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("name", ["activation_checkpointing", "gradient_checkpointing"])
def test_activation_checkpointing_kwargs(tmp_path: Path, name: str) -> None:
    changes = {name: True, f"{name}_kwargs": '{"use_reentrant": true}'}
    ((on, keywords, _),) = pool(1).run(partial(train_checkpointed, tmp_path, **changes))
    assert on and keywords["use_reentrant"] is True


def deepspeed_checkpointed(output_dir: Path) -> tuple[str, list[float]]:
    model = tiny_llama()
    config = {"activation_checkpointing": {"synchronize_checkpoint_boundary": True}}
    args = arguments(output_dir, activation_checkpointing=True, deepspeed=config)
    job = Trainer(model, args, train_dataset=RaggedTokens(8))
    job.train()
    job.engine.close()
    layer: Any = model.model.layers[0]
    return layer._gradient_checkpointing_func.__module__, [e["loss"] for e in job.state.log_history if "loss" in e]


def plainly(output_dir: Path) -> list[float]:
    job = Trainer(tiny_llama(), arguments(output_dir), train_dataset=RaggedTokens(8))
    job.train()
    job.engine.close()
    return [entry["loss"] for entry in job.state.log_history if "loss" in entry]


def test_activation_checkpointing_of_the_deepspeed_file(tmp_path: Path) -> None:
    """The block is no decoration: layers recompute through DeepSpeed, and the numbers stay."""
    ((module, losses),) = pool(1).run(partial(deepspeed_checkpointed, tmp_path))
    assert module.startswith("deepspeed.")
    (expected,) = pool(1).run(partial(plainly, tmp_path))
    assert losses == pytest.approx(expected, rel=1e-6)


def cache_while_training(output_dir: Path, use_cache: bool) -> bool:
    model = tiny_llama()
    seen: list[bool] = []

    class Probe(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(model.config.use_cache)

    job = Trainer(model, arguments(output_dir, use_cache=use_cache), train_dataset=RaggedTokens(8), callbacks=[Probe()])
    job.train()
    job.engine.close()
    assert model.config.use_cache is True
    return seen[0]


def test_use_cache(tmp_path: Path) -> None:
    assert pool(1).run(partial(cache_while_training, tmp_path, True)) == [True]
    assert pool(1).run(partial(cache_while_training, tmp_path, False)) == [False]


def save_weights_only(output_dir: Path) -> str:
    job = trainer(output_dir, save_strategy="steps", save_steps=2, save_only_model=True)
    job.train()
    job.engine.close()
    second = trainer(output_dir, save_strategy="no", max_steps=4)
    with pytest.raises(ConfigError) as error:
        second.train(resume_from_checkpoint=True)
    return str(error.value)


def test_save_only_model(tmp_path: Path) -> None:
    (message,) = pool(1).run(partial(save_weights_only, tmp_path))
    assert "holds weights only (save_only_model=True" in message
    names = {path.name for path in (tmp_path / "checkpoint-2").iterdir()}
    assert {"model.safetensors", "trainer_state.json"} <= names
    assert not any(path.suffix == ".pt" for path in (tmp_path / "checkpoint-2").rglob("*"))


class Recorder(Regression):
    """A model that remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        if self.training:
            self.seen.append(x.clone())
        return super().forward(x, labels)


def samples_seen(output_dir: Path, resume: bool = False, **changes: Any) -> list[torch.Tensor]:
    model = Recorder()
    args = arguments(output_dir, **changes)
    job = Trainer(model, args, train_dataset=regression_rows(16))
    job.train(resume_from_checkpoint=resume or None)
    job.engine.close()
    return model.seen


def test_ignore_data_skip(tmp_path: Path) -> None:
    saving: dict[str, Any] = dict(save_strategy="steps", save_steps=2)
    (first,) = pool(1).run(partial(samples_seen, tmp_path, **saving))
    (went_on,) = pool(1).run(partial(samples_seen, tmp_path, resume=True, max_steps=4))
    (began_anew,) = pool(1).run(partial(samples_seen, tmp_path, resume=True, max_steps=4, ignore_data_skip=True))
    assert not any(torch.equal(went_on[-1], batch) for batch in first)
    assert all(torch.equal(one, two) for one, two in zip(began_anew[-2:], first[-2:], strict=True))


def test_train_sampling_strategy(tmp_path: Path) -> None:
    (in_order,) = pool(1).run(partial(samples_seen, tmp_path, train_sampling_strategy="sequential"))
    (shuffled,) = pool(1).run(partial(samples_seen, tmp_path))
    rows = torch.stack([row["x"] for row in regression_rows(16)])
    assert torch.equal(in_order[-2], rows[:4]) and torch.equal(in_order[-1], rows[4:8])
    assert not torch.equal(shuffled[-2], rows[:4])


def evaluate_both_ways(output_dir: Path) -> list[tuple[bool, bool]]:
    found = []
    for loss_only in (False, True):
        job = trainer(output_dir, prediction_loss_only=loss_only)
        job.compute_metrics = lambda result: {"rows": len(result.predictions)}
        metrics = job.evaluate()
        found.append(("eval_loss" in metrics, "eval_rows" in metrics))
    return found


def test_evaluation_keeps_the_loss_only(tmp_path: Path) -> None:
    assert pool(1).run(partial(evaluate_both_ways, tmp_path)) == [[(True, True), (True, False)]]


class OnGpu:
    """As much of a device as :meth:`TrainLoop._empty_cache` looks at."""

    type = "cuda"


def test_torch_empty_cache_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator's cache is emptied every so many steps on a GPU, and never on a CPU."""
    calls: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    made: list[TrainLoop] = []
    monkeypatch.setattr(TrainLoop, "run", lambda self: made.append(self))
    trainer(tmp_path, torch_empty_cache_steps=3).train()
    (loop,) = made
    for step in range(1, 10):
        loop._empty_cache(step)
    assert calls == []
    loop._run = dataclasses.replace(loop._run, device=OnGpu())  # type: ignore[arg-type]
    for step in range(1, 10):
        loop._empty_cache(step)
    assert len(calls) == 3


# -- losses that are not finite ----------------------------------------------------------------------------------


def close_window(filtered: bool) -> tuple[float, int]:
    window = LossWindow(torch.device("cpu"), filtered)
    for loss in (1.0, float("nan"), 3.0):
        window.add_step([torch.tensor(loss / 2), torch.tensor(loss / 2)])
    return window.close()


def test_logging_nan_inf_filter(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("ds_trainer").propagate = True
    with caplog.at_level(logging.WARNING, "ds_trainer"):
        assert close_window(filtered=True) == (2.0, 2)
    assert "1 of 3 steps had a non-finite loss" in caplog.text
    mean, counted = close_window(filtered=False)
    assert mean != mean and counted == 3


def test_a_non_finite_step_on_one_rank_is_left_out_on_all() -> None:
    assert pool(2).run(nan_on_rank_one) == [(4.0, 1), (4.0, 1)]


def nan_on_rank_one() -> tuple[float, int]:
    window = LossWindow(torch.device("cpu"), filtered=True)
    for local, remote in ((1.0, float("inf")), (1.0, 3.0)):
        window.add_step([torch.tensor(local if torch.distributed.get_rank() == 0 else remote)])
    return window.close()


def nan_run(output_dir: Path, **changes: Any) -> list[dict[str, float]]:
    rows = regression_rows(8)
    rows[0]["labels"] = torch.tensor(float("nan"))
    args = arguments(output_dir, logging_steps=2, train_sampling_strategy="sequential", learning_rate=0.0, **changes)
    job = Trainer(Regression(), args, train_dataset=rows)
    job.train()
    job.engine.close()
    return [entry for entry in job.state.log_history if "loss" in entry]


def test_the_log_counts_the_steps_it_leaves_out(tmp_path: Path) -> None:
    ((entry,),) = pool(1).run(partial(nan_run, tmp_path))
    assert entry["steps_with_nonfinite_loss"] >= 1
    ((entry,),) = pool(1).run(partial(nan_run, tmp_path, logging_nan_inf_filter=False))
    assert entry["loss"] != entry["loss"] and "steps_with_nonfinite_loss" not in entry


# -- the process as a whole --------------------------------------------------------------------------------------


def process_state(**changes: Any) -> dict[str, Any]:
    configure_process(TrainingArguments("out", use_cpu=True, **changes))
    return {
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "level": logging.getLogger("ds_trainer").level,
        "draw": float(torch.rand(())),
    }


def clean_up() -> None:
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.matmul.allow_tf32 = False
    logging.getLogger("ds_trainer").setLevel(logging.INFO)


def observe(**changes: Any) -> dict[str, Any]:
    try:
        return process_state(**changes)
    finally:
        clean_up()


def test_tf32_determinism_log_level_and_seed() -> None:
    (usual,) = pool(1).run(observe)
    (changed,) = pool(1).run(partial(observe, tf32=True, full_determinism=True, log_level="error", seed=7))
    assert changed["tf32"] is True and usual["tf32"] is False
    assert changed["deterministic"] is True and usual["deterministic"] is False
    assert changed["level"] == logging.ERROR
    assert changed["draw"] != usual["draw"]


def test_replicas_have_their_own_log_level() -> None:
    levels = [state["level"] for state in pool(2).run(partial(observe, log_level="info", log_level_replica="error"))]
    assert levels == [logging.INFO, logging.ERROR]


def header_and_run_name(output_dir: Path) -> str:
    import contextlib
    import io

    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        job = trainer(output_dir, run_name="third try")
        job.train()
    job.engine.close()
    return text.getvalue()


def test_run_name(tmp_path: Path) -> None:
    (text,) = pool(1).run(partial(header_and_run_name, tmp_path))
    assert text.startswith("ds_trainer: third try\n")


class Counter(TrainerCallback, ExportableState):
    """Counts steps over all runs, from a number of its own."""

    def __init__(self, start: int = 0) -> None:
        self.start = start
        self.steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1

    def state(self) -> dict[str, Any]:
        return {"args": {"start": self.start}, "attributes": {"steps": self.steps}}


def count_over_two_runs(output_dir: Path, restore: bool) -> tuple[int, int]:
    first = trainer(output_dir, callbacks=[Counter(start=10)], save_strategy="steps", save_steps=2)
    first.train()
    first.engine.close()
    counter = Counter(start=20)
    changes: dict[str, Any] = dict(max_steps=4, restore_callback_states_from_checkpoint=restore)
    second = trainer(output_dir, callbacks=[counter], **changes)
    second.train(resume_from_checkpoint=True)
    second.engine.close()
    return counter.start, counter.steps


def test_restore_callback_states_from_checkpoint(tmp_path: Path) -> None:
    """What changed during the run is always restored; what a callback was made with only on request."""
    assert pool(1).run(partial(count_over_two_runs, tmp_path / "a", False)) == [(20, 4)]
    assert pool(1).run(partial(count_over_two_runs, tmp_path / "b", True)) == [(10, 4)]


def test_the_compiled_configuration_is_written_beside_the_run(tmp_path: Path) -> None:
    pool(1).run(partial(run_and_note_events, tmp_path))
    written = json.loads((tmp_path / "ds_config.json").read_text(encoding="utf-8"))
    assert written["train_micro_batch_size_per_gpu"] == 4
