"""Stop and resume: the run has the same batches, losses, learning rates and weights as an uninterrupted one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.checkpoint.protocol.checkpoint_directory import list_checkpoints
from ds_trainer.utils.errors import ConfigError
from tests.support.models import PlainLanguageModel, RaggedTokens, tiny_llama
from tests.support.oracle import Trajectory
from tests.support.pool import pool
from tests.support.runs import compatibility_of

STEPS = 8
STOP_AT = 4  # in the middle of the second epoch: 3 steps each


class Seen(TrainerCallback):
    """Notes which samples reach the model, by their first tokens."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def watch(self, trainer: Trainer) -> None:
        trainer.model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: Any, args: Any, kwargs: dict[str, torch.Tensor]) -> None:
        if torch.is_grad_enabled():  # not in the passes that measure the loss
            self.batches.append(kwargs["input_ids"].flatten().tolist())


class CountsSteps(TrainerCallback):
    """A callback with a memory; it changes the run at a step that it counts itself."""

    def __init__(self) -> None:
        self.steps = 0

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"steps": self.steps}}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> CountsSteps:
        made = cls()
        made.steps = state["attributes"]["steps"]
        return made

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1


def count_steps(output_dir: str, stop_at: int | None, resume: bool | str) -> int:
    trainer = make_trainer(output_dir, stop_at)
    counter = CountsSteps()
    trainer.add_callback(counter)
    trainer.train(resume_from_checkpoint=resume)
    trainer.engine.close()
    return counter.steps


def test_resume_accepts_true_as_text(tmp_path: Path) -> None:
    """A recipe and a command line have words only."""
    assert pool(1).run(count_steps, str(tmp_path), STOP_AT, False) == [STOP_AT]
    assert pool(1).run(count_steps, str(tmp_path), None, "true") == [STEPS]


def test_stateful_callbacks_are_restored(tmp_path: Path) -> None:
    assert pool(1).run(count_steps, str(tmp_path), STOP_AT, False) == [STOP_AT]
    assert pool(1).run(count_steps, str(tmp_path), None, True) == [STEPS]


