"""Batch scripts for ``sbatch``: one of ``launch/*.sbatch``, filled in with the values of a job.

The templates and their shared part are in ``slurm/`` next to this file. A generated script is self-contained, so it
runs where only the package is installed. Jobs that cannot work are rejected before they enter a queue.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.launching.launch_request import LaunchRequest
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.recipes.recipe import load_recipe
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import shortened
from ds_trainer.utils.printable import one_line, printable
from ds_trainer.utils.secrets import command_words, is_secret

TEMPLATES = Path(__file__).resolve().parent / "slurm"
SIGNAL_EARLY_SECONDS = 60
"""SLURM checks time limits periodically, so its signal may arrive this much earlier than requested."""
MAX_SIGNAL_SECONDS = 65535
_SHARED = re.compile(r'^# shellcheck source=launch/_slurm\.sh\nsource "[^"\n]*"\n', re.MULTILINE)
_WRITTEN = """\
#
# Written by `ds-trainer launch --slurm`; submit it with sbatch.
# shellcheck disable=SC2034,SC2317,SC2329 # the shared functions are used in part, some of them in a trap
"""
_USAGE = re.compile(r"^#\n(?:#   sbatch .*\n)+#\n# Submit it from the clone\..*\n", re.MULTILINE)


@dataclass(frozen=True)
class BatchRequest:
    """Options of a batch script, in addition to a :class:`LaunchRequest`.

    Attributes:
        time: time limit of one run of the job, in the format of sbatch (``12:00:00``, ``2-00``, ``90``).
        signal_seconds: how long before the time limit the ranks are asked to stop at a checkpoint.
        cpus_per_rank: cores for each rank.
        requeue: whether the job may be requeued: after such a stop, a preemption, or the loss of a node.
        folder: working directory; None: the directory in which sbatch is called.
        sbatch_args: extra sbatch options such as ``--qos=long``; they override all others.
    """

    time: str = "24:00:00"
    signal_seconds: int = 300
    partition: str | None = None
    account: str | None = None
    job_name: str | None = None
    cpus_per_rank: int = 8
    requeue: bool = True
    max_restarts: int = 50
    folder: str | None = None
    sbatch_args: tuple[str, ...] = ()


def batch_script(request: LaunchRequest, batch: BatchRequest) -> str:
    """The text of the script.

    Raises:
        ConfigError: the job cannot work; lists all problems.
    """
    problems: list[str] = []
    nodes, ranks = request.nodes or 1, request.nproc_per_node or 0
    if request.launcher not in ("auto", "srun", "torchrun"):
        problems.append(
            f"launch --slurm: there is no batch script for --launcher {request.launcher}; use auto (srun starts each "
            "rank) or torchrun (one torchrun per node)."
        )
    if ranks < 1:
        problems.append(
            "launch --slurm: set --nproc-per-node to the GPUs of a node; this machine may differ from the nodes."
        )
    args = None
    if request.target.is_recipe:
        args = load_recipe(request.target.path, request.target.args).training_arguments()
        problems += _recipe_problems(args, nodes * ranks, batch)
    problems += [*_time_problems(batch, args), *_text_problems(request, batch)]
    if problems:
        raise ConfigError(problems)

    name = "one_node" if nodes == 1 else "nodes_torchrun" if request.launcher == "torchrun" else "nodes_srun"
    on_cpus = args is not None and args.use_cpu
    values = {
        "job-name": batch.job_name or "ds-trainer",
        "nodes": nodes,
        "ntasks-per-node": ranks if name == "nodes_srun" else 1,
        "gpus-per-node": None if on_cpus else ranks,
        "cpus-per-task": batch.cpus_per_rank * (1 if name == "nodes_srun" else ranks),
        "time": batch.time,
        "signal": f"B:USR1@{batch.signal_seconds}",
        "requeue": batch.requeue,
        "no-requeue": not batch.requeue,
        "chdir": batch.folder,
        "partition": batch.partition,
        "account": batch.account,
    }
    settings = {"MAX_RESTARTS": str(batch.max_restarts), "NPROC": str(ranks), **request.environment}
    text = set_sbatch_options(template(name), values, batch.sbatch_args)
    text = _USAGE.sub(_WRITTEN, text)
    exports = "".join(_export(key, value) for key, value in settings.items())
    shared = template("_slurm").split("\n", 2)[2]  # without its shellcheck directives
    text = _SHARED.sub(lambda _: f"{exports}\n{shared}\n", text)
    arguments = " \\\n    ".join(_quoted(arg) for arg in request.target.slurm_arguments())
    return text.replace('prepare "$@"\n', f'prepare {arguments} "$@"\n')


def template(name: str) -> str:
    """The text of a script of ``launch/``, or of the part that they share, ``_slurm``."""
    return (TEMPLATES / (f"{name}.sh" if name.startswith("_") else f"{name}.sbatch")).read_text(encoding="utf-8")


def set_sbatch_options(text: str, values: dict[str, object], further: tuple[str, ...] = ()) -> str:
    """``text`` with these sbatch options. None and False omit an option, True sets it without a value."""
    lines = text.splitlines(keepends=True)
    directives = [index for index, line in enumerate(lines) if line.startswith("#SBATCH ")]
    old = [lines[index].removeprefix("#SBATCH --").strip().partition("=")[0] for index in directives]
    written = []
    for key, line in zip(old, (lines[index] for index in directives), strict=True):
        written.append(_option(key, values[key]) if key in values else line)
    written += [_option(key, value) for key, value in values.items() if key not in old]
    written += [f"#SBATCH {option}\n" for option in further]
    return "".join([*lines[: directives[0]], *written, *lines[directives[-1] + 1 :]])


def parse_time_limit(time: str) -> float:
    """Seconds of a time limit in the format of sbatch; infinity for no limit.

    Raises:
        ValueError: sbatch would not accept it.
    """
    if time.upper() in ("UNLIMITED", "INFINITE"):
        return float("inf")
    match = re.fullmatch(r"(?:([0-9]{1,9})-)?([0-9]{1,9})(?::([0-9]{1,9}))?(?::([0-9]{1,9}))?", time)
    if not match:
        raise ValueError(f"{time!r} is not a time limit")
    days, *parts = match.groups()
    first, second, third = (int(part) if part else 0 for part in parts)
    if days is not None:  # days-hours[:minutes[:seconds]]
        return int(days) * 86400 + first * 3600 + second * 60 + third
    if parts[2] is not None:  # hours:minutes:seconds
        return first * 3600 + second * 60 + third
    return first * 60 + second  # minutes[:seconds]


def _option(key: str, value: object) -> str:
    if value is None or value is False:
        return ""
    text = str(value)
    if re.search(r"""[\s"'#\\]""", text):
        text = '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'
    return f"#SBATCH --{key}\n" if value is True else f"#SBATCH --{key}={text}\n"


