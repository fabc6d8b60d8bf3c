"""``ds-trainer``: finds the subcommand, and turns errors into one message and an exit code.

Exit codes: :mod:`ds_trainer.utils.exit_codes`, and 130 interrupted. What cannot work, and a training that diverged,
give a message on stderr and no traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence

import ds_trainer
from ds_trainer.cli import arguments, checkpoint, config, doctor, launch, reference, support, train
from ds_trainer.cli.words import split_overrides, without_local_rank
from ds_trainer.monitor.health.finite import TrainingDiverged
from ds_trainer.utils.errors import ConfigError, did_you_mean
from ds_trainer.utils.exit_codes import CANNOT_WORK, DONE, FAILED
from ds_trainer.utils.outcomes import record_outcome
from ds_trainer.utils.ranks import likely_rank

SUBCOMMANDS = {
    "train": train,
    "launch": launch,
    "config": config,
    "checkpoint": checkpoint,
    "doctor": doctor,
    "arguments": arguments,
    "reference": reference,
    "support": support,
}
# How long a rank lets the main process speak first: launchers end the other ranks as soon as one of them fails.
_PATIENCE_SECONDS = 3.0


def main(given: Sequence[str] | None = None) -> int:
    """Run ``ds-trainer`` with ``given`` words (default: those of the process); gives the exit code.

    A training also writes its exit code where ``DS_TRAINER_OUTCOME_DIR`` says: launchers lose it.
    """
    words = list(sys.argv[1:] if given is None else given)
    code = FAILED
    try:
        code = _answer(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else DONE if end.code is None else FAILED
        raise
    finally:
        if "train" in words[:2]:  # deepspeed may put --local_rank=N before it
            record_outcome(code)
    return code


def _answer(words: list[str]) -> int:
    try:
        return _run(words)
    except ConfigError as error:
        print_error(str(error))
        return CANNOT_WORK
    except TrainingDiverged as error:
        print_error(str(error))
        return FAILED
    except KeyboardInterrupt:
        print_error("interrupted.")
        return 130
    except BrokenPipeError:  # the reader of our output (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it flushes
        return DONE


def print_error(message: str) -> None:
    """One message on stderr for the whole job: other ranks wait a moment, so that rank 0 can speak for all.

    A rank whose error nobody else has is still heard, with its number.
    """
    rank = likely_rank(os.environ)
    if rank == 0:
        print(f"ds-trainer: {message}", file=sys.stderr, flush=True)
        return
    time.sleep(_PATIENCE_SECONDS)
    print(f"ds-trainer (rank {rank}): {message}", file=sys.stderr, flush=True)


def _run(words: list[str]) -> int:
    overrides: list[str] = []
    if not getattr(SUBCOMMANDS.get(words[0] if words else ""), "TAKES_ALL_WORDS", False):
        words, overrides = split_overrides(without_local_rank(words))
    parser = argparse.ArgumentParser(
        prog="ds-trainer",
        allow_abbrev=False,
        description="Train language models through a DeepSpeed engine.",
        epilog="Use 'ds-trainer SUBCOMMAND --help' for one of them.",
    )
    parser.add_argument("--version", action="version", version=f"ds-trainer {ds_trainer.__version__}")
    subparsers = parser.add_subparsers(dest="subcommand", metavar="SUBCOMMAND")
    for name, module in SUBCOMMANDS.items():
        subparser = subparsers.add_parser(name, help=module.HELP, description=module.DESCRIPTION, allow_abbrev=False)
        module.configure(subparser, words[words.index(name) + 1 :] if name in words else [])
    first = next((word for word in words if not word.startswith("-")), None)
    if first is not None and first not in SUBCOMMANDS:
        listed = ", ".join(SUBCOMMANDS)
        raise ConfigError(f"unknown subcommand {first!r}.{did_you_mean(first, SUBCOMMANDS)} There are: {listed}.")
    options, unknown = parser.parse_known_args(words)
    if options.subcommand is None:
        parser.print_help()
        return 2
    run: Callable[[argparse.Namespace, Sequence[str]], int] = SUBCOMMANDS[options.subcommand].run
    return run(options, overrides + unknown)  # the recipe knows what an unknown word may have been meant to be
