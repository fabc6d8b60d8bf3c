"""One of two ranks is killed during an export, a conversion, a save of the model or a push, under any parent.

It is named, what it wrote is whole or absent, its source is as it was, and the next start does the work."""

from __future__ import annotations

import ctypes
import functools
import os
import random
import re
import signal
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.checkpoint.converters.checkpoint_import import export_universal, import_checkpoint
from ds_trainer.checkpoint.export.checkpoint_export import export_checkpoint
from ds_trainer.checkpoint.export.inspection import checkpoint_problems
from ds_trainer.checkpoint.protocol.checkpoint_directory import list_checkpoints
from ds_trainer.training.hub.uploads import FOLDER
from tests.checkpoint.test_killed_conversions import OPERATIONS, digests
from tests.cluster.machines import Cluster
from tests.resilience.test_ends_by_parent import SAID, cluster, processes_of, under_launcher, under_slurm
from tests.support.hub_server import HubServer
from tests.support.models import PlainLanguageModel, RaggedTokens
from tests.support.pool import pool
from tests.training.hub.support import NAME
from tests.training.hub.test_killed_pushes import SAVED, check_whole, pushing

__all__ = ["cluster"]
pytestmark = pytest.mark.extended  # starts launchers, machines or scripts

HUB_OF_CLUSTER = "10.77.0.1"
CLONE_NEWNET = 0x40000000
SOURCES = {"export": "run/checkpoint-2", "universal": "run/checkpoint-2", "import": "universal/global_step2"}
RESULTS = {
    "export": "work/model",
    "universal": "work/global_step2",
    "import": "work/checkpoint-2",
    "save": "work/model",
}


def work(kind: str, folder: Path, at: int) -> int:
    """Train to step 2, then do the work; rank 0 kills itself at an operation on a file of it.

    Returns:
        How many operations there were.
    """
    args = TrainingArguments(
        str(folder / "run"), use_cpu=True, max_steps=2, save_steps=2, zero_stage=3, auto_resume=True, self_test="never",
        report_to="none", run_report=False, disable_tqdm=True, per_device_train_batch_size=4,
    )  # fmt: skip
    trainer = Trainer(PlainLanguageModel(), args, train_dataset=RaggedTokens(64))
    trainer.train()
    main, seen, source, to = trainer.is_world_process_zero(), 0, folder / SOURCES.get(kind, ""), folder / "work"
    if main and kind == "import" and not source.exists():
        export_universal(folder / "run" / "checkpoint-2", source.parent)
    working = main

    def count(event: str, arguments: Any) -> None:
        nonlocal seen
        if working and event in OPERATIONS and str(arguments[0]).startswith(str(to)):
            seen += 1
            if seen == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    if kind == "save":
        trainer.save_model(str(to / "model"))
    elif main:
        to.mkdir(exist_ok=True)
        acts: dict[str, Callable[[], Any]] = {
            "export": lambda: export_checkpoint(source, to / "model", 8_000),
            "universal": lambda: export_universal(source, to),
            "import": lambda: import_checkpoint(source, to),
        }
        if not (folder / RESULTS[kind]).exists():
            acts[kind]()
    working = False
    trainer.accelerator.wait_for_everyone()
    trainer.engine.close()
    return seen


def main(kind: str, folder: str) -> None:
    """What the ranks of a job run."""
    how, _, value = os.environ["TEST_END"].partition(" ")
    if kind == "push":
        pushing(value, folder, "all_checkpoints")
    else:
        work(kind, Path(folder), int(how))


def in_network_of(cluster: Cluster, make: Callable[[], Any]) -> Any:
    """What ``make`` gives in the network of the cluster's login node; only the thread that calls it moves there."""

    def moved() -> Any:
        with open(f"/proc/{cluster._first}/ns/net", "rb") as network:
            assert ctypes.CDLL(None, use_errno=True).setns(network.fileno(), CLONE_NEWNET) == 0
        return make()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(moved).result()


def rank_of(script: Path, rank: int) -> int | None:
    """The process of a rank, not what starts and watches it."""
    for number in processes_of(str(script)):
        try:
            words, variables = psutil.Process(number).cmdline(), psutil.Process(number).environ()
        except psutil.Error:
            continue
        if "python" in words[0] and str(script) in words[1:3] and variables.get("RANK") == str(rank):
            return number
    return None


