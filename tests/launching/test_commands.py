"""The choice of the launcher, its command line, and requests that are rejected."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path
from typing import Any

import pytest

from ds_trainer.launching import launch_plan
from ds_trainer.launching.commands import build
from ds_trainer.launching.launch_plan import plan_launch
from ds_trainer.launching.launch_request import LaunchRequest, Target, read_target
from ds_trainer.launching.rank import decode_args
from ds_trainer.utils.errors import ConfigError

SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_ON_NODE": "32"}


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with every launcher and one hostfile."""
    for name in ("pdsh", "mpirun", "srun"):
        (tmp_path / "bin" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(launch_plan, "DEEPSPEED_HOSTFILE", str(tmp_path / "job_hostfile"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")


def command(environment: dict[str, str], tmp_path: Path, target: Target | None = None, **options: Any) -> list[str]:
    request = LaunchRequest(target or Target("x.py", ("--n", "1")), **options)
    return build(plan_launch(request, environment), tmp_path / "job", {}, environment).argv


def chosen(environment: dict[str, str], **options: Any) -> tuple[str, int]:
    plan = plan_launch(LaunchRequest(Target("x.py"), **options), environment)
    return plan.launcher, plan.world_size


def test_the_environment_selects_the_launcher(tmp_path: Path) -> None:
    assert chosen({}) == ("deepspeed", 1)
    assert chosen({"CUDA_VISIBLE_DEVICES": "2,3"}) == ("deepspeed", 2)
    assert chosen({}, nproc_per_node=3) == ("deepspeed", 3)
    assert chosen(SLURM) == ("srun", 8)
    assert chosen(SLURM, nodes=1, nproc_per_node=3) == ("srun", 3)  # n1 is not this machine
    assert chosen({**SLURM, "SLURM_JOB_NODELIST": socket.gethostname()}) == ("deepspeed", 4)
    assert chosen({}, hostfile="hosts") == ("pdsh", 4)
    assert chosen(SLURM, hostfile="hosts") == ("pdsh", 4)
    (tmp_path / "job_hostfile").write_text("a slots=8\nb slots=8\n")  # the default location of DeepSpeed
    assert chosen({}) == ("pdsh", 16)
    assert chosen({}, hostfile="hosts", node_rank=1) == ("deepspeed", 4)


def test_a_batch_shell_is_not_a_rank_but_one_of_several_tasks_is() -> None:
    assert chosen({**SLURM, "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) == ("srun", 8)
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
    with pytest.raises(ConfigError, match="this process is already rank 1 of 2"):
        chosen({**SLURM, **step, "SLURM_STEP_NODELIST": "n[1-2]"})


@pytest.mark.parametrize(
    ("environment", "options", "problem"),
    [
        ({}, {"launcher": "srun"}, "not in a SLURM allocation"),
        ({}, {"launcher": "pdsh"}, "needs a --hostfile or a SLURM allocation"),
        ({}, {"nodes": 2}, "--nodes 2, but only these machines are available: localhost"),
        (SLURM, {"nodes": 3}, "--nodes 3, but only these machines are available: n1, n2 .SLURM_JOB_NODELIST"),
        ({}, {"hostfile": "hosts", "nproc_per_node": 3}, "--nproc-per-node 3, but hosts says a slots=2"),
        ({}, {"hostfile": "hosts", "launcher": "deepspeed"}, "starts one machine, but the job has a, b"),
        ({}, {"hostfile": "hosts", "launcher": "torchrun"}, "only inside a SLURM allocation"),
        (SLURM, {"hostfile": "hosts", "launcher": "srun"}, "remove --hostfile"),
        ({}, {"node_rank": 0}, "needs a --hostfile, or --nodes and --nproc-per-node"),
        ({}, {"node_rank": 2, "hostfile": "hosts"}, "there are 2 machines"),
        ({}, {"node_rank": 0, "nodes": 2, "nproc_per_node": 1}, "set --master-addr"),
        ({}, {"node_rank": 0, "hostfile": "hosts", "launcher": "pdsh"}, "remove --node-rank"),
        (
            {**SLURM, "SLURM_GPUS_ON_NODE": "", "SLURM_TASKS_PER_NODE": "2,1"},
            {},
            "the same number of ranks on every machine",
        ),
        ({"RANK": "1"}, {}, "but not WORLD_SIZE"),
    ],
)
def test_requests_that_do_not_fit_the_environment(
    environment: dict[str, str], options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        chosen(environment, **options)


def test_a_launcher_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="pdsh is not on PATH"):
        chosen({}, hostfile="hosts")


def test_srun_starts_every_rank_and_divides_the_cores(tmp_path: Path) -> None:
    argv = shlex.join(command(SLURM, tmp_path, launcher_args=("--label",)))
    assert argv.startswith("srun --nodes 2 --ntasks 8 --ntasks-per-node 4 ")
    assert "--kill-on-bad-exit=1" in argv and "--cpus-per-task 8 --label" in argv
    assert argv.endswith("-u -m ds_trainer.launching.rank x.py --n 1")
    assert "--overlap" in command({**SLURM, "SLURM_STEP_ID": "0"}, tmp_path)
    assert "--overcommit" in command({**SLURM, "SLURM_CPUS_ON_NODE": "2"}, tmp_path)


def test_torchrun_under_srun_starts_one_agent_per_node(tmp_path: Path) -> None:
    argv = shlex.join(command(SLURM, tmp_path, launcher="torchrun", master_port=2345))
    assert argv.startswith("srun --nodes 2 --ntasks 2 --ntasks-per-node 1 ")
    assert "--nnodes 2 --nproc-per-node 4" in argv and "--rdzv-endpoint n1:2345 --rdzv-id 7" in argv


def test_only_visible_gpus_are_used(tmp_path: Path) -> None:
    assert "localhost:2,3" in command({"CUDA_VISIBLE_DEVICES": "2,3"}, tmp_path)
    assert "localhost:2" in command({"CUDA_VISIBLE_DEVICES": "2,3"}, tmp_path, nproc_per_node=1)
    for hidden, ranks in (("GPU-1f,GPU-2e", 2), ("", 1), ("-1", 1)):
        assert chosen({"CUDA_VISIBLE_DEVICES": hidden}) == ("torchrun", ranks)


def test_machines_started_one_by_one_have_a_node_rank(tmp_path: Path) -> None:
    options: dict[str, Any] = {"nodes": 2, "nproc_per_node": 2, "master_addr": "first"}
    argv = shlex.join(command({}, tmp_path, node_rank=1, **options))
    assert "--no_ssh --node_rank 1 --master_addr first --master_port 29500" in argv
    argv = shlex.join(command({}, tmp_path, node_rank=1, launcher="torchrun", **options))
    assert "--nnodes 2 --nproc-per-node 2 " in argv and "--node-rank 1 --master-addr first --master-port 29500" in argv
    assert plan_launch(LaunchRequest(Target("x.py"), node_rank=1, **options), {}).ranks_started == range(2, 4)


def test_arguments_that_a_remote_shell_would_misread_are_encoded(tmp_path: Path) -> None:
    plain = command({}, tmp_path, hostfile="hosts")
    assert plain[-3:] == ["x.py", "--n", "1"]
    for argument in ("a b", "$HOME", "%n", "a;b", '"', "", "*"):
        argv = command({}, tmp_path, Target("x.py", (argument,)), hostfile="hosts")
        assert argv[-2] == "ds_trainer.launching.rank"
        assert decode_args(argv[-1:]) == ["x.py", argument]


def test_deepspeed_reads_a_hostfile_in_its_own_form(tmp_path: Path) -> None:
    Path("mpich").write_text("a:2\nb slots=4\n")
    for options, text in (({}, "a slots=2\nb slots=4\n"), ({"nproc_per_node": 1, "nodes": 1}, "a slots=1\n")):
        request = LaunchRequest(Target("x.py"), hostfile="mpich", launcher="pdsh", **options)
        built = build(plan_launch(request, {}, starts=False), tmp_path / str(len(options)), {}, {})
        hostfile = Path(built.argv[built.argv.index("--hostfile") + 1])
        assert built.files[hostfile] == text and not hostfile.exists()
        built.write_files()
        assert hostfile.read_text() == text


def test_a_plan_that_is_only_shown_needs_no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    request = LaunchRequest(Target("x.py"), hostfile="hosts", launcher="pdsh")
    with pytest.raises(ConfigError, match="pdsh is not on PATH"):
        plan_launch(request, {})
    assert plan_launch(request, {}, starts=False).launcher == "pdsh"


@pytest.mark.parametrize("name", ["a;touch x", "^/etc/passwd", "a b", "a\x1b[2J", "a,b", "$(id)", "-oProxyCommand=x"])
def test_an_address_that_a_shell_would_run_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a host name"):
        plan_launch(LaunchRequest(Target("x.py"), master_addr=name), {})


def test_slurm_launcher_gets_a_file_because_it_drops_module(tmp_path: Path) -> None:
    argv = command(SLURM, tmp_path, launcher="slurm")
    assert "--module" not in argv
    (file,) = [argument for argument in argv if argument.endswith("start_rank.py")]
    assert Path(file).is_file()


def test_openmpi_exports_by_name(tmp_path: Path) -> None:
    request = LaunchRequest(Target("x.py"), hostfile="hosts", launcher="openmpi", environment={"X": 'a,"b"'})
    built = build(plan_launch(request, {}), tmp_path / "job", {"DS_TRAINER_JOB_ID": "1"}, {})
    (option,) = [argument for argument in built.argv if argument.startswith("--launcher_args=")]
    assert "-x MASTER_ADDR -x MASTER_PORT -x DS_TRAINER_JOB_ID -x X" in option
    assert built.environment["X"] == 'a,"b"' and built.environment["MASTER_ADDR"] == "a"


def test_targets_may_be_recipes_modules_and_scripts() -> None:
    Path("r.yaml").touch()
    assert read_target("r.yaml", ["--a.b", "1"]).command() == ["-m", "ds_trainer", "train", "r.yaml", "--a.b", "1"]
    for path, problem in (("s.py", "does not exist"), ("3", "neither a recipe")):
        with pytest.raises(ConfigError, match=problem):
            read_target(path)
