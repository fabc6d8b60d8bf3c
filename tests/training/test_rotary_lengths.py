"""Rotary embeddings that depend on the longest sequence: shards rotate as whole sequences, packing is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.model.sequence_sharding.attention_modules import use_sharded_attention
from ds_trainer.training.model.sequence_sharding.rotary_lengths import length_dependent_rotations
from ds_trainer.utils.errors import ConfigError
from tests.support.compare import assert_equal
from tests.support.models import LENGTH, VOCABULARY, RaggedTokens, tiny_llama
from tests.support.oracle import Trajectory, train_plainly
from tests.support.pool import pool
from tests.support.runs import train_and_report

ORIGINAL = LENGTH * 3 // 4  # a shard of half a sequence is shorter, and the whole sequence is longer
make_data = partial(RaggedTokens, 32)


def longrope() -> nn.Module:
    """A Phi 3: other factors for sequences that are longer than those of its pretraining."""
    from transformers import Phi3Config, Phi3ForCausalLM

    torch.manual_seed(0)
    half = 4  # of a head
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * half,
        "long_factor": [1.5, 3.0, 7.0, 20.0],
        "original_max_position_embeddings": ORIGINAL,
    }
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    more = {"vocab_size": VOCABULARY, "max_position_embeddings": 4 * LENGTH}
    more["original_max_position_embeddings"] = ORIGINAL
    return Phi3ForCausalLM(Phi3Config(**sizes, **tokens, **more, rope_parameters=rope))


def dynamic() -> nn.Module:
    """A Llama whose frequencies follow the length of the sequence."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    return tiny_llama(max_position_embeddings=ORIGINAL, rope_parameters=rope)


@cache
def reference(make_model: Callable[[], nn.Module]) -> Trajectory:
    return train_plainly(make_model(), make_data(), learning_rate=2e-3)


LAYOUTS = [(2, {"context_parallel_size": 2}), (2, {"sequence_parallel_size": 2})]
LAYOUTS += [(4, {"context_parallel_size": 2, "sequence_parallel_size": 2}), (4, {"sequence_parallel_size": 2})]


@pytest.mark.cases(2)
@pytest.mark.parametrize("make_model", [longrope, dynamic])
@pytest.mark.parametrize(("world", "layout"), LAYOUTS, ids=["cp2", "sp2", "cp2 sp2", "dp2 sp2"])
def test_shards_are_rotated_as_the_whole_sequence(
    make_model: Callable[[], nn.Module], world: int, layout: dict[str, Any], tmp_path: Path
) -> None:
    replicas = 2 if layout == {"sequence_parallel_size": 2} and world == 4 else 1
    options = {"learning_rate": 2e-3, "max_grad_norm": 0.0, "per_device_train_batch_size": 16 // replicas, **layout}
    job = partial(train_and_report, make_model, make_data, str(tmp_path), **options)
    for found in pool(world).run(job):
        assert_equal(found, reference(make_model), tolerance=3e-5)


@pytest.mark.parametrize("make_model", [longrope, dynamic])
def test_the_embedding_matters_here(make_model: Callable[[], nn.Module]) -> None:
    """Rotated like short sequences, the same tokens have other logits: else the tests above would see nothing."""
    tokens = make_data()[0]["input_ids"][None]
    with torch.no_grad():
        whole = make_model()(input_ids=tokens, use_cache=False).logits[:, :ORIGINAL]
        beginning = make_model()(input_ids=tokens[:, :ORIGINAL], use_cache=False).logits
    assert float((whole - beginning).abs().max()) > 1e-5


def test_embeddings_are_found_and_get_one_hook() -> None:
    model = longrope()
    assert [(kind, tokens) for _, kind, tokens in length_dependent_rotations(model)] == [("longrope", ORIGINAL)]
    assert [(kind, tokens) for _, kind, tokens in length_dependent_rotations(dynamic())] == [("dynamic", ORIGINAL)]
    assert list(length_dependent_rotations(tiny_llama())) == []
    before = len(model.model.rotary_emb._forward_pre_hooks)
    layout = ParallelLayout(2, cp=2)
    first, second = use_sharded_attention(model, layout), use_sharded_attention(model, layout)
    assert len(model.model.rotary_emb._forward_pre_hooks) == before + 1
    tokens = make_data()[0]["input_ids"][None]
    with torch.no_grad():  # without sharding the hooks change nothing
        assert torch.equal(model(input_ids=tokens).logits, longrope()(input_ids=tokens).logits)
    second.restore()
    first.restore()
    assert len(model.model.rotary_emb._forward_pre_hooks) == before


@pytest.mark.parametrize(("make_model", "kind"), [(longrope, "longrope"), (dynamic, "dynamic")])
def test_packing_beyond_the_original_length_is_refused(
    make_model: Callable[[], nn.Module], kind: str, tmp_path: Path
) -> None:
    def trainer(max_length: int) -> Trainer:
        args = TrainingArguments(str(tmp_path), packing=True, max_length=max_length, max_steps=1, use_cpu=True)
        return Trainer(make_model(), args, train_dataset=make_data())

    with pytest.raises(ConfigError, match=rf"rotary_emb \({kind}\) .* more than {ORIGINAL} tokens.*at most {ORIGINAL}"):
        trainer(ORIGINAL + 1)
    trainer(ORIGINAL)
