"""A vision-language recipe has the labels and losses of TRL's SFTTrainer on the same conversations and images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from ds_trainer.recipes.fine_tuning_job import VisionLanguageJob
from ds_trainer.recipes.recipe import load_recipe
from tests.support.vision_models import picture, save_vision_model

# Every step has all samples, so that their order does not matter.
SAMPLES, STEPS, RATE = 8, 4, 5e-3
RECIPE = {
    "task": "vision_language",
    "model": {"path": "model"},
    "data": {"train": "conversations.jsonl", "max_length": 256},
    "arguments": {
        "output_dir": "out",
        "per_device_train_batch_size": SAMPLES,
        "max_steps": STEPS,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": "none",
    },
}


def row(number: int) -> dict[str, Any]:
    """Up to two images, and one to three turns."""
    turns = [
        message
        for turn in range(1 + number % 3)
        for message in (
            {"role": "user", "content": f"What is {number} plus {turn}? " * (1 + number % 2)},
            {"role": "assistant", "content": f"It is {number + turn}. " + "Sure. " * (number % 4)},
        )
    ]
    return {"messages": turns, "images": [f"{number}-{index}.png" for index in range(number % 3)]}


def sft_trainer(folder: Path) -> Any:
    """TRL's, on transformers' Trainer."""
    import trl
    from transformers import AutoModelForImageTextToText, AutoProcessor

    rows = [row(number) for number in range(SAMPLES)]
    arguments = trl.SFTConfig(
        output_dir=str(folder / "trl"),
        assistant_only_loss=True,
        per_device_train_batch_size=SAMPLES,
        max_steps=STEPS,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        gradient_checkpointing=False,
        max_length=None,
        use_cpu=True,
        bf16=False,
        report_to="none",
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
    )
    from datasets import Dataset, Features, List, Value
    from datasets import Image as ImageFeature

    opened = [{**one, "images": [str(folder / name) for name in one["images"]]} for one in rows]
    turn = {"role": Value("string"), "content": Value("string")}
    dataset = Dataset.from_list(opened, features=Features({"messages": List(turn), "images": List(ImageFeature())}))
    model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(folder / "model")
    return trl.SFTTrainer(model, arguments, train_dataset=dataset, processing_class=processor)


def test_labels_and_losses_are_those_of_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_vision_model(tmp_path / "model", "llava")
    rows = [row(number) for number in range(SAMPLES)]
    for number, name in enumerate(name for one in rows for name in one["images"]):
        picture(16 + number, 20, number).save(name)
    (tmp_path / "conversations.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    (tmp_path / "r.yaml").write_text(json.dumps(RECIPE))
    theirs = sft_trainer(tmp_path)
    examples = [{**one, "images": [Image.open(name) for name in one["images"]]} for one in rows]
    wanted = theirs.data_collator(examples)
    recipe = load_recipe("r.yaml")
    args = recipe.training_arguments()
    job = VisionLanguageJob(recipe)
    job.prepare(args)
    batch = job.make_trainer(args).data_collator([job.data.train[index] for index in range(SAMPLES)])
    assert {*batch} == {*wanted}
    for key, value in wanted.items():
        torch.testing.assert_close(batch[key], value)
    theirs.train()
    losses = [entry["loss"] for entry in theirs.state.log_history if "loss" in entry]
    job.run()
    lines = (tmp_path / "out" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    own = [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]
    assert len(own) == STEPS and losses[-1] < 0.9 * losses[0]
    assert own == pytest.approx(losses, rel=1e-4)
    everything = VisionLanguageJob(load_recipe("r.yaml", ["--data.train_on=all"]))  # control: another mask shows
    everything.prepare(args)
    rows_of_all = [everything.data.train[index] for index in range(SAMPLES)]
    labels = everything.make_trainer(args).data_collator(rows_of_all)["labels"]
    assert not torch.equal(labels, wanted["labels"])
