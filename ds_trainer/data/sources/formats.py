"""The formats of samples, recognized by their keys and converted to the standard formats of TRL."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_trainer.data.sources.bad_lines import BadRecord
from ds_trainer.data.sources.conversations import (
    check_conversation,
    check_dialog,
    check_text,
    check_tools,
    image_parts,
    texts_of,
)
from ds_trainer.data.sources.images import check_images, check_places, type_name

Fields = dict[str, Any]
_IMAGE_KEYS = ("images", "image")
_FEW_KEYS = 12


@dataclass(frozen=True)
class RecordFormat:
    """A format of samples.

    Attributes:
        name: shown to the user.
        kind: of the records that it gives.
        keys: all of them are in every sample.
        convert: the fields of the record of a row; gets the row, the keys, and the directory of the file.
    """

    name: str
    kind: str
    keys: tuple[str, ...]
    convert: Callable[[Mapping[str, Any], tuple[str, ...], Path], Fields]

    def fields(self, value: Any, directory: Path) -> Fields:
        """The fields of the record of a row.

        Raises:
            BadRecord: the row is no valid sample of this format.
        """
        if not isinstance(value, Mapping):
            raise BadRecord(f"expected a mapping with {_listed(self.keys)}, got {type_name(value)}")
        missing = [key for key in self.keys if key not in value]
        if missing:
            raise BadRecord(
                f"no key {missing[0]!r}; found {_listed(value)}. The samples of a source have one format, here "
                f"{self.name}"
            )
        null = [key for key in self.keys if value[key] is None]
        if null:
            raise BadRecord(f"{null[0]!r} is null")
        return self.convert(value, self.keys, directory)


# -- conversions -------------------------------------------------------------------------------------------------------


def _text(row: Mapping[str, Any], keys: tuple[str, ...], directory: Path) -> Fields:
    return _with_images({"text": check_text(row[keys[0]], keys[0])}, row, directory)


def _messages(row: Mapping[str, Any], keys: tuple[str, ...], directory: Path) -> Fields:
    turns = check_conversation(row[keys[0]], keys[0], directory)
    system = row.get("system")
    if isinstance(system, str) and system.strip() and turns[0]["role"] != "system":
        turns.insert(0, {"role": "system", "content": check_text(system, "system")})
    check_dialog(turns, keys[0])
    fields: Fields = {"messages": turns}
    if row.get("tools"):
        fields["tools"] = check_tools(row["tools"])
    return _with_images(fields, row, directory)


def _prompt_completion(row: Mapping[str, Any], keys: tuple[str, ...], directory: Path) -> Fields:
    fields = {key: _text_or_turns(row[key], key, directory) for key in keys}
    if len({type(value) for value in fields.values()}) > 1:
        raise BadRecord("'prompt' and 'completion' must both be texts, or both be lists of turns")
    if isinstance(fields["completion"], list):
        check_dialog([*fields["prompt"], *fields["completion"]], "completion")
        if row.get("tools"):
            fields["tools"] = check_tools(row["tools"])
    return _with_images(fields, row, directory)


def _preference(row: Mapping[str, Any], keys: tuple[str, ...], directory: Path) -> Fields:
    fields = {key: _text_or_turns(row[key], key, directory) for key in keys}
    if fields["chosen"] == fields["rejected"]:
        raise BadRecord("'chosen' and 'rejected' are equal")
    prompt = next((key for key in ("prompt", "question", "instruction") if row.get(key) is not None), None)
    if prompt is not None:
        fields["prompt"] = _text_or_turns(row[prompt], prompt, directory)
    if len({type(value) for value in (fields["chosen"], fields["rejected"])}) > 1:
        raise BadRecord("'chosen' and 'rejected' must both be texts, or both be lists of turns")
    return _with_images(fields, row, directory)


def _question(row: Mapping[str, Any], keys: tuple[str, ...], directory: Path) -> Fields:
    """One question and one answer, or an instruction with optional input: a conversation of two turns."""
    question, answer = (check_text(row[key], key) for key in keys)
    extra = next((row[key] for key in ("input", "context") if key not in keys and row.get(key)), None)
    if extra is not None and check_text(extra, "input"):
        question = f"{question}\n\n{extra}"
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    history = row.get("history") or []
    if not isinstance(history, list):
        raise BadRecord(f"'history' must be a list of pairs, question and answer, got {type_name(history)}")
    for number, pair in enumerate(reversed(history), 1):
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadRecord(f"'history' must be a list of pairs, question and answer; entry {-number} is not")
        earlier = [check_text(text, f"history[{-number}]") for text in pair]
        turns[:0] = [{"role": "user", "content": earlier[0]}, {"role": "assistant", "content": earlier[1]}]
    system = next((row[key] for key in ("system", "system_prompt") if row.get(key)), None)
    if system is not None:
        turns.insert(0, {"role": "system", "content": check_text(system, "system")})
    return _with_images({"messages": turns}, row, directory)


def _text_or_turns(value: Any, key: str, directory: Path) -> Any:
    return check_conversation(value, key, directory) if isinstance(value, list) else check_text(value, key)


def _with_images(fields: Fields, row: Mapping[str, Any], directory: Path) -> Fields:
    key = next((key for key in _IMAGE_KEYS if row.get(key) not in (None, [], "")), None)
    turns = [turn for value in fields.values() if isinstance(value, list) for turn in value if "content" in turn]
    images = [] if key is None else check_images(row[key], directory)
    if images:
        fields["images"] = images
    texts = [*texts_of(turns), *(value for value in fields.values() if isinstance(value, str))]
    if images or image_parts(turns):
        check_places(images, texts, image_parts(turns))
    return fields


# -- recognition -------------------------------------------------------------------------------------------------------

_PAIRS = (
    ("instruction (alpaca)", ("instruction", "output")),
    ("instruction and response", ("instruction", "response")),
    ("prompt and response", ("prompt", "response")),
    ("question and answer", ("question", "answer")),
    ("question and response", ("question", "response")),
    ("query and response", ("query", "response")),
    ("query and answer", ("query", "answer")),
    ("problem and solution", ("problem", "solution")),
    ("input and output", ("input", "output")),
    ("inputs and targets", ("inputs", "targets")),
)

FORMATS: tuple[RecordFormat, ...] = (
    RecordFormat("conversations (messages)", "messages", ("messages",), _messages),
    RecordFormat("conversations (ShareGPT)", "messages", ("conversations",), _messages),
    RecordFormat("conversations (ShareGPT)", "messages", ("conversation",), _messages),
    RecordFormat("preferences (chosen and rejected)", "preference", ("chosen", "rejected"), _preference),
    RecordFormat("prompt and completion", "prompt_completion", ("prompt", "completion"), _prompt_completion),
    *(RecordFormat(name, "messages", keys, _question) for name, keys in _PAIRS),
    RecordFormat("text", "text", ("text",), _text),
    RecordFormat("text (content)", "text", ("content",), _text),
)
"""In this order: the first format whose keys are all in a row is that of the row."""


def text_format(key: str) -> RecordFormat:
    """Plain text under ``key``."""
    return RecordFormat("text" if key == "text" else f"text ({key})", "text", (key,), _text)


def recognize(value: Any, kind: str = "auto") -> RecordFormat | str:
    """The format of a row, or why it has none.

    Args:
        value: the row.
        kind: only formats of this kind of records are considered; ``auto``: all.
    """
    if not isinstance(value, Mapping):
        return f"expected a mapping, got {type_name(value)}"
    fitting = [entry for entry in FORMATS if all(key in value for key in entry.keys)]
    chosen = [entry for entry in fitting if kind in ("auto", entry.kind)]
    if not chosen:
        wanted = "" if kind == "auto" else f" of kind {kind}"
        return f"no known format{wanted}; its keys are {_listed(value)}. Known: {_known(kind)}; or set text_key"
    other = [entry for entry in chosen if {entry.kind, chosen[0].kind} == {"messages", "preference"}]
    if kind == "auto" and other:
        return (
            f"has both {_listed(chosen[0].keys)} and {_listed(other[0].keys)}; set kind of the source to "
            f"{chosen[0].kind} or {other[0].kind}"
        )
    return chosen[0]


def _known(kind: str) -> str:
    known = [entry for entry in FORMATS if kind in ("auto", entry.kind)]
    return "; ".join(dict.fromkeys(", ".join(entry.keys) for entry in known))


def _listed(keys: Iterable[Any]) -> str:
    keys = [repr(key) for key in keys]
    more = f" and {len(keys) - _FEW_KEYS} more" if len(keys) > _FEW_KEYS else ""
    return (", ".join(keys[:_FEW_KEYS]) or "none") + more
