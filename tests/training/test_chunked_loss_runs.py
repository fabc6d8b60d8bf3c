"""Training with the loss in tiles gives the numbers of one plain process, on every layout and ZeRO stage."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import MethodType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.parallel import deferred_logits
from ds_trainer.parallel.deferred_logits import DeferredLogits
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.parallel.linear_cross_entropy import linear_cross_entropy
from ds_trainer.parallel.one_pass_cross_entropy import one_pass_cross_entropy
from ds_trainer.training.loop.first_loss_check import check_first_loss, prefix_of
from ds_trainer.training.model.chunked_loss import linear_head
from ds_trainer.training.model.chunked_loss.chunked_loss import ChunkedLoss
from ds_trainer.utils.errors import ConfigError
from tests.support.compare import assert_equal
from tests.support.layouts import DATA, MODELS, pad
from tests.support.models import VOCABULARY, RaggedTokens, tiny_llama
from tests.support.oracle import Trajectory, train_plainly
from tests.support.pool import RankFailure, pool
from tests.support.runs import train_and_report
from tests.training.model.test_label_smoothing import FACTOR, smoothed_token_loss
from tests.training.test_layouts import Case, arguments_of, case_of, reference

CHUNK = 5  # tokens: borders inside every sequence
PADDED = dict(data="padded", optimizer="sgd", clip=0.0)


class Counted:
    """Counts the losses that ``function`` computes; with ``scale`` they are wrong."""

    def __init__(self, function: Callable[..., Any], scale: float) -> None:
        self.function, self.count, self.scale = function, 0, scale

    def __call__(self, *arguments: Any) -> Any:
        self.count += 1
        found = self.function(*arguments)
        return tuple(self.scale * one for one in found) if isinstance(found, tuple) else self.scale * found


def train_in_tiles(*arguments: Any, scale: float = 1.0, one_pass: bool = True, **keywords: Any) -> Trajectory:
    """:func:`train_and_report`; all losses of the training were computed in tiles, and nothing has read the logits.

    Args:
        arguments, keywords: of :func:`train_and_report`.
        scale: of the losses; wrong unless it is 1.
        one_pass: the gradients are made in the forward pass; otherwise there is no room for them.
    """
    ways = {True: Counted(one_pass_cross_entropy, scale), False: Counted(linear_cross_entropy, scale)}
    read, readers = DeferredLogits.read, []

    def reading(logits: DeferredLogits) -> torch.Tensor:
        readers.append("".join(traceback.format_stack(limit=12)))
        return read(logits)

    no_room = property(lambda _: False, lambda *_: None)
    with (
        patch.object(linear_head, "one_pass_cross_entropy", ways[True]),
        patch.object(linear_head, "linear_cross_entropy", ways[False]),
        patch.object(DeferredLogits, "read", reading),
        nullcontext() if one_pass else patch.object(ChunkedLoss, "one_pass", no_room, create=True),
    ):
        report = train_and_report(*arguments, **{"loss_chunk_tokens": CHUNK, **keywords})
    assert ways[one_pass].count >= 4  # steps
    assert one_pass or not ways[True].count
    assert not readers, readers[0]
    return report


def run(case: Case, output_dir: Any, **more: Any) -> list[Trajectory]:
    job = partial(train_in_tiles, MODELS[case.model], DATA[case.data], str(output_dir), Trainer, pad)
    return pool(case.layout.world_size).run(partial(job, **arguments_of(case), **more))


LAYOUTS = {
    "one rank, ZeRO 0": case_of(ParallelLayout(1), 0, **PADDED),
    "two ranks, ZeRO 2, tied": case_of(ParallelLayout(2), 2, model="tied", **PADDED),
    "two ranks, ZeRO 3, tied": case_of(ParallelLayout(2), 3, model="tied", **PADDED),
    "two ranks, ZeRO 3, biases": case_of(ParallelLayout(2), 3, model="multi_head", **PADDED),
    "partitioned vocabulary, ZeRO 1": case_of(ParallelLayout(2, tp=2), 1, **PADDED),
    "partitioned vocabulary, ZeRO 3, biases": case_of(ParallelLayout(4, tp=2), 3, model="multi_head", **PADDED),
    "Ulysses, ZeRO 1": case_of(ParallelLayout(2, sp=2), 1, **PADDED),
    "ring, ZeRO 3": case_of(ParallelLayout(2, cp=2), 3, **PADDED),
}


def test_a_partitioned_vocabulary_without_gathered_logits(tmp_path: Any) -> None:
    case = case_of(ParallelLayout(2, tp=2), 1, **PADDED)
    wanted = reference(case.model, case.data, case.optimizer, case.clip)
    for found in run(case, tmp_path, deepspeed={"tensor_parallel": {"vocab_parallel_lm_head": True}}):
        assert_equal(found, wanted)


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [2, 3])
def test_lora_on_the_head(stage: int, tmp_path: Any) -> None:
    arguments = {"optim": "sgd", "learning_rate": 0.3, "max_grad_norm": 0.0, "zero_stage": 0}
    job = partial(train_and_report, adapted, partial(RaggedTokens, 37), str(tmp_path), **arguments)
    (wanted,) = pool(1).run(partial(job, per_device_train_batch_size=16, loss_chunk_tokens=0))
    job = partial(
        train_in_tiles, adapted, partial(RaggedTokens, 37), str(tmp_path), **{**arguments, "zero_stage": stage}
    )
    for found in pool(2).run(partial(job, per_device_train_batch_size=4, gradient_accumulation_steps=2)):
        assert_equal(found, wanted)


def adapted() -> nn.Module:
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["lm_head", "q_proj"], r=3, lora_alpha=7, init_lora_weights=False)
    model: nn.Module = peft.get_peft_model(tiny_llama(), config)
    return model


def test_label_smoothing_with_a_partitioned_vocabulary(tmp_path: Any) -> None:
    make_data = partial(RaggedTokens, 37)
    wanted = train_plainly(tiny_llama(), make_data(), loss=smoothed_token_loss, learning_rate=0.3, optimizer="sgd")
    arguments = {"optim": "sgd", "learning_rate": 0.3, "max_grad_norm": 0.0, "label_smoothing_factor": FACTOR}
    job = partial(train_in_tiles, tiny_llama, make_data, str(tmp_path), tensor_parallel_size=2, **arguments)
    for found in pool(2).run(partial(job, per_device_train_batch_size=8, gradient_accumulation_steps=2)):
        assert_equal(found, wanted)


def test_a_wrong_scale_ends_the_run_before_the_first_step(tmp_path: Any) -> None:
    case = case_of(ParallelLayout(2), 3, **PADDED)
    with pytest.raises(RankFailure, match="differs from the loss"):
        run(case, tmp_path, scale=57 / 56)


WITHOUT_ROOM = ("one rank, ZeRO 0", "two ranks, ZeRO 3, tied", "partitioned vocabulary, ZeRO 1")


@pytest.mark.cases(0, "partitioned vocabulary, ZeRO 1", "two ranks, ZeRO 3, tied, in tiles", rest="extended")
@pytest.mark.parametrize(
    ("name", "one_pass"),
    [*((name, True) for name in LAYOUTS), *((name, False) for name in WITHOUT_ROOM)],
    ids=[*LAYOUTS, *(f"{name}, in tiles" for name in WITHOUT_ROOM)],
)
def test_trajectory_is_that_of_one_process(name: str, one_pass: bool, tmp_path: Any) -> None:
    case = LAYOUTS[name]
    wanted = reference(case.model, case.data, case.optimizer, case.clip)
    for found in run(case, tmp_path, one_pass=one_pass):
        assert_equal(found, wanted)


# -- the comparison on the first batch: the whole model ----------------------------------------------------------------


def trainer_of(model: nn.Module, output_dir: Any, **keywords: Any) -> Trainer:
    args = TrainingArguments(str(output_dir), use_cpu=True, loss_chunk_tokens=CHUNK, report_to="none")
    return Trainer(model, args, train_dataset=RaggedTokens(8), **keywords)


def compare(trainer: Trainer, fused: bool = False) -> None:
    batch = next(iter(trainer.get_train_dataloader()))
    check_first_loss(trainer._ds_trainer.losses, trainer.model, batch, trainer._prepare_inputs, fused)


def of_user(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
    logits = outputs.logits[..., :-1, :].contiguous()
    total = F.cross_entropy(logits.view(-1, VOCABULARY), labels[..., 1:].reshape(-1), reduction="sum")
    return total / num_items_in_batch


@pytest.mark.parametrize("function", [None, of_user])
def test_a_loss_divided_by_one_item_less_is_refused(function: Any, tmp_path: Any, monkeypatch: Any) -> None:
    trainer = trainer_of(tiny_llama(), tmp_path, compute_loss_func=function)
    random = torch.get_rng_state()
    compare(trainer)
    assert torch.equal(torch.get_rng_state(), random)
    record = deferred_logits._RECORDED[F.cross_entropy]

    def wrong(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        targets = args[1].ne(-100).sum()
        return record(func, args, kwargs) * targets / (targets - 1)

    monkeypatch.setitem(deferred_logits._RECORDED, F.cross_entropy, wrong)
    with pytest.raises(ConfigError, match=r"whole logits of a prefix .* differs .* by a relative 0\.\d+"):
        compare(trainer)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_fused_loss_that_is_not_the_models_is_refused(wrong: bool, tmp_path: Any) -> None:
    """Liger puts such a forward into the model; here it is a Llama's own, divided by an item less if wrong."""
    model: Any = tiny_llama()

    def fused(self: Any, input_ids: Any, labels: Any, num_items_in_batch: Any = None, **rest: Any) -> Any:
        hidden = self.model(input_ids=input_ids, attention_mask=rest.get("attention_mask")).last_hidden_state
        logits = hidden @ self.lm_head.weight.t()
        loss = self.loss_function(logits, labels, VOCABULARY, num_items_in_batch=num_items_in_batch)
        return {"loss": 33 / 32 * loss if wrong else loss}

    trainer = trainer_of(model, tmp_path)
    model.forward = MethodType(fused, model)
    if not wrong:
        compare(trainer, fused=True)
    else:
        with pytest.raises(ConfigError, match=r"Liger's fused loss of a prefix .*fused_linear_cross_entropy"):
            compare(trainer, fused=True)
    assert model.forward.__func__ is fused


