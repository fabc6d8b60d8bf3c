"""What somebody asks ``ds-trainer launch`` for, as plain data, before anything is looked up or written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ds_trainer.utils.errors import ConfigError

LAUNCHERS = ("auto", "deepspeed", "pdsh", "slurm", "openmpi", "torchrun", "srun")
RECIPE_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class Target:
    """What every rank runs: a recipe with its overrides, or a Python script with its words."""

    path: str
    words: tuple[str, ...] = ()

    @property
    def is_recipe(self) -> bool:
        """Whether ``path`` is a recipe; else it is a Python script."""
        return is_recipe(self.path)

    def command(self) -> list[str]:
        """Words after ``python``."""
        return [*(["-m", "ds_trainer", "train"] if self.is_recipe else []), self.path, *self.words]


@dataclass(frozen=True)
class LaunchRequest:
    """The options of ``ds-trainer launch``. None (0 for a port) says that it is to be found out.

    Attributes:
        environment: variables for all ranks, also those on other machines.
        node_rank: number of this machine where every machine is started by hand.
        launcher_args: further words for pdsh, srun or mpirun.
        restart_preempted: whether exit code 75 counts among what is restarted.
        job_dir: directory that all machines see; holds what launch and ranks tell each other.
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
    """Whether ``path`` names a recipe (by its ending)."""
    return path.endswith(RECIPE_SUFFIXES)


def read_target(path: str, words: Sequence[str] = ()) -> Target:
    """A recipe (``.yaml``) or a script (``.py``) that exists.

    Raises:
        ConfigError: it is neither, or it is not there.
    """
    if not is_recipe(path) and not path.endswith(".py"):
        raise ConfigError(
            f"launch: {path!r} is neither a recipe (.yaml) nor a Python script (.py). Options of launch stand before "
            "it, its own words after it."
        )
    if not Path(path).is_file():
        kind = "recipe" if is_recipe(path) else "script"
        raise ConfigError(f"launch: the {kind} {path!r} does not exist (looked from {Path.cwd()}).")
    return Target(path, tuple(words))


def read_exports(given: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Values of the words ``KEY=VALUE`` and ``KEY`` (its value is taken from ``environment``).

    Raises:
        ConfigError: a name that no shell accepts, a value of several lines, or a variable that is not set.
    """
    exports: dict[str, str] = {}
    problems = []
    for word in given:
        name, equals, value = word.partition("=")
        if not name.isidentifier() or not name.isascii():
            problems.append(f"launch --env {word!r}: {name!r} is no name of an environment variable.")
        elif not equals and name not in environment:
            problems.append(f"launch --env {name}: the variable is not set here; write --env {name}=VALUE.")
        else:
            exports[name] = value if equals else environment[name]
            if "\n" in exports[name]:
                problems.append(f"launch --env {name}: a value of several lines cannot be passed on.")
    if problems:
        raise ConfigError(problems)
    return exports
