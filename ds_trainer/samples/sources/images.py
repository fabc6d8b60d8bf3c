"""The images of a sample: which there are, and whether they can be read."""

from __future__ import annotations

import base64
import binascii
import io
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_trainer.samples.sources.record import BadRecord
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.units import counted

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


def read_image(image: str) -> Image:
    """All pixels, RGB, turned as its EXIF data says.

    Args:
        image: the path of a file, or its content as a data URI.

    Raises:
        BadImage: it is no image, is damaged, or larger than :data:`MOST_PIXELS`.
        ConfigError: pillow is not installed.
    """
    with _opened(image) as picture:
        from PIL import ImageOps

        whole: Image = ImageOps.exif_transpose(picture).convert("RGB")
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
            with Image.open(io.BytesIO(_content(image)) if image.startswith(DATA_URI) else image) as picture:
                width, height = picture.size
                if width * height > MOST_PIXELS:
                    raise BadImage(f"{shown(image)} has {width} x {height} pixels; at most {MOST_PIXELS:,} are read")
                yield picture
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        if isinstance(error, BadImage):
            raise
        reason = " ".join(str(error).partition(" <_io.BytesIO")[0].split())[:200] or type(error).__name__
        raise BadImage(f"{shown(image)} cannot be read: {reason}") from error


def _content(image: str) -> bytes:
    text = image.partition(",")[2]
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise BadImage(f"{shown(image)} is not valid base64: {error}") from error


PLACEHOLDER = "<image>"
_NUMBER, _FLAG = "a number", "true or false"
_TYPE_NAMES = {str: "a string", bool: _FLAG, int: _NUMBER, float: _NUMBER, list: "a list", dict: "a mapping"}


def check_images(value: Any, directory: Path) -> list[str]:
    """The images of a row: paths of files (absolute), or their contents as data URIs.

    Args:
        value: a path, a data URI, a mapping with ``path``, ``url``, ``base64`` or ``bytes`` (as ``datasets`` writes
            it), or a list of them.
        directory: where the data file is; relative paths are looked up there, then in the working directory.

    Raises:
        BadRecord: an image is missing, of another type, unreadable (by its header), or too large.
    """
    images = value if isinstance(value, list) else [value]
    checked = []
    for number, image in enumerate(images, 1):
        checked.append(_image(image, f"image {number}", directory))
        try:
            # Read the header only: some microseconds, whatever the size of the image.
            with _opened(checked[-1]):
                pass
        except BadImage as error:
            raise BadRecord(f"image {number}: {error}") from error
    return checked


def _image(image: Any, name: str, directory: Path) -> str:
    if isinstance(image, dict):
        content = image.get("bytes")
        if isinstance(content, bytes) and content:
            return data_uri(content)
        if isinstance(image.get("base64"), str) and image["base64"]:
            encoded = image["base64"]
            return encoded if encoded.startswith("data:") else f"data:image;base64,{encoded}"
        image = image.get("path") or image.get("url")
    if not isinstance(image, str) or not image:
        raise BadRecord(f"{name} must be a path or the bytes of a file, got {type_name(image)}")
    if image.startswith("data:image"):
        return image
    if image.startswith(("http://", "https://")):
        raise BadRecord(f"{name} is the address {image!r}; download it, and give the path of the file")
    path = image.removeprefix("file://")
    candidates = [directory / path, Path(os.path.expanduser(path))]
    try:
        file = next((path for path in candidates if path.is_file()), None)
    except (OSError, ValueError) as error:  # a name that no file can have
        raise BadRecord(f"{name}: {image[:80]!r} is no path: {error}") from error
    if file is None:
        raise BadRecord(f"{name}: the file {image!r} does not exist (relative to {directory})")
    if file.stat().st_size == 0:
        raise BadRecord(f"{name}: the file {image!r} is empty")
    return str(file.resolve())


def check_places(images: list[Any], texts: list[str], parts: int) -> None:
    """Refuse a sample whose turns refer to another number of images than it has.

    Args:
        images: what the sample has under its key.
        texts: what its turns say, which may have the placeholder ``<image>``.
        parts: content parts of its turns that stand for an image of the list.

    Raises:
        BadRecord: the numbers differ.
    """
    places = sum(text.count(PLACEHOLDER) for text in texts) + parts
    if places and places != len(images):
        raise BadRecord(f"the turns refer to {counted(places, 'image')}, but the sample has {len(images)}")


def type_name(value: Any) -> str:
    """The type of a value, as JSON calls it."""
    if value is None:
        return "null"
    return _TYPE_NAMES.get(type(value), type(value).__name__)
