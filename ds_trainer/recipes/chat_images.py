"""``ChatImages``: the images of a conversation with a vision-language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ds_trainer.samples.images.image_files import BadImage, read_image
from ds_trainer.samples.images.image_tokens import ImageTokens
from ds_trainer.utils.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image


class ChatImages:
    """Makes inputs of images with a processor, as training does.

    Args:
        processor: of transformers.

    Raises:
        ConfigError: it does not say which text an image becomes.
    """

    def __init__(self, processor: Any) -> None:
        self._tokens = ImageTokens(processor)

    def read(self, path: str) -> Image:
        """The image in a file.

        Raises:
            ConfigError: it cannot be read.
        """
        try:
            return read_image(path)
        except BadImage as error:
            raise ConfigError(f"The image {error}.") from error

    def expand(self, rendered: str, images: Sequence[Image]) -> str:
        """The text of a conversation with the text of each image in its place.

        Raises:
            ConfigError: the template has no place for an image, or the processor refuses one.
        """
        pieces = rendered.split(self._tokens.placeholder)
        if len(pieces) != len(images) + 1:
            raise ConfigError(
                f"The conversation has {len(images)} images, but the chat template wrote {self._tokens.placeholder!r} "
                f"{len(pieces) - 1} times."
            )
        try:
            texts = self._tokens.texts(images)
        except ValueError as error:
            raise ConfigError(f"The model's processor refuses an image: {error}.") from error
        return "".join(part for pair in zip(pieces, [*texts, ""], strict=True) for part in pair)

    def inputs(self, input_ids: torch.Tensor, images: Sequence[Image], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The inputs of the model besides tokens ``input_ids`` of shape [1, tokens], pixels in ``dtype``."""
        found, _ = self._tokens.inputs([images])
        found |= self._tokens.token_types(input_ids)
        device = input_ids.device
        return {
            key: value.to(device, dtype if value.is_floating_point() else value.dtype) for key, value in found.items()
        }
