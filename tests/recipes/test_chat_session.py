"""Conversations with a model: what it reads, where an answer ends, and what is remembered."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_trainer.recipes.chat_session import ChatSession, GenerationOptions, load_session
from ds_trainer.recipes.saved_model import find_saved_model
from ds_trainer.recipes.tokenizers import ByteTokenizer
from ds_trainer.utils.errors import ConfigError
from tests.support.chat_model import chat_tokenizer, save_chat_model


class Scripted:
    """A model that gives known tokens, through the interface of ``generate``."""

    device = torch.device("cpu")

    def __init__(self, tokens: list[int], positions: int = 200) -> None:
        self.tokens, self.seen = tokens, []  # type: ignore[var-annotated]
        self.generation_config = SimpleNamespace(eos_token_id=None, do_sample=False)
        sizes = SimpleNamespace(max_position_embeddings=positions)
        self.config = SimpleNamespace(get_text_config=lambda: sizes)

    def generate(self, input_ids: Any, streamer: Any, max_new_tokens: int, eos_token_id: Any, **options: Any) -> None:
        self.seen.append((input_ids[0].tolist(), options))
        streamer.put(input_ids)
        for token in self.tokens[:max_new_tokens]:
            streamer.put(torch.tensor([token]))
            if token in (eos_token_id or ()):
                break
        streamer.end()


def scripted(answer: str, options: GenerationOptions | None = None, **model: Any) -> tuple[ChatSession, Scripted, Any]:
    tokenizer = chat_tokenizer()
    script = Scripted(tokenizer(answer)["input_ids"], **model)
    return ChatSession(script, tokenizer, options or GenerationOptions(temperature=0)), script, tokenizer


def test_an_answer_ends_where_the_template_ends_a_turn() -> None:
    session, _, _ = scripted("yes<|im_end|>and more")
    pieces: list[str] = []
    answer = session.ask("really?", pieces.append)
    assert answer.text == "".join(pieces) == "yes"
    assert answer.end == "stop"


def test_the_model_reads_the_template_of_all_turns_and_the_system_message() -> None:
    session, script, tokenizer = scripted("fine<|im_end|>")
    session.set_system("Be brief.")
    session.ask("How are you?", lambda piece: None)
    session.ask("And now?", lambda piece: None)
    assert tokenizer.decode(script.seen[1][0]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHow are you?<|im_end|>\n"
        "<|im_start|>assistant\nfine<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    )
    session.reset()
    session.ask("Hello", lambda piece: None)
    assert tokenizer.decode(script.seen[2][0]).endswith("Be brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
                                                        "<|im_start|>assistant\n")  # fmt: skip


def test_max_new_tokens_and_positions_are_kept() -> None:
    session, _, _ = scripted("abcdefgh", GenerationOptions(max_new_tokens=3, temperature=0))
    answer = session.ask("x", lambda piece: None)
    assert (answer.text, answer.tokens, answer.end) == ("abc", 3, "length")
    session, _, _ = scripted("abcdefgh", positions=60)
    with pytest.raises(ConfigError, match=r"60 positions.*/reset"):
        session.ask("x" * 100, lambda piece: None)


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [(None, {"do_sample": True, "temperature": 0.7}), (0.0, {"do_sample": False}), (0.3, {"temperature": 0.3})],
)
def test_temperature(temperature: float | None, expected: dict[str, Any]) -> None:
    session, script, _ = scripted("a<|im_end|>", GenerationOptions(temperature=temperature))
    session.ask("x", lambda piece: None)
    assert expected.items() <= script.seen[0][1].items()


def test_settings_of_the_model_that_sample_are_used() -> None:
    session, script, _ = scripted("a<|im_end|>", GenerationOptions())
    script.generation_config.do_sample = True
    session.ask("x", lambda piece: None)
    assert "temperature" not in script.seen[0][1]


def test_a_template_that_refuses_says_why() -> None:
    tokenizer = chat_tokenizer("{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}x")
    session = ChatSession(Scripted([1]), tokenizer, GenerationOptions())
    session.set_system("s")
    with pytest.raises(ConfigError, match="no system"):
        session.ask("x", lambda piece: None)


def test_a_template_that_grows_without_end_is_refused() -> None:
    """Once when the model is loaded, and once by what was said."""
    began = time.process_time()
    tokenizer = chat_tokenizer("{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}")
    with pytest.raises(ConfigError, match=r"The chat template (makes|takes) more"):
        ChatSession(Scripted([1]), tokenizer, GenerationOptions())
    by_text = "{% for m in messages %}" + "{% for _ in m.content %}" * 4 + "{% endfor %}" * 5
    session = ChatSession(Scripted([1]), chat_tokenizer(by_text + "{{ messages[0].content }}"), GenerationOptions())
    with pytest.raises(ConfigError, match="refuses the conversation: The chat template takes more than"):
        session.ask("a long question" * 10, lambda piece: None)
    assert time.process_time() - began < 10


def test_an_interrupted_answer_is_kept() -> None:
    session, script, _ = scripted("partial")
    original = script.generate

    def interrupted(streamer: Any, **options: Any) -> None:
        original(streamer=streamer, **options)
        raise KeyboardInterrupt

    script.generate = interrupted  # type: ignore[method-assign]
    answer = session.ask("x", lambda piece: None)
    assert (answer.text, answer.end) == ("partial", "interrupted")


def test_bytes_and_a_tokenizer_without_template_continue_the_text() -> None:
    script = Scripted([ord("b"), 256, ord("c")])
    session = ChatSession(script, ByteTokenizer(), GenerationOptions(temperature=0))
    assert session.ask("a", lambda piece: None).text == "b"
    assert script.seen[0][0] == [256, ord("a")]
    with pytest.raises(ConfigError, match="no chat template"):
        session.set_system("x")


def test_a_seed_repeats_the_answer_and_greedy_equals_the_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    saved = find_saved_model(str(save_chat_model(tmp_path / "model")))
    drawn = [
        load_session(saved, GenerationOptions(20, 1.0, seed), "cpu").ask("Hello", lambda piece: None).text
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    session = load_session(saved, GenerationOptions(12, 0.0), "cpu")
    said = session.ask("Hello", lambda piece: None).text
    tokenizer = chat_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(saved.directory)
    ids = tokenizer("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    start, stop = len(ids), [tokenizer.convert_tokens_to_ids(name) for name in ("<|im_end|>", "<|endoftext|>")]
    for _ in range(12):  # plain PyTorch, without a cache
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in stop:
            break
    assert said == tokenizer.decode(ids[start:], skip_special_tokens=True)


@pytest.mark.parametrize("device", ["cuda:7", "toaster"])
def test_an_impossible_device(device: str, tmp_path: Path) -> None:
    saved = find_saved_model(str(save_chat_model(tmp_path / "model")))
    with pytest.raises(ConfigError, match=f"--device {device}"):
        load_session(saved, GenerationOptions(), device)
