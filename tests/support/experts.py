"""Small mixtures of experts, and the oracle of their loss: plain PyTorch in one process.

The oracle gets the micro-batches as lists of samples and works them off one after the other: of each the cross-entropy
summed over its targets divided by the targets ``N`` of the global batch, and its own auxiliary loss, weighted with its
targets over ``N``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.support.models import VOCABULARY, PlainLanguageModel

COEFFICIENT = 0.1

_SHAPE: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_ROUTED: dict[str, Any] = dict(output_router_logits=True, router_aux_loss_coef=COEFFICIENT)


def _unequal(model: nn.Module) -> nn.Module:
    """``model`` with routers that prefer some experts, so that the losses of micro-batches differ."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".gate." in name or "router" in name:
                parameter.mul_(40)
    return model


def mixtral(coefficient: float = COEFFICIENT, **overrides: Any) -> nn.Module:
    """Four experts, two of which a token goes through."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    values = {**_SHAPE, **_ROUTED, "router_aux_loss_coef": coefficient, "num_local_experts": 4}
    return _unequal(MixtralForCausalLM(MixtralConfig(**{**values, **overrides})))


def qwen3_moe() -> nn.Module:
    """A Qwen 3 with experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=8)
    return _unequal(Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SHAPE, **_ROUTED, **experts)))


def gpt_oss() -> nn.Module:
    """Attention sinks, biases in router and experts."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    experts = dict(num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=8)
    experts["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    return _unequal(GptOssForCausalLM(GptOssConfig(**_SHAPE, **_ROUTED, **experts)))


def deepseek_v4() -> nn.Module:
    """The DeepSeek of transformers that has a load-balancing loss; those before have none."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    torch.manual_seed(0)
    shape = {**_SHAPE, "num_key_value_heads": 1}
    del shape["intermediate_size"]
    experts = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, mlp_layer_types=["moe"] * 2)
    attention: dict[str, Any] = dict(head_dim=16, q_lora_rank=16, o_groups=2, o_lora_rank=8)
    attention["layer_types"] = ["heavily_compressed_attention"] * 2
    attention["compress_rates"] = {"heavily_compressed_attention": 4}  # sequences are short
    return _unequal(DeepseekV4ForCausalLM(DeepseekV4Config(**shape, **_ROUTED, **experts, **attention, hc_mult=2)))


def jetmoe() -> nn.Module:
    """Its coefficient has another name than those of the others."""
    from transformers import JetMoeConfig, JetMoeForCausalLM

    torch.manual_seed(0)
    shape = {key: value for key, value in _SHAPE.items() if key != "num_attention_heads"}
    experts = dict(num_local_experts=4, kv_channels=8, output_router_logits=True, aux_loss_coef=COEFFICIENT)
    return _unequal(JetMoeForCausalLM(JetMoeConfig(**shape, **experts)))


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "gpt_oss": gpt_oss,
    "deepseek_v4": deepseek_v4,
    "jetmoe": jetmoe,
}


def long_data() -> list[dict[str, torch.Tensor]]:
    """Sequences of 16 tokens, at least the last 5 padding: sharded over four ranks, one has nothing but padding."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(32):
        used = int(torch.randint(4, 12, (), generator=generator))
        mask = (torch.arange(16) < used).long()
        tokens = torch.randint(3, 61, (16,), generator=generator) * mask
        rows.append({"input_ids": tokens, "labels": tokens.masked_fill(mask == 0, -100), "attention_mask": mask})
    return rows


def micro_batch_loss(model: nn.Module, rows: dict[str, torch.Tensor], items: torch.Tensor) -> torch.Tensor:
    """What one micro-batch, ``rows``, adds to the loss of a step of ``items`` targets."""
    outputs = model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"])
    targets = F.pad(rows["labels"][:, 1:], (0, 1), value=-100)
    total = F.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    count = targets.ne(-100).sum()
    if count == 0:
        return total / items
    coefficient = getattr(model, "router_aux_loss_coef", None) or getattr(model, "aux_loss_coef", 0.0)
    return total / items + coefficient * outputs.aux_loss * count / items


def step_loss(
    model: nn.Module,
    batch: dict[str, torch.Tensor],
    sizes: Callable[[int], Sequence[int]],
) -> torch.Tensor:
    """The loss of one optimizer step, for :func:`tests.support.oracle.train_plainly`.

    Args:
        batch: the global batch.
        sizes: the samples of each micro-batch, given those of the global batch.
    """
    items = batch["labels"][:, 1:].ne(-100).sum()
    samples = len(batch["labels"])
    value, begin = torch.zeros(()), 0
    for size in sizes(samples):
        rows = {key: tensor[begin : begin + size] for key, tensor in batch.items()}
        value = value + micro_batch_loss(model, rows, items)
        begin += size
    assert begin == samples
    return value


class OwnExperts(PlainLanguageModel):
    """A custom model that divides its loss by the count and adds a term of its hidden states.

    Args:
        shows: the term is among the outputs, under the name that transformers gives it.
        declared: value of ``adds_auxiliary_loss``; None leaves it away.
    """

    def __init__(self, shows: bool, declared: bool | None, dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout)
        self.shows = shows
        if declared is not None:
            self.adds_auxiliary_loss = declared

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **keywords: Any) -> Any:
        hidden, _ = self.mixer(self.embedding(input_ids))
        logits = self.head(self.dropout(self.norm(hidden)))
        targets = labels[:, 1:]
        total = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="sum")
        items = keywords.get("num_items_in_batch")
        items = targets.ne(-100).sum() if items is None else items
        term = hidden.mean((0, 1)).square().sum() * 100
        outputs = {"loss": total / items + COEFFICIENT * term, "logits": logits}
        return {**outputs, "aux_loss": term} if self.shows else outputs


def weighted_means(model: nn.Module, batch: dict[str, torch.Tensor], micro: int) -> torch.Tensor:
    """The loss of a step of micro-batches of ``micro``: what ``model`` returns for each, weighted with its targets."""
    value, items = torch.zeros(()), batch["labels"][:, 1:].ne(-100).sum()
    for begin in range(0, len(batch["labels"]), micro):
        rows = {key: tensor[begin : begin + micro] for key, tensor in batch.items()}
        outputs = model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"], labels=rows["labels"])
        value = value + outputs["loss"] * rows["labels"][:, 1:].ne(-100).sum() / items
    return value
