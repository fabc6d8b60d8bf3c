"""The part of JSON schema that the package's own schema uses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "number": (int, float),
    "integer": int,
}
_KNOWN = {"type", "enum", "anyOf", "properties", "additionalProperties", "items"}
_ANNOTATIONS = {"description", "default", "deprecated", "title", "$schema"}


def schema_problems(value: Any, schema: dict[str, Any], where: str = "$") -> Iterator[str]:
    """Where ``value`` does not fit ``schema``."""
    assert schema.keys() <= _KNOWN | _ANNOTATIONS, schema.keys()
    if "anyOf" in schema:
        found = [list(schema_problems(value, form, where)) for form in schema["anyOf"]]
        if all(found):
            yield from min(found, key=len)
    if "enum" in schema and not any(value == choice and type(value) is type(choice) for choice in schema["enum"]):
        yield f"{where}: {value!r} is not one of {schema['enum']}"
    if "type" in schema:
        names = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        if not any(_is(value, name) for name in names):
            yield f"{where}: {value!r} is not {names}"
            return
    for key, entry in value.items() if isinstance(value, dict) else ():
        inner = schema.get("properties", {}).get(key, schema.get("additionalProperties", True))
        if inner is False:
            yield f"{where}: unknown key {key!r}"
        elif isinstance(inner, dict):
            yield from schema_problems(entry, inner, f"{where}.{key}")
    for index, entry in enumerate(value) if isinstance(value, list) and "items" in schema else ():
        yield from schema_problems(entry, schema["items"], f"{where}[{index}]")


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[name])
