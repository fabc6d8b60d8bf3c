"""An evaluation that needs the loss only gives each rank its shard; its results are those of whole batches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.data.sequence_sharding import SequenceSharder
from ds_trainer.utils.errors import ConfigError
from tests.support.layouts import grouped_query
from tests.support.models import RaggedTokens
from tests.support.pool import pool
from tests.training.test_source_losses import mixture

SAMPLES = 7  # micro-steps are ragged, and one replica of two works on a dummy at the end
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ring": (2, {"context_parallel_size": 2}),
    "Ulysses, two replicas": (4, {"sequence_parallel_size": 2}),
    "ring, tensor parallelism": (4, {"context_parallel_size": 2, "tensor_parallel_size": 2}),
    "ring, Ulysses, two replicas": (8, {"context_parallel_size": 2, "sequence_parallel_size": 2, "zero_stage": 3}),
}


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(RaggedTokens(SAMPLES).rows)


class WithoutLabels(RaggedTokens):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {key: value for key, value in super().__getitem__(index).items() if key != "labels"}


class Lengths(RaggedTokens):
    """Another length in each batch, none of which can be divided."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {key: value[: 7 + index // 4] for key, value in super().__getitem__(index).items()}


def loss_of(outputs: Any, labels: Any, num_items_in_batch: Any = None, shift_labels: Any = None) -> torch.Tensor:
    targets = F.pad(labels[:, 1:], (0, 1), value=-100) if shift_labels is None else shift_labels
    total = F.cross_entropy(outputs["logits"].float().flatten(0, 1), targets.flatten(), reduction="sum")
    return total / (targets.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch)


