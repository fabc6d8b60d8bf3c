"""The devices of a new recipe: ``cpu``, ``8``, ``H100-80GB``, ``8 x H100-80GB`` or ``4 x 8 x H100-80GB``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ds_trainer.planner.cluster import Cluster
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.units import counted, whole_number

FORMS = "cpu, a number of GPUs like those of this machine, 8 x H100-80GB, or 4 x 8 x H100-80GB (machines first)"


@dataclass(frozen=True)
class Devices:
    """Where a recipe is to run.

    Attributes:
        text: what the user wrote.
        cluster: the GPUs; None on CPUs.
    """

    text: str
    cluster: Cluster | None = None

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return 1 if self.cluster is None else self.cluster.world_size

    def command(self, recipe: str) -> str:
        """The command that trains ``recipe`` on them."""
        cluster = self.cluster
        if cluster is None or cluster.world_size == 1:
            return f"ds-trainer train {recipe}"
        nodes = "" if cluster.nodes == 1 else f" --nodes {cluster.nodes} --hostfile hosts"
        return f"ds-trainer launch{nodes} --nproc-per-node {cluster.devices_per_node} {recipe}"


def parse_devices(text: str) -> Devices:
    """Read :data:`FORMS`.

    Raises:
        ConfigError: it is none of them, or the device is unknown.
    """
    words = text.strip()
    if words.lower() == "cpu":
        return Devices("cpu")
    parts = [part.strip() for part in re.split(r"\s+x\s+|(?<=\d)x(?=\s|\d|[A-Za-z])", words)]
    numbers = [number for part in parts if (number := whole_number(part)) is not None]
    names = [part for part in parts if whole_number(part) is None]
    if len(names) > 1 or len(numbers) > 2 or 0 in numbers or not words:
        raise ConfigError(f"--devices {text!r} is not understood. Write {FORMS}.")
    nodes, per_node = numbers if len(numbers) == 2 else (1, numbers[0] if numbers else 1)
    if names:
        return Devices(words, Cluster.of(names[0], nodes, per_node))
    here = Cluster.of_this_machine(nodes)
    if per_node > here.devices_per_node:
        raise ConfigError(
            f"--devices {text}: this machine has {counted(here.devices_per_node, 'GPU')}. Name those of another one, "
            f"as in {per_node} x H100-80GB."
        )
    return Devices(words, Cluster.of(here.device, nodes, per_node))


def default_devices() -> str:
    """The devices of this machine, as :func:`parse_devices` reads them."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return str(count) if count else "cpu"
