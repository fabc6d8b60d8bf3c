"""Compares three ways to read weights: each rank its own ranges, one rank for all, or each rank everything.

Each way loads the same files on the same ranks. The ways take turns in a random order in each round, and the files are
dropped from the page cache first. At the end every rank must hold the same elements in all ways.

    own ranges   each rank reads the elements that it holds (if it holds everything: a part, then the ranks gather)
    hand on      one rank reads every tensor and broadcasts it
    everything   each rank reads every tensor and keeps the elements that it holds

A rank holds its shards (ZeRO 3) or everything (ZeRO 0 to 2). There are two disks: the one of ``--directory``, and a
slow shared one, which is SIMULATED by a common rate limit for all ranks on every requested byte, as if each rank were
on a separate node without a shared page cache. Bytes from the device are those that the kernel counts for the ranks
(``/proc/self/io``) on the local disk, also if the slow disk is simulated on top of it.

    python benchmarks/loading.py --out benchmarks/results/loading.json
    python benchmarks/loading.py --quick
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import socket
import statistics
import tempfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kept_results import environment
from safetensors.torch import save_file
from torch import distributed, nn

from ds_trainer.checkpoint.loading.file_weights import FileWeights
from ds_trainer.checkpoint.loading.name_mapping import map_names
from ds_trainer.checkpoint.loading.range_reader import RangeReader
from ds_trainer.checkpoint.loading.stored_tensors import stored_tensors
from ds_trainer.parallel.shard_slices import ShardSlice

WAYS = ("own ranges", "hand on", "everything")
NEEDS = ("shards", "whole")
DISKS = ("local", "slow shared (simulated)")


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes:
        ranks: processes on this machine.
        tensor_bytes, tensors, files: of the model, in bf16.
        slow_rate: bytes a second of the simulated disk, for all ranks together.
        rounds: how often each way is timed.
    """

    ranks: int = 4
    tensor_bytes: int = 32 * 2**20
    tensors: int = 16
    files: int = 4
    slow_rate: float = 400e6
    rounds: int = 3


class SlowReader(RangeReader):
    """A disk that all ranks share and that gives so many bytes a second, simulated by waiting.

    Args:
        free_at: shared by the ranks: when the disk has served all that was asked so far.
        rate: bytes a second.
    """

    def __init__(self, free_at: Any, rate: float) -> None:
        super().__init__()
        self._free_at, self._rate = free_at, rate

    def fill_bytes(self, path: Path, begin: int, memory: torch.Tensor) -> None:
        super().fill_bytes(path, begin, memory)
        with self._free_at.get_lock():
            done = self._free_at.value = max(time.monotonic(), self._free_at.value) + memory.numel() / self._rate
        time.sleep(max(0.0, done - time.monotonic()))


