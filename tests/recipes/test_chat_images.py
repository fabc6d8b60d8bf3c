"""Images in a conversation: the model reads what it was trained on, with every family of processors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_trainer.recipes.chat_session import ChatImages, ChatSession, GenerationOptions, load_session
from ds_trainer.recipes.saved_model import find_saved_model
from ds_trainer.samples.chat.options import EncodeOptions
from ds_trainer.samples.images.image_encoder import ImageCollator, ImageEncoder
from ds_trainer.samples.sources.record import Record
from ds_trainer.utils.errors import ConfigError
from tests.support.chat_model import chat_tokenizer, save_chat_model
from tests.support.vision_models import make_model, make_processor, picture, save_vision_model

FAMILIES = ("llava", "qwen2_vl", "qwen2_5_vl", "gemma3", "idefics3", "internvl")
GREEDY = GenerationOptions(max_new_tokens=3, temperature=0)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pictures")
    paths = [folder / f"{seed}.png" for seed in range(3)]
    for seed, path in enumerate(paths):
        picture(16 + 4 * seed, 20, seed).save(path)
    return [str(path) for path in paths]


class Recorder:
    """A model that keeps what it is given, and answers with an end-of-text token."""

    device, dtype = torch.device("cpu"), torch.float32
    generation_config = SimpleNamespace(eos_token_id=None, do_sample=False)
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=4096))

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def generate(self, streamer: Any, **options: Any) -> None:
        self.seen.append({key: value for key, value in options.items() if isinstance(value, torch.Tensor)})
        streamer.put(options["input_ids"])
        streamer.put(torch.tensor([options["eos_token_id"][0]]))
        streamer.end()


def session_of(family: str, model: Any) -> ChatSession:
    processor = make_processor(family)
    processor.tokenizer.chat_template = processor.chat_template
    return ChatSession(model, processor.tokenizer, GREEDY, lambda: ChatImages(processor))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_reads_what_it_was_trained_on(family: str, pictures: list[str]) -> None:
    model = Recorder()
    session = session_of(family, model)
    for path in pictures[:2]:
        session.attach(path)
    session.ask("what is it?", lambda piece: None)
    session.attach(pictures[2])
    session.ask("and this?", lambda piece: None)

    encoder = ImageEncoder(make_processor(family), EncodeOptions())
    turns = [
        {"role": "user", "content": "<image><image>what is it?"},
        {"role": "assistant", "content": "a thing"},
        {"role": "user", "content": "<image>and this?"},
        {"role": "assistant", "content": "another"},
    ]
    for seen, count, images in zip(model.seen, (2, 4), (2, 3), strict=True):
        fields = {"messages": turns[:count], "images": pictures[:images]}
        sample = encoder.encode(Record("a", "messages", fields)).samples[0]
        batch = ImageCollator(encoder, always=False)([sample])
        prompt, trained = seen["input_ids"][0], batch["input_ids"][0]
        if count == 2:  # the first answer was another one
            assert torch.equal(prompt, trained[: len(prompt)])
        assert set(seen) == set(batch) - {"labels"}
        for key in set(seen) - {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"}:
            assert torch.equal(seen[key], batch[key]), key


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_depend_on_the_image(family: str, pictures: list[str]) -> None:
    model = make_model(family, make_processor(family)).eval()
    for weight in model.parameters():  # Gemma 3 begins with a projection of zeros
        if not weight.any():
            torch.nn.init.normal_(weight)
    answers = []
    for path in (None, pictures[0], pictures[1], pictures[1]):
        session = session_of(family, model)
        logits: list[torch.Tensor] = []
        hook = model.lm_head.register_forward_hook(lambda module, given, out, logits=logits: logits.append(out[0, -1]))
        if path is not None:
            session.attach(path)
        session.ask("what is it?", lambda piece: None)
        hook.remove()
        answers.append(logits[0])
    assert torch.equal(answers[2], answers[3])
    assert not torch.allclose(answers[0], answers[1]) and not torch.allclose(answers[1], answers[2])


def test_a_saved_model(tmp_path: Path, pictures: list[str]) -> None:
    session = load_session(find_saved_model(str(save_vision_model(tmp_path / "base", "llava"))), GREEDY, "cpu")
    session.attach(pictures[0])
    assert 0 < session.ask("what is it?", lambda piece: None).tokens <= 3
    assert session.ask("and then?", lambda piece: None).tokens > 0  # the image is read again
    session.reset()
    assert session.ask("hello", lambda piece: None).tokens > 0


def test_what_cannot_work(tmp_path: Path, pictures: list[str]) -> None:
    text = load_session(find_saved_model(str(save_chat_model(tmp_path / "text"))), GREEDY, "cpu")
    with pytest.raises(ConfigError, match="takes no images"):
        text.attach(pictures[0])
    session = session_of("llava", Recorder())
    for name, words in (("none.png", "none.png.* cannot be read"), ("text.png", "text.png.* cannot be read")):
        (tmp_path / "text.png").write_text("no image")
        with pytest.raises(ConfigError, match=words):
            session.attach(str(tmp_path / name))
    processor = make_processor("llava")
    tokenizer = chat_tokenizer()  # whose template writes text alone
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    other = ChatSession(Recorder(), tokenizer, GREEDY, lambda: ChatImages(processor))
    other.attach(pictures[0])
    with pytest.raises(ConfigError, match=r"1 image, but the template wrote '<image>' 0 times|refuses"):
        other.ask("what is it?", lambda piece: None)
