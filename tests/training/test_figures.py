"""Every figure of a run is what it says, in every mode: compared with values that are counted from the data alone."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import IterableDataset
from torch.utils.flop_counter import FlopCounterMode

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.training.loop.token_counter import sequence_lengths
from tests.support.expert_models import maker
from tests.support.models import LENGTH, RaggedTokens, tiny_llama
from tests.support.pool import pool

SAMPLES, BATCH, EPOCHS, RATE = 26, 4, 2, 1e-3
STEPS_OF_EPOCH = 7  # the last one has two samples
DATA = RaggedTokens(SAMPLES)
LENGTHS = [int(row["attention_mask"].sum()) for row in DATA.rows]
ROW = 24  # tokens of a packed row
EVALUATED = RaggedTokens(10, seed=3).rows


class Stream(IterableDataset[Any]):
    """The same samples, without a length."""

    def __iter__(self) -> Any:
        return iter(DATA.rows)


def unpadded() -> list[dict[str, Any]]:
    """The same samples without padding."""
    return [
        {key: row[key][:used] for key in ("input_ids", "labels")} for row, used in zip(DATA.rows, LENGTHS, strict=True)
    ]


class Figures(NamedTuple):
    """What a run says of itself; rates times their seconds."""

    steps: int
    epoch: float
    seen: int
    tokens: int
    samples: int
    rates: list[float]
    losses: list[float]
    norms: list[float]
    train_loss: float
    operations: float
    evaluated: float | None


def run(folder: str, mode: str, given: dict[str, Any]) -> Figures:
    """Train in a mode on this rank and return its figures."""
    values: dict[str, Any] = dict(
        use_cpu=True, per_device_train_batch_size=BATCH, num_train_epochs=EPOCHS, learning_rate=RATE, logging_steps=1
    )
    values |= dict(save_strategy="no", report_to="none", disable_tqdm=True, include_num_input_tokens_seen="all")
    data: Any = DATA
    if mode == "streamed":
        data, values["max_steps"] = Stream(), EPOCHS * STEPS_OF_EPOCH
    elif mode == "packed":
        data = unpadded()
        values |= dict(packing=True, max_length=ROW)
    elif mode == "evaluated":
        values |= dict(eval_strategy="steps", eval_steps=3, per_device_eval_batch_size=3)
    elif mode == "sets":
        values |= dict(eval_strategy="steps", eval_steps=3)
    elif mode in ("resumed", "saved between"):
        values |= dict(save_strategy="steps", save_steps=5)
    args = TrainingArguments(folder, **{**values, **given})
    sets: Any = {"first": EVALUATED[:4], "all": EVALUATED} if mode == "sets" else EVALUATED

    class SavesModel(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if mode == "saved between" and state.global_step % 3 == 0:
                trainer.save_model(f"{folder}/between")

    make = maker("qwen3_moe") if args.expert_parallel_size > 1 else tiny_llama
    trainer = Trainer(make(), args, train_dataset=data, eval_dataset=sets, callbacks=[SavesModel])
    if mode == "resumed":
        trainer.train()
        trainer.engine.close()
        trainer = Trainer(make(), args, train_dataset=data)
    metrics = trainer.train(f"{folder}/checkpoint-5" if mode == "resumed" else None).metrics
    state, seconds = trainer.state, metrics["train_runtime"]
    logs = [log for log in state.log_history if "loss" in log]
    name = "eval_all_loss" if mode == "sets" else "eval_loss"
    evaluations = [log[name] for log in state.log_history if name in log]
    trainer.engine.close()
    return Figures(
        state.global_step,
        state.epoch or 0.0,
        state.num_input_tokens_seen,
        round(metrics["train_tokens_per_second"] * seconds),
        round(metrics["train_samples_per_second"] * seconds),
        [log["learning_rate"] for log in logs],
        [log["loss"] for log in logs],
        [log["grad_norm"] for log in logs],
        metrics["train_loss"],
        state.total_flos,
        evaluations[0] if evaluations else None,
    )


def batch_of(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch of samples of equal length."""
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def operations_of_a_token(model: Any) -> float:
    """Counted by torch in the model itself, with the attention of padded rows."""
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")  # torch counts nothing of its grouped products
    with FlopCounterMode(display=False) as counter:
        model(**batch_of(DATA.rows[:BATCH])).loss.backward()
    return counter.get_total_flops() / (BATCH * LENGTH)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of plain PyTorch loops in the sampler's order, without experts and with: losses, norms, the evaluation after step
    3, tokens by step, operations of a token.
    """
    seen: list[dict[str, Any]] = []

    class Order(Trainer):
        def compute_loss(self, model: Any, inputs: Any, **given: Any) -> Any:
            seen.append({key: value.clone() for key, value in inputs.items()})
            return super().compute_loss(model, inputs, **given)

    values: dict[str, Any] = dict(use_cpu=True, per_device_train_batch_size=BATCH, num_train_epochs=EPOCHS)
    values |= dict(save_strategy="no", report_to="none", disable_tqdm=True)
    trainer = Order(
        tiny_llama(), TrainingArguments(str(tmp_path_factory.mktemp("order")), **values), train_dataset=DATA
    )
    trainer.train()
    trainer.engine.close()
    return cache(lambda experts: plainly(maker("qwen3_moe") if experts else tiny_llama, seen))


def plainly(make: Any, seen: list[dict[str, Any]]) -> tuple[list[float], list[float], float, list[int], float]:
    """See :func:`plain`."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    losses, norms, evaluated = [], [], 0.0
    for step, batch in enumerate(seen):
        loss = loss_of(model, batch)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / len(seen))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 2:
            with torch.no_grad():
                evaluated = float(loss_of(model, batch_of(EVALUATED)))
    used = [int(batch["attention_mask"].sum()) for batch in seen]
    return losses, norms, evaluated, used, operations_of_a_token(make())


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean over the targets of a batch."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


