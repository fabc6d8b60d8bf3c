"""Evaluation and prediction under every layout: the loss, the logits and the counts of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds_trainer import Trainer
from ds_trainer.parallel.attention import use_sharding
from ds_trainer.parallel.groups import parallel_groups
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.parallel.sequence_plan import SequencePlan
from ds_trainer.training.evaluation import loss_mean
from ds_trainer.training.evaluation.evaluator import unshard_outputs
from ds_trainer.utils.errors import ConfigError
from tests.support.compare import assert_equal
from tests.support.layouts import PlainAttention
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.oracle import stack, token_loss, train_plainly
from tests.support.pool import pool
from tests.support.predictions import arguments
from tests.support.runs import compatibility_of

SAMPLES = 7  # micro_steps are ragged, and one replica of two works on a dummy at the end
SGD: dict[str, Any] = dict(optimizer="sgd", learning_rate=0.3)
Sizes = tuple[int, int, int]


def accuracy(found: Any) -> dict[str, float]:
    targets = found.label_ids[:, 1:]
    hit = (found.predictions[:, :-1].argmax(-1) == targets) & (targets != -100)
    return {"hits": float(hit.sum()), "rows": float(len(found.predictions))}


def trainer_of(output_dir: str, sizes: Sizes, shape: Any = None, **changes: Any) -> Trainer:
    """``sizes`` are those of tensor, context and sequence parallelism."""
    names = ("tensor_parallel_size", "context_parallel_size", "sequence_parallel_size")
    args = arguments(output_dir, **dict(zip(names, sizes, strict=True)), **changes)
    data = RaggedTokens(16), RaggedTokens(SAMPLES)
    model = tiny_llama(**(shape or {}))
    return Trainer(model, args, train_dataset=data[0], eval_dataset=data[1], compute_metrics=accuracy)


def evaluated(output_dir: str, sizes: Sizes, stage: int) -> Any:
    trainer = trainer_of(output_dir, sizes, zero_stage=stage)
    metrics = trainer.evaluate()
    found = trainer.predict(RaggedTokens(SAMPLES))
    local_elements = sum(p.numel() for p in trainer.model.parameters())
    return metrics, found.metrics, found.predictions, found.label_ids, local_elements


def check(results: list[Any]) -> None:
    """Against plain PyTorch in one process, and equal on all ranks to the last bit."""
    data = RaggedTokens(SAMPLES)
    model = tiny_llama().eval()
    batch = stack(data.rows)
    with torch.no_grad():
        loss = token_loss(model, batch).item()
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.numpy()
    for metrics, of_predict, predictions, labels, _ in results:
        assert metrics["eval_loss"] == pytest.approx(loss, rel=1e-5)
        assert metrics["eval_items"] == int((batch["labels"][:, 1:] != -100).sum())
        assert metrics["eval_rows"] == SAMPLES == len(predictions)
        assert of_predict["test_loss"] == metrics["eval_loss"] == results[0][0]["eval_loss"]
        assert of_predict["test_hits"] == metrics["eval_hits"] == results[0][0]["eval_hits"]
        np.testing.assert_array_equal(labels, batch["labels"].numpy())
        np.testing.assert_array_equal(predictions, results[0][2])
        np.testing.assert_allclose(predictions, logits, atol=1e-5)


LAYOUTS = {
    "tp 2": (2, (2, 1, 1)),
    "dp 2 x tp 2": (4, (2, 1, 1)),
    "sp 2": (2, (1, 1, 2)),
    "cp 2": (2, (1, 2, 1)),
    "cp 2 x sp 2": (4, (1, 2, 2)),
    "dp 2 x sp 2": (4, (1, 1, 2)),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_evaluation_before_training(layout: str, stage: int, tmp_path: Path) -> None:
    """The layout is not switched off: with tensor parallelism no rank holds the full model, even at stage 0."""
    world, sizes = LAYOUTS[layout]
    results = pool(world).run(evaluated, str(tmp_path), sizes, stage)
    check(results)
    total_elements = sum(p.numel() for p in tiny_llama().parameters())
    if sizes[0] > 1:
        assert all(local_elements < total_elements for *_, local_elements in results)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("sizes", "heads"), [((2, 2, 1), (4, 1)), ((2, 1, 2), (4, 1)), ((2, 1, 2), (6, 3))], ids=lambda value: str(value)
)
def test_heads_that_do_not_divide_evenly(sizes: Sizes, heads: tuple[int, int], tmp_path: Path) -> None:
    """Tensor-parallel ranks with 4 and 0, or with 4 and 2 query heads."""
    shape = dict(hidden_size=24, num_attention_heads=heads[0], num_key_value_heads=heads[1])
    wanted = train_plainly(tiny_llama(**shape), RaggedTokens(16), **SGD, clip=0.5, global_batch=2, steps=3)
    for found, _, _ in pool(4).run(around_training, str(tmp_path), sizes, 1, True, shape):
        assert_equal(found, wanted)


# -- losses of all kinds, of sharded sequences ------------------------------------------------------------------------


class IgnoresItems(PlainAttention):
    """Accepts the item count and returns a mean all the same."""

    def forward(
        self,
        input_ids: Any,
        labels: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        shift_labels: Any = None,
        num_items_in_batch: Any = None,
    ) -> Any:
        return super().forward(input_ids, labels, attention_mask, position_ids, shift_labels)


MEANS = {"mean": PlainAttention, "ignores the count": IgnoresItems}


def smoothed_or_plain(output_dir: str, sizes: Sizes, kind: str, smoothing: float) -> Any:
    names = ("tensor_parallel_size", "context_parallel_size", "sequence_parallel_size")
    args = arguments(
        output_dir,
        **dict(zip(names, sizes, strict=True)),
        label_smoothing_factor=smoothing,
        remove_unused_columns=False,
    )
    model = MEANS[kind]() if kind in MEANS else tiny_llama()
    trainer = Trainer(model, args, eval_dataset=RaggedTokens(SAMPLES))
    before = trainer._ds_trainer.losses.rule.normalized
    return trainer.evaluate()["eval_loss"], before, trainer._ds_trainer.losses.rule.normalized


@pytest.mark.parametrize(
    ("kind", "smoothing"), [("mean", 0.0), ("ignores the count", 0.0), ("own loss", 0.2)], ids=lambda value: str(value)
)
def test_the_loss_of_shards_is_the_loss_of_the_full_sequence(kind: str, smoothing: float, tmp_path: Path) -> None:
    ((one, *_),) = pool(1).run(smoothed_or_plain, str(tmp_path), (1, 1, 1), kind, smoothing)
    for found, before, after in pool(2).run(smoothed_or_plain, str(tmp_path), (1, 2, 1), kind, smoothing):
        assert found == pytest.approx(one, rel=1e-5)
        assert (before, after) == {
            "mean": (False, False), "ignores the count": (True, False), "own loss": (True, True)
        }[kind]  # fmt: skip


# -- what is put together again ----------------------------------------------------------------------------------------


def rejoin_all(shapes: dict[str, tuple[int, ...]], by_rank: bool) -> dict[str, Any]:
    """Of each shape a tensor of numbers, other ones on every rank with ``by_rank``; what becomes of it."""
    layout = ParallelLayout(2, sp=2)
    groups = parallel_groups(layout)
    found: dict[str, Any] = {}
    with use_sharding(SequencePlan(layout, 8), groups) as sharding:
        assert sharding is not None
        for name, shape in shapes.items():
            numbers = (
                torch.arange(float(torch.Size(shape).numel())).view(shape) + 100.0 * groups.coordinates.sp * by_rank
            )
            try:
                found[name] = unshard_outputs((numbers, "text"), sharding, rows=3, length=7)
            except ConfigError as error:
                found[name] = str(error)
    return found


def test_token_outputs_are_joined_and_sample_outputs_taken_once() -> None:
    shapes = {"tokens": (3, 4), "logits": (3, 4, 5), "squares": (3, 4, 4)}
    for found in pool(2).run(rejoin_all, shapes, True):
        for name, shape in shapes.items():
            full = torch.arange(float(torch.Size(shape).numel())).view(shape)
            concatenate, text = found[name]
            assert text == "text"
            assert torch.equal(concatenate, torch.cat([full, full + 100], dim=1)[:, :7])
    for found in pool(2).run(rejoin_all, {"sample": (3, 6), "scalar": ()}, False):
        assert torch.equal(found["sample"][0], torch.arange(18.0).view(3, 6)) and found["scalar"][0] == 0


def test_outputs_that_cannot_be_joined_are_rejected_with_a_message() -> None:
    for found in pool(2).run(rejoin_all, {"pooled": (3, 6), "attentions": (3, 2, 4, 4), "scalar": ()}, True):
        for message in found.values():
            assert "differs between the ranks, but is not p" in message
            assert "ignore_keys" in message
    for found in pool(2).run(rejoin_all, {"either": (3, 4)}, False):
        assert "it may have one number per token or 4 per sample" in found["either"]


def unlabelled(output_dir: str, sizes: Sizes) -> Any:
    trainer = trainer_of(output_dir, sizes)
    rows = [{key: value for key, value in row.items() if key != "labels"} for row in RaggedTokens(SAMPLES).rows]
    found = trainer.predict(rows)
    return found.predictions, found.label_ids, found.metrics


def test_prediction_without_labels(tmp_path: Path) -> None:
    batch = stack(RaggedTokens(SAMPLES).rows)
    with torch.no_grad():
        model = tiny_llama().eval()
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.numpy()
    for predictions, labels, metrics in pool(2).run(unlabelled, str(tmp_path), (1, 2, 1)):
        np.testing.assert_allclose(predictions, logits, atol=1e-5)
        assert labels is None and "test_loss" not in metrics


# -- counted once ------------------------------------------------------------------------------------------------------


def counted_twice(output_dir: str, sizes: Sizes) -> Any:
    of_everybody = loss_mean.LossMean.add

    def add(self: Any, *args: Any) -> None:
        self._counts = True
        of_everybody(self, *args)

    loss_mean.LossMean.add = add  # type: ignore[method-assign]
    try:
        return evaluated(output_dir, sizes, 0)
    finally:
        loss_mean.LossMean.add = of_everybody  # type: ignore[method-assign]


def test_control_a_replica_that_counts_twice_is_detected(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        check(pool(2).run(counted_twice, str(tmp_path), (2, 1, 1)))


def around_training(output_dir: str, sizes: Sizes, stage: int, before: bool, shape: Any = None) -> Any:
    changes: dict[str, Any] = dict(optim="sgd", learning_rate=0.3, weight_decay=0.1, max_grad_norm=0.5, max_steps=3)
    changes |= dict(per_device_train_batch_size=2, eval_strategy="steps", eval_steps=1)
    trainer = trainer_of(output_dir, sizes, shape, zero_stage=stage, **changes)
    if before:
        trainer.evaluate()
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return compatibility_of(trainer), losses, trainer.evaluate()["eval_loss"]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("sizes", "stage", "before"),
    [
        ((2, 1, 1), 0, True),
        ((2, 1, 1), 1, True),
        ((2, 1, 1), 3, True),
        ((2, 1, 1), 3, False),
        ((1, 2, 1), 1, True),
        ((1, 1, 2), 3, True),
    ],
    ids=lambda value: str(value),
)
def test_evaluation_before_between_and_after_steps_changes_no_weight(
    sizes: Sizes, stage: int, before: bool, tmp_path: Path
) -> None:
    model = tiny_llama()
    wanted = train_plainly(model, RaggedTokens(16), **SGD, clip=0.5, global_batch=2, steps=3)
    with torch.no_grad():
        after = token_loss(model.eval(), stack(RaggedTokens(SAMPLES).rows)).item()
    for found, losses, last in pool(2).run(around_training, str(tmp_path), sizes, stage, before):
        assert_equal(found, wanted)
        assert len(losses) == 3
        assert losses[-1] == pytest.approx(after, rel=1e-5) and last == losses[-1]
