"""Compares training on this device with plain PyTorch on the CPU in float32.

Each case trains a small Llama with the Trainer and compares loss, gradient norm and final weights with a plain PyTorch
loop. A resumed run must be bit-identical to the uninterrupted run. A rollback must give the result of a run without the
bad batch. With two devices, every layout of two ranks is a case too; with four, combinations. On one GPU, --share-gpu
runs them with NCCL over sockets: the code of many GPUs, at a fraction of the speed.

    python benchmarks/gpu_oracle.py --out oracle.json         every case that this machine can run
    python benchmarks/gpu_oracle.py --device cpu --quick      the same code on the CPU, a few cases
    python benchmarks/gpu_oracle.py --list

The exit code is 1 if a case fails.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from kept_results import Results
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from ds_trainer.utils.devices import RANKS_SHARE_GPU
from ds_trainer.utils.ranks import free_port

SEED, VOCABULARY, LENGTH, GLOBAL_BATCH, STEPS = 7, 128, 32, 8, 6
RATE, DECAY, CLIP = 1e-3, 0.1, 1.0
SAVE_AT, BAD_STEP = 2, 4  # the checkpoint to go back to, and the step (counted from 1) whose data is bad
BAD_TOKEN = VOCABULARY - 1
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 5e-3}
"""Largest relative difference of losses, gradient norms and weights."""


@dataclass(frozen=True)
class Case:
    """One training, or a pair of them.

    Attributes:
        kind: ``train`` compares with plain PyTorch, ``resume`` with the run that was not interrupted, ``rollback`` with
            plain PyTorch that never saw the data which was passed over.
        devices: kinds of devices that can run it.
        quick: one of the few.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    kind: str = "train"
    world: int = 1
    precision: str = "fp32"
    devices: tuple[str, ...] = ("cuda", "cpu")
    quick: bool = False


def cases() -> list[Case]:
    """All cases, those of one rank first."""
    made = [Case(f"zero{stage} fp32", {"zero_stage": stage}, quick=stage in (0, 3)) for stage in range(4)]
    for stage in range(4):
        made.append(Case(f"zero{stage} bf16", {"zero_stage": stage, "bf16": True}, precision="bf16", quick=stage == 2))
    gpu: dict[str, Any] = {"devices": ("cuda",)}
    half = {"fp16": True}
    made += [Case(f"zero{n} fp16", {"zero_stage": n, **half}, precision="fp16", **gpu) for n in (1, 2, 3)]
    by_deepspeed = {"optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": DECAY}}}
    offload = {"offload_optimizer": "cpu"}
    made += [
        Case("adamw_torch", {"zero_stage": 1, "optim": "adamw_torch"}),
        Case("DeepSpeed's fused Adam", {"zero_stage": 2, "deepspeed": by_deepspeed}, **gpu),
        Case("offloaded Adam, zero2", {"zero_stage": 2, **offload}, **gpu),
        Case("offloaded Adam, zero3", {"zero_stage": 3, **offload}, **gpu),
        Case("offloaded parameters", {"zero_stage": 3, **offload, "offload_param": "cpu"}, **gpu),
        Case("recomputation", {"zero_stage": 3, "gradient_checkpointing": True}),
    ]
    for stage in range(4):
        made.append(Case(f"resume, zero{stage} fp32", {"zero_stage": stage}, "resume", quick=stage == 2))
        made.append(Case(f"resume, zero{stage} bf16", {"zero_stage": stage, "bf16": True}, "resume", precision="bf16"))
    made += [
        Case("resume, fp16", {"zero_stage": 2, **half}, "resume", precision="fp16", **gpu),
        Case("resume, waiting save", {"zero_stage": 1, "save_async": False}, "resume"),
        Case("resume, offloaded Adam", {"zero_stage": 2, **offload}, "resume", **gpu),
        Case("rollback, zero1", {"zero_stage": 1}, "rollback", quick=True),
        Case("rollback, zero3", {"zero_stage": 3}, "rollback"),
        Case("rollback, zero2 bf16", {"zero_stage": 2, "bf16": True}, "rollback", precision="bf16"),
    ]
    layouts = {"dp": {}, "tp": {"tensor_parallel_size": 2}, "cp": {"context_parallel_size": 2}}
    layouts["sp"] = {"sequence_parallel_size": 2}
    for name, sizes in layouts.items():
        for stage in range(4):
            quick = (name, stage) in (("dp", 3), ("tp", 1), ("cp", 2), ("sp", 3))
            made.append(Case(f"{name}2 zero{stage} fp32", {"zero_stage": stage, **sizes}, world=2, quick=quick))
        half = {"zero_stage": 2, "bf16": True, **sizes}
        made.append(Case(f"{name}2 zero2 bf16", half, world=2, precision="bf16"))
        made.append(Case(f"{name}2 resume zero3", {"zero_stage": 3, **sizes}, "resume", 2))
    for (one, first), (two, second) in itertools.combinations(layouts.items(), 2):
        for stage in (1, 3):
            made.append(Case(f"{one}2 {two}2 zero{stage} fp32", {"zero_stage": stage, **first, **second}, world=4))
    made.append(Case("dp4 resume zero3", {"zero_stage": 3}, "resume", 4))
    return made


