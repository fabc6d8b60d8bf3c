"""The formats of samples, recognized by their keys and converted to the standard formats of TRL."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_trainer.samples.sources.conversations import (
    check_conversation,
    check_dialog,
    check_text,
    check_tools,
    image_parts,
    parsed_json,
    texts_of,
)
from ds_trainer.samples.sources.images import check_images, check_places, type_name
from ds_trainer.samples.sources.marks import ReadKeys, check_marks
from ds_trainer.samples.sources.record import BadRecord, Record

Fields = dict[str, Any]
_IMAGE_KEYS = ("images", "image")
_CONVERSATIONS = ("messages", "conversations", "conversation")
_QUESTIONS = ("prompt", "question", "instruction", "query", "input")
_EXTRA = ("input", "context", "article")
_FEW_KEYS = 12


@dataclass(frozen=True)
class RecordFormat:
    """A format of samples.

    Attributes:
        name: shown to the user.
        kind: the records that it gives are of this kind.
        keys: all of them are in every sample.
        convert: the fields of the record of a row; gets the row, the keys, and the directory of the file.
    """

    name: str
    kind: str
    keys: tuple[str, ...]
    convert: Callable[[ReadKeys, tuple[str, ...], Path], Fields]

    def record(self, where: str, value: Any, directory: Path, chosen: bool = False) -> Record:
        """The record of a row.

        Args:
            where: it is, for messages.
            value: the row.
            directory: where the file is; paths of images are relative to it.
            chosen: whether the recipe names the kind of the samples, and so which of several answers is meant.

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
        row = ReadKeys(value)
        check_marks(row, self.kind, chosen)
        fields = self.convert(row, self.keys, directory)
        return Record(where, self.kind, fields, row.unread())


# -- conversions -------------------------------------------------------------------------------------------------------


def _text(row: ReadKeys, keys: tuple[str, ...], directory: Path) -> Fields:
    return _with_images({"text": check_text(row[keys[0]], keys[0])}, row, directory)


def _segments(row: ReadKeys, keys: tuple[str, ...], directory: Path) -> Fields:
    """Pieces of one text, which need no template: it is trained on in those with a label."""
    pieces = parsed_json(row[keys[0]], keys[0]) if isinstance(row[keys[0]], str) else row[keys[0]]
    if not isinstance(pieces, list) or not pieces:
        raise BadRecord(
            f"{keys[0]!r} must be a list of segments, each with 'text' and 'label', got {type_name(pieces)}"
        )
    text, spans = "", []
    for number, piece in enumerate(pieces, 1):
        if not isinstance(piece, dict) or not isinstance(piece.get("text"), str) or piece.get("label") not in (0, 1):
            raise BadRecord(f"segment {number} must have a 'text' and a 'label', which is true or false")
        spans += [[len(text), len(text) + len(piece["text"])]] if piece["label"] and piece["text"] else []
        text += piece["text"]
        row.inside.update(f"{keys[0]}[].{key}" for key in piece if key not in ("text", "label"))
    return {"text": check_text(text, keys[0]), "spans": spans}


def _turns(row: ReadKeys, key: str, directory: Path) -> list[dict[str, Any]]:
    """The turns under ``key``, after the system prompt that stands beside them."""
    return _with_system(check_conversation(row[key], key, directory, row.inside), row)


def _messages(row: ReadKeys, keys: tuple[str, ...], directory: Path) -> Fields:
    turns = _turns(row, keys[0], directory)
    check_dialog(turns, keys[0])
    return _with_images(_with_tools({"messages": turns}, row), row, directory)


def _prompt_completion(row: ReadKeys, keys: tuple[str, ...], directory: Path) -> Fields:
    fields = {key: _text_or_turns(row, key, directory) for key in keys}
    if isinstance(fields["prompt"], str) and any(row.peek(key) for key in ("system", "system_prompt", "history")):
        fields = {"prompt": _asked(row, "prompt"), "completion": _as_turns(fields["completion"])}
    if len({type(value) for value in fields.values()}) > 1:
        raise BadRecord("'prompt' and 'completion' must both be texts, or both be lists of turns")
    if isinstance(fields["completion"], list):
        fields["prompt"] = _with_system(fields["prompt"], row)
        check_dialog([*fields["prompt"], *fields["completion"]], "completion")
        fields = _with_tools(fields, row)
    return _with_images(fields, row, directory)


