"""Conversations with images: tokens as the processor makes them, labels for answers only, problems in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds_trainer.samples.chat.encoder import Encoder
from ds_trainer.samples.chat.options import EncodeOptions
from ds_trainer.samples.chat.problems import SampleProblem
from ds_trainer.samples.images.image_encoder import ImageEncoder
from ds_trainer.samples.sources.record import Record
from ds_trainer.utils.errors import ConfigError
from tests.support.vision_models import FAMILIES, as_base64, make_processor, picture

ENDS = {"llava": "</s>", "gemma3": "<end_of_turn>", "idefics3": "<end_of_utterance>"}
SIZES = [(20, 10), (40, 40), (16, 48)]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("images")
    paths = [folder / f"{index}.png" for index in range(len(SIZES))]
    for index, (path, size) in enumerate(zip(paths, SIZES, strict=True)):
        picture(*size, index).save(path)
    return [str(path) for path in paths]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def says(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def record(turns: list[dict[str, Any]], images: Any = (), kind: str = "messages") -> Record:
    return Record("a.jsonl:7", kind, {"messages": turns, **({"images": list(images)} if images else {})})


def trained(processor: Any, sample: dict[str, Any]) -> str:
    return str(processor.tokenizer.decode(sample["input_ids"][sample["labels"] != -100]))


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "smolvlm"])
def test_tokens_are_those_of_the_processor_and_only_answers_are_trained_on(family: str, images: list[str]) -> None:
    from PIL import Image

    processor = make_processor(family)
    encoder = ImageEncoder(processor)
    turns = [user("<image>what is it?"), says("a dog"), user("and <image>here?"), says("cats")]
    (sample,) = encoder(record(turns, images[:2]))
    end = ENDS.get(family, "<|im_end|>")
    space = " " if family == "idefics3" else ""
    assert trained(processor, sample) == f"{space}a dog{end}{space}cats{end}"
    assert sample["images"] == images[:2]
    parts = [
        user([{"type": "image"}, {"type": "text", "text": "what is it?"}]),
        says([{"type": "text", "text": "a dog"}]),
        user([{"type": "text", "text": "and "}, {"type": "image"}, {"type": "text", "text": "here?"}]),
        says([{"type": "text", "text": "cats"}]),
    ]
    text = processor.apply_chat_template(parts)
    inputs = processor(text=[text], images=[[Image.open(path) for path in images[:2]]], add_special_tokens=False)
    assert sample["input_ids"].tolist() == inputs["input_ids"][0]
    (plain,) = encoder(record([user("what?"), says("an <b>")]))
    assert "images" not in plain and trained(processor, plain) == f"{space}an <b>{end}"
    with pytest.raises(SampleProblem, match="images; they need a processor"):
        Encoder(processor.tokenizer)(record(turns, images[:2]))


def test_images_are_where_the_messages_say(images: list[str]) -> None:
    encoder = ImageEncoder(make_processor("qwen2_vl"))
    first, second = images[:2]
    forms = [
        record([user("<image>\nwhat?"), says("it")], [first]),
        record([user("what?"), says("it")], [first]),
        record([user([{"type": "image"}, {"type": "text", "text": "what?"}]), says("it")], [first]),
        record([user([{"type": "image", "image": first}, {"type": "text", "text": "what?"}]), says("it")]),
    ]
    encoded = [encoder(form)[0] for form in forms]
    assert all(sample["images"] == [first] for sample in encoded)
    assert all(np.array_equal(sample["input_ids"], encoded[0]["input_ids"]) for sample in encoded)
    mixed = [user([{"type": "image", "image": second}, {"type": "text", "text": "and"}, {"type": "image"}]), says("it")]
    assert encoder(record(mixed, [first]))[0]["images"] == [second, first]
    inline = f"data:image;base64,{as_base64(picture(*SIZES[0], 0))}"
    assert np.array_equal(encoder(record([user("what?"), says("it")], [inline]))[0]["labels"], encoded[0]["labels"])
    asked = Record(
        "a:1", "prompt_completion", {"prompt": [user("what?")], "completion": [says("it")], "images": [first]}
    )
    assert np.array_equal(encoder(asked)[0]["labels"], encoded[0]["labels"])


def test_tokens_of_images_are_never_trained_on(images: list[str]) -> None:
    processor = make_processor("qwen2_vl")
    everything = ImageEncoder(processor, EncodeOptions(train_on="all"))
    (sample,) = everything(record([user("<image>what?"), says("<image>it")], images[:2]))
    pads = sample["input_ids"] == processor.image_token_id
    assert pads.sum() > 2 and (sample["labels"][pads] == -100).all() and (sample["labels"][~pads] != -100).all()
    with pytest.raises(SampleProblem, match="no token is trained on"):
        ImageEncoder(processor)(record([user("<image>?"), says("a", train=False)], images[:1]))


@pytest.mark.parametrize("place", ["first", "last"])
def test_a_sample_is_never_cut_through_an_image(place: str, images: list[str]) -> None:
    processor = make_processor("qwen2_vl")
    turns = [user("<image>what?"), says("a dog and so on"), user("why?"), says("x" * 50)]
    if place == "last":
        turns[2] = user("why?<image>")
        images = [images[0], images[2]]
    whole = ImageEncoder(processor)(record(turns, images[: 1 if place == "first" else 2]))[0]
    image_ends = np.flatnonzero(whole["input_ids"] == processor.image_token_id)[-1]
    sample = record(turns, whole["images"])
    for length in (image_ends + 1, image_ends, image_ends - 1):
        message = "would cut or leave out an image" if place == "last" else "none of the first .* is trained on"
        with pytest.raises(SampleProblem, match=message):
            ImageEncoder(processor, EncodeOptions(max_length=int(length)))(sample)
        assert ImageEncoder(processor, EncodeOptions(max_length=int(length), long_samples="drop"))(sample) == []
        with pytest.raises(SampleProblem, match="max_length is"):
            ImageEncoder(processor, EncodeOptions(max_length=int(length), long_samples="error"))(sample)
    cut = ImageEncoder(processor, EncodeOptions(max_length=len(whole["input_ids"]) - 10)).encode(sample)
    assert cut.notices == {"truncated"} and cut.samples[0]["images"] == whole["images"]


def test_problems_are_named(images: list[str], tmp_path: Path) -> None:
    encoder = ImageEncoder(make_processor("qwen2_vl"))
    damaged = tmp_path / "damaged.png"
    picture(64, 64, 1).save(damaged)
    damaged.write_bytes(damaged.read_bytes()[:3000])
    long = tmp_path / "long.png"
    picture(1000, 2, 1).save(long)
    cases = [
        (record([user("<image><image>"), says("a")], images[:1]), "refer to more images than it has"),
        (record([user("<image>"), says("a")], images[:2]), "has 2 images, but its messages refer to fewer"),
        (record([says("a")], images[:1]), "no message of the user"),
        (record([user("<|image_pad|>"), says("a")], images[:1]), "has 1 image, but its text has '<|image_pad|>' 2"),
        (record([user("x"), says("a")], [str(damaged)]), "damaged.png' cannot be read: "),
        (record([user("x"), says("a")], [str(long)]), "the processor refuses an image: .*aspect ratio"),
        (record([user([{"type": "video", "video": "x"}]), says("a")]), "part of type 'video'; only images are read"),
        (Record("a.jsonl:7", "text", {"text": "<image> x", "images": images[:1]}), "is no conversation; give messages"),
    ]
    for wrong, message in cases:
        with pytest.raises(SampleProblem, match=message) as error:
            encoder(wrong)
        assert str(error.value).startswith("a.jsonl:7: ")


def test_templates_and_processors_that_cannot_be_used() -> None:
    from transformers import CLIPImageProcessorPil, CLIPProcessor

    for template, message in ((None, "no chat template"), ("{{ messages[0].content }}", "writes no '<image>'")):
        processor = make_processor("llava")
        processor.chat_template = processor.tokenizer.chat_template = template
        with pytest.raises(ConfigError, match=message):
            ImageEncoder(processor)
    tokenizer = make_processor("llava").tokenizer
    with pytest.raises(ConfigError, match="CLIPProcessor has no token for images"):
        ImageEncoder(CLIPProcessor(CLIPImageProcessorPil(), tokenizer))


def test_the_template_of_a_recipe_is_saved_with_the_processor() -> None:
    processor = make_processor("llava")
    other = processor.chat_template.replace("ASSISTANT", "BOT")
    encoder = ImageEncoder(processor, EncodeOptions(chat_template=other))
    assert processor.chat_template == other == encoder.options.chat_template
    assert torch.is_tensor(torch.as_tensor(encoder.dummy()["input_ids"]))


def test_the_blank_image_is_small_and_trains_nothing() -> None:
    for family, most in (("idefics3", 3), ("qwen2_vl", 16)):
        processor = make_processor(family)
        dummy = ImageEncoder(processor).dummy()
        assert (dummy["labels"] == -100).all() and len(dummy["images"]) == 1
        assert np.isin(dummy["input_ids"], processor.image_token_id).sum() <= most
    with pytest.raises(ConfigError, match=r"An image takes .* tokens or more, but max_length is 12"):
        ImageEncoder(make_processor("qwen2_vl"), EncodeOptions(max_length=12)).dummy()
