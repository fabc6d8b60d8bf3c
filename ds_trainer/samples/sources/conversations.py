"""Conversations: the turns of a sample, in the form of chat templates, whatever they are called in the file."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from ds_trainer.samples.sources.images import check_images, type_name
from ds_trainer.samples.sources.marks import ReadKeys, refuse_bad_answer
from ds_trainer.samples.sources.record import BadRecord
from ds_trainer.utils.errors import did_you_mean
from ds_trainer.utils.files import parse_json

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "ipython": "tool",
}
"""Names of roles in files, and the role that chat templates know."""

_CALLS = ("function_call", "tool_call")  # roles of ShareGPT files: the assistant calls a tool
_ROLE_KEYS = ("role", "from")
_CONTENT_KEYS = ("content", "value")
_MEDIA = ("text", "image", "image_url", "video", "audio")
_IMAGE_KEYS = ("type", "image", "image_url", "path", "url", "base64")
_REASONING = ("thinking", "reasoning_content", "reasoning")
_PAIR = (("human", "user"), ("assistant", "gpt", "bot"))  # a turn of both, in one mapping
_TRAIN, _TRAIN_ANSWER = (
    ("train", "training", "trainable", "train_on_turn", "loss_mask", "weight"),
    ("loss", "loss_scale"),
)
_UNCLEAR = ("mask", "masked", "ignore", "ignored")  # a mask has the tokens that are trained on, or those that are not


def check_conversation(value: Any, key: str, directory: Path, unread: set[str]) -> list[dict[str, Any]]:
    """The turns of a conversation, each with ``role`` and ``content`` and what else chat templates use.

    Args:
        value: a list of mappings with ``role`` and ``content``, or ``from`` and ``value`` (ShareGPT), or of questions
            and answers in one mapping; or a text with that as JSON, as CSV files have it.
        key: its name in messages.
        directory: where the file is; paths of images are relative to it.
        unread: gets the names of keys of turns and parts that no rule reads.

    Raises:
        BadRecord: it is something else, or a turn is empty or has an unknown role.
    """
    turns = value
    if isinstance(value, str):
        turns = parsed_json(value, key)
    if not isinstance(turns, list):
        raise BadRecord(f"{key!r} must be a list of turns, got {type_name(turns)}")
    if not turns:
        raise BadRecord(f"{key!r} has no turn")
    checked: list[dict[str, Any]] = []
    for number, mapping in enumerate(turns, 1):
        name = f"turn {number} of {key!r}"
        if not isinstance(mapping, dict):
            raise BadRecord(f"{name} must be a mapping with a role and a content, got {type_name(mapping)}")
        turn = ReadKeys(mapping)
        pair = [next((entry for entry in entries if entry in turn), None) for entries in _PAIR]
        if pair[0] is not None and pair[1] is not None and not any(entry in turn for entry in _ROLE_KEYS):
            for role, entry in zip(("user", "assistant"), pair, strict=True):
                checked.append({"role": role, "content": check_text(turn[str(entry)], f"{entry!r} of {name}")})
        else:
            message = _turn(turn, name, directory)
            if (
                message["role"] == "assistant"
                and checked
                and checked[-1]["role"] == "assistant"
                and any(turn.peek(key) in _CALLS for key in _ROLE_KEYS)
            ):
                # A turn of its own in the file, but what the model writes in one turn: a text and calls.
                checked[-1]["tool_calls"] = [*checked[-1].get("tool_calls", ()), *message["tool_calls"]]
                checked[-1] |= {"train": False} if message.get("train") is False else {}
            else:
                checked.append(message)
        unread.update(f"{key}[].{entry}" for entry in turn.unread())
    return checked


def check_dialog(turns: list[dict[str, Any]], key: str) -> None:
    """Refuse a conversation from which nothing can be learned.

    Raises:
        BadRecord: it has no turn of the assistant, or a system turn that is not the first one.
    """
    if not any(turn["role"] == "assistant" for turn in turns):
        raise BadRecord(f"{key!r} has no turn of the assistant")
    for number, turn in enumerate(turns[1:], 2):
        if turn["role"] == "system":
            raise BadRecord(f"turn {number} of {key!r} is a system turn, which must be the first one")


def check_tools(value: Any) -> list[Any]:
    """The list of tools of a conversation; a text is read as JSON.

    Raises:
        BadRecord: it is no list of mappings, or the function of one is no mapping.
    """
    tools = parsed_json(value, "tools") if isinstance(value, str) else value
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRecord(f"'tools' must be a list of mappings, got {type_name(tools)}")
    for number, tool in enumerate(tools, 1):
        function = tool.get("function")
        if function is not None and not isinstance(function, dict):
            raise BadRecord(f"'function' of tool {number} must be a mapping, got {type_name(function)}")
    return [without_nulls(tool) for tool in tools]


def check_text(value: Any, key: str) -> str:
    """A text that is not empty.

    Raises:
        BadRecord: it is something else.
    """
    if not isinstance(value, str):
        raise BadRecord(f"{_shown(key)} must be a string, got {type_name(value)}")
    if not value.strip():
        raise BadRecord(f"{_shown(key)} is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # "\ud800" is valid JSON, but half of a surrogate pair
        raise BadRecord(f"{_shown(key)} cannot be encoded as UTF-8: {error.reason}") from error
    return value


def parsed_json(text: str, key: str) -> Any:
    """The JSON value in ``text``.

    Raises:
        BadRecord: it is not JSON.
    """
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"{_shown(key)} is a text, and not valid JSON: {error}") from error


def without_nulls(value: Any) -> Any:
    """``value`` without the keys that are null: tables have every key in every row."""
    if isinstance(value, dict):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value


def texts_of(turns: list[dict[str, Any]]) -> list[str]:
    """The contents of ``turns`` that are plain text."""
    return [turn["content"] for turn in turns if isinstance(turn["content"], str)]


def image_parts(turns: list[dict[str, Any]]) -> int:
    """Content parts that stand for an image of the sample's list."""
    parts = [part for turn in turns if isinstance(turn["content"], list) for part in turn["content"]]
    return sum(part["type"] == "image" and len(part) == 1 for part in parts)


