"""What a processor makes of images: text in the place of each, and inputs of the model.

Processors differ in how many tokens an image takes, and in which tensors the model reads. Both are asked of the
processor itself: it is given a text of placeholders, and says what it puts in their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ds_trainer.utils.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image

_OFFSETS = "text_replacement_offsets"
_TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
_OF_TEXT = ("input_ids", "attention_mask", "special_tokens_mask", _OFFSETS, *_TOKEN_TYPES)
_KNOWN_SIZES = 4096  # sizes of images whose text is kept
# Blank images that were tried for the smallest one, by width and height: some processors cut squares into many tiles.
_SMALL = ((32, 32), (64, 32), (128, 32), (256, 32), (32, 128))


class ImageTokens:
    """The images of one processor; can be pickled.

    Args:
        processor: a processor of transformers, with ``tokenizer`` and ``image_processor``.

    Attributes:
        placeholder: the text of an image in a chat template.
        ids: tokens at whose places the model puts the features of images.

    Raises:
        ConfigError: it does not say which text an image becomes, or needs token types that are not known.
    """

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        name = type(processor).__name__
        self.placeholder: str = getattr(processor, "image_token", None) or ""
        ids = [token for token in getattr(processor, "image_token_ids", ()) if token is not None]
        if not self.placeholder or not ids or getattr(processor, "tokenizer", None) is None:
            raise ConfigError(f"{name} has no token for images, so that images cannot be part of a chat.")
        self.ids: list[int] = ids
        self._known: dict[tuple[tuple[int, int], ...], list[str]] = {}
        self._token_types = self._find_token_types(name)

    def texts(self, images: Sequence[Image]) -> list[str]:
        """The text that takes the place of each image of a sample. It depends on the sizes of its images only.

        Raises:
            ValueError: the processor refuses an image, for its shape.
        """
        sizes = tuple(image.size for image in images)
        if sizes not in self._known:
            if len(self._known) >= _KNOWN_SIZES:
                self._known.clear()
            self._known[sizes] = [row["replacement"] for row in self._processed([images])[_OFFSETS][0]]
        return self._known[sizes]

    def inputs(self, images: Sequence[Sequence[Image]]) -> tuple[dict[str, torch.Tensor], list[int]]:
        """The inputs of the model besides those of its text.

        Args:
            images: one list for each sample that has any.

        Returns:
            The tensors, whatever their shapes are in this family, and the number of image tokens of each sample.
        """
        inputs = self._processed(images, return_tensors="pt")
        counts = [sum(self._tokens_of(row["replacement"]) for row in rows) for rows in inputs.pop(_OFFSETS)]
        return {key: value for key, value in inputs.items() if key not in _OF_TEXT}, counts

    def token_types(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """1 at tokens of images, else 0, under the name that the model reads; nothing if it reads none."""
        return {} if self._token_types is None else {self._token_types: self.are_images(input_ids).to(input_ids.dtype)}

    def are_images(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Which tokens are those of images, booleans of the same shape."""
        return torch.isin(input_ids, torch.tensor(self.ids))

    def masked_ids(self, texts: Sequence[str]) -> np.ndarray:
        """The tokens of ``texts`` (:meth:`texts`) that stand for images, which no model generates: those that are no
        ordinary text.
        """
        tokenizer = self.processor.tokenizer
        added = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
        used = {token for text in set(texts) for token in tokenizer.encode(text, add_special_tokens=False)}
        return np.asarray(sorted({*self.ids, *(used & added)}))

    def smallest(self) -> Image:
        """A blank image that takes few tokens."""
        from PIL.Image import new

        blank = [new("RGB", size, (128, 128, 128)) for size in _SMALL]
        return min(blank, key=lambda image: self._tokens_of(self.texts([image])[0]))

    def _tokens_of(self, text: str) -> int:
        ids = self.processor.tokenizer.encode(text, add_special_tokens=False)
        return int(np.isin(ids, self.ids).sum())

    def _processed(self, images: Sequence[Sequence[Image]], **options: Any) -> Any:
        """The processor's outputs for texts that consist of placeholders."""
        texts = [self.placeholder * len(row) for row in images]
        kept = [list(row) for row in images]
        inputs = self.processor(
            text=texts, images=kept, padding=True, add_special_tokens=False, return_text_replacement_offsets=True,
            **options,
        )  # fmt: skip
        if _OFFSETS not in inputs:
            raise ConfigError(
                f"{type(self.processor).__name__} does not say which text an image becomes "
                "(return_text_replacement_offsets); its models cannot be trained by this job."
            )
        return inputs

    def _find_token_types(self, name: str) -> str | None:
        """Which token types the model reads: those that its processor makes unasked."""
        from PIL.Image import new

        try:
            inputs = self._processed([[new("RGB", (64, 64))]], return_tensors="pt")
        except NotImplementedError as error:
            raise ConfigError(
                f"{name} does not say which text an image becomes; its models are not supported."
            ) from error
        keys = [key for key in _TOKEN_TYPES if key in inputs]
        if not keys:
            return None
        ids = inputs["input_ids"]
        if not torch.equal(inputs[keys[0]], self.are_images(ids).to(inputs[keys[0]].dtype)):
            raise ConfigError(
                f"{name} makes {keys[0]} that say more than which tokens are images; it is not supported."
            )
        return keys[0]
