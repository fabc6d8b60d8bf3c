"""Parameters that a step does not use stay as they are, as in plain PyTorch: also their moments and step counters."""

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
from tests.support.mixed_batches import Experts, MixtureModel, Rows, plain_loss
from tests.support.oracle import train_plainly
from tests.support.pool import pool
from tests.support.runs import train_and_report, whole_weights

STEPS, BATCH = 6, 8
# The head of each row of a step; on two ranks, or with accumulation, its halves are two micro-batches.
A, B, BOTH = [0] * 8, [1] * 8, [0] * 4 + [1] * 4
HEADS = {
    "in turn": [A, B, A, B, A, B],
    "late": [A, A, A, B, [0, 1] * 4, A],
    "in one micro-batch": [A, BOTH, A, BOTH[::-1], B, A],
    "both": [[0, 1] * 4] * 6,
    "one rank has all": [[0, 0, 0, 0, 0, 1, 0, 1]] * 6,
}
OPTIMIZERS: dict[str, Any] = {
    "AdamW": partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1),
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "NAdam": partial(torch.optim.NAdam, lr=0.05, weight_decay=0.1),  # two scalars a parameter
    "ASGD": partial(torch.optim.ASGD, lr=0.05, t0=1.0, weight_decay=0.1),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05, weight_decay=0.1),  # states from the beginning
    "plain SGD": partial(torch.optim.SGD, lr=0.05, weight_decay=0.1),  # no states
}


