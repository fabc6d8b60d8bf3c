"""Training and evaluation on data without length: the numbers of plain PyTorch, epochs, resuming, refusals."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from ds_trainer import ConfigError, Trainer, TrainerCallback, TrainingArguments
from tests.support.compare import assert_equal, distances
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.oracle import Trajectory, stack, train_plainly
from tests.support.pool import pool
from tests.support.resuming import make
from tests.support.runs import compatibility_of, train_and_report

SAMPLES = 37  # 2 global batches of 16 and one of 5 in every epoch
STEPS = 5


class Stream(IterableDataset[Any]):
    """The samples of the oracle in the oracle's order, as a stream: its generator is seeded for every epoch."""

    def __init__(self, samples: int = SAMPLES, data: int = 0) -> None:
        self.rows = RaggedTokens(samples, data).rows
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for index in torch.randperm(len(self.rows), generator=self.generator).tolist():
            yield self.rows[index]


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.rows)


class InTheirOrder(Stream):
    """Negative control: every rank shuffles for itself."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        from ds_trainer.utils import distributed

        self.generator.manual_seed(distributed.rank())
        return super().__iter__()


@cache
def reference(steps: int = STEPS) -> Trajectory:
    return train_plainly(tiny_llama(), RaggedTokens(SAMPLES), learning_rate=2e-3, steps=steps)


def arguments(world: int, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    micro = 16 // (world * accumulation)
    sizes = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation}
    return {"learning_rate": 2e-3, "max_grad_norm": 0.0, "max_steps": STEPS, **sizes, **more}


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("world", "accumulation", "stage", "workers"),
    [(1, 1, 0, 0), (1, 4, 0, 2), (2, 1, 0, 0), (2, 2, 3, 0), (2, 4, 2, 2), (4, 2, 0, 0)],
)
def test_losses_are_those_of_plain_pytorch(
    world: int, accumulation: int, stage: int, workers: int, tmp_path: Any
) -> None:
    values = arguments(world, accumulation, zero_stage=stage, dataloader_num_workers=workers)
    for found in pool(world).run(partial(train_on_stream, str(tmp_path), **values)):
        assert_equal(found, reference())


def train_on_stream(output_dir: str, make: Any = Stream, **values: Any) -> Trajectory:
    # The pool's ranks are daemons of a fork server, which may have no children and start them strangely.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    if values.get("dataloader_num_workers"):
        values["dataloader_multiprocessing_context"] = "fork"
    return train_and_report(tiny_llama, make, output_dir, **values)


def test_a_stream_with_a_length_needs_no_max_steps(tmp_path: Any) -> None:
    values = arguments(2, 2, max_steps=-1, num_train_epochs=2)
    for found in pool(2).run(partial(train_and_report, tiny_llama, SizedStream, str(tmp_path), **values)):
        assert_equal(found, reference(6))


def test_ranks_with_their_own_stream_order_are_detected(tmp_path: Any) -> None:
    for message in pool(2).run(refusal_of, InTheirOrder, str(tmp_path)):
        assert "The ranks read different data" in message and "generator" in message


def refusal_of(make: Any, output_dir: str) -> str:
    with pytest.raises(ConfigError) as error:
        train_and_report(tiny_llama, make, output_dir, **arguments(2))
    return str(error.value)


# -- shards ----------------------------------------------------------------------------------------------------------


class Shards(IterableDataset[Any]):
    """Four files, of 10, 9, 9 and 9 of the rows."""

    def __init__(self, files: list[int] | None = None) -> None:
        self.files = [0, 1, 2, 3] if files is None else files
        self.num_shards = len(self.files)

    def shard(self, num_shards: int, index: int) -> Shards:
        return Shards(self.files[index::num_shards])

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for file in self.files:
            yield from RaggedTokens(SAMPLES).rows[file::4]


class OtherLengths(Shards):
    """Four files, of 4, 2, 13 and 9 rows: shards 0 and 1, those of every second step, soon have no more."""

    lengths = (4, 2, 13, 9)

    def shard(self, num_shards: int, index: int) -> OtherLengths:
        return OtherLengths(self.files[index::num_shards])

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for file in self.files:
            first = sum(self.lengths[:file])
            yield from RaggedTokens(SAMPLES).rows[first : first + self.lengths[file]]


def test_a_step_without_samples_is_left_out(tmp_path: Path) -> None:
    """It would move the weights by momentum and decay, and count as a step. In steps, also where a run resumes."""
    values = {"per_device_train_batch_size": 4, "stream_shards": 4, "lr_scheduler_type": "constant"}
    losses = partial(losses_of_other_lengths, str(tmp_path), **values)
    (whole,) = {tuple(found) for found in pool(2).run(losses, "whole", 12)}
    pool(2).run(losses, "parts", 4)
    (resumed,) = {tuple(found) for found in pool(2).run(losses, "parts", 12, True)}
    assert len(whole) == 12 and min(whole) > 1 and resumed == pytest.approx(whole, rel=1e-6)
    assert json.loads((tmp_path / "parts/checkpoint-4/run.json").read_text())["data"]["samples"] == 48
    assert json.loads((tmp_path / "whole/checkpoint-8/run.json").read_text())["data"]["epoch"] == 1


def losses_of_other_lengths(output_dir: str, run: str, max_steps: int, resume: bool = False, **more: Any) -> Any:
    args = make_args(
        Path(output_dir) / run, **{"save_strategy": "steps", "save_steps": 4, "max_steps": max_steps, **more}
    )
    trainer = Trainer(tiny_llama(), args, train_dataset=OtherLengths())
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class InTurn(RaggedTokens):
    """The rows in the order of the shards: four of each in turn, two and three times one at the end."""

    def __init__(self) -> None:
        super().__init__(SAMPLES)
        places = [place // 4 % 4 + 4 * (place // 16 * 4 + place % 4) for place in range(48)]
        self.rows = [self.rows[row] for row in places if row < SAMPLES]


@pytest.mark.parametrize(
    ("world", "more"), [(2, {"zero_stage": 3}), (4, {"tensor_parallel_size": 2, "dataloader_num_workers": 2}), (4, {})]
)
def test_shards_are_trained_like_their_order_in_plain_pytorch(world: int, more: dict[str, Any], tmp_path: Any) -> None:
    """Every third step has the five samples that are left of the epoch, on ranks with some and on ranks with none."""
    wanted = train_plainly(tiny_llama(), InTurn(), learning_rate=2e-3, steps=STEPS, seed=None)
    replicas = world // more.get("tensor_parallel_size", 1)
    values = arguments(replicas, 4 // replicas, stream_shards=4, **more)
    for found in pool(world).run(partial(train_on_stream, str(tmp_path), make=Shards, **values)):
        assert_equal(found, wanted)


# -- epochs ----------------------------------------------------------------------------------------------------------


class Positions(TrainerCallback):
    def __init__(self) -> None:
        self.epochs: list[float] = []
        self.begun = 0

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.epochs.append(state.epoch)


def make_args(tmp_path: Path, **more: Any) -> TrainingArguments:
    values = {"save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "logging_steps": 1, **arguments(1)}
    return TrainingArguments(str(tmp_path), **{**values, **more})


def test_the_stream_is_read_again_until_max_steps(tmp_path: Path) -> None:
    """Fractions of an epoch are those of the run, as in transformers: steps over max_steps."""
    positions = Positions()
    trainer = Trainer(tiny_llama(), make_args(tmp_path, max_steps=7), train_dataset=Stream(), callbacks=[positions])
    trainer.train()
    assert trainer.state.global_step == 7
    assert positions.epochs == pytest.approx([1 / 7, 2 / 7, 3 / 7, 1 + 1 / 7, 1 + 2 / 7, 1 + 3 / 7, 2 + 1 / 7])
    assert positions.begun == 3


def test_epochs_are_those_of_transformers(tmp_path: Path) -> None:
    import transformers

    class Theirs(transformers.TrainerCallback, Positions):  # type: ignore[misc]
        def __init__(self) -> None:
            Positions.__init__(self)

        on_epoch_begin, on_step_end = Positions.on_epoch_begin, Positions.on_step_end

    ours, expected = Positions(), Theirs()
    Trainer(tiny_llama(), make_args(tmp_path, max_steps=7), train_dataset=Stream(), callbacks=[ours]).train()
    args = transformers.TrainingArguments(
        str(tmp_path), max_steps=7, per_device_train_batch_size=16, use_cpu=True, report_to="none", save_strategy="no"
    )
    transformers.Trainer(tiny_llama(), args, train_dataset=Stream(), callbacks=[expected]).train()
    assert ours.epochs == pytest.approx(expected.epochs)


@pytest.mark.extended
@pytest.mark.cases(1)
@pytest.mark.parametrize("stop", [2, 3, 4])
def test_a_stream_run_resumes_where_it_stopped(stop: int, tmp_path: Path) -> None:
    uninterrupted = Trainer(tiny_llama(), make_args(tmp_path / "whole"), train_dataset=Stream())
    uninterrupted.train()
    values = {"save_strategy": "steps", "save_steps": stop, "lr_scheduler_type": "constant"}
    first = Trainer(tiny_llama(), make_args(tmp_path / "cut", max_steps=stop, **values), train_dataset=Stream())
    first.train()
    second = Trainer(tiny_llama(1), make_args(tmp_path / "cut", **values), train_dataset=Stream())
    second.train(resume_from_checkpoint=True)
    constant = Trainer(tiny_llama(), make_args(tmp_path / "c", lr_scheduler_type="constant"), train_dataset=Stream())
    constant.train()
    assert compatibility_of(second).losses == pytest.approx(compatibility_of(constant).losses, rel=1e-6)
    assert (
        distances(compatibility_of(uninterrupted), compatibility_of(constant))["weights"] > 1e-4
    )  # the comparison can fail
    assert second.state.epoch == pytest.approx(constant.state.epoch)


# -- evaluation ------------------------------------------------------------------------------------------------------


def evaluated(output_dir: str, stream: bool) -> dict[str, float]:
    args = TrainingArguments(output_dir, per_device_eval_batch_size=3, use_cpu=True, disable_tqdm=True)
    data = Stream(29) if stream else RaggedTokens(29)
    metrics = Trainer(tiny_llama(), args, eval_dataset=data).evaluate()
    return {name: metrics[name] for name in ("eval_loss", "eval_items")}


@pytest.mark.parametrize("world", [1, 2])
def test_evaluation_of_a_stream_is_exact(world: int, tmp_path: Path) -> None:
    (wanted,) = pool(1).run(evaluated, str(tmp_path), False)
    for found in pool(world).run(evaluated, str(tmp_path), True):
        assert found == pytest.approx(wanted, rel=1e-6)


# -- refusals --------------------------------------------------------------------------------------------------------


def test_without_length_max_steps_is_needed_at_construction(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no length.*Set max_steps"):
        Trainer(tiny_llama(), make_args(tmp_path, max_steps=-1), train_dataset=Stream())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: Stream(0), "The training data is empty"),
        (lambda: iter(RaggedTokens(20).rows), "ended after 2 steps and was empty when it was read again"),
    ],
)
def test_an_empty_stream_is_no_endless_loop(data: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(tiny_llama(), make_args(tmp_path), train_dataset=data()).train()


# -- loaders of a subclass -------------------------------------------------------------------------------------------


class OwnLoader(Trainer):
    """A plain DataLoader over a stream, this rank's own half of the data; ``extra`` batches more on rank 1."""

    extra = 0

    def get_train_dataloader(self) -> Any:
        rank, ranks = self.args.process_index, self.layout.world_size
        rows = RaggedTokens(32).rows[rank::ranks] + RaggedTokens(4 * self.extra * rank).rows
        return DataLoader(Rows(rows), batch_size=4, collate_fn=stack)


