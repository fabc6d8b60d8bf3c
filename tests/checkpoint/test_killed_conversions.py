"""SIGKILL at any file operation of an export or a conversion: the result is whole or absent, and the source intact."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_trainer.checkpoint.converters.checkpoint_import import export_universal, import_checkpoint
from ds_trainer.checkpoint.export.checkpoint_export import export_checkpoint
from ds_trainer.checkpoint.export.inspection import checkpoint_problems
from tests.checkpoint.converters.test_conversion import save_ours
from tests.support import plain_deepspeed as plain
from tests.support.pool import pool

OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}


def digests(directory: Path) -> dict[str, str]:
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def killed(act: Callable[[], Any], below: Path, at: int) -> bool:
    """Runs ``act`` in a forked process that kills itself at an operation on a file below a directory."""
    process = os.fork()
    if process == 0:
        seen = 0

        def count(event: str, arguments: Any) -> None:
            nonlocal seen
            if event in OPERATIONS and str(arguments[0]).startswith(str(below)):
                seen += 1
                if seen == at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        try:
            act()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(process, 0)[1])


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    pool(1).run(save_ours, str(folder / "ours"), 0)
    pool(1).run(plain.train_and_save, str(folder / "plain"), 0, 1)
    return {"ours": folder / "ours" / "checkpoint-3", "plain": folder / "plain"}


ACTS: dict[str, tuple[str, str, Callable[[Path, Path], Any]]] = {
    "export": ("ours", "model", lambda source, to: export_checkpoint(source, to / "model", 8_000)),
    "universal": ("ours", "global_step3", export_universal),
    "import": ("plain", "checkpoint-3", import_checkpoint),
}


@pytest.mark.parametrize("name", ACTS)
def test_a_killed_conversion_leaves_nothing_half_done(name: str, sources: dict[str, Path], tmp_path: Path) -> None:
    source, result, act = sources[ACTS[name][0]], ACTS[name][1], ACTS[name][2]
    before = digests(source)
    act(source, tmp_path / "whole")
    wanted = digests(tmp_path / "whole" / result).keys()
    kills = 0
    for at in range(1, 500, {"export": 4, "universal": 9}.get(name, 3)):
        to = tmp_path / str(at)
        to.mkdir()
        if not killed(lambda to=to: act(source, to), to, at):  # type: ignore[misc]
            break
        kills += 1
        final = to / result
        assert not final.exists() or digests(final).keys() == wanted
        assert digests(source) == before
        if not final.exists():
            act(source, to)
            assert digests(final).keys() == wanted
        if name != "import":  # a hidden checkpoint is removed by the next training in its directory
            assert not list(to.glob(".*partial"))
        if name == "import":
            assert checkpoint_problems(final) == []
    assert kills >= 3
