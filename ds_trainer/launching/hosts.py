"""The machines of a job: from a hostfile, or from a SLURM node list."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import read_user_file, shortened


@dataclass(frozen=True)
class Host:
    """A machine and its number of ranks."""

    name: str
    slots: int


# DeepSpeed's, Open MPI's and MPICH's form: "NAME slots=4 max_slots=8", "NAME:4".
_LINE = re.compile(
    r"(?P<name>[^\s:]+|\S*:\S*:\S*)(?::(?P<processes>\d{1,6}))?(?:\s+slots=(?P<slots>\d{1,6}))?(?:\s+max[_-]slots=\d+)?",
    re.ASCII,
)
_NAME = re.compile(r"(?:\w[\w.-]*@)?(?:\w(?:[\w.-]*\w)?\.?|[0-9a-f:.]*:[0-9a-f:.]+(?:%\w+)?)", re.ASCII | re.IGNORECASE)
_MOST_HOSTS = 100_000


def host_problem(name: str) -> str | None:
    """Why ``name`` cannot be that of a machine, a sentence: it would reach ssh, pdsh and shells; None if it can."""
    if _NAME.fullmatch(name) and len(name) <= 300:
        return None
    return f"{shortened(name)!r} is not a host name: letters, digits, hyphens and dots, or an IP address."


def read_hostfile(path: str, slots: int | None = None) -> list[Host]:
    """Machines of a hostfile: one line each, ``NAME slots=N``; ``#`` starts a comment. ``slots`` is the default of N.

    Raises:
        ConfigError: a line is malformed, a machine is listed twice, or none is listed.
    """
    hosts: dict[str, Host] = {}
    problems = []
    for number, line in enumerate(read_user_file(path, f"hostfile={path}", "hostfile").splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        match = _LINE.fullmatch(line)
        if not match:
            problems.append(f"{path}:{number}: {shortened(line)!r} is not of the form NAME slots=N.")
            continue
        name = match["name"]
        count = match["slots"] or match["processes"]  # MPICH writes NAME:N
        if problem := host_problem(name):
            problems.append(f"{path}:{number}: {problem}")
        elif name.lower() in hosts:
            problems.append(f"{path}:{number}: {name} is listed twice; combine its slots in one line.")
        elif count is None and slots is None:
            problems.append(f"{path}:{number}: {name} has no slots=N, and --nproc-per-node is not given.")
        elif count is not None and int(count) == 0:
            problems.append(f"{path}:{number}: {name} has slots=0; remove the line.")
        else:
            hosts[name.lower()] = Host(name, int(count) if count is not None else slots or 0)
    if not hosts and not problems:
        problems.append(f"hostfile={path}: it lists no machine.")
    if len(hosts) > _MOST_HOSTS:
        problems.append(f"hostfile={path}: more than {_MOST_HOSTS:,} machines ({len(hosts):,}). Shorten it.")
    if problems:
        raise ConfigError(problems)
    return list(hosts.values())


def hostfile_text(hosts: Sequence[Host]) -> str:
    """A hostfile that DeepSpeed and Open MPI can both read."""
    return "".join(f"{host.name} slots={host.slots}\n" for host in hosts)


def expand_node_list(text: str) -> list[str]:
    """Host names of a SLURM node list: ``gpu[007-009,12],login`` gives gpu007, gpu008, gpu009, gpu12, login.

    Raises:
        ConfigError: unbalanced brackets, or a descending range.
    """
    names: list[str] = []
    unreadable = f"The node list {shortened(text)!r} cannot be read"
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        pieces = [_numbers(piece, unreadable) for piece in re.split(r"(\[[^\]]*\])", part)]
        if len(names) + math.prod(map(len, pieces)) > _MOST_HOSTS:
            raise ConfigError(f"{unreadable}: it has more than {_MOST_HOSTS:,} names.")
        names += ["".join(chosen) for chosen in itertools.product(*pieces)]
    if not names or text.count("[") != text.count("]"):
        raise ConfigError(f"{unreadable}; the expected form is gpu[007-010,12],login.")
    if problem := next(filter(None, map(host_problem, names)), None):
        raise ConfigError(f"{unreadable}: {problem}")
    return names


def _numbers(piece: str, unreadable: str) -> list[str]:
    """``[007-009,12]``: 007, 008, 009, 12. Text outside of brackets is itself."""
    if not piece.startswith("["):
        return [piece]
    numbers: list[str] = []
    for item in piece[1:-1].split(","):
        limits = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", item, re.ASCII)
        first, last = (limits.group(1), limits.group(2) or limits.group(1)) if limits else ("1", "0")
        if int(last) < int(first):
            raise ConfigError(f"{unreadable}: {shortened(item)!r} is not a range of numbers.")
        if int(last) - int(first) >= _MOST_HOSTS:
            raise ConfigError(f"{unreadable}: {item!r} is more than {_MOST_HOSTS:,} machines.")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def slurm_hosts(environment: Mapping[str, str], slots: int | None = None) -> list[Host]:
    """The machines of the current SLURM allocation, with ``slots`` ranks each (default: their GPUs, or without GPUs the
    tasks that the job requested).

    Raises:
        ConfigError: SLURM's variables name no machines.
    """
    names = expand_node_list(environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST") or "")
    if slots is not None:
        return [Host(name, slots) for name in names]
    for variable in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_NTASKS_PER_NODE"):
        # 8, a100:8, gpu:a100:8(S:0-1)
        match = re.search(r"(?:^|:)(\d{1,6})(?:\(|$)", environment.get(variable, ""), re.ASCII)
        if match and int(match.group(1)) > 0:
            return [Host(name, int(match.group(1))) for name in names]
    tasks: list[int] = []
    for number, times in re.findall(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", environment.get("SLURM_TASKS_PER_NODE", "")):
        tasks += [int(number)] * min(int(times or 1), _MOST_HOSTS)
    return [Host(*host) for host in zip(names, tasks if len(tasks) == len(names) else [1] * len(names), strict=True)]
