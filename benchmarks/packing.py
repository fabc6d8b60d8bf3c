"""Measures sample packing on real ragged text: tokens per second against padding and against ``group_by_length``.

The text is Python's own standard library, paragraph by paragraph, with words and signs as tokens. Five loops train the
same model on it: this package's Trainer with packing, with padding, with padding and ``group_by_length``, and
transformers' Trainer with padding, and with ``group_by_length``. A step has about as many tokens in every loop, padding
not counted.

All loops run in one process, in threads that take turns (``turns.py``): a loop runs a block of steps while the others
sleep. So other load on the machine affects all of them, and ratios are meaningful even if single rates are not.
``group_by_length`` begins with the longest samples of each 50 global batches, so its rate is that of the whole data
only over a multiple of 50 steps: the ratio is that of all steps, and the range is that of the rounds. Afterwards every
loop evaluates the same held-out paragraphs; the losses are compared at the number of tokens that was trained on.

    python benchmarks/packing.py                 the table, a few minutes
    python benchmarks/packing.py --rounds 3      the same with few rounds
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import sysconfig
import tempfile
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from turns import Turns

SEED, VOCABULARY, PADDING = 42, 2048, 0
PACKED, PADDED, GROUPED, THEIRS = "packed", "padded", "group_by_length", "transformers, padded"
THEIRS_GROUPED = "transformers, group_by_length"
LOOPS = (PACKED, PADDED, GROUPED, THEIRS, THEIRS_GROUPED)
Sample = dict[str, list[int]]


def paragraphs(files: int, longest: int) -> list[Sample]:
    """Paragraphs of the standard library with at least four tokens, cut to ``longest``."""
    found = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:files]:
        for part in re.split(r"\n\s*\n", path.read_text(encoding="utf-8", errors="replace")):
            words = re.findall(r"\w+|[^\w\s]", part)
            ids = [1 + zlib.crc32(word.encode()) % (VOCABULARY - 1) for word in words][:longest]
            if len(ids) >= 4:
                found.append({"input_ids": ids, "labels": ids})
    random.Random(SEED).shuffle(found)
    return found


def pad(samples: list[Sample]) -> dict[str, torch.Tensor]:
    """A batch as long as its longest sample."""
    length = max(len(sample["input_ids"]) for sample in samples)

    def filled(values: list[int], fill: int) -> list[int]:
        return values + [fill] * (length - len(values))

    ids = [sample["input_ids"] for sample in samples]
    return {
        "input_ids": torch.tensor([filled(row, PADDING) for row in ids]),
        "labels": torch.tensor([filled(row, -100) for row in ids]),
        "attention_mask": torch.tensor([filled([1] * len(row), 0) for row in ids]),
    }


def build_model(hidden: int, length: int) -> nn.Module:
    """The same weights at every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=hidden * 3,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=length,
            pad_token_id=PADDING,
            use_cache=False,
        )
    )