class MeanLoss(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:  # type: ignore[override]
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


PACKED: dict[str, Any] = {"packing": True, "max_length": 40}
CASES: dict[str, Any] = {
    "rows": (partial(RaggedTokens, SAMPLES), Trainer, {}),
    "one batch": (partial(RaggedTokens, 2), Trainer, {}),
    "other lengths": (partial(Lengths, SAMPLES), Trainer, {}),
    "a stream": (Stream, Trainer, {}),
    "no labels": (partial(WithoutLabels, SAMPLES), Trainer, {}),
    "a mean loss": (partial(RaggedTokens, SAMPLES), MeanLoss, {}),
    "a loss function": (partial(RaggedTokens, SAMPLES), Trainer, {"compute_loss_func": loss_of}),
    "packed, by source": (mixture, Trainer, PACKED),
}


def evaluated(output_dir: str, case: str, whole: bool, **values: Any) -> tuple[dict[str, float], int]:
    """Metrics of an evaluation on this rank, and how many micro-batches came in shards."""
    make_data, kind, more = CASES[case]
    given = {**more, **values}
    options = {name: given.pop(name) for name in ("compute_loss_func", "compute_metrics") if name in given}

    class Watched(kind):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            self.shards, evaluator = 0, self._ds_trainer.evaluator
            loss_of_shard = evaluator.loss_of_shard

            def counted(model: Any, batch: Any) -> Any:
                self.shards += 1
                return loss_of_shard(model, batch)

            evaluator.loss_of_shard = counted

    class Whole(Watched):
        def prediction_step(self, *arguments: Any, **keywords: Any) -> Any:
            return super().prediction_step(*arguments, **keywords)

    args = TrainingArguments(output_dir, use_cpu=True, disable_tqdm=True, per_device_eval_batch_size=2, **given)
    trainer = (Whole if whole else Watched)(grouped_query(), args, eval_dataset=make_data(), **options)
    first, second = trainer.evaluate(), trainer.evaluate()
    assert lasting(first) == lasting(second)
    return lasting(first), trainer.shards // 2


def lasting(metrics: dict[str, float]) -> dict[str, float]:
    """Without what depends on the speed."""
    return {name: value for name, value in metrics.items() if "time" not in name and "second" not in name}


def both_ways(output_dir: str, case: str, **values: Any) -> tuple[dict[str, float], int, dict[str, float]]:
    whole, none = evaluated(output_dir, case, True, **values)
    assert none == 0
    return *evaluated(output_dir, case, False, **values), whole


@pytest.mark.cases(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_the_results_are_those_of_whole_batches(case: str, layout: str, tmp_path: Path) -> None:
    world, sizes = LAYOUTS[layout]
    if case not in ("rows", "packed, by source") and world != 4:
        pytest.skip("every layout with rows, and with packed ones")
    for found, shards, whole in pool(world).run(partial(both_ways, str(tmp_path), case, **sizes)):
        assert found == whole
        assert shards >= 1
        assert ("eval_loss" in found) is (case != "no labels")
        assert ("eval_loss/rare" in found) is (case == "packed, by source")


def broken(output_dir: str) -> tuple[dict[str, float], int]:
    part = SequenceSharder._part
    SequenceSharder._part = lambda self, key, value, positions: part(  # type: ignore[method-assign]
        self, key, value, (positions - 1).clamp(min=0) if key == "labels" else positions
    )
    try:
        return evaluated(output_dir, "rows", False, context_parallel_size=2)
    finally:
        SequenceSharder._part = part  # type: ignore[method-assign]


def test_control_wrong_shards_change_the_loss(tmp_path: Path) -> None:
    (found, shards), _ = pool(2).run(partial(broken, str(tmp_path)))
    ((wanted, _), _) = pool(2).run(partial(evaluated, str(tmp_path), "rows", True, context_parallel_size=2))
    assert shards == 4 and found["eval_loss"] != pytest.approx(wanted["eval_loss"], rel=1e-3)


def test_metrics_need_whole_batches(tmp_path: Path) -> None:
    job = partial(evaluated, str(tmp_path), "rows", False, context_parallel_size=2)
    for found, shards in pool(2).run(partial(job, compute_metrics=len_of_predictions)):
        assert shards == 0 and found["eval_rows"] == SAMPLES
    for found, shards in pool(2).run(
        partial(job, compute_metrics=len_of_predictions, prediction_loss_only=True, include_for_metrics=["inputs"])
    ):
        assert shards == 4 and "eval_rows" not in found  # nothing is asked for but the loss


def len_of_predictions(found: Any) -> dict[str, float]:
    return {"rows": len(found.predictions)}


class LosesLabels(RaggedTokens):
    """The last sample has none."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = dict(super().__getitem__(index))
        return {**row, "labels": torch.ones(3, 3, dtype=torch.int64)} if index == 4 else row


def refusal(output_dir: str) -> str:
    args = TrainingArguments(output_dir, use_cpu=True, per_device_eval_batch_size=1, context_parallel_size=2)
    with pytest.raises(ConfigError) as caught:
        Trainer(grouped_query(), args, eval_dataset=LosesLabels(SAMPLES)).evaluate()
    return str(caught.value)


def test_every_rank_says_what_is_wrong_with_a_batch(tmp_path: Path) -> None:
    for found in pool(2).run(partial(refusal, str(tmp_path))):
        assert "'labels' of a batch has integers of the shape [1, 3, 3]" in found


class Keeps(Trainer):
    """Has one loader for all evaluations."""

    kept: Any = None

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        self.kept = super().get_eval_dataloader(eval_dataset) if self.kept is None else self.kept
        return self.kept


def evaluated_in_training(output_dir: str) -> list[float]:
    args = TrainingArguments(
        output_dir,
        use_cpu=True,
        disable_tqdm=True,
        max_steps=3,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="no",
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        context_parallel_size=2,
        logging_steps=1,
    )
    trainer = Keeps(grouped_query(), args, train_dataset=RaggedTokens(9), eval_dataset=RaggedTokens(SAMPLES))
    trainer.train()
    assert [len(batch["input_ids"]) for batch in trainer.kept] == [2, 2, 2, 1]  # whole ones, after evaluations
    pins = trainer.kept.pin_memory = True
    for cuts in (object(), object(), None, object(), None):  # only what goes to the device is page-locked
        trainer.kept.cut_with(cuts)
        assert trainer.kept.pin_memory is (cuts is None) and trainer.kept.pins_shards is (pins and cuts is not None)
    return [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]


def test_a_kept_loader_gives_whole_batches_afterwards(tmp_path: Path) -> None:
    first, second = pool(2).run(partial(evaluated_in_training, str(tmp_path)))
    assert first == second and len(first) == 3 and first[-1] < first[0]
