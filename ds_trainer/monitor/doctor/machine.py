"""Resources of a machine: disk space, shared memory, process limits, memory, cores."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

from ds_trainer.monitor.doctor.findings import Finding, Level
from ds_trainer.monitor.doctor.jit_locks import mapped_files
from ds_trainer.utils.host_memory import cgroup_memory, free_host_memory
from ds_trainer.utils.open_files import open_file_problem
from ds_trainer.utils.units import counted, human_bytes, whole_number

GB = 10**9
FEW_INODES = 10_000
SHARED_MEMORY = Path("/dev/shm")
LITTLE_SHARED_MEMORY = GB // 2
"""Docker's default is 67 MB; NCCL and data loader workers need more."""
_BUFFERS = "deepspeed_allreduce_buffer_*"
FEW_FILES, TOO_FEW_FILES = 4096, 512
FEW_PROCESSES = 4096
SMALL_STACK = 8 * 2**20


def existing(path: str | os.PathLike[str]) -> Path:
    """``path``, or the nearest directory above it that exists."""
    ancestor = Path(os.path.expanduser(path)).absolute()
    while not ancestor.exists():
        ancestor = ancestor.parent
    return ancestor


def disk_findings(directories: Mapping[str, str | os.PathLike[str]], needed: Mapping[str, int]) -> list[Finding]:
    """Free space and inodes of directories that may not exist yet.

    Args:
        directories: path by purpose (``output_dir``, ...).
        needed: bytes that will be written there, by the same names; default: half a GB.
    """
    findings = []
    for name, path in directories.items():
        where, name = existing(path), f"disk of {name}"
        if not os.access(where, os.W_OK):
            remedy = "Choose another directory, or make it writable."
            findings.append(Finding(Level.FAIL, name, f"{where} is not writable", remedy))
            continue
        state = os.statvfs(where)
        free, wanted = state.f_bavail * state.f_frsize, needed.get(name.removeprefix("disk of "), GB // 2)
        message = f"{human_bytes(free)} of {human_bytes(state.f_blocks * state.f_frsize)} free at {where}"
        if free < wanted:
            level = Level.FAIL if free < 2**20 else Level.WARN
            remedy = f"At least {human_bytes(wanted)} are needed: remove old files, or choose another disk."
            findings.append(Finding(level, name, message, remedy))
        elif state.f_files > 0 and state.f_favail < FEW_INODES:
            remedy = "Each new file needs an inode, however much space is free: remove many small files."
            findings.append(Finding(Level.WARN, name, f"{message}, but only {state.f_favail} inodes", remedy))
        else:
            findings.append(Finding(Level.OK, name, message))
    return findings


def shared_memory_findings(directory: Path = SHARED_MEMORY) -> list[Finding]:
    """Free shared memory, and buffers of DeepSpeed whose processes have ended."""
    if not directory.is_dir():
        return []
    state = os.statvfs(directory)
    free, total = state.f_bavail * state.f_frsize, state.f_blocks * state.f_frsize
    message = f"{human_bytes(free)} of {human_bytes(total)} free"
    if free < LITTLE_SHARED_MEMORY:
        remedy = "docker run --shm-size=16g (or --ipc=host); else `mount -o remount,size=16G /dev/shm`, or empty it."
        findings = [Finding(Level.WARN, str(directory), f"{message}: NCCL and data loading may fail", remedy)]
    else:
        findings = [Finding(Level.OK, str(directory), message)]
    left = left_buffers(directory)
    if left:
        total = sum(path.stat().st_size for path in left)
        remedy = f"rm {directory}/{_BUFFERS} (when no training runs on this machine)."
        message = f"{len(left)} buffers of DeepSpeed runs that have ended, {human_bytes(total)}"
        findings.append(Finding(Level.WARN, "stale buffers", message, remedy))
    return findings


def left_buffers(directory: Path = SHARED_MEMORY) -> list[Path]:
    """This user's buffers of DeepSpeed's shared-memory operator that no visible process has mapped."""
    own_buffers = [path for path in directory.glob(_BUFFERS) if path.stat().st_uid == os.getuid()]
    used = mapped_files(directory) if own_buffers else set()
    return [path for path in own_buffers if str(path) not in used]


def limit_findings(fast_network: bool, rank: int = 0, world_size: int = 1) -> list[Finding]:
    """Limits of this process (``ulimit``).

    Args:
        fast_network: whether InfiniBand or GPUs lock memory.
        rank, world_size: this process's rank and the number of ranks: rank 0 has connections to all others.
    """
    files, stack = _limit(resource.RLIMIT_NOFILE), _limit(resource.RLIMIT_STACK)
    locked, processes = _limit(resource.RLIMIT_MEMLOCK), _limit(resource.RLIMIT_NPROC)
    findings = []

    def add(name: str, value: float, bad: bool, remedy: str, level: Level = Level.WARN) -> None:
        shown = human_bytes(value) if name in ("stack", "locked memory") else f"{value:.0f}"
        message = "unlimited" if value == float("inf") else shown
        findings.append(Finding(level if bad else Level.OK, f"limit of {name}", message, remedy if bad else ""))

    level = Level.FAIL if files < TOO_FEW_FILES else Level.WARN
    advice = "ulimit -n 65536 in the batch script (LimitNOFILE= of slurmd, --ulimit nofile= of docker)."
    problem = open_file_problem(rank, world_size)
    if problem is not None:
        message, cannot_meet = problem
        level = Level.FAIL if cannot_meet or files < TOO_FEW_FILES else Level.WARN
        findings.append(Finding(level, "limit of open files", message, advice))
    else:
        add("open files", files, files < FEW_FILES, advice, level)
    add("processes", processes, processes < FEW_PROCESSES, "ulimit -u 65536: threads count too.")
    add("stack", stack, stack < SMALL_STACK, "ulimit -s 8192.")
    few = fast_network and locked != float("inf")
    add("locked memory", locked, few, "ulimit -l unlimited (LimitMEMLOCK=infinity of slurmd, --ulimit memlock=-1).")
    return findings


def _limit(which: int) -> float:
    soft, _ = resource.getrlimit(which)
    return float("inf") if soft == resource.RLIM_INFINITY else float(soft)


def memory_finding(local_ranks: int) -> Finding:
    """Host memory available to this machine's ranks, within the cgroup's limit (SLURM, docker)."""
    memory, limited = psutil.virtual_memory(), cgroup_memory()
    available = free_host_memory()
    message = f"{human_bytes(memory.available)} of {human_bytes(memory.total)} available"
    if limited is not None and limited.limit < memory.total:
        message += f"; this job may use {human_bytes(limited.limit)} and uses {human_bytes(limited.used)}"
    if available / local_ranks < 2 * GB:
        each = f"{message}: {human_bytes(available / local_ranks)} for each of {counted(local_ranks, 'rank')}"
        return Finding(Level.WARN, "host memory", each, "Request more (--mem of SLURM, --memory of docker).")
    return Finding(Level.OK, "host memory", message)


def core_findings(affinities: Iterable[frozenset[int]], threads: str | None) -> list[Finding]:
    """Whether there are enough cores for the ranks' threads.

    Args:
        affinities: the cores that each rank of this machine may use.
        threads: the value of OMP_NUM_THREADS.
    """
    each = list(affinities)
    cores = len(frozenset().union(*each))
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    ranks = f"{len(each)} rank{'s' if len(each) > 1 else ''}"
    message = (
        f"{cores} cores for {ranks}, {nodes} NUMA node{'s' if nodes > 1 else ''}, OMP_NUM_THREADS={threads or 'unset'}"
    )
    fair = max(1, cores // len(each))
    if cores < len(each):
        remedy = "Request more cores per task (--cpus-per-task of SLURM), or bind each rank to its own cores."
        return [Finding(Level.WARN, "cores", message, remedy)]
    if threads is None and len(each) > 1:
        remedy = f"export OMP_NUM_THREADS={fair}: otherwise every rank starts one thread per visible core."
        return [Finding(Level.WARN, "cores", message, remedy)]
    if (whole_number(threads or "") or 0) * len(each) > cores:
        return [
            Finding(Level.WARN, "cores", message, f"export OMP_NUM_THREADS={fair}: there are more threads than cores.")
        ]
    return [Finding(Level.OK, "cores", message)]


def affinity() -> frozenset[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def written_directories(output_dir: str | None, extensions: Path) -> dict[str, str | os.PathLike[str]]:
    """The directories that a training writes to, by purpose."""
    directories: dict[str, str | os.PathLike[str]] = {} if output_dir is None else {"output_dir": output_dir}
    return {**directories, "temporary files": tempfile.gettempdir(), "torch extensions": extensions}
