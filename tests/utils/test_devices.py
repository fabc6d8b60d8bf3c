"""Each rank has its own GPU under every launcher; otherwise there is an error on all ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ds_trainer.utils.devices import check_distinct_devices, device_index
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.ranks import RankInfo, free_port, known_local_size, resolve_ranks
from tests.support.pool import pool

ROOT = Path(__file__).parents[2]


def srun(rank: int, ranks: int = 16, each: int = 8) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(ranks),
        "SLURM_LOCALID": str(rank % each),
        "SLURM_NODEID": str(rank // each),
        "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{ranks // each})",
        "SLURM_STEP_NODELIST": "localhost",
    }


def mpirun(rank: int, ranks: int = 8, each: int = 8) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(ranks),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % each),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(each),
        "MASTER_ADDR": "127.0.0.1",
    }


def torchrun(rank: int, ranks: int = 16, each: int = 8) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank % each),
        "LOCAL_WORLD_SIZE": str(each),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "x",
    }


@pytest.mark.parametrize("launcher", [srun, mpirun, torchrun])
def test_the_local_rank_selects_the_gpu_unless_one_is_visible(launcher: Any) -> None:
    for rank in range(8):
        environment = launcher(rank)
        info = resolve_ranks(environment)
        assert device_index(info, 8, environment) == rank % 8
        assert device_index(info, 1, environment) == 0


@pytest.mark.parametrize("launcher", [srun, mpirun, torchrun])
def test_more_ranks_than_gpus_are_an_error_on_all_ranks(launcher: Any) -> None:
    """Including those that have a GPU, which would wait for the others."""
    for rank in range(8):
        environment = {**launcher(rank), "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
        info = resolve_ranks(environment)
        with pytest.raises(ConfigError) as refused:
            device_index(info, 4, environment)
        for message in (f"launcher: {info.launcher}", "8 ranks", "sees 4 GPUs", "CUDA_VISIBLE_DEVICES=0,1,2,3"):
            assert message in str(refused.value)


def test_without_a_launcher_only_the_local_rank_is_known() -> None:
    environment = {name: value for name, value in torchrun(5).items() if name != "LOCAL_WORLD_SIZE"}
    with pytest.raises(ConfigError, match="at least 6 ranks"):
        device_index(resolve_ranks(environment), 4, environment)
    assert device_index(resolve_ranks({**environment, "LOCAL_RANK": "3"}), 4, environment) == 3


@pytest.mark.parametrize(
    ("counts", "node", "expected"), [("8(x2)", "1", 8), ("4,2(x2),1", "0", 4), ("4,2(x2),1", "2", 2), ("4", "3", None)]
)
def test_the_number_of_local_ranks_from_slurm(counts: str, node: str, expected: int | None) -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": counts, "SLURM_NODEID": node}
    assert known_local_size(step) == expected


def test_the_local_rank_survives_the_export_of_the_gpu_index() -> None:
    info = resolve_ranks(srun(11))
    bound = {**srun(11), **info.environment(0)}
    assert bound["LOCAL_RANK"] == "0"
    again = resolve_ranks(bound)
    assert (again.rank, again.world_size, again.local_rank) == (11, 16, 3)
    child = {name: value for name, value in bound.items() if not name.startswith("SLURM")}
    assert resolve_ranks({**child, "RANK": "0", "WORLD_SIZE": "1"}).local_rank == 0, "a job of its own that inherits it"
    assert info.environment() == info.environment(3), "and nothing more where it is the index"
    assert "DS_TRAINER_LOCAL_RANK" not in info.environment()


# -- in processes that take themselves for ranks with GPUs -------------------------------------------------------------

PROCESS = """
    import json, os, sys
    import torch

    visible, chosen = int(sys.argv[1]), []
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: visible

    def set_device(device):
        index = torch.device(device).index if not isinstance(device, int) else device
        assert 0 <= index < visible, f"invalid device ordinal {index}"
        chosen.append(index)

    torch.cuda.set_device = set_device
    from ds_trainer import ConfigError, TrainingArguments
    from ds_trainer.utils.ranks import resolve_ranks
    from ds_trainer.utils.torch_group import prepare_process

    try:
        args = TrainingArguments("out", report_to=[])
        before = [str(args.device), args.local_process_index, args.process_index, args.should_log]
        prepare_process(resolve_ranks(os.environ), args.device_type)
        after = [str(args.device), args.local_process_index, args.process_index, args.should_log]
        from deepspeed.runtime.engine import DeepSpeedEngine
        engine = object.__new__(DeepSpeedEngine)
        engine._configure_with_arguments(None, None)  # asserts that MPI says the same
        index = os.environ["LOCAL_RANK"]
        nccl = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
        found = {"before": before, "after": after, "chosen": chosen, "nccl": nccl}
        print(json.dumps({**found, "deepspeed": [engine.local_rank, index]}))
    except ConfigError as error:
        print(json.dumps({"refused": str(error), "chosen": chosen}))
