"""Predictions: those of transformers on one process, and the same ones for every number of ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ds_trainer import EvalPrediction, PredictionOutput, Trainer
from ds_trainer.training.evaluation import evaluation_loop as eval_loop
from tests.support.pool import pool
from tests.support.predictions import KINDS, Pair, arguments, class_rows, describe, make, refusal_of


def assert_same(found: Any, wanted: Any) -> None:
    """Equal structure, dtype, shape; values to float32."""
    if wanted is None or isinstance(wanted, (tuple, list)):
        assert type(found) is type(wanted)
    if wanted is None:
        return
    if isinstance(wanted, (tuple, list)):
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            assert_same(a, b)
        return
    assert isinstance(found, np.ndarray) and (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def predict_with_transformers(kind: str, output_dir: Path, samples: int, **changes: Any) -> Any:
    """transformers' Trainer over the same model and data."""
    import transformers

    model, rows, collate = KINDS[kind]
    metrics, preprocess = changes.pop("metrics", None), changes.pop("preprocess", None)
    values = dict(save_strategy="no", disable_tqdm=True, use_cpu=True, per_device_eval_batch_size=2, report_to="none")
    args = transformers.TrainingArguments(str(output_dir), **{**values, **changes})
    return transformers.Trainer(
        model(),
        args,
        data_collator=collate,
        eval_dataset=rows(samples) if samples else None,
        compute_metrics=metrics,
        preprocess_logits_for_metrics=preprocess,
    )


def close_metrics(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """The same names, and the same values but for times; ours count items too."""
    assert {n for n in found if not n.endswith("_items")} == set(wanted)
    for name, value in wanted.items():
        if not name.endswith(("_runtime", "per_second", "_time")):
            assert found[name] == pytest.approx(value, rel=1e-5), name
            assert type(found[name]) is type(value)


def argmax(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    assert logits.shape[: labels.dim()] == labels.shape
    return logits.argmax(-1)


# -- parity with transformers, one process ---------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"eval_accumulation_steps": 2}, {"eval_do_concat_batches": False}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_predict_as_transformers(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    rows = KINDS[kind][1](7)
    ignored = ["cache"] if kind == "nested" else None
    wanted = predict_with_transformers(kind, tmp_path, 0, **changes).predict(
        rows, ignore_keys=ignored, metric_key_prefix="x"
    )
    found = make(kind, tmp_path, 0, **changes).predict(rows, metric_key_prefix="x")
    assert isinstance(found, PredictionOutput)
    assert_same(found.predictions, wanted.predictions)
    assert_same(found.label_ids, wanted.label_ids)
    close = {k: v for k, v in wanted.metrics.items() if kind != "ragged tokens" or k != "x_loss"}
    close_metrics({k: found.metrics[k] for k in found.metrics if k in close or k.endswith("items")}, close)


@pytest.mark.parametrize("kind", KINDS)
def test_predict_without_labels_as_transformers(kind: str, tmp_path: Path) -> None:
    rows = [{k: v for k, v in row.items() if k != "labels"} for row in KINDS[kind][1](5)]
    if kind == "ragged tokens":
        rows = [{"ids": row["ids"][:2]} for row in rows]  # its collator pads labels too
    ignored = ["cache"] if kind == "nested" else None
    reference = predict_with_transformers(kind, tmp_path, 0)
    trainer = make(kind, tmp_path, 0)
    if kind == "ragged tokens":
        import transformers

        reference.data_collator = trainer.data_collator = transformers.default_data_collator
    wanted = reference.predict(rows, ignore_keys=ignored)
    found = trainer.predict(rows)
    assert_same(found.predictions, wanted.predictions)
    assert found.label_ids is None and wanted.label_ids is None
    close_metrics(found.metrics or {}, wanted.metrics)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"include_for_metrics": ["inputs", "loss"]},
        {"prediction_loss_only": True},
        {"eval_accumulation_steps": 1, "include_for_metrics": ["loss"]},
    ],
    ids=str,
)
def test_metrics_as_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    for samples in (1, 7):
        wanted = predict_with_transformers("tuple", tmp_path, samples, metrics=describe, **changes).evaluate()
        found = make("tuple", tmp_path, samples, metrics=describe, **changes).evaluate()
        assert found.pop("epoch") == 0.0  # transformers leaves it out before training
        close_metrics(found, {k: v for k, v in wanted.items() if k != "epoch"})


def test_preprocessed_logits_as_transformers(tmp_path: Path) -> None:
    rows = KINDS["ragged tokens"][1](7)
    wanted = predict_with_transformers("ragged tokens", tmp_path, 0, preprocess=argmax).predict(rows)
    found = make("ragged tokens", tmp_path, 0, preprocess=argmax).predict(rows)
    assert_same(found.predictions, wanted.predictions)
    assert found.predictions.ndim == 2 and (found.predictions == -100).any()