def _question(row: ReadKeys, keys: tuple[str, ...], directory: Path) -> Fields:
    """One question and one answer, or an instruction with optional input: a conversation of two turns."""
    turns = [*_asked(row, keys[0]), {"role": "assistant", "content": check_text(row[keys[1]], keys[1])}]
    return _with_images(_with_tools({"messages": turns}, row), row, directory)


def _asked(row: ReadKeys, key: str) -> list[dict[str, Any]]:
    """The turns up to a question: a system prompt, earlier questions with their answers, the question."""
    question = check_text(row[key], key)
    extra = next((name for name in _EXTRA if name != key and row.peek(name)), None)
    if extra is not None:
        question = f"{question}\n\n{check_text(row[extra], extra)}"
    turns = [{"role": "user", "content": question}]
    history = row.get("history") or []
    if not isinstance(history, list):
        raise BadRecord(f"'history' must be a list of pairs, question and answer, got {type_name(history)}")
    for number, pair in enumerate(reversed(history), 1):
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadRecord(f"'history' must be a list of pairs, question and answer; entry {-number} is not")
        earlier = [check_text(text, f"history[{-number}]") for text in pair]
        turns[:0] = [{"role": "user", "content": earlier[0]}, {"role": "assistant", "content": earlier[1]}]
    return _with_system(turns, row)


def _preference(row: ReadKeys, keys: tuple[str, ...], directory: Path) -> Fields:
    chosen, rejected = (_text_or_turns(row, key, directory) for key in keys)
    if chosen == rejected:
        raise BadRecord(f"{keys[0]!r} and {keys[1]!r} are equal")
    if type(chosen) is not type(rejected):
        raise BadRecord(f"{keys[0]!r} and {keys[1]!r} must both be texts, or both be lists of turns")
    turns = next((key for key in _CONVERSATIONS if row.peek(key)), None)
    asked = next((key for key in _QUESTIONS if row.peek(key) is not None), None)
    answers = isinstance(chosen, str) or chosen[0]["role"] == "assistant"  # and no whole conversations
    fields: Fields = {}
    if asked is not None:
        prompt = _text_or_turns(row, asked, directory)
        beside = [key for key in ("system", "system_prompt", "history", *_EXTRA) if key != asked and row.peek(key)]
        if answers and isinstance(prompt, str) and (asked != "prompt" or beside):
            prompt = _asked(row, asked)  # a question; a prompt may be a text that the answer goes on with
        if answers or not all(_begins(side, prompt) for side in (chosen, rejected)):
            fields["prompt"] = prompt
            if not answers and (isinstance(prompt, str) or chosen[0]["role"] in ("system", prompt[-1]["role"])):
                raise BadRecord(f"{keys[0]!r} is a whole conversation, which does not begin with {asked!r}")
        elif isinstance(prompt, list) and (prompt[0]["role"], chosen[0]["role"]) == ("system", "user"):
            chosen, rejected = [prompt[0], *chosen], [prompt[0], *rejected]
    elif turns is not None and answers:
        fields["prompt"] = _turns(row, turns, directory)
    if isinstance(fields.get("prompt"), list):
        chosen, rejected = _as_turns(chosen), _as_turns(rejected)
        fields["prompt"] = _with_system(fields["prompt"], row)
    elif not isinstance(chosen, str) and not fields:
        chosen, rejected = _with_system(chosen, row), _with_system(rejected, row)
    return _pair({"chosen": chosen, "rejected": rejected, **fields}, row, directory)


def _begins(turns: list[dict[str, Any]], prompt: Any) -> bool:
    """Whether a conversation begins with a prompt; one of them may leave the system prompt out."""
    asked = _as_turns(prompt, "user")
    if (turns[0]["role"] == "system") != (asked[0]["role"] == "system"):
        turns, asked = ([turn for turn in side if turn["role"] != "system"] for side in (turns, asked))
    sides = [
        [
            {**turn, "content": turn["content"].strip() if isinstance(turn["content"], str) else turn["content"]}
            for turn in side
        ]
        for side in (turns, asked)
    ]
    return sides[0][: len(asked)] == sides[1]


