"""The models of the GPU benchmarks: shapes from 0.5B to 8B parameters, random weights and tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

SEED = 42


@dataclass(frozen=True)
class Case:
    """One model and what goes through it.

    Attributes:
        experts: stacked experts of a layer, each ``intermediate`` wide, of which a token goes through 8; 0: none.
        lora: rank of the adapters on all linear layers; 0 trains the whole model.
        recompute: activations are recomputed in the backward pass.
        warmup, steps: optimizer steps of a turn before the clock starts, and those that are timed.
    """

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int
    tied: bool
    micro_batch: int
    sequence: int = 4096
    experts: int = 0
    lora: int = 0
    recompute: bool = False
    rounds: int = 3
    warmup: int = 3
    steps: int = 8


# Shapes of Qwen2.5-0.5B, Llama-3.2-1B, Llama-3.2-3B and Llama-3.1-8B, all as Llama; four layers of Qwen3-30B-A3B.
CASES = {
    "cuda": [
        Case("0.5b", 896, 4864, 24, 14, 2, 151936, True, micro_batch=4),
        Case("1b", 2048, 8192, 16, 32, 8, 128256, True, micro_batch=4),
        Case("3b", 3072, 8192, 28, 24, 8, 128256, True, micro_batch=2, recompute=True),
        Case("30b-a3b, 4 layers", 2048, 768, 4, 32, 4, 151936, False, micro_batch=2, experts=128),
        Case("8b lora", 4096, 14336, 32, 32, 8, 128256, False, micro_batch=2, lora=16, recompute=True),
    ],
    "cpu": [
        Case("tiny", 64, 160, 2, 4, 2, 256, True, 2, sequence=64, rounds=2, warmup=1, steps=2),
        Case("tiny experts", 64, 32, 2, 4, 2, 256, False, 2, 64, experts=16, rounds=1, warmup=1, steps=2),
        Case("tiny lora", 64, 160, 2, 4, 2, 256, False, 2, 64, lora=4, recompute=True, rounds=1, warmup=1, steps=2),
    ],
}


# -- model and data ------------------------------------------------------------------------------------------------


def build_model(case: Case, device: str) -> nn.Module:
    """The model with random weights, made on the device, in bf16."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

    experts = dict(num_experts=case.experts, num_experts_per_tok=8, moe_intermediate_size=case.intermediate)
    make: Any = partial(Qwen3MoeConfig, **experts, head_dim=128) if case.experts else LlamaConfig
    config = make(
        vocab_size=case.vocabulary,
        hidden_size=case.hidden,
        intermediate_size=case.intermediate,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.key_heads,
        max_position_embeddings=case.sequence,
        tie_word_embeddings=case.tied,
        use_cache=False,
    )
    torch.manual_seed(SEED)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model: nn.Module = AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(default)
    if case.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=case.lora, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """As many random sequences as a turn takes."""

    def __init__(self, case: Case) -> None:
        samples = (case.warmup + case.steps) * case.micro_batch
        draw = torch.Generator().manual_seed(SEED)
        self.rows = torch.randint(case.vocabulary, (samples, case.sequence), generator=draw)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """One batch; the same function in all loops."""
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
