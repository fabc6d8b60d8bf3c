"""A run that resumes with other batches reads every sample of every epoch once, in the order of the epoch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from tests.support.resuming import StopAt

SAMPLES = 22


class Numbers(torch.utils.data.Dataset[Any]):
    """Samples that are their own number, each of another length."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": float(index), "input_ids": [0] * (1 + (7 * index) % 13)}


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.seen += [int(number) for number in x.flatten()]
        return {"loss": nn.functional.mse_loss(self.layer(x / SAMPLES), labels)}


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    x = torch.tensor([[row["x"]] for row in rows])
    return {"x": x, "labels": torch.zeros_like(x)}


class EndsEpochAt(TrainerCallback):
    """Ends the epoch early, at an event of a step."""

    def __init__(self, step: int, event: str = "on_step_end") -> None:
        self._step, self._event = step, event

    def _end(self, event: str, state: Any, control: Any) -> None:
        if event == self._event and state.global_step == self._step:
            control.should_epoch_stop = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end("on_step_end", state, control)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end("on_log", state, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end("on_evaluate", state, control)


def seen(
    output_dir: Path, stop: int, size: int, resume: bool = False, callbacks: Any = (), **more: Any
) -> tuple[list[int], dict[str, Any]]:
    """Samples that reached the model, and the position in the data that its last checkpoint has."""
    args = TrainingArguments(
        str(output_dir),
        per_device_train_batch_size=size,
        num_train_epochs=2,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=1,
        logging_strategy=more.pop("logging_strategy", "no"),
        logging_steps=1,
        lr_scheduler_type="constant",
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
        **more,
    )
    model = Linear()
    data = {"train_dataset": Numbers(), "eval_dataset": Numbers() if "eval_strategy" in more else None}
    trainer = Trainer(model, args, data_collator=collate, callbacks=[*callbacks, StopAt(stop)], **data)
    trainer.train(resume_from_checkpoint=True if resume else None)
    trainer.engine.close()
    (newest,) = output_dir.glob("checkpoint-*")
    return model.seen, json.loads((newest / "run.json").read_text())["data"]


LENGTHS = {"train_sampling_strategy": "group_by_length"}


@pytest.mark.cases(1)
@pytest.mark.parametrize("order", [{}, LENGTHS], ids=["shuffled", "by length"])
def test_the_batch_size_may_change_within_an_epoch(order: dict[str, Any], tmp_path: Path) -> None:
    """The order of the epoch stays the one that was made for the first batch size; the next epoch has its own."""
    uninterrupted, _ = seen(tmp_path / "whole", 99, 4, **order)
    assert len(uninterrupted) == 2 * SAMPLES
    resumed: list[int] = []
    for stop, size, samples in ((2, 4, 8), (4, 3, 14), (5, 5, 19)):
        found, position = seen(tmp_path / "parts", stop, size, resume=bool(resumed), **order)
        resumed += found
        assert (position["epoch"], position["samples"]) == (0, samples)
        assert position["ordered_for"] == 4
    rest, _ = seen(tmp_path / "parts", 99, 4, resume=True, **order)
    assert resumed + rest[:3] == uninterrupted[:SAMPLES]
    assert rest[3:] == uninterrupted[SAMPLES:]


def test_a_run_stopped_at_the_end_of_an_epoch_resumes(tmp_path: Path) -> None:
    """The last batch is ragged: the position counts samples, not batches."""
    uninterrupted, _ = seen(tmp_path / "whole", 99, 4)
    first, position = seen(tmp_path / "parts", 6, 4)
    assert first == uninterrupted[:SAMPLES]
    assert (position["samples"], position["steps"]) in ((SAMPLES, 6), (0, 0))  # at its end, or at the next one's start
    rest, _ = seen(tmp_path / "parts", 99, 5, resume=True)
    assert rest == uninterrupted[SAMPLES:]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("event", "more"),
    [
        ("on_step_end", {}),
        ("on_log", {"logging_strategy": "steps"}),
        ("on_evaluate", {"eval_strategy": "steps", "eval_steps": 1}),
    ],
)
def test_an_epoch_that_was_ended_early_does_not_begin_again(event: str, more: dict[str, Any], tmp_path: Path) -> None:
    ends = [EndsEpochAt(3, event)]
    whole, _ = seen(tmp_path / "whole", 99, 4, callbacks=ends, **more)
    first, position = seen(tmp_path / "parts", 3, 4, callbacks=ends, **more)
    assert (first, position["ended"], position["epoch"]) == (whole[:12], True, 0)
    rest, _ = seen(tmp_path / "parts", 99, 4, resume=True, **more)
    assert rest == whole[12:] and len(rest) == SAMPLES


def test_steps_count_from_the_beginning_of_the_epoch(tmp_path: Path) -> None:
    _, position = seen(tmp_path / "runs", 8, 4, gradient_accumulation_steps=1)
    assert (position["epoch"], position["steps"], position["micro_steps"], position["samples"]) == (1, 2, 2, 8)
    _, position = seen(tmp_path / "others", 4, 3, gradient_accumulation_steps=2)
    assert (position["epoch"], position["steps"], position["micro_steps"]) in ((0, 4, 8), (1, 0, 0))


def test_the_data_cursor_survives_a_second_resumption(tmp_path: Path) -> None:
    """A second resumption with the new batch ends where the first one would have ended."""
    uninterrupted, _ = seen(tmp_path / "whole", 99, 4)
    resumed: list[int] = []
    for stop, size in ((2, 4), (4, 3), (6, 3), (99, 3)):
        resumed += seen(tmp_path / "parts", stop, size, resume=bool(resumed))[0]
    assert resumed == uninterrupted
    state = json.loads((tmp_path / "parts" / "checkpoint-15" / "trainer_state.json").read_text())
    assert state["max_steps"] == 2 + 5 + 8  # what a schedule is spread over: not the 16 steps of two whole epochs
