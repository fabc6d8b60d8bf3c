"""Arguments as plain data: for JSON, for trackers' hyperparameter tables, and as text without secrets."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from ds_trainer.utils.secrets import is_secret, masked, without_secrets

if TYPE_CHECKING:
    from dataclasses import Field
    from typing import ClassVar

_SANITARY = (bool, int, float, str)


class Serializable:
    """The fields of a dataclass with ``train_batch_size`` and ``eval_batch_size`` as plain values."""

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

        @property
        def train_batch_size(self) -> int:
            """Samples of all devices of this process in a training micro-batch."""

        @property
        def eval_batch_size(self) -> int:
            """Samples of all devices of this process in an evaluation batch."""

    def to_dict(self) -> dict[str, Any]:
        """Every field by name as a JSON value, recursively.

        Enums become their values, paths and torch dtypes strings (``"bfloat16"``), objects with ``to_dict`` or
        ``to_json`` the result of that method, other objects their text. Tokens, keys and passwords are masked
        (``<HUB_TOKEN>``), also inside a value such as the DeepSpeed configuration.
        """
        names = [field.name for field in fields(self) if field.init]
        return {n: masked(n) if is_secret(n) else without_secrets(plain(getattr(self, n))) for n in names}

    def to_json_string(self) -> str:
        """:meth:`to_dict` as indented JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """:meth:`to_dict` with nothing but bool, int, float and str, plus the two batch sizes: for trackers."""
        values = {**self.to_dict(), "train_batch_size": self.train_batch_size, "eval_batch_size": self.eval_batch_size}
        return {name: value if type(value) in _SANITARY else str(value) for name, value in values.items()}

    def __repr__(self) -> str:
        """One field per line in alphabetical order, without secrets, because logs contain it."""
        lines = "".join(f"{name}={value},\n" for name, value in sorted(self.to_dict().items()))
        return f"{type(self).__name__}(\n{lines})"


def plain(value: Any) -> Any:
    """``value`` in the types of JSON."""
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {_key(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((plain(entry) for entry in value), key=str)
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if not isinstance(value, type):
        for method in ("to_dict", "to_json"):  # GenerationConfig, AcceleratorConfig; ParallelismConfig
            if callable(getattr(value, method, None)):
                return plain(getattr(value, method)())
        if is_dataclass(value):
            return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return str(value).removeprefix("torch.")  # torch.bfloat16: by its text: torch is not imported here


def _key(key: Any) -> str:
    value = key.value if isinstance(key, Enum) else key
    return value if isinstance(value, str) else str(value)
