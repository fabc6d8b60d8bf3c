"""Ranks with and without images: the numbers of one process, on every ZeRO stage, where a rank never has an image.

The oracle is plain PyTorch with the processor's own batches, each sample alone, without padding and blank images.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from ds_trainer import Trainer
from ds_trainer.samples.images.image_encoder import ImageCollator, ImageEncoder
from ds_trainer.samples.sources.record import Record
from tests.support.compare import relative
from tests.support.oracle import Trajectory, train_plainly
from tests.support.pool import RankFailure, pool
from tests.support.runs import train_and_report
from tests.support.vision_models import as_base64, make_model, make_processor, picture

FAMILIES = ("llava", "qwen2_vl", "gemma3", "idefics3")
RATE = 0.05
ARGUMENTS: dict[str, Any] = dict(
    optim="sgd", learning_rate=RATE, weight_decay=0.0, max_grad_norm=0.0, max_steps=2, per_device_train_batch_size=1,
    train_sampling_strategy="sequential", remove_unused_columns=False
)  # fmt: skip


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Eight conversations of which every second one has images: with two ranks and one sample each, always the same
    rank has them, since the order is that of the data."""

    def __init__(self, family: str) -> None:
        encoder = ImageEncoder(make_processor(family))
        self.samples = []
        for index in range(8):
            images = [picture(12 + 8 * index, 20, index + 10 * n) for n in range(index % 4)] if index % 2 else []
            text = "<image>" * len(images) + f"what is {index}?"
            turns = [{"role": "user", "content": text}, {"role": "assistant", "content": f"it is {'x' * index}"}]
            fields = {"messages": turns, "images": [f"data:image;base64,{as_base64(image)}" for image in images]}
            self.samples += encoder(Record(f"a:{index}", "messages", fields))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self.samples[index])


def alone(family: str, samples: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    """Each sample as a batch of the processor."""
    collate = ImageCollator(ImageEncoder(make_processor(family)), always=False)
    return [collate([sample]) for sample in samples]


def loss_of_all(model: torch.nn.Module, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    total, count = torch.tensor(0.0), 0
    for batch in batches:
        targets = batch["labels"][0, 1:]
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        total = total + F.cross_entropy(model(**inputs).logits[0, :-1], targets, ignore_index=-100, reduction="sum")
        count += int((targets != -100).sum())
    return total / count


@cache
def reference(family: str, accumulation: int) -> Trajectory:
    return train_plainly(
        model_of(family), Samples(family), loss=loss_of_all, optimizer="sgd", learning_rate=RATE, weight_decay=0.0,
        steps=2, global_batch=2 * accumulation, seed=None, collate=partial(alone, family)
    )  # fmt: skip


def model_of(family: str) -> Any:
    return make_model(family, make_processor(family))


def run(family: str, stage: int, accumulation: int, folder: Path, always: bool = True, timeout: float = 90.0) -> Any:
    return pool(2).run(
        partial(_job, family, str(folder), always, zero_stage=stage, gradient_accumulation_steps=accumulation),
        timeout=timeout,
    )


def _job(family: str, folder: str, always: bool, **arguments: Any) -> Trajectory:
    collator = ImageCollator(ImageEncoder(make_processor(family)), always=always)
    assert not all("pixel_values" in collator([sample]) for sample in Samples(family).samples) or always
    return train_and_report(
        partial(model_of, family), partial(Samples, family), folder, Trainer, collator, **{**ARGUMENTS, **arguments}
    )


def assert_equal(found: Trajectory, wanted: Trajectory) -> None:
    """Biases begin at zero, and those of keys have gradients of rounding errors: weights are compared absolutely."""
    assert relative(found.losses, wanted.losses) < 1e-5
    assert relative(found.grad_norms, wanted.grad_norms) < 1e-5
    assert found.weights.keys() == wanted.weights.keys()
    for name, weight in wanted.weights.items():
        torch.testing.assert_close(
            found.weights[name], weight, rtol=1e-5, atol=1e-5 * max(1.0, float(weight.abs().max()))
        )


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_without_images_agrees_with_one_process(family: str, tmp_path: Path) -> None:
    for found in run(family, 3, 2, tmp_path):
        assert_equal(found, reference(family, 2))


@pytest.mark.cases(2)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_every_stage_agrees_with_one_process(stage: int, tmp_path: Path) -> None:
    for found in run("llava", stage, 1, tmp_path):
        assert_equal(found, reference("llava", 1))


def test_without_the_blank_image_the_ranks_disagree(tmp_path: Path) -> None:
    """They would wait for each other, if the watch over ZeRO 3's modules did not end the run."""
    with pytest.raises(RankFailure, match="ModulesDiffer"):
        run("llava", 3, 1, tmp_path, always=False, timeout=25.0)
