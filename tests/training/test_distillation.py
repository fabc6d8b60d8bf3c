"""Distillation from logits gives the numbers of plain PyTorch in one process: ZeRO 0-3, accumulation, tiles."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ds_trainer import TrainingArguments
from ds_trainer.training.distillation_trainer import DistillationTrainer
from ds_trainer.training.model.distillation_loss import DistillationLoss
from ds_trainer.utils.errors import ConfigError
from tests.support.compare import assert_equal, distances
from tests.support.layouts import DATA, Documents, documents_as_rows, pad
from tests.support.models import tiny_llama
from tests.support.oracle import Trajectory, train_plainly
from tests.support.pool import pool
from tests.support.runs import train_and_report

RATE, EPSILON = 2e-3, 1e-5


def teacher() -> nn.Module:
    """Wider than the student; its logits are large, so that its distribution is not flat."""
    model = tiny_llama(7, hidden_size=48, num_hidden_layers=1)
    with torch.no_grad():
        model.get_parameter("lm_head.weight").mul_(8)
    return model


def plain_loss(
    model: nn.Module, batch: dict[str, Any], *, temperature: float, hard: float, reverse: bool, fault: str = ""
) -> torch.Tensor:
    """The formula, with the mean over the tokens of the global batch; ``fault`` breaks it."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        wanted = cached_teacher()(**inputs)["logits"][:, :-1]
    logits, targets = model(**inputs)["logits"][:, :-1], batch["labels"][:, 1:]
    counted = torch.ones_like(targets, dtype=torch.bool) if fault == "padding" else targets != -100
    p, q = (torch.softmax(values / temperature, -1) for values in (wanted, logits))
    terms = q * (q.log() - p.log()) if reverse else p * (p.log() - q.log())
    soft = terms.sum(-1)[counted].sum() / counted.sum()
    scale = 1.0 if fault == "temperature" else temperature**2
    cross_entropy = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    return hard * cross_entropy + (1 - hard) * scale * soft


@cache
def cached_teacher() -> nn.Module:
    return teacher().eval()


def adamw(model: nn.Module, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1.0, eps=EPSILON)


@cache
def reference(temperature: float, hard: float, reverse: bool, fault: str = "", kind: str = "padded") -> Trajectory:
    loss = partial(plain_loss, temperature=temperature, hard=hard, reverse=reverse, fault=fault)
    data = Documents(DATA[kind]())
    return train_plainly(tiny_llama(), data, loss=loss, optimizer=adamw, learning_rate=RATE, collate=documents_as_rows)


def make_trainer(loss: DistillationLoss, model: Any, args: Any, **options: Any) -> DistillationTrainer:
    return DistillationTrainer(model, args, teacher=teacher(), distillation=loss, **options)


def run(output_dir: Any, loss: DistillationLoss, ranks: int, kind: str = "padded", **more: Any) -> list[Trajectory]:
    accumulation = 2
    job = partial(train_and_report, tiny_llama, DATA[kind], str(output_dir), partial(make_trainer, loss), pad)
    arguments = {
        "optim": "adamw_torch_fused",
        "adam_epsilon": EPSILON,
        "learning_rate": RATE,
        "per_device_train_batch_size": 16 // (ranks * accumulation),
        "gradient_accumulation_steps": accumulation,
        "max_grad_norm": 0.0,
        **more,
    }
    return pool(ranks).run(partial(job, **arguments))


SETTINGS = [(2.0, 0.3, False), (1.0, 0.0, True), (3.0, 0.5, True)]


def loss_of(temperature: float, hard: float, reverse: bool) -> DistillationLoss:
    return DistillationLoss(temperature, hard, "reverse_kl" if reverse else "forward_kl")


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("stage", "ranks", "setting", "chunk"),
    [(3, 2, 0, 4), (2, 2, 2, 0), (1, 2, 1, 4), (0, 1, 0, 4), (0, 2, 0, 0), (3, 2, 1, 0), (3, 1, 2, 4)],
)
def test_trajectory_is_that_of_one_process(stage: int, ranks: int, setting: int, chunk: int, tmp_path: Any) -> None:
    """``chunk`` 0: whole logits; 4: both heads in tiles of four tokens."""
    wanted = reference(*SETTINGS[setting])
    loss = loss_of(*SETTINGS[setting])
    for found in run(tmp_path, loss, ranks, zero_stage=stage, loss_chunk_tokens=chunk):
        assert_equal(found, wanted)


def test_documents_in_one_row_do_not_see_each_other(tmp_path: Any) -> None:
    """Neither those of the student nor those of the teacher: positions restart, as in packed rows."""
    wanted = reference(*SETTINGS[0], kind="packed")
    for found in run(tmp_path, loss_of(*SETTINGS[0]), 2, "packed", zero_stage=3, loss_chunk_tokens=4):
        assert_equal(found, wanted)


