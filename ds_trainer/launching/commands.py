"""The command line of each launcher, and the files that the launcher reads.

Every rank is started through :mod:`ds_trainer.launching.rank`. Sources: ``deepspeed/launcher/runner.py`` and
``multinode_runner.py`` of DeepSpeed 0.19.8, srun(1), mpirun(1) of Open MPI 4, ``torch.distributed.run``.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ds_trainer.launching.hosts import hostfile_text
from ds_trainer.launching.job import CONNECTION
from ds_trainer.launching.launch_plan import LaunchPlan, count_gpus
from ds_trainer.launching.rank import encode_args
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import exists, read_user_file, write_text_atomic
from ds_trainer.utils.ranks import free_port
from ds_trainer.utils.units import whole_number

_RANK_MODULE = "ds_trainer.launching.rank"
_RANK_FILE = str(Path(__file__).with_name("start_rank.py"))
_RUNNER = [sys.executable, "-m", "deepspeed.launcher.runner", "--log_level", "warning"]
_PLAIN = r"[\w@+=:,./-]+"  # characters that the remote shell and pdsh do not change
_REMOTE_PORTS = (20000, 32000)  # below the range that Linux uses for outgoing connections
_DEFAULT_PORT = 29500


@dataclass(frozen=True)
class LaunchCommand:
    """A command: ``argv``, variables to add to the environment of this process, and the files that it reads."""

    argv: list[str]
    environment: dict[str, str]
    files: dict[Path, str] = field(default_factory=dict)

    def write_files(self) -> None:
        """Write the files that the command reads; they may have secrets, so only this user can read them."""
        for path, text in self.files.items():
            write_text_atomic(path, text, private=True)

    def text(self) -> str:
        """The command as text for a shell."""
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return shlex.join([*(["env", *variables] if variables else []), *self.argv])


def build(
    plan: LaunchPlan, directory: Path, job_variables: Mapping[str, str], environment: Mapping[str, str]
) -> LaunchCommand:
    """The command for ``plan``.

    Args:
        plan: the launcher and the machines.
        directory: for files that the launcher reads, if it needs any.
        job_variables: environment variables for all ranks.
        environment: the variables of this process.
    """
    address, port = _rendezvous(plan)
    ranks = {**job_variables, **plan.request.environment}
    if plan.launcher == "torchrun":
        return _torchrun(plan, address, port, _changed(ranks, environment), environment)
    if plan.launcher == "srun":
        argv = [*_srun(plan, plan.hosts[0].slots, environment), sys.executable, "-u", "-m", _RANK_MODULE]
        rendezvous = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        return LaunchCommand([*argv, *plan.request.target.command()], _changed(rendezvous | ranks, environment))
    if plan.launcher == "deepspeed":
        return _deepspeed(plan, directory, address, port, _changed(ranks, environment), environment)
    return _deepspeed_multi_node(plan, directory, address, port, ranks, environment)


def _rendezvous(plan: LaunchPlan) -> tuple[str, int]:
    request = plan.request
    by_hand = request.node_rank is not None
    is_here = len(plan.hosts) == 1 and plan.is_local
    address = request.master_addr or ("127.0.0.1" if is_here else plan.hosts[0].name)
    if request.master_port:
        return address, request.master_port
    if by_hand:
        return address, _DEFAULT_PORT
    return address, free_port() if is_here else random.SystemRandom().randrange(*_REMOTE_PORTS)


def _changed(variables: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if environment.get(name) != value}


def _torchrun(
    plan: LaunchPlan, address: str, port: int, ranks: dict[str, str], environment: Mapping[str, str]
) -> LaunchCommand:
    request = plan.request
    start = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(plan.hosts))]
    start += ["--nproc-per-node", str(plan.hosts[request.node_rank or 0].slots), "--max-restarts", "0"]
    if len(plan.hosts) == 1 or request.node_rank is not None:
        start += ["--node-rank", str(request.node_rank or 0), "--master-addr", address, "--master-port", str(port)]
    else:
        # With c10d the agents agree on their node ranks, so no shell is needed to number them.
        start = [*_srun(plan, 1, environment), *start, "--rdzv-backend", "c10d"]
        start += ["--rdzv-endpoint", f"{address}:{port}", "--rdzv-id", environment["SLURM_JOB_ID"]]
    return LaunchCommand([*start, "-m", _RANK_MODULE, *request.target.command()], ranks)


def _srun(plan: LaunchPlan, tasks: int, environment: Mapping[str, str]) -> list[str]:
    """The ``srun`` command with ``tasks`` per machine, without the program."""
    argv = ["srun", "--nodes", str(len(plan.hosts)), "--ntasks", str(tasks * len(plan.hosts))]
    argv += ["--ntasks-per-node", str(tasks), *_srun_options(plan, tasks, environment)]
    return [*argv, *plan.request.launcher_args]


def _srun_options(plan: LaunchPlan, tasks: int, environment: Mapping[str, str]) -> list[str]:
    argv = ["--kill-on-bad-exit=1", "--mpi=none", "--export=ALL"]
    if plan.excluded:
        argv += ["--exclude", ",".join(plan.excluded)]
    # By default srun gives a task one core, whatever the job has.
    cores = re.match(r"[0-9]{1,9}", environment.get("SLURM_CPUS_ON_NODE") or "")
    if cores:
        argv += ["--cpus-per-task", str(max(1, int(cores.group()) // tasks))]
        if tasks > int(cores.group()):
            argv.append("--overcommit")
    if environment.get("SLURM_STEP_ID"):
        argv.append("--overlap")  # the step of an interactive shell holds its resources
    return argv


def _deepspeed(
    plan: LaunchPlan, directory: Path, address: str, port: int, ranks: dict[str, str], environment: Mapping[str, str]
) -> LaunchCommand:
    """DeepSpeed's launcher on one machine, which may be one of several with ``--node-rank``."""
    request = plan.request
    argv = list(_RUNNER)
    files: dict[Path, str] = {}
    if request.node_rank is not None:
        files[directory / "hostfile"] = hostfile_text(plan.hosts)
        argv += ["--hostfile", str(directory / "hostfile"), "--no_ssh", "--node_rank", str(request.node_rank)]
        argv += ["--master_addr", address]
    else:
        slots = plan.hosts[0].slots
        visible = [device.strip() for device in environment.get("CUDA_VISIBLE_DEVICES", "").split(",")]
        argv += ["--hostfile", ""]
        if 0 < slots <= count_gpus(environment) and all(whole_number(device) is not None for device in visible):
            argv += ["--include", f"localhost:{','.join(visible[:slots])}"]
        else:
            argv += ["--num_gpus", str(slots)]
    argv += ["--master_port", str(port), "--no_local_rank", "--module", _RANK_MODULE]
    return LaunchCommand([*argv, *request.target.command()], ranks, files)