MODES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "plain": (1, "plain", {}),
    "accumulated": (1, "plain", {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}),
    "streamed": (1, "streamed", {}),
    "evaluated": (1, "evaluated", {}),
    "resumed": (1, "resumed", {}),
    "several evaluation sets": (1, "sets", {}),
    "found batch size": (1, "plain", {"auto_find_batch_size": True}),
    "saved between": (1, "saved between", {}),
    "dp 2, ZeRO 3": (2, "plain", {"zero_stage": 3, "per_device_train_batch_size": 2}),
    "dp 2, evaluated": (2, "evaluated", {"zero_stage": 2, "per_device_train_batch_size": 2}),
    "dp 2, resumed": (2, "resumed", {"zero_stage": 1, "per_device_train_batch_size": 2}),
    "tp 2": (2, "plain", {"tensor_parallel_size": 2}),
    "cp 2": (2, "evaluated", {"context_parallel_size": 2}),
    "sp 2": (2, "resumed", {"sequence_parallel_size": 2}),
    "ep 2": (2, "evaluated", {"expert_parallel_size": 2, "per_device_train_batch_size": 2}),
    "ep 2, resumed": (2, "resumed", {"expert_parallel_size": 2, "per_device_train_batch_size": 2}),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("count", ["all", "non_padding"])
@pytest.mark.parametrize("name", MODES)
def test_every_figure_is_that_of_the_data(name: str, count: str, plain: Any, tmp_path: Path) -> None:
    world, mode, given = MODES[name]
    found_by_rank = pool(world).run(run, str(tmp_path), mode, {**given, "include_num_input_tokens_seen": count})
    found = found_by_rank[0]
    steps, skipped = EPOCHS * STEPS_OF_EPOCH, 5 if mode == "resumed" else 0
    losses, norms, evaluated, used, operations = plain("expert_parallel_size" in given)
    assert (found.steps, found.seen) == (steps, EPOCHS * (SAMPLES * LENGTH if count == "all" else sum(LENGTHS)))
    # A stream has no length, so transformers counts its epochs by max_steps; a session begins at its checkpoint.
    assert found.epoch == (1.5 if mode == "streamed" else EPOCHS)
    samples = EPOCHS * SAMPLES - skipped * BATCH
    assert (found.samples, found.tokens) == (samples, samples * LENGTH if count == "all" else sum(used[skipped:]))
    assert found.rates == pytest.approx([RATE * (1 - step / steps) for step in range(steps)])
    assert found.operations == pytest.approx(operations * EPOCHS * SAMPLES * LENGTH)
    if mode != "streamed":  # which is not shuffled
        assert found.losses == pytest.approx(losses, rel=1e-4)
        assert found.norms == pytest.approx(norms, rel=1e-3)
    assert found.train_loss == pytest.approx(sum(found.losses[skipped:]) / (steps - skipped))
    assert (
        found.evaluated is None
        if mode not in ("evaluated", "sets")
        else found.evaluated == pytest.approx(evaluated, rel=1e-4)
    )
    assert all(other.seen == found.seen and other.operations == found.operations for other in found_by_rank)


@pytest.mark.parametrize(
    ("world", "given"), [(1, {}), (2, {"per_device_train_batch_size": 2}), (2, {"context_parallel_size": 2})]
)
def test_figures_of_packed_rows(world: int, given: dict[str, Any], tmp_path: Path) -> None:
    every = pool(world).run(run, str(tmp_path / "a"), "packed", given)[0]
    text = pool(world).run(
        run, str(tmp_path / "b"), "packed", {**given, "include_num_input_tokens_seen": "non_padding"}
    )[0]
    assert every.seen == every.tokens == every.samples * ROW  # a row counts as a sample
    assert text.tokens == text.seen == EPOCHS * sum(LENGTHS) < every.seen
    assert every.epoch == text.epoch == EPOCHS and every.operations == text.operations


def test_operations_of_packed_rows_do_not_depend_on_the_first_position() -> None:
    places = torch.tensor([[0, 1, 2, 0, 1, 0]])
    expected = {3: 1, 2: 1, 1: 1}
    assert sequence_lengths({"position_ids": places}, 1, 6) == expected
    assert sequence_lengths({"position_ids": places + 2}, 1, 6) == expected  # of RoBERTa
