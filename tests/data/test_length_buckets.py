"""``length_buckets``: few shapes, the same loss and weights."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ds_trainer import Trainer
from ds_trainer.data.collators import TokenPaddingCollator
from ds_trainer.data.length_buckets import LengthBuckets, _best_buckets
from tests.support.compare import assert_equal
from tests.support.models import VOCABULARY, tiny_llama
from tests.support.pool import pool
from tests.support.runs import train_and_report

PAD = 0


def cost(maxima: np.ndarray, buckets: Any) -> int:
    return sum(min(bucket for bucket in buckets if bucket >= one) for one in maxima)


@pytest.mark.parametrize("seed", range(20))
def test_the_buckets_have_the_least_padding_of_all(seed: int) -> None:
    draw = np.random.default_rng(seed)
    maxima = draw.integers(1, 90, draw.integers(1, 30))
    count = int(draw.integers(1, 4))
    found = _best_buckets(maxima, 8, count)
    candidates = {*(min(-(-one // 8) * 8, maxima.max()) for one in maxima)}
    every = [some for size in range(1, count + 1) for some in itertools.combinations(candidates, size)]
    assert found == sorted(set(found)) and len(found) <= count and set(found) <= candidates
    assert cost(maxima, found) == min(cost(maxima, some) for some in every if maxima.max() in some)


def batch_of(lengths: list[int], left: bool = False) -> dict[str, torch.Tensor]:
    longest = max(lengths)
    place = torch.arange(longest)[None]
    size = torch.tensor(lengths)[:, None]
    mask = (place >= longest - size if left else place < size).long()
    tokens = (place + 3) * mask
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": tokens.masked_fill(mask == 0, -100),
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "kinds": torch.zeros(len(lengths)),
    }


def padded(batch: Any, lengths: tuple[int, ...] = (4, 8), token: int | None = 9) -> Any:
    return LengthBuckets(lambda samples: copy.copy(batch), lengths, token)([])


@pytest.mark.parametrize("left", [False, True])
def test_padding_continues_on_its_side(left: bool) -> None:
    before, after = batch_of([3, 5], left), padded(batch_of([3, 5], left))
    place = slice(3, None) if left else slice(None, 5)
    rest = slice(None, 3) if left else slice(5, None)
    fills = {"input_ids": 9, "attention_mask": 0, "labels": -100}
    for key in fills.keys() | {"position_ids"}:
        assert after[key].shape == (2, 8) and torch.equal(after[key][:, place], before[key])
    for key, fill in fills.items():
        assert bool((after[key][:, rest] == fill).all())
    assert torch.equal(after["kinds"], before["kinds"])
    assert int(after["position_ids"].max()) == int(before["position_ids"].max())


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: {**batch, "words": torch.zeros(2, 5)},  # one entry per token, of unknown meaning
        lambda batch: {**batch, "labels": batch["labels"].float()},
        lambda batch: {**batch, "attention_mask": torch.ones(2, 1, 5, 5)},
        lambda batch: {key: value for key, value in batch.items() if key != "attention_mask"},
        lambda batch: {key: value.repeat(1, 2) if value.dim() > 1 else value for key, value in batch.items()},  # long
        lambda batch: list(batch.values()),
    ],
)
def test_what_is_not_understood_stays(change: Callable[[Any], Any]) -> None:
    before = change(batch_of([3, 5]))
    after = padded(before)
    pairs = (
        zip(before, after, strict=True) if isinstance(before, list) else ((before[key], after[key]) for key in after)
    )
    assert all(one is other for one, other in pairs) and len(before) == len(after)


def test_without_a_padding_token_only_tokens_with_targets_are_padded() -> None:
    """A classifier reads the last token that is no padding, and finds it by its number."""
    batch = batch_of([3, 5])
    assert padded(batch, token=None)["input_ids"].shape == (2, 8)
    batch["labels"] = torch.tensor([0, 1])
    assert padded(batch, token=None)["input_ids"].shape == (2, 5)
    assert padded(batch)["input_ids"].shape == (2, 8)


class Texts(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Samples of 3 to 40 tokens; reading one draws a number."""

    def __init__(self, classes: bool = False) -> None:
        draw = torch.Generator().manual_seed(0)
        sizes = torch.randint(3, 41, (64,), generator=draw).tolist()
        self.rows = [torch.randint(3, VOCABULARY, (size,), generator=draw).tolist() for size in sizes]
        self.classes = classes

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        np.random.rand(), torch.rand(())
        tokens = self.rows[index]
        return {"input_ids": tokens, "labels": tokens[0] % 2 if self.classes else tokens}


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """As transformers' collators with dynamic padding."""
    longest = max(len(sample["input_ids"]) for sample in samples)

    def rows(key: str, fill: int) -> torch.Tensor:
        return torch.tensor([[*sample[key], *[fill] * (longest - len(sample[key]))] for sample in samples])

    tokens = rows("input_ids", PAD)
    listed = isinstance(samples[0]["labels"], list)
    labels = rows("labels", -100) if listed else torch.tensor([sample["labels"] for sample in samples])
    return {"input_ids": tokens, "attention_mask": (tokens != PAD).long(), "labels": labels}


