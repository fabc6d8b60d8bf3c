"""Tokens per second, MFU and peak memory on one device: a bare DeepSpeed loop, this Trainer and transformers.Trainer.

Full fine-tuning with the shapes of 0.5B, 1B and 3B models and LoRA with 8B, random weights and tokens, bf16, ZeRO 1 on
one rank, sequences of 4,096 tokens. All use the same model, DeepSpeed configuration, optimizer and activation
checkpointing. This Trainer runs twice: as it is by default, with the loss in chunks, and with whole logits like the
others.

The loops take turns in one process. Each turn builds the model on the device, runs a few warm-up steps, times the next
steps, and releases everything. The order is random in each round, and ratios are computed within a round, so thermal
throttling affects all loops. A step is timed from the end of the previous step to its own end. The device is
synchronized only at both ends of the timed block, so the measurement adds no waits.

    python benchmarks/gpu_throughput.py --out throughput.json
    python benchmarks/gpu_throughput.py --models 1b --rounds 5
    python benchmarks/gpu_throughput.py --device cpu                 the same code on tiny shapes: does it run?

The exit code is 1 if a loop fails, or if two loops do not compute the same losses.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_models import CASES, SEED, Case, Tokens, build_model, collate
from kept_results import Results
from torch import nn
from torch.utils.data import DataLoader

BARE, OURS, WHOLE, THEIRS = "bare loop", "ds_trainer", "ds_trainer, whole logits", "transformers"
LOOPS = (BARE, OURS, WHOLE, THEIRS)
RATE, DECAY, CLIP = 1e-5, 0.1, 1.0
TOLERANCE = 1e-2  # relative, of a loss: the same arithmetic in bf16, with kernels that add in another order


# -- the loops -----------------------------------------------------------------------------------------------------


def arguments(case: Case, device: str, output_dir: str) -> dict[str, Any]:
    """The arguments of both trainers. Nothing is logged or saved; other arguments are defaults."""
    values: dict[str, Any] = dict(
        output_dir=output_dir,
        per_device_train_batch_size=case.micro_batch,
        max_steps=case.warmup + case.steps,
        learning_rate=RATE,
        weight_decay=DECAY,
        max_grad_norm=CLIP,
        optim="adamw_torch_fused",
        bf16=True,
        logging_steps=10**9,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=device == "cpu",
        seed=SEED,
    )
    if case.recompute:
        values.update(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})
    return values


def compiled_config(case: Case, device: str, output_dir: str, stage: int) -> dict[str, Any]:
    """The DeepSpeed configuration that this package makes of the arguments; all loops run with it."""
    from ds_trainer import Trainer, TrainingArguments

    small = replace(case, hidden=case.heads * 2, intermediate=8, layers=1, vocabulary=8)
    args = TrainingArguments(**arguments(case, device, output_dir), zero_stage=stage)
    config: dict[str, Any] = Trainer(build_model(small, "cpu"), args)._ds_trainer.compiled.to_dict()
    return config


class Clock:
    """Times the steps after the warm-up; told of the end of every step.

    Attributes:
        seconds: of one step.
        losses: of every micro-batch, on the device.
    """

    def __init__(self, case: Case, device: str) -> None:
        self._case, self._device = case, device
        self._done = 0
        self._began = 0.0
        self.seconds = 0.0
        self.losses: list[torch.Tensor] = []

    def model(self) -> nn.Module:
        """The model of the case."""
        return build_model(self._case, self._device)

    def keeping_losses(self, trainer_class: type[Any]) -> type[Any]:
        """A subclass that hands in its losses. A hook of the model would do, but it could read the logits, so that this
        package's Trainer would make them.
        """
        losses = self.losses

        class Keeping(trainer_class):  # type: ignore[misc]
            def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
                loss: torch.Tensor = super().training_step(*args, **kwargs)
                losses.append(loss.detach())
                return loss

        return Keeping

    def step_done(self) -> None:
        """A step has ended on the host. The device is waited for where the timed block begins and ends."""
        self._done += 1
        if self._done == self._case.warmup:
            synchronize(self._device)
            self._began = time.perf_counter()
        elif self._done == self._case.warmup + self._case.steps:
            synchronize(self._device)
            self.seconds = (time.perf_counter() - self._began) / self._case.steps


def synchronize(device: str) -> None:
    """Wait until the device is idle."""
    if device == "cuda":
        torch.cuda.synchronize()


def bare_loop(case: Case, device: str, config: dict[str, Any], output_dir: str, clock: Clock) -> None:
    """What one writes by hand."""
    import deepspeed

    from ds_trainer.engine.process_group import start_process_group
    from ds_trainer.engine.topology import reset_deepspeed_groups
    from ds_trainer.optim.optimizer_builder import decay_parameter_names, parameter_groups

    start_process_group(device)
    reset_deepspeed_groups()  # of an engine before
    model = clock.model()
    if case.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if case.lora:
            model.enable_input_require_grads()
    groups = parameter_groups(model, decay_parameter_names(model), DECAY)
    optimizer = torch.optim.AdamW(groups, lr=RATE, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    loader = DataLoader(Tokens(case), case.micro_batch, collate_fn=collate, pin_memory=device == "cuda")
    engine.train()
    for batch in loader:
        batch = {key: value.to(engine.device, non_blocking=True) for key, value in batch.items()}
        loss = engine(**batch).loss
        clock.losses.append(loss.detach())
        engine.backward(loss)
        engine.step()
        clock.step_done()
    engine.destroy()


def our_trainer(case: Case, device: str, config: dict[str, Any], output_dir: str, clock: Clock, **changes: Any) -> None:
    """This package's Trainer with its default callbacks."""
    from ds_trainer import Trainer, TrainerCallback, TrainingArguments

    class StepEnd(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.step_done()

    stage = config["zero_optimization"]["stage"]
    args = TrainingArguments(**arguments(case, device, output_dir), zero_stage=stage, **changes)
    keeping = clock.keeping_losses(Trainer)
    trainer = keeping(clock.model(), args, data_collator=collate, train_dataset=Tokens(case))
    # Not by add_callback: that one makes the ranks agree on what the user's callbacks decided; this decides nothing.
    trainer.callback_handler.add_callback(StepEnd())
    trainer.train()
    trainer.engine.close()


def their_trainer(case: Case, device: str, config: dict[str, Any], output_dir: str, clock: Clock) -> None:
    """transformers.Trainer with the same configuration, without its optimizer block: see benchmarks/overhead.py."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from ds_trainer.engine.process_group import start_process_group
    from ds_trainer.engine.topology import reset_deepspeed_groups

    class StepEnd(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.step_done()

    start_process_group(device)
    reset_deepspeed_groups()
    config = {key: value for key, value in config.items() if key != "optimizer"}
    args = TrainingArguments(**arguments(case, device, output_dir), report_to="none", deepspeed=config)
    keeping = clock.keeping_losses(Trainer)
    trainer = keeping(clock.model(), args, data_collator=collate, train_dataset=Tokens(case), callbacks=[StepEnd()])
    trainer.train()
    trainer.deepspeed.destroy()


RUN: dict[str, Callable[..., None]] = {
    BARE: bare_loop,
    OURS: our_trainer,
    WHOLE: partial(our_trainer, loss_chunk_tokens=0),
    THEIRS: their_trainer,
}


# -- measuring -----------------------------------------------------------------------------------------------------


def turn(name: str, case: Case, device: str, config: dict[str, Any]) -> dict[str, Any]:
    """One turn of one loop: seconds a step and the peak of allocated memory, or the error that ended it."""
    clock = Clock(case, device)
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as output_dir:
        try:
            RUN[name](case, device, config, output_dir, clock)
        except Exception as error:
            traceback.print_exc()
            return {"loop": name, "error": f"{type(error).__name__}: {error}"[:2000]}
        finally:
            gc.collect()  # an engine is full of cycles
    memory = {"peak_gb": torch.cuda.max_memory_allocated() / 1e9} if device == "cuda" else {"peak_gb": None}
    if device == "cuda":
        memory["left_gb"] = torch.cuda.memory_allocated() / 1e9  # should be nothing
    return {"loop": name, "seconds": clock.seconds, **memory, "losses": [float(loss) for loss in clock.losses]}


def flops_of_step(case: Case) -> float:
    """Model FLOPs of one step; what is recomputed is not counted."""
    from ds_trainer.planner.flops import FlopRule, Weights
    from ds_trainer.planner.model_shape import ModelShape

    with torch.device("meta"):
        model = build_model(replace(case, lora=0), "meta")
    total = sum(p.numel() for n, p in model.named_parameters() if "embed" not in n)
    trainable = 0 if case.lora else total  # adapters are a fraction of a percent
    rule = FlopRule.of(ModelShape.from_model(model), Weights(total, trainable))
    assert rule is not None
    return rule.flops(case.micro_batch, case.sequence)


def measure(case: Case, device: str, rounds: int, stage: int, results: Results) -> dict[str, Any]:
    """All turns of one case."""
    with tempfile.TemporaryDirectory() as directory:
        config = compiled_config(case, device, directory, stage)
    draw, turns = random.Random(SEED), []
    for number in range(rounds):
        for name in draw.sample(LOOPS, len(LOOPS)):
            if results.out_of_time:
                break
            turns.append({"round": number, **turn(name, case, device, config)})
            print(f"{case.name}: {turns[-1]}", file=sys.stderr, flush=True)
    return {**asdict(case), "turns": turns, "loops": dict(summary(case, turns, device)), "deepspeed_config": config}


def summary(case: Case, turns: Sequence[dict[str, Any]], device: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Medians of each loop, and the ratio of its tokens a second to the bare loop's of the same round."""
    from ds_trainer.planner.hardware import peak_flops

    tokens, operations = case.micro_batch * case.sequence, flops_of_step(case)
    peak = peak_flops(torch.cuda.get_device_name(), "bf16") if device == "cuda" else None
    of = {name: {t["round"]: t for t in turns if t["loop"] == name and "seconds" in t} for name in LOOPS}
    for name in LOOPS:
        errors = [t["error"] for t in turns if t["loop"] == name and "error" in t]
        for number, one in of[name].items():
            wanted = of[BARE].get(number, one)["losses"]
            if not same_losses(one["losses"], wanted):
                errors.append(f"other losses than the bare loop's: {one['losses']}, {wanted}")
        if not of[name]:
            yield name, {"error": errors[0]} if errors else {"not_run": True}
            continue
        seconds = statistics.median(t["seconds"] for t in of[name].values())
        pairs = [of[BARE][number]["seconds"] / t["seconds"] for number, t in of[name].items() if number in of[BARE]]
        yield (
            name,
            {
                "tokens_per_second": tokens / seconds,
                "tflops": operations / seconds / 1e12,
                "mfu": operations / seconds / peak if peak else None,
                "peak_gb": max((t["peak_gb"] for t in of[name].values() if t["peak_gb"]), default=None),
                "of_bare_loop": [min(pairs), statistics.median(pairs), max(pairs)] if pairs else None,
                **({"error": errors[0]} if errors else {}),
            },
        )


def same_losses(found: Sequence[float], wanted: Sequence[float]) -> bool:
    """Whether two loops did the same work; NaN never is the same."""
    pairs = zip(found, wanted, strict=False)
    return len(found) == len(wanted) and all(abs(a - b) <= TOLERANCE * abs(b) for a, b in pairs)


def table(found: Sequence[dict[str, Any]]) -> str:
    """A line a model and loop."""
    lines = [
        "| model | loop | tokens/s | TFLOP/s | MFU | peak memory, GB | tokens/s relative to the bare loop (range) |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in found:
        for name, loop in one["loops"].items():
            if "tokens_per_second" not in loop or "error" in loop:
                said = loop["error"].splitlines()[0][:120] if "error" in loop else "not run: the time was over"
                lines.append(f"| {one['name']} | {name} | {said} | | | | |")
                continue
            mfu = f"{100 * loop['mfu']:.1f} %" if loop["mfu"] else ""
            peak = f"{loop['peak_gb']:.1f}" if loop["peak_gb"] else ""
            ratio = loop["of_bare_loop"]
            relative = f"{ratio[1]:.3f} ({ratio[0]:.3f} to {ratio[2]:.3f})" if ratio else ""
            numbers = f"{loop['tokens_per_second']:,.0f} | {loop['tflops']:.3g} | {mfu} | {peak} | {relative}"
            lines.append(f"| {one['name']} | {name} | {numbers} |")
    return "\n".join(lines)


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", help="names of models; all by default")
    parser.add_argument("--rounds", type=int, help="turns of each loop")
    parser.add_argument("--zero-stage", type=int, choices=[1, 2, 3], default=1)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no turn after this time")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    options = parser.parse_args()
    chosen = CASES[options.device]
    if unknown := set(options.models or []) - {case.name for case in chosen}:
        parser.error(f"unknown models {sorted(unknown)}; there are {[case.name for case in chosen]}")
    results = Results(options.out, options.device, options.minutes, zero_stage=options.zero_stage)
    try:
        for case in chosen:
            if results.out_of_time or (options.models and case.name not in options.models):
                continue
            rounds = options.rounds or case.rounds
            results.add(measure(case, options.device, rounds, options.zero_stage, results))
            print(table(results.cases[-1:]), flush=True)
    finally:
        print("\n" + table(results.cases))
    return 1 if any("error" in loop for one in results.cases for loop in one["loops"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
