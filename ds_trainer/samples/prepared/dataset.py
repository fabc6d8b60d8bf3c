"""``PreparedDataset``: reads a prepared dataset sample by sample; nothing of it is held in memory."""

from __future__ import annotations

import bisect
import os
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from ds_trainer.samples.prepared.block_file import BlockFile, DamagedDataset
from ds_trainer.samples.prepared.manifest import LENGTHS_FILE, OFFSETS_FILE, DatasetManifest
from ds_trainer.samples.prepared.shard import Shard

Sample = dict[str, Any]


class PreparedDataset(Dataset[Sample]):
    """A map-style dataset of tokenized samples in memory-mapped files.

    A sample is ``{"input_ids": int64[tokens], "labels": int64[tokens]}``; labels are not shifted, and -100 where
    nothing is trained on. Where the samples of a shard may have images, it has ``images`` as well, a list of paths and
    data URIs. The sizes of all files are compared with the manifest here, and every block of 64 KiB with
    its checksum before a process reads it for the first time.

    Args:
        directory: that :func:`~ds_trainer.samples.prepared.prepare.prepare` returned, or a copy of it.
        key: the key that it must have; None: any.

    Attributes:
        directory: the directory that was passed.
        manifest: the facts about the dataset.
        report: what it took to write it, if this process did.

    Raises:
        DamagedDataset: it is incomplete, damaged, or has another key; also when samples are read.
    """

    def __init__(self, directory: str | os.PathLike[str], key: str | None = None) -> None:
        self.report: Any = None
        self._open(Path(directory), DatasetManifest.read(Path(directory)))
        if key is not None and self.manifest.key != key:
            raise DamagedDataset(f"{directory} has the key {self.manifest.key} instead of {key}.")
        for file in self._files():
            file.check_size()

    def _open(self, directory: Path, manifest: DatasetManifest) -> None:
        self.directory, self.manifest = directory, manifest
        self._samples = manifest.samples
        self._lengths = BlockFile(directory / LENGTHS_FILE, manifest.lengths)
        self._offsets = BlockFile(directory / OFFSETS_FILE, manifest.offsets)
        self._shards = [Shard(directory, record, manifest.dtype) for record in manifest.shards]
        self._first_sample = [0, *accumulate(shard.samples for shard in manifest.shards)]
        self._first_token = [0, *accumulate(shard.tokens for shard in manifest.shards)]

    def __getstate__(self) -> dict[str, Any]:
        return {"directory": self.directory, "manifest": self.manifest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._open(**state)

    def __len__(self) -> int:
        return self._samples

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Tokens of every sample, int32 ``[samples]``, mapped from the file. No token is read."""
        return self._lengths.read(0, 4 * self._samples).view("<i4")

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        return self.manifest.tokens

    @property
    def trained_tokens(self) -> int:
        """Tokens that are targets; the first one of a sample is none."""
        return self.manifest.trained_tokens

    def __getitem__(self, index: int) -> Sample:
        index = range(self._samples)[index]
        shard = bisect.bisect_right(self._first_sample, index) - 1
        length = int(self._lengths.read(4 * index, 4 * index + 4).view("<i4")[0])
        start = int(self._offsets.read(8 * index, 8 * index + 8).view("<i8")[0]) - self._first_token[shard]
        ids, labels = self._shards[shard].sample(start, length)
        sample: Sample = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        if self._shards[shard].has_images:
            sample["images"] = self._shards[shard].images(index - self._first_sample[shard])
        return sample

    def source(self, index: int) -> str:
        """Where the sample comes from: ``file:line`` at the time of preparation."""
        index = range(self._samples)[index]
        shard = bisect.bisect_right(self._first_sample, index) - 1
        return self._shards[shard].source(index - self._first_sample[shard])

    def verify(self) -> None:
        """Read all files and compare their checksums: about a second per GB on one core.

        Raises:
            DamagedDataset: a file is not what was written.
        """
        for file in self._files():
            file.verify()

    def _files(self) -> list[BlockFile]:
        return [self._lengths, self._offsets, *(shard.file for shard in self._shards)]
