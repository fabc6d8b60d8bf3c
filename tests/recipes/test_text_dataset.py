"""Text divided into blocks: every token is a target exactly once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_trainer.recipes.language_model_job import TokenBlocks, tokenize
from ds_trainer.recipes.tokenizers import ByteTokenizer
from ds_trainer.samples.sources.documents import Document
from ds_trainer.utils.errors import ConfigError


class WideTokenizer(ByteTokenizer):
    """A vocabulary that does not fit in 16 bits."""

    vocab_size = 70_000
    separator_id = 69_999


def targets(blocks: TokenBlocks) -> list[int]:
    """The targets of a causal model with Hugging Face's label shift, in order."""
    predicted: list[int] = []
    for index in range(len(blocks)):
        labels = blocks[index]["labels"][1:]
        predicted += labels[labels != -100].tolist()
    return predicted


def test_documents_are_concatenated() -> None:
    stream = tokenize([Document("a", b"xy"), Document("b", b"z")], ByteTokenizer())
    assert stream.tokens.tolist() == [256, 120, 121, 256, 122]
    assert stream.tokens.dtype == np.uint16
    assert (stream.documents, stream.bytes) == (2, 3)


def test_wide_vocabularies() -> None:
    stream = tokenize([Document("a", b"x")], WideTokenizer())
    assert stream.tokens.tolist() == [69_999, 120]
    assert stream.tokens.dtype == np.uint32
    assert TokenBlocks(stream.tokens, 2)[0]["input_ids"].tolist() == [69_999, 120]


def test_no_documents() -> None:
    stream = tokenize([], ByteTokenizer())
    assert (len(stream.tokens), stream.documents, stream.bytes) == (0, 0, 0)


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=6), st.integers(2, 30))
def test_every_token_but_the_first_separator_is_a_target_once(texts: list[bytes], length: int) -> None:
    stream = tokenize([Document("x", text) for text in texts], ByteTokenizer())
    blocks = TokenBlocks(stream.tokens, length, keep_ragged=True)
    assert targets(blocks) == stream.tokens[1:].tolist()


@given(st.integers(2, 200), st.integers(2, 30))
def test_training_omits_less_than_a_block(tokens: int, length: int) -> None:
    run = np.arange(tokens, dtype=np.uint16)
    if tokens < length:
        with pytest.raises(ConfigError, match=rf"{tokens} tokens are too few .*data\.sequence_length={length}"):
            TokenBlocks(run, length)
        return
    blocks = TokenBlocks(run, length)
    predicted = targets(blocks)
    assert predicted == run[1 : len(predicted) + 1].tolist()
    assert 0 <= tokens - 1 - len(predicted) < length - 1


def test_a_ragged_block_is_padded() -> None:
    blocks = TokenBlocks(np.arange(1, 7, dtype=np.uint16), 4, keep_ragged=True)
    assert len(blocks) == 2
    assert blocks[0]["input_ids"].tolist() == [1, 2, 3, 4]
    assert blocks[1]["input_ids"].tolist() == [4, 5, 6, 0]
    assert blocks[1]["labels"].tolist() == [4, 5, 6, -100]
    assert all(tensor.dtype == torch.int64 for tensor in blocks[1].values())


def test_blocks_are_copies() -> None:
    run = np.arange(8, dtype=np.uint16)
    blocks = TokenBlocks(run, 4)
    sample = blocks[0]
    sample["input_ids"].zero_()
    assert blocks[0]["input_ids"].tolist() == [0, 1, 2, 3]
    assert sample["labels"].tolist() == [0, 1, 2, 3]


def test_out_of_range_ends_iteration() -> None:
    blocks = TokenBlocks(np.arange(8, dtype=np.uint16), 4)
    assert len(list(blocks)) == len(blocks) == 2  # type: ignore[call-overload]
    with pytest.raises(IndexError):
        blocks[-1]
