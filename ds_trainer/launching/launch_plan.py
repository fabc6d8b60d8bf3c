"""Selects the launcher and the machines of a job, from the request and the environment."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ds_trainer.launching.hosts import Host, host_problem, read_hostfile, slurm_hosts
from ds_trainer.launching.launch_request import LaunchRequest
from ds_trainer.utils.errors import ConfigError, listed
from ds_trainer.utils.ranks import resolve_ranks
from ds_trainer.utils.units import counted, whole_number

DEEPSPEED_HOSTFILE = "/job/hostfile"  # where DeepSpeed looks for one by default
_SSH = ("pdsh", "openmpi")
_IN_SLURM = ("slurm", "srun")
_PROGRAMS = {"pdsh": "pdsh", "openmpi": "mpirun", "slurm": "srun", "srun": "srun"}


@dataclass(frozen=True)
class LaunchPlan:
    """The launcher (never ``auto``), the machines, what is started on them, and the machines to do without."""

    request: LaunchRequest
    launcher: str
    hosts: tuple[Host, ...]
    in_slurm: bool
    excluded: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Ranks on all machines."""
        return sum(host.slots for host in self.hosts)

    @property
    def is_local(self) -> bool:
        """Whether the launcher starts ranks on this machine only."""
        return self.launcher in ("deepspeed", "torchrun") and (
            len(self.hosts) == 1 or self.request.node_rank is not None
        )

    def host_of(self, rank: int) -> Host:
        """The machine of a rank."""
        return [host for host in self.hosts for _ in range(host.slots)][rank]

    @property
    def ranks_started(self) -> range:
        """The ranks that this launcher starts: all of them, or with ``node_rank`` those of this machine."""
        if self.request.node_rank is None:
            return range(self.world_size)
        first = sum(host.slots for host in self.hosts[: self.request.node_rank])
        return range(first, first + self.hosts[self.request.node_rank].slots)


def plan_launch(
    request: LaunchRequest, environment: Mapping[str, str], excluded: tuple[str, ...] = (), starts: bool = True
) -> LaunchPlan:
    """Select the launcher and the machines, which are none of ``excluded``.

    If it is only shown (not ``starts``), the programs of the launcher need not be on this machine.

    Raises:
        ConfigError: the request does not fit this environment, or this process is already a rank; lists all problems.
    """
    info = resolve_ranks(environment)
    if info.world_size > 1:
        raise ConfigError(
            f"launch: this process is already rank {info.rank} of {info.world_size} ({info.launcher}). Run `ds-trainer "
            "launch` once; it starts all ranks."
        )
    in_slurm = bool(environment.get("SLURM_JOB_ID") and environment.get("SLURM_JOB_NODELIST"))
    hosts = _hosts(request, environment, in_slurm, excluded)
    launcher = request.launcher
    if launcher == "auto":
        name = socket.gethostname()
        here = ("localhost", "127.0.0.1", name, name.partition(".")[0])
        if request.node_rank is not None or (len(hosts) == 1 and hosts[0].name in here):
            # DeepSpeed's launcher accepts GPU numbers only, and exposes hidden GPUs again.
            visible = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")
            launcher = "torchrun" if None in [whole_number(device.strip()) for device in visible] else "deepspeed"
        elif in_slurm and request.hostfile is None:
            launcher = "srun"
        else:
            launcher = "pdsh"
    plan = LaunchPlan(request, launcher, tuple(hosts), in_slurm, excluded)
    problems = _problems(plan, starts)
    if problems:
        raise ConfigError(problems)
    return plan


