"""Mixtures: the share of each source, repeats, epochs, resuming, every layout."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.data.order import STORED_UP_TO
from ds_trainer.samples.sources.mixture import Mixture, parts
from ds_trainer.utils.errors import ConfigError
from tests.support.models import tiny_llama
from tests.support.pool import pool


def epochs_of(mixture: Mixture, epochs: int) -> list[list[tuple[int, int]]]:
    return [[mixture.locate(index, epoch) for index in range(len(mixture))] for epoch in range(epochs)]


def test_without_weights_every_sample_comes_once() -> None:
    mixture = Mixture([list("abc"), list("de")])
    assert [mixture[index] for index in range(len(mixture))] == list("abcde")


def test_weights_are_probabilities() -> None:
    mixture = Mixture([range(900), range(100)], [1, 3], names=["big", "small"])
    counts = Counter(source for source, _ in epochs_of(mixture, 1)[0])
    assert (len(mixture), counts) == (1000, {0: 250, 1: 750})
    assert mixture.repeats(2) == pytest.approx([2 * 250 / 900, 15])
    assert mixture.describe(2)[1] == (
        "small: 750 of 1,000 samples of an epoch (75.0%), from 100; each is seen 15.00 times in 2 epochs"
    )


def test_a_source_is_used_up_before_it_starts_again() -> None:
    mixture = Mixture([range(900), range(100)], [1, 3], seed=5)
    epochs = epochs_of(mixture, 4)
    big = [position for epoch in epochs for source, position in epoch if source == 0]
    assert sorted(big[:900]) == list(range(900))  # over the borders of epochs
    small = [position for source, position in epochs[0] if source == 1]
    for start in range(0, 700, 100):
        assert sorted(small[start : start + 100]) == list(range(100))
    assert small[:100] != small[100:200]
    assert small[:100] != sorted(small[:100])


def test_all_epochs_can_have_the_same_samples() -> None:
    mixture = Mixture([range(900), range(100)], [1, 3], new_samples=False)
    first = [mixture.locate(index) for index in range(len(mixture))]
    mixture.set_epoch(3)
    assert [mixture.locate(index) for index in range(len(mixture))] == first


def test_random_access_is_deterministic_and_independent_of_what_was_read() -> None:
    given = {"weights": [0.3, 0.7], "seed": 9}
    first = Mixture([range(70), range(50)], **given)  # type: ignore[arg-type]
    wanted = epochs_of(first, 3)
    other = Mixture([range(70), range(50)], **given)  # type: ignore[arg-type]
    for epoch, index in [(2, 100), (0, 3), (2, 5), (1, 119), (0, 3)]:
        assert other.locate(index, epoch) == wanted[epoch][index]
    assert epochs_of(Mixture([range(70), range(50)], [0.3, 0.7], seed=10), 1)[0] != wanted[0]


def test_long_sources_store_no_order() -> None:
    mixture = Mixture([range(STORED_UP_TO * 8), range(10)], [1, 1])
    positions = [mixture.locate(index, 3)[1] for index in range(1000)]
    assert len(set(positions)) == 1000
    assert all(type(order).__name__ != "StoredOrder" for key, order in mixture._passes.items() if key[0] == 0)


def test_lengths_are_those_of_the_samples() -> None:
    samples = [{"input_ids": torch.arange(n)} for n in range(1, 30)]
    mixture = Mixture([samples[:20], samples[20:]], [1, 2], seed=3)
    mixture.set_epoch(2)
    assert mixture.lengths.tolist() == [len(mixture[index]["input_ids"]) for index in range(len(mixture))]


def test_parts_add_up() -> None:
    for weights in ([1, 1, 1], [0.1, 0.2, 0.7], [5, 1e-3], [1e9, 3]):
        found = parts(1001, weights)
        assert sum(found) == 1001
        assert np.allclose(np.array(found), 1001 * np.array(weights) / sum(weights), atol=1)


def test_what_cannot_be_mixed() -> None:
    with pytest.raises(ConfigError, match="The sources b have no sample"):
        Mixture([[1], []], names=["a", "b"])
    with pytest.raises(ConfigError, match="The source b gets none of 11 samples; raise its weight"):
        Mixture([range(10), range(1)], [1, 1e-3], names=["a", "b"])


def test_workers_that_outlive_an_epoch_see_the_next_one() -> None:
    mixture = Mixture([range(60), range(20)], [1, 1])
    loader = DataLoader(mixture, batch_size=16, num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    for epoch in range(2):
        mixture.set_epoch(epoch)
        found = [int(value) for batch in loader for value in batch]
        assert found == [mixture[index] for index in range(len(mixture))]


# -- in training -------------------------------------------------------------------------------------------------------


class Tokens(list[dict[str, torch.Tensor]]):
    """Samples of equal length whose first token is their number."""

    def __init__(self, first: int, samples: int) -> None:
        for number in range(first, first + samples):
            ids = torch.tensor([number % 48, number // 48, 7, 9])
            self.append({"input_ids": ids, "labels": ids.clone()})


class Seen(TrainerCallback):
    """Notes the global batches, and stops after a step."""

    def __init__(self, stop_at: int | None) -> None:
        self.stop_at = stop_at

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == self.stop_at:
            control.should_save = control.should_training_stop = True


def train(folder: str, stops: list[int | None], **values: Any) -> list[list[int]]:
    """Train with a stop and a resume after each of ``stops``; the samples of every micro-step of this rank."""
    seen: list[list[int]] = []

    def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        batch = {key: torch.stack([sample[key] for sample in samples]) for key in ("input_ids", "labels")}
        seen.append((batch["input_ids"][:, 0] + 48 * batch["input_ids"][:, 1]).tolist())
        return batch

    for number, stop in enumerate(stops):
        args = TrainingArguments(
            folder, max_steps=9, report_to="none", save_strategy="no", logging_strategy="no", use_cpu=True, **values
        )
        mixture = Mixture([Tokens(0, 30), Tokens(100, 8)], [1, 1], seed=args.seed)
        trainer = Trainer(tiny_llama(), args, train_dataset=mixture, data_collator=collate, callbacks=[Seen(stop)])
        trainer.train(resume_from_checkpoint=number > 0)
    return seen


def test_a_run_resumed_twice_reads_the_samples_of_the_unbroken_run(tmp_path: Path) -> None:
    values = {"per_device_train_batch_size": 8}  # 38 samples: 5 steps an epoch, 4 of the next one
    whole = train(str(tmp_path / "whole"), [None], **values)
    assert train(str(tmp_path / "broken"), [3, 7, None], **values) == whole
    assert len(whole) == 9
    first = [number for batch in whole[:5] for number in batch]
    assert Counter(number >= 100 for number in first) == {False: 19, True: 19}
    assert len({number for number in first if number < 100}) == 19  # no repeat of the larger source


def test_two_ranks_read_the_same_global_batches(tmp_path: Path) -> None:
    whole = train(str(tmp_path / "one"), [None], per_device_train_batch_size=8)
    ranks = pool(2).run(partial(train, str(tmp_path / "two"), [4, None], per_device_train_batch_size=4))
    assert [[*first, *second] for first, second in zip(*ranks, strict=True)] == whole
