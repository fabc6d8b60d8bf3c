"""Streams of mixtures: shares, passes, positions, resuming, every layout."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.data.collators import TokenPaddingCollator
from ds_trainer.samples.sources.mixture_stream import MixtureStream
from ds_trainer.samples.sources.record import Record
from ds_trainer.samples.sources.source import Source
from ds_trainer.samples.sources.spec import SourceSpec
from ds_trainer.utils.errors import ConfigError
from tests.support.models import VOCABULARY, tiny_llama
from tests.support.pool import pool


class Encoded(NamedTuple):
    samples: list[dict[str, list[int]]]


def encode(record: Record) -> Encoded:
    """Of record n: no sample if n ends with 9, two if with 8. The first two tokens are n."""
    number = int(record.fields["text"])
    ids = [number % 48, number // 48, *range(3, 4 + number % 7)]
    return Encoded([{"input_ids": ids, "labels": ids}] * {9: 0, 8: 2}.get(number % 10, 1))


def write(folder: Path) -> None:
    """Source ``a`` of three files with the numbers 0 to 119, source ``b`` of one with 1000 to 1029."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in range(3):
        text = "".join(json.dumps({"text": str(n)}) + "\n" for n in range(40 * file, 40 * file + 40))
        if file == 1:
            (folder / "a1.jsonl.gz").write_bytes(gzip.compress(text.encode()))
        else:
            (folder / f"a{file}.jsonl").write_text(text)
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": str(n)}) + "\n" for n in range(1000, 1030)))


def stream(folder: Path, weights: tuple[float, ...] = (3, 1), limit: int | None = None, **more: Any) -> MixtureStream:
    sources = [
        Source(SourceSpec((str(folder / "a*"),), limit=limit), "data.train[0]"),
        Source(SourceSpec((str(folder / "b.jsonl"),)), "data.train[1]"),
    ]
    return MixtureStream(sources, encode, weights, names=("a", "b"), **{"seed": 5, "window": 16, **more})


def number_of(sample: dict[str, torch.Tensor]) -> int:
    return int(sample["input_ids"][0]) + 48 * int(sample["input_ids"][1])


def numbers(found: Any, count: int) -> list[int]:
    return [number_of(sample) for sample in islice(iter(found), count)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "data")
    return tmp_path / "data"


def test_weights_are_probabilities_and_passes_are_whole(folder: Path) -> None:
    found = numbers(stream(folder), 800)
    assert abs(sum(n >= 1000 for n in found) / 800 - 0.25) < 0.04
    one_pass = sorted(n for n in range(120) if n % 10 != 9) + [n for n in range(120) if n % 10 == 8]
    of_a = [n for n in found if n < 1000]
    size = len(one_pass)
    assert sorted(of_a[:size]) == sorted(of_a[size : 2 * size]) == sorted(one_pass)
    assert of_a[:size] != of_a[size : 2 * size] and of_a[:16] != sorted(of_a[:16])
    assert found != numbers(stream(folder, seed=6), 800) and found == numbers(stream(folder), 800)


def test_a_limit_takes_the_first_records(folder: Path) -> None:
    counts = Counter(n for n in numbers(stream(folder, limit=45), 600) if n < 1000)
    assert set(counts) == {n for n in range(45) if n % 10 != 9}


@pytest.mark.parametrize("limit", [None, 45])
def test_every_position_can_be_restored(folder: Path, limit: int | None) -> None:
    whole = numbers(stream(folder, limit=limit), 460)
    running = stream(folder, limit=limit)
    samples = iter(running)
    for position in range(400):
        if position % 7 == 0:
            state = json.loads(json.dumps(running.state_dict()))
            resumed = stream(folder, limit=limit)
            resumed.load_state_dict(state)
            assert resumed.state_dict() == state
            assert numbers(resumed, 60) == whole[position : position + 60], position
        next(samples)


def test_the_position_is_small_and_files_that_are_done_are_not_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ds_trainer.samples.sources.mixture_stream as module

    running = stream(folder)
    list(islice(iter(running), 150))
    state = running.state_dict()
    assert len(json.dumps(state)) < 300 and state["sources"][0]["file"] == 2
    read: list[str] = []
    read_file = module.read_file
    monkeypatch.setattr(module, "read_file", lambda file, *rest: read.append(file.path.name) or read_file(file, *rest))
    resumed = stream(folder)
    resumed.load_state_dict(state)
    numbers(resumed, 3)
    assert sum(name.startswith("a") for name in read) == 1


def test_sources_are_numbered(folder: Path) -> None:
    for sample in islice(iter(stream(folder, numbered=True)), 50):
        assert set(sample["source_ids"].tolist()) == {int(number_of(sample) >= 1000)}
        assert len(sample["source_ids"]) == len(sample["input_ids"])


def test_bad_lines(folder: Path) -> None:
    with (folder / "b.jsonl").open("a") as file:
        file.write("no json\n" + json.dumps({"text": "1030"}) + "\n")
    with pytest.raises(ConfigError, match=r"b\.jsonl:31: "):
        numbers(stream(folder), 800)
    assert 1030 in numbers(stream(folder, bad_lines="skip"), 800)