def count_gpus(environment: Mapping[str, str]) -> int:
    """Number of GPUs that a process started here would see."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    smi = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if smi is None:
        return 0
    done = subprocess.run([smi, "-L"], capture_output=True, text=True, check=False)
    return len(re.findall(r"^GPU \d+:", done.stdout, flags=re.MULTILINE)) if done.returncode == 0 else 0


def _hosts(
    request: LaunchRequest, environment: Mapping[str, str], in_slurm: bool, excluded: tuple[str, ...]
) -> list[Host]:
    slots, hostfile = request.nproc_per_node, request.hostfile
    if hostfile is None and not in_slurm and request.node_rank is None and os.path.isfile(DEEPSPEED_HOSTFILE):
        hostfile = DEEPSPEED_HOSTFILE
    if hostfile is not None:
        hosts = read_hostfile(hostfile, slots)
        few = [host for host in hosts if slots is not None and host.slots < slots]
        if few:
            raise ConfigError(
                f"launch: --nproc-per-node {slots}, but {hostfile} says {few[0].name} slots={few[0].slots}."
            )
        hosts = [replace(host, slots=slots or host.slots) for host in hosts]
    elif in_slurm and request.node_rank is None:
        hosts = slurm_hosts(environment, slots)
    elif request.node_rank is not None:
        count = request.nodes or 0
        if count < 1 or slots is None:
            raise ConfigError(
                "launch --node-rank needs a --hostfile, or --nodes and --nproc-per-node, with the same values on all "
                "machines."
            )
        return [Host(f"machine{number}", slots) for number in range(count)]
    else:
        hosts = [Host("localhost", slots or count_gpus(environment) or 1)]
    hosts = [host for host in hosts if host.name not in excluded]
    if not hosts:
        raise ConfigError(f"launch: no machine is left; excluded: {', '.join(excluded) or 'none'}.")
    if request.nodes is not None and request.nodes > len(hosts):
        names = listed(host.name for host in hosts)
        source = hostfile or ("SLURM_JOB_NODELIST" if in_slurm else "no --hostfile and no SLURM allocation")
        raise ConfigError(
            f"launch: --nodes {request.nodes}, but only these machines are available: {names} ({source})."
        )
    return hosts[: request.nodes]


def _problems(plan: LaunchPlan, starts: bool) -> list[str]:
    problems = []
    request, launcher = plan.request, plan.launcher
    names = listed((host.name for host in plan.hosts), 4)
    if launcher in _IN_SLURM and not plan.in_slurm:
        problems.append(f"launch --launcher {launcher}: this shell is not in a SLURM allocation; use sbatch or salloc.")
    if launcher in _IN_SLURM and len({host.slots for host in plan.hosts}) > 1:
        problems.append(
            f"launch --launcher {launcher}: srun needs the same number of ranks on every machine; set --nproc-per-node."
        )
    if launcher in _IN_SLURM and request.hostfile is not None:
        problems.append(f"launch --launcher {launcher} uses the machines of the allocation; remove --hostfile.")
    if launcher in _SSH and not plan.in_slurm and request.hostfile is None and plan.hosts[0].name == "localhost":
        problems.append(f"launch --launcher {launcher} needs a --hostfile or a SLURM allocation.")
    if request.node_rank is not None:
        if launcher not in ("deepspeed", "torchrun"):
            problems.append(f"launch --launcher {launcher} starts the ranks of all machines; remove --node-rank.")
        if not 0 <= request.node_rank < len(plan.hosts):
            problems.append(f"launch --node-rank {request.node_rank}: there are {counted(len(plan.hosts), 'machine')}.")
        if request.master_addr is None and request.hostfile is None:
            problems.append("launch --node-rank: set --master-addr to the first machine, on every machine.")
        if request.max_restarts:
            problems.append(
                "launch --node-rank: --max-restarts would restart the ranks of this machine only; remove it."
            )
    elif launcher == "deepspeed" and len(plan.hosts) > 1:
        problems.append(
            f"launch --launcher deepspeed starts one machine, but the job has {names}: use --launcher pdsh, or run "
            "launch on each machine with --node-rank."
        )
    elif launcher == "torchrun" and len(plan.hosts) > 1 and not plan.in_slurm:
        problems.append(
            f"launch --launcher torchrun reaches other machines ({names}) only inside a SLURM allocation; run launch "
            "on each machine with --node-rank."
        )
    if request.master_addr is not None and (problem := host_problem(request.master_addr)):
        problems.append(f"launch --master-addr: {problem}")
    program = _PROGRAMS.get(launcher)
    if starts and program is not None and shutil.which(program) is None:
        problems.append(f"launch --launcher {launcher}: {program} is not on PATH.")
    return problems
