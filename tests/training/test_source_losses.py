"""The logged loss of each source is that of plain PyTorch on the samples of the source alone, in every layout."""

from __future__ import annotations

import logging
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.data.collators import TokenPaddingCollator
from ds_trainer.data.packing import batch as packed_batch
from ds_trainer.samples.sources.mixture import Mixture
from ds_trainer.training.loop.source_losses import SourceLosses
from ds_trainer.utils.errors import ConfigError
from tests.support.models import VOCABULARY, tiny_llama
from tests.support.pool import pool

NAMES = ("long", "short", "rare")
RATE, BATCH, SEED = 0.2, 8, 42


class Samples(list[dict[str, torch.Tensor]]):
    """Samples of a source, of different lengths and with a masked beginning, from its own part of the vocabulary."""

    def __init__(self, number: int, samples: int, longest: int) -> None:
        draw = torch.Generator().manual_seed(number)
        for _ in range(samples):
            length = int(torch.randint(4, longest + 1, (), generator=draw))
            ids = torch.randint(3 + 10 * number, 13 + 10 * number, (length,), generator=draw)
            labels = ids.clone()
            labels[: int(torch.randint(0, 3, (), generator=draw))] = -100
            self.append({"input_ids": ids, "labels": labels})


def mixture(numbered: bool = True) -> Mixture:
    sources = [Samples(0, 20, 16), Samples(1, 17, 7), Samples(2, 3, 10)]
    return Mixture(sources, names=NAMES, seed=SEED, numbered=numbered)


def loss_of(model: nn.Module, sample: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    logits = model(input_ids=sample["input_ids"][None]).logits[0, :-1].float()
    targets = sample["labels"][1:]
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum"), int((targets != -100).sum())


def losses_alone(model: nn.Module, data: Any, indices: list[int], source_of: Any) -> tuple[dict[str, float], Any]:
    """Mean loss of each source over ``indices``, and the loss of all their tokens, by plain PyTorch."""
    sums, counts, total = [0.0] * len(NAMES), [0] * len(NAMES), torch.zeros(())
    for index in indices:
        loss, targets = loss_of(model, data[index])
        total = total + loss
        sums[source_of(index)] += loss.item()
        counts[source_of(index)] += targets
    by_name = {name: s / n for name, s, n in zip(NAMES, sums, counts, strict=True) if n}
    return by_name, total / sum(counts)


@cache
def wanted(steps: int) -> tuple[tuple[dict[str, float], ...], dict[str, float]]:
    """Losses by source of each step of SGD, then those of all samples."""
    model, data = tiny_llama(), mixture(numbered=False)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(SEED)).tolist()
    found = []
    for step in range(steps):
        indices = order[BATCH * step : BATCH * (step + 1)]
        by_name, loss = losses_alone(model, data, indices, lambda index: data.locate(index)[0])
        found.append(by_name)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= RATE * parameter.grad  # type: ignore[operator]
                parameter.grad = None
    with torch.no_grad():
        return tuple(found), losses_alone(model, data, list(range(len(data))), lambda i: data.locate(i)[0])[0]


class StopAfter(TrainerCallback):
    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def train(
    folder: str,
    numbered: bool = True,
    stop: int | None = None,
    resume: bool = False,
    evaluates: bool = True,
    **more: Any,
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], dict[str, float]]:
    """Logs with a loss, weights, and the metrics of an evaluation of all samples."""
    given = dict(max_steps=5, logging_steps=1, optim="sgd", learning_rate=RATE, lr_scheduler_type="constant")
    args = TrainingArguments(
        folder, report_to="none", save_strategy="no", use_cpu=True, max_grad_norm=0.0, seed=SEED, **{**given, **more}
    )
    data = mixture(numbered)
    trainer = Trainer(
        tiny_llama(),
        args,
        data_collator=TokenPaddingCollator(),
        train_dataset=data,
        eval_dataset=data if evaluates else None,
        callbacks=[StopAfter(stop)],
    )
    trainer.train(resume_from_checkpoint=resume)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    weights = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    return logs, weights, trainer.evaluate() if evaluates else {}


def by_source(entry: dict[str, Any], prefix: str = "loss/") -> dict[str, float]:
    return {key.removeprefix(prefix): value for key, value in entry.items() if key.startswith(prefix)}


def differences(found: list[dict[str, float]], expected: Any) -> float:
    assert [set(one) for one in found] == [set(one) for one in expected]
    return max(abs(one[name] - other[name]) for one, other in zip(found, expected, strict=True) for name in other)


def difference(logs: list[dict[str, Any]], metrics: dict[str, float]) -> float:
    steps, evaluated = wanted(5)
    return max(
        differences([by_source(entry) for entry in logs], steps),
        differences([by_source(metrics, "eval_loss/")], [evaluated]),
    )


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, dict(per_device_train_batch_size=8)),
    "accumulation": (1, dict(per_device_train_batch_size=2, gradient_accumulation_steps=4)),
    "tiles": (1, dict(per_device_train_batch_size=4, gradient_accumulation_steps=2, loss_chunk_tokens=5)),
    "dp2-zero3": (2, dict(per_device_train_batch_size=2, gradient_accumulation_steps=2, zero_stage=3)),
    "dp2-tiles": (2, dict(per_device_train_batch_size=4, zero_stage=2, loss_chunk_tokens=5)),
    "cp2": (2, dict(per_device_train_batch_size=8, context_parallel_size=2)),
    "sp2-tiles": (2, dict(per_device_train_batch_size=4, gradient_accumulation_steps=2, sequence_parallel_size=2)),
    "tp2": (2, dict(per_device_train_batch_size=8, tensor_parallel_size=2, loss_chunk_tokens=5)),
}