"""


def process(variables: dict[str, str], visible: int) -> dict[str, Any]:
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    environment = {**kept, **variables, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_PORT": "29500"}
    command = [sys.executable, "-c", textwrap.dedent(PROCESS), str(visible)]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert completed.returncode == 0, completed.stderr
    return dict(json.loads(completed.stdout.splitlines()[-1]))


@pytest.mark.extended
@pytest.mark.cases(1)
@pytest.mark.parametrize("launcher", [srun, mpirun, torchrun])
@pytest.mark.parametrize(("visible", "index"), [(1, 0), (8, 3)])
def test_a_rank_selects_its_gpu_and_keeps_its_local_rank(launcher: Any, visible: int, index: int) -> None:
    place = launcher(3)
    found = process(place, visible)
    stands = [f"cuda:{index}", 3, 3, False]
    assert found["before"] == found["after"] == stands, "local main process is the first of the machine, not of the GPU"
    assert found["chosen"] == [index]
    assert found["deepspeed"] == [index, str(index)]


@pytest.mark.cases(1)
@pytest.mark.parametrize("launcher", [srun, mpirun, torchrun])
def test_too_few_gpus_are_an_error_before_anything_changes(launcher: Any) -> None:
    found = process(launcher(0), 2)
    assert "sees 2 GPUs" in found["refused"] and found["chosen"] == []


# -- two ranks on one GPU ----------------------------------------------------------------------------------------------


class Counting:
    """A store that counts its operations."""

    def __init__(self, port: int) -> None:
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        self.calls += 1
        return getattr(self.store, name)


def checked(uuids: list[str]) -> tuple[list[str | None], list[int]]:
    """The error of each rank, and its number of store operations."""
    port = free_port()
    server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    stores = [Counting(port) for _ in uuids]

    def rank(number: int) -> str | None:
        info = RankInfo(number, len(uuids), number % 8, "127.0.0.1", port, "srun")
        try:
            check_distinct_devices(stores[number], info, uuids[number], timedelta(seconds=20))
        except ConfigError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(uuids)) as threads:
        said = list(threads.map(rank, range(len(uuids))))
    del server
    return said, [store.calls for store in stores]


@pytest.mark.cases(2)
@pytest.mark.parametrize("ranks", [2, 8, 32])
def test_ranks_with_distinct_gpus_pass(ranks: int) -> None:
    said, calls = checked([f"GPU-{rank}" for rank in range(ranks)])
    assert said == [None] * ranks
    assert max(calls) <= 5, "whatever the number of ranks"


@pytest.mark.parametrize("ranks", [2, 16])
def test_two_ranks_on_one_gpu_are_an_error_on_all_ranks(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    said, calls = checked(["GPU-0", *(f"GPU-{rank}" for rank in range(1, ranks - 1)), "GPU-0"])
    assert all("have the same GPU (GPU-0)" in str(one) for one in said)
    assert all("CUDA_VISIBLE_DEVICES=0" in str(one) and "launcher: srun" in str(one) for one in said)
    assert max(calls) <= 7


def test_ranks_share_a_gpu_in_tests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert process(torchrun(3, 4, 4), 1)["nccl"] == {}
    monkeypatch.setenv("DS_TRAINER_RANKS_SHARE_GPU", "test")
    said, _ = checked(["GPU-0", "GPU-0", "GPU-1", "GPU-1"])
    assert said == [None] * 4
    environment = {**torchrun(3, 4, 4), "DS_TRAINER_RANKS_SHARE_GPU": "test"}
    assert [device_index(resolve_ranks(environment), visible, environment) for visible in (1, 2, 4)] == [0, 1, 3]
    found = process(environment, 1)
    assert found["nccl"] == {"NCCL_HOSTID": "ds_trainer-rank-3", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    refused = process({**environment, "DS_TRAINER_RANKS_SHARE_GPU": "1"}, 2)["refused"]
    assert "DS_TRAINER_RANKS_SHARE_GPU='1'" in refused and "unset it" in refused


def local_rank_of_accelerate() -> tuple[int, int]:
    """accelerate's local rank if LOCAL_RANK is the index of the only visible GPU."""
    from accelerate.state import PartialState

    from ds_trainer.utils.accelerate_state import attach_accelerate

    info, before = resolve_ranks(os.environ), dict(os.environ)
    kept = PartialState._shared_state.copy()
    PartialState._reset_state()
    try:
        os.environ.update(info.environment(0))
        return attach_accelerate("cpu").local_process_index, int(os.environ["LOCAL_RANK"])
    finally:
        os.environ.clear()
        os.environ.update(before)
        PartialState._shared_state.update(kept)


