"""Checks whether a value fits a key of DeepSpeed's configuration."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ds_trainer.arguments.yaml_reader import Located
from ds_trainer.utils.errors import did_you_mean
from ds_trainer.utils.secrets import is_secret, masked, without_secrets

if TYPE_CHECKING:
    from ds_trainer.config.schema import Field

AUTO = "auto"
_KINDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "list": "a list",
    "dict": "a mapping",
}
_TRUE, _FALSE = ("true", "yes", "on", "1", "t", "y"), ("false", "no", "off", "0", "f", "n")
_WHOLE, _DECIMAL = r"\s*[-+]?\d+(\.0*)?\s*", r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*"
_LIMITS = (("minimum", "at least"), ("maximum", "at most"), ("above", "above"), ("below", "below"))


def converted(value: Any, wanted: Field) -> Any:
    """``value``, or what DeepSpeed's pydantic models make of it: ``"true"``, ``1`` and ``"2"`` are True, True and 2."""
    if not wanted.strict or isinstance(value, bool) or not isinstance(value, int | str):
        return value
    text = str(value).lower()
    if wanted.kind == "bool" and text in (*_TRUE, *_FALSE):
        return text in _TRUE
    if wanted.kind == "int" and isinstance(value, str) and re.fullmatch(_WHOLE, value):
        return int(float(value)) if "." in value else int(value)
    if wanted.kind == "float" and isinstance(value, str) and re.fullmatch(_DECIMAL, value):
        return float(value)
    return value


def complaint(entry: Located, wanted: Field, path: str) -> Iterator[str]:
    """The problems of the value at the leaf ``path``, one sentence each. ``"auto"`` fits every key."""
    value = converted(entry.value, wanted)
    if value == AUTO:
        return
    name = path.split(".")[-1]
    if is_secret(name) and value == masked(name):
        yield (
            f"{entry.where}: {path}={value} is ds_trainer's mask for a secret, not the secret. Write the secret, or "
            "leave it out if the library reads it from the environment."
        )
        return
    if value is None:
        if not wanted.nullable:
            yield f"{entry.where}: {path}=null must be {_expected(wanted)}; leave it out for the default."
    elif isinstance(value, list) and wanted.listed:
        for item in value:
            yield from complaint(item, wanted, path)
    elif not _fits(value, wanted):
        text = masked(name) if is_secret(path) else shown(entry)
        yield f"{entry.where}: {path}={text} must be {_expected(wanted)}.{remedy(value, wanted)}"
    elif isinstance(value, list) and wanted.items is not None:
        for item in value:
            if item.value is None or not _fits(item.value, wanted.items):
                hint = remedy(item.value, wanted.items)
                yield f"{item.where}: {path} has {shown(item)}; each entry must be {_expected(wanted.items)}.{hint}"


def shown(entry: Located) -> str:
    """The value as JSON, shortened."""
    text = json.dumps(without_secrets(entry.plain()), default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _fits(value: Any, wanted: Field) -> bool:
    if not _has_kind(value, wanted.kind):
        return False
    if wanted.choices:
        if wanted.any_case and isinstance(value, str):
            return value.lower() in [str(choice).lower() for choice in wanted.choices]
        return value in wanted.choices
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (
            (wanted.minimum is None or value >= wanted.minimum)
            and (wanted.maximum is None or value <= wanted.maximum)
            and (wanted.above is None or value > wanted.above)
            and (wanted.below is None or value < wanted.below)
        )
    return True


def _has_kind(value: Any, kind: str) -> bool:
    if kind == "bool":
        return isinstance(value, bool)
    if kind in ("int", "float"):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return False
        return kind == "float" or isinstance(value, int) or value.is_integer()
    types: dict[str, type] = {"str": str, "list": list, "dict": dict}
    return isinstance(value, types.get(kind, object))


def _expected(wanted: Field) -> str:
    if wanted.choices:
        return f"one of {', '.join(json.dumps(choice) for choice in wanted.choices)}"
    limits = [f"{label} {getattr(wanted, name):g}" for name, label in _LIMITS if getattr(wanted, name) is not None]
    return " ".join([_KINDS.get(wanted.kind, "something else"), " and ".join(limits)]).strip()


def remedy(value: Any, wanted: Field) -> str:
    """How to write the value that was probably meant; empty if unknown."""
    text = str(value).strip().lower() if isinstance(value, str | int) else ""
    if wanted.kind == "bool" and text in (*_TRUE, *_FALSE):
        return f" Write {'true' if text in _TRUE else 'false'}, without quotes."
    if wanted.choices:
        numbers = [choice for choice in wanted.choices if not isinstance(choice, str) and str(choice) == text]
        if numbers:
            return f" Write {text}, without quotes."
        return did_you_mean(text, [str(choice) for choice in wanted.choices])
    if wanted.kind in ("int", "float") and isinstance(value, str):
        return _as_number(value.strip())
    if wanted.kind == "str" and isinstance(value, int | float):
        return " Put quotes around it."
    if wanted.kind == "list" and isinstance(value, str | int | float):
        inside = re.fullmatch(r"\s*[\[(](.*)[\])]\s*|(.*,.*)", str(value), re.DOTALL)  # text that holds a list
        if inside is None:
            return f" Write [{json.dumps(value)}]."
        return f" Write [{(inside[1] if inside[2] is None else inside[2]).strip()}], without quotes around it."
    if wanted.kind in ("dict", "section") and isinstance(value, str) and value.strip().startswith("{"):
        return " Remove the quotes around it."
    return ""


def _as_number(text: str) -> str:
    if re.fullmatch(_DECIMAL, text):
        return " Remove the quotes."
    if re.fullmatch(r"[-+]?[\d_,.]+\s*[a-zA-Z]+", text):
        return " Write a plain number, without a unit."
    return ""
