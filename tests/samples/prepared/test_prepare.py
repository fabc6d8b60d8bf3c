"""Prepared datasets: the samples are those of ``encode``, whatever writes and reads them."""

from __future__ import annotations

import filecmp
import pickle
import shutil
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset

from ds_trainer.data.lengths import sample_lengths
from ds_trainer.data.packing.token_counts import token_counts
from ds_trainer.samples.prepared import workers
from ds_trainer.samples.prepared.dataset import PreparedDataset
from ds_trainer.samples.prepared.prepare import prepare
from ds_trainer.samples.prepared.workers import Part, tasks_of
from ds_trainer.samples.sources.record import Record
from ds_trainer.utils.errors import ConfigError
from tests.samples.prepared.conversations import (
    IDENTITY,
    Encode,
    expected,
    parts_of,
    read_all,
    read_lines,
    write_conversations,
)
from tests.support.file_access import opened


def prepared(paths: list[Path], directory: Path, encode: Any = None, **options: Any) -> PreparedDataset:
    encode = encode or Encode()
    values = {"identity": IDENTITY, "vocab_size": 1000, "processes": 1, **options}
    return prepare(parts_of(paths), encode, directory, files=paths, **values)


def ids_record(number: int) -> Record:
    return Record(f"made, row {number}", "text", {"ids": [number % 50 + 1] * (number % 7 + 1)})


def encode_ids(record: Record) -> dict[str, Any]:
    return {"input_ids": record.fields["ids"], "labels": record.fields["ids"]}


def of_records(records: list[Record], directory: Path, encode: Any, **options: Any) -> PreparedDataset:
    """The records of no file: one part of unknown size."""
    values = {"files": [], "identity": {"test": repr(records)}, "vocab_size": 100, "processes": 1, **options}
    return prepare([Part(None, lambda: iter(records))], encode, directory, **values)