def test_a_source_without_samples_ends_in_words(folder: Path) -> None:
    (folder / "b.jsonl").write_text(json.dumps({"text": "1009"}) + "\n")
    with pytest.raises(ConfigError, match=r"data\.train\[1\] \(b\.jsonl\): no record gives a sample"):
        numbers(stream(folder), 100)


def test_a_state_of_other_sources_is_refused(folder: Path) -> None:
    state = stream(folder).state_dict()
    state["sources"] = state["sources"][:1]
    with pytest.raises(ConfigError, match="the position in 1 sources"):
        stream(folder).load_state_dict(state)


# -- in training -------------------------------------------------------------------------------------------------------


class Stop(TrainerCallback):
    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


class Noting(TokenPaddingCollator):
    """Notes the samples of every micro-batch of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def __call__(self, features: Any) -> dict[str, torch.Tensor]:
        self.seen += [number_of(sample) for sample in features]
        return super().__call__(features)


def train(data: str, output: str, stops: list[int | None], **more: Any) -> tuple[list[int], list[dict[str, float]]]:
    """Train with a stop and a resume after each of ``stops``: the samples of this rank, and the logged losses."""
    seen: list[int] = []
    for index, stop in enumerate(stops):
        given = dict(max_steps=9, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, max_length=24)
        args = TrainingArguments(output, **{**given, **more})
        collator = Noting()
        trainer = Trainer(
            tiny_llama(vocab_size=max(VOCABULARY, 64)),
            args,
            train_dataset=stream(Path(data), numbered=True),
            data_collator=collator,
            callbacks=[Stop(stop)],
        )
        trainer.train(resume_from_checkpoint=index > 0)
        seen += collator.seen
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return seen, [{key: value for key, value in entry.items() if key.startswith("loss")} for entry in logs]


@pytest.mark.extended
def test_a_run_resumed_twice_reads_the_samples_of_the_unbroken_run(folder: Path, tmp_path: Path) -> None:
    values = dict(per_device_train_batch_size=4, gradient_accumulation_steps=2)
    whole, losses = train(str(folder), str(tmp_path / "whole"), [None], **values)
    broken, resumed = train(str(folder), str(tmp_path / "broken"), [3, 6, None], **values)
    assert broken == whole == numbers(stream(folder), 72)
    assert resumed == losses and len(losses) == 9
    assert {"loss/a", "loss/b"} <= set().union(*losses)


@pytest.mark.cases(1)
@pytest.mark.parametrize("packing", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_two_ranks_train_on_the_same_samples(folder: Path, tmp_path: Path, packing: bool) -> None:
    values = dict(packing=packing, max_steps=4)
    one, losses = train(str(folder), str(tmp_path / "one"), [None], per_device_train_batch_size=4, **values)
    job = partial(train, str(folder), str(tmp_path / "two"), [2, None], per_device_train_batch_size=2, zero_stage=1)
    ranks = pool(2).run(partial(job, **values))
    for _, found in ranks:
        assert [set(entry) for entry in found] == [set(entry) for entry in losses]
        for entry, other in zip(found, losses, strict=True):
            assert entry == pytest.approx(other, abs=2e-5)
    if not packing:
        assert sorted(ranks[0][0] + ranks[1][0]) == sorted(one)


def test_a_wrong_position_is_noticed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a stream that begins again at the first sample."""
    monkeypatch.setattr(MixtureStream, "load_state_dict", lambda self, state: None)
    with pytest.raises(AssertionError):
        test_a_run_resumed_twice_reads_the_samples_of_the_unbroken_run(folder, tmp_path)


@pytest.mark.parametrize(("shards", "limit"), [(3, None), (2, None), (4, None), (3, 50)])
def test_shards_divide_the_records_of_every_source(shards: int, limit: int | None, folder: Path) -> None:
    """By files where there are enough, else by records; each shard draws its sources for itself, and resumes."""
    parts = [stream(folder, limit=limit).shard(num_shards=shards, index=index) for index in range(shards)]
    found = [numbers(part, 300) for part in parts]
    sources = [
        {n for n in numbers(stream(folder, limit=limit), 900) if (n >= 1000) == large} for large in (False, True)
    ]
    for large, wanted in zip((False, True), sources, strict=True):
        own = [{n for n in ns if (n >= 1000) == large} for ns in found]
        assert set.union(*own) == wanted and sum(map(len, own)) == len(wanted)
    assert len({tuple(n >= 1000 for n in ns) for ns in found}) == shards
    first, rest = stream(folder, limit=limit).shard(shards, 1), stream(folder, limit=limit).shard(shards, 1)
    reader = iter(first)
    assert [number_of(next(reader)) for _ in range(70)] == found[1][:70]
    rest.load_state_dict(first.state_dict())
    assert numbers(rest, 230) == found[1][70:]
