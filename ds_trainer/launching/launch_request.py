"""The options of ``ds-trainer launch`` as plain data, before the environment is inspected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ds_trainer.utils.errors import ConfigError

LAUNCHERS = ("auto", "deepspeed", "pdsh", "slurm", "openmpi", "torchrun", "srun")
RECIPE_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class Target:
    """What every rank runs: a recipe with overrides, or a Python script with arguments.

    Attributes:
        runner: arguments of Python that run the script, such as ``-m ds_trainer.run``.
    """

    path: str
    args: tuple[str, ...] = ()
    runner: tuple[str, ...] = ()

    @property
    def is_recipe(self) -> bool:
        """Whether ``path`` is a recipe rather than a Python script."""
        return is_recipe(self.path)

    def command(self) -> list[str]:
        """The arguments after ``python``."""
        return [*(["-m", "ds_trainer", "train"] if self.is_recipe else self.runner), self.path, *self.args]

    def slurm_arguments(self) -> list[str]:
        """The arguments of a batch script: it finds out itself how to run a recipe or a script."""
        return [*self.runner, self.path, *self.args]


@dataclass(frozen=True)
class LaunchRequest:
    """The options of ``ds-trainer launch``. None (0 for a port) means: determined automatically.

    Attributes:
        environment: variables for all ranks, including those on other machines.
        node_rank: index of this machine, if launch is run on every machine.
        launcher_args: extra arguments for pdsh, srun or mpirun.
        restart_preempted: whether to restart after exit code 75, too.
        job_dir: directory that all machines share, for the files of launch and its ranks.
    """

    target: Target
    nodes: int | None = None
    nproc_per_node: int | None = None
    hostfile: str | None = None
    launcher: str = "auto"
    master_addr: str | None = None
    master_port: int = 0
    node_rank: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    launcher_args: tuple[str, ...] = ()
    max_restarts: int = 0
    restart_preempted: bool = False
    job_dir: str | None = None


def is_recipe(path: str) -> bool:
    """Whether ``path`` has the suffix of a recipe."""
    return path.endswith(RECIPE_SUFFIXES)


def read_target(path: str, args: Sequence[str] = ()) -> Target:
    """A recipe (``.yaml``) or a script (``.py``) that exists.

    Raises:
        ConfigError: ``path`` is neither, or does not exist.
    """
    if not is_recipe(path) and not path.endswith(".py"):
        raise ConfigError(
            f"launch: {path!r} is neither a recipe (.yaml) nor a Python script (.py). Place the "
            "options of launch before it and its arguments after it."
        )
    if not Path(path).is_file():
        kind = "recipe" if is_recipe(path) else "script"
        raise ConfigError(f"launch: the {kind} {path!r} does not exist (working directory: {Path.cwd()}).")
    return Target(path, tuple(args))


def read_exports(given: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of ``--env KEY=VALUE`` and ``--env KEY`` (the value comes from ``environment``).

    Raises:
        ConfigError: an invalid name, a value of several lines, or a variable that is not set.
    """
    exports: dict[str, str] = {}
    problems = []
    for entry in given:
        name, equals, value = entry.partition("=")
        if not name.isidentifier() or not name.isascii():
            problems.append(f"launch --env {entry!r}: {name!r} is not a valid name of an environment variable.")
        elif not equals and name not in environment:
            problems.append(f"launch --env {name}: the variable is not set here; write --env {name}=VALUE.")
        else:
            exports[name] = value if equals else environment[name]
            if "\n" in exports[name]:
                problems.append(f"launch --env {name}: a value of several lines cannot be passed to the ranks.")
    if problems:
        raise ConfigError(problems)
    return exports
