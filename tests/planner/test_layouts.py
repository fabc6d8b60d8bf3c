"""Heads and lengths against ranks: what fits, what is refused, and what is suggested instead."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.config.compiler import compile_config
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.planner.layouts import layout_conflicts, layout_problems, query_heads_per_rank, supported_sizes
from ds_trainer.planner.model_shape import ModelShape
from ds_trainer.utils.errors import ConfigError

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}


def llama(heads: int = 4, kv_heads: int = 2, length: int = 64) -> ModelShape:
    values = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": length}
    return ModelShape.from_config({**LLAMA, **values, "hidden_size": 8 * heads})


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
def test_query_heads_are_partitioned_in_complete_groups(kv_heads: int, group: int, tp: int) -> None:
    transformer = llama(kv_heads * group, kv_heads).transformer
    assert transformer is not None
    partitions = query_heads_per_rank(transformer.stacks[0], tp)
    assert len(partitions) == tp and sum(partitions) == kv_heads * group
    assert all(heads % group == 0 for heads in partitions)
    assert max(partitions) - min(partitions) <= group


def test_tensor_parallelism_alone_fits_any_heads() -> None:
    """AutoTP deals whole heads out unevenly, and the numbers stay exact (tests/training/evaluation/test_layouts.py)."""
    assert layout_conflicts(llama(3, 3), ParallelLayout(2, tp=2)) == []
    assert layout_conflicts(llama(4, 1), ParallelLayout(4, tp=4)) == []
    assert layout_conflicts(llama(4, 1), ParallelLayout(4, tp=2, sp=2)) == []  # 4 and 0: who has none exchanges none


@pytest.mark.parametrize(
    ("shape", "layout", "message"),
    [
        (
            llama(4, 2),
            ParallelLayout(8, sp=8),
            "dp 1 x cp 1 x sp 8 x tp 1 = 8 ranks: 4 query heads cannot be divided among 8 sequence-parallel ranks. "
            "Nearest sizes that this model supports on 8 ranks: sequence 4 or sequence 2 or data parallelism alone.",
        ),
        (
            llama(6, 3),
            ParallelLayout(8, tp=2, sp=4),
            "6 query heads (3 key heads) give the tensor-parallel ranks 4 and 2, which cannot be divided among 4 "
            "sequence-parallel ranks. Nearest sizes that this model supports on 8 ranks: tensor 2 x sequence 2 or ",
        ),
        (
            llama(3, 3),
            ParallelLayout(4, tp=2, sp=2),
            "3 query heads (3 key heads) give the tensor-parallel ranks 2 and 1, which cannot be divided among 2 "
            "sequence-parallel ranks. Nearest sizes that this model supports on 4 ranks: ",
        ),
        (
            llama(4, 2, length=12),
            ParallelLayout(8, cp=8),
            "sequences of at most 12 tokens are too short for the 16 chunks of context 8 x sequence 1. "
            "Nearest sizes that this model supports on 8 ranks: context 4 or context 2 or data parallelism alone.",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_rejected_with_sizes_that_do(
    shape: ModelShape, layout: ParallelLayout, message: str
) -> None:
    (problem,) = layout_problems(shape, layout)
    assert message in problem


def test_both_reasons_are_named_at_once() -> None:
    assert len(layout_problems(llama(4, 2, length=12), ParallelLayout(8, sp=8))) == 2


def test_both_stacks_of_an_encoder_decoder_are_checked() -> None:
    bart = {
        "model_type": "bart",
        "d_model": 24,
        "vocab_size": 61,
        **{f"{half}_{what}": 2 for half in ("encoder", "decoder") for what in ("layers",)},
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 6,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
    }
    found = layout_conflicts(ModelShape.from_config(bart), ParallelLayout(4, sp=4))
    assert found == ["6 query heads cannot be divided among 4 sequence-parallel ranks"]


small = st.integers(1, 4)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(4, 80), small, small, small, small)
def test_suggested_sizes_fit(kv: int, group: int, length: int, dp: int, tp: int, cp: int, sp: int) -> None:
    shape, layout = llama(kv * group, kv, length), ParallelLayout(dp * tp * cp * sp, tp, cp, sp)
    suggested = supported_sizes(shape, layout)
    assert all(not layout_conflicts(shape, ParallelLayout(layout.world_size, *sizes)) for sizes in suggested)
    assert bool(layout_problems(shape, layout)) == bool(layout_conflicts(shape, layout))
    if layout_conflicts(shape, layout):
        assert suggested  # data parallelism alone always fits


def test_unknown_models_are_accepted() -> None:
    assert layout_conflicts(ModelShape(), ParallelLayout(16, 2, 2, 4)) == []
    shape = llama(4, 2)
    assert layout_conflicts(replace(shape, transformer=None, max_length=None), ParallelLayout(64, sp=64)) == []


def test_the_compiler_rejects_bad_sizes_before_anything_starts() -> None:
    def compiled(sp: int) -> CompiledConfig:
        args = TrainingArguments("out", sequence_parallel_size=sp)
        return compile_config(args, ParallelLayout.of(args, 8), llama())

    with pytest.raises(ConfigError, match=r"^sequence_parallel_size=8 \(argument\): 4 query heads cannot be divided"):
        compiled(8)
    assert compiled(4).get("train_micro_batch_size_per_gpu") == 8
