"""Models that cannot be sharded raise an error: from the config if possible, else at the first call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from ds_trainer.parallel.attention import use_sharding
from ds_trainer.parallel.groups import parallel_groups
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.parallel.sequence_plan import SequencePlan
from ds_trainer.training.model.sequence_sharding.attention_modules import sharded_attention, use_sharded_attention
from ds_trainer.training.model.sequence_sharding.support import sharding_problems
from ds_trainer.utils.errors import ConfigError
from tests.support.models import VOCABULARY, tiny_llama
from tests.support.pool import pool
from tests.training.model.sharded_models import KINDS, sharded_model

LAYOUT = ParallelLayout(2, sp=2)


def built(name: str, **values: Any) -> nn.Module:
    """``name`` is the class of a model; its config gets small sizes and ``values``."""
    import transformers as hf

    config_class = getattr(hf, name).config_class
    sizes: dict[str, Any] = dict(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return getattr(hf, name)(config_class(**{**sizes, **values}))


def t5() -> nn.Module:
    return built("T5ForConditionalGeneration", d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)


def bart() -> nn.Module:
    sizes: dict[str, Any] = dict(encoder_ffn_dim=48, decoder_ffn_dim=48, encoder_layers=1, decoder_layers=1)
    return built("BartForConditionalGeneration", d_model=32, **sizes, decoder_start_token_id=1)


def llava() -> nn.Module:
    import transformers as hf

    text = tiny_llama().config
    vision = hf.CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    return hf.LlavaForConditionalGeneration(hf.LlavaConfig(vision_config=vision, text_config=text))


def rotated_by_length() -> nn.Module:
    """A model with rotations of its own, which take the length of the sequence."""
    model = tiny_llama()
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    return model


class WithoutPositions(LlamaForCausalLM):
    """A head that numbers tokens by itself."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:  # type: ignore[override]
        return super().forward(input_ids=input_ids, labels=labels)


UNSUPPORTED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "encoder-decoder, relative bias": (t5, "encoder-decoder"),
    "encoder-decoder, cross attention": (bart, "encoder-decoder"),
    "pictures": (llava, "vision_config"),
    "dropout of decoders": (lambda: tiny_llama(attention_dropout=0.1), "attention_dropout=0.1"),
    "dropout of encoders": (lambda: built("BertForMaskedLM"), "attention_probs_dropout_prob=0.1"),
    "dropout of GPT-2": (lambda: built("GPT2LMHeadModel", n_embd=32, n_head=4, n_layer=1), "attn_pdrop=0.1"),
    "softcap": (lambda: built("Gemma2ForCausalLM", head_dim=8), "attn_logit_softcapping=50.0"),
    "sinks": (lambda: built("GptOssForCausalLM", head_dim=8, num_local_experts=2), "attention sinks"),
    "chunks": (
        lambda: built(
            "Llama4ForCausalLM", head_dim=8, num_local_experts=2, num_experts_per_tok=1, intermediate_size_mlp=48
        ),
        "chunked_attention",
    ),
    "recurrent layers": (lambda: built("MambaForCausalLM", state_size=4), "attention interface"),
    "linear attention": (lambda: built("MiniMaxForCausalLM", head_dim=8, num_local_experts=2), "linear_attention"),
    "convolution": (lambda: built("Lfm2ForCausalLM", layer_types=["conv", "full_attention"]), "conv"),
    "position bias": (lambda: built("DebertaV2ForMaskedLM", relative_attention=True), "attention interface"),
    "alibi": (lambda: built("BloomForCausalLM", n_head=4, n_layer=1), "attention interface"),
    "counted positions": (
        lambda: built("RobertaForMaskedLM", attention_probs_dropout_prob=0.0),
        "numbers positions by counting",
    ),
    "no positions": (lambda: WithoutPositions(tiny_llama().config), "no position_ids"),
    "positions of the batch": (rotated_by_length, "rope_type='dynamic'"),
}