def test_samples_are_those_of_encode_and_name_their_source(tmp_path: Path) -> None:
    paths, encode = write_conversations(tmp_path / "source"), Encode()
    dataset = prepared(paths, tmp_path / "out", encode)
    assert read_all(dataset) == expected(paths, encode)
    assert dataset[0]["input_ids"].dtype == dataset[0]["labels"].dtype == torch.int64
    assert dataset.source(0) == "part-0.jsonl:1"
    assert dataset[-1]["input_ids"].equal(dataset[len(dataset) - 1]["input_ids"])
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_one_and_two_processes_write_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts smaller than a shard (read by workers) and larger ones (read here), in several shards."""
    monkeypatch.setattr(workers, "SHARD_BYTES", 4000)
    encode = Encode()
    paths = write_conversations(tmp_path / "source", lines=15) + write_conversations(tmp_path / "large", 1, 80, first=9)
    one, two = (prepared(paths, tmp_path / f"out{n}", encode, processes=n) for n in (1, 2))
    assert len(one.manifest.shards) > 3
    assert one.directory.name == two.directory.name
    names = sorted(path.name for path in one.directory.iterdir())
    assert names == sorted(path.name for path in two.directory.iterdir())
    assert filecmp.cmpfiles(one.directory, two.directory, names, shallow=False) == (names, [], [])
    assert read_all(two) == expected(paths, encode)


def test_shards_are_runs_of_the_records_decided_by_sizes_alone() -> None:
    parts = [Part(size, list) for size in (5, 5, 5, 40, 1)]
    records = [Record(str(number), "text", {}) for number in range(10)]
    parts[3] = Part(40, lambda: iter(records))
    tasks = list(tasks_of(parts, shard_bytes=10))
    assert [(task.number, len(task.reads)) for task in tasks[:2]] == [(0, 2), (1, 1)]
    assert [record for task in tasks[2:-1] for read in task.reads for record in read()] == records
    assert [task.number for task in tasks] == list(range(len(tasks)))


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2**16, "uint16"), (2**16 + 1, "uint32"), (None, "uint32")])
def test_tokens_take_the_bytes_that_the_vocabulary_needs(tmp_path: Path, vocab_size: int | None, dtype: str) -> None:
    highest = (vocab_size or 2**32) - 1

    def encode(record: Record) -> dict[str, Any]:
        return {"input_ids": np.asarray([0, highest]), "labels": np.asarray([-100, highest])}

    dataset = of_records([ids_record(1)], tmp_path, encode, vocab_size=vocab_size)
    assert dataset.manifest.dtype == dtype
    assert dataset[0]["input_ids"].tolist() == [0, highest]


def test_a_mask_is_stored_only_if_something_is_masked(tmp_path: Path) -> None:
    records = [ids_record(number) for number in range(1000)]
    dataset = of_records(records, tmp_path, encode_ids)
    assert [shard.masked for shard in dataset.manifest.shards] == [False]
    assert all(sample["labels"].equal(sample["input_ids"]) for sample in map(dataset.__getitem__, range(1000)))
    assert dataset.trained_tokens == dataset.tokens - len(records)  # nothing predicts the first token of a sample


def test_records_may_give_several_samples_or_none(tmp_path: Path) -> None:
    def encode(record: Record) -> Any:
        sample = encode_ids(record)
        return [None, [sample, sample], [], sample][int(record.source.split()[-1]) % 4]

    dataset = of_records([ids_record(number) for number in range(8)], tmp_path, encode)
    assert [dataset.source(index) for index in range(6)] == [f"made, row {number}" for number in (1, 1, 3, 5, 5, 7)]
    assert dataset.manifest.counts == {"records": 8, "samples": 6, "dropped": 4, "untrained": 1}


class Noticed(NamedTuple):
    samples: list[dict[str, Any]]
    notices: set[str]


def test_what_encode_notices_is_counted(tmp_path: Path) -> None:
    def encode(record: Record) -> Noticed:
        odd = int(record.source.split()[-1]) % 2
        return Noticed([encode_ids(record)], {"odd", "seen"} if odd else {"seen"})

    dataset = of_records([ids_record(number) for number in range(7)], tmp_path, encode)
    assert dataset.manifest.counts["odd"] == 3 and dataset.manifest.counts["seen"] == 7


@pytest.mark.parametrize("source", ["a:7", "a:007", "a", "7", "", "a:-7", "ü\udcff:3", "row 99999999999999999999"])
def test_every_source_is_kept_as_it_was(tmp_path: Path, source: str) -> None:
    dataset = of_records([Record(source, "text", {"ids": [1]})], tmp_path, encode_ids)
    assert dataset.source(0) == source


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    directory = tmp_path_factory.mktemp("reading")
    return prepared(write_conversations(directory / "source"), directory / "out")


class TestReading:
    def test_lengths_without_reading_a_token(self, dataset: PreparedDataset) -> None:
        fresh = PreparedDataset(dataset.directory)
        with opened(dataset.directory) as files:
            lengths = fresh.lengths
            assert sample_lengths(fresh, "length").tolist() == lengths.tolist() == token_counts(fresh).tolist()
        assert files == ["lengths"]
        assert lengths.tolist() == [len(fresh[index]["input_ids"]) for index in range(len(fresh))]
        with opened(dataset.directory) as files:
            PreparedDataset(dataset.directory)[0]
        assert "shard-000000" in files  # what reads a token is seen

    def test_subsets_and_concatenations_know_them_too(self, dataset: PreparedDataset) -> None:
        both = ConcatDataset([Subset(dataset, [5, 3]), dataset])
        with opened(dataset.directory) as files:
            counts = token_counts(both)
        assert files in ([], ["lengths"])
        assert counts.tolist() == [len(both[index]["input_ids"]) for index in range(len(both))]
        assert token_counts(Subset([{"input_ids": [1, 2]}], [0])).tolist() == [2]

    def test_data_loader_workers_read_it(self, dataset: PreparedDataset) -> None:
        copy = pickle.loads(pickle.dumps(dataset))
        assert len(pickle.dumps(dataset)) < 5000
        assert read_all(copy) == read_all(dataset)
        loader = DataLoader(dataset, batch_size=None, num_workers=1)
        assert [sample["input_ids"].tolist() for sample in loader] == [ids for _, ids, _ in read_all(dataset)]

    def test_a_copy_elsewhere_is_the_same(self, dataset: PreparedDataset, tmp_path: Path) -> None:
        shutil.copytree(dataset.directory, tmp_path / "copy")
        assert read_all(PreparedDataset(tmp_path / "copy", dataset.manifest.key)) == read_all(dataset)


def test_memory_does_not_grow_with_the_samples(tmp_path: Path) -> None:
    peaks = []
    for samples in (1_000, 10_000):
        records = [ids_record(number) for number in range(samples)]
        made = of_records(records, tmp_path, encode_ids, identity={"samples": samples})
        tracemalloc.start()
        dataset = PreparedDataset(made.directory)
        lengths = dataset.lengths
        for index in range(0, samples, 50):
            assert len(dataset[index]["input_ids"]) == lengths[index]
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 9_000, peaks


class TestProblems:
    @pytest.mark.parametrize(
        ("sample", "words"),
        [
            ({"input_ids": [1, 2]}, "encode returned input_ids"),
            ({"input_ids": [1, 2], "labels": [1]}, r"shape \[2\] and labels of shape \[1\]"),
            ({"input_ids": [1, 200], "labels": [1, 200]}, "from 1 to 200, but the tokenizer has ids from 0 to 99"),
            ({"input_ids": [-1], "labels": [-1]}, "from -1 to -1"),
            ({"input_ids": [1.5], "labels": [1.5]}, "float64"),
            ({"input_ids": [1, 2], "labels": [1, 3]}, "a label is neither its token nor -100"),
            ({"input_ids": [1], "labels": [1], "pixels": [0]}, "encode returned input_ids, labels, pixels"),
        ],
    )
    def test_a_wrong_sample_is_named(self, tmp_path: Path, sample: dict[str, Any], words: str) -> None:
        with pytest.raises(ConfigError, match=f"made, row 3: .*{words}"):
            of_records([ids_record(3)], tmp_path, lambda record: sample)
        assert not list(tmp_path.glob("*/manifest.json"))

    def test_twenty_at_once(self, tmp_path: Path) -> None:
        def encode(record: Record) -> dict[str, Any]:
            raise ConfigError(f"{record.source}: bad")

        with pytest.raises(ConfigError) as error:
            of_records([ids_record(number) for number in range(99)], tmp_path, encode)
        assert error.value.problems == [f"made, row {number}: bad" for number in range(20)]

    def test_any_other_error_of_encode_names_the_record(self, tmp_path: Path) -> None:
        with pytest.raises(RuntimeError, match=r"made, row 3 cannot be encoded: KeyError: 'missing'"):
            of_records([ids_record(3)], tmp_path, lambda record: record.fields["missing"])
        assert not [path for path in tmp_path.iterdir() if path.is_dir()]

    def test_no_sample_at_all(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="nothing to train on: 2 records were read"):
            of_records([ids_record(1), ids_record(2)], tmp_path, lambda record: None)

    def test_files_that_are_missing_are_named_together(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError) as error:
            prepare([], Encode(), tmp_path, files=[tmp_path / "a", tmp_path / "b"], identity={})
        assert len(error.value.problems) == 2 and "b cannot be read (No such file" in error.value.problems[1]

    def test_encode_that_cannot_be_sent_to_a_process(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot be sent to worker processes"):
            of_records([ids_record(1)], tmp_path, lambda record: None, processes=2)

    def test_a_source_that_grows_meanwhile(self, tmp_path: Path) -> None:
        (path,) = write_conversations(tmp_path / "source", files=1)
        encode = Encode()

        def growing(record: Record) -> Any:
            with path.open("a") as stream:
                stream.write("\n")
            return encode(record)

        records = list(read_lines(str(path)))
        with pytest.raises(ConfigError, match=r"part-0.jsonl changed while it was read"):
            prepare(
                [Part(10, partial(iter, records))], growing, tmp_path / "out", files=[path], identity={}, processes=1
            )
        assert not list((tmp_path / "out").glob("*/manifest.json"))
