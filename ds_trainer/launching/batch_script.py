"""The batch script of a job, for ``sbatch``: one of ``launch/*.sbatch`` with the values of this job in it.

Those scripts and their shared part lie in ``slurm/`` beside this file; a script that is written here holds all it
needs, so that it runs where only the package is installed. What cannot work is refused before anything is in a queue.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from ds_trainer.arguments.recipe import load_recipe
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.launching.request import LaunchRequest
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.utils.errors import ConfigError

TEMPLATES = Path(__file__).resolve().parent / "slurm"
EARLY_SECONDS = 60
"""SLURM looks at time limits now and then: its signal may come so much earlier than asked for."""
MOST_SIGNAL_SECONDS = 65535
_SHARED = re.compile(r'^# shellcheck source=launch/_slurm\.sh\nsource "[^"\n]*"\n', re.MULTILINE)
_WRITTEN = """\
#
# Written by `ds-trainer launch --slurm`; start it with sbatch.
# shellcheck disable=SC2034,SC2317 # each script uses a part of what they share, some of it in a trap
"""
_USAGE = re.compile(r"^#\n(?:#   sbatch .*\n)+#\n# Submit it from the clone\..*\n", re.MULTILINE)


@dataclass(frozen=True)
class BatchRequest:
    """What a batch script is written for, beside what ``launch`` is asked for anyway.

    Attributes:
        time: time limit of one start of the job, as sbatch takes it (``12:00:00``, ``2-00``, ``90``).
        signal_seconds: how long before its end the ranks are asked to stop at a checkpoint.
        cpus_per_rank: cores for each rank.
        requeue: whether the job may start again: after such a stop, a preemption, the loss of a node.
        folder: where it runs; None for the folder in which sbatch is called.
        sbatch_words: further words of sbatch, as ``--qos=long``; they count more than all others.
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
    sbatch_words: tuple[str, ...] = ()


def batch_script(request: LaunchRequest, batch: BatchRequest) -> str:
    """The text of the script.

    Raises:
        ConfigError: the job cannot work; all problems at once.
    """
    problems: list[str] = []
    nodes, ranks = request.nodes or 1, request.nproc_per_node or 0
    if request.launcher not in ("auto", "srun", "torchrun"):
        problems.append(
            f"launch --slurm: --launcher {request.launcher} has no batch script; srun starts each rank (auto), or "
            "torchrun those of a node."
        )
    if ranks < 1:
        problems.append("launch --slurm: give --nproc-per-node, the GPUs of a node: this machine need not be like it.")
    args = None
    if request.target.is_recipe:
        args = load_recipe(request.target.path, request.target.words).training_arguments()
        problems += _problems_of_recipe(args, nodes * ranks, batch)
    problems += _problems_of_times(batch, args)
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
    text = with_values(template(name), values, batch.sbatch_words)
    text = _USAGE.sub(_WRITTEN, text)
    exports = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in settings.items())
    shared = template("_slurm").split("\n", 2)[2]  # without its own lines for shellcheck
    text = _SHARED.sub(lambda _: f"{exports}\n{shared}\n", text)
    words = " \\\n    ".join(shlex.quote(word) for word in (request.target.path, *request.target.words))
    return text.replace('prepare "$@"\n', f'prepare {words} "$@"\n')


def template(name: str) -> str:
    """The text of a script of ``launch/``, or of their shared part, ``_slurm``."""
    return (TEMPLATES / (f"{name}.sh" if name.startswith("_") else f"{name}.sbatch")).read_text(encoding="utf-8")


def with_values(text: str, values: dict[str, object], further: tuple[str, ...] = ()) -> str:
    """``text`` with these options of sbatch: None and False leave one out, True gives one without a value."""
    lines = text.splitlines(keepends=True)
    places = [place for place, line in enumerate(lines) if line.startswith("#SBATCH ")]
    old = [lines[place].removeprefix("#SBATCH --").strip().partition("=")[0] for place in places]
    written = []
    for key, line in zip(old, (lines[place] for place in places), strict=True):
        written.append(_option(key, values[key]) if key in values else line)
    written += [_option(key, value) for key, value in values.items() if key not in old]
    written += [f"#SBATCH {word}\n" for word in further]
    return "".join([*lines[: places[0]], *written, *lines[places[-1] + 1 :]])


def seconds_of(time: str) -> float:
    """Seconds of a time limit as sbatch takes it; infinity for none.

    Raises:
        ValueError: sbatch would not take it.
    """
    if time.upper() in ("UNLIMITED", "INFINITE"):
        return float("inf")
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if not found:
        raise ValueError(f"{time!r} is no time limit")
    days, *parts = found.groups()
    first, second, third = (int(part) if part else 0 for part in parts)
    if days is not None:  # days-hours[:minutes[:seconds]]
        return int(days) * 86400 + first * 3600 + second * 60 + third
    if parts[2] is not None:  # hours:minutes:seconds
        return first * 3600 + second * 60 + third
    return first * 60 + second  # minutes[:seconds]


def _option(key: str, value: object) -> str:
    if value is None or value is False:
        return ""
    return f"#SBATCH --{key}\n" if value is True else f"#SBATCH --{key}={value}\n"


def _problems_of_recipe(args: TrainingArguments, world_size: int, batch: BatchRequest) -> list[str]:
    problems = []
    if world_size > 0:
        try:
            ParallelLayout.of(args, world_size)
        except ConfigError as error:
            problems += error.problems
    if batch.requeue and args.save_strategy == "no" and not args.enable_jit_checkpoint:
        problems.append(
            f"launch --slurm: save_strategy is 'no' ({args.where('save_strategy')}), so a job that is started again "
            "begins anew. Set arguments.enable_jit_checkpoint or arguments.save_strategy, or give --no-requeue."
        )
    return problems


def _problems_of_times(batch: BatchRequest, args: TrainingArguments | None) -> list[str]:
    try:
        limit = seconds_of(batch.time)
    except ValueError as error:
        return [f"launch --slurm: {error}; sbatch takes 90 (minutes), 12:00:00 and 2-00:00:00 (days-hours)."]
    if not 0 < batch.signal_seconds <= MOST_SIGNAL_SECONDS:
        return [
            f"launch --slurm: --signal-before {batch.signal_seconds} must be from 1 to {MOST_SIGNAL_SECONDS} seconds."
        ]
    problems = []
    if limit <= batch.signal_seconds + EARLY_SECONDS:
        problems.append(
            f"launch --slurm: with --time {batch.time} ({limit:.0f} s) nothing is trained: the ranks are asked to "
            f"stop {batch.signal_seconds} s before the end (--signal-before), and SLURM may do so {EARLY_SECONDS} s "
            "earlier. Give more time, or a later signal."
        )
    if args is not None and limit <= args.time_limit_margin:
        problems.append(
            f"launch --slurm: with --time {batch.time} ({limit:.0f} s) nothing is trained: time_limit_margin is "
            f"{args.time_limit_margin:g} s ({args.where('time_limit_margin')})."
        )
    return problems
