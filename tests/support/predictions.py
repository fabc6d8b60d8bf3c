"""Models of several output shapes and what a rank does with them: for the tests of evaluation and prediction."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.utils.errors import ConfigError

WIDTH = 5


class Tagger(nn.Module):
    """Token classification: logits ``[B, T, 4]`` for batches of any length, the mean loss over labelled tokens."""

    main_input_name = "ids"

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(30, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head(self.embedding(ids))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Many(nn.Module):
    """Nested outputs of several dtypes and ranks, and one that is ignored."""

    main_input_name = "x"

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(WIDTH, 3)
        self.config = type("Config", (), {"keys_to_ignore_at_inference": ["cache"]})()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        logits = self.layer(x)
        found = {
            "logits": logits,
            "states": (x.double(), logits[:, None, :].expand(-1, 2, -1)),
            "choice": logits.argmax(-1),
            "sure": logits.max(-1).values > 0.3,
            "cache": object(),
        }
        return found if labels is None else {"loss": F.cross_entropy(logits, labels), **found}


class Pair(nn.Module):
    """A tuple that begins with the loss, as plain PyTorch models return it."""

    main_input_name = "x"

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.layer(x)
        return (logits, x) if labels is None else (F.cross_entropy(logits, labels), logits, x)


def tag_rows(samples: int) -> list[dict[str, list[int]]]:
    """Sequences of 2 to 7 tokens, some without a label."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for _ in range(samples):
        length = int(torch.randint(2, 8, (), generator=generator))
        ids = torch.randint(1, 30, (length,), generator=generator)
        rows.append({"ids": ids.tolist(), "labels": [-100, *(ids[1:] % 4).tolist()]})
    return rows


def class_rows(samples: int) -> list[dict[str, Any]]:
    """Vectors with a class each."""
    generator = torch.Generator().manual_seed(4)
    xs = torch.randn(samples, WIDTH, generator=generator)
    return [{"x": x, "labels": int(i % 3)} for i, x in enumerate(xs)]


def pad_to_longest(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A batch as long as its longest row: other batches have other lengths."""
    length = max(len(row["ids"]) for row in rows)
    fill = {"ids": 0, "labels": -100}
    return {key: torch.tensor([row[key] + [fill[key]] * (length - len(row[key])) for row in rows]) for key in rows[0]}


KINDS: dict[str, tuple[Any, Any, Any]] = {
    "ragged tokens": (Tagger, tag_rows, pad_to_longest),
    "nested": (Many, class_rows, None),
    "tuple": (Pair, class_rows, None),
}


def describe(found: Any) -> dict[str, Any]:
    """Metrics that depend on everything that ``compute_metrics`` gets, and on its order."""
    flat = [np.asarray(array) for array in flatten((found.predictions, found.label_ids, found.inputs, found.losses))]
    return {
        "rows": np.int64(len(flat[0])),
        "order": float(sum(np.dot(a.reshape(len(a), -1).sum(1), np.arange(len(a))) for a in flat)),
        "parts": len(tuple(found)),
    }


def flatten(tree: Any) -> list[Any]:
    """The arrays of a nested result, in order."""
    if tree is None:
        return []
    if isinstance(tree, (tuple, list)):
        return [array for part in tree for array in flatten(part)]
    if isinstance(tree, dict):
        return flatten(list(tree.values()))
    return [tree]


def arguments(output_dir: Any, **changes: Any) -> TrainingArguments:
    """Quiet, on the CPU, evaluation in batches of 2."""
    values: dict[str, Any] = dict(
        save_strategy="no", disable_tqdm=True, use_cpu=True, per_device_eval_batch_size=2, logging_steps=1
    )
    return TrainingArguments(str(output_dir), **{**values, **changes})


def make(kind: str, output_dir: Any, samples: int = 5, cls: type[Trainer] = Trainer, **changes: Any) -> Trainer:
    """A trainer of ``kind`` with ``samples`` evaluation samples; ``metrics=...`` is its ``compute_metrics``."""
    model, rows, collate = KINDS[kind]
    metrics = changes.pop("metrics", None)
    preprocess = changes.pop("preprocess", None)
    return cls(
        model(),
        arguments(output_dir, **changes),
        data_collator=collate,
        train_dataset=rows(8),
        eval_dataset=rows(samples) if samples else None,
        compute_metrics=metrics,
        preprocess_logits_for_metrics=preprocess,
    )


def refusal_of(job: Any, *args: Any) -> str:
    """The words of the ConfigError that ``job`` raises on this rank."""
    try:
        job(*args)
    except ConfigError as error:
        return str(error)
    raise AssertionError("was not refused")