def _shown(key: str) -> str:
    """A key in quotes; a description, which has spaces, without."""
    return key if " " in key else repr(key)


def _turn(turn: ReadKeys, name: str, directory: Path) -> dict[str, Any]:
    role = turn[_one_of(turn, _ROLE_KEYS, name)]
    if role in _CALLS:
        content = _content_of(turn, name)
        calls = parsed_json(content, f"tool call of {name}") if isinstance(content, str) else content
        several = isinstance(calls, list) and all(isinstance(call, dict) for call in calls) and calls
        calls = [_call(call, name) for call in (calls if several else [calls])]
        return {"role": "assistant", "content": "", "tool_calls": calls, **_trained(turn, True, name)}
    if not isinstance(role, str) or role.strip().lower() not in ROLES:
        shown = repr(role) if isinstance(role, str) else type_name(role)
        hint = did_you_mean(role, ROLES) if isinstance(role, str) else ""
        raise BadRecord(f"{name} has the role {shown}; roles are system, user, assistant and tool.{hint}".rstrip("."))
    message: dict[str, Any] = {"role": ROLES[role.strip().lower()]}
    answers = message["role"] == "assistant"
    calls = turn.get("tool_calls") or ([turn["function_call"]] if turn.peek("function_call") else [])
    if calls:
        if not isinstance(calls, list):
            raise BadRecord(f"{name}: 'tool_calls' must be a list, got {type_name(calls)}")
        if not answers:
            raise BadRecord(f"{name}: a turn of the {message['role']} cannot have 'tool_calls'")
        message["tool_calls"] = [_call(call, name) for call in calls]
    may_be_empty = bool(calls) or message["role"] == "tool"
    message["content"] = _content(_content_of(turn, name, may_be_empty), name, may_be_empty, directory, turn.inside)
    for key in ("name", "tool_call_id", *_REASONING):
        if turn.get(key) is not None:
            if key in _REASONING and isinstance(turn[key], list) and turn[key]:
                message[key] = _content(turn[key], f"{key!r} of {name}", False, directory, turn.inside)
                continue
            if not isinstance(turn[key], str):
                raise BadRecord(f"{name}: {key!r} must be a string, got {type_name(turn[key])}")
            message[key] = turn[key]
    message |= _trained(turn, answers, name)
    if turn.get("train_detail"):
        message["content"] = _parts_by_offset(message["content"], turn["train_detail"], name)
        message.setdefault("train", True)
    return message


def _trained(turn: ReadKeys, answers: bool, name: str) -> dict[str, bool]:
    """Whether the turn says that it is trained on, or not."""
    marks = []
    for key in (*_TRAIN, *(_TRAIN_ANSWER if answers else ())):
        if (value := turn.get(key)) is not None:
            if value not in (0, 1):
                raise BadRecord(f"{name}: {key!r} must be true or false, got {value!r}")
            marks.append(bool(value))
    for key in _UNCLEAR:
        if turn.peek(key) not in (None, "", [], {}) and (turn[key] is not False or key == "mask"):
            raise BadRecord(f"{name}: {key!r} may mean more than one thing; write 'train': true or false in its place")
    if answers and all(marks) and "rejected" not in name:  # of a pair, whose worse side has such marks
        refuse_bad_answer(turn, f"{name}: ")
    return {"train": all(marks)} if marks else {}


