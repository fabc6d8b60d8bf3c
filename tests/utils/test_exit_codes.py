"""The table of exit codes: what another start may cure, and the code with which a process ends."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ds_trainer.utils.exit_codes import FAULT, TABLE, code_of
from ds_trainer.utils.failures import PeerFailure

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "slurm.md"


def test_the_page_has_the_table() -> None:
    rows = [f"| {row.code} | {row.meaning} | {row.restart.value} |\n" for row in TABLE]
    assert "".join(rows) in PAGE.read_text(encoding="utf-8")


def following(cause: BaseException) -> BaseException:
    try:
        raise RuntimeError("my step failed") from cause
    except RuntimeError as error:
        return error


FAULTS = [
    dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp, unhandled system error"),
    dist.DistNetworkError("connection reset"),
    torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered", 1),
    RuntimeError("CUDA error: unspecified launch failure"),
    RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:1"),
    RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error."),
    OSError(errno.ESTALE, "Stale file handle"),
    PeerFailure("rank 3 failed", FAULT),
    following(dist.DistBackendError("NCCL error")),
]
ERRORS = [
    ValueError("a mistake"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"),
    torch.AcceleratorError("CUDA error: out of memory", 2),
    torch.AcceleratorError("CUDA error: device-side assert triggered", 710),
    RuntimeError("CUDA error: no kernel image is available for execution on the device"),
    FileNotFoundError(errno.ENOENT, "no such file"),
    PeerFailure("rank 3 failed with ValueError"),
    following(ValueError("a mistake")),
]


@pytest.mark.parametrize(("error", "code"), [*((error, 74) for error in FAULTS), *((error, 1) for error in ERRORS)])
def test_the_code_of_an_error(error: BaseException, code: int) -> None:
    assert code_of(error) == code


@pytest.mark.parametrize(
    ("raised", "code"), [("dist.DistBackendError('NCCL error')", 74), ("ValueError()", 1), ("SystemExit(77)", 77)]
)
def test_a_process_ends_with_the_code_of_its_error(raised: str, code: int) -> None:
    """After its traceback, and everything that is registered for the end."""
    program = f"""
import atexit, torch.distributed as dist
from ds_trainer.utils.failures import watch_peers
watch_peers(); watch_peers()
atexit.register(print, "at the end")
raise {raised}"""
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (completed.returncode, completed.stdout) == (code, "at the end\n"), completed.stderr
    assert completed.stderr.count("Traceback") == (code != 77)
