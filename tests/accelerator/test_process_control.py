"""Where a process stands, what only one does, and accelerate's own state beside ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accelerator.support import accelerator
from tests.support.pool import pool


def process_info() -> dict[str, Any]:
    ours = accelerator()
    messages: list[str] = []
    for name, decorate in {
        "main": ours.on_main_process,
        "local main": ours.on_local_main_process,
        "last": ours.on_last_process,
        "process 1": ours.on_process(process_index=1),
        "local 1": ours.on_local_process(local_process_index=1),
    }.items():
        decorate(lambda name=name: messages.append(name))()
    with ours.split_between_processes(list("abc")) as split:
        elements = list(split)
    mapping = {"a": [1, 2, 3]}
    with ours.split_between_processes(mapping, apply_padding=True) as split:
        padded = split["a"]
    return {
        "index": (ours.process_index, ours.local_process_index, ours.num_processes, ours.use_distributed),
        "flags": (ours.is_main_process, ours.is_local_main_process, ours.is_last_process),
        "device": ours.device,
        "said": messages,
        "parts": elements,
        "padded": padded,
        "untouched": mapping == {"a": [1, 2, 3]},
    }


def test_process_info_of_one_process() -> None:
    assert pool(1).run(process_info) == [
        {
            "index": (0, 0, 1, False),
            "flags": (True, True, True),
            "device": torch.device("cpu"),
            "said": ["main", "local main", "last"],
            "parts": ["a", "b", "c"],
            "padded": [1, 2, 3],
            "untouched": True,
        }
    ]


def test_process_info_of_two_processes() -> None:
    first, second = pool(2).run(process_info)
    assert first["index"] == (0, 0, 2, True) and second["index"] == (1, 1, 2, True)
    assert first["flags"] == (True, True, False) and second["flags"] == (False, False, True)
    assert first["said"] == ["main", "local main"] and second["said"] == ["last", "process 1", "local 1"]
    assert first["parts"] == ["a", "b"] and second["parts"] == ["c"]
    assert first["padded"] == [1, 2] and second["padded"] == [3, 3]
    assert first["untouched"] and second["untouched"]


def one_after_the_other(directory: str, method: str) -> bool:
    """The first process writes slowly; the other one must find the file."""
    import time

    ours = accelerator()
    file = Path(directory) / method
    with getattr(ours, method)():
        if ours.is_main_process:
            time.sleep(0.3)
            file.write_text("written")
        found = file.exists()
    ours.wait_for_everyone()
    return found


@pytest.mark.parametrize("method", ["main_process_first", "local_main_process_first"])
def test_the_main_process_goes_first(tmp_path: Path, method: str) -> None:
    assert pool(2).run(one_after_the_other, str(tmp_path), method) == [True, True]


def failing_first() -> str:
    ours = accelerator()
    try:
        with ours.main_process_first():
            if ours.is_main_process:
                raise ValueError("broken")
    except ValueError as error:
        return str(error)
    return "entered"


def test_a_failing_main_process_does_not_block_the_others() -> None:
    assert pool(2).run(failing_first) == ["broken", "entered"]


def test_print_writes_once_per_machine(capsys: pytest.CaptureFixture[str]) -> None:
    accelerator().print("hello", end="!")
    assert capsys.readouterr().out == "hello!"


# -- beside accelerate's own state ----------------------------------------------------------------------------------

_TWO_RANKS = """
import os, sys, multiprocessing
from ds_trainer.utils.ranks import free_port

def rank(index, port, how):
    os.environ.update(RANK=str(index), LOCAL_RANK=str(index), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    os.environ.pop("OMP_NUM_THREADS", None)
    import torch
    torch.set_num_threads(1)
    from tests.accelerator.support import accelerator
    if how == "before":
        from accelerate import PartialState
        print(f"num_processes={PartialState().num_processes}\\n", end="", flush=True)
    ours = accelerator()
    import torch.distributed as dist
    assert dist.is_initialized() == (how == "before")  # PartialState starts a group, and says that it is alone
    try:
        print(f"{ours.gather(torch.tensor([index])).tolist()}\\n", end="", flush=True)
    except ValueError as error:
        print(f"{error}\\n", end="", flush=True)
        return
    from accelerate import Accelerator
    from accelerate.logging import get_logger
    from accelerate.utils import gather_object
    theirs = Accelerator()
    get_logger("x").warning("no state would be an error")
    assert theirs.num_processes == 2 and theirs.gather(torch.tensor([index])).tolist() == [0, 1]
    assert gather_object([index]) == [0, 1] == ours.gather_for_metrics([index])
    if how == "after":  # a state that a script creates sets both
        assert torch.get_num_threads() == 1 and "LOCAL_WORLD_SIZE" not in os.environ

if __name__ == "__main__":
    port = free_port()
    ranks = [multiprocessing.get_context("fork").Process(target=rank, args=(i, port, sys.argv[1])) for i in (0, 1)]
    for process in ranks: process.start()
    for process in ranks: process.join()
    sys.exit(max(process.exitcode for process in ranks))
"""


def _two_fresh_ranks(tmp_path: Path, how: str) -> list[str]:
    script = tmp_path / "script.py"
    script.write_text(_TWO_RANKS)
    root = Path(__file__).parents[2]
    completed = subprocess.run(
        [sys.executable, str(script), how], capture_output=True, text=True, timeout=120, cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)}
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    return completed.stdout.splitlines()


def test_the_first_gather_starts_the_process_group_for_accelerate_too(tmp_path: Path) -> None:
    assert _two_fresh_ranks(tmp_path, "after") == ["[0, 1]", "[0, 1]"]


def test_a_state_with_another_number_of_processes_is_rejected(tmp_path: Path) -> None:
    lines = _two_fresh_ranks(tmp_path, "before")
    assert len(lines) == 4 and len(set(lines)) == 2
    if "num_processes=2" in lines:  # accelerate 1.12 uses CPUs where it finds no GPU
        assert "[0, 1]" in lines
    else:
        error = next(line for line in lines if "ranks" in line)
        assert "num_processes=1, but the group has 2 ranks" in error and "cpu=True" in error
