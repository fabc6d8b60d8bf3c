"""Predicted model states against the tensors that a real DeepSpeed engine holds, on 1, 2 and 4 ranks."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.planner.memory.model_states import StateSettings, model_states
from tests.support.pool import pool

transformers = pytest.importorskip("transformers")

ENGINES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "bf16, sums in fp32": {"bf16": True, "grad_accum_dtype": "fp32"},
    "autocast": {"torch_autocast": "bf16"},
}
CASES = [(stage, engine, steps) for stage in range(4) for engine in ENGINES for steps in (1, 2)]


def storages() -> dict[int, int]:
    """Bytes of every storage that a tensor of this process holds, by address. Gradients are asked for by name."""
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.device.type == "cpu":
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    found[storage._cdata] = storage.nbytes()
    return found


class Watch(TrainerCallback):
    """Bytes that were allocated since it was made, at each moment."""

    def __init__(self) -> None:
        gc.collect()
        self.before = storages()
        self.seen: dict[str, int] = {}

    def look(self, moment: str) -> None:
        gc.collect()
        self.seen[moment] = sum(size for key, size in storages().items() if key not in self.before)

    def on_train_begin(self, *args: Any, **keywords: Any) -> None:
        self.look("begin")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        self.look(f"before step {state.global_step + 1}")

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        self.look(f"after step {state.global_step}")


def train(output_dir: str, stage: int, engine: str, steps: int) -> tuple[int, dict[str, int], int]:
    """Parameters, what was seen, and the size of a bucket."""
    torch.manual_seed(0)
    rows = [{"input_ids": torch.arange(16) % 64, "labels": torch.arange(16) % 64} for _ in range(16)]
    watch = Watch()
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=512,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    arguments = TrainingArguments(
        output_dir,
        max_steps=2,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=steps,
        self_test="never",
        zero_stage=stage,
        **ENGINES[engine],
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[watch])
    trainer.train()
    bucket = int(trainer.compiled.get("zero_optimization.reduce_bucket_size") or 0)
    return sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters()), watch.seen, bucket


@pytest.mark.parametrize("world", [1, 2, 4])
def test_predicted_states_are_those_of_the_engine(world: int, tmp_path: Path) -> None:
    errors: dict[str, float] = {}
    for stage, engine, steps in CASES:
        if world == 4 and (engine == "autocast" or steps == 1):
            continue
        folder = str(tmp_path / f"{stage}{engine}{steps}")
        call = partial(train, folder, stage, engine, steps)
        numel, seen, bucket = pool(world).run(call)[0] if world > 1 else call()
        settings = StateSettings(
            zero_stage=stage,
            partitions=world,
            weight_bytes=2 if engine.startswith("bf16") else 4,
            accumulation_bytes=2 if engine == "bf16" else 4,
            accumulation_steps=steps,
            reduce_bucket=bucket if stage == 3 else 0,
        )
        states = model_states(numel, 0, settings)
        resting = states.weights + states.masters + states.persistent_gradients + states.bucket
        wanted = {
            "begin": resting,
            "before step 2": resting + states.optimizer + states.gradients - states.persistent_gradients,
            "after step 2": resting + states.optimizer,
        }
        for moment, value in wanted.items():
            errors[f"stage {stage}, {engine}, {steps} micro-batches, {moment}"] = value / seen[moment] - 1
    wrong = {case: error for case, error in errors.items() if abs(error) > 0.01}
    assert not wrong, wrong
    assert len(errors) >= 36
