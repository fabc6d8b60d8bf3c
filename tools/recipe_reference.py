#!/usr/bin/env python3
"""docs/reference/recipe.md: every key of a recipe with its type, default and meaning, from the dataclasses.

python tools/recipe_reference.py            print the page
python tools/recipe_reference.py --write    write it
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.recipes.recipe import SECTIONS
from ds_trainer.recipes.schema import attribute_meanings

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "recipe.md"
INTRODUCTION = """# Recipe reference

<!-- made by tools/recipe_reference.py --write; a test holds this page to the code -->

A recipe is a YAML file with the sections `model`, `data`, `arguments` and `report`. `ds-trainer train RECIPE` trains
it, `ds-trainer config RECIPE --explain` shows the resulting DeepSpeed configuration, and `--section.key value` on the
command line replaces any value. Relative paths start from the working directory. Every problem is reported at once,
with `file:line` and the nearest valid key.

A complete recipe:

```yaml
{example}```
"""


def rows(section: str) -> Iterator[tuple[str, str, str, str]]:
    """Key, type, default and meaning of every key of a section."""
    spec: Any = SECTIONS[section]
    hints = typing.get_type_hints(spec)
    meanings = attribute_meanings(spec)
    for field in dataclasses.fields(spec):
        default = field.default_factory() if callable(field.default_factory) else field.default
        meaning = field.metadata.get("help") or meanings[field.name]
        yield f"{section}.{field.name}", _type(hints[field.name]), _value(default), meaning


def page() -> str:
    """The page as Markdown."""
    example = (ROOT / "ds_configs" / "recipes" / "quickstart.yaml").read_text(encoding="utf-8")
    parts = [INTRODUCTION.format(example=example)]
    for section, spec in SECTIONS.items():
        parts.append(f"## {section}\n")
        if spec is TrainingArguments:
            parts.append(
                "The fields of `TrainingArguments`; [Arguments and members](members.md) says how each is supported.\n"
            )
        head = ("key", "type", "default", "meaning")
        lines = [head, ("---",) * len(head), *rows(section)]
        parts.append(
            "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)
        )
    return "\n".join(parts)


def _type(hint: Any) -> str:
    """A type as a reader of YAML calls it."""
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(hint))
    if inspect.isclass(hint) and hasattr(hint, "__members__"):
        return "name"
    members = [member for member in typing.get_args(hint) if member is not type(None)]
    origin = typing.get_origin(hint)
    if origin in (list, tuple):
        return "list"
    if origin is dict:
        return "mapping"
    if members:
        return " or ".join(dict.fromkeys(_type(member) for member in members))
    words = {str: "text", int: "integer", float: "number", bool: "true or false", dict: "mapping", list: "list"}
    return words.get(hint, "any")


def _value(value: Any) -> str:
    if value in (None, (), [], {}, "") or value is dataclasses.MISSING:
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else getattr(value, 'value', value)}`"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page())
