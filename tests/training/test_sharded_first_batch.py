"""The first micro-batch of a training is cut too; what is compared before the first step is a beginning of it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer import Trainer
from ds_trainer.data.packing.batch import PackedFormat
from ds_trainer.utils.errors import ConfigError
from tests.support.layouts import PlainAttention
from tests.support.pool import pool
from tests.support.runs import train_and_report

LENGTH = 5000  # longer than the beginning


class Long(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows that do not fit into the beginning, with a change of each."""

    def __init__(self, change: dict[str, Any], without: str = "", length: int = LENGTH) -> None:
        self.change, self.without, self.length = change, without, length

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = (torch.arange(self.length) * (index + 3)) % 50 + 3
        row = {"input_ids": tokens, "labels": tokens.clone(), **self.change}
        row.pop(self.without, None)
        return row


def refusal(output_dir: str, data: Any, make_model: Any = PlainAttention, **values: Any) -> str:
    """What a rank says to the data."""
    with pytest.raises(ConfigError) as caught:
        train_and_report(make_model, lambda: data, output_dir, per_device_train_batch_size=1, max_steps=1, **values)
    return str(caught.value)


BAD: dict[str, tuple[Any, str]] = {
    "no labels": (Long({}, "labels"), "A batch of input_ids has no labels (labels), so the inputs of its loss"),
    "another name": (
        Long({"targets": torch.ones(LENGTH, dtype=torch.int64)}, "labels"),
        "The batches have 'targets', which PlainAttention.forward does not take",
    ),
    "pairs": (
        Long({"attention_mask": torch.ones(8, 8)}, length=8),
        "'attention_mask' of a batch has the shape [1, 8, 8]: it relates tokens to tokens",
    ),
    "a label of another length": (
        Long({"labels": torch.ones(3, dtype=torch.int64)}),
        "'labels' of a batch has integers of the shape [1, 3]",
    ),
    "no tokens": (Long({}, "input_ids"), "A batch of labels has no input_ids"),
}


@pytest.mark.parametrize("name", BAD)
def test_every_rank_says_what_is_wrong_with_the_first_batch(name: str, tmp_path: Path) -> None:
    """A ConfigError, and not only that another rank has failed."""
    data, message = BAD[name]
    found = pool(2).run(partial(refusal, str(tmp_path), data, context_parallel_size=2, remove_unused_columns=False))
    assert all(message in text for text in found), found
    assert found[0] == found[1]


class Far(PlainAttention):
    """Has places for long rows; with ``mixes``, something that is not our attention mixes neighbors."""

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.positions = torch.nn.Embedding(LENGTH, 32)
        if mixes:
            self.norm = MixesNeighbors(32)


class MixesNeighbors(torch.nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + x.roll(1, 1))


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Of several lengths, to be packed into rows of :data:`LENGTH`; some are longer than what is compared of one."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = (torch.arange([1500, 900, 2600][index % 3]) * (index + 3)) % 50 + 3
        return {"input_ids": tokens, "labels": tokens.clone()}


def compared(output_dir: str, data: Any, **values: Any) -> list[tuple[str, list[int]]]:
    """Shapes of what is compared before the first step."""
    seen: list[tuple[str, list[int]]] = []

    class Watched(Trainer):
        def __init__(self, *args: Any, **keywords: Any) -> None:
            super().__init__(*args, **keywords)
            setup = self._ds_trainer.setup
            check = setup.check_first_batch

            def watched(batch: Any) -> None:
                seen.extend((key, list(value.shape)) for key, value in batch.items())
                check(batch)

            setup.check_first_batch = watched  # type: ignore[method-assign]

    report = train_and_report(Far, lambda: data, output_dir, Watched, per_device_train_batch_size=1, **values)
    assert all(loss == loss for loss in report.losses)
    return seen


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ring": (2, {"context_parallel_size": 2}),
    "ring and Ulysses": (4, {"context_parallel_size": 2, "sequence_parallel_size": 2}),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packing", [False, True], ids=["rows", "packed"])
def test_a_beginning_is_compared(packing: bool, layout: str, tmp_path: Path) -> None:
    world, sizes = LAYOUTS[layout]
    more: dict[str, Any] = {"packing": True, "max_length": LENGTH} if packing else {}
    job = partial(compared, str(tmp_path), Samples() if packing else Long({}), max_steps=1, **sizes, **more)
    keys = ["input_ids", "labels", *(["position_ids"] if packing else [])]
    for found in pool(world).run(job):
        assert found == [(key, [1, 4096]) for key in keys]


def test_a_model_that_mixes_tokens_is_found_in_a_beginning(tmp_path: Path) -> None:
    """The control: the same model with our attention alone trains, above."""
    job = partial(refusal, str(tmp_path), Long({}), partial(Far, mixes=True), context_parallel_size=2)
    for found in pool(2).run(job):
        assert "something other than our attention mixes tokens" in found


def counts_a_border(output_dir: str) -> str:
    """On a rank: rows in which the first token of a sample is a target of the one before it."""
    assemble = PackedFormat.assemble

    def with_targets_between(form: PackedFormat, rows: Any, length: int) -> dict[str, Any]:
        return assemble(replace(form, shifts_labels=False), rows, length)

    PackedFormat.assemble = with_targets_between  # type: ignore[method-assign]
    try:
        more = {"packing": True, "max_length": LENGTH, "context_parallel_size": 2}
        return refusal(output_dir, Samples(), Far, **more)
    finally:
        PackedFormat.assemble = assemble  # type: ignore[method-assign]


def test_a_wrong_target_of_packed_rows_is_found_in_a_beginning(tmp_path: Path) -> None:
    for found in pool(2).run(partial(counts_a_border, str(tmp_path))):
        assert "the first token of a sample is no target of the sample before it" in found
