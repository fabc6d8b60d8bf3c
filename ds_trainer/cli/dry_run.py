"""``ds-trainer plan --dry-run N``, ``ds-trainer train --dry-run N``: the start-up of rank 0 of N ranks.

See :mod:`ds_trainer.training.dry_run`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_trainer.cli.plan_request import DEVICES_PER_NODE
from ds_trainer.compatibility.replacement import replace_transformers
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.exit_codes import DONE
from ds_trainer.utils.outcomes import VARIABLE as OUTCOMES

if TYPE_CHECKING:
    from ds_trainer.planner.candidate import Candidate

# Nothing is downloaded, and no process that waits for this job hears of it.
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", OUTCOMES: None, "TORCHELASTIC_ERROR_FILE": None}
_DEVICE_TYPE = "cuda"  # of plans; a recipe with use_cpu is for CPUs


def is_recipe(name: str) -> bool:
    """Whether ``plan`` was given a recipe."""
    return Path(name).suffix in (".yaml", ".yml")


def set_cluster(options: argparse.Namespace) -> None:
    """Let the cluster of ``options`` have as many devices as the dry run has ranks."""
    options.devices_per_node = min(options.devices_per_node or DEVICES_PER_NODE, options.dry_run)
    options.nodes = -(-options.dry_run // options.devices_per_node)


def rehearse_recipe(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the dry run of a recipe; returns the exit code.

    Raises:
        ConfigError: ``ds-trainer train`` on this number of ranks would raise it too.
    """
    return _rehearse(options, "dry_run_of_recipe", options.model, list(overrides))


def rehearse_candidate(options: argparse.Namespace, config: Mapping[str, Any], candidate: Candidate) -> int:
    """Print the dry run of a new model in the layout of ``candidate``; returns the exit code.

    Raises:
        ConfigError: the start of such a training would raise it too.
    """
    if not options.json:
        print(f"Plan: {candidate.describe()}")
    return _rehearse(options, "dry_run_of_model", dict(config), candidate.arguments(), candidate.length)


def _rehearse(options: argparse.Namespace, name: str, *args: Any) -> int:
    ranks = (options.dry_run, options.devices_per_node, _DEVICE_TYPE, options.device)
    rehearsal = in_child_process(_call, name, (*args, *ranks), environment=_ENVIRONMENT)
    print(json.dumps(asdict(rehearsal), indent=2) if options.json else "\n".join(rehearsal.lines()))
    return DONE


def _call(name: str, args: tuple[Any, ...]) -> Any:
    os.dup2(2, 1)  # what libraries print is not part of the report

    from ds_trainer.recipes import dry_run  # imports torch, in the child process only

    more = {"replace_transformers": replace_transformers} if name == "dry_run_of_recipe" else {}
    return getattr(dry_run, name)(*args, **more)


# Calls a function in a process of its own, which changes nothing in this one.


class ChildFailed(RuntimeError):
    """The function raised anything but a ConfigError, or its process ended. The message has its traceback."""


def in_child_process(
    function: Callable[..., Any], *args: Any, environment: Mapping[str, str | None] | None = None
) -> Any:
    """Return ``function(*args)``, called in a new interpreter.

    Args:
        function: defined at the top of a module; it, its arguments and its result can be pickled.
        args: its arguments.
        environment: variables that the process has before it imports anything; None removes one.

    Raises:
        ConfigError: the function raised it.
        ChildFailed: it raised something else, or its process was ended.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    call = pickle.dumps((function, args))
    process = context.Process(target=_serve, args=(there, dict(environment or {}), call), daemon=False)
    process.start()
    there.close()
    try:
        good, value = here.recv()
    except EOFError:
        process.join()
        raise ChildFailed(f"the process ended with exit code {process.exitcode}") from None
    except BaseException:  # an interrupt: the child is of no use anymore
        process.terminate()
        raise
    finally:
        process.join()
        here.close()
    if good:
        return value
    raise value if isinstance(value, ConfigError) else ChildFailed(value)


def _serve(connection: Connection, environment: Mapping[str, str | None], call: bytes) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    try:
        function, args = pickle.loads(call)
        answer = (True, function(*args))
    except ConfigError as error:
        answer = (False, error)
    except Exception:
        answer = (False, traceback.format_exc())
    connection.send(answer)