def _parts_by_offset(content: Any, details: Any, name: str) -> list[dict[str, Any]]:
    """A content in parts; what no entry of ``details`` has is not trained on. The last character of an entry counts."""
    if not isinstance(content, str):
        raise BadRecord(f"{name} has 'train_detail', but its content is no text")
    trained = [False] * len(content)
    for detail in details if isinstance(details, list) else [details]:
        try:
            begin, end, train = detail["begin_offset"], detail["end_offset"], detail["train"]
            valid = type(begin) is type(end) is int and 0 <= begin <= end < len(content) and train in (0, 1)
        except (TypeError, KeyError, IndexError):
            valid = False
        if not valid:
            raise BadRecord(
                f"{name}: 'train_detail' must have entries with begin_offset and end_offset (0 to {len(content) - 1}, "
                "both included) and train (true or false)"
            )
        trained[begin : end + 1] = [bool(train)] * (end + 1 - begin)
    parts: list[dict[str, Any]] = []
    for train, characters in groupby(zip(trained, content, strict=True), key=lambda pair: pair[0]):
        text = "".join(character for _, character in characters)
        parts.append({"type": "text", "text": text, "train": train})
    return parts


def _one_of(turn: ReadKeys, keys: tuple[str, ...], name: str) -> str:
    present = [key for key in keys if turn.get(key) is not None]
    if len(present) == 1:
        return present[0]
    if len(present) > 1:
        raise BadRecord(f"{name} has both {keys[0]!r} and {keys[1]!r}")
    null = next((key for key in keys if key in turn), None)
    if null is not None:
        raise BadRecord(f"{name}: {null!r} is null")
    listed = ", ".join(map(repr, list(turn)[:8])) or "none"
    raise BadRecord(f"{name} has no {keys[0]!r} (or {keys[1]!r}); its keys: {listed}")


def _content_of(turn: ReadKeys, name: str, may_be_empty: bool = False) -> Any:
    if may_be_empty and all(turn.get(key) is None for key in _CONTENT_KEYS):
        return ""
    return turn[_one_of(turn, _CONTENT_KEYS, name)]


def _content(content: Any, name: str, may_be_empty: bool, directory: Path, unread: set[str]) -> Any:
    if isinstance(content, list) and content:
        return [_part(part, f"part {number} of {name}", directory, unread) for number, part in enumerate(content, 1)]
    if may_be_empty and content in ("", []):
        return ""
    if content == "" or content == [] or (isinstance(content, str) and not content.strip()):
        raise BadRecord(f"{name} is empty")
    if not isinstance(content, str):
        raise BadRecord(f"the content of {name} must be a string or a list of parts, got {type_name(content)}")
    try:
        content.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRecord(f"{name} cannot be encoded as UTF-8: {error.reason}") from error
    return content


def _part(part: Any, name: str, directory: Path, unread: set[str]) -> dict[str, Any]:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise BadRecord(f"{name} must be a mapping with a 'type'")
    part = without_nulls(part)
    kind = part["type"]
    if kind not in _MEDIA:
        raise BadRecord(f"{name} has the type {kind!r}; types are {', '.join(_MEDIA)}")
    if kind == "text":
        read = ReadKeys(part)
        text = next((read[key] for key in ("text", *_CONTENT_KEYS) if key in read), None)
        content = {"type": read["type"], "text": check_text(text, f"text of {name}"), **_trained(read, True, name)}
        unread.update(f"content[].{key}" for key in read.unread())
        return content
    if kind in ("image", "image_url"):
        unread.update(f"content[].{key}" for key in part if key not in _IMAGE_KEYS)
        image = part.get("image", part.get("image_url", part.get("path", part.get("url"))))
        if image is None and "base64" not in part:
            return {"type": "image"}
        image = part if image is None else image
        return {"type": "image", "image": check_images(image, directory)[0]}
    return part


def _call(call: Any, name: str) -> dict[str, Any]:
    """A tool call; arguments in a text are read as JSON, which is what chat templates expect."""
    call = parsed_json(call, f"tool call of {name}") if isinstance(call, str) else call
    if not isinstance(call, dict):
        raise BadRecord(f"{name}: a tool call must be a mapping, got {type_name(call)}")
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise BadRecord(f"{name}: a tool call has no name")
    arguments = function.get("arguments", {})
    # Null in a text was written by a person or a model; in a mapping, a table may have put it there.
    arguments = (
        parsed_json(arguments, f"arguments of {name}") if isinstance(arguments, str) else without_nulls(arguments)
    )
    if not isinstance(arguments, dict):
        raise BadRecord(f"{name}: the arguments of a tool call must be a mapping, got {type_name(arguments)}")
    identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {"type": "function", **identity, "function": {"name": function["name"], "arguments": arguments}}
