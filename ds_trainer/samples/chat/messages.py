"""Messages of a record in the one form that templates are given."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

from ds_trainer.samples.chat.options import ROLES
from ds_trainer.samples.chat.problems import SampleProblem
from ds_trainer.utils.files import parse_json

Message = dict[str, Any]
_REASONING = ("reasoning_content", "thinking", "reasoning")
_OWN_KEYS = {"train", "untrained", *_REASONING}


class Untrained(NamedTuple):
    """Characters ``start`` to ``end`` (exclusive) of the text under ``key`` of a message, which are not trained on."""

    key: str
    start: int
    end: int


class Conversation(NamedTuple):
    """Messages with string contents, the functions they may call, and what of them the record selects itself.

    ``train`` has, for each message, the value of its key ``train``, or None; ``untrained`` the parts of it that are not
    trained on though the message is. Reasoning is in ``reasoning_content``.
    """

    messages: list[Message]
    tools: list[Message] | None
    train: list[bool | None]
    untrained: list[list[Untrained]]


def read_conversation(source: str, messages: Any, tools: Any = None) -> Conversation:
    """Check and normalize messages.

    Text parts are joined; reasoning parts, and the keys ``thinking`` and ``reasoning``, become ``reasoning_content``;
    tool calls get the form of OpenAI's API with arguments as a mapping; keys without a value are removed.

    Raises:
        SampleProblem: something is not a message, or has content that is no text.
    """

    def refuse(text: str) -> SampleProblem:
        return SampleProblem(source, "bad_messages", text)

    if not isinstance(messages, list) or not messages:
        raise refuse("the conversation has no messages.")
    normalized: list[Message] = []
    train: list[bool | None] = []
    untrained: list[list[Untrained]] = []
    for number, message in enumerate(messages, 1):
        where = f"message {number} of {len(messages)}"
        if not isinstance(message, dict):
            raise refuse(f"{where} is not a mapping with 'role' and 'content'.")
        role = message.get("role")
        if role not in ROLES:
            raise refuse(f"{where} has the role {role!r}; the roles are {', '.join(ROLES)}.")
        selected = message.get("train")
        if selected is not None and not isinstance(selected, bool):
            raise refuse(f"{where} has train={selected!r}, which is neither true nor false.")
        kept = {key: value for key, value in message.items() if value is not None and key not in _OWN_KEYS}
        content, reasoning, left_out = _text(message.get("content"), where, refuse)
        if apart := next((message[key] for key in _REASONING if message.get(key)), None):
            if not isinstance(apart, str | list):
                raise refuse(f"{where} has reasoning that is not text.")
            reasoning, _, parts = _text(apart, where, refuse)
            left_out = [part for part in left_out if part.key == "content"]
            left_out += [part._replace(key="reasoning_content") for part in parts]
        kept["content"] = content
        if reasoning:
            kept["reasoning_content"] = reasoning
        if message.get("tool_calls"):
            calls = message["tool_calls"]
            calls = calls if isinstance(calls, list) else [calls]
            kept["tool_calls"] = [_tool_call(call, where, refuse) for call in calls]
        else:
            kept.pop("tool_calls", None)
        normalized.append(kept)
        train.append(selected)
        untrained.append([*message.get("untrained", ()), *left_out])
    return Conversation(normalized, _tools(tools, refuse), train, untrained)


def _text(content: Any, where: str, refuse: Any) -> tuple[str, str, list[Untrained]]:
    """The text and the reasoning of a content, which is text, parts, or nothing; and what of them is not trained on."""
    if content is None or isinstance(content, str):
        return content or "", "", []
    if not isinstance(content, list):
        raise refuse(f"{where} has a content that is neither text nor a list of parts ({type(content).__name__}).")
    texts: list[str] = []
    reasoning: list[str] = []
    untrained: list[Untrained] = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else "text" if isinstance(part, str) else None
        value = part if isinstance(part, str) else part.get("text", part.get(kind)) if isinstance(part, dict) else None
        if kind not in ("text", "thinking", "reasoning") or not isinstance(value, str):
            raise refuse(
                f"{where} has a part of type {kind!r}; a tokenizer encodes text only (images need task: "
                "vision_language)."
            )
        pieces = texts if kind == "text" else reasoning
        if isinstance(part, dict) and part.get("train") is False:
            start = sum(map(len, pieces))
            key = "content" if kind == "text" else "reasoning_content"
            untrained.append(Untrained(key, start, start + len(value)))
        pieces.append(value)
    return "".join(texts), "".join(reasoning), untrained


def _tool_call(call: Any, where: str, refuse: Any) -> Message:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise refuse(f"{where} has a tool call without the name of a function.")
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments or "{}")
        except ValueError as error:
            raise refuse(f"{where} has a tool call whose arguments are not JSON: {error}.") from None
    if not isinstance(arguments, dict | None):
        raise refuse(f"{where} has a tool call whose arguments are no mapping.")
    kept = {key: value for key, value in call.items() if key not in ("function", "name", "arguments", "parameters")}
    return {"type": "function", **kept, "function": {"name": function["name"], "arguments": arguments or {}}}


def _tools(tools: Any, refuse: Any) -> list[Message] | None:
    if isinstance(tools, str):
        try:
            tools = parse_json(tools or "null")
        except ValueError as error:
            raise refuse(f"'tools' is not JSON: {error}.") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(
        isinstance(tool, dict) and isinstance(tool.get("function", tool), dict) for tool in tools
    ):
        raise refuse("'tools' is not a list of functions.")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def with_inserted(message: Message, inserted: str) -> Iterator[Message]:
    """Copies of ``message``, each with ``inserted`` at the end of one of its texts (before white space at the end)."""
    paths: list[tuple[Any, ...]] = [("content",)]
    for index, call in reversed(list(enumerate(message.get("tool_calls") or []))):
        arguments = call["function"]["arguments"]
        leaves = [key for key, value in arguments.items() if isinstance(value, str)]
        paths += [("tool_calls", index, "function", "arguments", key) for key in reversed(leaves)]
        paths.append(("tool_calls", index, "function", "name"))
    if "reasoning_content" in message:
        paths.append(("reasoning_content",))
    for path in paths:
        changed = copy.deepcopy(message)
        target: Any = changed
        for key in path[:-1]:
            target = target[key]
        text = target[path[-1]]
        end = len(text.rstrip())
        target[path[-1]] = text[:end] + inserted + text[end:]
        yield changed


def with_inserted_at(message: Message, inserted: str, key: str, position: int) -> Message:
    """A copy of ``message`` with ``inserted`` before a character of the text under ``key``."""
    return {**message, key: message[key][:position] + inserted + message[key][position:]}
