"""Images of files, and of text in base64: checked by their header, or read."""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ds_trainer.utils.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = 2**26
"""Of an image, 67 million (8192 x 8192); it takes three bytes each in memory while it is read."""

DATA_URI = "data:"


class BadImage(ValueError):
    """An image that cannot be read; the message is the reason."""


def data_uri(content: bytes) -> str:
    """The content of a file as text."""
    return f"{DATA_URI}image;base64,{base64.b64encode(content).decode()}"


def shown(image: str) -> str:
    """An image in a message: its path, or the beginning of its text."""
    return repr(image if not image.startswith(DATA_URI) else f"{image[:32]}...")


def check_image(image: str) -> None:
    """Read the header only: some microseconds, whatever the size of the image.

    Args:
        image: the path of a file, or its content as a data URI.

    Raises:
        BadImage: it is no image, or larger than :data:`MOST_PIXELS`.
        ConfigError: pillow is not installed.
    """
    with _opened(image):
        pass


def read_image(image: str) -> Image:
    """All pixels, RGB, turned as its EXIF data says.

    Args:
        image: the path of a file, or its content as a data URI.

    Raises:
        BadImage: it is no image, is damaged, or larger than :data:`MOST_PIXELS`.
        ConfigError: pillow is not installed.
    """
    with _opened(image) as found:
        from PIL import ImageOps

        whole: Image = ImageOps.exif_transpose(found).convert("RGB")
        return whole


@contextmanager
def _opened(image: str) -> Iterator[Any]:
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError("Samples with images need pillow: pip install pillow.") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit here is another one
            with Image.open(io.BytesIO(_content(image)) if image.startswith(DATA_URI) else image) as found:
                width, height = found.size
                if width * height > MOST_PIXELS:
                    raise BadImage(f"{shown(image)} has {width} x {height} pixels; at most {MOST_PIXELS:,} are read")
                yield found
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        if isinstance(error, BadImage):
            raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise BadImage(f"{shown(image)} cannot be read: {reason}") from error


def _content(image: str) -> bytes:
    text = image.partition(",")[2]
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise BadImage(f"{shown(image)} is not valid base64: {error}") from error
