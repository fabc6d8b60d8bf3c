"""``ds-trainer``: runs a subcommand, and turns errors into one message and an exit code.

Exit codes: :mod:`ds_trainer.utils.exit_codes`, and 130 if interrupted. ConfigError and a diverged training give a
message on stderr without a traceback.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import ds_trainer
from ds_trainer.cli import (
    arguments,
    chat,
    checkpoint,
    config,
    dashboard,
    data,
    doctor,
    init,
    launch,
    plan,
    plot,
    report,
    run,
    support,
    train,
)
from ds_trainer.cli.argv import (
    refuse_impossible_paths,
    refuse_misspelled,
    split_overrides,
    unknown_choice,
    without_local_rank,
)
from ds_trainer.monitor.health.divergence import TrainingDiverged
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.exit_codes import CANNOT_WORK, DONE, FAILED, code_of
from ds_trainer.utils.logging import MAIN_FIRST_SECONDS
from ds_trainer.utils.outcomes import record_outcome
from ds_trainer.utils.printable import shown
from ds_trainer.utils.ranks import likely_rank

SUBCOMMANDS: dict[str, Any] = {
    "init": init,
    "train": train,
    "profile": train.PROFILE,
    "chat": chat,
    "launch": launch,
    "run": run,
    "config": config,
    "data": data,
    "plan": plan,
    "checkpoint": checkpoint,
    "doctor": doctor,
    "plot": plot,
    "report": report,
    "dashboard": dashboard,
    "arguments": arguments,
    "support": support,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``ds-trainer`` with the arguments ``argv`` (default: those of the process); returns the exit code.

    ``train`` also records its exit code in the directory ``DS_TRAINER_OUTCOME_DIR``, since launchers lose it.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what the encoding of a terminal lacks is no reason to fail
    # bitsandbytes, which peft imports, warns of a package that only its 4-bit layers on CPUs use.
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda record: "kernels-community" not in record.msg)
    code = FAILED
    try:
        code = _run_reporting_errors(args)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else DONE if end.code is None else FAILED
        raise
    except Exception as error:
        code = code_of(error)
        raise
    finally:
        if "train" in args[:2]:  # deepspeed may insert --local_rank=N before it
            record_outcome(code)
    return code


def _run_reporting_errors(args: list[str]) -> int:
    try:
        return _run(args)
    except ConfigError as error:
        print_error(str(error))
        return CANNOT_WORK
    except RuntimeError as error:
        if not (isinstance(error, TrainingDiverged) or getattr(error, "by_disk", False)):  # a SaveFailed
            raise
        print_error(str(error))
        return code_of(error)
    except KeyboardInterrupt:
        print_error("interrupted.")
        return 130
    except BrokenPipeError:  # the reader of the output (head, less) has exited
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # otherwise Python reports an error when it flushes
        return DONE
    except OSError as error:
        # Of a place that the user named. In a training it may be anything, and where it was raised says more.
        command = next((word for word in args if not word.startswith("-")), "")
        if not error.strerror or command in ("train", "run", "profile"):
            raise
        print_error(f"{error.strerror}{f': {error.filename}' if error.filename else ''}.")
        return CANNOT_WORK


def print_error(message: str) -> None:
    """Print an error once per job, on stderr.

    Other ranks wait a few seconds, in which the launcher ends them if rank 0 has failed too. So the error of a single
    rank is still printed, with its rank.
    """
    rank = likely_rank(os.environ)
    if rank == 0:
        print(f"ds-trainer: {shown(message)}", file=sys.stderr, flush=True)
        return
    time.sleep(MAIN_FIRST_SECONDS)
    print(f"ds-trainer (rank {rank}): {shown(message)}", file=sys.stderr, flush=True)


class _Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one sentence, as the other errors of the command line are, without the usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog.partition(' ')[2]}: {message}. See {self.prog} --help.".removeprefix(": "))


def parse(args: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of a command line, and the words that the subcommand reads itself: overrides of a recipe.

    Raises:
        ConfigError: a wrong argument; SystemExit after ``--help`` and the like.
    """
    overrides: list[str] = []
    if not getattr(SUBCOMMANDS.get(args[0] if args else ""), "TAKES_RAW_ARGV", False):
        args, overrides = split_overrides(without_local_rank(args))
    parser = _Parser(
        prog="ds-trainer",
        allow_abbrev=False,
        description="Train models with DeepSpeed.",
        epilog="Run 'ds-trainer SUBCOMMAND --help' for the options of a subcommand.",
    )
    parser.add_argument("--version", action="version", version=f"ds-trainer {ds_trainer.__version__}")
    subparsers = parser.add_subparsers(dest="subcommand", metavar="SUBCOMMAND")
    first = next((arg for arg in args if not arg.startswith("-")), None)
    if first is not None and first not in SUBCOMMANDS:
        raise unknown_choice("subcommand", first, SUBCOMMANDS)
    for name, module in SUBCOMMANDS.items():
        subparser = subparsers.add_parser(name, help=module.HELP, description=module.DESCRIPTION, allow_abbrev=False)
        module.configure(subparser, args[args.index(name) + 1 :] if name == first else [])
    options, unknown = parser.parse_known_args(args)
    if options.subcommand is None:
        if unknown:
            parser.error(f"unknown option {unknown[0]!r}")
        parser.print_help()
        parser.exit(2)
    refuse_misspelled(options.subcommand, unknown, subparsers.choices[options.subcommand])
    refuse_impossible_paths(subparsers.choices[options.subcommand], options)
    return options, overrides + unknown  # the recipe reports unknown arguments, with suggestions


def _run(args: list[str]) -> int:
    options, rest = parse(args)
    run: Callable[[argparse.Namespace, Sequence[str]], int] = SUBCOMMANDS[options.subcommand].run
    return run(options, rest)
