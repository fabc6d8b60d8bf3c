"""What a comparison costs: reads counted over a file with the tensors of an 8B model, all of them holes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds_trainer.checkpoint.loading.expected_weights import ExpectedWeights
from ds_trainer.checkpoint.loading.local_weights import (
    LocalShard,
    ModelTensor,
    ends_of_tensor,
    model_tensors,
    sampled_positions,
    sampling,
    whole_indices,
)
from ds_trainer.checkpoint.loading.sampled_files import SampledFiles
from ds_trainer.engine.loading.empty_model import empty_model
from ds_trainer.parallel.shard_slices import ShardSlice


def model_of_8b() -> Any:
    """The shape of Llama 3 8B, on meta: 291 tensors."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    return empty_model(lambda: LlamaForCausalLM(config), recorded=False)


def file_of_holes(model: Any, path: Path) -> None:
    entries, end = {}, 0
    for name, tensor in model.state_dict().items():
        size = 2 * tensor.numel()
        entries[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + end)


def pages_of(model: Any, ranks: int, rank: int) -> tuple[int, set[str]]:
    """Pages that a rank reads under ZeRO-3, and the tensors that it samples."""
    held = []
    for entry in model_tensors(model):
        size = math.prod(entry.shape)
        part = -(-size // ranks)
        shard = ShardSlice.whole(entry.shape).run(min(part * rank, size), min(part * (rank + 1), size))
        if len(shard):
            held.append(LocalShard(entry, shard, "weight", entry.tensor))
    pages, names = 0, set()
    for part_, whole in zip(held, sampling(held, [1] * len(held), rank, ranks), strict=True):
        at = sampled_positions(part_, 1, rank) if whole else ends_of_tensor(part_)
        pages += len(np.unique(whole_indices(part_.slice, at) * 2 // 4096))
        if whole:
            names.add(part_.tensor.names[0])
    return pages, names


def test_what_all_ranks_read_together_hardly_grows_with_their_number() -> None:
    model = model_of_8b()
    totals = {}
    for ranks in (8, 64, 1024):
        found = [pages_of(model, ranks, rank) for rank in range(0, ranks, max(1, ranks // 64))]
        totals[ranks] = sum(pages for pages, _ in found) * ranks / len(found)
        assert all(len(names) >= 8 for _, names in found)  # shards of one rank that are wrong are found
        assert max(pages for pages, _ in found) <= 291 * 6 * 2
        if ranks == 64:
            assert set.union(*(names for _, names in found)) == {entry.names[0] for entry in model_tensors(model)}
    assert totals[64] < 2 * totals[8] and totals[1024] < 6 * totals[8]  # it was 8 and 128 times


def test_experts_are_sampled_one_by_one_on_any_number_of_ranks() -> None:
    """Of 128 stacked experts, each is looked at by somebody; and the ends of a tensor by their ranks."""
    for ranks in (8, 1024):
        shape = (128, 256, 512)
        entry = ModelTensor(["experts"], torch.empty(0), shape)
        part, seen = math.prod(shape) // ranks, set()
        for rank in range(ranks):
            held = [LocalShard(entry, ShardSlice.whole(shape).run(part * rank, part * (rank + 1)), "weight", None)]
            others = [LocalShard(replace(entry, names=[f"{n}"]), held[0].slice, "weight", None) for n in range(500)]
            (chosen, *_) = sampling([*held, *others], [1] * 501, rank, ranks)
            at = sampled_positions(held[0], 1, rank) if chosen else ends_of_tensor(held[0])
            seen |= set(whole_indices(held[0].slice, at).tolist())
        assert {index // (256 * 512) for index in seen} == set(range(128))
        assert {0, math.prod(shape) - 1} <= seen and len(seen) <= 1024 * 6 * 64


# Instead of the others: the same test with one rank, and tests/checkpoint/loading/test_range_reader.py
@pytest.mark.cases(1)
@pytest.mark.parametrize("ranks", [1, 64])
def test_verifying_8b_takes_thousands_of_small_reads(ranks: int, tmp_path: Path) -> None:
    model = model_of_8b()
    file_of_holes(model, tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_size > 16e9
    files, tensors = SampledFiles(tmp_path), model_tensors(model)
    assert len(tensors) == 291
    expected = ExpectedWeights(model, {name: entry.shape for entry in tensors for name in entry.names}, files)
    looked_at = 0
    for entry in tensors:
        size = math.prod(entry.shape)
        shard = ShardSlice.whole(entry.shape).run(size // ranks * (ranks // 2), size // ranks * (ranks // 2 + 1))
        at = sampled_positions(
            LocalShard(entry, shard, "weight", entry.tensor), len(expected.sources(entry.names[0])), 0
        )
        looked_at += len(at)
        assert not expected.elements(entry.names[0], whole_indices(shard, at)).any()
    assert not expected.unexpected and not expected.failed
    assert 291 * 64 <= looked_at <= 291 * 6 * 64
    assert files.reads <= 291 * 6 * 2  # a run may lie across two pages
    assert files.bytes_read < 16e6  # a thousandth of the file
