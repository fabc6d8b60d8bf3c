"""Text while it is generated: in time, complete, and never half a character."""

from __future__ import annotations

import torch

from ds_trainer.recipes.chat_session import TextStream
from tests.support.chat_model import chat_tokenizer

TEXT = "Grüße, 世界! 👩‍🔬 done"


def test_pieces_are_the_text_and_no_character_is_split() -> None:
    tokenizer = chat_tokenizer()
    ids = tokenizer(TEXT)["input_ids"]
    assert len(ids) > len(TEXT)  # a token is a byte
    pieces: list[str] = []
    stream = TextStream(tokenizer.decode, pieces.append)
    stream.put(torch.tensor([[1, 2, 3]]))  # the prompt
    for token in ids:
        stream.put(torch.tensor([token]))
    stream.end()
    assert "".join(pieces) == TEXT
    assert len(pieces) == len(TEXT)
    assert stream.tokens == ids


def test_a_character_that_stays_incomplete_is_written_at_the_end() -> None:
    tokenizer = chat_tokenizer()
    pieces: list[str] = []
    stream = TextStream(tokenizer.decode, pieces.append, prompt=False)
    stream.put(torch.tensor(tokenizer("a€")["input_ids"][:-1]))
    assert pieces == []
    stream.end()
    assert "".join(pieces) == "a\ufffd"


def test_the_work_per_token_does_not_grow() -> None:
    longest = 0

    def decode(tokens: object) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))  # type: ignore[arg-type]
        return "".join(chr(token) for token in tokens)  # type: ignore[attr-defined]

    stream = TextStream(decode, lambda piece: None, prompt=False)
    for token in range(65, 265):
        stream.put(torch.tensor([token]))
    assert longest <= 3
