"""Generated tokens, labels and the loss are those of one process on every layout, with both ways under ZeRO-3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.pool import pool
from tests.support.translations import PAD, make

SAMPLES = 7  # ragged for every number of ranks: batches of 2, the last one of 1, and replicas without one
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"max_length": 12},
    "beams": {"max_length": 12, "num_beams": 4},
    "unequal": {"max_new_tokens": 24},  # wider than what batches are filled up to
}


def predicted(kind: str, output_dir: str, **changes: Any) -> dict[str, Any]:
    """Predictions, labels and loss of every call, before any training."""
    trainer = make(kind, output_dir, SAMPLES, **changes)
    found = {}
    for name, keywords in CALLS.items():
        output = trainer.predict(trainer.eval_dataset, **keywords)
        assert output.metrics is not None
        # Which of a row's filling is -100 depends on who shared its batch, as in the reference: the collator's filling
        # of labels, and that of tokens beyond the length that all are filled up to.
        tokens, labels = (np.where(rows == -100, PAD, rows) for rows in (output.predictions, output.label_ids))
        found[name] = (tokens, labels, output.metrics["test_loss"], output.metrics["test_order"])
    return found


# DeepSpeed would keep all weights of a model as small as these on every rank.
SHARDED = {"deepspeed": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}}
LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "t5, 1 rank, ZeRO-3": (1, "t5", {**SHARDED, "generation_gather": "always"}),
    "t5, 2 ranks": (2, "t5", {"zero_stage": 0}),
    "t5, 2 ranks, ZeRO-3 in step": (2, "t5", {**SHARDED, "generation_gather": "never"}),
    "t5, 2 ranks, ZeRO-3 gathered": (2, "t5", {**SHARDED, "generation_gather": "always"}),
    "t5, 4 ranks": (4, "t5", {"zero_stage": 0}),
    "t5, 4 ranks, ZeRO-3 in step": (4, "t5", {**SHARDED, "generation_gather": "never"}),
    "t5, 4 ranks, ZeRO-3 gathered": (4, "t5", {**SHARDED, "generation_gather": "always"}),
    "bart, 2 ranks, ZeRO-3": (2, "bart", SHARDED),
    "t5, tp 2": (2, "t5", {"zero_stage": 0, "tensor_parallel_size": 2}),
    "t5, dp 2 x tp 2, ZeRO-3": (4, "t5", {**SHARDED, "tensor_parallel_size": 2}),
    "t5, sp 2": (2, "t5", {"zero_stage": 0, "sequence_parallel_size": 2, "trains": False}),
    "t5, dp 2 x cp 2, ZeRO-3": (4, "t5", {**SHARDED, "context_parallel_size": 2, "trains": False}),
    "decoder, tp 2": (2, "decoder", {"zero_stage": 0, "tensor_parallel_size": 2}),
    "decoder, sp 2": (2, "decoder", {"zero_stage": 0, "sequence_parallel_size": 2}),
    "decoder, dp 2 x sp 2, ZeRO-3": (4, "decoder", {**SHARDED, "sequence_parallel_size": 2}),
}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    directory = str(tmp_path_factory.mktemp("one"))
    return {kind: predicted(kind, directory, zero_stage=0) for kind in ("t5", "bart", "decoder")}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_what_one_process_gives(
    name: str, one_process: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    world, kind, changes = LAYOUTS[name]
    for found in pool(world).run(_predicted, kind, str(tmp_path), changes):
        for call, (tokens, labels, loss, order) in one_process[kind].items():
            np.testing.assert_array_equal(found[call][0], tokens, err_msg=call)
            np.testing.assert_array_equal(found[call][1], labels, err_msg=call)
            assert found[call][2] == pytest.approx(loss, abs=1e-6)
            assert found[call][3] == order


def _predicted(kind: str, output_dir: str, changes: dict[str, Any]) -> dict[str, Any]:
    return predicted(kind, output_dir, **changes)
