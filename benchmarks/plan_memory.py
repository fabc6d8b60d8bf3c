"""Memory of training runs on CPU ranks, counted at each allocation, beside what the planner predicts.

    python benchmarks/plan_memory.py                    all cases, as a table of ratios (predicted / measured)
    python benchmarks/plan_memory.py --json FILE        also write every number
    python benchmarks/plan_memory.py --only stage3      cases whose name contains this

Each case trains a small model for three steps with the Trainer. ``benchmarks/live_tensors.py`` counts the tensors of
rank 0: after the engine is made, at most in each phase of a step, and between two steps. On the CPU offloaded states
are in the same memory, so the predictions for device and host are added. Dropout is that of GPUs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from live_tensors import LiveTensors

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.planner.activations.probe import gpu_dropout
from ds_trainer.planner.candidate import Candidate
from ds_trainer.planner.memory.elements import elements_of
from ds_trainer.planner.memory.estimate import estimate_memory
from ds_trainer.planner.memory.model_states import model_states
from ds_trainer.planner.planned_model import PlannedModel
from tests.support.pool import close_pools, pool

PHASES = ("engine", "forward", "loss", "head", "layers", "end_of_backward", "step", "between", "save", "evaluation")
MOMENTS = PHASES[1:7]
OF_PHASE = (  # of each moment of the planner
    *("forward", "loss", "head", "layers", "layers"),
    *("end_of_backward", "end_of_backward", "step", "evaluation"),
)
LATE = ("optimizer states", "accumulated gradients")  # made in the first step
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
WIDE = {**LLAMA, "vocab_size": 20000, "hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 128}


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


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows of random tokens."""

    def __init__(self, rows: int, length: int, vocabulary: int) -> None:
        self.tokens = torch.randint(0, vocabulary, (rows, length)).tolist()

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, rows: int) -> torch.utils.data.Subset:  # type: ignore[type-arg]
        """Some of them."""
        return torch.utils.data.Subset(self, range(rows))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor(self.tokens[index]), "labels": torch.tensor(self.tokens[index])}


class _Phases(TrainerCallback):
    """Records the largest number of bytes in each phase of a step; the phases of the last step are kept.

    The backward pass begins with the head when the gradient of the logits exists, with the layers when that of the last
    layer's output exists, and its end when that of the first layer's output exists.
    """

    def __init__(self, live: LiveTensors) -> None:
        self.live, self.found = live, dict.fromkeys(PHASES, 0)
        self.phase = ""
        self.trains = True

    def attach(self, model: nn.Module) -> None:
        """Hooks on the model, its first and its last layer."""
        layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
        model.register_forward_pre_hook(self._before_forward)
        model.register_forward_hook(lambda module, given, output: self._at_gradient(output.logits, "head"))
        layers[0].register_forward_hook(lambda module, given, output: self._at_gradient(output, "end_of_backward"))
        layers[-1].register_forward_hook(lambda module, given, output: self._leave_layers(output))

    def on_train_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        self.found["engine"] = self.live.now

    def on_step_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        for name in (*MOMENTS, "between"):
            self.found[name] = 0
        self.live.reset_peak()
        self.phase = ""

    def _before_forward(self, *_: Any) -> None:
        if self.trains:
            self._begin("forward")

    def _leave_layers(self, output: Any) -> None:
        if self.phase == "forward":  # not if a checkpointed layer is recomputed
            self._begin("loss")
        self._at_gradient(output, "layers")

    def _at_gradient(self, output: Any, phase: str) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self._begin(phase))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        self._begin("step")

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        self._begin("")
        self.found["between"] = self.live.now

    def on_save(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        self.found["save"] = self.live.peak

    def _begin(self, phase: str) -> None:
        if self.phase:
            self.found[self.phase] = max(self.found[self.phase], self.live.peak)
        self.live.reset_peak()
        self.phase = phase


def model_of(case: Case) -> nn.Module:
    """The model with random weights, with adapters if the case has them."""
    import transformers

    values = dict(case.model)
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    if case.lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=case.lora, target_modules="all-linear"))  # type: ignore[arg-type]
    return model


def measure(case: Case, folder: str) -> dict[str, int]:
    """Bytes of one rank in each phase of the third step."""
    torch.manual_seed(0)
    rows = Rows(64, case.length, case.model["vocab_size"])
    with LiveTensors() as live:
        phases = _Phases(live)
        values = {
            "use_cpu": True,
            "max_steps": 3,
            "per_device_train_batch_size": case.batch,
            "disable_tqdm": True,
            "report_to": "none",
            "save_strategy": "steps",
            "save_steps": 3,
            "per_device_eval_batch_size": case.batch,
            "logging_strategy": "no",
            **case.arguments,
        }
        model = model_of(case)
        trainer = Trainer(
            model,
            TrainingArguments(folder, **values),
            train_dataset=rows,
            eval_dataset=rows.first(2 * case.batch * case.ranks),
            callbacks=[phases],
        )
        phases.attach(model)
        with gpu_dropout():
            trainer.train()
        live.reset_peak()
        phases.trains = False
        trainer.evaluate()
        phases.found["evaluation"] = live.peak
    return phases.found


