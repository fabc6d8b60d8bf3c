"""The rank of this process under any launcher, as a pure function of the environment.

``deepspeed`` and ``torchrun`` set ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``.
``srun`` sets ``SLURM_*`` (also under ``deepspeed --launcher slurm``, which adds nothing), Open MPI's ``mpirun`` sets
``OMPI_COMM_WORLD_*``, the Hydra of MPICH and Intel MPI ``PMI_*`` and ``MPI_LOCAL*``, MVAPICH ``MV2_COMM_WORLD_*``.
Plain ``python`` sets nothing and is a world of one.

Several sets may be present at once. Variables that describe this process must agree. Variables that describe an
enclosing program are ignored: under ``torchrun`` inside ``srun``, the SLURM task is the agent of a machine; under
``mpirun`` inside an allocation, it is an MPI daemon.

DeepSpeed, accelerate and transformers use ``LOCAL_RANK`` as the index of the GPU. If each rank sees one GPU only, that
index is 0 on every rank, and the local rank is kept in ``DS_TRAINER_LOCAL_RANK``
(:mod:`ds_trainer.utils.devices`).
"""

from __future__ import annotations

import re
import socket
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.units import whole_number

_LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_LOCAL_SIZES = ("LOCAL_SIZE",)  # set by deepspeed; not LOCAL_WORLD_SIZE, which accelerate sets to 1 if it is missing
# Set by torchrun and by deepspeed's per-machine launcher, which start several ranks and may be a task themselves.
_MACHINE_LAUNCHER_NAMES = ("TORCHELASTIC_RUN_ID", "CROSS_RANK")
# A SLURM job cannot announce a free port, but all of its ranks know its id; likewise with Open MPI.
_FIRST_PORT, _PORTS = 20000, 20000
_DEFAULT_PORT = 29500  # of torch
_MPI_JOB_NAMES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
_LOCAL_RANK_NAME = "DS_TRAINER_LOCAL_RANK"


@dataclass(frozen=True)
class _LauncherVariables:
    """The environment variables of one launcher."""

    launcher: str
    rank: str
    world_size: str
    local_rank: str
    local_size: str


