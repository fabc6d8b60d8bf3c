"""Loaders of evaluation: persistent workers, and an order by length that does not show in the results."""

from __future__ import annotations

import gc
import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ds_trainer import Trainer
from tests.support.models import Regression, regression_rows
from tests.support.pool import pool
from tests.support.predictions import KINDS, arguments, describe, flatten, make


class LoadingProcess(nn.Module):
    """Predicts the process that made its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, process: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"loss": self.weight * 0.0, "process": process}


def by_this_process(rows: list[dict[str, int]]) -> dict[str, torch.Tensor]:
    return {"process": torch.full((len(rows),), os.getpid()), "labels": torch.tensor([row["labels"] for row in rows])}


def loading_processes(output_dir: str, sets: Any, stream: bool = False, stays: bool = True) -> list[Any]:
    """Processes and labels of three evaluations, the last one of another set."""
    seen: list[tuple[set[int], list[int]]] = []

    def note(found: Any) -> dict[str, float]:
        seen.append((set(found.predictions.tolist()), found.label_ids.tolist()))
        return {}

    args = arguments(
        output_dir, dataloader_num_workers=1, remove_unused_columns=False, dataloader_persistent_workers=stays
    )
    trainer = Trainer(
        LoadingProcess(), args, data_collator=by_this_process, eval_dataset=streams(sets, stream), compute_metrics=note
    )
    trainer.evaluate()
    trainer.evaluate()
    changed = {"a": [{"labels": 9}], "b": sets["b"]} if isinstance(sets, dict) else [{"labels": 9}]
    trainer.eval_dataset = streams(changed, stream)
    trainer.evaluate()
    return seen


class Once(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """A set without length."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def streams(sets: Any, wanted: bool) -> Any:
    if not wanted:
        return sets
    return {name: Once(rows) for name, rows in sets.items()} if isinstance(sets, dict) else Once(sets)


def rows_of(*labels: int) -> list[dict[str, int]]:
    return [{"labels": label} for label in labels]


@pytest.mark.cases(1)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stays", [True, False])
def test_loader_workers_are_kept_between_evaluations(stays: bool, stream: bool, tmp_path: Path) -> None:
    (first, rows), (second, repeated), (third, other) = loading_processes(
        str(tmp_path), rows_of(3, 4, 5), stream, stays
    )
    assert rows == repeated == [3, 4, 5]
    assert other == [9]  # another set has another loader
    assert len(first) == 1 and (first == second) == stays and first != third


@pytest.mark.extended
def test_each_evaluation_set_keeps_its_own_workers(tmp_path: Path) -> None:
    sets = {"a": rows_of(1, 2), "b": rows_of(3)}
    seen = loading_processes(str(tmp_path), sets)
    processes, labels = [process for process, _ in seen], [rows for _, rows in seen]
    assert labels == [[1, 2], [3]] * 2 + [[9], [3]]
    # The list under "b" is the same object in all three.
    assert processes[0] == processes[2] != processes[1] == processes[3] == processes[5] != processes[4]
    gc.collect()
    alive = {child.pid for child in torch.multiprocessing.active_children()}
    assert not alive & set.union(*processes)  # they end with the Trainer


# -- without length ---------------------------------------------------------------------------------------------------


def predictions_of(output_dir: str, stream: bool, **changes: Any) -> list[Any]:
    """Predictions and metrics of sets of several sizes."""
    found = []
    trainer = make("tuple", output_dir, 0, metrics=describe, include_for_metrics=["inputs", "loss"], **changes)
    for samples in (1, 2, 7, 9):
        rows = KINDS["tuple"][1](samples)
        output = trainer.predict(Once(rows) if stream else rows)
        found.append(([*flatten(output.predictions), output.label_ids], output.metrics["test_rows"]))
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_predictions_of_a_stream(world: int, tmp_path: Path) -> None:
    """A set without length: every sample once, in order, whatever the number of ranks."""
    wanted = predictions_of(str(tmp_path), False)
    for found in pool(world).run(predictions_of, str(tmp_path), True):
        for (arrays, rows), (wanted_arrays, wanted_rows) in zip(found, wanted, strict=True):
            assert rows == wanted_rows
            for ours, other in zip(arrays, wanted_arrays, strict=True):
                np.testing.assert_allclose(ours, other, atol=1e-6)