def _deepspeed_multi_node(
    plan: LaunchPlan, directory: Path, address: str, port: int, ranks: dict[str, str], environment: Mapping[str, str]
) -> LaunchCommand:
    """``deepspeed --launcher pdsh|slurm|openmpi``."""
    request = plan.request
    exports = {**read_env_files(environment, [Path("~"), Path()]), **ranks}
    env_file = directory / "deepspeed_env"
    changes = {ENV_FILE_VARIABLE: str(env_file)}
    files = {directory / "hostfile": hostfile_text(plan.hosts)}
    options = list(request.launcher_args)
    program = request.target.command()
    module = ["--module", _RANK_MODULE]
    if plan.launcher == "pdsh":
        exports = {**default_exports(environment), **exports, CONNECTION: "1"}
        files[env_file] = env_file_text(exports)
        # ssh must not prompt: there is no user to type a password or to accept a host key.
        changes.setdefault(
            "PDSH_SSH_ARGS_APPEND", f"{environment.get('PDSH_SSH_ARGS_APPEND', '')} -o BatchMode=yes".strip()
        )
        if not all(re.fullmatch(_PLAIN, arg) for arg in program):
            program = [encode_args(program)]
    else:  # these pass on their own environment, without a shell in between that would interpret it
        files[env_file] = ""
        changes |= _changed({"MASTER_ADDR": address, "MASTER_PORT": str(port), **exports}, environment)
        if plan.launcher == "slurm":
            tasks = plan.hosts[0].slots
            options = ["--nodes", str(len(plan.hosts)), "--ntasks-per-node", str(tasks), *options]
            options += [arg for arg in _srun_options(plan, tasks, environment) if arg != "--export=ALL"]
            module = [_RANK_FILE]
        else:
            names = ["MASTER_ADDR", "MASTER_PORT", *default_exports(environment), *exports]
            options = ["--bind-to", "none", *(["--allow-run-as-root"] if os.geteuid() == 0 else []), *options]
            options += [arg for name in dict.fromkeys(names) for arg in ("-x", name)]
    argv = [
        *_RUNNER,
        "--hostfile",
        str(directory / "hostfile"),
        "--launcher",
        plan.launcher,
        "--force_multi",
        "--no_ssh_check",
    ]
    argv += ["--master_addr", address, "--master_port", str(port), "--no_local_rank"]
    argv += [f"--launcher_args={shlex.join(options)}"] if options else []
    return LaunchCommand([*argv, *module, *program], changes, files)


