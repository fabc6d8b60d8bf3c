"""Resuming in another layout: our shards of whole tensors, compared with DeepSpeed's universal checkpoints.

For each pair of layouts, a run is saved in the first and resumed in the second, in both formats:

    ours       rank_*.safetensors of ds_trainer; any layout reads them
    universal  engine.save_checkpoint, then ds_to_universal in one process, then load_universal

with the same model, engine and ranks. Times are of the whole operation between barriers; the converted checkpoint
counts as a second copy on disk. ``difference`` is the largest difference of the three next losses from those of the
uninterrupted run. Neither format flushes to disk, to keep the disk's noise out.

    python benchmarks/checkpoint_formats.py --out benchmarks/results/checkpoint_formats.json
    python benchmarks/checkpoint_formats.py --quick
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

SEED, ROWS, LENGTH, VOCABULARY = 0, 4, 32, 512
PAIRS = {
    "ZeRO-1 x2 -> ZeRO-1 x1": ((2, 1), (1, 1)),
    "ZeRO-2 x2 -> ZeRO-3 x2": ((2, 2), (2, 3)),
    "ZeRO-3 x2 -> ZeRO-3 x1": ((2, 3), (1, 3)),
}


class Peak:
    """Measures the peak growth of this process's anonymous memory within the block, in bytes."""

    def __enter__(self) -> Peak:
        import psutil

        self._process, self._ended, self.bytes = psutil.Process(), threading.Event(), 0
        self._before = self._anonymous()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _anonymous(self) -> int:
        memory = self._process.memory_info()
        return int(memory.rss - memory.shared)  # without pages of mapped files, which the kernel may drop

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            self.bytes = max(self.bytes, self._anonymous() - self._before)

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def timed(act: Callable[[], Any]) -> dict[str, float]:
    """Seconds and peak memory of ``act``, the largest of all ranks."""
    torch.distributed.barrier()
    start = time.perf_counter()
    with Peak() as peak:
        act()
        torch.distributed.barrier()
    result = torch.tensor([time.perf_counter() - start, float(peak.bytes)], dtype=torch.float64)
    torch.distributed.all_reduce(result, op=torch.distributed.ReduceOp.MAX)
    return {"seconds": float(result[0]), "peak_bytes": float(result[1])}


