"""``_VALID_DICT_FIELDS``: the fields of an argument class whose value may be the JSON text of a mapping.

Subclasses of other packages add their own: ``_VALID_DICT_FIELDS = TrainingArguments._VALID_DICT_FIELDS + [...]``.
Source: ``TrainingArguments.__post_init__`` of transformers 5, which reads text that begins with a brace.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ds_trainer.utils.files import parse_json
from ds_trainer.utils.units import whole_number

VALID_DICT_FIELDS = [
    "accelerator_config",
    "fsdp_config",
    "deepspeed",
    "activation_checkpointing_kwargs",
    "gradient_checkpointing_kwargs",
    "lr_scheduler_kwargs",
]


def dict_field_problems(args: Any) -> Iterator[str]:
    """One sentence for each field of a subclass whose text begins with a brace and is not JSON."""
    for name in _of_subclasses(args):
        try:
            parse_json(getattr(args, name))
        except ValueError as error:
            yield (f"{name}={getattr(args, name)!r} is not valid JSON ({error}); write it like '{{\"key\": 1}}'.")


def read_dict_fields(args: Any) -> None:
    """Replace JSON text by its mapping in the fields that subclasses have added. The texts have been checked."""
    for name in _of_subclasses(args):
        setattr(args, name, mapping_of_text(getattr(args, name)))


def mapping_of_text(text: str) -> dict[str, Any]:
    """The mapping in JSON ``text``. Strings inside that are true, false or a number become such, as in transformers."""
    return {name: _typed(value) for name, value in parse_json(text).items()}


def _typed(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _typed(entry) for name, entry in value.items()}
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    if (number := whole_number(value)) is not None:
        return number
    return float(value) if re.fullmatch(r"[0-9]*\.[0-9]*", value) and len(value) > 1 else value


def _of_subclasses(args: Any) -> list[str]:
    """The added fields with such a text; those of this package are read where they are used."""
    added = [name for name in args._VALID_DICT_FIELDS if name not in VALID_DICT_FIELDS]
    values = {name: getattr(args, name, None) for name in added}
    return [name for name, value in values.items() if isinstance(value, str) and value.lstrip().startswith("{")]
