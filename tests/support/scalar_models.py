"""Models with parameters without dimensions, and plain PyTorch's rows for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.support.layouts import PlainAttention

Row = dict[str, torch.Tensor]


class Line(nn.Module):
    """``a x + b``: a model whose only parameters are numbers, as transformers' own tests have it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.tensor(-0.7))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        predicted = self.a * x.sum(-1) + self.b
        return F.mse_loss(predicted, labels), predicted


class _Scaled(nn.Module):
    def __init__(self, width: int, temperature: nn.Parameter) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.temperature = temperature
        self.bias_of_one = nn.Parameter(torch.tensor([0.1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x) * self.temperature) + self.bias_of_one


class Scalars(nn.Module):
    """A temperature that two modules share, one used twice, a frozen one; also [1], [0], and numbers as buffers."""

    def __init__(self, seed: int = 0, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(seed)
        shared = nn.Parameter(torch.tensor(1.2))
        self.first, self.second = _Scaled(width, shared), _Scaled(width, shared)
        self.scale = nn.Parameter(torch.tensor(0.8))
        self.frozen = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.head = nn.Linear(width, 1)
        self.norm = nn.BatchNorm1d(width, affine=False)
        self.register_buffer("offset", torch.tensor(0.25))
        self.nothing, self.unused = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(x) * self.scale.exp() + self.offset
        self.norm(hidden.detach())  # counts the batches, and changes nothing else
        hidden = self.second(hidden) * self.frozen
        predicted = self.head(hidden).squeeze(-1) * self.scale + self.nothing.sum()
        return F.mse_loss(predicted, labels), predicted


class ScaledAttention(PlainAttention):
    """A language model for every layout, whose logits are scaled by a learned temperature."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.logit_scale = nn.Parameter(torch.tensor(0.2))
        self.head.register_forward_hook(lambda head, inputs, logits: logits * self.logit_scale.exp())


_TOWER: dict[str, Any] = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.2
)
_TEXT: dict[str, Any] = dict(**_TOWER, vocab_size=31, max_position_embeddings=8, bos_token_id=1, eos_token_id=2)
_VISION: dict[str, Any] = dict(**_TOWER, image_size=8, patch_size=4)


def clip(seed: int = 0) -> nn.Module:
    """CLIP with two tiny towers; ``logit_scale`` has no dimensions."""
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(seed)
    model = CLIPModel(CLIPConfig(text_config={**_TEXT, "pad_token_id": 0}, vision_config=_VISION, projection_dim=12))
    return _without_rounding(model)


def siglip(seed: int = 0) -> nn.Module:
    """SigLIP with two tiny towers; ``logit_scale`` and ``logit_bias`` have the shape [1]."""
    from transformers import SiglipConfig, SiglipModel

    torch.manual_seed(seed)
    return _without_rounding(SiglipModel(SiglipConfig(text_config={**_TEXT, "pad_token_id": 0}, vision_config=_VISION)))


def _without_rounding(model: nn.Module) -> nn.Module:
    """The softmax does not see the bias of keys: its gradient is nothing but rounding, of which Adam makes steps."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith("k_proj.bias"))
    return model


def pairs(samples: int, seed: int = 0) -> list[Row]:
    """Images with their texts, each of 8 tokens that end with the one that CLIP looks at."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 31, (samples, 8), generator=generator)
    tokens[:, 0], tokens[:, -1] = 1, 2
    images = torch.randn(samples, 3, 8, 8, generator=generator)
    return [{"input_ids": text, "pixel_values": image} for text, image in zip(tokens, images, strict=True)]


def collate_pairs(rows: list[Row]) -> dict[str, Any]:
    """A batch for a contrastive loss, as transformers' examples make it."""
    return {**{key: torch.stack([row[key] for row in rows]) for key in rows[0]}, "return_loss": True}


def contrastive_loss(micro_batch: int, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Mean over micro-batches: a contrastive loss compares the pairs of one with each other."""
    tensors = {key: value.split(micro_batch) for key, value in batch.items() if isinstance(value, torch.Tensor)}
    micro_batches = [dict(zip(tensors, values, strict=True)) for values in zip(*tensors.values(), strict=True)]
    return torch.stack([model(**part, return_loss=True).loss for part in micro_batches]).mean()