_MPI = (
    _LauncherVariables(
        "openmpi", *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    ),
    _LauncherVariables("mvapich", *(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    _LauncherVariables("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_SLURM_NAMES = ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_LOCALID")
_ALL_NAMES = (
    *_LAUNCHER_NAMES,
    *_LOCAL_SIZES,
    *_MACHINE_LAUNCHER_NAMES,
    *(name for names in _MPI for name in (names.rank, names.world_size, names.local_rank, names.local_size)),
    *_SLURM_NAMES,
)


@dataclass(frozen=True)
class RankInfo:
    """Rank and rendezvous address of this process. ``launcher`` is ``"environment"`` (deepspeed, torchrun, or set by
    the user), ``"srun"``, ``"openmpi"``, ``"mvapich"``, ``"mpich"`` (or Intel MPI) or ``"python"``.

    A port of 0 means any free port; it occurs only in a world of one.
    """

    rank: int
    world_size: int
    local_rank: int
    master_address: str
    master_port: int
    launcher: str

    def environment(self, device_index: int | None = None) -> dict[str, str]:
        """The five variables that torch.distributed and DeepSpeed read.

        Args:
            device_index: the GPU of this process, which DeepSpeed reads from LOCAL_RANK; default: ``local_rank``. If
                they differ, a sixth variable has the local rank for :func:`resolve_ranks`.
        """
        index = self.local_rank if device_index is None else device_index
        names = {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(index),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
        }
        if index != self.local_rank:
            # Includes the rank that it is valid for, since a process of another job may inherit it.
            names[_LOCAL_RANK_NAME] = f"{self.local_rank} of {self.rank}/{self.world_size}/{index}"
        return names


def resolve_ranks(environment: Mapping[str, str]) -> RankInfo:
    """Derive rank, world size and rendezvous address from ``environment``.

    Raises:
        ConfigError: only some of the launcher's variables are set, or they contradict each other.
    """
    mpi = [names for names in _MPI if names.rank in environment]
    in_step = "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment
    if "RANK" in environment:
        info = _from_launcher(environment)
        local_rank, _, valid_for = environment.get(_LOCAL_RANK_NAME, "").partition(" of ")
        if valid_for == f"{info.rank}/{info.world_size}/{info.local_rank}":
            return replace(info, local_rank=int(local_rank))  # set by this process or its parent
    elif mpi and not (mpi[0].local_rank not in environment and in_step):
        info = _from_mpi(environment, mpi[0])
    elif in_step:
        info = _from_slurm_step(environment)
    elif "WORLD_SIZE" in environment:
        info = _from_launcher(environment)  # reports the missing variables
    else:
        return RankInfo(0, 1, 0, "127.0.0.1", 0, "python")
    _check_sizes(info, environment)
    if "RANK" not in environment or not any(name in environment for name in _MACHINE_LAUNCHER_NAMES):
        _check_against_mpi(info, environment, mpi)
        if in_step and not mpi:  # the SLURM task may be an MPI daemon
            _check_against_step(info, environment)
    return info


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` without the variables of all launchers, so that another rank can be set."""
    return {name: value for name, value in environment.items() if name not in {*_ALL_NAMES, _LOCAL_RANK_NAME}}


def likely_rank(environment: Mapping[str, str]) -> int:
    """The rank of this process, even if :func:`resolve_ranks` would raise an error; 0 if unknown."""
    try:
        return resolve_ranks(environment).rank
    except ConfigError:
        candidates = ["RANK", *(names.rank for names in _MPI), "SLURM_PROCID"]
        given = [number for name in candidates if (number := whole_number(environment.get(name, ""))) is not None]
        return given[0] if given else 0


def known_local_size(environment: Mapping[str, str]) -> int | None:
    """Number of ranks on this machine; None if the launcher does not set it."""
    names = ("LOCAL_WORLD_SIZE", *_LOCAL_SIZES, *(names.local_size for names in _MPI))
    sizes = [number for name in names if (number := whole_number(environment.get(name, ""))) is not None]
    counts, node = environment.get("SLURM_STEP_TASKS_PER_NODE", ""), whole_number(environment.get("SLURM_NODEID", ""))
    if "SLURM_STEP_ID" in environment and node is not None:
        for size, times in re.findall(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", counts):
            if node < int(times or 1):
                return max([*sizes, int(size)])
            node -= int(times or 1)
    return max(sizes, default=None)


def free_port() -> int:
    """A TCP port that is currently free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _from_launcher(environment: Mapping[str, str]) -> RankInfo:
    missing = [name for name in _LAUNCHER_NAMES if not environment.get(name)]
    if missing:
        shown = ", ".join(f"{name}={environment[name]}" for name in _LAUNCHER_NAMES if environment.get(name))
        raise ConfigError(
            f"The environment sets {shown}, but not {', '.join(missing)}. Start with `ds-trainer launch`, `deepspeed`, "
            "`torchrun`, `srun` or `mpirun`, or unset these variables to train in one process."
        )
    numbers = {name: _integer(environment, name) for name in _LAUNCHER_NAMES if name != "MASTER_ADDR"}
    _check_rank(numbers["RANK"], numbers["WORLD_SIZE"], "RANK", "WORLD_SIZE")
    return RankInfo(
        numbers["RANK"],
        numbers["WORLD_SIZE"],
        numbers["LOCAL_RANK"],
        environment["MASTER_ADDR"],
        numbers["MASTER_PORT"],
        "environment",
    )


def _from_slurm_step(environment: Mapping[str, str]) -> RankInfo:
    rank = _integer(environment, "SLURM_PROCID")
    world_size = _integer(environment, _step_size_name(environment))
    _check_rank(rank, world_size, "SLURM_PROCID", _step_size_name(environment))
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST") or ""
    address = environment.get("MASTER_ADDR") or first_host(nodes)
    if world_size > 1 and not address:
        raise ConfigError("srun set neither SLURM_STEP_NODELIST nor SLURM_NODELIST; set MASTER_ADDR to the first node.")
    if environment.get("MASTER_PORT"):
        port = _integer(environment, "MASTER_PORT")
    else:
        job = _integer(environment, "SLURM_JOB_ID") if "SLURM_JOB_ID" in environment else 0
        offset = job * 7 + (whole_number(environment["SLURM_STEP_ID"]) or 0)
        port = _FIRST_PORT + offset % _PORTS
    return RankInfo(rank, world_size, _integer(environment, "SLURM_LOCALID"), address or "127.0.0.1", port, "srun")


def _from_mpi(environment: Mapping[str, str], names: _LauncherVariables) -> RankInfo:
    rank, world_size = _integer(environment, names.rank), _integer(environment, names.world_size)
    _check_rank(rank, world_size, names.rank, names.world_size)
    if world_size == 1 and names.local_rank not in environment:
        return RankInfo(rank, 1, 0, "127.0.0.1", 0, names.launcher)
    local_rank = _integer(environment, names.local_rank)
    address = environment.get("MASTER_ADDR", "")
    if not address and environment.get(names.local_size) == str(world_size):
        address = "127.0.0.1"  # all ranks are on this machine
    if not address:
        local_size = environment.get(names.local_size, "an unknown number")
        raise ConfigError(
            f"mpirun sets no rendezvous address: {names.world_size}={world_size}, of which {local_size} are on "
            f"this machine ({names.local_size}), and MASTER_ADDR is not set. Start with `ds-trainer launch --launcher "
            "openmpi`, or pass the first host: mpirun -x MASTER_ADDR=HOST (Open MPI), -genv MASTER_ADDR HOST (Hydra)."
        )
    return RankInfo(rank, world_size, local_rank, address, _mpi_port(environment), names.launcher)


def _mpi_port(environment: Mapping[str, str]) -> int:
    if environment.get("MASTER_PORT"):
        return _integer(environment, "MASTER_PORT")
    job = next((environment[name] for name in _MPI_JOB_NAMES if environment.get(name)), None)
    return _DEFAULT_PORT if job is None else _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS


def _check_sizes(info: RankInfo, environment: Mapping[str, str]) -> None:
    """Check local rank and local size against the world size of ``info``."""
    if info.local_rank >= info.world_size:
        raise _contradiction(f"A local rank of {info.local_rank} in a world of {info.world_size}", environment)
    sizes = list(_LOCAL_SIZES) if info.launcher == "environment" else []
    sizes += [names.local_size for names in _MPI if names.launcher == info.launcher]
    for name in sizes:
        if not environment.get(name):
            continue
        size = _integer(environment, name)
        if info.local_rank >= size:
            raise _contradiction(f"A local rank of {info.local_rank} with {name}={size}", environment)
        if size > info.world_size:
            raise _contradiction(f"{name}={size} in a world of {info.world_size}", environment)
    if info.master_port > 65535 or (info.master_port == 0 and info.world_size > 1):
        raise ConfigError(f"The environment sets MASTER_PORT={info.master_port}, which is not a valid port.")
    if info.launcher != "environment" and environment.get("WORLD_SIZE", str(info.world_size)) != str(info.world_size):
        raise _contradiction(f"{info.launcher} with a world size of {info.world_size}", environment)


def _check_against_mpi(info: RankInfo, environment: Mapping[str, str], mpi: list[_LauncherVariables]) -> None:
    """Check that MPI's variables agree with ``info``."""
    for names in mpi:
        for name, chosen in (
            (names.rank, info.rank),
            (names.world_size, info.world_size),
            (names.local_rank, info.local_rank),
        ):
            if name not in environment:
                continue
            value = _integer(environment, name)
            # If each rank sees one GPU, LOCAL_RANK may be 0 on every rank.
            if value != chosen and not (name == names.local_rank and chosen == 0):
                raise _contradiction(f"{name}={value} and {_described(info)}", environment)


def _check_against_step(info: RankInfo, environment: Mapping[str, str]) -> None:
    """Check SLURM's variables: its task is this process, or an enclosing program that started several ranks."""
    name = _step_size_name(environment)
    if name not in environment:
        return
    tasks = _integer(environment, name)
    if tasks > info.world_size:
        raise _contradiction(f"A step of {name}={tasks} and {_described(info)}", environment)
    task = _integer(environment, "SLURM_PROCID")
    if tasks == info.world_size and task != info.rank:
        raise _contradiction(f"SLURM_PROCID={task} of {tasks} tasks and {_described(info)}", environment)


def _described(info: RankInfo) -> str:
    names = "RANK={} WORLD_SIZE={} LOCAL_RANK={}" if info.launcher == "environment" else "rank {} of {}, local rank {}"
    return names.format(info.rank, info.world_size, info.local_rank)


def _contradiction(what: str, environment: Mapping[str, str]) -> ConfigError:
    values = ", ".join(f"{name}={environment[name]}" for name in _ALL_NAMES if name in environment)
    return ConfigError(
        f"{what} contradict each other, so the rank is unknown. The environment sets {values}. Unset the variables "
        "that another launcher has left (in a job script, or in the shell's start-up files)."
    )


def _step_size_name(environment: Mapping[str, str]) -> str:
    return "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"


def first_host(node_list: str) -> str:
    """First host of a SLURM node list: ``gpu[007-010,12],login`` gives ``gpu007``."""
    match = re.match(r"([^\[,]+)(?:\[([^\]]+)\])?([^,\[]*)", node_list)
    if not match:
        return ""
    prefix, ranges, suffix = match.groups()
    first = re.split(r"[,-]", ranges)[0] if ranges else ""
    return prefix + first + (suffix if ranges else "")


def _integer(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    number = whole_number(text)
    if number is None:
        raise ConfigError(
            f"The environment variable {name}={text[:99]!r} must be a whole number; the launcher sets it."
        )
    return number


def _check_rank(rank: int, world_size: int, rank_name: str, world_name: str) -> None:
    if rank >= world_size:
        raise ConfigError(f"The environment sets {rank_name}={rank}, which is not below {world_name}={world_size}.")


_reported: int | None = None
_reads = 0


def for_user_code(ranks: int) -> int:
    """``ranks``, or the number that :func:`reporting` has set; counts as a read."""
    global _reads
    _reads += 1
    return ranks if _reported is None else _reported


def reads() -> int:
    """How often the number has been read in this process."""
    return _reads


@contextmanager
def reporting(ranks: int) -> Iterator[None]:
    """Report this number inside."""
    global _reported
    _reported = ranks
    try:
        yield
    finally:
        _reported = None