ENV_FILE_VARIABLE = "DS_ENV_FILE"
DEFAULT_ENV_FILE = ".deepspeed_env"
# What a training run reads from the environment. Secrets are excluded, since process lists show the values.
# -- environment variables for ranks on other machines -----------------------------------------------------------------
#
# ssh passes no variables, so DeepSpeed's pdsh runner prefixes its command with ``export KEY=VALUE``. It exports
# variables that begin with PYTHON (on GPUs also NCCL, never PATH) and those of the file .deepspeed_env. A blank line or
# a comment in the file ends the launch with a traceback, and values are escaped neither for the remote shell nor for
# pdsh.

_NAMES = ("DS", "GLOO", "HF", "NCCL", "OMP", "TOKENIZERS", "TORCH", "TORCHINDUCTOR", "TRANSFORMERS", "TRITON")
_PREFIXES = tuple(f"{name}_" for name in _NAMES)
_SECRETS = ("KEY", "PASSWORD", "SECRET", "TOKEN")
_UNQUOTED = r"[\w@%+=:,./-]*"  # values that DeepSpeed does not quote


def default_exports(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of ``environment`` to export to ranks on other machines; without secrets."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_PREFIXES)
        and name != ENV_FILE_VARIABLE
        and not (set(name.split("_")) & set(_SECRETS))
        and "\n" not in value
        and value == value.strip()
    }


def read_env_files(environment: Mapping[str, str], folders: Sequence[Path]) -> dict[str, str]:
    """The variables of ``.deepspeed_env`` (or of the file named by DS_ENV_FILE) in ``folders``; later folders take
    precedence. Blank lines and comments are ignored.

    Raises:
        ConfigError: a line is not ``KEY=VALUE``.
    """
    exports: dict[str, str] = {}
    problems = []
    name = environment.get(ENV_FILE_VARIABLE, DEFAULT_ENV_FILE)
    for path in dict.fromkeys(Path(os.path.expanduser(folder)) / name for folder in folders):
        if not exists(path):
            continue
        for number, line in enumerate(read_user_file(path, str(path), "file of variables").splitlines(), 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            key, equals, value = line.partition("=")
            if not equals or not key.strip().isidentifier():
                problems.append(f"{path}:{number}: {line!r} is not of the form KEY=VALUE.")
            exports[key.strip()] = value.strip()
    if problems:
        raise ConfigError(problems)
    return exports


def env_file_text(exports: Mapping[str, str]) -> str:
    """A ``.deepspeed_env`` that sets exactly ``exports`` in the remote shell of pdsh.

    Raises:
        ConfigError: a value has several lines, or leading or trailing whitespace, which DeepSpeed strips.
    """
    wrong = [name for name, value in exports.items() if value != value.strip() or "\n" in value]
    if wrong:
        raise ConfigError(
            f"launch: {', '.join(wrong)}: pdsh cannot pass a value with leading or trailing whitespace or several "
            "lines to other machines. Set it in the script."
        )
    return "".join(f"{name}={escape_env_value(value)}\n" for name, value in exports.items())


def escape_env_value(value: str) -> str:
    """``value`` escaped for the file. DeepSpeed double-quotes values with special characters; pdsh replaces ``%h``,
    ``%u`` and ``%n``.
    """
    if re.fullmatch(_UNQUOTED, value) is None:
        value = re.sub(r'([\\"$`])', r"\\\1", value)
    return value.replace("%", "%%")