def _rejected_beside(row: ReadKeys, keys: tuple[str, ...], directory: Path) -> Fields:
    """A conversation, and what stands in the place of everything after its last question."""
    if keys[0] in _CONVERSATIONS:
        turns = _turns(row, keys[0], directory)
        check_dialog(turns, keys[0])
    else:
        turns = [*_asked(row, keys[0]), {"role": "assistant", "content": check_text(row[keys[1]], keys[1])}]
    rejected = _as_turns(_text_or_turns(row, keys[-1], directory))
    last = max((number for number, turn in enumerate(turns) if turn["role"] == "user"), default=-1)
    prompt, chosen = turns[: last + 1], turns[last + 1 :]
    if rejected[0]["role"] != "assistant":  # a whole conversation
        spoken = [turn for turn in rejected if turn["role"] != "system"]
        rejected = spoken[sum(turn["role"] != "system" for turn in prompt) :] if _begins(rejected, prompt) else []
    if not chosen or not rejected or chosen == rejected:
        raise BadRecord(f"{keys[-1]!r} must be another answer to the last question of {keys[0]!r}")
    return _pair({"chosen": chosen, "rejected": rejected, "prompt": prompt}, row, directory)


def _pair(fields: Fields, row: ReadKeys, directory: Path) -> Fields:
    """A preference without marks of turns, which the trainers of pairs do not know."""
    for key in ("chosen", "rejected", "prompt"):
        for turn in fields[key] if isinstance(fields.get(key), list) else ():
            parts = [part for part in turn["content"] if isinstance(part, dict)]
            if (
                False in [one.pop("train", None) for one in (turn, *parts)]
                and key != "prompt"
                and turn["role"] == "assistant"
            ):
                raise BadRecord(f"a turn of {key!r} is marked as not to be trained on, but a pair is trained on whole")
    talk = any(isinstance(fields.get(key), list) for key in ("chosen", "prompt"))
    return _with_images(_with_tools(fields, row) if talk else fields, row, directory)


def _text_or_turns(row: ReadKeys, key: str, directory: Path) -> Any:
    value = row[key]
    value = [value] if isinstance(value, dict) and {"role", "from"} & value.keys() else value  # one turn
    return check_conversation(value, key, directory, row.inside) if isinstance(value, list) else check_text(value, key)


def _as_turns(value: Any, role: str = "assistant") -> list[dict[str, Any]]:
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def _with_system(turns: list[dict[str, Any]], row: ReadKeys) -> list[dict[str, Any]]:
    key = next((key for key in ("system", "system_prompt") if row.peek(key) not in (None, "")), None)
    if key is None or turns[0]["role"] == "system":  # one that is not written is named as not read
        return turns
    system = row[key]
    if isinstance(system, str) and not system.strip():
        return turns
    return [{"role": "system", "content": check_text(system, key)}, *turns]


def _with_tools(fields: Fields, row: ReadKeys) -> Fields:
    return {**fields, "tools": check_tools(row["tools"])} if row.get("tools") else fields