def write_model(directory: Path, setting: Setting) -> int:
    """Files of random bf16 tensors; their bytes."""
    numel = setting.tensor_bytes // 2
    where = {}
    torch.manual_seed(0)
    for file in range(setting.files):
        names = [f"w{number}" for number in range(file, setting.tensors, setting.files)]
        name = f"model-{file}.safetensors"
        save_file({one: torch.randn(numel // 64, 64).to(torch.bfloat16) for one in names}, directory / name)
        where.update(dict.fromkeys(names, name))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    os.sync()
    return setting.tensors * (numel // 64) * 64 * 2


def build_model(setting: Setting) -> nn.Module:
    """The same tensors without elements."""
    model = nn.Module()
    for number in range(setting.tensors):
        shape = (setting.tensor_bytes // 2 // 64, 64)
        model.register_parameter(f"w{number}", nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta")))
    return model


def drop_pages(directory: Path) -> None:
    """Make the next read of the files come from the disk."""
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def device_bytes() -> int:
    """Bytes that the disk gave to this process so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def load(way: str, need: str, weights: FileWeights, model: nn.Module) -> list[torch.Tensor]:
    """Load the model in one of the ways; what this rank holds then."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    held = []
    for name, parameter in model.named_parameters():
        place = ShardSlice.whole(parameter.shape)
        share = place.part(rank, world)
        if way == "own ranges":
            part = torch.empty(len(share), dtype=parameter.dtype)
            weights.fill(name, share, part)
            if need == "whole":
                whole = torch.empty(len(place), dtype=parameter.dtype)
                distributed.all_gather(list(whole.chunk(world)), part)
                part = whole
        else:
            part = torch.empty(len(place), dtype=parameter.dtype)
            if way == "everything" or rank == 0:
                weights.fill(name, place, part)
            if way == "hand on":
                distributed.broadcast(part, 0)
            if need == "shards":
                part = part[share.start : share.stop].clone()
        held.append(part)
    return held


def run_rank(rank: int, port: int, directory: Path, setting: Setting, order: list[Any], free_at: Any, out: Any) -> None:
    """One process: every case of every round, with the others."""
    torch.set_num_threads(1)
    address = f"tcp://localhost:{port}"
    distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=setting.ranks)
    for way, need, disk in order:
        if rank == 0:
            drop_pages(directory)
        model = build_model(setting)
        reader = RangeReader() if disk == DISKS[0] else SlowReader(free_at, setting.slow_rate)
        stored = stored_tensors(directory)
        weights = FileWeights(directory, model, stored, map_names(model, stored, None), reader)
        before = device_bytes()
        distributed.barrier()
        began = time.perf_counter()
        held = load(way, need, weights, model)
        distributed.barrier()
        seconds = time.perf_counter() - began
        digest = 0
        for tensor in held:
            digest = zlib.crc32(tensor.view(torch.uint8).numpy(), digest)
        weights.close()
        out.put((rank, (way, need, disk), seconds, weights.bytes_read, device_bytes() - before, digest))
        distributed.barrier()
    distributed.destroy_process_group()


def measure(setting: Setting, directory: Path) -> dict[str, Any]:
    """All ways on both disks.

    Returns:
        for each case the median seconds, bytes that all ranks asked for and that the device gave, each as a multiple of
        the files; and whether all ways gave all ranks the same elements.
    """
    file_bytes = write_model(directory, setting)
    cases = [(way, need, disk) for disk in DISKS for need in NEEDS for way in WAYS]
    draw, order = random.Random(0), []
    for _ in range(setting.rounds):
        draw.shuffle(cases)
        order += cases
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        port = taken.getsockname()[1]
    context = multiprocessing.get_context("fork")
    out, free_at = context.Queue(), context.Value("d", 0.0)
    ranks = [
        context.Process(target=run_rank, args=(rank, port, directory, setting, order, free_at, out))
        for rank in range(setting.ranks)
    ]
    for process in ranks:
        process.start()
    said = [out.get(timeout=600) for _ in range(len(order) * setting.ranks)]
    for process in ranks:
        process.join()
    digests = {(rank, case[1]): set() for rank, case, *_ in said}
    for rank, case, _, _, _, digest in said:
        digests[rank, case[1]].add(digest)
    lines = []
    for case in sorted(set(order), key=lambda case: (DISKS.index(case[2]), NEEDS.index(case[1]), WAYS.index(case[0]))):
        mine = [one for one in said if one[1] == case]
        by_rank = [one for one in mine if one[0] == 0]
        lines.append(
            {
                "disk": case[2],
                "a rank holds": case[1],
                "way": case[0],
                "seconds": statistics.median(one[2] for one in by_rank),
                "requested": sum(one[3] for one in mine) / setting.rounds / file_bytes,
                "from the device": sum(one[4] for one in mine) / setting.rounds / file_bytes,
            }
        )
    return {"file_bytes": file_bytes, "same": all(len(one) == 1 for one in digests.values()), "cases": lines}


def table(result: dict[str, Any], setting: Setting) -> str:
    """The cases as Markdown."""
    lines = [
        f"{setting.ranks} ranks, {result['file_bytes'] / 1e9:.2f} GB; slow disk: {setting.slow_rate / 1e6:.0f} MB/s",
        "",
        "| disk | a rank holds | way | seconds | requested, x files | from the device, x files |",
        "|---|---|---|---|---|---|",
    ]
    for case in result["cases"]:
        names = f"{case['disk']} | {case['a rank holds']} | {case['way']}"
        numbers = f"{case['seconds']:.2f} | {case['requested']:.2f} | {case['from the device']:.2f}"
        lines.append(f"| {names} | {numbers} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--directory", type=Path, help="on the disk that is measured; a temporary one by default")
    parser.add_argument("--ranks", type=int, default=Setting.ranks)
    parser.add_argument("--quick", action="store_true", help="a small model, once: does it run here?")
    options = parser.parse_args()
    setting = Setting(ranks=options.ranks)
    if options.quick:
        setting = Setting(options.ranks, tensor_bytes=2**20, tensors=4, files=2, rounds=1)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        result = measure(setting, Path(directory))
    print(table(result, setting))
    if options.out is not None:
        about = {**environment("cpu"), "ranks": setting.ranks, "slow_rate": setting.slow_rate, "rounds": setting.rounds}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"environment": about, **result}, indent=2) + "\n", encoding="utf-8")
    if not result["same"]:
        print("The ways did not give the ranks the same weights: nothing was measured.")
    return int(not result["same"])


if __name__ == "__main__":
    raise SystemExit(main())
