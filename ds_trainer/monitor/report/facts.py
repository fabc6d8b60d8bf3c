"""What a process records about itself at the start of a training: command, arguments, versions, git, machine."""

from __future__ import annotations

import functools
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil

from ds_trainer.arguments.serialize import plain
from ds_trainer.utils.secrets import command_words, is_secret, masked, without_secrets
from ds_trainer.utils.units import human_bytes, whole_number

_PACKAGES = ("ds_trainer", "deepspeed", "torch", "transformers", "datasets", "tokenizers", "peft", "accelerate")
_GIT_SECONDS = 5.0
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
_LONGEST_TEXT = 2000  # characters of one argument in the report

_told = False


def command_line(argv: Sequence[str] | None = None) -> str:
    """The command of this process as text for a shell, with secrets masked."""
    words = list(getattr(sys, "orig_argv", sys.argv) if argv is None else argv)
    return shlex.join(command_words(words))


def changed_arguments(args: Any) -> list[dict[str, Any]]:
    """The fields of ``args`` that differ from their defaults: name, value, default, and where the value is from."""
    arguments = []
    defaults = type(args).__dataclass_fields__
    values = args.to_dict()
    for field in fields(args):
        name = field.name
        if not field.init or name not in values:
            continue
        given, default = args.given(name), _default(defaults[name])
        if is_secret(name):
            if given and getattr(args, name) is not None:
                arguments.append({"name": name, "value": masked(name), "default": None, "origin": args.where(name)})
            continue
        if given and values[name] != default:
            value = without_secrets(values[name])
            arguments.append(
                {"name": name, "value": _short(value), "default": _short(default), "origin": args.where(name)}
            )
    return arguments


def _default(field: Any) -> Any:
    missing = type(field.default_factory)
    if type(field.default) is not missing:
        return plain(field.default)
    return plain(field.default_factory()) if callable(field.default_factory) else None


def _short(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= _LONGEST_TEXT else f"{value[:_LONGEST_TEXT]}... ({len(value)} characters)"
    return value


def versions() -> dict[str, str]:
    """Versions of Python and of the packages involved."""
    values = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            values[package] = version(package)
        except PackageNotFoundError:  # an optional package
            continue
    torch = sys.modules.get("torch")
    cuda = getattr(getattr(torch, "version", None), "cuda", None)
    return {**values, "cuda": str(cuda)} if cuda else values


@functools.cache
def git_state(directory: str) -> dict[str, Any] | None:
    """Commit, branch and number of changed files of the git repository of ``directory``; None without one."""
    try:
        head = _git(directory, "rev-parse", "HEAD", "--abbrev-ref", "HEAD").split()
        changed = _git(directory, "status", "--porcelain", "--untracked-files=no").splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": head[0], "branch": head[1], "changed_files": len(changed)} if len(head) == 2 else None


def _git(directory: str, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", directory, *words], capture_output=True, text=True, timeout=_GIT_SECONDS, check=True
    )
    return done.stdout


def process_facts() -> dict[str, Any]:
    """Command, working directory, versions, git state and machine of this process."""
    directory = os.getcwd()
    return {
        "command": command_line(),
        "directory": directory,
        "git": git_state(directory),
        "versions": versions(),
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()}, {psutil.cpu_count()} CPUs, "
        f"{human_bytes(psutil.virtual_memory().total)}",
        "restarts": restart_count(),
        "pid": os.getpid(),
        "process_started": round(began_at(), 3),
    }


def restart_count() -> int:
    """How often a launcher or the scheduler has restarted this job."""
    return sum(whole_number(os.environ.get(name, "")) or 0 for name in _RESTARTS)


def began_at() -> float:
    """When this training began to take its devices, seconds since 1970: the start of the process.

    For a later training of the process, and in an interactive one, that is now.
    """
    global _told
    first, _told = not _told, True
    interactive = hasattr(sys, "ps1") or "ipykernel" in sys.modules
    return float(psutil.Process().create_time()) if first and not interactive else time.time()
