"""``_VALID_DICT_FIELDS``: the fields of an argument class whose value may be the JSON text of a mapping.

Subclasses of other packages add their own: ``_VALID_DICT_FIELDS = TrainingArguments._VALID_DICT_FIELDS + [...]``.
Source: ``TrainingArguments.__post_init__`` of transformers 5, which reads text that begins with a brace.
"""

from __future__ import annotations

import json
from typing import Any

VALID_DICT_FIELDS = [
    "accelerator_config",
    "fsdp_config",
    "deepspeed",
    "activation_checkpointing_kwargs",
    "gradient_checkpointing_kwargs",
    "lr_scheduler_kwargs",
]


def dict_field_problems(args: Any) -> list[str]:
    """One sentence for each field of a subclass whose text begins with a brace and is not JSON."""
    problems = []
    for name in _of_subclasses(args):
        try:
            json.loads(getattr(args, name))
        except ValueError as error:
            problems.append(
                f"{name}={getattr(args, name)!r} is not valid JSON ({error}); write it like '{{\"key\": 1}}'."
            )
    return problems


def read_dict_fields(args: Any) -> None:
    """Replace JSON text by its mapping in the fields that subclasses have added. The texts have been checked."""
    for name in _of_subclasses(args):
        setattr(args, name, json.loads(getattr(args, name)))


def _of_subclasses(args: Any) -> list[str]:
    """The added fields with such a text; those of this package are read where they are used."""
    added = [name for name in args._VALID_DICT_FIELDS if name not in VALID_DICT_FIELDS]
    values = {name: getattr(args, name, None) for name in added}
    return [name for name, value in values.items() if isinstance(value, str) and value.lstrip().startswith("{")]
