"""The byte tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_trainer.recipes.tokenizers import ByteTokenizer
from ds_trainer.samples.sources.documents import Document
from ds_trainer.utils.errors import ConfigError


@given(st.binary())
def test_every_byte_is_one_token(data: bytes) -> None:
    ids = ByteTokenizer().encode(Document("x", data))
    assert ids.tolist() == list(data)


@given(st.text())
def test_text_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(Document("x", text.encode("utf-8", "replace"))).tolist()) == text.encode(
        "utf-8", "replace"
    ).decode("utf-8")


def test_separators_and_broken_characters_decode_to_visible_text() -> None:
    assert ByteTokenizer().decode([97, 256, 98]) == "a\nb"
    assert ByteTokenizer().decode([0xC3]) == "�"


def test_save_and_load(tmp_path: Path) -> None:
    ByteTokenizer().save_pretrained(tmp_path)
    assert ByteTokenizer.load(tmp_path).vocab_size == 257
    with pytest.raises(ConfigError, match=r"has no byte_tokenizer\.json"):
        ByteTokenizer.load(tmp_path / "elsewhere")
    (tmp_path / "byte_tokenizer.json").write_text(json.dumps({"vocab_size": 257, "separator_id": 0}))
    with pytest.raises(ConfigError, match="separator_id is 0, expected 256"):
        ByteTokenizer.load(tmp_path)