class StopAt(TrainerCallback):
    """Ends training at a step, as a time limit would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def make_trainer(output_dir: str, stop_at: int | None = None, **arguments: Any) -> Trainer:
    values: dict[str, Any] = dict(
        max_steps=STEPS,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=1,
        save_steps=STOP_AT,
        disable_tqdm=True,
        use_cpu=True,
    )
    normalized = arguments.pop("normalized", False)
    args = TrainingArguments(output_dir, **{**values, **arguments})
    # Dropout: the random state must come back too. The first returns a mean, the second divides by the item count.
    model = tiny_llama(attention_dropout=0.2) if normalized else PlainLanguageModel(dropout=0.2)
    callbacks = [] if stop_at is None else [StopAt(stop_at)]
    return Trainer(model, args, train_dataset=RaggedTokens(37), callbacks=callbacks)


def run(
    output_dir: str, stop_at: int | None, resume: str | bool | None, **arguments: Any
) -> tuple[Trajectory, list[Any]]:
    trainer = make_trainer(output_dir, stop_at, **arguments)
    seen = Seen()
    seen.watch(trainer)
    trainer.train(resume_from_checkpoint=resume)
    report = compatibility_of(trainer)
    trainer.engine.close()
    return report, seen.batches


RESUMED: list[dict[str, Any]] = [
    *({"zero_stage": stage} for stage in (0, 1, 2, 3)),
    {"bf16": True},
    {"normalized": True, "gradient_accumulation_steps": 1, "save_steps": 2},
]


@pytest.mark.cases(1)
@pytest.mark.parametrize("arguments", RESUMED, ids=str)
def test_resumed_run_is_bit_identical(arguments: dict[str, Any], tmp_path: Path) -> None:
    uninterrupted = pool(2).run(partial(run, str(tmp_path / "whole"), None, None, **arguments))
    pool(2).run(partial(run, str(tmp_path / "parts"), STOP_AT, None, **arguments))
    resumed = pool(2).run(partial(run, str(tmp_path / "parts"), None, True, **arguments))
    for (wanted, wanted_batches), (found, found_batches) in zip(uninterrupted, resumed, strict=True):
        assert found.losses == wanted.losses
        assert found.grad_norms == wanted.grad_norms
        assert found.learning_rates == wanted.learning_rates
        assert all(torch.equal(found.weights[name], wanted.weights[name]) for name in wanted.weights)
        assert found_batches == wanted_batches[-len(found_batches) :]
        assert len(found_batches) < len(wanted_batches)
    assert len(uninterrupted[0][0].losses) == STEPS
    lines = [json.loads(line) for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, STEPS + 1))


def run_without_random_state(output_dir: str) -> Trajectory:
    """Negative control: resumes, but with another state of the random generators."""
    from ds_trainer.checkpoint import manager

    kept = manager.restore_random_state
    manager.restore_random_state = lambda state: torch.manual_seed(123)  # type: ignore[assignment]
    try:
        return run(output_dir, None, True)[0]
    finally:
        manager.restore_random_state = kept


def test_control_a_lost_random_state_is_detected(tmp_path: Path) -> None:
    uninterrupted = pool(1).run(partial(run, str(tmp_path / "whole"), None, None))[0][0]
    pool(1).run(partial(run, str(tmp_path / "parts"), STOP_AT, None))
    found = pool(1).run(run_without_random_state, str(tmp_path / "parts"))[0]
    assert found.losses[:STOP_AT] == uninterrupted.losses[:STOP_AT]
    assert found.losses[STOP_AT:] != uninterrupted.losses[STOP_AT:]


def refusal(output_dir: str, resume: str | bool) -> str:
    try:
        run(output_dir, None, resume)
    except ConfigError as error:
        return str(error)
    raise AssertionError("was not refused")


def test_resuming_without_a_checkpoint_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-7").mkdir()  # a torn checkpoint is none
    assert "holds no complete checkpoint" in pool(1).run(refusal, str(tmp_path), True)[0]
    message = pool(1).run(refusal, str(tmp_path), str(tmp_path / "checkpoint-7"))[0]
    assert "is not a complete checkpoint" in message and "none" in message


@pytest.mark.extended
def test_old_checkpoints_are_removed_beyond_the_limit(tmp_path: Path) -> None:
    pool(1).run(partial(run, str(tmp_path), None, None, save_steps=2, save_total_limit=2))
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-6", "checkpoint-8"]
    assert (tmp_path / "latest").read_text() == "checkpoint-8\n"
    assert not list(tmp_path.glob(".*"))  # neither a lock nor anything half done


SCRIPT = """
    import sys, time
    sys.path.insert(0, {root!r})
    from ds_trainer import TrainerCallback
    from tests.training.resume.test_resumption import make_trainer

    class Slow(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            print("step", state.global_step, flush=True)
            if {slow} and state.global_step == 5:
                time.sleep(120)  # it will be killed

    trainer = make_trainer({output!r}, save_steps=2, save_async=False)
    trainer.add_callback(Slow())
    trainer.train(resume_from_checkpoint={resume})
    trainer.save_model()
"""


@pytest.mark.extended
def test_a_killed_process_resumes_from_its_last_checkpoint(tmp_path: Path) -> None:
    """A real SIGKILL of a real process, then a second process; the weights are those of a run that was left alone."""
    root = str(Path(__file__).parents[2])

    def script(output: str, slow: bool, resume: bool) -> list[str]:
        text = textwrap.dedent(SCRIPT).format(root=root, output=str(tmp_path / output), slow=slow, resume=resume)
        return [sys.executable, "-c", text]

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(script("parts", True, False), stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 5"):
                process.send_signal(signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL
    assert [path.name for path in list_checkpoints(tmp_path / "parts")][-1] == "checkpoint-4"
    subprocess.run(script("parts", False, True), check=True, env=environment, stdout=subprocess.DEVNULL)
    subprocess.run(script("whole", False, False), check=True, env=environment, stdout=subprocess.DEVNULL)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("parts", "whole")]
    assert files[0] == files[1]
