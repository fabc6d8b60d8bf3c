"""Where a process stands: ranks, devices, who logs and saves, and "main process first" on two real processes."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ds_trainer.arguments.enums import LogLevel
from ds_trainer.arguments.process_info import ParallelMode, ProcessInfo
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.ranks import free_port


@dataclass
class Args(ProcessInfo):
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 4
    warmup_steps: float = 0
    log_level: str = "passive"
    log_level_replica: str = "warning"
    log_on_each_node: bool = True
    save_on_each_node: bool = False
    use_cpu: bool = True
    ddp_timeout: int = 1800


def set_rank(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int, local_rank: int) -> None:
    """As a launcher would have it."""
    variables = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank, "MASTER_PORT": 29500}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher, unless the test sets one."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)


def test_alone() -> None:
    args = Args()
    assert (args.process_index, args.local_process_index, args.world_size) == (0, 0, 1)
    assert args.parallel_mode is ParallelMode.NOT_PARALLEL
    assert args.should_log and args.should_save


def test_under_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    set_rank(monkeypatch, rank=6, world_size=8, local_rank=2)
    args = Args()
    assert (args.process_index, args.local_process_index, args.world_size) == (6, 2, 8)
    assert args.parallel_mode is ParallelMode.DISTRIBUTED


def test_parallel_modes_are_those_of_transformers() -> None:
    from transformers.training_args import ParallelMode as Reference

    assert {mode.name: mode.value for mode in ParallelMode} == {mode.name: mode.value for mode in Reference}


@pytest.mark.parametrize("each_node", [True, False])
@pytest.mark.parametrize(("rank", "local_rank"), [(0, 0), (1, 1), (4, 0), (5, 1)])
def test_which_ranks_log_and_write(
    monkeypatch: pytest.MonkeyPatch, rank: int, local_rank: int, each_node: bool
) -> None:
    set_rank(monkeypatch, rank, 8, local_rank)
    expected = local_rank == 0 if each_node else rank == 0
    assert Args(log_on_each_node=each_node).should_log is expected
    assert Args(save_on_each_node=each_node).should_save is expected


def test_a_contradictory_environment_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match="WORLD_SIZE"):
        _ = Args().world_size


def test_devices_on_the_cpu() -> None:
    args = Args(use_cpu=True)
    assert (args.device_type, str(args.device), args.n_gpu) == ("cpu", "cpu", 0)
    assert args.place_model_on_device is False
    assert (args.train_batch_size, args.eval_batch_size) == (8, 4)


def test_devices_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process for each GPU, so a process has one however many there are."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    set_rank(monkeypatch, rank=11, world_size=16, local_rank=3)
    args = Args(use_cpu=False)
    assert (args.device_type, str(args.device), args.n_gpu) == ("cuda", "cuda:3", 1)
    assert (args.train_batch_size, args.eval_batch_size) == (8, 4)
    assert Args(use_cpu=True).n_gpu == 0


def test_timeout() -> None:
    assert Args(ddp_timeout=90).ddp_timeout_delta == timedelta(minutes=1, seconds=30)


@pytest.mark.parametrize(
    ("warmup", "total", "steps"), [(0, 100, 0), (7, 100, 7), (0.25, 100, 25), (0.1, 5, 1), (0.3, 7, 3), (1.0, 50, 1)]
)
def test_warmup_steps_as_in_transformers(warmup: float, total: int, steps: int) -> None:
    import transformers

    assert Args(warmup_steps=warmup).get_warmup_steps(total) == steps
    reference = transformers.TrainingArguments(use_cpu=True, warmup_steps=warmup)
    assert reference.get_warmup_steps(total) == steps


@pytest.mark.parametrize("level", [level.value for level in LogLevel if level is not LogLevel.PASSIVE])
def test_log_levels_as_in_transformers(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    from transformers.training_args import trainer_log_levels

    assert Args(log_level=level).get_process_log_level() == trainer_log_levels[level]
    assert Args(log_level=LogLevel(level)).get_process_log_level() == trainer_log_levels[level]
    assert Args(log_level_replica=level).get_process_log_level() == logging.getLogger("ds_trainer").getEffectiveLevel()
    set_rank(monkeypatch, rank=1, world_size=2, local_rank=1)
    assert Args(log_level_replica=level).get_process_log_level() == trainer_log_levels[level]


def test_passive_is_the_level_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("ds_trainer"), "level", 17)
    logging.getLogger("ds_trainer").manager._clear_cache()  # type: ignore[attr-defined]
    assert Args().get_process_log_level() == 17


def test_alone_main_process_first_does_nothing() -> None:
    import torch.distributed as dist

    with Args().main_process_first(desc="nothing"):
        assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="mine"), Args().main_process_first():
        raise RuntimeError("mine")


def test_a_group_of_another_size_is_rejected() -> None:
    """Processes started without a launcher's environment would all take themselves for the main one."""
    code = """
        import torch.distributed as dist
        from tests.arguments.test_process_info import Args
        from ds_trainer.utils.errors import ConfigError

        dist.init_process_group("fake", rank=1, world_size=2, store=dist.HashStore())
        try:
            with Args().main_process_first():
                raise SystemExit("entered")
        except ConfigError as error:
            assert "2 ranks" in str(error) and "says 1" in str(error), error
    """
    code = "from torch.testing._internal.distributed import fake_pg\n" + textwrap.dedent(code)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert found.returncode == 0, found.stdout + found.stderr


