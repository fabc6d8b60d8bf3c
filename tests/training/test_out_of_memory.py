"""Running out of memory ends with what to change, in order, and each line can be pasted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils.memory import should_reduce_batch_size

from ds_trainer import HfArgumentParser, Trainer, TrainingArguments
from ds_trainer.training.out_of_memory import OutOfMemory
from tests.support.models import PlainLanguageModel, RaggedTokens
from tests.support.pool import pool

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB."
HOST = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"


class Short(PlainLanguageModel):
    """Raises ``error`` in its pass number ``at``, counted from 1, in training or evaluation mode."""

    def __init__(self, error: BaseException, at: int = 1, training: bool = True) -> None:
        super().__init__()
        self.error, self.at, self.mode = error, at, training
        self.passes = 0

    def gradient_checkpointing_enable(self) -> None:
        """So that the Trainer may propose it."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: Any = None) -> Any:
        self.passes += self.training == self.mode
        if self.passes == self.at and self.training == self.mode:
            raise self.error
        return super().forward(input_ids, labels)


def trainer_of(directory: Path, model: Any, **changes: Any) -> Trainer:
    values: dict[str, Any] = dict(
        max_steps=3, per_device_train_batch_size=6, save_strategy="no", disable_tqdm=True, use_cpu=True
    )
    args = TrainingArguments(str(directory), **{**values, **changes})
    return Trainer(model, args, train_dataset=RaggedTokens(40), eval_dataset=RaggedTokens(8))


def remedies_in(text: str) -> list[str]:
    return re.findall(r"^ +\d+\. (.*?):?$", text, re.MULTILINE)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(CUDA), RuntimeError(HOST)])
def test_the_error_of_a_step_ends_with_the_remedies(error: RuntimeError, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, Short(error, at=3), zero_stage=0)
    with pytest.raises(OutOfMemory) as caught:
        trainer.train()
    text = str(caught.value)
    assert text.startswith(f"Out of memory on rank 0 in step 3, with 6 samples in a micro-batch: {error}")
    assert caught.value.__cause__ is error
    assert isinstance(caught.value, torch.OutOfMemoryError) and should_reduce_batch_size(caught.value)
    assert remedies_in(text) == [
        "a smaller micro-batch; the global batch stays at 6",
        "activations computed again in the backward pass (slower)",
        "optimizer states in the memory of the host (slower)",
    ]
    assert "Python:        per_device_train_batch_size=3, gradient_accumulation_steps=2" in text
    assert "command line:  --per_device_train_batch_size 3 --gradient_accumulation_steps 2" in text


def test_every_line_can_be_pasted(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory) as caught:
        trainer_of(tmp_path, Short(torch.OutOfMemoryError(CUDA), at=2), zero_stage=0).train()
    python = re.findall(r"Python: +(.*)", str(caught.value))
    command = re.findall(r"command line: +(.*)", str(caught.value))
    assert len(python) == len(command) == 3
    for arguments, words in zip(python, command, strict=True):
        given = eval(f"dict({arguments})")
        made = TrainingArguments(str(tmp_path), use_cpu=True, **given)
        (parsed,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
            ["--output_dir", str(tmp_path), "--use_cpu", *words.split()]
        )
        for name in given:
            assert getattr(parsed, name) == getattr(made, name)


def test_what_is_in_use_is_not_proposed(tmp_path: Path) -> None:
    trainer = trainer_of(
        tmp_path,
        Short(torch.OutOfMemoryError(CUDA)),
        per_device_train_batch_size=1,
        deepspeed={"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
    )
    with pytest.raises(OutOfMemory) as caught:
        trainer.train()
    found = remedies_in(str(caught.value))
    assert found == [
        "activations computed again in the backward pass (slower)",
        "weights in the memory of the host (slower)",
    ]
    assert "DeepSpeed configuration: zero_optimization.offload_param.device = cpu" in str(caught.value)


def test_a_model_without_checkpointing_is_not_asked_to_use_it(tmp_path: Path) -> None:
    model = Short(torch.OutOfMemoryError(CUDA), at=2)
    model.supports_gradient_checkpointing = False  # type: ignore[assignment]
    with pytest.raises(OutOfMemory) as caught:
        trainer_of(tmp_path, model, zero_stage=0).train()
    assert len(remedies_in(str(caught.value))) == 2
    assert "gradient_checkpointing" not in str(caught.value)


@pytest.mark.parametrize(("at", "searches"), [(1, False), (1, True), (4, True)])
def test_an_evaluation_has_remedies_of_its_own(at: int, searches: bool, tmp_path: Path) -> None:
    """In its first batch, and in a later one; before the training, and after a step."""
    values = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": at > 1, "auto_find_batch_size": searches}
    trainer = trainer_of(tmp_path, Short(torch.OutOfMemoryError(CUDA), at, training=False), **values)
    trainer.compute_metrics = lambda prediction: {"rows": len(prediction.predictions)}
    with pytest.raises(OutOfMemory) as caught:
        trainer.train()
    text = str(caught.value)
    assert text.startswith("Out of memory on rank 0 in the evaluation, with 8 samples in a batch")
    fixed = ", which auto_find_batch_size does not change" if searches else ""
    assert f"(per_device_eval_batch_size=8{fixed}): " in text
    assert "--per_device_eval_batch_size 4" in text and "--eval_accumulation_steps 8" in text
    assert "per_device_train_batch_size" not in text


def test_other_errors_stay_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"^shapes do not match$"):
        trainer_of(tmp_path, Short(RuntimeError("shapes do not match"))).train()


def test_several_ranks_are_offered_zero_stages(tmp_path: Path) -> None:
    for rank, text in enumerate(pool(2).run(_failed, str(tmp_path))):
        assert text.startswith(f"Out of memory on rank {rank} in step 2")
        assert remedies_in(text) == [
            "a smaller micro-batch; the global batch stays at 12",
            "activations computed again in the backward pass (slower)",
            "ZeRO-2: gradients sharded over the ranks",
            "ZeRO-3: gradients and weights sharded over the ranks",
            "optimizer states in the memory of the host (slower)",
        ]


def _failed(directory: str) -> str:
    try:
        trainer_of(Path(directory), Short(torch.OutOfMemoryError(CUDA), at=2), zero_stage=1).train()
    except OutOfMemory as error:
        return str(error)
    raise AssertionError("nothing was raised")