# -- model and data ------------------------------------------------------------------------------------------------


def build_model() -> nn.Module:
    """The same weights at every call. A row with :data:`BAD_TOKEN` makes the loss NaN."""
    from transformers import LlamaConfig, LlamaForCausalLM

    class Fragile(LlamaForCausalLM):
        def forward(self, input_ids: torch.Tensor | None = None, **more: Any) -> Any:
            assert input_ids is not None
            output = super().forward(input_ids=input_ids, **more)
            if output.loss is not None:
                bad = torch.where((input_ids == BAD_TOKEN).any(), torch.nan, 1.0)
                output.loss = output.loss * bad.to(output.loss.dtype)
            return output

    torch.manual_seed(SEED)
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, max_position_embeddings=LENGTH, **sizes)
    return Fragile(config)


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Random tokens with targets left out here and there, so that a mean over micro-batches would be wrong."""

    def __init__(self, bad_step: int | None = None) -> None:
        draw = torch.Generator().manual_seed(SEED)
        count = GLOBAL_BATCH * (STEPS + BAD_STEP)
        self.tokens = torch.randint(BAD_TOKEN, (count, LENGTH), generator=draw)
        self.labels = self.tokens.clone()
        for row, masked in enumerate(torch.randint(LENGTH // 2, (count,), generator=draw).tolist()):
            self.labels[row, :masked] = -100
        if bad_step is not None:
            self.tokens[(bad_step - 1) * GLOBAL_BATCH + 1, 3] = BAD_TOKEN

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


@dataclass
class Trajectory:
    """Per step loss and gradient norm before clipping; the weights at the end."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def plain(steps: Sequence[int]) -> Trajectory:
    """AdamW, clipping, float32, CPU: what the batches of these steps (counted from 0) make of the model."""
    from ds_trainer.optim.optimizer_builder import decay_parameter_names, parameter_groups

    model, data = build_model(), Rows()
    optimizer = torch.optim.AdamW(parameter_groups(model, decay_parameter_names(model), DECAY), lr=RATE)
    found = Trajectory([], [], {})
    for step in steps:
        rows = slice(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)
        logits = model(input_ids=data.tokens[rows]).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), data.labels[rows][:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        found.losses.append(loss.item())
        found.norms.append(norm.item())
    found.weights = {name: p.detach().double() for name, p in model.named_parameters()}
    return found


# -- one case, on every rank ---------------------------------------------------------------------------------------


def train(
    case: Case,
    device: str,
    output_dir: str,
    resume: str | bool | None = None,
    bad_step: int | None = None,
    callbacks: Sequence[Any] = (),
) -> Trajectory:
    """Train with the Trainer; what it logged, and its weights."""
    from ds_trainer import Trainer, TrainingArguments
    from ds_trainer.engine.weights import gathered

    sizes = ("tensor_parallel_size", "context_parallel_size", "sequence_parallel_size")
    replicas = case.world // math.prod(case.arguments.get(name, 1) for name in sizes)
    values: dict[str, Any] = dict(
        per_device_train_batch_size=2,
        gradient_accumulation_steps=GLOBAL_BATCH // (2 * replicas),
        max_steps=STEPS,
        learning_rate=RATE,
        weight_decay=DECAY,
        max_grad_norm=CLIP,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="steps" if case.kind != "train" else "no",
        save_steps=SAVE_AT,
        nonfinite_policy="rollback" if case.kind == "rollback" else "stop",
        disable_tqdm=True,
        use_cpu=device == "cpu",
    )
    args = TrainingArguments(output_dir, **{**values, **case.arguments})
    trainer = Trainer(build_model(), args, train_dataset=Rows(bad_step), callbacks=list(callbacks))
    trainer.log_metrics = lambda *args, **kwargs: None
    trainer.train(resume_from_checkpoint=resume)
    logs = {entry["step"]: entry for entry in trainer.state.log_history if "loss" in entry}  # the last of each step
    parameters = dict(trainer.model.named_parameters())
    with gathered(list(parameters.values())):
        weights = {name: p.detach().cpu().double() for name, p in parameters.items()}
    trainer.engine.close()
    ordered = [logs[step] for step in sorted(logs)]
    return Trajectory([entry["loss"] for entry in ordered], [entry["grad_norm"] for entry in ordered], weights)


def run_case(case: Case, device: str, directory: str) -> dict[str, Any]:
    """Differences of one case, and whether they are small enough."""
    if case.kind == "resume":
        whole = train(case, device, f"{directory}/run")
        resumed = train(case, device, f"{directory}/run", resume=f"{directory}/run/checkpoint-{SAVE_AT}")
        found = differences(resumed, whole, STEPS - SAVE_AT)
        tolerance = 0.0
    else:
        steps = list(range(STEPS))
        if case.kind == "rollback":  # the data between the checkpoint and the bad step is passed over, too
            steps = [*range(SAVE_AT), *range(BAD_STEP, BAD_STEP + STEPS - SAVE_AT)]
        bad_step = BAD_STEP if case.kind == "rollback" else None
        found = differences(train(case, device, f"{directory}/run", bad_step=bad_step), plain(steps), STEPS)
        tolerance = TOLERANCE[case.precision]
    passed = all(difference <= tolerance for difference in found.values())  # which a NaN is not
    return {"differences": found, "tolerance": tolerance, "passed": passed}


def differences(found: Trajectory, wanted: Trajectory, last_steps: int) -> dict[str, float]:
    """Largest relative difference of the last losses, the last norms, and the weights as one vector."""

    def largest(a: list[float], b: list[float]) -> float:
        pairs = list(zip(a[-last_steps:], b[-last_steps:], strict=True))
        worst = [abs(x - y) / abs(y) for x, y in pairs]
        return max(worst) if all(map(math.isfinite, worst)) else math.nan

    def vector(trajectory: Trajectory) -> torch.Tensor:
        return torch.cat([trajectory.weights[name].flatten() for name in sorted(trajectory.weights)])

    reference = vector(wanted)
    return {
        "loss": largest(found.losses, wanted.losses),
        "norm": largest(found.norms, wanted.norms),
        "weights": float((vector(found) - reference).norm() / reference.norm()),
    }


def serve(names: Sequence[str], device: str, out: Path) -> None:
    """Run cases on this rank, one after the other; rank 0 writes a line for each as it ends."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if device == "cuda":
        # The flash and memory-efficient backward passes are not deterministic; bits of resumed runs are compared.
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
    by_name = {case.name: case for case in cases()}
    for name in names:
        with shared_directory(out) as directory:
            try:
                result = run_case(by_name[name], device, directory)
            except Exception as error:  # the next case may do better
                traceback.print_exc()
                result = {"passed": False, "error": f"{type(error).__name__}: {error}"[:2000]}
        if os.environ.get("RANK", "0") == "0":
            with out.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"name": name, **result}) + "\n")


@contextmanager
def shared_directory(out: Path) -> Iterator[str]:
    """A directory that all ranks of this machine use for one case; rank 0 removes it."""
    from ds_trainer.utils import distributed

    path = Path(tempfile.gettempdir()) / f"{out.name}-{os.environ['MASTER_PORT']}"
    try:
        yield str(path)
    finally:
        distributed.barrier()
        if distributed.rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        distributed.barrier()


def run_world(world: int, names: list[str], options: argparse.Namespace, results: Results) -> Iterator[dict[str, Any]]:
    """The cases of one number of ranks, in new processes; when they die or hang, new ones go on with the next case."""
    shared = {RANKS_SHARE_GPU: "test"} if options.share_gpu else {}
    with tempfile.TemporaryDirectory() as directory:
        while names and not results.out_of_time:
            out = Path(directory) / f"{len(names)}-cases-{world}.jsonl"
            out.touch()
            launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={world}", f"--master-port={free_port()}"]
            command = [sys.executable, *launcher, __file__, "--device", options.device]
            command += ["--serve", json.dumps(names), "--out", str(out)]
            process = subprocess.Popen(command, env={**os.environ, **shared})
            done, since = 0, time.monotonic()
            try:
                while True:
                    ended = process.poll() is not None  # asked before the lines are read, or the last could be missed
                    lines = out.read_text(encoding="utf-8").splitlines()
                    for line in lines[done:]:
                        yield json.loads(line)
                        since = time.monotonic()
                    done = len(lines)
                    if ended or results.out_of_time or time.monotonic() - since > options.seconds:
                        break
                    time.sleep(0.2)
            finally:  # also when this program is interrupted
                process.terminate()  # torchrun kills ranks that do not end within 30 seconds
                process.wait()
            if results.out_of_time:
                return
            if names := names[done:]:
                ended = f"after {time.monotonic() - since:.0f} s, exit code {process.returncode}"
                yield {"name": names.pop(0), "passed": False, "error": f"the ranks died, or were ended {ended}"}


def table(found: Sequence[dict[str, Any]]) -> str:
    """A line a case."""
    lines = ["| case | loss | norm | weights | tolerance | result |", "|---|---|---|---|---|---|"]
    for one in found:
        of = one.get("differences", {})
        numbers = [f"{of[key]:.1e}" if key in of else "" for key in ("loss", "norm", "weights")]
        said = "passed" if one["passed"] else f"FAILED {one.get('error', '')}".replace("\n", " ").strip()
        tolerance = f"{one['tolerance']:.0e}" if "tolerance" in one else ""
        lines.append(f"| {one['name']} | {' | '.join(numbers)} | {tolerance} | {said} |")
    return "\n".join(lines)


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="a few cases")
    parser.add_argument("--cases", nargs="+", metavar="TEXT", help="cases whose name contains one of these")
    parser.add_argument("--world", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks")
    parser.add_argument("--share-gpu", action="store_true", help="all ranks use one GPU")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time limit of a case")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no case after this time")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    parser.add_argument("--serve", help=argparse.SUPPRESS)  # how it starts itself
    options = parser.parse_args()
    if options.serve:
        serve(json.loads(options.serve), options.device, options.out)
        return 0
    shares = options.device == "cpu" or options.share_gpu
    devices = max(options.world) if shares else torch.cuda.device_count()
    chosen = [
        case
        for case in cases()
        if options.device in case.devices
        and case.world in options.world
        and case.world <= devices
        and (case.quick or not options.quick)
        and (not options.cases or any(text in case.name for text in options.cases))
    ]
    if options.list or not chosen:
        print("\n".join(case.name for case in chosen) or "no case fits: see --list without other options")
        return 0 if chosen else 2
    results = Results(options.out, options.device, options.minutes)
    try:
        for world in sorted({case.world for case in chosen}):
            for result in run_world(world, [c.name for c in chosen if c.world == world], options, results):
                results.add(result)
                print(table([result]).splitlines()[-1], flush=True)
    finally:
        print("\n" + table(results.cases))
    left = len(chosen) - len(results.cases)
    if left:
        print(f"{left} of {len(chosen)} cases were not run: the time was over.")
    return 0 if all(case["passed"] for case in results.cases) else 1


if __name__ == "__main__":
    sys.exit(main())