def run(name: str, folder: Any, **more: Any) -> list[Any]:
    world, arguments = LAYOUTS[name]
    job = partial(train, str(folder), **{**arguments, **more})
    return [job()] if world == 1 else pool(world).run(job)


EXTENDED = ("alone", "dp2-tiles", "sp2-tiles")


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.extended if name in EXTENDED else ()) for name in LAYOUTS]
)
def test_losses_are_those_of_each_source_alone(layout: str, tmp_path: Path) -> None:
    for logs, _, metrics in run(layout, tmp_path):
        assert difference(logs, metrics) < 2e-5


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "layout", ["alone", "dp2-tiles", *(pytest.param(name, marks=pytest.mark.extended) for name in ("cp2", "tp2"))]
)
def test_packed_rows(layout: str, tmp_path: Path) -> None:
    """Without learning, the window of an epoch has every sample once."""
    model, data = tiny_llama(), mixture(numbered=False)
    with torch.no_grad():
        alone = losses_alone(model, data, list(range(len(data))), lambda index: data.locate(index)[0])[0]
    packed = dict(packing=True, max_length=32, learning_rate=0.0, max_steps=-1, num_train_epochs=1)
    for logs, _, metrics in run(layout, tmp_path, **packed, logging_strategy="epoch"):
        assert len(logs) == 1
        assert differences([by_source(logs[0]), by_source(metrics, "eval_loss/")], [alone, alone]) < 1e-5


@pytest.mark.extended
def test_nothing_else_changes(tmp_path: Path) -> None:
    """The weights are the same bits as without losses per source; in tiles but for rounding."""
    for layout in ("accumulation", "tiles"):
        (with_logs, weights, _), (without_logs, plain, _) = (
            run(layout, tmp_path / f"{layout}{numbered}", numbered=numbered)[0] for numbered in (True, False)
        )
        assert not by_source(without_logs[0]) and by_source(with_logs[0])
        for name, weight in plain.items():
            if layout == "tiles":
                torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-6)
            else:
                assert torch.equal(weights[name], weight), name
        losses = [[entry["loss"] for entry in logs] for logs in (with_logs, without_logs)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_window_is_the_mean_over_the_tokens_of_its_steps(tmp_path: Path) -> None:
    whole, _, _ = run("accumulation", tmp_path / "whole", logging_steps=2, evaluates=False)[0]
    assert [entry["step"] for entry in whole] == [2, 4, 5]
    single, _ = wanted(5)
    assert by_source(whole[2]) == pytest.approx(single[4], abs=2e-5)
    assert min(one["long"] for one in single[:2]) < by_source(whole[0])["long"] < max(one["long"] for one in single[:2])


def test_a_resumed_run_goes_on(tmp_path: Path) -> None:
    first, _, _ = run("accumulation", tmp_path, stop=2)[0]
    rest, _, metrics = run("accumulation", tmp_path, resume=True)[0]
    assert [entry["step"] for entry in rest] == [1, 2, 3, 4, 5]  # the history is in the checkpoint
    assert difference(rest, metrics) < 2e-5 and len(first) == 2


def test_a_wrong_number_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""

    def shifted(self: SourceLosses, target: torch.Tensor) -> Any:
        found = right(self, target)
        return None if found is None else (found + 1) % len(NAMES)

    right = SourceLosses._sources_of
    monkeypatch.setattr(SourceLosses, "_sources_of", shifted)
    logs, _, metrics = run("accumulation", tmp_path)[0]
    with pytest.raises(AssertionError):
        assert difference(logs, metrics) < 2e-5


def test_packing_that_mixes_the_numbers_up_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assemble = packed_batch.PackedFormat.assemble

    def mixed(self: Any, rows: Any, length: int) -> Any:
        batch = assemble(self, rows, length)
        batch["source_ids"] = batch["source_ids"].flip(1)
        return batch

    monkeypatch.setattr(packed_batch.PackedFormat, "assemble", mixed)
    with pytest.raises(AssertionError):
        test_packed_rows("alone", tmp_path)


def test_what_has_no_loss_per_source(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Own(nn.Module):
        """Computes its loss without cross_entropy."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, VOCABULARY)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: Any = None) -> Any:
            chosen = self.embedding(input_ids[:, :-1]).log_softmax(-1)
            valid = labels[:, 1:] != -100
            picked = chosen.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
            return {"loss": -(picked * valid).sum() / valid.sum()}

    args = TrainingArguments(
        str(tmp_path), max_steps=2, logging_steps=1, report_to="none", save_strategy="no", use_cpu=True
    )
    trainer = Trainer(Own(), args, data_collator=TokenPaddingCollator(), train_dataset=mixture())
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert not by_source(trainer.state.log_history[0])
    assert sum("The losses of the sources (long, short, rare) are not known" in text for text in caplog.messages) == 1


def test_asked_for_in_vain(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), max_steps=1, report_to="none", use_cpu=True, loss_per_source=True)
    with pytest.raises(ConfigError, match="loss_per_source=True: the train_dataset, a Mixture, has no source_names"):
        Trainer(tiny_llama(), args, train_dataset=mixture(numbered=False), data_collator=TokenPaddingCollator())
    args.torch_compile = True
    with pytest.raises(ConfigError, match="torch_compile=True computes the loss inside of compiled code"):
        Trainer(tiny_llama(), args, train_dataset=mixture(), data_collator=TokenPaddingCollator())


def test_it_can_be_left_out(tmp_path: Path) -> None:
    logs, _, metrics = run("alone", tmp_path, loss_per_source=False, max_steps=1)[0]
    assert not by_source(logs[0]) and not by_source(metrics, "eval_loss/") and "loss" in logs[0]