def make_trainer(
    name: str, options: argparse.Namespace, samples: int, data: Any, out: str, done: Callable[[], None]
) -> Any:
    """The Trainer of one loop; ``samples`` are those of a step without packing."""
    import transformers

    import ds_trainer

    library: Any = transformers if name in (THEIRS, THEIRS_GROUPED) else ds_trainer

    class StepEnd(library.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            done()

    values: dict[str, Any] = dict(
        output_dir=f"{out}/{name}",
        max_steps=options.warmup + options.rounds * options.block,
        per_device_train_batch_size=samples,
        per_device_eval_batch_size=8,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=10**9,
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=True,
        seed=SEED,
        report_to="none",
    )
    if library is ds_trainer:
        values |= {"self_test": "never", "memory_check": False}
    if name == PACKED:
        values |= {"packing": True, "max_length": options.length, "per_device_train_batch_size": options.rows}
    if name in (GROUPED, THEIRS_GROUPED):
        values |= {"train_sampling_strategy": "group_by_length"}
    collate = {} if name == PACKED else {"data_collator": pad}
    trainer = library.Trainer(
        build_model(options.hidden, options.length), library.TrainingArguments(**values), train_dataset=data, **collate
    )
    trainer.callback_handler.add_callback(StepEnd())
    return trainer


def held_out_loss(model: nn.Module, data: list[Sample]) -> float:
    """Mean loss per token, each sample alone in a padded batch."""
    model.eval()
    total, tokens = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(data), 16):
            batch = pad(data[start : start + 16])
            count = int((batch["labels"][:, 1:] != -100).sum())
            total += float(model(**batch).loss) * count
            tokens += count
    return total / tokens


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all loops; their rates, ratios and losses."""
    data = paragraphs(options.files, options.length)
    held_out, data = data[:200], data[200:]
    mean = statistics.fmean(len(sample["input_ids"]) for sample in data)
    samples = max(1, round(options.rows * options.length / mean))
    draw = random.Random(SEED)
    schedule = [(name, options.warmup) for name in LOOPS]
    for _ in range(options.rounds):
        schedule += [(name, options.block) for name in draw.sample(LOOPS, len(LOOPS))]
    turns = Turns(schedule + [(name, 0) for name in LOOPS])
    tokens: dict[str, list[int]] = {name: [] for name in LOOPS}
    computed: dict[str, list[int]] = {name: [] for name in LOOPS}

    def watch(name: str, model: nn.Module) -> None:
        def count(module: nn.Module, args: Any, keywords: dict[str, Any]) -> None:
            if module.training:
                ids = keywords["input_ids"]
                tokens[name].append(int((ids != PADDING).sum()))
                computed[name].append(ids.numel())

        model.register_forward_pre_hook(count, with_kwargs=True)

    with tempfile.TemporaryDirectory() as out:
        trainers = {}
        for name in LOOPS:
            done = (lambda who: lambda: turns.step_done(who))(name)
            trainers[name] = make_trainer(name, options, samples, data, out, done)
            watch(name, trainers[name].model)
        threads = [threading.Thread(target=turns.run, args=(name, trainers[name].train)) for name in LOOPS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return {
        "samples": len(data),
        "mean_length": mean,
        "samples_a_step": samples,
        "rows_a_step": options.rows,
        "row_length": options.length,
        "load_average": os.getloadavg()[0],
        "packing": trainers[PACKED].get_train_dataloader().dataset.summary.metrics(),
        "loops": {name: _result(name, turns, tokens[name], computed[name], options) for name in LOOPS},
        "held_out_loss": {name: held_out_loss(trainers[name].model, held_out) for name in LOOPS},
        "trained_tokens": {name: sum(tokens[name]) for name in LOOPS},
    }


def _result(
    name: str, turns: Turns, tokens: list[int], computed: list[int], options: argparse.Namespace
) -> dict[str, Any]:
    """Tokens per second of each round, by CPU time and by wall-clock time, and the share of padding."""
    blocks = [steps for who, steps in turns.times if who == name][1:]
    rates: dict[str, list[float]] = {"wall": [], "cpu": []}
    seconds = dict.fromkeys(rates, 0.0)
    trained = 0
    for index, steps in enumerate(blocks):
        start = options.warmup + index * options.block
        count = sum(tokens[start : start + options.block])
        trained += count
        for clock in rates:
            spent = sum(getattr(step, clock) for step in steps)
            rates[clock].append(count / spent)
            seconds[clock] += spent
    rate = {clock: trained / spent for clock, spent in seconds.items()}
    return {**rates, "rate": rate, "padding": 1 - sum(tokens) / sum(computed)}


def ratio(result: dict[str, Any], other: str, clock: str) -> float:
    """The rate with packing over all rounds, divided by that of ``other``."""
    loops = result["loops"]
    return float(loops[PACKED]["rate"][clock] / loops[other]["rate"][clock])


def spread(result: dict[str, Any], other: str, clock: str) -> str:
    """The quartiles of this ratio within a round."""
    loops = result["loops"]
    ratios = [a / b for a, b in zip(loops[PACKED][clock], loops[other][clock], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    return f"{low:.2f} to {high:.2f}"


def table(result: dict[str, Any]) -> str:
    """The results as a table in Markdown."""
    lines = [
        "| loop | padding | tokens/s (CPU time) | packed is faster by (CPU) | quartiles of rounds | (wall clock) | "
        "held-out loss | tokens |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, loop in result["loops"].items():
        cpu, wall = ratio(result, name, "cpu"), ratio(result, name, "wall")
        lines.append(
            f"| {name} | {100 * loop['padding']:.1f} % | {loop['rate']['cpu']:,.0f} | "
            f"{cpu:.2f} x | {spread(result, name, 'cpu')} | {wall:.2f} x | "
            f"{result['held_out_loss'][name]:.4f} | {result['trained_tokens'][name]:,} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure, print the table, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--block", type=int, default=5, help="steps of a turn")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the first round")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--length", type=int, default=512, help="tokens of a packed row, and of the longest sample")
    parser.add_argument("--rows", type=int, default=4, help="packed rows of a step")
    parser.add_argument("--files", type=int, default=60, help="files of the standard library to read")
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(options)
    print(table(result))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