@pytest.mark.parametrize("fault", ["temperature", "padding"])
def test_a_wrong_formula_is_noticed(fault: str) -> None:
    """The control of the comparison: without T^2, or with tokens that are padding."""
    right, wrong = reference(*SETTINGS[0]), reference(*SETTINGS[0], fault)
    found = distances(wrong, right)
    assert min(found["losses"], found["grad_norms"], found["weights"]) > 1e-3


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("classes", [None, 50])
def test_tiles_are_whole_logits(setting: tuple[float, float, bool], classes: int | None) -> None:
    """Losses and gradients of hidden states, weight and bias, with a soft cap on the logits."""
    from ds_trainer.parallel.deferred_logits import DeferredLogits
    from ds_trainer.training.model.chunked_loss.linear_head import LinearHead

    torch.manual_seed(0)
    loss = DistillationLoss(*setting[:2], "reverse_kl" if setting[2] else "forward_kl", classes)
    heads = [nn.Linear(8, 61, dtype=torch.float64), nn.Linear(6, 70 if classes else 61, bias=False).double()]
    inputs = [torch.randn(3, 5, 8).double().requires_grad_(), torch.randn(3, 5, 6).double()]
    targets = torch.randint(0, 61, (3, 5))
    targets[0, 2:] = targets[2] = -100

    def value(tiled: bool) -> list[torch.Tensor]:
        logits = []
        for head, x in zip(heads, inputs, strict=True):
            made = head(x)
            if tiled:
                reader = LinearHead(head, 4, lambda: 0.0, lambda: False, lambda: None)
                made = DeferredLogits.of(reader, x, head.out_features, x.dtype)
            logits.append(torch.tanh(made / 5) * 5)
        total = loss.total(logits[0], logits[1], targets) * 0.7
        assert heads[0].bias is not None
        return [total, *torch.autograd.grad(total, [inputs[0], heads[0].weight, heads[0].bias])]

    for tiled, whole in zip(value(True), value(False), strict=True):
        torch.testing.assert_close(tiled, whole, rtol=2e-5, atol=1e-6)
    assert not loss.of_tokens(torch.randn(2, 61), torch.randn(2, 61), torch.full((2,), -100)).any()


def test_the_loss_is_zero_if_the_student_is_the_teacher() -> None:
    logits = torch.randn(4, 7)
    for divergence in ("forward_kl", "reverse_kl"):
        loss = DistillationLoss(2.0, 0.0, divergence)  # type: ignore[arg-type]
        assert loss.of_tokens(logits, logits, torch.zeros(4, dtype=torch.long)).abs().max() < 1e-6


def tiles_used(output_dir: str, **arguments: Any) -> int:
    """How often the loss of a run of one step was computed in both heads."""
    from ds_trainer.training.model.distillation_loss import _SumOverChunks

    calls, apply = [], _SumOverChunks.apply
    _SumOverChunks.apply = lambda *given: calls.append(1) or apply(*given)  # type: ignore[method-assign]
    try:
        make = partial(make_trainer, DistillationLoss())
        train_and_report(tiny_llama, DATA["padded"], output_dir, make, pad, max_steps=1, **arguments)
    finally:
        _SumOverChunks.apply = apply  # type: ignore[method-assign]
    return len(calls)


@pytest.mark.parametrize("stage", [0, 3])
def test_logits_of_both_are_made_in_tiles(stage: int, tmp_path: Any) -> None:
    count = partial(tiles_used, str(tmp_path), zero_stage=stage)
    assert pool(2).run(partial(count, loss_chunk_tokens=4)) == [1, 1]
    assert pool(2).run(partial(count, loss_chunk_tokens=0)) == [0, 0]


def evaluated(output_dir: str) -> tuple[float, float, bool]:
    """The evaluation loss of a DistillationTrainer and of the model alone, and whether the teacher is as it was."""
    data = DATA["padded"]()
    args = TrainingArguments(output_dir, use_cpu=True, max_steps=1, per_device_eval_batch_size=64, report_to="none")
    trainer = DistillationTrainer(
        tiny_llama(), args, teacher=teacher(), train_dataset=data, eval_dataset=data, data_collator=pad
    )
    trainer.train()
    with torch.no_grad():
        batch = documents_as_rows([data.documents[index] for index in range(len(data))])
        alone = trainer.model(**batch)["loss"].item()
    pairs = zip(trainer._ds_trainer.teacher.model.parameters(), teacher().parameters(), strict=True)
    return trainer.evaluate()["eval_loss"], alone, all(torch.equal(a, b) for a, b in pairs)


def test_an_evaluation_gives_the_models_own_loss(tmp_path: Any) -> None:
    ((found, alone, unchanged),) = pool(1).run(evaluated, str(tmp_path))
    assert found == pytest.approx(alone, rel=1e-5)
    assert unchanged


def refused(output_dir: str, teacher_size: int, loss: DistillationLoss, **arguments: Any) -> str:
    args = TrainingArguments(output_dir, use_cpu=True, report_to="none", **arguments)
    try:
        DistillationTrainer(
            tiny_llama(num_key_value_heads=4),
            args,
            teacher=tiny_llama(vocab_size=teacher_size),
            distillation=loss,
            train_dataset=DATA["padded"](),
        )
    except ConfigError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize(
    ("size", "loss", "arguments", "message"),
    [
        (62, DistillationLoss(), {}, "the student has 61 entries, the teacher 62"),
        (62, DistillationLoss(classes=62), {}, "distillation.classes=62 is more than the 61 entries"),
        (61, DistillationLoss(0.0, 2.0), {}, "temperature=0.0 must be above 0"),
        (61, DistillationLoss(), {"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1 is part of"),
        (61, DistillationLoss(), {"tensor_parallel_size": 2}, "tensor_parallel_size=2: distillation compares"),
        (61, DistillationLoss(), {"sequence_parallel_size": 2}, "sequence_parallel_size=2: distillation compares"),
    ],
)
def test_what_cannot_work(
    size: int, loss: DistillationLoss, arguments: dict[str, Any], message: str, tmp_path: Any
) -> None:
    for found in pool(2).run(partial(refused, str(tmp_path), size, loss, **arguments)):
        assert message in found
