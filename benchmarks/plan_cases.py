"""The runs of ``plan_memory.py``: small models, and how they are trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ds_trainer.planner.candidate import Candidate

LLAMA = {
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}

GPT2 = {"model_type": "gpt2", "vocab_size": 4096, "n_embd": 256, "n_layer": 3, "n_head": 4, "n_positions": 1024}
QWEN = {
    **LLAMA,
    "model_type": "qwen3",
    "vocab_size": 5000,
    "hidden_size": 320,
    "intermediate_size": 512,
    "num_key_value_heads": 2,
    "head_dim": 40,
    "tie_word_embeddings": True,
}
WIDE = {**LLAMA, "vocab_size": 20000, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}


@dataclass(frozen=True)
class Case:
    """One run: ``arguments`` of TrainingArguments, ``model`` as a configuration."""

    name: str
    ranks: int = 1
    batch: int = 2
    length: int = 256
    arguments: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=lambda: LLAMA)
    lora: int = 0


def cases() -> Iterator[Case]:
    """Stages, precisions, ranks, offload, tensor parallelism, adapters; then shapes of batches and models."""
    for stage in (0, 1, 2, 3):
        for precision in ("fp32", "bf16"):
            for ranks in (1, 2, 4, 8):
                yield _case(stage, precision, ranks)
        yield _case(stage, "bf16", 1, "accumulation 2", gradient_accumulation_steps=2)
        yield _case(stage, "bf16", 2, "accumulation 2", gradient_accumulation_steps=2)
        for ranks in (1, 2):
            yield _case(stage, "bf16", ranks, "checkpointing", gradient_checkpointing=True)
            yield _case(stage, "bf16", ranks, "LoRA", lora=8)
        yield _case(stage, "bf16", 2, "checkpointing of 1 in 2 layers", **_every(2))
        yield _case(stage, "bf16", 2, "checkpointing of 1 in 3 layers, length 512", length=512, **_every(3))
        for length in (128, 512):
            yield _case(stage, "bf16", 2, f"length {length}", length=length)
        yield _case(stage, "fp32", 1, "batch 4", batch=4)
        yield _case(stage, "bf16", 1, "GPT-2", model=GPT2)
        yield _case(stage, "fp32", 2, "Qwen", model=QWEN)
        for ranks in (1, 2, 4):
            yield _case(stage, "bf16", ranks, "large vocabulary", model=WIDE, length=32, batch=1)
    for stage in (1, 2, 3):
        for ranks in (1, 2):
            yield _case(stage, "bf16", ranks, "offload optimizer", offload_optimizer="cpu")
            yield _case(stage, "bf16", 2 * ranks, "tp 2", tensor_parallel_size=2)
        small = {"model": WIDE, "length": 32, "batch": 1}
        yield _case(stage, "bf16", 2, "large vocabulary, accumulation 2", **small, gradient_accumulation_steps=2)
        yield _case(stage, "bf16", 2, "large vocabulary, offload optimizer", **small, offload_optimizer="cpu")
        yield _case(stage, "bf16", 2, "offload, accumulation 2", offload_optimizer="cpu", gradient_accumulation_steps=2)
        yield _case(stage, "bf16", 2, "sp 2", sequence_parallel_size=2)
        yield _case(stage, "bf16", 2, "cp 2", context_parallel_size=2)
    for precision in ("fp32", "bf16"):
        for ranks in (1, 2):
            yield _case(3, precision, ranks, "offload all", offload_optimizer="cpu", offload_param="cpu")
    for ranks in (2, 4):
        yield _case(0, "fp32", ranks, "tp 2", tensor_parallel_size=2)


def _every(layers: int) -> dict[str, Any]:
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": layers}}


def _case(
    stage: int,
    precision: str,
    ranks: int,
    note: str = "",
    *,
    lora: int = 0,
    length: int = 256,
    batch: int = 2,
    model: dict[str, Any] | None = None,
    **arguments: Any,
) -> Case:
    found = {"zero_stage": stage, **({} if precision == "fp32" else {precision: True}), **arguments}
    name = f"ZeRO {stage} {precision} ranks {ranks} {note}".strip()
    return Case(name, ranks, batch, length, found, LLAMA if model is None else model, lora)


def candidate(case: Case) -> Candidate:
    """The case as the planner describes it."""
    given = case.arguments
    return Candidate(
        case.ranks,
        case.length,
        stage=given["zero_stage"],
        micro_batch=case.batch,
        accumulation=given.get("gradient_accumulation_steps", 1),
        tp=given.get("tensor_parallel_size", 1),
        cp=given.get("context_parallel_size", 1),
        sp=given.get("sequence_parallel_size", 1),
        offload_optimizer="offload_optimizer" in given,
        offload_param="offload_param" in given,
        checkpointing=given.get("gradient_checkpointing", False),
        every_n_layers=given.get("gradient_checkpointing_kwargs", {}).get("every_n_layers", 1),
        precision=next((name for name in ("bf16", "fp16") if given.get(name)), "fp32"),
    )
