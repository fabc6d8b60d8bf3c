"""Memory of training runs on CPU ranks, counted at each allocation, beside what the planner predicts.

    python benchmarks/plan_memory.py                    all cases, as a table of ratios (predicted / measured)
    python benchmarks/plan_memory.py --json FILE        also write every number
    python benchmarks/plan_memory.py --only stage3      cases whose name contains this

Each case trains a small model for three steps with the Trainer. ``benchmarks/live_tensors.py`` counts the tensors of
each rank, of which the table has the largest number: after the engine is made, at most in each phase of a step, and
between two steps. On the CPU offloaded states are in the same memory, so the predictions for device and host are added.
Dropout is that of GPUs.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from live_tensors import LiveTensors
from plan_cases import Case, candidate, cases

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.planner.activations.probe import gpu_dropout
from ds_trainer.planner.candidate import Candidate
from ds_trainer.planner.memory.elements import elements_of
from ds_trainer.planner.memory.estimate import estimate_memory, model_states
from ds_trainer.planner.planned_model import PlannedModel
from tests.support.pool import close_pools, pool

PHASES = ("engine", "forward", "loss", "head", "layers", "end_of_backward", "step", "between", "save", "evaluation")
MOMENTS = PHASES[1:7]
OF_PHASE = (  # of each moment of the planner
    *("forward", "loss", "head", "head", "layers", "layers"),
    *("end_of_backward", "end_of_backward", "step", "evaluation", "between"),
)
LATE = ("optimizer states", "accumulated gradients")  # made in the first step


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
        gc.collect()  # tensors in cycles of earlier steps would be counted now and then
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
        if type(hidden) is torch.Tensor and hidden.requires_grad:  # not the logits of a chunked loss
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
    """Bytes of this rank in each phase of the third step."""
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
        of_ranks: list[dict[str, int]] = pool(case.ranks).run(measure, case, folder)
    return {phase: max(found[phase] for found in of_ranks) for phase in of_ranks[0]}


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
    found["save"] = found["between"] + memory.host_items.get("snapshot of a save", 0.0)
    for phase, moment in zip(OF_PHASE, memory.moments, strict=True):
        found[phase] = max(found.get(phase, 0.0), moment.total + host)
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


LABELS = {
    "between": "model states, between two steps",
    "engine": "when training begins",
    "peak": "**largest moment of a step**",
    "forward": "forward pass",
    "loss": "logits and loss",
    "head": "backward pass of the LM head",
    "layers": "backward pass of the layers",
    "end_of_backward": "end of the backward pass",
    "step": "optimizer step",
    "save": "after a save",
    "evaluation": "evaluation",
}


def ratios(results: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Predicted / measured by phase; for ``deepspeed``, model states of DeepSpeed's estimators, without stage 0."""
    found: dict[str, list[float]] = {}
    for row in results:
        for phase in LABELS:
            if row["measured"][phase]:  # with adapters and ZeRO 3 the gradient of the logits is not seen
                found.setdefault(phase, []).append(row["predicted"][phase] / row["measured"][phase])
        if row["deepspeed"] is not None:
            found.setdefault("deepspeed", []).append(row["deepspeed"] / row["measured"]["between"])
    return found


def table(results: list[dict[str, Any]]) -> Iterator[str]:
    """Each case and its ratios."""
    yield f"{'predicted / measured':52}" + "".join(f"{phase:>16}" for phase in LABELS)
    for row in results:
        found = ratios([row])
        cells = (f"{found[phase][0]:16.3f}" if phase in found else f"{'':16}" for phase in LABELS)
        yield f"{row['case']:52}" + "".join(cells)


def summary(results: list[dict[str, Any]]) -> Iterator[str]:
    """The smallest, the median and the largest ratio of each phase, as a table of the documentation."""
    yield "| predicted / measured | runs | smallest | median | largest |"
    yield "|---|---|---|---|---|"
    labels = {**LABELS, "deepspeed": "DeepSpeed's estimators of model states"}
    for phase, values in ratios(results).items():
        numbers = f"{min(values):.3f} | {statistics.median(values):.3f} | {max(values):.3f}"
        yield f"| {labels[phase]} | {len(values)} | {numbers} |"


def with_peak(found: dict[str, Any]) -> dict[str, Any]:
    """Add the largest moment of a step."""
    return {**found, "peak": max(found[name] for name in MOMENTS)}


def compare(case: Case, measured: dict[str, int]) -> dict[str, Any]:
    """A case with what was measured, predicted and estimated by DeepSpeed."""
    return {
        "case": case.name,
        "measured": with_peak(measured),
        "predicted": with_peak(predicted(case)),
        "deepspeed": deepspeed_estimate(case),
    }


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
        results.append(compare(case, known.get(case.name) or _run(case)))
        if not known:
            print(f"{case.name}: {results[-1]['measured']['peak'] / 1e6:.2f} MB", flush=True)
    close_pools()
    print("\n".join([*table(results), "", *summary(results)]))
    if options.json:
        text = json.dumps({row["case"]: row["measured"] for row in results}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
