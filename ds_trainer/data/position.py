"""The position of a run in its data, in samples, so that any layout and any global batch size can resume from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class DataPosition:
    """A position between two optimizer steps.

    Attributes:
        epoch: the current epoch.
        samples: samples of its order that all replicas together have trained on.
        steps: optimizer steps done in it.
        micro_steps: micro-batches of each replica done in it.
        samples_per_micro_step: samples of a micro-step, over all replicas.
        ordered_for: global batch size for which its order was made. Orders by length depend on it, and do not change
            before the end of the epoch.
        ended: whether all its steps are done, and only the work at its end is missing.
        seed: seed of its order, which does not change before the end of the epoch either; None: that of the run.
        stream: the order of a stream that is read in shards (:class:`ds_trainer.data.stream_shards.StreamOrder`), which
            does not change before the end of the epoch either; None: it is read in its own order.
    """

    epoch: int = 0
    samples: int = 0
    steps: int = 0
    micro_steps: int = 0
    samples_per_micro_step: int = 0
    ordered_for: int = 0
    ended: bool = False
    seed: int | None = None
    stream: tuple[int, int, bool] | None = None

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> DataPosition:
        """The position that :meth:`to_json` returned."""
        known = {item.name for item in fields(cls)}
        return cls(**{name: entry for name, entry in value.items() if name in known})
