"""Small models of many architectures, whose initializations differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def transformers_model(kind: str, model_type: str, **values: Any) -> nn.Module:
    """A model of transformers: ``kind`` is the suffix of its auto class."""
    import transformers

    config = transformers.CONFIG_MAPPING[model_type](**values)
    model: nn.Module = getattr(transformers, f"AutoModel{kind}").from_config(config)
    return model


def _text(model_type: str, kind: str = "ForCausalLM", **values: Any) -> Callable[[], nn.Module]:
    sizes: dict[str, Any] = dict(vocab_size=800, hidden_size=64, num_hidden_layers=2, pad_token_id=1)
    if "mamba" not in model_type:
        sizes |= dict(intermediate_size=128, num_attention_heads=4)
    tokens = dict(bos_token_id=2, eos_token_id=3)
    return lambda: transformers_model(kind, model_type, **{**sizes, **tokens, **values})


def _vision(model_type: str, **values: Any) -> Callable[[], nn.Module]:
    sizes = dict(hidden_size=64, num_hidden_layers=2, intermediate_size=128, num_attention_heads=4, image_size=32)
    return lambda: transformers_model("", model_type, **{**sizes, "patch_size": 8, **values})


def _clip() -> nn.Module:
    sizes = dict(hidden_size=64, num_hidden_layers=2, intermediate_size=128, num_attention_heads=4)
    text = dict(**sizes, vocab_size=800, pad_token_id=1, bos_token_id=2, eos_token_id=3)
    vision = dict(**sizes, image_size=32, patch_size=8)
    return transformers_model("", "clip", text_config=text, vision_config=vision, projection_dim=32)


TRANSFORMERS: dict[str, Callable[[], nn.Module]] = {
    "Llama, tied": _text("llama", num_key_value_heads=2, tie_word_embeddings=True),
    "Qwen3-MoE": _text(
        "qwen3_moe", num_key_value_heads=2, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, head_dim=16
    ),
    "GPT-2, scaled": _text("gpt2", n_inner=256),
    "BERT": _text("bert", "ForSequenceClassification"),
    "DeBERTa": _text("deberta-v2", "ForMaskedLM"),
    "T5": lambda: transformers_model(
        "ForSeq2SeqLM", "t5", vocab_size=800, d_model=64, d_ff=128, d_kv=16, num_layers=2, num_heads=4,
        decoder_start_token_id=0, initializer_factor=1.5
    ),
    "BART": lambda: transformers_model(
        "ForSeq2SeqLM", "bart", vocab_size=800, d_model=64, encoder_ffn_dim=128, decoder_ffn_dim=128,
        encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        max_position_embeddings=64, bos_token_id=2, eos_token_id=3, decoder_start_token_id=2, forced_eos_token_id=3
    ),
    "ViT, truncated": _vision("vit"),
    "BEiT": _vision("beit", use_relative_position_bias=True, use_mask_token=True, layer_scale_init_value=0.1),
    "Mamba": _text("mamba"),
    "Mamba, scaled": _text("mamba", rescale_prenorm_residual=True),
    "Jamba": _text(
        "jamba", num_key_value_heads=2, num_experts=2, mamba_d_state=8, mamba_d_conv=2, mamba_expand=2, mamba_dt_rank=4,
        attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, use_mamba_kernels=False
    ),
    "Whisper": lambda: transformers_model(
        "ForSpeechSeq2Seq", "whisper", vocab_size=800, d_model=64, encoder_ffn_dim=128, decoder_ffn_dim=128,
        encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        max_source_positions=50, max_target_positions=40, num_mel_bins=8, pad_token_id=1, bos_token_id=2,
        eos_token_id=3, decoder_start_token_id=2
    )
}  # fmt: skip
"""Models that follow the convention of transformers."""


class ScaledInConstructor(nn.Module):
    """Initializes itself in its constructor, module by module and then some weights by name."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 64, padding_idx=3)
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(64, 90), "down": nn.Linear(90, 64)}) for _ in "ab")
        self.head = nn.Linear(64, 500, bias=False)
        self.head.weight = self.embedding.weight
        self.gain = nn.Parameter(torch.linspace(0.5, 2.0, 40))
        self.positions = nn.Parameter(torch.zeros(1, 20, 64))
        nn.init.trunc_normal_(self.positions, std=0.02)
        self.register_buffer("mask", torch.ones(8, 8).tril())
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("down.weight"):
                nn.init.normal_(parameter, std=0.02 / 2)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


class Rotations(nn.Linear):
    """Orthogonal weights, of which a part is scaled; a bias that depends on the weights."""

    def reset_parameters(self) -> None:
        nn.init.orthogonal_(self.weight, gain=2.0)
        with torch.no_grad():
            self.bias.copy_(self.weight.sum(1))
            self.weight[:, :3].mul_(0.5)


class FusedWeights(nn.Module):
    """Weights that are initialized part by part, as fused weights are."""

    def __init__(self, rows: int = 300, columns: int = 500) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.empty(rows, columns))
        self.experts = nn.Parameter(torch.empty(3, 40, 50))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for index, part in enumerate(self.fused.chunk(3)):
                part.normal_(std=0.01 * (index + 1))
            self.fused[:, 100:120].zero_()
            self.fused.t()[7:9].fill_(0.25)
            for expert in self.experts:
                nn.init.kaiming_uniform_(expert, a=5**0.5)
            self.experts.data[1] *= 3.0


PLAIN: dict[str, Callable[[], nn.Module]] = {
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128), 1),
    "transformer": lambda: nn.Transformer(64, 4, 1, 1, 128),
    "attention": lambda: nn.MultiheadAttention(64, 4, kdim=32, vdim=32, add_bias_kv=True),
    "LSTM": lambda: nn.LSTM(64, 50, 2),
    "convolutions": lambda: nn.Sequential(nn.Conv2d(3, 30, 5), nn.BatchNorm2d(30), nn.ConvTranspose1d(20, 30, 3)),
    "padding": lambda: nn.Embedding(300, 40, padding_idx=7),
    "rotations": lambda: Rotations(60, 50),
    "pieces": FusedWeights,
    "bilinear": lambda: nn.Bilinear(20, 20, 30),
}
"""Models whose modules have ``reset_parameters()``."""

IN_CONSTRUCTOR: dict[str, Callable[[], nn.Module]] = {
    "scaled in its constructor": ScaledInConstructor,
    "CLIP": _clip,
    "Apertus": _text("apertus", num_key_value_heads=2),
}
"""Models whose constructor says what nothing else says."""