class TwoHeads(nn.Module):
    """Each row goes to the head that it names; one layer is never used."""

    def __init__(self, unused_layer: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(4, 5)
        self.a = nn.Linear(5, 2)
        if unused_layer:
            self.never = nn.Linear(3, 3)
        self.b = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor, head: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden, total = torch.tanh(self.trunk(x)), torch.zeros(())
        for index, layer in enumerate((self.a, self.b)):
            if bool((head == index).any()):
                rows = head == index
                total = total + F.cross_entropy(layer(hidden[rows]), labels[rows], reduction="sum")
        return {"loss": total / len(x)}


def rows_of(case: str) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    xs = torch.randn(STEPS * BATCH, 4, generator=generator)
    heads = [head for step in HEADS[case] for head in step]
    return [
        {"x": x, "labels": torch.tensor(index % 3 % 2), "head": torch.tensor(heads[index])}
        for index, x in enumerate(xs)
    ]


@cache
def plainly(case: str, optimizer: str, clip: float = 0.3) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Losses and gradient norms of each step, and the weights."""
    model, rows = TwoHeads(), rows_of(case)
    updater, found = OPTIMIZERS[optimizer](model.parameters()), []
    for step in range(STEPS):
        batch = torch.utils.data.default_collate(rows[step * BATCH : (step + 1) * BATCH])
        updater.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        updater.step()
        found.append((loss.item(), norm.item()))
    return found, {name: value.detach().clone() for name, value in model.named_parameters()}


def with_trainer(
    case: str,
    optimizer: str,
    directory: str,
    accumulation: int = 1,
    resume: bool = False,
    callbacks: Any = None,
    unused_layer: bool = True,
    **changes: Any,
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    values: dict[str, Any] = dict(
        max_steps=STEPS,
        per_device_train_batch_size=BATCH // ranks // accumulation,
        gradient_accumulation_steps=accumulation,
        train_sampling_strategy="sequential",
        lr_scheduler_type="constant",
        learning_rate=0.05,
        max_grad_norm=0.3,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
        **changes,
    )
    model, args = TwoHeads(unused_layer), TrainingArguments(directory, **values)
    updater = OPTIMIZERS[optimizer](model.parameters())
    trainer = Trainer(model, args, train_dataset=rows_of(case), optimizers=(updater, None), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    history = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]
    weights = whole_weights(trainer)
    trainer.engine.close()
    return history, weights


def assert_equal(found: Any, wanted: Any, tolerance: float = 2e-6) -> None:
    history, weights = found
    torch.testing.assert_close(torch.tensor(history), torch.tensor(wanted[0]), rtol=1e-4, atol=2e-5)
    for name, value in wanted[1].items():
        torch.testing.assert_close(weights[name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.cases(14, rest="extended")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_passes_over_them(optimizer: str, stage: int, tmp_path: Path) -> None:
    (found,) = pool(1).run(partial(with_trainer, "in turn", optimizer, str(tmp_path), zero_stage=stage))
    assert_equal(found, plainly("in turn", optimizer))


@pytest.mark.cases(5)
@pytest.mark.parametrize("case", ["late", "in one micro-batch"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 2), (2, 1), (2, 2), (4, 1)])
def test_ranks_and_micro_batches(ranks: int, accumulation: int, stage: int, case: str, tmp_path: Path) -> None:
    """Used in one micro-batch, or on one rank, is used. (ZeRO-3: all ranks run the same modules.)"""
    if stage == 3 and ranks > 1 and accumulation == 1:
        case = "in turn"
    for found in pool(ranks).run(partial(with_trainer, case, "AdamW", str(tmp_path), accumulation, zero_stage=stage)):
        assert_equal(found, plainly(case, "AdamW"))


@pytest.mark.parametrize("changes", [{"zero_stage": 1}, {"zero_stage": 3}], ids=str)
@pytest.mark.parametrize("case", ["in turn", "late"])
def test_with_states_on_the_host(case: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """ZeRO copies gradients to the host in the last micro-batch alone."""
    changes = {**changes, "offload_optimizer": "cpu", "deepspeed": {"zero_force_ds_cpu_optimizer": False}}
    for found in pool(2).run(partial(with_trainer, case, "AdamW", str(tmp_path), 2, **changes)):
        assert_equal(found, plainly(case, "AdamW"))


FLOAT32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}


@pytest.mark.parametrize(
    ("stage", "settings"), [(0, {}), (1, {}), (2, {}), (3, {}), (1, FLOAT32_GRADIENTS), (2, FLOAT32_GRADIENTS)]
)
def test_in_16_bits(stage: int, settings: dict[str, Any], tmp_path: Path) -> None:
    job = partial(with_trainer, "in turn", "AdamW", str(tmp_path), zero_stage=stage, bf16=True, deepspeed=settings)
    first, second = pool(2).run(job)
    assert_equal(first, second, 0.0)
    wanted = plainly("in turn", "AdamW")[1]
    assert all((first[1][name] - value).abs().max() < 0.02 for name, value in wanted.items())
    assert torch.equal(first[1]["never.weight"], wanted["never.weight"].bfloat16().float())


class SaveAndStop(TrainerCallback):
    """Saves step 3 and ends the run there."""

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        control.should_save = control.should_training_stop = state.global_step == 3


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [((1, 2), (1, 2)), ((3, 1), (0, 2)), ((0, 1), (2, 2)), ((2, 2), (3, 2))])
def test_counters_are_resumed_in_any_layout(before: Any, after: Any, tmp_path: Path) -> None:
    """``(stage, ranks)`` before and after. One head was not used before the checkpoint at all."""
    (stage, ranks), wanted = before, plainly("late", "AdamW")
    pool(ranks).run(partial(with_trainer, "late", "AdamW", str(tmp_path), zero_stage=stage, callbacks=[SaveAndStop()]))
    stage, ranks = after
    for history, weights in pool(ranks).run(
        partial(with_trainer, "late", "AdamW", str(tmp_path), resume=True, zero_stage=stage)
    ):
        assert_equal((history[-3:], weights), (wanted[0][-3:], wanted[1]))


# -- experts that are modules of their own -----------------------------------------------------------------------------

TOKENS = Experts([[0], [0, 1], [2], [2, 1]])  # expert 3 gets no token anywhere


def expert_rows() -> Rows:
    return Rows(24, TOKENS)


@pytest.mark.parametrize("stage", [1, 3])
def test_experts_without_tokens(stage: int, tmp_path: Path) -> None:
    wanted = train_plainly(MixtureModel(), expert_rows(), loss=plain_loss, global_batch=8, steps=4, seed=None)
    job = partial(
        train_and_report,
        MixtureModel,
        expert_rows,
        str(tmp_path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=4,
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        zero_stage=stage,
        deepspeed={"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}},
    )
    idle = {name for name in wanted.weights if "experts.3." in name}
    for found in pool(2).run(job):
        for name, value in MixtureModel().named_parameters():
            assert torch.equal(found.weights[name], value) == (name in idle), name
            torch.testing.assert_close(found.weights[name], wanted.weights[name], rtol=1e-4, atol=1e-5)


# -- a model that chooses by itself ------------------------------------------------------------------------------------


class InTurn(nn.Module):
    """Counts its passes, and uses the heads in turn."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)
        self.passes = 0
        self.register_buffer("seen", torch.empty(0))

    def forward(self, x: torch.Tensor, labels: torch.Tensor, head: torch.Tensor) -> dict[str, torch.Tensor]:
        self.passes += 1
        self.seen = torch.cat([self.seen, x[:, 0].detach()])
        return {"loss": F.cross_entropy((self.a if self.passes % 2 else self.b)(x), labels)}


def test_looks_at_the_first_steps_leave_the_model_as_it_is(tmp_path: Path) -> None:
    """Passes that measure the loss, or look for missing gradients, are none of the model's."""
    rows, weights = rows_of("both"), []
    values: dict[str, Any] = dict(max_steps=4, per_device_train_batch_size=4, train_sampling_strategy="sequential")
    quiet = dict(lr_scheduler_type="constant", learning_rate=0.1, max_grad_norm=0.0, remove_unused_columns=False)
    args = TrainingArguments(str(tmp_path), use_cpu=True, save_strategy="no", disable_tqdm=True, **values, **quiet)
    trainer = Trainer(InTurn(), args, train_dataset=rows)
    trainer.train()
    model = InTurn()
    updater = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    for step in range(4):
        updater.zero_grad()
        model(**torch.utils.data.default_collate(rows[step * 4 : step * 4 + 4]))["loss"].backward()
        updater.step()
        weights.append(model.a.weight.detach().clone())
    assert torch.equal(weights[1], weights[0]) and not torch.equal(weights[2], weights[1])
    torch.testing.assert_close(trainer.model.a.weight.detach(), model.a.weight.detach())
    torch.testing.assert_close(trainer.model.b.weight.detach(), model.b.weight.detach())
    assert torch.equal(trainer.model.seen, model.seen) and trainer.model.passes == 4


# -- what it costs, and what it cannot do ------------------------------------------------------------------------------


class CountReductions(TrainerCallback):
    """How many all-reduces DeepSpeed's step makes."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_pre_optimizer_step(self, *arguments: Any, **keywords: Any) -> None:
        from deepspeed import comm

        self.original = comm.all_reduce

        def counted(*arguments: Any, **keywords: Any) -> Any:
            self.counts[-1] += 1
            return self.original(*arguments, **keywords)

        self.counts.append(0)
        comm.all_reduce = counted

    def on_optimizer_step(self, *arguments: Any, **keywords: Any) -> None:
        from deepspeed import comm

        comm.all_reduce = self.original


def reductions(case: str, directory: str, stage: int) -> list[int]:
    counter = CountReductions()
    with_trainer(case, "AdamW", directory, zero_stage=stage, callbacks=[counter], unused_layer=False)
    return counter.counts


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_ranks_ask_each_other_only_if_all_lack_gradients(stage: int, tmp_path: Path) -> None:
    """On one rank of two (the middle steps of the first case) no rank need ask; stage 0 has it with the gradients."""
    norm = 0 if stage == 0 else 1
    asks = norm + 1 if stage else 0
    assert pool(2).run(reductions, "both", str(tmp_path), stage) == [[norm] * STEPS] * 2
    assert pool(2).run(reductions, "one rank has all", str(tmp_path), stage) == [[norm] * STEPS] * 2
    assert pool(2).run(reductions, "in turn", str(tmp_path), stage) == [[asks] * STEPS] * 2


class Blockwise(torch.optim.AdamW):
    """Keeps a state of another shape, as 8-bit optimizers do."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("largest", torch.zeros(2))


def test_states_that_cannot_be_divided_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("ds_trainer").propagate = True
    OPTIMIZERS["blockwise"] = partial(Blockwise, lr=0.05, weight_decay=0.1)
    _, weights = with_trainer("in turn", "blockwise", str(tmp_path), zero_stage=1)
    assert caplog.text.count("Blockwise keeps states that cannot be divided") == 1
    assert "b.bias, b.weight, never.bias, never.weight" in caplog.text
    assert torch.equal(weights["never.weight"], TwoHeads().never.weight)
