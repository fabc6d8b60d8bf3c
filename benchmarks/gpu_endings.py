"""How runs end on this device: a rank is killed, a stop file is written, no compiler is there.

The small Llama of ``gpu_oracle.py`` on two ranks (on one GPU: its --share-gpu), each a process without a launcher that
would end the others.

* *killed*: rank 1 is killed in its third step. The other must notice, and end with an error.
* *stop file*: all ranks end with a checkpoint and exit code 77. Resumed, the run ends with the loss of plain PyTorch.
* *no compiler*: one rank, a loss in tiles, empty caches, a PATH without compilers. It must train as plain PyTorch does.

    python benchmarks/gpu_endings.py --share-gpu --out endings.json
    python benchmarks/gpu_endings.py --device cpu

The exit code is 1 if a run ends in another way.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpu_oracle import STEPS, TOLERANCE, Case, plain, train
from kept_results import Results

from ds_trainer import TrainerCallback
from ds_trainer.utils.devices import RANKS_SHARE_GPU
from ds_trainer.utils.exit_codes import STOPPED
from ds_trainer.utils.ranks import free_port

KILLED, STOP, NO_COMPILER = "killed", "stop file", "no compiler"
CASES = {
    KILLED: Case(KILLED, {"zero_stage": 3}, kind="resume", world=2),
    STOP: Case(STOP, {"zero_stage": 1}, kind="resume", world=2),
    NO_COMPILER: Case(NO_COMPILER, {"zero_stage": 1, "loss_chunk_tokens": 16, "self_test": "never"}),
}
AT_STEP = 3
NOTICED = 120.0  # seconds, from which the other rank is killed; without help, NCCL waits for half an hour
LIMIT = 300.0  # of a run; with a part of a busy machine a start takes two minutes


class Ending(TrainerCallback):
    """What happens at the end of a step."""

    def __init__(self, name: str) -> None:
        self._name = name

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == AT_STEP and self._name == KILLED and args.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if state.global_step == AT_STEP and self._name == STOP and args.process_index == 0:
            (Path(args.output_dir) / "STOP").touch()
        if state.global_step >= AT_STEP and self._name == STOP:
            time.sleep(2.0)  # the file is looked for once a second, and read a step later; these steps take less


class Ranks:
    """The processes of one run; their output is kept in files."""

    def __init__(self, case: Case, directory: Path, device: str, resume: bool, variables: dict[str, str]) -> None:
        place = {"WORLD_SIZE": str(case.world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        command = [sys.executable, __file__, "--device", device, "--serve", case.name, "--directory", str(directory)]
        self.logs = [directory / f"rank{rank}-{resume}.log" for rank in range(case.world)]
        self._processes = []
        for rank, log in enumerate(self.logs):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(case.world)}
            environment = {**os.environ, **place, **own, **variables}
            for name in ("CC", "CXX") if "PATH" in variables else ():
                environment.pop(name, None)
            with log.open("w") as stream:
                given = [*command, *(["--resume"] if resume else [])]
                self._processes.append(subprocess.Popen(given, env=environment, stdout=stream, stderr=stream))

    def ended(self, after_first: float = LIMIT) -> list[tuple[int | None, float]]:
        """Exit code and seconds of each. Those that are there at the limit, or ``after_first`` seconds after the first
        has ended, are killed, and have no code.
        """
        began = time.monotonic()
        deadline, found = began + LIMIT, dict[int, tuple[int | None, float]]()
        try:
            while len(found) < len(self._processes) and time.monotonic() < deadline:
                for rank, process in enumerate(self._processes):
                    if rank not in found and process.poll() is not None:
                        found[rank] = process.returncode, time.monotonic() - began
                        deadline = min(deadline, time.monotonic() + after_first)
                time.sleep(0.1)
        finally:  # also when this program is interrupted
            for process in self._processes:
                process.kill()
                process.wait()
        return [found.get(rank, (None, time.monotonic() - began)) for rank in range(len(self._processes))]


def serve(name: str, device: str, directory: Path, resume: bool) -> None:
    """One rank of a run; the last loss is kept."""
    callbacks = [] if resume else [Ending(name)]
    losses = train(CASES[name], device, str(directory / "run"), resume or None, callbacks=callbacks).losses
    (directory / "loss").write_text(str(losses[-1]))


def measure(name: str, device: str, share: bool, directory: Path) -> dict[str, Any]:
    """One case: how its ranks ended, and whether they should have."""
    variables = {RANKS_SHARE_GPU: "test"} if share else {}
    if name == NO_COMPILER:
        caches = {key: str(directory / key) for key in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
        variables |= {"PATH": str(directory), **caches}
    ranks = Ranks(CASES[name], directory, device, False, variables)
    ends = ranks.ended(NOTICED if name == KILLED else LIMIT)
    codes = [code for code, _ in ends]
    found: dict[str, Any] = {"codes": codes, "seconds": [round(seconds, 1) for _, seconds in ends]}
    if name == KILLED:
        found["noticed_after"] = ends[0][1] - ends[1][1]
        found["passed"] = codes[1] == -signal.SIGKILL and codes[0] not in (0, None)
    else:
        found["passed"] = codes == [STOPPED if name == STOP else 0] * len(codes)
        if name == STOP and found["passed"]:
            ranks = Ranks(CASES[name], directory, device, True, variables)
            found["resumed"] = [code for code, _ in ranks.ended()]
        if found["passed"] and (directory / "loss").exists():
            wanted = plain(range(STEPS)).losses[-1]
            found["difference"] = abs(float((directory / "loss").read_text()) - wanted) / wanted
        found["passed"] &= found.get("difference", 1.0) <= TOLERANCE["fp32"]
    said = ranks.logs[0].read_text(errors="replace").splitlines()
    found["warnings"] = [line[-600:] for line in said if "cannot compile" in line]
    if not found["passed"]:
        found["output"] = {log.name: log.read_text(errors="replace")[-4000:] for log in ranks.logs}
    return found


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--share-gpu", action="store_true", help="both ranks use one GPU")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no case after this time")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    for hidden in ("--serve", "--directory"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.device, Path(options.directory), options.resume)
        return 0
    results = Results(options.out, options.device, options.minutes)
    for name in options.cases:
        if results.out_of_time:
            break
        with tempfile.TemporaryDirectory() as directory:
            results.add({"name": name, **measure(name, options.device, options.share_gpu, Path(directory))})
        print(results.cases[-1], flush=True)
    return 0 if results.cases and all(case["passed"] for case in results.cases) else 1


if __name__ == "__main__":
    sys.exit(main())
