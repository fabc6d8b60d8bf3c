"""Generation inside training under ZeRO-3: this Trainer, and transformers' with TRL's context.

Every optimizer step generates text from a batch of prompts and then trains on a batch, as GRPO and online DPO do. Four
training loops run in one process per rank, each with its own engine and in its own thread, and take turns of one step
in an order that is drawn anew for each round. So the *ratio within a round* is meaningful on a busy machine, where
single times are not. The CPU time of a rank is steadier than wall-clock time, but does not include waiting for others.
Generation of the first step must give the same tokens in all loops.

    ours, once         model.generate with generation_gather="always"
    ours, layers       model.generate with generation_gather="never"
    TRL, once          unwrap_model_for_generation(..., gather_deepspeed3_params=True), on transformers.Trainer
    TRL, layers        the same with gather_deepspeed3_params=False

Needs the extra ``clients``.

    python benchmarks/training_generation.py             2 ranks on the CPU
    python benchmarks/training_generation.py --quick     fewer rounds
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from kept_results import environment
from turns import Moment, Turns

from ds_trainer.utils.ranks import free_port

SEED, BATCH, PROMPT, WARMUP = 42, 4, 16, 2
LOOPS = ("ours, once", "ours, layers", "TRL, once", "TRL, layers")
CLOCKS = ("wall", "cpu")


def schedule(rounds: int) -> list[tuple[str, int]]:
    """Warm-up, the rounds, and a turn for each loop to finish in."""
    draw = random.Random(SEED)
    turns = [(name, WARMUP) for name in LOOPS]
    for _ in range(rounds):
        turns += [(name, 1) for name in draw.sample(LOOPS, len(LOOPS))]
    return turns + [(name, 0) for name in LOOPS]


def build_model(width: int, layers: int) -> torch.nn.Module:
    """A Llama with random weights that never generates an end token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def rows(number: int) -> list[dict[str, torch.Tensor]]:
    """Random tokens of one length."""
    generator = torch.Generator().manual_seed(SEED)
    return [{"input_ids": row, "labels": row} for row in torch.randint(2, 512, (number, PROMPT), generator=generator)]


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """One batch; the same function in all loops."""
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


class Collectives:
    """Counts the collectives of torch that are called from now on; create it before the process group."""

    def __init__(self) -> None:
        self.calls = 0
        for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast"):
            setattr(torch.distributed, name, self._counted(getattr(torch.distributed, name)))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*args: Any, **keywords: Any) -> Any:
            self.calls += 1
            return function(*args, **keywords)

        return counted


class Generation:
    """What every loop does before it trains on a batch: how long it took, how many collectives, the first tokens."""

    def __init__(self, tokens: int, collectives: Collectives) -> None:
        self.times: list[Moment] = []
        self.collectives: list[int] = []
        self._counter = collectives
        self.first: list[list[int]] | None = None
        self._keywords = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}

    def run(self, context: AbstractContextManager[Any], inputs: dict[str, Any]) -> None:
        """Generate from the prompts of ``inputs`` with the model of ``context``.

        Entering and leaving it are part of what generation costs.
        """
        start, calls = Moment.now(), self._counter.calls
        prompts = inputs["input_ids"]
        with context as model:
            found = model.generate(input_ids=prompts, attention_mask=torch.ones_like(prompts), **self._keywords)
        self.times.append(Moment.now().since(start))
        self.collectives.append(self._counter.calls - calls)
        self.first = found.tolist() if self.first is None else self.first


def arguments(steps: int, directory: str) -> dict[str, Any]:
    """Arguments of both trainers."""
    return dict(
        output_dir=directory,
        per_device_train_batch_size=BATCH,
        max_steps=steps,
        learning_rate=1e-4,
        optim="adamw_torch",
        logging_steps=10**9,
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=True,
        seed=SEED,
        report_to="none",
    )