def _with_images(fields: Fields, row: ReadKeys, directory: Path) -> Fields:
    key = next((key for key in _IMAGE_KEYS if row.peek(key) not in (None, [], "")), None)
    values = [value for name, value in fields.items() if name != "spans" and isinstance(value, list)]
    turns = [turn for value in values for turn in value if "content" in turn]
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
    ("instruction and completion", ("instruction", "completion")),
    ("question and completion", ("question", "completion")),
    ("INSTRUCTION and RESPONSE", ("INSTRUCTION", "RESPONSE")),
    ("prompt and response", ("prompt", "response")),
    ("prompt and generation", ("prompt", "generation")),
    ("prompt and answer", ("prompt", "answer")),
    ("question and answer", ("question", "answer")),
    ("question and response", ("question", "response")),
    ("query and response", ("query", "response")),
    ("query and answer", ("query", "answer")),
    ("problem and solution", ("problem", "solution")),
    ("problem and answer", ("problem", "answer")),
    ("input and output", ("input", "output")),
    ("inputs and targets", ("inputs", "targets")),
    ("message_1 and message_2", ("message_1", "message_2")),
)
_REJECTED = ("rejected_response", "rejected_messages")
_UNKNOWN: tuple[tuple[tuple[str, ...], str], ...] = (
    (("input_ids",), "is tokenized already; give texts or conversations, which the recipe tokenizes itself"),
    (("prompt", "completions", "labels"), "has labels of single steps (stepwise supervision), which no task trains on"),
    (("prompt", "answers"), "has answers with ranks; write pairs of them (prompt, chosen, rejected) for task dpo"),
    (
        ("article", "summary"),
        "has no instruction; write one with the article into prompt, and the summary into response",
    ),
    (("question", "choices"), "has choices, which belong into the question; write both into prompt, and a response"),
    (("instruction", "revision"), "has a revised answer; rename it to response"),
    (("critiques",), "has a critique of an answer; write what is asked into prompt, and the critique into response"),
    (("unanswerable_question",), "has no answer; write the one that you want into answer, beside question and context"),
    (("chosen", "completion"), "has a prompt under chosen; rename it to prompt"),
    (("completion",), "has no prompt beside completion; write it into prompt, or a whole conversation into messages"),
    (("questions", "labels"), "has labels of decisions, which no task trains on"),
    (("request", "gold_unique_model_id"), "has a request to a model that routes, which no task trains on"),
    (("prompt",), "has a prompt without an answer that is known (completion, response, answer, generation)"),
)
"""Keys of formats that other programs know, and why they are none here."""

FORMATS: tuple[RecordFormat, ...] = (
    *(
        RecordFormat(f"preferences ({rejected})", "preference", (*keys, rejected), _rejected_beside)
        for keys in (*((key,) for key in _CONVERSATIONS), ("query", "response"), ("instruction", "output"))
        for rejected in _REJECTED
    ),
    RecordFormat("conversations (messages)", "messages", ("messages",), _messages),
    RecordFormat("conversations (ShareGPT)", "messages", ("conversations",), _messages),
    RecordFormat("conversations (ShareGPT)", "messages", ("conversation",), _messages),
    RecordFormat("preferences (chosen and rejected)", "preference", ("chosen", "rejected"), _preference),
    RecordFormat("preferences", "preference", ("chosen_response", "rejected_response"), _preference),
    RecordFormat("prompt and completion", "prompt_completion", ("prompt", "completion"), _prompt_completion),
    *(RecordFormat(name, "messages", keys, _question) for name, keys in _PAIRS),
    RecordFormat("segments", "text", ("segments",), _segments),
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
    fitting = [
        entry
        for entry in FORMATS
        if all(key in value for key in entry.keys) and not (entry.keys[-1] in _REJECTED and not value[entry.keys[-1]])
    ]
    chosen = [entry for entry in fitting if kind in ("auto", entry.kind)]
    if not chosen:
        wanted = "" if kind == "auto" else f" of kind {kind}"
        if kind == "auto" and (reason := next((why for keys, why in _UNKNOWN if all(k in value for k in keys)), None)):
            return f"{reason}; its keys are {_listed(value)}"
        return f"no known format{wanted}; its keys are {_listed(value)}. Known: {_known(kind)}; or set text_key"
    pairs = [entry for entry in chosen if entry.kind == "preference"]
    if pairs and (pairs[0].keys[-1] in _REJECTED or isinstance(value[pairs[0].keys[0]], Mapping)):
        return pairs[0]  # the other answer, or one turn, beside the conversation that both answers end
    other = [entry for entry in chosen if {entry.kind, chosen[0].kind} == {"messages", "preference"}]
    if kind == "auto" and other:
        return (
            f"has both {_listed(chosen[0].keys)} and {_listed(other[0].keys)}; set kind of the source to "
            f"{chosen[0].kind} or {other[0].kind}"
        )
    return chosen[0]


def _known(kind: str) -> str:
    known = [entry for entry in FORMATS if kind in ("auto", entry.kind) and entry.keys[-1] not in _REJECTED]
    return "; ".join(dict.fromkeys(", ".join(entry.keys) for entry in known))


def _listed(keys: Iterable[Any]) -> str:
    keys = [repr(key) for key in keys]
    more = f" and {len(keys) - _FEW_KEYS} more" if len(keys) > _FEW_KEYS else ""
    return (", ".join(keys[:_FEW_KEYS]) or "none") + more
