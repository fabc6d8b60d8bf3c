"""Trainings with a batch that ruins them: a loss or a gradient that is not finite, or a loss that is too large."""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.monitor.health.divergence import TrainingDiverged
from tests.support.models import VOCABULARY
from tests.support.resuming import RunRecord, StopAt, record_batches, run_record

MARK = VOCABULARY - 1
"""The token that springs the trap; no other row has it."""
LENGTH = 8


class _RuinedGradient(torch.autograd.Function):
    """The loss itself; its gradient is NaN where asked for."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, ruined: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ruined)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (ruined,) = ctx.saved_tensors
        return torch.where(ruined, torch.nan, gradients[0]), None


class _HarmlessGradient(torch.autograd.Function):
    """A loss that is infinite where asked for, with the gradient of the finite one, as a clamp would have it."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, ruined: torch.Tensor) -> torch.Tensor:
        return torch.where(ruined, torch.inf, loss)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


class FailingLlama(LlamaForCausalLM):
    """A tiny Llama whose loss goes wrong, in the way ``config.trap``, where :data:`MARK` is among the tokens."""

    def forward(self, input_ids: torch.Tensor, **more: Any) -> Any:
        output = super().forward(input_ids=input_ids, **more)
        marked = (input_ids == MARK).any()
        if output.loss is None:
            return output
        trap = self.config.trap
        if trap == "gradient":
            output.loss = _RuinedGradient.apply(output.loss, marked)
        elif trap == "loss alone":
            output.loss = _HarmlessGradient.apply(output.loss, marked)
        else:
            output.loss = output.loss * torch.where(marked, float(trap), 1.0).to(output.loss.dtype)
        return output


def failing_llama(trap: str, seed: int = 0) -> FailingLlama:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    config.trap = trap
    torch.manual_seed(seed)
    return FailingLlama(config)


class Rows(Dataset[Any]):
    """Random tokens; a row of some steps has the mark, others are not there.

    Args:
        steps: of the whole.
        size: rows of a step.
        bad: steps, counted from 0.
        without: steps, counted from 0.
    """

    def __init__(self, steps: int, size: int, bad: tuple[int, ...] = (), without: tuple[int, ...] = ()) -> None:
        generator = torch.Generator().manual_seed(5)
        rows = torch.randint(3, MARK, (steps, size, LENGTH), generator=generator)
        for step in bad:
            rows[step, size // 2, LENGTH // 2] = MARK  # in the middle: seldom on rank 0
        self.rows = [row for step in range(steps) if step not in without for row in rows[step]]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def make(
    output_dir: str, data: Rows, trap: str = "nan", stop_at: int | None = None, callbacks: Any = (), **arguments: Any
) -> Trainer:
    """A trainer that reads ``data`` in order, 8 rows a step, with a schedule that shows how often it was advanced."""
    world = int(torch.distributed.get_world_size()) if torch.distributed.is_initialized() else 1
    split = arguments.get("tensor_parallel_size", 1) * arguments.get("sequence_parallel_size", 1)
    accumulation = arguments.get("gradient_accumulation_steps", 1)
    values: dict[str, Any] = dict(
        max_steps=6,
        learning_rate=2e-3,
        weight_decay=0.1,
        lr_scheduler_type="cosine",
        per_device_train_batch_size=8 * split // world // accumulation,
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    args = TrainingArguments(output_dir, **{**values, **arguments})
    stops = [] if stop_at is None else [StopAt(stop_at)]
    return Trainer(failing_llama(trap), args, train_dataset=data, callbacks=[*callbacks, *stops])


def run(
    output_dir: str, data: Rows, trap: str = "nan", unguarded: bool = False, resume: Any = None, **more: Any
) -> tuple[RunRecord, dict[str, Any]]:
    """Train on this rank; what came of it, and what the guard counted."""
    torch.manual_seed(0)
    random.seed(0)
    trainer = make(output_dir, data, trap, **more)
    batches = record_batches(trainer)
    with ExitStack() as stack:
        if unguarded:
            stack.enter_context(without_overflow_checks())
        trainer.train(resume_from_checkpoint=resume)
    counted = {"history": trainer.state.log_history, **trainer._ds_trainer.checkpointer.guard.incidents.to_json()}
    return run_record(trainer, batches), counted


def divergence_error(output_dir: str, data: Rows, trap: str = "nan", resume: Any = None, **more: Any) -> str:
    """The error with which a training on this rank ends; its weights are finite and those before the step."""
    trainer = make(output_dir, data, trap, **more)
    try:
        trainer.train(resume_from_checkpoint=resume)
    except TrainingDiverged as error:
        assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())
        trainer.engine.close()
        return str(error)
    raise AssertionError("it did not end")


def without_overflow_checks() -> ExitStack:
    """Inside, neither this package nor DeepSpeed checks gradients: the negative control."""
    from deepspeed.runtime import bf16_optimizer
    from deepspeed.runtime.fp16 import unfused_optimizer
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    from ds_trainer.engine.training_engine import TrainingEngine

    stack = ExitStack()
    original = TrainingEngine.__init__

    def unguarded(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.guarded = False

    stack.enter_context(mock.patch.object(TrainingEngine, "__init__", unguarded))
    for module in (bf16_optimizer, unfused_optimizer, stage3, stage_1_and_2):
        stack.enter_context(mock.patch.object(module, "is_invalid_grad_norm", lambda norm: False))
    checker = unfused_optimizer.CheckOverflow
    stack.enter_context(mock.patch.object(checker, "has_overflow", lambda self, params, has_moe_params=None: False))
    return stack


def run_in_fp16(output_dir: str, data: Rows, trap: str = "nan", scale_power: int = 6, **more: Any) -> Any:
    """:func:`run` with a loss scale on the CPU, where fp16 is slow and DeepSpeed refuses it; and the last scale."""
    from deepspeed.accelerator import get_accelerator

    from ds_trainer.config import rules

    allowed = tuple(rule for rule in rules.RULES if rule.name != "fp16-needs-gpu")
    file = {"fp16": {"enabled": True, "initial_scale_power": scale_power, "loss_scale_window": 1000, "hysteresis": 1}}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(rules, "RULES", allowed))
        stack.enter_context(mock.patch.object(type(get_accelerator()), "is_fp16_supported", lambda self: True))
        trainer = make(output_dir, data, trap, fp16=True, deepspeed=file, **more)
        trainer.train()
        scale = float(trainer.engine.deepspeed.optimizer.loss_scale)
    counted = {"history": trainer.state.log_history, **trainer._ds_trainer.checkpointer.guard.incidents.to_json()}
    return run_record(trainer, []), counted, scale
