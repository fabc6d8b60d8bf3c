"""Evaluation and prediction: the numbers of transformers.Trainer on one process, and the same under every layout."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ds_trainer
from ds_trainer import Trainer
from tests.parity.library import Library, assert_same, both
from tests.support.evaluation_models import KINDS, LONGEST, SAMPLES, Scores, to_longest
from tests.support.pool import pool
from tests.support.predictions import arguments, flatten

BATCH = 2
TIMES = ("_runtime", "per_second", "_time", "_items")


def numbers(metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics without times, and without what transformers does not count."""
    return {name: value for name, value in metrics.items() if not name.endswith(TIMES) and name != "epoch"}


def results(trainer: Any, kind: str) -> dict[str, Any]:
    """What a user sees of evaluate and predict."""
    evaluated = trainer.evaluate()
    predicted = trainer.predict(KINDS[kind].rows())
    return {
        "evaluate": numbers(evaluated),
        "predict": numbers(predicted.metrics),
        "predictions": predicted.predictions,
        "labels": predicted.label_ids,
    }


# -- transformers, one process ----------------------------------------------------------------------------------------


def script(library: Library, kind: str, batch: int = BATCH, **changes: Any) -> Any:
    """The script of a user, but for where its names come from."""
    trainer = library.trainer(
        {"per_device_eval_batch_size": batch, **changes},
        model=KINDS[kind].model(),
        data_collator=to_longest,
        train_dataset=None,
        eval_dataset=KINDS[kind].rows(),
        compute_metrics=Scores(KINDS[kind].shifted),
    )
    return results(trainer, kind)


def exact_loss(kind: str, directory: Path) -> float:
    """The mean over all items, of transformers: from its loss of each sample alone."""
    import transformers

    library = Library(transformers, directory)
    shifted, kept = KINDS[kind].shifted, []

    def keep(found: Any) -> dict[str, float]:
        labels = found.label_ids[:, 1:] if shifted else found.label_ids.reshape(len(found.label_ids), -1)
        items = (labels != -100).sum(1)
        kept.append(float(np.where(items > 0, found.losses * items, 0).sum() / items.sum()))
        return {}

    library.trainer(
        {"per_device_eval_batch_size": 1, "include_for_metrics": ["loss"]},
        model=KINDS[kind].model(),
        data_collator=to_longest,
        eval_dataset=KINDS[kind].rows(),
        compute_metrics=keep,
    ).evaluate()
    return kept[0]


@pytest.mark.cases(4)
@pytest.mark.parametrize("kind", KINDS)
def test_evaluate_and_predict_as_transformers(kind: str, tmp_path: Path) -> None:
    ours, reference = both(partial(script, kind=kind), tmp_path)
    wanted = exact_loss(kind, tmp_path)
    for name in ("evaluate", "predict"):
        (loss,) = (key for key in ours[name] if key.endswith("_loss"))
        assert ours[name][loss] == pytest.approx(wanted, rel=1e-6)
        if not KINDS[kind].weighs_samples:  # transformers weights the means of batches by their samples
            del ours[name][loss], reference[name][loss]
    assert_same(ours, reference, tolerance=1e-6)
    assert ours["evaluate"]["eval_rows"] == SAMPLES
    assert not any(isinstance(value, float) and math.isnan(value) for value in ours["evaluate"].values())


# -- every layout ------------------------------------------------------------------------------------------------------

Sizes = tuple[int, int, int]
LAYOUTS: dict[str, tuple[int, Sizes]] = {  # world; tensor, context, sequence
    "world 1": (1, (1, 1, 1)),
    "world 2": (2, (1, 1, 1)),
    "tp 2": (2, (2, 1, 1)),
    "cp 2": (2, (1, 2, 1)),
    "sp 2": (2, (1, 1, 2)),
    "world 4": (4, (1, 1, 1)),
    "dp 2 x tp 2": (4, (2, 1, 1)),
    "dp 2 x sp 2": (4, (1, 1, 2)),
}
CASES = [(name, stage) for name in LAYOUTS for stage in (0, 3)]


def under(kind: str, output_dir: str, cases: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """:func:`results` of this rank, a layout and ZeRO stage after the other; :func:`settled`."""
    found = []
    for name, stage in cases:
        sizes = dict(zip(("tensor", "context", "sequence"), LAYOUTS[name][1], strict=True))
        args = arguments(
            output_dir,
            zero_stage=stage,
            per_device_eval_batch_size=BATCH,
            **{f"{axis}_parallel_size": size for axis, size in sizes.items()},
        )
        trainer = Trainer(
            KINDS[kind].model(),
            args,
            data_collator=to_longest,
            eval_dataset=KINDS[kind].rows(),
            compute_metrics=Scores(KINDS[kind].shifted),
        )
        found.append(settled(results(trainer, kind), kind))
        trainer._ds_trainer.engines.close_evaluation()
    return found


def settled(found: dict[str, Any], kind: str) -> dict[str, Any]:
    """Predictions as a list of arrays with zeros where a sample has no token.

    What a model says there depends on how wide the batch was, and so on who shared it.
    """
    rows = KINDS[kind].rows()
    lengths = [len(row["labels"]) if kind == "encoder-decoder" else len(row["input_ids"]) for row in rows]
    encoded = [len(row["input_ids"]) for row in rows]
    arrays = []
    for array in flatten(found["predictions"]):
        copy = np.array(array)
        if kind != "sequence classifier":
            used = lengths if copy.shape[1] == max(lengths) else encoded
            copy[np.arange(copy.shape[1])[None] >= np.array(used)[:, None]] = 0
        arrays.append(copy)
    return {**found, "predictions": arrays}


def compare(found: dict[str, Any], wanted: dict[str, Any], path: str) -> None:
    assert_same(found, wanted, tolerance=1e-6, path=path)


def test_control_a_difference_is_detected(tmp_path: Path) -> None:
    wanted = settled(script(Library(ds_trainer, tmp_path), "causal LM"), "causal LM")
    compare(wanted, wanted, "itself")
    changed = [array.copy() for array in wanted["predictions"]]
    changed[0][4, 1, 7] += 1e-5
    swapped = [array[[1, 0, *range(2, SAMPLES)]] for array in wanted["predictions"]]
    twice = {**wanted, "evaluate": {**wanted["evaluate"], "eval_order": wanted["evaluate"]["eval_order"] + 1}}
    for broken in ({**wanted, "predictions": changed}, {**wanted, "predictions": swapped}, twice):
        with pytest.raises(AssertionError):
            compare(broken, wanted, "broken")


# Instead of the others: the same test with a causal LM and an encoder-decoder; this kind:
# test_predict_as_transformers
@pytest.mark.cases("causal LM")
@pytest.mark.extended
@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_is_the_same_under_every_layout(kind: str, tmp_path: Path) -> None:
    wanted = settled(script(Library(ds_trainer, tmp_path), kind), kind)
    assert max(len(row["input_ids"]) for row in KINDS[kind].rows()) == LONGEST
    for world in (1, 2, 4):
        cases = [case for case in CASES if LAYOUTS[case[0]][0] == world]
        for rank, found in enumerate(pool(world).run(under, kind, str(tmp_path), cases)):
            for case, one in zip(cases, found, strict=True):
                compare(one, wanted, f"{case}, rank {rank}")