@pytest.mark.parametrize("what", list(UNSUPPORTED))
def test_unsupported_models_are_rejected_before_anything_runs(what: str) -> None:
    build, text = UNSUPPORTED[what]
    model = build()
    before = model.config._attn_implementation  # type: ignore[union-attr]
    with pytest.raises(ConfigError) as caught:
        use_sharded_attention(model, ParallelLayout(4, cp=2, sp=2))
    message = str(caught.value)
    assert text in message and type(model).__name__ in message
    assert "context_parallel_size=2 and sequence_parallel_size=2" in message and "set both to 1" in message.lower()
    assert model.config._attn_implementation == before  # type: ignore[union-attr]
    assert sharding_problems(model, ParallelLayout(4, tp=2)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_supported_models_are_not_rejected(kind: str) -> None:
    assert sharding_problems(sharded_model(kind), LAYOUT) == []


def test_every_reason_is_reported_once() -> None:
    model = rotated_by_length()
    model.config.attention_dropout = 0.1
    assert [p.partition(" but ")[2].split("=")[0] for p in sharding_problems(model, LAYOUT)] == [
        "attention_dropout",
        "rope_type",
    ]


# -- at the first call ------------------------------------------------------------------------------------------------


def call_case(what: str) -> list[str]:
    """The error on a rank; the next call works as usual."""
    import transformers as hf

    groups = parallel_groups(LAYOUT)
    plan = SequencePlan(LAYOUT, 8)
    positions = plan.positions(0, groups.coordinates.sp)[None]
    model = tiny_llama()
    use_sharded_attention(model, LAYOUT)
    tokens = torch.randint(3, VOCABULARY, (1, 4))
    given: dict[str, Any] = {"input_ids": tokens, "position_ids": positions, "use_cache": False}
    extra: dict[str, Any] = {}
    if what == "mask":
        given["attention_mask"] = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    elif what == "cache":
        cache = hf.DynamicCache(config=model.config)
        with use_sharding(None, None):
            model(tokens, past_key_values=cache, use_cache=True)
        given |= {"past_key_values": cache, "use_cache": True}
    elif what == "length":
        given |= {"input_ids": tokens[:, :2], "position_ids": positions[:, :2]}
    elif what == "dropout":
        model.train()
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.1
    elif what == "chunks":
        from transformers.masking_utils import create_chunked_causal_mask

        model.config.attention_chunk_size = 2
        with use_sharding(plan, groups), pytest.raises(ConfigError) as caught:
            create_chunked_causal_mask(model.config, torch.zeros(1, 4, 32), None, None, positions)
        return caught.value.problems
    elif what in ("or mask", "blocks"):
        from transformers.masking_utils import create_causal_mask

        overlay: dict[str, Any] = {"block_sequence_ids": torch.zeros(1, 4, dtype=torch.long)}
        if what == "or mask":
            overlay = {"or_mask_function": lambda b, h, q, k: q >= 0}
        with use_sharding(plan, groups), pytest.raises(ConfigError) as caught:
            create_causal_mask(model.config, torch.zeros(1, 4, 32), None, None, positions, **overlay)
        return caught.value.problems
    else:
        extra = {what: True if what == "output_attentions" else 3}
    with use_sharding(plan, groups) as sharding, pytest.raises(ConfigError) as caught:
        if extra:
            heads = [torch.zeros(1, n, 4, 8) for n in (4, 2, 2)]
            sharded_attention(model.model.layers[0].self_attn, *heads, None, **extra)
        else:
            model(**given)
    assert sharding is not None and sharding.calls == 0
    return caught.value.problems


CALLS = {
    "mask": r"mask of shape \[1, 1, 4, 4\]",
    "cache": "4 query tokens over 8 key tokens.*use_cache=False",
    "length": "attention over 2 tokens, but this rank.s shard has 4 of 8",
    "dropout": "attention dropout 0.1",
    "chunks": "chunked_overlay",
    "or mask": "or_masks",
    "blocks": "or_masks",
    "softcap": "softcap",
    "s_aux": "s_aux",
    "sinks": "sinks",
    "position_bias": "position_bias",
    "head_mask": "head_mask",
    "indices": "indices",
    "cache ": "paged",
    "sliding_window": "sliding_window=3 without a mask",
    "output_attentions": "output_attentions=True",
}


@pytest.mark.parametrize("what", [what for what in CALLS if what != "cache "])
def test_errors_at_the_first_call(what: str) -> None:
    for problems in pool(2).run(call_case, what):
        assert len(problems) == 1
        with pytest.raises(ValueError, match=CALLS[what]):
            raise ValueError(problems[0])


def late_backward_case() -> str:
    groups = parallel_groups(LAYOUT)
    plan = SequencePlan(LAYOUT, 8)
    model = tiny_llama()
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    use_sharded_attention(model, LAYOUT)
    with use_sharding(plan, groups):
        logits = model(
            torch.randint(3, VOCABULARY, (1, 4)), position_ids=plan.positions(0, groups.coordinates.sp)[None]
        ).logits
    with pytest.raises(RuntimeError) as caught:
        logits.sum().backward()
    return str(caught.value)


def test_a_layer_recomputed_outside_of_sharding_is_rejected() -> None:
    assert all("use_sharding around backward" in answer for answer in pool(2).run(late_backward_case))