def our_trainer(gather: str, model: Any, data: Any, generation: Generation, steps: int, directory: str) -> Any:
    """This package's Trainer; the step calls ``generate`` and nothing else."""
    from ds_trainer import Trainer, TrainingArguments

    class Generating(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            generation.run(nullcontext(self.model), inputs)
            return super().training_step(model, inputs, num_items_in_batch)

    args = TrainingArguments(**arguments(steps, directory), zero_stage=3, generation_gather=gather)
    return Generating(model, args, data_collator=collate, train_dataset=data)


def their_trainer(
    gather: bool, model: Any, data: Any, generation: Generation, steps: int, directory: str, config: dict[str, Any]
) -> Any:
    """transformers' Trainer with the same DeepSpeed configuration; the step generates in TRL's context."""
    from transformers import Trainer, TrainingArguments
    from trl.models import unwrap_model_for_generation

    class Generating(Trainer):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            context = unwrap_model_for_generation(self.model_wrapped, self.accelerator, gather_deepspeed3_params=gather)
            generation.run(context, inputs)
            return super().training_step(model, inputs, num_items_in_batch)

    config = {key: value for key, value in config.items() if key != "optimizer"}
    args = TrainingArguments(**arguments(steps, directory), deepspeed=config)
    return Generating(model, args, data_collator=collate, train_dataset=data)


def measure(width: int, layers: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds of generation and of the whole step, by loop and round: the mean over the ranks."""
    from ds_trainer.engine.process_group import start_process_group
    from ds_trainer.utils import distributed

    collectives = Collectives()
    start_process_group("cpu")
    steps = WARMUP + rounds
    data = rows(BATCH * distributed.world_size() * steps)
    turns = Turns(schedule(rounds), distributed.barrier)
    generations = {name: Generation(tokens, collectives) for name in LOOPS}
    models = {name: build_model(width, layers) for name in LOOPS}
    parameters = sum(p.numel() for p in models[LOOPS[0]].parameters())
    with tempfile.TemporaryDirectory() as directory:
        trainers: dict[str, Any] = {}
        for name in LOOPS:
            common = (models[name], data, generations[name], steps, f"{directory}/{name}")
            if name.startswith("ours"):
                trainers[name] = our_trainer("always" if name.endswith("once") else "never", *common)
            else:
                config = trainers[LOOPS[0]].compiled.to_dict()
                trainers[name] = their_trainer(name.endswith("once"), *common, config)
            _report_steps(trainers[name], turns, name)
        threads = [threading.Thread(target=turns.run, args=(name, trainers[name].train)) for name in LOOPS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    own = {
        name: {
            "generation": generations[name].times[WARMUP:],
            "step": [times[0] for who, times in turns.times if who == name][1:],
            "tokens": generations[name].first,
            "collectives": generations[name].collectives[WARMUP:],
        }
        for name in LOOPS
    }
    ranks = distributed.gather_objects(own)
    return {
        "parameters": parameters,
        "same_tokens": all(found[name]["tokens"] == found[LOOPS[0]]["tokens"] for found in ranks for name in LOOPS),
        "collectives": {name: statistics.median(ranks[0][name]["collectives"]) for name in LOOPS},
        **{what: {clock: _of_ranks(ranks, what, clock) for clock in CLOCKS} for what in ("generation", "step")},
    }


def _of_ranks(ranks: list[Any], what: str, clock: str) -> dict[str, list[float]]:
    """Seconds of each round by loop: the mean over the ranks."""
    seconds = {name: [[getattr(time, clock) for time in found[name][what]] for found in ranks] for name in LOOPS}
    return {name: [statistics.fmean(times) for times in zip(*seconds[name], strict=True)] for name in LOOPS}


def _report_steps(trainer: Any, turns: Turns, name: str) -> None:
    from transformers import TrainerCallback

    class StepEnd(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            turns.step_done(name)

    trainer.callback_handler.add_callback(StepEnd())


def speed(seconds: dict[str, list[float]], name: str) -> str:
    """Median and quartiles of the speed of a loop relative to ``TRL, once``, within rounds."""
    ratios = [theirs / own for theirs, own in zip(seconds["TRL, once"], seconds[name], strict=True)]
    low, middle, high = statistics.quantiles(ratios)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def table(cases: list[dict[str, Any]]) -> str:
    """The cases in Markdown."""
    lines = [
        "| parameters | loop | generation, wall clock | generation, CPU | step, wall clock | step, CPU | collectives |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        for name in LOOPS:
            shown = [speed(case[what][clock], name) for what in ("generation", "step") for clock in CLOCKS]
            lines.append(f"| {case['parameters']:,} | {name} | {' | '.join(shown)} | {case['collectives'][name]:g} |")
    return "\n".join(lines)


def main() -> int:
    """Start the ranks and print the table; 1 if the loops generated different tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, help="write JSON here")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # how it starts itself on every rank
    options = parser.parse_args()
    if options.case:
        found = measure(**json.loads(options.case))
        if os.environ["RANK"] == "0":
            options.out.write_text(json.dumps(found), encoding="utf-8")
        return 0
    cases = []
    for width, layers in ((64, 2),) if options.quick else ((64, 2), (256, 4)):
        case = {"width": width, "layers": layers, "tokens": 16, "rounds": 4 if options.quick else 15}
        with tempfile.TemporaryDirectory() as directory:
            part = Path(directory) / "case.json"
            launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={options.world}"]
            launcher.append(f"--master-port={free_port()}")
            command = [sys.executable, *launcher, __file__, "--case", json.dumps(case), "--out", str(part)]
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
            cases.append(json.loads(part.read_text(encoding="utf-8")))
    print(table(cases))
    if options.out:
        report = {"environment": environment("cpu"), "world": options.world, "cases": cases}
        options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0 if all(case["same_tokens"] for case in cases) else 1


if __name__ == "__main__":
    sys.exit(main())