def test_accelerate_has_the_local_rank() -> None:
    assert pool(2).run(local_rank_of_accelerate) == [(0, 0), (1, 0)]


START = """
    import json, os, sys
    from types import SimpleNamespace
    import torch, torch.distributed as dist

    torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
    torch.cuda.set_device = lambda device: None
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=sys.argv[1])
    made = {}
    dist.init_process_group = lambda backend, **place: made.update(place, backend=backend)
    from datetime import timedelta
    from ds_trainer import ConfigError, TrainingArguments
    from ds_trainer.utils.ranks import resolve_ranks
    from ds_trainer.utils.torch_group import start_torch_group

    try:
        start_torch_group(resolve_ranks(os.environ), "cuda", timedelta(seconds=60))
        store = made.pop("store")
        store.add("here", 1)
        while int(store.get("here")) < 2:
            pass
        print(json.dumps({name: str(value) for name, value in made.items()}))
    except ConfigError as error:
        print(json.dumps({"refused": str(error)}))
"""


def started(uuids: list[str]) -> list[dict[str, str]]:
    """The arguments to torch of two srun tasks with one visible GPU each."""
    ranks = []
    for rank, uuid in enumerate(uuids):
        step = {**srun(rank, 2, 2), "MASTER_PORT": "", "SLURM_JOB_ID": str(os.getpid()), "PYTHONPATH": str(ROOT)}
        kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        command = [sys.executable, "-c", textwrap.dedent(START), uuid]
        ranks.append(subprocess.Popen(command, env={**kept, **step}, stdout=subprocess.PIPE, text=True))
    try:
        return [dict(json.loads(rank.communicate(timeout=120)[0].splitlines()[-1])) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.extended
def test_the_process_group_is_bound_to_the_only_visible_gpu() -> None:
    for rank, made in enumerate(started(["GPU-0", "GPU-1"])):
        wanted = {"backend": "nccl", "device_id": "cuda:0", "rank": str(rank), "world_size": "2", "timeout": "0:01:00"}
        assert made == wanted


def test_a_gpu_of_two_tasks_is_an_error_before_nccl_starts() -> None:
    first, second = started(["GPU-0", "GPU-0"])
    assert first == second
    assert "Two ranks of" in first["refused"] and "--gpus-per-task=1" in first["refused"]
