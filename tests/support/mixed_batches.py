"""Models of which a micro-batch may leave parts out: a tower for images, experts that are modules of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.support.models import VOCABULARY

Row = dict[str, torch.Tensor]
LENGTH, WIDTH, PATCHES = 8, 16, 6


class Block(nn.Module):
    """A layer of either tower."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TwoTowers(nn.Module):
    """Text with images: what a tower makes of an image is added to the first token of its row.

    Both towers have the same widths, so that a gather of one module has the size of another's.
    """

    shifts_labels = True

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.patches = nn.Linear(PATCHES, WIDTH)
        self.vision = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.text = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        image_rows: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        x = self.tokens(input_ids)
        if pixel_values is not None:
            seen = self.patches(pixel_values)
            for block in self.vision:
                seen = block(seen)
            x = x + torch.zeros_like(x).index_put((image_rows, torch.zeros_like(image_rows)), seen)
        x = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[None, :, None]
        for block in self.text:
            x = block(x)
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


class Expert(nn.Module):
    """One expert of :class:`MixtureBlock`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(x)))


class MixtureBlock(nn.Module):
    """A mixture of experts as a list of modules, of which only those are called that get tokens."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))

    def forward(self, hidden_states: torch.Tensor, forced: torch.Tensor | None = None) -> torch.Tensor:
        flat = hidden_states.flatten(0, -2)
        weights = self.gate(flat).softmax(-1)
        chosen = weights.argmax(-1) if forced is None else forced.flatten()
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            (rows,) = (chosen == index).nonzero(as_tuple=True)
            if len(rows):
                mixed = expert(flat[rows]) * weights[rows, index, None]
                out = out.index_add(0, rows, mixed)
        return out.view_as(hidden_states)


class MixtureModel(nn.Module):
    """A language model of MoE layers; tokens choose their expert by their own number, so that data decides."""

    shifts_labels = True

    def __init__(self, frozen_embedding: bool = False, by_keyword: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.by_keyword = by_keyword
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList()
        for _ in range(2):
            self.layers.append(nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "mixture": MixtureBlock(WIDTH, 4)}))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        if frozen_embedding:
            self.tokens.requires_grad_(False)
            self.layers[0]["norm"].requires_grad_(False)

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        experts: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        x = self.tokens(input_ids)
        for layer in self.layers:
            normed = layer["norm"](x)
            if self.by_keyword:
                x = x + layer["mixture"](hidden_states=normed, forced=experts)
            else:
                x = x + layer["mixture"](normed, experts)
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows of tokens in a given order; ``decorate(row, index)`` adds to them.

    Picklable: the decorating function is one of a module.
    """

    def __init__(self, samples: int, decorate: Callable[[Row, int, torch.Generator], None]) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows: list[Row] = []
        for index in range(samples):
            tokens = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator)
            labels = tokens.clone()
            labels[: int(torch.randint(1, 4, (), generator=generator))] = -100
            row = {"input_ids": tokens, "labels": labels, "attention_mask": torch.ones_like(tokens)}
            decorate(row, index, generator)
            self.rows.append(row)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]


class Images:
    """Adds an image to the rows with these numbers."""

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = set(rows)

    def __call__(self, row: Row, index: int, generator: torch.Generator) -> None:
        image = torch.randn(PATCHES, generator=generator)
        if index in self.rows:
            row["image"] = image


class Experts:
    """Sends the tokens of row ``index`` to the experts ``of[index % len(of)]``, in turn."""

    def __init__(self, of: Sequence[Sequence[int]]) -> None:
        self.of = of

    def __call__(self, row: Row, index: int, generator: torch.Generator) -> None:
        experts = self.of[index % len(self.of)]
        row["experts"] = torch.tensor([experts[position % len(experts)] for position in range(LENGTH)])


def collate(rows: Sequence[Row]) -> Row:
    """Rows as one batch; ``pixel_values`` are there only if a row has an image."""
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0] if key != "image"}
    shown = [index for index, row in enumerate(rows) if "image" in row]
    if shown:
        batch["pixel_values"] = torch.stack([rows[index]["image"] for index in shown])
        batch["image_rows"] = torch.tensor(shown)
    return batch


def plain_loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """The mean over all targets of a batch."""
    loss: torch.Tensor = model(**batch)["loss"]
    return loss
