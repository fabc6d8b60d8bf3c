"""Tokenizers of recipes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_trainer.recipes.tokenizers import ByteTokenizer, PretrainedTokenizer, load_tokenizer
from ds_trainer.samples.sources.documents import Document
from ds_trainer.utils.errors import ConfigError


def word_tokenizer(directory: Path, eos: str | None = "<eos>", bos: str | None = None) -> str:
    """A Hugging Face tokenizer of a few words, saved in ``directory``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(["<unk>", "hello", "world", *(w for w in (eos, bos) if w)])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token=eos, bos_token=bos).save_pretrained(
        str(directory)
    )
    return str(directory)


def test_a_hugging_face_tokenizer(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(word_tokenizer(tmp_path))
    assert isinstance(tokenizer, PretrainedTokenizer)
    assert (tokenizer.vocab_size, tokenizer.separator_id) == (4, 3)
    assert tokenizer.encode(Document("x", b"hello world hello")).tolist() == [1, 2, 1]
    assert tokenizer.decode([1, 3, 2]) == "hello world"
    tokenizer.save_pretrained(tmp_path / "copy")
    assert load_tokenizer(str(tmp_path / "copy")).separator_id == 3


def test_the_separator_may_be_the_beginning(tmp_path: Path) -> None:
    assert load_tokenizer(word_tokenizer(tmp_path, eos=None, bos="<bos>")).separator_id == 3


def test_without_a_separator(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither an end-of-text nor a beginning-of-text token"):
        load_tokenizer(word_tokenizer(tmp_path, eos=None))


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(word_tokenizer(tmp_path))
    with pytest.raises(ConfigError, match=r"a\.txt: not UTF-8 text \(byte 3\).*set data\.tokenizer to bytes"):
        tokenizer.encode(Document("a.txt", b"caf\xe9"))


def test_bytes_by_name_and_by_directory(tmp_path: Path) -> None:
    ByteTokenizer().save_pretrained(tmp_path)
    assert isinstance(load_tokenizer("bytes"), ByteTokenizer)
    assert isinstance(load_tokenizer(str(tmp_path)), ByteTokenizer)


def test_directories_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'byte' is neither 'bytes' nor a directory"):
        load_tokenizer("byte")
    for content in ("", "[]", '{"model_type": ["llama"]}', '{"model_type": "llama", "hidden_size": "x"}'):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError, match="has no tokenizer that can be loaded"):
            load_tokenizer(str(tmp_path))
