"""Sections of weight files: the same elements as tensors of the model and as tensors that the file lists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from ds_trainer.checkpoint.weights.weight_files import Weight, WeightFilesError


class Section(NamedTuple):
    """Elements that follow each other in a weight file.

    Attributes:
        tensors: of the model: those that the elements are of, one after the other.
        entries: of the file: what its header lists, one after the other.
    """

    tensors: tuple[Weight, ...]
    entries: tuple[Weight, ...]

    @classmethod
    def of(cls, weight: Weight) -> Section:
        """A tensor as the model has it."""
        return cls((weight,), (weight,))

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return sum(weight.nbytes for weight in self.tensors)

    @property
    def dtype(self) -> torch.dtype:
        """Type of all elements."""
        return self.tensors[0].dtype

    def cut(self, arriving: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The entries, each of which is valid until the next is asked for.

        Args:
            arriving: the whole ``tensors`` in their order, by name; each is asked for when it is its turn.

        Raises:
            WeightFilesError: another tensor arrives.
        """
        expected = iter(self.tensors)
        rest: torch.Tensor | None = None
        for entry in self.entries:
            missing, parts = entry.numel, list[torch.Tensor]()
            while missing or not parts:
                if rest is None or not len(rest):
                    rest = None  # not two tensors in memory
                    parts = [part.cpu().clone() for part in parts]
                    rest = _expected(next(expected), *next(arriving)).reshape(-1)
                parts.append(rest[:missing])
                rest, missing = rest[missing:], missing - len(parts[-1])
            yield entry.name, (parts[0] if len(parts) == 1 else torch.cat([p.cpu() for p in parts])).view(entry.shape)


def entries_of(sections: Iterable[Section]) -> list[Weight]:
    """What the header of a file of ``sections`` lists."""
    return [entry for section in sections for entry in section.entries]


def tensor_names(sections: Iterable[Section]) -> list[str]:
    """The model's names of the tensors of a file, in its order."""
    return [weight.name for section in sections for weight in section.tensors]


def _expected(weight: Weight, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if (name, tuple(tensor.shape), tensor.dtype) != weight:
        raise WeightFilesError(
            f"{weight.name} should be {list(weight.shape)} of {weight.dtype}, but what arrived is {name}, "
            f"{list(tensor.shape)} of {tensor.dtype}. Nothing of an earlier save was replaced."
        )
    return tensor
