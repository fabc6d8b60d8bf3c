"""``ds-trainer init``: writes a commented recipe from the answers to five questions, or from flags."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ds_trainer.utils.errors import ConfigError, did_you_mean
from ds_trainer.utils.files import write_text_atomic

if TYPE_CHECKING:
    from ds_trainer.recipes.new_recipe import Wanted

HELP = "write a recipe: asks five questions, or takes flags"
DESCRIPTION = """Write a commented recipe for ds-trainer train. Reads the first samples of the data and the
configuration of the model, and chooses lengths, batch sizes, ZeRO stage and learning rate for the devices. What is not
given as a flag is asked for; with --yes the defaults are taken."""

_DEFAULT_FILE = "recipe.yaml"
_SFT = "sft"
"""What other tools call supervised fine-tuning, be it of all weights or of adapters."""
_OF_TRL = ("grpo", "kto", "orpo", "ppo", "rloo", "simpo")


def configure(parser: argparse.ArgumentParser, args: Sequence[str]) -> None:
    """Add the arguments of the subcommand."""
    add = parser.add_argument
    add("out", metavar="OUT.yaml", nargs="?", default=_DEFAULT_FILE, help=f"recipe to write; default: {_DEFAULT_FILE}")
    add("--model", metavar="NAME", help="directory or Hub name of the model to start from")
    add("--data", metavar="PATH", nargs="+", help="files, directories or glob patterns")
    tasks = "full, lora, qlora, pretrain, vision_language, dpo, reward, classification or embedding; sft: what fits"
    add("--task", metavar="TASK", help=tasks)
    add("--teacher", metavar="NAME", help="directory or Hub name of a model whose distribution is learned as well")
    add("--devices", metavar="DEVICES", help="cpu, a number of GPUs, 8 x H100-80GB, or 4 x 8 x H100-80GB")
    add("--output", metavar="DIR", help="output directory of the run; default: runs/OUT")
    add("--yes", action="store_true", help="take the defaults of what is not given")
    add("--force", action="store_true", help="replace an existing recipe")


def run(options: argparse.Namespace, args: Sequence[str]) -> int:
    """Ask, look, and write; returns the exit code.

    Raises:
        ConfigError: flags are missing or wrong, or the model or the data cannot be read.
    """
    if args:
        raise ConfigError(f"ds-trainer init: unrecognized arguments: {' '.join(args)}.")
    out = Path(os.path.expanduser(options.out))
    if os.path.lexists(out) and not (options.force and out.is_file() and not out.is_symlink()):
        hint = "--force replaces regular files only" if options.force else "or replace it with --force"
        raise ConfigError(f"{out} exists. Write another file, {hint}.")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"{out}: the directory {out.absolute().parent} does not exist.")
    asks = sys.stdin.isatty() and not options.yes
    if not asks:
        _check_complete(options)

    from ds_trainer.recipes import new_recipe
    from ds_trainer.recipes.devices import FORMS, default_devices, parse_devices

    _check_task_name(options.task, new_recipe.TASKS)
    model = options.model or _ask("Model to start from (directory or Hub name)", None)
    from ds_trainer.recipes.starting_model import read_starting_model

    start = read_starting_model(model)
    data = options.data or shlex.split(_ask("Data (files, directories or patterns)", None))
    from ds_trainer.recipes.data_survey import survey

    samples = survey(data, start)
    print(f"  {samples.describe()}")
    devices = options.devices or (_ask(f"Devices ({FORMS})", default_devices()) if asks else default_devices())
    output = options.output or ""
    wanted = new_recipe.Wanted(start, tuple(data), samples, parse_devices(devices), output, options.teacher)
    task = options.task or _choose_task(wanted, asks)
    if task == _SFT:
        task = new_recipe.supervised_task(wanted)
        print(f"  Task: {task}, the one of {_SFT} that fits.")
    new_recipe.check_task(task, wanted)
    if start.is_bytes and task != "pretrain":
        raise ConfigError(f"The model in {model} reads bytes and has no tokenizer; only --task pretrain can train it.")
    if not output:
        default = f"runs/{out.stem}"  # two recipes never share a directory
        output = _ask("Output directory", default) if asks else default
    from dataclasses import replace

    _write_checked(out, new_recipe.recipe_text(task, replace(wanted, output=output), str(out)))
    print(f"{out} is written. Look at it, then start\n  {wanted.devices.command(shlex.quote(str(out)))}")
    return 0


def _check_complete(options: argparse.Namespace) -> None:
    """Without a terminal everything is given, or has a default that ``--yes`` takes."""
    needed = ["model", "data"] if options.yes else ["model", "data", "task", "devices", "output"]
    missing = [f"--{name}" for name in needed if not getattr(options, name)]
    if not missing:
        return
    hint = "" if options.yes else " --yes takes the defaults of --task, --devices and --output."
    why = "" if options.yes else ", and there is no terminal to ask in"
    raise ConfigError(
        f"ds-trainer init: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing{why}.{hint}"
    )


def _check_task_name(task: str | None, tasks: dict[str, str]) -> None:
    if task in _OF_TRL:
        raise ConfigError(
            f"--task {task}: recipes have no such task. TRL's trainer for it runs in this package without a change: "
            "ds-trainer run SCRIPT.py."
        )
    if task is not None and task not in (*tasks, _SFT):
        raise ConfigError(f"--task {task}: unknown task.{did_you_mean(task, tasks)} The tasks are {', '.join(tasks)}.")


def _ask(question: str, default: str | None) -> str:
    while True:
        try:
            answer = input(f"{question}{f' [{default}]' if default else ''}: ").strip()
        except EOFError:
            raise ConfigError("The input ended before all questions were answered; nothing is written.") from None
        if answer or default:
            return answer or str(default)


def _choose_task(wanted: Wanted, asks: bool) -> str:
    from ds_trainer.recipes.new_recipe import TASKS, default_task

    task, reason = default_task(wanted)
    if not asks:
        print(f"  Task: {task}, because {reason}.")
        return task
    for name, text in TASKS.items():
        print(f"  {name:<15} {text}")
    answer = _ask(f"Task ({task}, because {reason})", task)
    _check_task_name(answer, TASKS)
    return answer


def _write_checked(path: Path, text: str) -> None:
    """Write a recipe that ``ds-trainer train`` accepts; otherwise the file stays as it was."""
    from ds_trainer.recipes.recipe import load_recipe

    before = path.read_bytes() if path.exists() else None
    write_text_atomic(path, text)
    try:
        load_recipe(path)
    except ConfigError:
        if before is None:
            path.unlink()
        else:
            path.write_bytes(before)
        raise