# -- by length ---------------------------------------------------------------------------------------------------------


def tagged(output_dir: str, sorted_by: bool, samples: int = 23, **changes: Any) -> Any:
    """Predictions of ragged rows, metrics of everything, and the tokens that were computed, and asked for."""
    widths: list[tuple[int, int]] = []
    more = dict(train_sampling_strategy="group_by_length", length_column_name="length") if sorted_by else {}
    trainer = make("ragged tokens", output_dir, samples, metrics=describe, **{**more, **changes})
    trainer.processing_class = type("Names", (), {"model_input_names": ["ids"]})()
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append((kwargs["ids"].numel(), int((kwargs["ids"] != 0).sum()))),
        with_kwargs=True,
    )
    evaluated = trainer.evaluate()
    found = trainer.predict(KINDS["ragged tokens"][1](samples))
    return found.predictions, found.label_ids, evaluated, np.sum(widths, axis=0)


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 0), (4, 3)])
def test_evaluation_by_length_has_the_results_in_order(world: int, stage: int, tmp_path: Path) -> None:
    """``group_by_length`` sorts evaluation too: less padding, and nothing else is seen of it."""
    predictions, labels, metrics, (computed, asked) = tagged(str(tmp_path), False, per_device_eval_batch_size=4)
    lengths = (labels != -100).sum(1) + 1
    job = partial(tagged, str(tmp_path), True, per_device_eval_batch_size=4, zero_stage=stage)
    results = pool(world).run(job)
    of_all = np.sum([tokens for *_, tokens in results], axis=0)
    assert (of_all[0] - of_all[1]) < 0.7 * (computed - asked)
    for found, found_labels, found_metrics, _ in results:
        np.testing.assert_array_equal(found_labels, labels)
        for row, wanted, length in zip(found, predictions, lengths, strict=True):
            np.testing.assert_allclose(row[:length], wanted[:length], atol=1e-6)
        assert found_metrics["eval_loss"] == pytest.approx(metrics["eval_loss"], rel=1e-6)


@pytest.mark.parametrize("changes", [{"eval_do_concat_batches": False}, {"eval_use_gather_object": True}], ids=str)
def test_lists_are_in_the_order_of_the_data(changes: dict[str, Any], tmp_path: Path) -> None:
    job = partial(make, "ragged tokens", tmp_path, 0, **changes)
    rows = KINDS["ragged tokens"][1](7)
    wanted, found = job().predict(rows), job(train_sampling_strategy="group_by_length").predict(rows)
    for ours, other in zip(flatten(found.label_ids), flatten(wanted.label_ids), strict=True):
        np.testing.assert_array_equal(ours, other)


class OfAScript(Trainer):
    prepared = False

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        loader = torch.utils.data.DataLoader(self.eval_dataset, batch_size=3)  # type: ignore[arg-type]
        return self.accelerator.prepare(loader) if self.prepared else loader


def evaluated_by_a_script(output_dir: str, prepared: bool) -> tuple[int, list[str]]:
    texts: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("ds_trainer.training.evaluation.evaluation_loop")
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    trainer = OfAScript(
        Regression(),
        arguments(output_dir),
        eval_dataset=regression_rows(10),  # type: ignore[arg-type]
        compute_metrics=lambda found: {"samples": len(found.predictions)},
    )
    trainer.prepared = prepared
    samples = trainer.evaluate()["eval_samples"]
    logger.removeHandler(handler)
    return int(samples), texts


@pytest.mark.parametrize("prepared", [False, True])
def test_samples_that_every_rank_evaluates_are_said(prepared: bool, tmp_path: Path) -> None:
    (samples, texts), (_, others) = pool(2).run(evaluated_by_a_script, str(tmp_path), prepared)
    assert samples == (10 if prepared else 20) and not others
    assert ["All 2 data-parallel replicas evaluate the same samples" in text for text in texts] == [True] * (
        not prepared
    )