def make_engine(stage: int, width: int, layers: int, universal: bool) -> Any:
    """A DeepSpeed engine over a Llama."""
    import deepspeed
    import transformers

    torch.manual_seed(SEED)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    model = transformers.LlamaForCausalLM(config)
    settings = {
        "train_micro_batch_size_per_gpu": ROWS // torch.distributed.get_world_size(),
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": universal},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def losses(engine: Any, first: int, last: int) -> list[float]:
    """Steps on random tokens, with the same global batches in every layout; returns the mean loss of each."""
    rank, world, values = torch.distributed.get_rank(), torch.distributed.get_world_size(), []
    for step in range(first, last):
        tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
        local = tokens[rank * ROWS // world : (rank + 1) * ROWS // world]
        loss = engine(input_ids=local, labels=local).loss
        engine.backward(loss)
        engine.step()
        whole = loss.detach().clone()
        torch.distributed.all_reduce(whole)
        values.append(float(whole) / world)
    return values


class EngineView:
    """The part of our engine around DeepSpeed's that saving and loading need."""

    def __init__(self, engine: Any) -> None:
        from ds_trainer.parallel.groups import parallel_groups
        from ds_trainer.parallel.layout import ParallelLayout

        self.deepspeed = engine
        self.groups = parallel_groups(ParallelLayout(torch.distributed.get_world_size()))


def save_ours(engine: Any, directory: Path) -> None:
    from ds_trainer.checkpoint.shards.engine_files import engine_state_files

    directory.mkdir(parents=True, exist_ok=True)
    for file in engine_state_files(EngineView(engine), torch.distributed.get_rank() == 0):  # type: ignore[arg-type]
        with (directory / file.name).open("wb") as stream:
            file.write(stream)


def load_ours(engine: Any, directory: Path) -> None:
    from ds_trainer.checkpoint.shards.engine_files import restore_engine_state

    restore_engine_state(EngineView(engine), directory, same_layout=False)  # type: ignore[arg-type]


def convert(directory: Path) -> None:
    """Runs DeepSpeed's converter on the first rank."""
    from ds_trainer.checkpoint.converters.conversion import to_universal

    if torch.distributed.get_rank() == 0:
        to_universal(directory / "global_step2", directory / "universal")


def first_half(stage: int, size: tuple[int, int], root: str) -> dict[str, Any]:
    """Two steps, both saves, the conversion, and three more steps."""
    engine = make_engine(stage, *size, universal=False)
    losses(engine, 0, 2)
    ours, plain = Path(root) / "ours", Path(root) / "plain"
    report: dict[str, Any] = {
        "save ours": timed(lambda: save_ours(engine, ours)),
        "save universal": timed(lambda: engine.save_checkpoint(str(plain))),
        "convert universal": timed(lambda: convert(plain)),
        "losses": losses(engine, 2, 5),
    }
    report["bytes ours"], report["bytes plain"] = bytes_of(ours), bytes_of(plain / "global_step2")
    report["bytes universal"] = bytes_of(plain / "universal")
    engine.destroy()
    return report


def second_half(format_name: str, stage: int, size: tuple[int, int], root: str) -> dict[str, Any]:
    """A new engine, the load, and three steps."""
    engine = make_engine(stage, *size, universal=format_name == "universal")
    if format_name == "ours":
        report: dict[str, Any] = {"load": timed(lambda: load_ours(engine, Path(root) / "ours"))}
    else:
        report = {"load": timed(lambda: engine.load_checkpoint(str(Path(root) / "plain"), tag="universal"))}
    report["losses"] = losses(engine, 2, 5)
    return report


def bytes_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _rank(
    rank: int, world: int, port: int, results_queue: Any, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_PORT=str(port))
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    from ds_trainer.engine.process_group import start_process_group

    torch.set_num_threads(1)
    start_process_group("cpu")
    try:
        result = function(*arguments)
    except Exception as error:  # a failure is a result
        result = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    if rank == 0:
        results_queue.put(result)


def on_ranks(world: int, function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """Returns the first rank's result. Ranks are new processes, so that memory is measured from a clean start."""
    from ds_trainer.utils.ranks import free_port

    context = multiprocessing.get_context("spawn")
    results_queue, port = context.Queue(), free_port()
    common = (world, port, results_queue, function, arguments)
    ranks = [context.Process(target=_rank, args=(rank, *common)) for rank in range(world)]
    for process in ranks:
        process.start()
    result: dict[str, Any] = results_queue.get(timeout=900)
    for process in ranks:
        process.join(timeout=30)
        if process.is_alive():
            process.kill()
    return result


def measure(pair: str, size: tuple[int, int]) -> dict[str, Any]:
    """One line of the table."""
    (world, stage), (next_world, next_stage) = PAIRS[pair]
    root = tempfile.mkdtemp(prefix="formats_")
    try:
        result = {"pair": pair, "first": on_ranks(world, first_half, stage, size, root)}
        for name in ("ours", "universal"):
            half = on_ranks(next_world, second_half, name, next_stage, size, root)
            if "losses" in half:
                pairs = zip(half["losses"], result["first"]["losses"], strict=True)
                half["difference"] = max(abs(a - b) for a, b in pairs)
            result[name] = half
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return result


def table(results: list[dict[str, Any]]) -> str:
    """The table of docs/explanation/checkpoints.md."""
    lines = [
        "| | save | convert | load | bytes written | peak memory of save, convert, load | next 3 losses differ by |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        first = result["first"]
        for name in ("ours", "universal"):
            half, save = result[name], first[f"save {name}"]
            steps = [save, *([first["convert universal"]] if name == "universal" else []), half.get("load")]
            written = first["bytes ours"] if name == "ours" else first["bytes plain"] + first["bytes universal"]
            cells = [
                f"{result['pair']}, {name}",
                f"{save['seconds']:.2f} s",
                f"{first['convert universal']['seconds']:.2f} s" if name == "universal" else "",
                f"{half['load']['seconds']:.2f} s" if "load" in half else "fails",
                f"{written / 1e6:.0f} MB",
                ", ".join(f"{step['peak_bytes'] / 1e6:.0f}" for step in steps if step) + " MB",
                f"{half['difference']:.1e}" if "difference" in half else half.get("failed", ""),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="a small model, one pair")
    options = parser.parse_args()
    size = (64, 2) if options.quick else (512, 8)
    pairs = list(PAIRS)[:1] if options.quick else list(PAIRS)
    results = [measure(pair, size) for pair in pairs]
    print(table(results))
    if options.out is not None:
        machine = {"cpus": os.cpu_count(), "load": os.getloadavg(), "python": platform.python_version()}
        machine.update({name: version(name) for name in ("torch", "deepspeed")})
        options.out.write_text(json.dumps({"machine": machine, "size": size, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
