"""``prepare_and_verify``: prepares before a job, and makes sure that what is there is whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence

from ds_trainer.samples.prepared.block_file import DamagedDataset, writing
from ds_trainer.samples.prepared.dataset import PreparedDataset
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)


def prepare_and_verify(make: Callable[[], Sequence[PreparedDataset]]) -> str:
    """Prepare datasets, read those that were there, and prepare again what is damaged: ``ds-trainer data prepare``.

    Args:
        make: prepares the datasets or finds them; it is called again if one was damaged.

    Returns:
        What was written or found, and where, for a terminal.

    Raises:
        ConfigError: the data cannot be prepared, or a damaged dataset cannot be removed.
    """
    datasets = make()
    damaged = [dataset for dataset in datasets if dataset.report is None and not _is_whole(dataset)]
    if damaged:
        for dataset in damaged:
            with writing(dataset.directory):
                shutil.rmtree(dataset.directory)
        datasets = make()
    return "\n\n".join(map(_text, datasets))


def _is_whole(dataset: PreparedDataset) -> bool:
    try:
        dataset.verify()
    except DamagedDataset as error:
        logger.warning("%s It is prepared again.", error)
        return False
    return True


def _text(dataset: PreparedDataset) -> str:
    if dataset.report is not None:
        return str(dataset.report.text())
    return (
        f"{len(dataset):,} samples, {dataset.tokens:,} tokens, {dataset.trained_tokens:,} of them trained on: prepared "
        f"before, all checksums are right\nin {dataset.directory}"
    )