def test_importing_arguments_imports_no_torch() -> None:
    code = """
        import sys
        import ds_trainer.arguments.process_info, ds_trainer.arguments.compat.setters, ds_trainer.arguments.serialize
        import ds_trainer.arguments.compat.renamed_arguments
        from tests.arguments.test_process_info import Args
        args = Args()
        args.world_size, args.parallel_mode, args.should_log, args.train_batch_size, args.get_process_log_level()
        with args.main_process_first():
            pass
        loaded = {"torch", "deepspeed", "transformers", "accelerate"} & set(sys.modules)
        assert not loaded, loaded
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False, timeout=120
    )
    assert found.returncode == 0, found.stderr


# -- two processes ---------------------------------------------------------------------------------------------------


def observe(folder: Path) -> None:
    """What one of two ranks sees; started by :func:`two_ranks`, ends by writing ``<rank>.json``."""
    import time

    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    args = Args(ddp_timeout=77)
    seen: dict[str, Any] = {"group before": dist.is_initialized()}

    def first(name: str, local: bool, *, fail: bool = False) -> None:
        """Notes who had finished when this rank entered the block; the main process takes its time in it."""
        try:
            with args.main_process_first(local=local, desc=name):
                seen[name] = sorted(path.name for path in folder.glob(f"{name}-*"))
                if rank == 0:
                    time.sleep(0.5)
                (folder / f"{name}-{rank}").touch()
                if fail and rank == 0:
                    raise RuntimeError("the main process fails")
        except RuntimeError as error:
            seen[f"{name} raised"] = str(error)
        dist.barrier()

    first("one machine", local=True)
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    seen["group"] = [dist.get_backend(), dist.get_world_size(), backend.options._timeout.total_seconds()]
    first("failing", local=True, fail=True)
    os.environ["LOCAL_RANK"] = "0"  # from here on: two machines with one process each
    with args.main_process_first(local=True):  # both go first: they meet inside, by files, as barriers have no names
        (folder / f"inside-{rank}").touch()
        deadline = time.monotonic() + 60
        while len(list(folder.glob("inside-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        seen["two machines"] = len(list(folder.glob("inside-*")))
    first("shared files", local=False)
    os.environ["LOCAL_RANK"] = str(rank)

    from ds_trainer.engine.process_group import start_process_group, stop_process_group

    info = start_process_group("cpu")
    import deepspeed.comm

    total = torch.tensor([rank + 1.0])
    deepspeed.comm.all_reduce(total)
    seen["engine"] = [info.rank, info.world_size, deepspeed.comm.get_world_size(), total.item()]
    first("with an engine", local=True)
    stop_process_group()
    seen["group after"] = dist.is_initialized()
    (folder / f"{rank}.json").write_text(json.dumps(seen))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks has seen; started like ``torchrun`` starts them."""
    folder = tmp_path_factory.mktemp("places")
    code = f"import pathlib, tests.arguments.test_process_info as t; t.observe(pathlib.Path({str(folder)!r}))"
    port = str(free_port())
    ranks = []
    for rank in range(2):
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", code],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=180)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for process, output in zip(ranks, outputs, strict=True):
        assert process.returncode == 0, output
        assert "destroy_process_group() was not called" not in output, output
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_the_group_is_started_when_there_is_none(two_ranks: list[dict[str, Any]]) -> None:
    for seen in two_ranks:
        assert seen["group before"] is False
        assert seen["group"] == ["gloo", 2, 77.0]


def test_the_others_wait_for_the_main_process(two_ranks: list[dict[str, Any]]) -> None:
    assert [seen["one machine"] for seen in two_ranks] == [[], ["one machine-0"]]


def test_a_failing_main_process_releases_the_others(two_ranks: list[dict[str, Any]]) -> None:
    assert [seen["failing"] for seen in two_ranks] == [[], ["failing-0"]]
    assert [seen.get("failing raised") for seen in two_ranks] == ["the main process fails", None]


def test_each_machine_has_a_main_process_unless_files_are_shared(two_ranks: list[dict[str, Any]]) -> None:
    assert [seen["two machines"] for seen in two_ranks] == [2, 2]
    assert [seen["shared files"] for seen in two_ranks] == [[], ["shared files-0"]]


def test_the_engine_takes_over_the_group(two_ranks: list[dict[str, Any]]) -> None:
    assert [seen["engine"] for seen in two_ranks] == [[0, 2, 2, 3.0], [1, 2, 2, 3.0]]
    assert [seen["with an engine"] for seen in two_ranks] == [[], ["with an engine-0"]]
    assert [seen["group after"] for seen in two_ranks] == [False, False]
