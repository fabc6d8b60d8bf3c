"""Models whose sequences cannot be sharded though the layout asks for it: evaluated unsharded, never trained."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.ranks import free_port
from tests.support.models import Regression, regression_rows
from tests.support.pool import pool
from tests.support.predictions import flatten
from tests.training.test_sequence_sharded_runs import NoPlaces, classes, classified, encoder_decoder, make_data


def classified_by_token() -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": torch.arange(3, 11) + i, "labels": torch.arange(4) + 2 * i} for i in range(9)]


EVALUATED: dict[str, Any] = {
    "encoder-decoder": (encoder_decoder, classified_by_token),
    "a class for each sequence": (classes, classified),
    "no positions": (NoPlaces, make_data),
    "no sequences": (Regression, partial(regression_rows, 9)),
}


def evaluated_whole(name: str, output_dir: str, **values: Any) -> Any:
    """Losses and predictions without any training data; what training says, and how soon."""
    make_model, rows = EVALUATED[name]
    args = TrainingArguments(
        output_dir, use_cpu=True, disable_tqdm=True, save_strategy="no", per_device_eval_batch_size=2, **values
    )
    torch.manual_seed(0)
    trainer = Trainer(make_model(), args, eval_dataset=rows())
    metrics, found = trainer.evaluate(), trainer.predict(rows())
    trainer.train_dataset = rows()
    start = time.perf_counter()
    try:
        trainer.train()
    except ConfigError as error:
        return metrics["eval_loss"], metrics["eval_items"], found.predictions, str(error), time.perf_counter() - start
    return metrics["eval_loss"], metrics["eval_items"], found.predictions, "", 0.0


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", EVALUATED)
def test_models_that_cannot_be_sharded_are_evaluated_unsharded(name: str, tmp_path: Path) -> None:
    """Every rank of a replica works on the whole batch, which counts once; training says at once why not."""
    ((loss, items, predictions, message, _),) = pool(1).run(evaluated_whole, name, str(tmp_path))
    assert message == ""  # one rank trains it
    axes = ({"context_parallel_size": 2}, {"sequence_parallel_size": 2})
    for world, values in ((2, axes[0]), (2, axes[1]), (4, axes[1])):
        for found in pool(world).run(partial(evaluated_whole, name, str(tmp_path), zero_stage=0, **values)):
            assert found[0] == pytest.approx(loss, rel=1e-6) and found[1] == items
            for ours, other in zip(flatten(found[2]), flatten(predictions), strict=True):
                np.testing.assert_allclose(ours, other, atol=1e-6)
            assert "et both to 1" in found[3] or "parallel_size to 1" in found[3]
            assert found[4] < 1.0


def test_training_is_rejected_before_ranks_connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At construction where there is training data; else first of all in train()."""
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    args = TrainingArguments(str(tmp_path), use_cpu=True, max_steps=1, sequence_parallel_size=2)
    with pytest.raises(ConfigError, match="encoder-decoder"):
        Trainer(encoder_decoder(), args, train_dataset=classified_by_token())
    met: list[Any] = []
    monkeypatch.setattr("ds_trainer.training.run_setup.join_ranks", met.append)
    with pytest.raises(ConfigError, match="encoder-decoder"):
        Trainer(encoder_decoder(), args).train()
    assert not met