@pytest.mark.parametrize(
    ("every", "wanted"), [("never", [7]), (None, [2, 2, 2, 1]), (3, [6, 1]), (2, [4, 3]), (1, [2, 2, 2, 1])]
)
def test_host_memory_in_chunks(every: Any, wanted: list[int], tmp_path: Path, monkeypatch: Any) -> None:
    """eval_accumulation_steps: after so many batches, what was kept leaves the device; else all of it at the end.

    On the CPU the device is host memory, and nothing waits; "never" is what a GPU does with None.
    """
    chunks: list[int] = []
    if every == "never":
        monkeypatch.setattr(eval_loop.EvalLoop, "_default_interval", staticmethod(lambda device: None))

    class Watched(eval_loop.PredictionAccumulator):
        def to_host(self) -> None:
            if self._on_device and isinstance(self._on_device[0][0], torch.Tensor):  # the labels
                chunks.append(sum(len(batch) for batch, _ in self._on_device))
            super().to_host()
            assert not self._on_device

    monkeypatch.setattr(eval_loop, "PredictionAccumulator", Watched)
    steps = None if every == "never" else every
    found = make("tuple", tmp_path, 0, eval_accumulation_steps=steps).predict(class_rows(7))
    assert chunks == wanted and found.label_ids.tolist() == [i % 3 for i in range(7)]


@pytest.mark.parametrize("kind", ["tuple", "nested", "ragged tokens"])
def test_results_on_a_device_are_bounded_by_default(kind: str, tmp_path: Path, monkeypatch: Any) -> None:
    """As on a GPU: what the batches hold leaves the device once it is more than the bound, and not before."""
    wanted = make(kind, tmp_path, 0).predict(KINDS[kind][1](7)).predictions
    held: list[int] = []

    class OfDevice(eval_loop.PredictionAccumulator):
        host = "none"  # so host memory counts as a device

        def to_host(self) -> None:
            held.append(self.device_bytes)
            super().to_host()

    monkeypatch.setattr(eval_loop, "PredictionAccumulator", OfDevice)
    monkeypatch.setattr(eval_loop.EvalLoop, "_default_interval", staticmethod(lambda device: None))
    moves = {}
    for bound in (10**9, 200, 0):
        monkeypatch.setattr(eval_loop, "MOST_ON_DEVICE", bound)
        held.clear()
        assert_same(make(kind, tmp_path, 0).predict(KINDS[kind][1](7)).predictions, wanted)
        moves[bound] = [number for number in held if number]
    kinds = len(moves[10**9])  # all at the end
    assert max(moves[200]) < max(moves[10**9]) and len(moves[0]) == 4 * kinds > len(moves[200]) > kinds
    held.clear()
    make(kind, tmp_path, 0, eval_accumulation_steps=3).predict(KINDS[kind][1](7))
    assert len([number for number in held if number]) == 2 * kinds  # the argument counts


def test_bytes_of_results_on_a_device() -> None:
    kept = eval_loop.PredictionAccumulator(True, False)
    kept.add({"a": torch.empty(8, 4096, dtype=torch.long, device="meta"), "b": (torch.empty(8),)})
    kept.add({"a": torch.empty(8, 4096, dtype=torch.long, device="meta")[:, :1], "b": (torch.empty(8),)})
    assert kept.device_bytes == 2 * 8 * 4096 * 8  # a part of a tensor holds all of it