def _run(case: Case) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, int] = pool(case.ranks).run(measure, case, folder)[0]
    return found


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
        for length in (128, 512):
            yield _case(stage, "bf16", 2, f"length {length}", length=length)
        yield _case(stage, "fp32", 1, "batch 4", batch=4)
        yield _case(stage, "bf16", 1, "GPT-2", model=GPT2)
        yield _case(stage, "fp32", 2, "Qwen", model=QWEN)
        yield _case(stage, "fp32", 1, "large vocabulary", model=WIDE, length=32, batch=1)
    for stage in (1, 2, 3):
        for ranks in (1, 2):
            yield _case(stage, "bf16", ranks, "offload optimizer", offload_optimizer="cpu")
            yield _case(stage, "bf16", 2 * ranks, "tp 2", tensor_parallel_size=2)
        yield _case(stage, "bf16", 2, "offload, accumulation 2", offload_optimizer="cpu", gradient_accumulation_steps=2)
        yield _case(stage, "bf16", 2, "sp 2", sequence_parallel_size=2)
        yield _case(stage, "bf16", 2, "cp 2", context_parallel_size=2)
    for precision in ("fp32", "bf16"):
        for ranks in (1, 2):
            yield _case(3, precision, ranks, "offload all", offload_optimizer="cpu", offload_param="cpu")
    for ranks in (2, 4):
        yield _case(0, "fp32", ranks, "tp 2", tensor_parallel_size=2)


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
        precision=next((name for name in ("bf16", "fp16") if given.get(name)), "fp32"),
    )


def planned(case: Case) -> tuple[PlannedModel, Candidate]:
    """The model and the run as the planner knows them."""
    import transformers

    values = dict(case.model)
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values).to_dict()
    return PlannedModel.from_config(config, lora_rank=case.lora), candidate(case)


def predicted(case: Case) -> dict[str, float]:
    """Bytes in each phase, as the planner says: of the device and of offloaded states."""
    model, run = planned(case)
    states, offloaded = model_states(elements_of(model, run.tp), run)
    host = sum(offloaded.values())
    early = sum(size for item, size in (*states.items(), *offloaded.items()) if item not in LATE)
    found = {"between": sum(states.values()) + host, "engine": early}
    memory = estimate_memory(model, run)
    snapshot = memory.host_items.get("snapshot of a save", 0.0)
    found["save"] = found["between"] + snapshot
    for phase, moment in zip(OF_PHASE, memory.moments, strict=True):
        found[phase] = max(found.get(phase, 0.0), moment.total + host)
    found["evaluation"] += snapshot  # of the save before it
    return found


def deepspeed_estimate(case: Case) -> float | None:
    """Bytes of model states of a rank, device and host, as DeepSpeed's estimators say; None at stage 0.

    They know neither precision nor tensor parallelism nor adapters.
    """
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    run = candidate(case)
    parameters = sum(parameter.numel() for parameter in model_of(case).parameters())
    if run.stage == 0:
        return None
    if run.stage < 3:
        host, device = estimate_zero2_model_states_mem_needs(
            parameters, case.ranks, 1, cpu_offload=run.offload_optimizer, additional_buffer_factor=1.0
        )
    else:
        host, device, _ = estimate_zero3_model_states_mem_needs(
            parameters,
            parameters // 8,
            case.ranks,
            1,
            cpu_offload=run.offload_optimizer,
            cpu_offload_params=run.offload_param,
            zero_init=True,
            additional_buffer_factor=1.0,
        )
    return float(device + (host / case.ranks if run.offload_optimizer else 0))


def table(results: list[dict[str, Any]]) -> Iterator[str]:
    """Ratios of predicted and measured bytes, and what is smallest, in the middle and largest."""
    phases = ("engine", "between", "peak", *MOMENTS, "save", "evaluation")
    yield f"{'predicted / measured':44}" + "".join(f"{phase:>16}" for phase in (*phases, "DeepSpeed's"))
    columns: dict[str, list[float]] = {phase: [] for phase in phases}
    theirs: list[float] = []
    for row in results:
        cells = []
        for phase in phases:
            ratio = row["predicted"][phase] / row["measured"][phase] if row["measured"][phase] else 1.0
            columns[phase].append(ratio)
            cells.append(f"{ratio:16.3f}")
        if row["deepspeed"] is not None:
            theirs.append(row["deepspeed"] / row["measured"]["between"])
            cells.append(f"{theirs[-1]:16.3f}")
        yield f"{row['case']:44}" + "".join(cells)
    for name, function in (("min", min), ("median", statistics.median), ("max", max)):
        yield f"{name:44}" + "".join(f"{function(values):16.3f}" for values in (*columns.values(), theirs or [1.0]))


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measured", type=Path, help="a file that --json wrote: measures nothing, predicts again")
    options = parser.parse_args()
    known = {} if options.measured is None else json.loads(options.measured.read_text())
    results: list[dict[str, Any]] = []
    for case in cases():
        if options.only not in case.name:
            continue
        found = known.get(case.name) or _run(case)
        expected = predicted(case)
        for row in (found, expected):
            row["peak"] = max(row[name] for name in MOMENTS)
        results.append(
            {"case": case.name, "measured": found, "predicted": expected, "deepspeed": deepspeed_estimate(case)}
        )
        if not known:
            print(f"{case.name}: {found['peak'] / 1e6:.2f} MB", flush=True)
    close_pools()
    print("\n".join(table(results)))
    if options.json:
        options.json.write_text(json.dumps({row["case"]: row["measured"] for row in results}, indent=1))


if __name__ == "__main__":
    main()
