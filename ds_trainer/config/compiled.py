"""``CompiledConfig``: the JSON that DeepSpeed gets, and where each of its values came from."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ds_trainer.utils.secrets import without_secrets


@dataclass(frozen=True)
class Origin:
    """Where a value came from.

    Attributes:
        kind: ``argument`` (of TrainingArguments), ``user`` (the user's own DeepSpeed file), ``derived`` (from other
            values) or ``default`` (of an argument, or ours).
        detail: the argument's name, or the reason in words.
        place: where it was written: ``recipe.yaml:12``, ``command line``, ``ds.json:7``; empty where nowhere.
    """

    kind: str
    detail: str
    place: str = ""

    def __str__(self) -> str:
        place = self.place if self.place not in ("argument", "default") else ""
        place = f" ({place})" if place and self.detail else place
        return f"{self.kind}: {self.detail}{place}"


class CompiledConfig:
    """One complete DeepSpeed configuration with the origin of every value.

    Built by :func:`ds_trainer.config.compiler.compile_config`; read-only for everybody else.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._origins: dict[str, Origin] = {}

    def set(self, path: str, value: Any, origin: Origin) -> None:
        """Set the value at a dotted ``path``. Setting a path twice is a defect of the compiler: ValueError."""
        if path in self._origins:
            raise ValueError(f"{path} was set already, by {self._origins[path]}")
        *parents, name = path.split(".")
        section = self._values
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = value
        self._origins[path] = origin

    def get(self, path: str, default: Any = None) -> Any:
        """The value at a dotted ``path``, or ``default``."""
        section: Any = self._values
        for name in path.split("."):
            if not isinstance(section, Mapping) or name not in section:
                return default
            section = section[name]
        return section

    def __contains__(self, path: str) -> bool:
        return self.get(path, _NOTHING) is not _NOTHING

    def origin(self, path: str) -> Origin:
        """Where the value at ``path`` came from. Raises KeyError for an unknown path."""
        return self._origins[path]

    def paths(self) -> Iterator[str]:
        """All dotted paths, in the order in which they were set."""
        return iter(self._origins)

    def _shown(self, path: str) -> str:
        name = path.rpartition(".")[2]
        return json.dumps(without_secrets({name: self.get(path)})[name])

    def said(self, path: str) -> str:
        """The value at ``path`` as a person said it, with its place, for messages.

        ``zero_stage=3 (recipe.yaml:4)``, ``fp16.enabled=true (ds.json:7)``, or for a value that nobody gave
        ``zero_optimization.stage=0 (one rank, nothing to shard)``.
        """
        if path not in self._origins:
            return f"{path} is not set"
        origin = self._origins[path]
        if origin.kind == "argument" or (origin.kind == "default" and origin.place == "default"):
            return f"{origin.detail} ({origin.place})"
        return f"{path}={self._shown(path)} ({origin.place or origin.detail})"

    def to_dict(self) -> dict[str, Any]:
        """A copy that DeepSpeed may write into (it does). With secrets: not to be shown or written."""
        return copy.deepcopy(self._values)

    def to_json(self) -> str:
        """The configuration as indented JSON: a file that ``deepspeed.initialize`` takes as it is.

        API keys, tokens and passwords are masked (``"<API_KEY>"``): this is printed, and kept beside the results.
        """
        return json.dumps(without_secrets(self._values), indent=2)

    def explain(self) -> str:
        """A table: path, value, origin."""
        rows = [(path, self._shown(path), str(origin)) for path, origin in self._origins.items()]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "\n".join(f"{path:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for path, value, origin in rows)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CompiledConfig):
            return NotImplemented
        return self._values == other._values and self._origins == other._origins

    def __hash__(self) -> int:
        return hash(json.dumps(self._values))


_NOTHING = object()
