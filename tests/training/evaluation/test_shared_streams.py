"""Evaluation and prediction of a stream that replicas read in shards: the numbers and the order of the whole stream."""

from __future__ import annotations

import multiprocessing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.data.stream import StreamLoader, StreamShard
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.evaluation import shared_streams
from ds_trainer.training.evaluation.shared_streams import joins_in_order, share_reading
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import pool

ROWS = 37


def rows(numbers: list[int]) -> Any:
    """Samples of files of different lengths, as a generator of datasets gives them."""
    data = RaggedTokens(ROWS)
    for number in numbers:
        yield {name: value.tolist() for name, value in data[number].items()}


def stream(kind: str = "plain") -> Any:
    from datasets import IterableDataset

    files = np.split(np.arange(ROWS), [3, 4, 15, 20, 21, 30, 33])  # eight
    data = IterableDataset.from_generator(partial(of_files), gen_kwargs={"files": [file.tolist() for file in files]})
    return {
        "plain": lambda: data,
        "mapped": lambda: data.map(counted),
        "taken": lambda: data.take(30),
        "skipped": lambda: data.skip(5),
        "batched": lambda: data.map(lambda batch: batch, batched=True),
        "with indices": lambda: data.map(lambda row, index: row, with_indices=True),
        "shuffled": lambda: data.shuffle(1, buffer_size=4),
        "filtered": lambda: data.filter(lambda row: row["input_ids"][0] % 3 != 0),
        "split": lambda: split(data),
    }[kind]()


def of_files(files: list[list[int]]) -> Any:
    for file in files:
        yield from rows(file)


READ: list[int] = []


def counted(row: dict[str, Any]) -> dict[str, Any]:
    READ.append(1)
    return row


def split(data: Any) -> Any:
    from datasets.distributed import split_dataset_by_node

    from ds_trainer.utils import distributed

    return split_dataset_by_node(data, distributed.rank(), distributed.world_size())


def first_tokens(prediction: Any) -> dict[str, float]:
    labels, inputs = prediction.label_ids, prediction.inputs
    weights = np.arange(1, len(labels) + 1)  # so it depends on the order
    assert len(prediction.losses) == len(inputs)
    return {"ordered": float((weights * inputs[:, 0]).sum()), "right": float((labels == inputs).mean())}


def results(output_dir: str, kind: str, setting: Any, metrics: bool = True, **more: Any) -> Any:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # may have workers
    args = TrainingArguments(
        output_dir,
        per_device_eval_batch_size=2,
        include_for_metrics=["inputs", "loss"] if metrics else [],
        stream_shards=setting,
        max_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **more,
    )
    trainer = Trainer(tiny_llama(), args, eval_dataset=stream(kind), compute_metrics=first_tokens if metrics else None)
    READ.clear()
    found = trainer.evaluate()
    read = len(READ)
    prediction = trainer.predict(stream(kind))
    numbers = {name: found[name] for name in ("eval_loss", "eval_items", "eval_ordered") if name in found}
    return numbers, prediction.predictions, prediction.label_ids, read


@pytest.mark.extended
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("world", "setting", "more"),
    [(2, "auto", {}), (4, 8, {}), (4, 7, {"dataloader_num_workers": 2}), (4, 4, {"context_parallel_size": 2})],
)
def test_results_are_in_the_order_of_the_stream(world: int, setting: Any, more: dict[str, Any], tmp_path: Path) -> None:
    ((loss, logits, labels, _),) = pool(1).run(results, str(tmp_path), "mapped", None)
    found = pool(world).run(partial(results, str(tmp_path), "mapped", setting, **more))
    for rank in found:
        assert rank[0] == pytest.approx(loss, rel=1e-6)
        np.testing.assert_array_equal(rank[2], labels)
        np.testing.assert_allclose(rank[1], logits, rtol=1e-4, atol=1e-5)
    if not more:
        assert sum(rank[3] for rank in found) == ROWS


ALL_ALIKE = ("taken", "skipped", "batched", "with indices", "shuffled", "filtered", "split")


def numbers(output_dir: str, setting: Any) -> dict[str, Any]:
    """Of an evaluation of each kind of stream, without and with metrics."""
    found: dict[str, Any] = {}
    for kind in ALL_ALIKE:
        for metrics in (False, True):
            loss, _, labels, _ = results(output_dir, kind, setting, metrics)
            found[f"{kind}, {metrics}"] = (loss, labels)
    return found


@pytest.mark.extended
def test_a_stream_whose_shards_are_not_the_stream_is_read_whole(tmp_path: Path) -> None:
    """``stream.take(30)`` is 30 other samples if each shard gives its share."""
    wanted, found = (pool(2).run(partial(numbers, str(tmp_path), setting))[0] for setting in (None, "auto"))
    for name, (loss, labels) in wanted.items():
        assert found[name][0] == pytest.approx(loss, rel=1e-6), name
        np.testing.assert_array_equal(found[name][1], labels, err_msg=name)
    assert {kind for kind in ("plain", "mapped", *ALL_ALIKE) if joins_in_order(stream(kind))} == {
        *("plain", "mapped", "filtered"),
        "split",  # recognized before
    }
    assert not joins_in_order(RaggedTokens(3))


def test_reading_often_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    shared_streams._warn_once.cache_clear()
    args = TrainingArguments("unused", stream_shards="auto", use_cpu=True, report_to="none")
    layout = ParallelLayout(8)
    for kind in ("taken", "taken", "plain"):
        plan = BatchPlan(layout, 2)
        loader = StreamLoader(StreamShard(stream(kind), plan, 0, list), 8)
        assert share_reading(loader, args, layout, True) == (kind == "plain")
    (text,) = caplog.messages
    assert "read by 8 replicas" in text and "no take, skip" in text
