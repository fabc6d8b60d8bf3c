"""``SourceSpec``: where the samples of a source are, and how much of them is wanted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

FileFormat = Literal["auto", "text", "jsonl", "json", "csv", "tsv", "parquet", "arrow", "dataset"]
Kind = Literal["auto", "text", "messages", "prompt_completion", "preference"]


@dataclass(frozen=True)
class SourceSpec:
    """One source: an entry of ``data.train`` or ``data.eval`` in a recipe. An entry that is a text is its ``path``.

    Attributes:
        path: files, directories or glob patterns, or ``python-stdlib``.
        name: in figures and logs; default: the name of the file or directory.
        weight: probability of a sample to come from this source, relative to the weights of the others; default: all
            samples of all sources, each once per epoch.
        limit: use the first samples only.
        format: how the files are read; ``auto`` detects it from directory contents and file names.
        kind: what the samples are; ``auto`` detects it from the keys of the first one.
        text_key: key or column of the text of samples that are plain text.
        file_pattern: pattern for the files of a directory; default: all; for ``python-stdlib``: ``*.py``.
        exclude: patterns; a file is excluded if one matches its path within the directory, or any component of it.
    """

    path: tuple[str, ...] = ()
    name: str | None = None
    weight: float | None = None
    limit: int | None = None
    format: FileFormat = "auto"
    kind: Kind = "auto"
    text_key: str | None = None
    file_pattern: str | None = None
    exclude: tuple[str, ...] = ()

    def problems(self) -> list[str]:
        """What cannot work, as one sentence per problem, each beginning with a key."""
        problems = []
        if not self.path or not all(self.path):
            problems.append("path is missing; name a file, a directory, a glob pattern or 'python-stdlib'.")
        if self.weight is not None and not (self.weight > 0 and math.isfinite(self.weight)):
            problems.append(f"weight={self.weight} must be a positive number; remove the entry to leave a source out.")
        if self.limit is not None and self.limit < 1:
            problems.append(f"limit={self.limit} must be 1 or more.")
        return problems
