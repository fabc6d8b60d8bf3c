"""MoE blocks are found by their structure; decoders, encoders and towers are not taken for any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer.engine.zero3.leaf_modules import moe_blocks
from tests.support.mixed_batches import Block, Expert, MixtureBlock, MixtureModel, TwoTowers

_TEXT: dict[str, Any] = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
_DEEPSEEK: dict[str, Any] = {
    **_TEXT,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}


def _of(name: str, task: str, **values: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{name}Config")(**values)
        with torch.device("meta"):
            model: nn.Module = getattr(transformers, f"{name}{task}")(config)
        return model

    return make


def _clip(name: str) -> Callable[[], nn.Module]:
    towers = {
        "text_config": {**_TEXT, "projection_dim": 8},
        "vision_config": {**_TEXT, "image_size": 8, "patch_size": 4, "projection_dim": 8},
    }
    return _of(name, "Model", **towers)


_VIT = {**_TEXT, "image_size": 8, "patch_size": 4, "num_labels": 2}
_T5 = dict(vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
DENSE = {
    "Llama": _of("Llama", "ForCausalLM", **_TEXT),
    # As many labels as layers: the head has the shape of a router.
    "Llama classifier": _of("Llama", "ForSequenceClassification", **_TEXT, num_labels=2, pad_token_id=0),
    "Qwen 3": _of("Qwen3", "ForCausalLM", **_TEXT),
    "GPT-2": _of("GPT2", "LMHeadModel", vocab_size=61, n_embd=32, n_layer=2, n_head=4),
    "BERT classifier": _of("Bert", "ForSequenceClassification", **_TEXT, num_labels=2),
    "T5": _of("T5", "ForConditionalGeneration", **_T5),
    "ViT classifier": _of("ViT", "ForImageClassification", **_VIT),
    "CLIP": _clip("CLIP"),
    "SigLIP": _clip("Siglip"),
    "two towers": TwoTowers,
}
# transformers 5 stacks the experts of a block into one parameter: whoever gets tokens, all of it is gathered.
STACKED = {
    "Mixtral": _of("Mixtral", "ForCausalLM", **_TEXT, num_local_experts=4),
    "Qwen3-MoE": _of(
        "Qwen3Moe", "ForCausalLM", **_TEXT, num_experts=4, moe_intermediate_size=16, decoder_sparse_step=1
    ),
    "DeepSeek-V2": _of("DeepseekV2", "ForCausalLM", **_DEEPSEEK),
    "DeepSeek-V3": _of("DeepseekV3", "ForCausalLM", **_DEEPSEEK),
    "GPT-OSS": _of("GptOss", "ForCausalLM", **_TEXT, num_local_experts=4, head_dim=8),
}


@pytest.mark.parametrize("name", DENSE)
def test_dense_models_have_no_moe_blocks(name: str) -> None:
    assert moe_blocks(DENSE[name]()) == {}


@pytest.mark.parametrize("name", STACKED)
def test_stacked_experts_need_no_leaf_module(name: str) -> None:
    """And indeed no expert is a module of its own."""
    model = STACKED[name]()
    assert moe_blocks(model) == {}
    assert any(parameter.dim() == 3 for parameter in model.parameters())
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    assert [len(one) for one in lists] == [2]  # the layers


# The same four families with experts that are modules of their own, as transformers 4 and the checkpoints' own code
# build them: names and nesting of each.


class Gate(nn.Module):
    """DeepSeek's router: a weight, no ``Linear``."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(experts, width))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(experts))


class Shared(nn.Module):
    """DeepSeek: a gate, experts, and one for all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate(32, 4)
        self.experts = nn.ModuleList(Expert(32) for _ in range(4))
        self.shared_experts = Expert(32)


class Nested(nn.Module):
    """A router beside a module that holds the experts, as GPT-OSS and Megatron have it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(32, 4)
        self.experts = nn.Module()
        self.experts.local_experts = nn.ModuleList(Expert(32) for _ in range(4))


class ByName(nn.Module):
    """Experts in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 3, bias=False)
        self.experts = nn.ModuleDict({f"expert_{index}": Expert(32) for index in range(3)})


def _with_blocks(name: str, block: Callable[[], nn.Module], attribute: str) -> nn.Module:
    model = DENSE[name]()
    for layer in model.model.layers:  # type: ignore[attr-defined, union-attr]
        setattr(layer, attribute, block())
    return model


@pytest.mark.parametrize(
    ("block", "attribute"),
    [
        (lambda: MixtureBlock(32, 4), "block_sparse_moe"),  # Mixtral
        (lambda: MixtureBlock(32, 8), "mlp"),  # Qwen3-MoE
        (Shared, "mlp"),  # DeepSeek-V2, -V3
        (Nested, "mlp"),  # GPT-OSS
        (ByName, "feed_forward"),
    ],
)
def test_blocks_with_expert_modules_are_found(block: Callable[[], nn.Module], attribute: str) -> None:
    found = moe_blocks(_with_blocks("Llama", block, attribute))
    assert list(found) == [f"model.layers.{layer}.{attribute}" for layer in range(2)]


def test_blocks_inside_a_larger_model_are_found() -> None:
    model = nn.ModuleDict({"vision": TwoTowers(), "language_model": MixtureModel()})
    assert list(moe_blocks(model)) == [f"language_model.layers.{layer}.mixture" for layer in range(2)]


def test_the_whole_model_is_never_a_leaf_module() -> None:
    assert moe_blocks(MixtureBlock(16, 4)) == {}


def test_layers_are_not_confused_with_a_head_of_as_many_rows() -> None:
    """A norm in each of them: they are layers."""
    tower = nn.Module()
    tower.layers, tower.head = nn.ModuleList(Block(16) for _ in range(4)), nn.Linear(16, 4)
    assert moe_blocks(nn.ModuleDict({"tower": tower})) == {}
