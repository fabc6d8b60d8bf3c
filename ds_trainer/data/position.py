"""Where a run stands in its data, counted in samples: any layout and any global batch can go on from there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class DataPosition:
    """A place between two optimizer steps.

    Attributes:
        epoch: the epoch that is being read.
        samples: of its order, how many have been trained on, by all replicas together.
        steps: optimizer steps done in it.
        rounds: micro-batches of each replica done in it.
        round_size: samples of a round, all replicas together.
        ordered_for: the global batch that its order was made for; orders that look at lengths depend on it, and stay
            what they are to the end of the epoch.
        ended: the epoch has been left, and only what is done at its end is missing.
    """

    epoch: int = 0
    samples: int = 0
    steps: int = 0
    rounds: int = 0
    round_size: int = 0
    ordered_for: int = 0
    ended: bool = False

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> DataPosition:
        """What :meth:`to_json` gave."""
        known = {item.name for item in fields(cls)}
        return cls(**{name: entry for name, entry in value.items() if name in known})