def test_the_prefix_begins_at_the_first_target() -> None:
    labels = torch.full((2, 90), -100)
    labels[0, 50:] = 7
    ids = torch.arange(180).reshape(2, 90)
    prefix = prefix_of({"input_ids": ids, "labels": labels}, ("labels",))
    assert prefix is not None and torch.equal(prefix["input_ids"], ids[:1, 49:82])
    assert prefix_of({"input_ids": ids, "labels": labels, "pixel_values": ids}, ("labels",)) is None
    assert prefix_of({"input_ids": ids, "labels": labels[:, 0]}, ("labels",)) is None


def right(found: Any) -> dict[str, float]:
    return {"right": float((found.predictions.argmax(-1) == found.label_ids).mean())}


def evaluated(output_dir: str, chunk: int, metrics: bool) -> dict[str, float]:
    args = TrainingArguments(
        output_dir, use_cpu=True, loss_chunk_tokens=chunk, z_loss_factor=0.1, report_to="none", disable_tqdm=True
    )
    function = (
        (lambda found: {"right": float((found.predictions.argmax(-1) == found.label_ids).mean())}) if metrics else None
    )
    trainer = Trainer(tiny_llama(), args, eval_dataset=RaggedTokens(12), compute_metrics=function)
    found = trainer.evaluate()
    return {key: found[key] for key in ("eval_loss", "eval_right") if key in found}


def test_evaluations_with_and_without_predictions(tmp_path: Any) -> None:
    wanted = evaluated(str(tmp_path), 0, True)
    assert evaluated(str(tmp_path), CHUNK, True) == pytest.approx(wanted, rel=1e-6)
    assert evaluated(str(tmp_path), CHUNK, False)["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=1e-6)
