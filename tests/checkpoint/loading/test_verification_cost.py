"""What a comparison costs: reads counted over a file with the tensors of an 8B model, all of them holes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ds_trainer.checkpoint.loading.expected_weights import ExpectedWeights
from ds_trainer.checkpoint.loading.local_weights import LocalShard, model_tensors, sampled_positions, whole_indices
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
