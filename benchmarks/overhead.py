"""Measures the overhead of a trainer over a bare DeepSpeed loop: milliseconds per micro-step, by paired measurements.

The same model, data, optimizer and DeepSpeed JSON are used in all loops: a bare loop with ``deepspeed.initialize``,
the ``Trainer`` of this package, and ``transformers.Trainer``. A copy of the first loop is the control: its difference
from the first shows the measurement error. One more bare loop counts the tokens of each global batch, with an
all-reduce, as every loop must whose samples have different lengths: the first loop is right here because all have the
same.

All loops run in one process per rank, each with its own engine and in its own thread, and take turns: a loop runs a
block of optimizer steps, then waits until the others have run theirs. So other load on the machine affects all loops,
and the *difference within a round* is meaningful even if single times are not. Only the thread whose turn it is runs;
the others sleep on a condition and hold no lock. A step is timed from the end of the previous step to its own end, so
it includes everything that the loop does in between (fetching data, callbacks, schedule).

There are two clocks: wall-clock time, which matters but is disturbed by every other process on the machine, and the CPU
time of the rank, which is steadier but does not include waiting for other ranks.

    python benchmarks/overhead.py                            the tables of docs/benchmarks.md, a quarter of an hour
    python benchmarks/overhead.py --quick                    the same with few rounds
    python benchmarks/overhead.py --models tiny --world 2    a part of it
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from overhead_results import BARE, CLOCKS, CONTROL, COUNTING, LOOPS, OURS, SEED, THEIRS, same_work, summary, tables
from torch import nn
from torch.utils.data import DataLoader, Dataset
from turns import Turns

from ds_trainer.utils.ranks import free_port

LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.1


@dataclass(frozen=True)
class Model:
    """A Llama architecture and the micro-batch that goes through it."""

    hidden: int
    layers: int
    vocabulary: int
    micro_batch: int
    sequence: int


MODELS = {"tiny": Model(64, 2, 512, 4, 64), "50m": Model(512, 13, 8192, 1, 64)}


@dataclass(frozen=True)
class Case:
    """One line of the table. A round is one turn of every loop, a turn is ``block`` optimizer steps."""

    model: str
    world: int
    stage: int
    accumulation: int
    rounds: int
    block: int
    warmup: int = 4

    @property
    def steps(self) -> int:
        """Optimizer steps of each loop."""
        return self.warmup + self.rounds * self.block


# Model, ZeRO stage, accumulation, rounds, block; each for every number of ranks. About two minutes a case.
LINES = [("tiny", 1, 1, 100, 9), ("tiny", 1, 4, 40, 3), ("tiny", 3, 1, 60, 9), ("50m", 1, 1, 30, 1)]


# -- whose turn it is --------------------------------------------------------------------------------------------


def schedule(case: Case) -> list[tuple[str, int]]:
    """Warm-up, the rounds in an order that is drawn anew for each (alike on all ranks), and a turn to finish in."""
    draw = random.Random(SEED)
    turns = [(name, case.warmup) for name in LOOPS]
    for _ in range(case.rounds):
        turns += [(name, case.block) for name in draw.sample(LOOPS, len(LOOPS))]
    return turns + [(name, 0) for name in LOOPS]


# -- model and data ------------------------------------------------------------------------------------------------


def build_model(model: Model) -> nn.Module:
    """The same weights at every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=model.vocabulary,
            hidden_size=model.hidden,
            intermediate_size=model.hidden * 11 // 4,
            num_hidden_layers=model.layers,
            num_attention_heads=max(2, model.hidden // 64),
            max_position_embeddings=model.sequence,
            use_cache=False,
        )
    )


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random tokens in memory, as many as one epoch of the case takes."""

    def __init__(self, case: Case) -> None:
        model = MODELS[case.model]
        samples = case.steps * case.accumulation * case.world * model.micro_batch
        generator = torch.Generator().manual_seed(SEED)
        tokens = torch.randint(model.vocabulary, (samples, model.sequence), generator=generator)
        self.rows = [{"input_ids": row, "labels": row} for row in tokens]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """One batch; the same function in all loops."""
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def order_of_batches(case: Case, samples: int, rank: int) -> Iterator[list[int]]:
    """The shuffled order that both trainers draw: consecutive micro-batches, dealt to the ranks in turn."""
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(SEED)).tolist()
    size = MODELS[case.model].micro_batch
    for start in range(rank * size, samples, case.world * size):
        yield order[start : start + size]


# -- the loops -----------------------------------------------------------------------------------------------------


def bare_loop(
    case: Case, model: nn.Module, data: Tokens, config: dict[str, Any], done: Callable[[], None], counts: bool = False
) -> None:
    """What one writes by hand.

    Args:
        case: what is measured.
        model: trained in place.
        data: the samples.
        config: DeepSpeed's configuration.
        done: called after each optimizer step.
        counts: divide by the tokens of the global batch. Without, the mean loss is right because every sample has the
            same number of tokens.
    """
    import deepspeed

    from ds_trainer.optim.optimizer_builder import decay_parameter_names, parameter_groups

    groups = parameter_groups(model, decay_parameter_names(model), WEIGHT_DECAY)
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (case.steps - step) / case.steps)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    batches = list(order_of_batches(case, len(data), torch.distributed.get_rank()))
    loader = iter(DataLoader(data, batch_sampler=batches, collate_fn=collate))
    engine.train()
    while micro_batches := list(islice(loader, case.accumulation)):
        keywords = {}
        if counts:
            tokens = torch.stack([batch["labels"][:, 1:].ne(-100).sum() for batch in micro_batches]).sum()
            if case.world > 1:
                torch.distributed.all_reduce(tokens)
            keywords["num_items_in_batch"] = tokens
        for batch in micro_batches:
            loss = engine(**batch, **keywords).loss
            engine.backward(loss * (case.world * case.accumulation) if counts else loss)  # DeepSpeed averages
            engine.step()
        scheduler.step()
        done()


def arguments(case: Case, output_dir: str) -> dict[str, Any]:
    """The arguments of both trainers. Nothing is logged or saved; other arguments are defaults."""
    return dict(
        output_dir=output_dir,
        per_device_train_batch_size=MODELS[case.model].micro_batch,
        gradient_accumulation_steps=case.accumulation,
        max_steps=case.steps,
        learning_rate=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        lr_scheduler_type="linear",
        optim="adamw_torch_fused",
        max_grad_norm=1.0,
        logging_steps=10**9,
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=True,
        seed=SEED,
    )


def our_trainer(case: Case, model: nn.Module, data: Tokens, output_dir: str, done: Callable[[], None]) -> Any:
    """This package's Trainer with its default callbacks, and one that tells the end of a step."""
    from ds_trainer import Trainer, TrainerCallback, TrainingArguments

    class StepEnd(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            done()

    args = TrainingArguments(**arguments(case, output_dir), zero_stage=case.stage)
    trainer = Trainer(model, args, data_collator=collate, train_dataset=data)
    # Not by add_callback: that one makes the ranks agree on what the user's callbacks decided; this decides nothing.
    trainer.callback_handler.add_callback(StepEnd())
    return trainer


def their_trainer(
    case: Case, model: nn.Module, data: Tokens, output_dir: str, config: dict[str, Any], done: Callable[[], None]
) -> Any:
    """transformers.Trainer with the same JSON.

    Without the JSON's optimizer block: with it, DeepSpeed would make the optimizer, over one parameter group that is
    decayed as a whole. So it makes the same optimizer over the same two groups as the others.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class StepEnd(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            done()

    config = {key: value for key, value in config.items() if key != "optimizer"}
    args = TrainingArguments(**arguments(case, output_dir), report_to="none", deepspeed=config)
    return Trainer(model, args, data_collator=collate, train_dataset=data, callbacks=[StepEnd()])


# -- one case, on every rank ---------------------------------------------------------------------------------------


def measure(case: Case) -> dict[str, Any]:
    """Run all loops of a case on this rank; the results, on every rank."""
    from ds_trainer.engine.process_group import start_process_group
    from ds_trainer.utils import distributed

    start_process_group("cpu")
    data = Tokens(case)
    models = {name: build_model(MODELS[case.model]) for name in LOOPS}
    parameters = sum(p.numel() for p in models[BARE].parameters())
    losses = {name: _keep_losses(model, case.steps * case.accumulation) for name, model in models.items()}
    turns = Turns(schedule(case), distributed.barrier)

    def step_done(name: str) -> Callable[[], None]:
        return lambda: turns.step_done(name)

    with tempfile.TemporaryDirectory() as directory:
        ours = our_trainer(case, models[OURS], data, f"{directory}/ours", step_done(OURS))
        config = ours._ds_trainer.compiled.to_dict()
        theirs = their_trainer(case, models[THEIRS], data, f"{directory}/theirs", config, step_done(THEIRS))
        loops: dict[str, Callable[[], Any]] = {
            BARE: lambda: bare_loop(case, models[BARE], data, config, step_done(BARE)),
            CONTROL: lambda: bare_loop(case, models[CONTROL], data, config, step_done(CONTROL)),
            COUNTING: lambda: bare_loop(case, models[COUNTING], data, config, step_done(COUNTING), counts=True),
            OURS: ours.train,
            THEIRS: theirs.train,
        }
        load = os.getloadavg()[0]
        threads = [threading.Thread(target=turns.run, args=(name, loops[name])) for name in LOOPS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    own = {clock: [_times_of(turns, name, case, clock) for name in LOOPS] for clock in CLOCKS}
    of_ranks = distributed.gather_objects(own)
    over_ranks = {clock: np.mean([times[clock] for times in of_ranks], axis=0) for clock in CLOCKS}
    result = {
        **asdict(case),
        "parameters": parameters,
        "micro_batch": MODELS[case.model].micro_batch,
        "sequence": MODELS[case.model].sequence,
        "load_average": [load, os.getloadavg()[0]],
        "check": same_work(
            case.world, case.accumulation, losses, {name: _weights(model) for name, model in models.items()}
        ),
        **{clock: summary(dict(zip(LOOPS, over_ranks[clock], strict=True))) for clock in CLOCKS},
        "deepspeed_config": config,
    }
    return result


def _keep_losses(model: nn.Module, micro_batches: int) -> list[torch.Tensor]:
    """Make ``model`` write the losses of its first ``micro_batches`` micro-batches.

    Into memory that exists: with a tensor kept from each step, the bare loop was slower than others by a millisecond a
    step, probably because the small pieces fragment its heap.
    """
    kept = list(torch.zeros(micro_batches))
    free = iter(kept)

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        next(free).copy_(output.loss.detach())

    model.register_forward_hook(keep)
    return kept


def _weights(model: nn.Module) -> torch.Tensor:
    from ds_trainer.engine.weights import gathered

    parameters = list(model.parameters())
    with gathered(parameters):
        return torch.cat([p.detach().flatten().double() for p in parameters])


def _times_of(turns: Turns, name: str, case: Case, clock: str) -> list[float]:
    """Milliseconds a micro-step: the median of each turn after the warm-up, without the turn's first third.

    Those steps find the caches full of what the other loops have left there, as no loop does that runs alone.
    """
    turns_of = [steps[len(steps) // 3 :] for who, steps in turns.times if who == name]
    blocks = [statistics.median(getattr(step, clock) for step in steps) for steps in turns_of]
    return [1000 * seconds / case.accumulation for seconds in blocks[1:]]


# -- the command line -----------------------------------------------------------------------------------------------


def cases_of(options: argparse.Namespace) -> list[Case]:
    """The lines of the table that are asked for."""
    cases = []
    for model, stage, accumulation, rounds, block in LINES:
        for world in options.world:
            case = Case(model, world, stage, accumulation, rounds, block)
            if options.quick:
                case = replace(case, rounds=3, warmup=2)
            if model in options.models and stage in options.zero and accumulation in options.accumulation:
                cases.append(case)
    return cases


def launch(case: Case, directory: str) -> dict[str, Any]:
    """Run a case in ``case.world`` new processes."""
    part = Path(directory) / "case.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={case.world}", f"--master-port={free_port()}"]
    command = [sys.executable, *launcher, __file__, "--case", json.dumps(asdict(case)), "--out", str(part)]
    subprocess.run(command, check=True, env=environment)
    result: dict[str, Any] = json.loads(part.read_text(encoding="utf-8"))
    return result


def main() -> int:
    """Parse the command line and run; the exit code is 1 where two loops did not do the same work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds: to see it work, not to believe the numbers")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--world", nargs="+", type=int, default=[1, 2], help="numbers of ranks")
    parser.add_argument("--zero", nargs="+", type=int, default=[1, 3], help="ZeRO stages")
    parser.add_argument("--accumulation", nargs="+", type=int, default=[1, 4], help="micro-batches a step")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # how it starts itself on every rank
    options = parser.parse_args()
    if options.case:
        result = measure(Case(**json.loads(options.case)))
        if os.environ["RANK"] == "0":
            options.out.write_text(json.dumps(result), encoding="utf-8")
        return 0

    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        for case in cases_of(options):
            results.append(launch(case, directory))
            print(tables(results[-1:]), json.dumps(results[-1]["check"]), sep="\n", flush=True)
    print("\n" + tables(results))
    if options.out:
        packages = {name: version(name) for name in ("torch", "deepspeed", "transformers", "accelerate", "ds-trainer")}
        about = {"python": platform.python_version(), "cpu_cores": os.cpu_count(), **packages}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"environment": about, "cases": results}, indent=2) + "\n", encoding="utf-8")
    return 0 if all(result["check"]["passed"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