class ByBatch:
    """``compute_metrics`` that adds up batches, as ``batch_eval_metrics`` asks for."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.last: list[bool] = []

    def __call__(self, found: Any, compute_result: bool = False) -> dict[str, Any]:
        assert isinstance(found.predictions[0], torch.Tensor)
        assert found.inputs is None or set(found.inputs) == {"x", "labels"}
        self.rows.append(len(found.label_ids) * (1 if found.losses is None else len(found.losses)))
        self.last.append(compute_result)
        return {"rows": np.int64(sum(self.rows)), "batches": len(self.rows)} if compute_result else {}


@pytest.mark.parametrize("include", [[], ["inputs"]])
def test_batch_eval_metrics_as_transformers(include: list[str], tmp_path: Path) -> None:
    changes: dict[str, Any] = {"batch_eval_metrics": True, "include_for_metrics": include}
    ours, other = ByBatch(), ByBatch()
    wanted = predict_with_transformers("tuple", tmp_path, 7, metrics=other, **changes)
    found = make("tuple", tmp_path, 7, metrics=ours, **changes)
    expected, metrics = wanted.evaluate(), found.evaluate()
    assert (ours.rows, ours.last) == (other.rows, other.last) == ([2, 2, 2, 1], [False, False, False, True])
    assert metrics["eval_rows"] == expected["eval_rows"] == 7 and type(metrics["eval_rows"]) is int
    repeated = found.predict(class_rows(3))
    assert (
        len(repeated.predictions[0]) == len(repeated.label_ids) == 3
    )  # predictions are kept although metrics are by batch


def test_eval_prediction_unpacks_like_transformers() -> None:
    from transformers import EvalPrediction as Theirs

    for given in ((1, 2), (1, 2, 3), (1, 2, None, 4), (1, 2, 3, 4)):
        assert tuple(EvalPrediction(*given)) == tuple(Theirs(*given))
        assert EvalPrediction(*given)[1] == 2
    for index in (-1, 2):
        with pytest.raises(IndexError):
            EvalPrediction(1, 2)[index]


# -- any number of ranks ---------------------------------------------------------------------------------------------


def predict_here(kind: str, output_dir: str, samples: list[int], **changes: Any) -> list[Any]:
    found = []
    changes = {"include_for_metrics": ["inputs", "loss"], "metrics": describe, **changes}
    trainer = make(kind, output_dir, 0, **changes)
    for count in samples:
        output = trainer.predict(KINDS[kind][1](count))
        metrics = {k: v for k, v in output.metrics.items() if not k.endswith(("runtime", "second", "time"))}
        found.append((output.predictions, output.label_ids, metrics))
    return found


SIZES = [1, 2, 7, 9]


@pytest.mark.parametrize(("world", "stage"), [(2, 0), (4, 0), (2, 3), (4, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_predictions_do_not_depend_on_the_ranks(kind: str, world: int, stage: int, tmp_path: Path) -> None:
    """Fewer samples than ranks, incomplete last micro-steps: every sample once, in order, on all ranks; and metrics."""
    alone = predict_here(kind, str(tmp_path), SIZES, per_device_eval_batch_size=1)
    # Batches of several samples have predictions at padded positions, whose number depends on who shares the batch.
    changes = {"zero_stage": stage, "per_device_eval_batch_size": 1 if kind == "ragged tokens" else 2}
    for found in pool(world).run(partial(predict_here, kind, str(tmp_path), SIZES, **changes)):
        for (predictions, labels, metrics), (wanted, wanted_labels, wanted_metrics) in zip(found, alone, strict=True):
            assert_same(predictions, wanted)
            assert_same(labels, wanted_labels)
            assert metrics["test_loss"] == pytest.approx(wanted_metrics["test_loss"], rel=1e-5)
            assert metrics["test_rows"] == wanted_metrics["test_rows"]
            assert metrics["test_items"] == wanted_metrics["test_items"]


def predict_ungathered(output_dir: str) -> int:
    """Negative control: dummies count."""
    kept = eval_loop.gather_micro_steps
    eval_loop.gather_micro_steps = lambda tree, dummy, *rest: kept(tree, False, *rest)
    try:
        return len(predict_here("tuple", output_dir, [1])[0][1])
    finally:
        eval_loop.gather_micro_steps = kept


def test_control_a_counted_dummy_batch_is_detected(tmp_path: Path) -> None:
    assert pool(2).run(predict_ungathered, str(tmp_path)) == [2, 2]


class OwnLoaders(Trainer):
    """Every rank reads its own part of the data; the first one has more than the others."""

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        rank, ranks = self.args.process_index, self.args.world_size
        rows = [row for i, row in enumerate(test_dataset) if i % ranks == rank or (rank == 0 and i > 5)]
        return DataLoader(rows, batch_size=1, collate_fn=self.data_collator)


def predict_with_own_loaders(output_dir: str, rows: int) -> Any:
    trainer = OwnLoaders(Pair(), arguments(output_dir))
    found = trainer.predict(class_rows(rows))
    return found.label_ids.tolist()


def test_loaders_of_unequal_length_end_together(tmp_path: Path) -> None:
    labels = pool(2).run(predict_with_own_loaders, str(tmp_path), 8)
    assert labels[0] == labels[1] == [0, 1, 2, 0, 1, 2, 0, 1, 1]
    refused = pool(2).run(partial(refusal_of, predict_with_own_loaders, str(tmp_path), 1))
    assert all("at least one rank has no batch" in message for message in refused)


class Boxes(nn.Module):
    """Object detection: a dict for every image, with as many boxes as it has."""

    main_input_name = "x"

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, Any]:
        loss = self.layer(x).mean()
        return {"loss": loss, "boxes": [{"box": row[: 1 + int(row[0] > 0)]} for row in x]}


def collate_boxes(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"x": torch.stack([row["x"] for row in rows]), "labels": [{"n": row["labels"]} for row in rows]}


def predict_boxes(output_dir: str, concat: bool) -> list[Any]:
    args = arguments(output_dir, eval_use_gather_object=True, eval_do_concat_batches=concat)
    found = Trainer(Boxes(), args, data_collator=collate_boxes).predict(class_rows(5))
    labels = found.label_ids if concat else [entry for batch in found.label_ids for entry in batch]
    boxes = found.predictions if concat else [entry for batch in found.predictions for entry in batch]
    assert all(isinstance(entry["box"], np.ndarray) for entry in boxes)
    return [[entry["n"] for entry in labels], [len(entry["box"]) for entry in boxes]]


@pytest.mark.parametrize("concat", [True, False])
def test_objects_are_gathered_for_every_sample(concat: bool, tmp_path: Path) -> None:
    """Lists of dicts with tensors of any shape, one for each sample: eval_use_gather_object."""
    wanted = [[0, 1, 2, 0, 1], [1 + int(row["x"][0] > 0) for row in class_rows(5)]]
    assert predict_boxes(str(tmp_path), concat) == wanted
    assert pool(2).run(predict_boxes, str(tmp_path), concat) == [wanted, wanted]
