"""``ImageCollator``: batches of samples with and without images, whose pixels are read here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ds_trainer.data.collators import TokenPaddingCollator
from ds_trainer.samples.images.image_encoder import ImageEncoder
from ds_trainer.samples.sources.images import BadImage, read_image, shown
from ds_trainer.utils.errors import ConfigError


class ImageCollator:
    """Pads samples to the longest of the batch, and reads and processes their images.

    Runs in the processes of the data loader: only the batches that are on their way are in memory. A batch has the
    keys of :class:`~ds_trainer.data.collators.TokenPaddingCollator`, and whatever the processor makes of the images.

    Args:
        encoder: that made the samples.
        pad_token_id: the token of padding.
        dtype: pixels get this type; None: what the processor makes (float32).
        always: a batch without any image gets one more row, a blank image on which nothing is trained, so that the
            model runs its vision tower in every batch, on every rank. Otherwise the ranks would disagree at ZeRO 3 on
            the parameters that they gather, and wait for each other. The row adds nothing to the loss and to gradients.
    """

    def __init__(
        self, encoder: ImageEncoder, pad_token_id: int = 0, dtype: torch.dtype | None = None, always: bool = True
    ) -> None:
        self._tokens = encoder.tokens
        self._pad = TokenPaddingCollator(pad_token_id)
        self._dtype = dtype
        self._dummy = encoder.dummy() if always else None

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """The batch of ``features``: samples with ``input_ids``, ``labels`` and perhaps ``images``.

        Raises:
            ConfigError: an image cannot be read any more, or is not the one that was prepared.
        """
        rows = list(features)
        if self._dummy is not None and not any(row.get("images") for row in rows):
            rows.append(_like(rows[0], self._dummy))
        batch = self._pad(rows)
        batch |= self._tokens.token_types(batch["input_ids"])
        with_images = [index for index, row in enumerate(rows) if row.get("images")]
        if not with_images:
            return batch
        images = [[self._read(image) for image in rows[index]["images"]] for index in with_images]
        pixels, counts = self._tokens.inputs(images)
        expected = self._tokens.are_images(batch["input_ids"][with_images]).sum(-1).tolist()
        for index, count, wanted in zip(with_images, counts, expected, strict=True):
            if count != wanted:
                listed = ", ".join(map(shown, rows[index]["images"]))
                raise ConfigError(
                    f"The images of a sample ({listed}) take {count} tokens, but took {wanted} when it was prepared: a "
                    "file has changed. Delete the prepared samples (data.prepared_dir), or restore the file."
                )
        return batch | {key: self._cast(value) for key, value in pixels.items()}

    def _read(self, image: str) -> Any:
        try:
            return read_image(image)
        except BadImage as error:
            raise ConfigError(
                f"An image that could be read when it was prepared cannot be read now: {error}"
            ) from error

    def _cast(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self._dtype) if self._dtype is not None and value.is_floating_point() else value


def _like(row: Mapping[str, Any], dummy: Mapping[str, Any]) -> Mapping[str, Any]:
    """``dummy`` with zeros for the other values per token that ``row`` has."""
    size = len(dummy["input_ids"])
    others = {key: value for key, value in row.items() if isinstance(value, torch.Tensor) and key not in dummy}
    return {**{key: value.new_zeros(size) for key, value in others.items()}, **dummy}