def _export(name: str, value: str) -> str:
    if is_secret(name):  # sbatch passes on the environment in which it is called; the script may be read by others
        return f'export {name}="${{{name}:?is a secret: set it where sbatch is called}}"\n'
    return f"export {name}={_quoted(value)}\n"


def _quoted(text: str) -> str:
    """``text`` as a word of bash, on one line and without control characters."""
    if printable(text) == text and "\n" not in text and "\t" not in text:
        return shlex.quote(text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\t", "\\t")
    return f"$'{printable(escaped)}'"


def _text_problems(request: LaunchRequest, batch: BatchRequest) -> list[str]:
    """Values that a directive of sbatch, which is one line, cannot have, and secrets."""
    values = {
        "--job-name": batch.job_name,
        "--partition": batch.partition,
        "--account": batch.account,
        "the working directory": batch.folder,
        **{f"--sbatch-arg {number}": text for number, text in enumerate(batch.sbatch_args, 1)},
    }
    problems = [
        f"launch --slurm: {name} {one_line(shortened(text))!r} has control characters or several lines."
        for name, text in values.items()
        if text is not None and one_line(text) != text
    ]
    problems += [
        f"launch --slurm: --sbatch-arg {shortened(text)!r} is no option; write --sbatch-arg=--qos=long."
        for text in batch.sbatch_args
        if not re.match(r"--?[A-Za-z]", text) and one_line(text) == text
    ]
    arguments = request.target.slurm_arguments()
    if (hidden := command_words(arguments)) != arguments:
        shown = next(now for now, before in zip(hidden, arguments, strict=True) if now != before)
        problems.append(
            f"launch --slurm: the argument {shown!r} has a secret, which would be written into the script; pass it "
            "in an environment variable that is set where sbatch is called."
        )
    return problems


def _recipe_problems(args: TrainingArguments, world_size: int, batch: BatchRequest) -> list[str]:
    problems = []
    if world_size > 0:
        try:
            ParallelLayout.of(args, world_size)
        except ConfigError as error:
            problems += error.problems
    if batch.requeue and args.save_strategy == "no" and not args.enable_jit_checkpoint:
        problems.append(
            f"launch --slurm: save_strategy is 'no' ({args.where('save_strategy')}), so a requeued job starts "
            "over. Set arguments.enable_jit_checkpoint or arguments.save_strategy, or pass --no-requeue."
        )
    return problems


def _time_problems(batch: BatchRequest, args: TrainingArguments | None) -> list[str]:
    try:
        limit = parse_time_limit(batch.time)
    except ValueError as error:
        return [f"launch --slurm: {error}; valid formats: 90 (minutes), 12:00:00, 2-00:00:00 (days-hours)."]
    if not 0 < batch.signal_seconds <= MAX_SIGNAL_SECONDS:
        return [
            f"launch --slurm: --signal-before {batch.signal_seconds} must be from 1 to {MAX_SIGNAL_SECONDS} seconds."
        ]
    problems = []
    if limit <= batch.signal_seconds + SIGNAL_EARLY_SECONDS:
        problems.append(
            f"launch --slurm: --time {batch.time} ({limit:.0f} s) leaves no time for training: the ranks are asked to "
            f"stop {batch.signal_seconds} s before the end (--signal-before), and SLURM may signal up to "
            f"{SIGNAL_EARLY_SECONDS} s earlier. Increase --time or reduce --signal-before."
        )
    if args is not None and limit <= args.time_limit_margin:
        problems.append(
            f"launch --slurm: --time {batch.time} ({limit:.0f} s) leaves no time for training: time_limit_margin is "
            f"{args.time_limit_margin:g} s ({args.where('time_limit_margin')})."
        )
    return problems