class Rows(IterableDataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


class UnevenLoader(OwnLoader):
    extra = 3


def run_with(kind: type[Trainer], output_dir: str) -> str:
    values = {"save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "max_steps": 9}
    trainer = kind(tiny_llama(), TrainingArguments(output_dir, per_device_train_batch_size=4, **values))
    try:
        trainer.train()
    except (ConfigError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return f"{trainer.state.global_step} steps"


def test_a_loader_of_a_subclass_may_have_no_length(tmp_path: Path) -> None:
    assert pool(2).run(run_with, OwnLoader, str(tmp_path)) == ["9 steps"] * 2


def test_uneven_loaders_without_length_are_reported_on_all_ranks(tmp_path: Path) -> None:
    for message in pool(2).run(run_with, UnevenLoader, str(tmp_path)):
        assert "they have read [4, 5] of its batches" in message


# -- shards in another layout ----------------------------------------------------------------------------------------


def losses_of_shards(output_dir: str, resume: bool, stop_at: int | None, **values: Any) -> list[float]:
    trainer = make(
        *(output_dir, "table_stream", stop_at),
        **{"per_device_train_batch_size": 2, "save_steps": 2, "max_steps": 6, "dropout": 0.0, **values},
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.engine.close()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    ("world", "more"),
    [
        (2, {}),
        pytest.param(1, {"gradient_accumulation_steps": 4}, marks=pytest.mark.extended),
        pytest.param(4, {"tensor_parallel_size": 2}, marks=pytest.mark.extended),
    ],
)
def test_shards_resume_in_another_layout(world: int, more: dict[str, Any], tmp_path: Path) -> None:
    """The epoch of four replicas goes on in its order, and with ``stream_shards=4`` the next ones have it too."""
    values = {"stream_shards": 4, "gradient_accumulation_steps": 1}
    whole = pool(4).run(partial(losses_of_shards, str(tmp_path / "whole"), False, None, **values))[0]
    pool(4).run(partial(losses_of_shards, str(tmp_path / "parts"), False, 2, **values))
    values = {"stream_shards": 4, "gradient_accumulation_steps": 2, **more}
    for found in pool(world).run(partial(losses_of_shards, str(tmp_path / "parts"), True, None, **values)):
        assert found == pytest.approx(whole, rel=1e-5) and len(set(found)) == 6