@functools.cache
def whole(kind: str) -> tuple[int, dict[str, str]]:
    """Number of operations and files of the work that nobody kills."""
    with tempfile.TemporaryDirectory() as folder, HubServer() as hub:
        if kind == "push":
            pool(2).run(pushing, hub.url, folder, "all_checkpoints")
            return len(hub.requests), {}
        return pool(2).run(work, kind, Path(folder), 0)[0], digests(Path(folder) / RESULTS[kind])


def killed(parent: str, script: Path, kind: str, said: str, victim: int, machines: Cluster | None) -> None:
    """Run a job whose rank ``victim`` is killed, and look at its end."""
    code, output = run_job(parent, script, kind, said, machines)
    assert processes_of(str(script.parent.parent)) == []
    assert code == 128 + signal.SIGKILL if parent in ("launch", "slurm") else code != 0, output
    named = re.findall(SAID[parent], output, re.DOTALL)[:1]
    if parent == "deepspeed":  # whatever has ended, it names the last rank that it has started
        named = re.findall(r"rank (\d+)(?: on \S+|, which holds the rendezvous store,) is gone", output)[:1] or named
    assert named == [str(victim)], output


def run_job(parent: str, script: Path, kind: str, said: str, machines: Cluster | None) -> tuple[int, str]:
    script.parent.mkdir()
    job = script.parent.parent / "job"
    script.write_text(f"from tests.resilience.test_killed_work import main\nmain({kind!r}, {str(job)!r})\n")
    return under_launcher(parent, script, said) if machines is None else under_slurm(machines, script, said)


@pytest.mark.cases(8)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", [*RESULTS, "push"])
@pytest.mark.parametrize("parent", SAID)
def test_killed_work_is_whole_or_absent(
    parent: str, kind: str, seed: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    number, wanted = whole(kind)
    chance = random.Random(f"{parent} {kind} {seed}")
    machines = request.getfixturevalue("cluster") if parent == "slurm" else None
    folder, script = tmp_path / "job", tmp_path / "first" / "program.py"
    folder.mkdir()
    if kind == "push":
        check_pushes(parent, tmp_path, chance, number, seed % 2, machines)
        return
    killed(parent, script, kind, str(chance.randrange(1, number + 1)), 0, machines)
    final, source = folder / RESULTS[kind], folder / SOURCES.get(kind, "run/checkpoint-2")
    before = digests(source)
    if final.exists() and kind != "save":  # the manifest of an import has its time
        found = digests(final)
        assert found.keys() == wanted.keys() and (kind == "import" or found == wanted)
    for path in final.glob("*.safetensors"):
        load_file(path)
    assert checkpoint_problems(folder / "run" / "checkpoint-2") == []
    pool(2).run(work, kind, folder, 0)  # what the next start does, without another launcher
    assert digests(final).keys() == wanted.keys() and digests(source) == before
    # What another host has left is removed after a day; of an import, by the next training.
    assert kind == "import" or not [path for path in final.parent.glob(".*") if ".node1." not in path.name]


def check_pushes(
    parent: str, folder: Path, chance: random.Random, number: int, victim: int, machines: Cluster | None
) -> None:
    """The main process pushes, in the background of the training; it or the other rank is killed."""
    at, unanswered, seen, process = chance.randrange(6, number - 2), chance.random() < 0.5, 0, None
    script = folder / "first" / "program.py"

    def cut(request: str) -> bool:
        nonlocal seen, process
        seen += 1
        if seen < at or process is not None or (process := rank_of(script, victim)) is None:
            return False
        os.kill(process, signal.SIGKILL)
        return unanswered

    make = functools.partial(HubServer, HUB_OF_CLUSTER if machines else "127.0.0.1")
    with in_network_of(machines, make) if machines else make() as hub:
        hub.cut = cut
        killed(parent, script, "push", f"push {hub.url}", victim, machines)
        check_whole(hub)
        before = hub.commits[:]
        if machines:  # the pool is in another network
            assert run_job(parent, folder / "again" / "program.py", "push", f"push {hub.url}", machines)[0] == 0
        else:
            pool(2).run(pushing, hub.url, str(folder / "job"), "all_checkpoints")
        check_whole(hub)
        assert hub.commits[: len(before)] == before
        assert {path.partition("/")[0] for path in hub.files(NAME) if "/" in path} == set(SAVED)
    run = folder / "job" / "run"
    assert {path.name for path in list_checkpoints(run)} == set(SAVED)
    assert machines or not list(run.glob(f".{FOLDER}*"))
