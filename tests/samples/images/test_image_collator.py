"""Batches with images: what the processor makes of the same samples; blank images change nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from ds_trainer.samples.images.image_encoder import ImageCollator, ImageEncoder
from ds_trainer.samples.sources.record import Record
from ds_trainer.utils.errors import ConfigError
from tests.support.vision_models import make_model, make_processor, picture

TESTED = ("llava", "qwen2_vl", "gemma3", "idefics3", "internvl")
COUNTS = (1, 0, 2)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("images")
    for index in range(3):
        picture(16 + 8 * index, 24, index).save(folder / f"{index}.png")
    return [str(folder / f"{index}.png") for index in range(3)]


def samples(encoder: ImageEncoder, images: list[str], counts: tuple[int, ...] = COUNTS) -> list[dict[str, Any]]:
    found, rest = [], iter(images)
    for index, count in enumerate(counts):
        turns = [
            {"role": "user", "content": "<image>" * count + f"what is {index}?"},
            {"role": "assistant", "content": "a" * (index + 1)},
        ]
        fields = {"messages": turns, "images": [next(rest) for _ in range(count)]}
        found += encoder(Record(f"a:{index}", "messages", fields))
    return found


@pytest.mark.parametrize("family", TESTED)
def test_a_batch_is_what_the_processor_makes(family: str, images: list[str]) -> None:
    processor = make_processor(family)
    encoder = ImageEncoder(processor)
    rows = samples(encoder, images)
    batch = ImageCollator(encoder, processor.tokenizer.pad_token_id)(rows)
    texts, opened, rest = [], [], iter(images)
    for index, count in enumerate(COUNTS):
        parts = [*[{"type": "image"}] * count, {"type": "text", "text": f"what is {index}?"}]
        answer = [{"type": "text", "text": "a" * (index + 1)}]
        turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
        texts.append(processor.apply_chat_template(turns))
        opened.append([Image.open(next(rest)).convert("RGB") for _ in range(count)])
    if family in ("gemma3", "idefics3"):  # these cannot have a row without images
        texts, opened = [texts[0], texts[2]], [opened[0], opened[2]]
    flat = opened if family in ("gemma3", "idefics3") else [image for row in opened for image in row]
    wanted = processor(
        text=texts, images=flat, padding=True, padding_side="right", return_tensors="pt", add_special_tokens=False
    )
    assert {*batch} == {*wanted, "labels"}
    for key, value in wanted.items():
        found = batch[key][[0, 2]] if len(batch[key]) == 3 and len(value) == 2 else batch[key]
        torch.testing.assert_close(found[:, : value.shape[1]] if value.dim() == 2 else found, value)


@pytest.mark.parametrize("family", TESTED)
def test_the_blank_image_adds_nothing_and_runs_the_tower(family: str, images: list[str]) -> None:
    processor = make_processor(family)
    encoder = ImageEncoder(processor)
    (text,) = samples(encoder, images, (0,))
    text["source_ids"] = torch.ones(len(text["input_ids"]), dtype=torch.int64)  # as of mixtures
    gradients = []
    for always in (True, False):
        model = make_model(family, processor)
        batch = ImageCollator(encoder, always=always)([text])
        batch.pop("source_ids", None)  # as the Trainer does
        assert ("pixel_values" in batch) is always and len(batch["input_ids"]) == 1 + always
        output = model(**batch)
        output.loss.backward()
        gradients.append((output.loss.detach(), {n: p.grad for n, p in model.named_parameters()}))
    (with_blank, found), (without, wanted) = gradients
    torch.testing.assert_close(with_blank, without)
    reached = [name for name in found if found[name] is not None and wanted[name] is None]
    assert reached and all(not found[name].any() for name in reached)  # the tower, with zeros
    for name, gradient in wanted.items():
        if gradient is not None:
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def test_pixels_get_the_type_of_the_model_and_are_read_late(images: list[str], tmp_path: Path) -> None:
    encoder = ImageEncoder(make_processor("llava"))
    collate = ImageCollator(encoder, dtype=torch.bfloat16)
    picture(30, 30, 9).save(tmp_path / "x.png")
    row = samples(encoder, [str(tmp_path / "x.png")], (1,))[0]
    first = collate([row])
    assert first["pixel_values"].dtype == torch.bfloat16 and first["labels"].dtype == torch.int64
    picture(30, 30, 10).save(tmp_path / "x.png")
    assert not torch.equal(collate([row])["pixel_values"], first["pixel_values"])
    os.remove(tmp_path / "x.png")
    with pytest.raises(ConfigError, match=r"read when it was prepared cannot be read now: .*x\.png"):
        collate([row])


def test_an_image_that_was_replaced_by_one_of_another_shape(tmp_path: Path) -> None:
    encoder = ImageEncoder(make_processor("qwen2_vl"))
    picture(32, 32, 0).save(tmp_path / "x.png")
    row = samples(encoder, [str(tmp_path / "x.png")], (1,))[0]
    picture(8, 32, 0).save(tmp_path / "x.png")
    with pytest.raises(ConfigError, match=r"x\.png.*take 4 tokens, but took 16 when it was prepared"):
        ImageCollator(encoder)([row])
