"""``PackedData``: the packed rows of the datasets of a Trainer, made once for each dataset."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ds_trainer.arguments.enums import PackingStrategy
from ds_trainer.data.order import DatasetOrder, epoch_order
from ds_trainer.data.stream import is_stream
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.units import counted

if TYPE_CHECKING:
    from ds_trainer.data.packing.datasets import PackedDataset, PackedStream
    from ds_trainer.data.packing.rows import PackedRows

logger = get_logger(__name__)


class RowSettings(NamedTuple):
    """What rows depend on besides the data.

    Attributes:
        max_length: tokens of a row.
        strategy: how samples are chosen for a row.
        seed: decides the order in which samples are taken; None for the order of the dataset.
    """

    max_length: int
    strategy: PackingStrategy
    seed: int | None


class PackedData:
    """Rows by name of the dataset. Reading the length of every sample may take long, so it is done once."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[Any, int, RowSettings, PackedRows, Any]] = {}

    def packed(self, source: Any, dataset: Any, name: str, settings: RowSettings) -> PackedDataset | PackedStream:
        """The dataset of rows.

        Args:
            source: the data of the user, with all columns; rows are kept as long as it is the same object.
            dataset: the same data with the columns that the model takes.
            name: its name in messages.
            settings: what the rows depend on.

        Raises:
            ConfigError: samples have no tokens.
        """
        from ds_trainer.data.packing.datasets import PackedDataset, packed_stream
        from ds_trainer.data.packing.rows import packed_rows
        from ds_trainer.data.packing.token_counts import token_counts

        if is_stream(dataset):
            return packed_stream(dataset, settings.max_length, settings.strategy, settings.seed or 0)
        cached = self._rows.get(name)
        if cached is None or cached[0] is not source or cached[1:3] != (len(source), settings):
            counts = token_counts(source)
            order = (
                DatasetOrder(len(counts))
                if settings.seed is None
                else epoch_order(len(counts), settings.seed, 0, shuffle=True)
            )
            rows = packed_rows(counts, settings.max_length, settings.strategy, order, settings.seed or 0)
            self._report(rows, counts, name)
            cached = self._rows[name] = (source, len(source), settings, rows, counts)
        return PackedDataset(dataset, *cached[3:])

    @staticmethod
    def _report(rows: PackedRows, counts: np.ndarray, name: str) -> None:
        if not len(rows):
            raise ConfigError(f"packing=True: no sample of {name} has a token.")
        if distributed.rank() != 0:
            return
        logger.info("%s is packed: %s.", name, rows.summary.text())
        if rows.summary.dropped:
            longer = int((counts > rows.summary.max_length).sum())
            logger.warning(
                "packing: %s longer than max_length=%d and truncated: %s dropped. "
                "packing_strategy=cut, or a larger max_length, keeps them.",
                counted(longer, f"sample of {name} is", f"samples of {name} are"),
                rows.summary.max_length,
                counted(rows.summary.dropped, "token is", "tokens are"),
            )


def summary_of(loader: Any) -> Any:
    """The :class:`PackingSummary` of a loader of packed rows; None for any other loader."""
    dataset: Any = getattr(loader, "dataset", None)
    return dataset.summary if _is_packed(dataset, "PackedDataset", "PackedStream") else None


def running_log(loader: Any) -> dict[str, float]:
    """What a log says about the rows of a stream read so far; rows of datasets are in the header."""
    dataset: Any = getattr(loader, "dataset", None)
    if not _is_packed(dataset, "PackedStream"):
        return {}
    metrics = dataset.summary.metrics()
    return {name: metrics[name] for name in ("packing_padding", "packing_samples_per_row")}


def _is_packed(dataset: Any, *names: str) -> bool:
    """Whether it is of one of these classes, without loading them: a run without packing has none."""
    module = sys.modules.get("ds_trainer.data.packing.datasets")
    return module is not None and isinstance(dataset, tuple(getattr(module, name) for name in names))
