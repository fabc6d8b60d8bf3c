"""Fields of the arguments with a help text, and the topic under which ``--help`` lists each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, fields
from typing import Any

_topics: dict[int, str] = {}  # by the id() of a field


def topic(title: str) -> Callable[..., Any]:
    """Returns a function that makes dataclass fields with a help text. ``--help`` lists them under ``title``.

    The title is not in the field's metadata, because transformers' parser passes the metadata on to argparse.
    """

    def documented(text: str, default: Any = None, **more: Any) -> Any:
        if "default_factory" not in more:
            more["default"] = default
        new_field = field(metadata={"help": text}, **more)
        _topics[id(new_field)] = title
        return new_field

    return documented


def topics_of(cls: Any) -> dict[str, str]:
    """The topic of each field of the dataclass ``cls`` that :func:`topic` made."""
    return {item.name: _topics[id(item)] for item in fields(cls) if id(item) in _topics}
