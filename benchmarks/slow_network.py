"""Step times of two ranks behind a slow network, with reductions beside the backward pass and after it.

    python benchmarks/slow_network.py                           ZeRO 0, 1 and 2
    python benchmarks/slow_network.py --mbit 500 --turns 3      another network, more turns
    python benchmarks/slow_network.py --json FILE               also write every number

Each rank has a network of its own; a link between them is limited to ``--mbit`` in each direction by a token bucket.
The two ways train the same model in turns, in one run; each turn's time is the median of its steps. Needs root on
Linux, ``unshare``, ``ip`` and ``tc``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = "29517"
STEPS = 5  # of which the first two are not counted


def command(*words: str) -> None:
    """Run it; its error ends the benchmark."""
    subprocess.run(words, check=True)


def limit(device: str, address: str, mbit: int) -> None:
    """Give ``device`` its address and its rate."""
    command("ip", "addr", "add", f"{address}/24", "dev", device)
    command("ip", "link", "set", device, "up")
    command(
        "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", f"{mbit}mbit", "burst", "256k", "latency", "50ms"
    )


def start(rank: int, options: argparse.Namespace) -> subprocess.Popen[str]:
    """A rank in a network namespace that waits for its link."""
    values = {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": PORT,
        "GLOO_SOCKET_IFNAME": f"link{rank}",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    given = ["--mbit", str(options.mbit), "--turns", str(options.turns), "--layers", str(options.layers)]
    return subprocess.Popen(
        ["unshare", "--net", sys.executable, __file__, "--rank", str(rank), *given],
        env={**os.environ, **values},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The results of rank 0."""
    ranks = [start(rank, options) for rank in (0, 1)]
    try:
        for process in ranks:
            assert process.stdout is not None and process.stdout.readline() == "waits\n"
        first, second = (str(process.pid) for process in ranks)
        command("ip", "link", "add", "link0", "netns", first, "type", "veth", "peer", "name", "link1", "netns", second)
        for process in ranks:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        output, _ = ranks[0].communicate()
        if any(process.wait() for process in ranks):
            raise SystemExit("a rank failed")
    finally:
        for process in ranks:
            process.kill()
    found: list[dict[str, Any]] = json.loads(output.splitlines()[-1])
    return found


def rank_main(options: argparse.Namespace) -> None:
    """One rank: every way in turns; rank 0 prints the seconds as JSON."""
    print("waits", flush=True)
    sys.stdin.readline()
    command("ip", "link", "set", "lo", "up")
    limit(f"link{options.rank}", ADDRESSES[options.rank], options.mbit)
    results = []
    for stage in (0, 1, 2):
        times: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(options.turns):
            for overlaps in (True, False) if turn % 2 == 0 else (False, True):
                seconds, sent = step(stage, overlaps, options.layers)
                times[overlaps].append(seconds)
        results.append({"stage": stage, "MB": sent, "beside": times[True], "after": times[False]})
        print(f"ZeRO {stage}: {times}", file=sys.stderr, flush=True)
    if options.rank == 0:
        print(json.dumps(results), flush=True)


def sent_bytes() -> int:
    """What this rank has sent through its link."""
    lines = (line.split() for line in Path("/proc/self/net/dev").read_text().splitlines())
    return next(int(line[9]) for line in lines if line[0] == os.environ["GLOO_SOCKET_IFNAME"] + ":")


def step(stage: int, overlaps: bool, layers: int) -> tuple[float, float]:
    """Seconds of a step, and MB that this rank sends in it."""
    import torch
    import transformers

    from ds_trainer import Trainer, TrainerCallback, TrainingArguments

    sizes = dict(hidden_size=1024, intermediate_size=2816, num_attention_heads=16, num_key_value_heads=16)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=256, num_hidden_layers=layers, **sizes)
    model = transformers.LlamaForCausalLM(config)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 256, (64, 32)).tolist()]
    ends: list[tuple[float, int]] = []

    class Clock(TrainerCallback):
        """Reads the clock after each step."""

        def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            ends.append((time.perf_counter(), sent_bytes()))

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            deepspeed={"zero_optimization": {"stage": stage, "overlap_comm": overlaps}},
            max_steps=STEPS,
            optim="sgd",
            learning_rate=1e-2,
            per_device_train_batch_size=1,
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            run_report=False,
            disable_tqdm=True,
            self_test="never",
        )
        Trainer(model, arguments, train_dataset=rows, callbacks=[Clock()]).train()
    seconds, sent = (numbers[1:] for numbers in zip(*ends, strict=True))
    return (
        statistics.median(later - earlier for earlier, later in itertools.pairwise(seconds)),
        statistics.median(later - earlier for earlier, later in itertools.pairwise(sent)) / 1e6,
    )


def table(results: list[dict[str, Any]]) -> list[str]:
    """Seconds of a step with reductions after the backward pass and beside it: medians of turns, and their ratio."""
    rows = ["| ZeRO | sent by a rank | after it | beside it | ratio (quartiles) |", "|---|---|---|---|---|"]
    for row in results:
        ratios = sorted(beside / after for beside, after in zip(row["beside"], row["after"], strict=True))
        low, middle, high = (ratios[round(share * (len(ratios) - 1))] for share in (0.25, 0.5, 0.75))
        after, beside = (f"{statistics.median(row[way]):.2f} s" for way in ("after", "beside"))
        quartiles = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        rows.append(f"| {row['stage']} | {row['MB']:.0f} MB | {after} | {beside} | {quartiles} |")
    return rows


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4, help="12 million parameters each")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        return rank_main(options)
    results = run(options)
    print("\n".join(table(results)))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
