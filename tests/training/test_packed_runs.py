"""Training on packed rows equals training on the same samples alone, in every layout; resuming, streams, evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.arguments.enums import PackingStrategy
from ds_trainer.data.order import epoch_order
from ds_trainer.data.packing.datasets import PackedStream
from ds_trainer.data.packing.rows import packed_rows
from tests.support.compare import assert_equal, relative
from tests.support.layouts import Padded, documents_as_rows, grouped_query
from tests.support.oracle import Trajectory, train_plainly
from tests.support.pool import pool
from tests.support.runs import train_and_report

SAMPLES, ROW, ROWS_A_STEP = 70, 40, 8
make_data = partial(Padded, SAMPLES)


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """What the oracle gets: for each row the documents in it, which it trains on alone, padded."""

    def __init__(self, strategy: PackingStrategy) -> None:
        data = make_data()
        lengths = [len(document) for (document,) in data.documents]
        rows = packed_rows(lengths, ROW, strategy, epoch_order(SAMPLES, 42, 0, True), 42)
        self.rows = [
            [data.documents[sample][0][start : start + length] for sample, start, length in rows.row(index)]
            for index in range(len(rows))
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        return self.rows[index]


@cache
def reference(strategy: str = "best_fit", steps: int = 4) -> Trajectory:
    rows = Rows(PackingStrategy(strategy))
    assert len(rows) % ROWS_A_STEP  # the last batch of an epoch is incomplete
    return train_plainly(
        grouped_query(),
        rows,
        optimizer="sgd",
        learning_rate=0.5,
        global_batch=ROWS_A_STEP,
        steps=steps,
        collate=documents_as_rows,
    )


def arguments(replicas: int = 1, accumulation: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "packing": True,
        "max_length": ROW,
        # SGD: Adam would hide a wrong scale, and amplify the rounding of gradients that are almost zero.
        "optim": "sgd",
        "learning_rate": 0.5,
        "max_grad_norm": 0.0,
        "per_device_train_batch_size": ROWS_A_STEP // (replicas * accumulation),
        "gradient_accumulation_steps": accumulation,
        **more,
    }


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, arguments(zero_stage=0)),
    "one, cut": (1, arguments(packing_strategy="cut")),
    "cp2": (2, arguments(context_parallel_size=2, zero_stage=3)),
    "sp2": (2, arguments(sequence_parallel_size=2, zero_stage=2)),
    "tp2": (2, arguments(tensor_parallel_size=2, zero_stage=1)),
    "dp2": (2, arguments(2, zero_stage=3)),
    "dp2, cut": (2, arguments(2, zero_stage=0, packing_strategy="cut")),
    "dp2 cp2": (4, arguments(2, context_parallel_size=2, zero_stage=2)),
    "cp2 sp2": (4, arguments(context_parallel_size=2, sequence_parallel_size=2, zero_stage=1)),
    "tp2 sp2": (4, arguments(tensor_parallel_size=2, sequence_parallel_size=2, zero_stage=3)),
    "dp4": (4, arguments(4, accumulation=1, zero_stage=2)),
    "tp2 cp2": (4, arguments(tensor_parallel_size=2, context_parallel_size=2, zero_stage=0)),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_like_the_samples_alone(layout: str, tmp_path: Path) -> None:
    world, values = LAYOUTS[layout]
    wanted = reference(values.get("packing_strategy", "best_fit"))
    for found in pool(world).run(partial(train_and_report, grouped_query, make_data, str(tmp_path), **values)):
        assert_equal(found, wanted, tolerance=3e-5)


def test_negative_control_documents_in_one_row_are_not_alone() -> None:
    rows = Rows(PackingStrategy.BEST_FIT)

    def joined(samples: list[list[torch.Tensor]]) -> dict[str, torch.Tensor]:
        return documents_as_rows([[torch.cat(sample)] for sample in samples])

    mixed = train_plainly(
        grouped_query(), rows, optimizer="sgd", learning_rate=0.5, global_batch=ROWS_A_STEP, steps=4, collate=joined
    )
    assert relative(mixed.losses, reference().losses) > 1e-4


# -- resuming, streams, evaluation -------------------------------------------------------------------------------------


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([make_data()[index] for index in range(SAMPLES)])


def tokens_seen(output_dir: str, stream: bool, stop_at: int | None, **values: Any) -> tuple[list[Any], list[float]]:
    """Tokens of each micro-batch of this rank, and the losses; with ``stop_at`` the run is saved there and resumed."""
    seen: list[Any] = []

    class Watched(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            seen.append(inputs["input_ids"].tolist())
            return super().training_step(model, inputs, num_items_in_batch)

    def run(steps: int, resume: bool) -> Trainer:
        args = TrainingArguments(
            output_dir,
            use_cpu=True,
            max_steps=6,
            logging_steps=1,
            save_strategy="steps" if stop_at else "no",
            save_steps=stop_at or 1,
            disable_tqdm=True,
            lr_scheduler_type="constant",
            **values,
        )
        trainer = Watched(grouped_query(), args, train_dataset=Stream() if stream else make_data())
        if steps < 6:
            trainer.args.max_steps = steps
        trainer.train(resume_from_checkpoint=resume)
        trainer.engine.close()
        return trainer

    if stop_at:
        run(stop_at, resume=False)
    trainer = run(6, resume=bool(stop_at))
    return seen, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("stream", [False, True])
def test_a_resumed_run_reads_the_same_rows(stream: bool, tmp_path: Path) -> None:
    values = arguments(accumulation=1, save_async=False)
    (whole,) = pool(1).run(partial(tokens_seen, str(tmp_path / "whole"), stream, None, **values))
    (resumed,) = pool(1).run(partial(tokens_seen, str(tmp_path / "resumed"), stream, 2, **values))
    assert resumed == whole and len(whole[0]) == 6


def test_replicas_share_the_rows_of_a_stream(tmp_path: Path) -> None:
    (whole,) = pool(1).run(partial(tokens_seen, str(tmp_path / "1"), True, None, **arguments(accumulation=1)))
    halves = pool(2).run(partial(tokens_seen, str(tmp_path / "2"), True, None, **arguments(2, accumulation=1)))
    for both, first, second in zip(whole[0], halves[0][0], halves[1][0], strict=True):
        assert both == first + second
    assert relative(halves[0][1], whole[1]) < 1e-5
    rows = list(PackedStream(Stream(), ROW, PackingStrategy.BEST_FIT, 42))
    assert sum(piece.length for row in rows for piece in row) == sum(len(d) for (d,) in make_data().documents)


def packing_logs(output_dir: str, stream: bool) -> list[dict[str, float]]:
    values = {**arguments(accumulation=1), "max_steps": 3}
    args = TrainingArguments(output_dir, use_cpu=True, logging_steps=1, save_strategy="no", disable_tqdm=True, **values)
    trainer = Trainer(grouped_query(), args, train_dataset=Stream() if stream else make_data())
    trainer.train()
    trainer.engine.close()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def test_logs_of_a_stream_say_how_full_its_rows_are(tmp_path: Path) -> None:
    (logs,) = pool(1).run(packing_logs, str(tmp_path), True)
    rows = list(PackedStream(Stream(), ROW, PackingStrategy.BEST_FIT, 42))
    pieces, tokens = sum(map(len, rows)), sum(piece.length for row in rows for piece in row)
    for entry in logs:  # the data is one window
        assert entry["packing_samples_per_row"] == pytest.approx(pieces / len(rows), abs=0.01)
        assert entry["packing_padding"] == pytest.approx(1 - tokens / (len(rows) * ROW), abs=1e-4)
    (logs,) = pool(1).run(packing_logs, str(tmp_path), False)
    assert not any("packing_padding" in entry for entry in logs)


def _as_rows(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return documents_as_rows([[sample["input_ids"]] for sample in samples])


def evaluated(output_dir: str, **values: Any) -> dict[str, float]:
    args = TrainingArguments(output_dir, use_cpu=True, disable_tqdm=True, per_device_eval_batch_size=2, **values)
    collate = (
        {} if args.packing else {"data_collator": lambda rows: documents_as_rows([[r["input_ids"]] for r in rows])}
    )
    trainer = Trainer(grouped_query(), args, eval_dataset=make_data(), **collate)
    return trainer.evaluate()


def test_an_evaluation_of_packed_rows_has_the_same_loss(tmp_path: Path) -> None:
    packed = {"packing": True, "max_length": ROW}
    (plain,) = pool(1).run(partial(evaluated, str(tmp_path)))
    for world, values in ((1, packed), (2, packed), (2, {**packed, "context_parallel_size": 2})):
        for found in pool(world).run(partial(evaluated, str(tmp_path), **values)):
            assert found["eval_items"] == plain["eval_items"]
            assert found["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-5)


def test_metrics_of_single_samples_are_not_packed(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, packing=True, max_length=ROW)
    trainer = Trainer(grouped_query(), args, eval_dataset=make_data(), compute_metrics=lambda prediction: {})
    assert trainer.get_eval_dataloader().dataset is trainer.eval_dataset
    assert len(trainer.get_test_dataloader(make_data()).dataset) == SAMPLES


def test_what_packing_did_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = TrainingArguments(
        str(tmp_path), use_cpu=True, max_steps=1, save_strategy="no", self_test="never", **arguments(max_length=20)
    )
    trainer = Trainer(grouped_query(), args, train_dataset=make_data())
    metrics = trainer.train().metrics
    trainer.engine.close()
    summary = trainer.get_train_dataloader().dataset.summary
    assert f"packing   {summary.text()}" in capsys.readouterr().out
    assert (
        metrics["packing_fill"] == round(summary.fill, 4) and metrics["packing_dropped_tokens"] == summary.dropped > 0
    )
    assert metrics["packing_samples_per_row"] == round(summary.samples_per_row, 2)
