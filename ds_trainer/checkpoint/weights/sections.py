"""Sections of weight files: consecutive elements, viewed as model tensors and as entries of the file's header."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from ds_trainer.checkpoint.weights.weight_files import WeightFilesError, WeightSpec


class Section(NamedTuple):
    """Consecutive elements in a weight file.

    Attributes:
        tensors: the model tensors that provide the elements, in order.
        entries: the entries of the file's header for the same elements, in order.
    """

    tensors: tuple[WeightSpec, ...]
    entries: tuple[WeightSpec, ...]

    @classmethod
    def of(cls, weight: WeightSpec) -> Section:
        """Returns the section of a tensor that is stored as it is in the model."""
        return cls((weight,), (weight,))

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return sum(weight.nbytes for weight in self.tensors)

    @property
    def dtype(self) -> torch.dtype:
        """The common dtype of the elements."""
        return self.tensors[0].dtype

    def split(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the entries; each is valid until the next one is requested.

        Args:
            tensors: names and full tensors, in the order of :attr:`tensors`; each is requested when it is needed.

        Raises:
            WeightFilesError: the iterator yields an unexpected tensor.
        """
        expected = iter(self.tensors)
        rest: torch.Tensor | None = None
        for entry in self.entries:
            missing, parts = entry.numel, list[torch.Tensor]()
            while missing or not parts:
                if rest is None or not len(rest):
                    rest = None  # never two tensors in memory
                    parts = [part.cpu().clone() for part in parts]
                    rest = _checked(next(expected), *next(tensors)).reshape(-1)
                parts.append(rest[:missing])
                rest, missing = rest[missing:], missing - len(parts[-1])
            yield entry.name, (parts[0] if len(parts) == 1 else torch.cat([p.cpu() for p in parts])).view(entry.shape)


def entries_of(sections: Iterable[Section]) -> list[WeightSpec]:
    """Returns the header entries of a file of ``sections``."""
    return [entry for section in sections for entry in section.entries]


def tensor_names(sections: Iterable[Section]) -> list[str]:
    """Returns the model's names of the tensors in a file, in order."""
    return [weight.name for section in sections for weight in section.tensors]


def _checked(weight: WeightSpec, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if (name, tuple(tensor.shape), tensor.dtype) != weight:
        raise WeightFilesError(
            f"Expected {weight.name}, {list(weight.shape)} of {weight.dtype}, but got {name}, {list(tensor.shape)} of "
            f"{tensor.dtype}. The files of the previous save are unchanged."
        )
    return tensor
