"""Measures the cost of an evaluation, compared with ``transformers.Trainer``.

Both trainers evaluate the same model over the same data in one process. They take turns in a random order in each
round, so other load on the machine affects both. Before the measurement, their metrics are compared. The ratio is our
throughput divided by theirs: the median over the rounds of (their time / our time) for consecutive turns, in wall-clock
time and in CPU time of the process, which other load affects less. Padding is the fraction of computed tokens that are
padding.

    python benchmarks/evaluation.py --out benchmarks/results/evaluation.json    the table of docs/benchmarks.md
    python benchmarks/evaluation.py --quick                                     few rounds: does it run here?
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from turns import Moment

OURS, THEIRS = "ds_trainer", "transformers"
CLOCKS = ("wall", "cpu")
SEED, VOCABULARY, CLASSES = 0, 512, 5


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    name: str
    model: str
    metrics: bool
    """Whether predictions are kept and ``compute_metrics`` looks at them; else only the loss is computed."""
    by_length: bool = False
    hidden: int = 64
    samples: int = 128
    longest: int = 96
    batch: int = 8
    rounds: int = 20


CASES = [
    Case("classifier, predictions", "classifier", metrics=True),
    Case("causal LM, loss only", "language model", metrics=False),
    Case("causal LM, predictions", "language model", metrics=True),
    Case("classifier, predictions, by length", "classifier", metrics=True, by_length=True),
    Case("causal LM, loss only, by length", "language model", metrics=False, by_length=True),
]


def build_model(case: Case) -> nn.Module:
    """A small Llama with a head; the same weights at every call."""
    import transformers

    torch.manual_seed(SEED)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=case.hidden,
        intermediate_size=case.hidden * 3,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=case.longest,
        pad_token_id=0,
        num_labels=CLASSES,
        use_cache=False,
    )
    kind = transformers.LlamaForSequenceClassification if case.model == "classifier" else transformers.LlamaForCausalLM
    return kind(config)


class Tokens(torch.utils.data.Dataset[dict[str, Any]]):
    """Sequences of very different lengths, as text has them: most are short."""

    def __init__(self, case: Case) -> None:
        draw = np.random.default_rng(SEED)
        lengths = np.clip(draw.lognormal(3.0, 0.7, case.samples), 4, case.longest).astype(int)
        self.rows = []
        for index, length in enumerate(lengths):
            ids = draw.integers(1, VOCABULARY, length).tolist()
            self.rows.append({"input_ids": ids, "labels": index % CLASSES if case.model == "classifier" else ids})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch as wide as its longest row; the same function for both."""
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for place, row in enumerate(rows):
        length = len(row["input_ids"])
        ids[place, :length] = torch.tensor(row["input_ids"])
        mask[place, :length] = 1
        if isinstance(row["labels"], list):
            labels[place, :length] = ids[place, :length]
    if isinstance(rows[0]["labels"], int):
        labels = torch.tensor([row["labels"] for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def accuracy(found: Any) -> dict[str, float]:
    """Share of right answers. A prediction for position t is not shifted here: both do the same."""
    wanted = found.label_ids != -100
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids)[wanted].mean())}


def trainer_of(library: str, case: Case, data: Tokens, output_dir: str) -> Any:
    """The Trainer of ``library``; everything that is not given is its default."""
    module = __import__(library)
    args = module.TrainingArguments(
        output_dir=f"{output_dir}/{library}",
        per_device_eval_batch_size=case.batch,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        **({"train_sampling_strategy": "group_by_length"} if case.by_length else {}),
    )
    names = type("Names", (), {"model_input_names": ["input_ids"]})()
    return module.Trainer(
        build_model(case),
        args,
        data_collator=collate,
        eval_dataset=data,
        compute_metrics=accuracy if case.metrics else None,
        processing_class=names,
    )