SEEN: set[int] = set()


class Shapes(Trainer):
    """Keeps the lengths of its batches."""

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        SEEN.add(inputs["input_ids"].shape[1])
        return super().compute_loss(model, inputs, *args, **kwargs)


def classifier() -> nn.Module:
    from transformers import LlamaForSequenceClassification

    torch.manual_seed(0)
    return LlamaForSequenceClassification(tiny_llama().config)


def tiny_bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=40, **sizes, **dropout))
    with torch.no_grad():  # a bias of keys has no gradient but rounding: beside 0 any change of it is large
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def shapes_and_run(*args: Any, **kwargs: Any) -> tuple[int, Any]:
    SEEN.clear()
    trajectory = train_and_report(*args, trainer_class=Shapes, collator=collate, **kwargs)
    return len(SEEN), trajectory


CASES: list[tuple[Any, bool, int, dict[str, Any]]] = [
    (tiny_llama, False, 1, {}),
    (tiny_llama, False, 2, {"zero_stage": 2, "gradient_accumulation_steps": 2}),
    (tiny_llama, False, 2, {"zero_stage": 3, "context_parallel_size": 2}),
    (classifier, True, 1, {"zero_stage": 1}),
    (tiny_bert, False, 1, {"train_sampling_strategy": "group_by_length", "max_steps": 8, "optim": "sgd"}),
]


@pytest.mark.parametrize(("model", "classes", "ranks", "arguments"), CASES)
def test_runs_are_equal_and_have_few_shapes(
    tmp_path: Path, model: Any, classes: bool, ranks: int, arguments: dict[str, Any]
) -> None:
    """Random draws of samples that are read for their lengths do not count."""
    values = {"per_device_train_batch_size": 2, "max_steps": 6, "max_grad_norm": 0.5, **arguments}
    job = partial(shapes_and_run, model, partial(Texts, classes), str(tmp_path), **values)
    (many, wanted), *_ = pool(ranks).run(job)
    (few, found), *_ = pool(ranks).run(partial(job, length_buckets=3))
    assert few <= 3 < many
    assert_equal(found, wanted, 2e-5)


def test_the_header_and_the_data_that_need_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_and_report(tiny_llama, Texts, str(tmp_path), collator=TokenPaddingCollator(), length_buckets=3, max_steps=1)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  lengths"))
    assert "padded to 24, 32, 40 tokens: 43 % padding, 38 % without (estimated from 64 samples)" in line
    assert LengthBuckets.choose(collate, Texts(), 2, 64, pad_token_id=PAD) is None  # as few lengths as asked for
    assert LengthBuckets.choose(collate, iter([]), 2, 3, pad_token_id=PAD) is None
