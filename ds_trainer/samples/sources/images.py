"""The images of a sample: which there are, and whether they can be read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ds_trainer.samples.images.image_files import BadImage, check_image, data_uri
from ds_trainer.samples.sources.bad_lines import BadRecord

PLACEHOLDER = "<image>"
_NUMBER, _FLAG = "a number", "true or false"
_TYPE_NAMES = {str: "a string", bool: _FLAG, int: _NUMBER, float: _NUMBER, list: "a list", dict: "a mapping"}


def check_images(value: Any, directory: Path) -> list[str]:
    """The images of a row: paths of files (absolute), or their contents as data URIs.

    Args:
        value: a path, a data URI, a mapping with ``path``, ``url``, ``base64`` or ``bytes`` (as ``datasets`` writes
            it), or a list of them.
        directory: of the data file, to which relative paths are relative; then the working directory is tried.

    Raises:
        BadRecord: an image is missing, of another type, unreadable (by its header), or too large.
    """
    images = value if isinstance(value, list) else [value]
    found = []
    for number, image in enumerate(images, 1):
        found.append(_image(image, f"image {number}", directory))
        try:
            check_image(found[-1])
        except BadImage as error:
            raise BadRecord(f"image {number}: {error}") from error
    return found


def _image(image: Any, name: str, directory: Path) -> str:
    if isinstance(image, dict):
        content = image.get("bytes")
        if isinstance(content, bytes) and content:
            return data_uri(content)
        if isinstance(image.get("base64"), str) and image["base64"]:
            given = image["base64"]
            return given if given.startswith("data:") else f"data:image;base64,{given}"
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
        found = next((path for path in candidates if path.is_file()), None)
    except (OSError, ValueError) as error:  # a name that no file can have
        raise BadRecord(f"{name}: {image[:80]!r} is no path: {error}") from error
    if found is None:
        raise BadRecord(f"{name}: the file {image!r} does not exist (relative to {directory})")
    if found.stat().st_size == 0:
        raise BadRecord(f"{name}: the file {image!r} is empty")
    return str(found.resolve())


def check_places(images: list[Any], texts: list[str], parts: int) -> None:
    """Refuse a sample whose turns refer to another number of images than it has.

    Args:
        images: of the sample.
        texts: of its turns, which may have the placeholder ``<image>``.
        parts: content parts of its turns that stand for an image of the list.

    Raises:
        BadRecord: the numbers differ.
    """
    places = sum(text.count(PLACEHOLDER) for text in texts) + parts
    if places and places != len(images):
        raise BadRecord(f"the turns refer to {places} images, but the sample has {len(images)}")


def type_name(value: Any) -> str:
    """The type of a value, as JSON calls it."""
    if value is None:
        return "null"
    return _TYPE_NAMES.get(type(value), type(value).__name__)