def padding_of(trainer: Any) -> float:
    """Share of the tokens of an evaluation that are padding."""
    counts: list[tuple[int, int]] = []

    def count(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        counts.append((kwargs["attention_mask"].numel(), int(kwargs["attention_mask"].sum())))

    trainer.evaluate()  # the first one also measures what the loss is the mean of, in passes of its own
    hook = trainer.model.register_forward_pre_hook(count, with_kwargs=True)
    trainer.evaluate()
    hook.remove()
    computed, used = np.sum(counts, axis=0)
    return float(1 - used / computed)


def measure(case: Case) -> dict[str, Any]:
    """One case: check that both do the same work, then time them in turns."""
    data = Tokens(case)
    with tempfile.TemporaryDirectory() as directory:
        trainers = {library: trainer_of(library, case, data, directory) for library in (OURS, THEIRS)}
        for trainer in trainers.values():
            trainer.log = lambda *args, **kwargs: None  # printing is not what is measured
        padding = {library: padding_of(trainer) for library, trainer in trainers.items()}
        metrics = {library: trainer.evaluate() for library, trainer in trainers.items()}
        draw, times = random.Random(SEED), {library: [] for library in trainers}
        for _ in range(case.rounds):
            for library in draw.sample(list(trainers), len(trainers)):
                start = Moment.now()
                trainers[library].evaluate()
                times[library].append(Moment.now().since(start))
    key = "eval_accuracy" if case.metrics else "eval_loss"
    values = [metrics[library][key] for library in (OURS, THEIRS)]
    # Their mean loss weighs batches with samples, ours counts tokens: near, but not the same number.
    tolerance = 1e-9 if case.metrics else 0.05
    with torch.no_grad():
        batch = collate(data.rows[: case.batch])
        outputs = [trainers[library].model.eval()(**batch).logits for library in (OURS, THEIRS)]
    same = torch.allclose(*outputs, rtol=1e-5, atol=1e-6) and abs(values[0] - values[1]) <= tolerance * abs(values[1])
    result: dict[str, Any] = {
        **asdict(case),
        "check": {key: values, "passed": same},
        "padding": padding,
    }
    for clock in CLOCKS:
        own = {library: [getattr(moment, clock) for moment in moments] for library, moments in times.items()}
        ratios = sorted(theirs / ours for ours, theirs in zip(own[OURS], own[THEIRS], strict=True))
        spread = [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]]
        rate = {library: case.samples / statistics.median(seconds) for library, seconds in own.items()}
        result[clock] = {"samples_per_second": rate, "ratio": statistics.median(ratios), "quartiles": spread}
    return result


def table(results: list[dict[str, Any]]) -> str:
    """A line a case."""
    lines = [
        "| evaluation | ours, samples/s | transformers, samples/s | ratio, wall | CPU | padding, ours | theirs |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in results:
        rate, padding = one["wall"]["samples_per_second"], one["padding"]
        ratios = " | ".join(
            f"{one[clock]['ratio']:.2f} ({one[clock]['quartiles'][0]:.2f} to {one[clock]['quartiles'][1]:.2f})"
            for clock in CLOCKS
        )
        lines.append(
            f"| {one['name']} | {rate[OURS]:.0f} | {rate[THEIRS]:.0f} | {ratios} | {padding[OURS]:.0%} | "
            f"{padding[THEIRS]:.0%} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Parse the command line and run; the exit code is 1 where the trainers did not do the same work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds: to see it work, not to believe the numbers")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    cases = [replace(case, rounds=2, samples=32) for case in CASES] if options.quick else CASES
    load = os.getloadavg()[0]
    results: list[dict[str, Any]] = []
    for case in cases:
        results.append(measure(case))
        print(table(results[-1:]), flush=True)
    print("\n" + table(results))
    if options.out:
        packages = {name: version(name) for name in ("torch", "deepspeed", "transformers", "ds-trainer")}
        about = {"python": platform.python_version(), "cpu_cores": os.cpu_count(), "load_average": load, **packages}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"environment": about, "cases": results}, indent=2) + "\n", encoding="utf-8")
    return 0 if all(result["check"]["passed"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
