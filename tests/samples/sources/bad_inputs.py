"""Lines that are no valid samples: for each format of samples, a good line, and bad ones with the reason."""

from __future__ import annotations

import json
from typing import Any

Case = tuple[bytes, str]


def line(value: Any) -> bytes:
    return json.dumps(value).encode()


def one(**turn: Any) -> bytes:
    """A conversation whose first turn is good, and whose second one is ``turn``."""
    return line({"messages": [{"role": "user", "content": "hi"}, turn]})


def answer(**more: Any) -> bytes:
    """A good conversation with further keys."""
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    return line({"messages": turns, **more})


def share(*turns: Any, **more: Any) -> bytes:
    return line({"conversations": list(turns), **more})


ASK, SAY = {"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}

GOOD: dict[str, bytes] = {
    "messages": answer(),
    "sharegpt": share(ASK, SAY),
    "prompt_completion": line({"prompt": "2 + 2 =", "completion": " 4"}),
    "alpaca": line({"instruction": "add", "input": "2 and 2", "output": "4"}),
    "preference": line({"prompt": "hi", "chosen": "hello", "rejected": "go away"}),
    "text": line({"text": "some words"}),
}
FIRST_KEY = {
    "messages": "messages",
    "sharegpt": "conversations",
    "prompt_completion": "prompt",
    "alpaca": "instruction",
    "preference": "chosen",
    "text": "text",
}


def in_every_format(name: str) -> list[Case]:
    """What is wrong whatever the format: encodings, JSON, missing and repeated keys, lines of other formats."""
    good, key = GOOD[name], FIRST_KEY[name]
    content = json.loads(good)
    other = next(GOOD[kind] for kind in ("messages", "text") if kind != name)
    without = {entry: value for entry, value in content.items() if entry != key}
    return [
        (good[:-1], "not valid JSON: Expecting"),
        (good[: len(good) // 2], "not valid JSON"),
        (b"plain words", "not valid JSON: Expecting value (column 1)"),
        (good.replace(b'"', b"'"), "not valid JSON: Expecting property name"),
        (good[:-1] + b",}", "not valid JSON"),
        (good + good, "not valid JSON: Extra data"),
        (good + b",", "not valid JSON: Extra data"),
        (good[:-1] + b', "x": "\t"}', "not valid JSON: Invalid control character"),
        (good[:-1] + b', "x": "\xff"}', "not UTF-8 text (byte "),
        (good[:-1] + ', "x": "café"}'.encode("latin-1"), "not UTF-8 text (byte "),
        (good.decode().encode("utf-16-le"), "not "),
        (good[:-1] + b', "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not valid JSON: nested too deeply"),
        (good[:-1] + b', "x": ' + b"9" * 5000 + b"}", "not valid JSON: Exceeds the limit"),
        (good[:-1] + b", " + line(key) + b": 1}", f"the key '{key}' appears twice in an object"),
        (b"[1, 2]", "expected a mapping with"),
        (b'"text"', "got a string"),
        (b"5", "got a number"),
        (b"null", "got null"),
        (b"true", "got true or false"),
        (b"{}", f"no key '{key}'; found none"),
        (line(without), f"no key '{key}'; found"),
        (line({f"{key}s": 1}), f"no key '{key}'; found '{key}s'"),
        (other, f"no key '{key}'; found"),
        (line({**content, key: None}), f"'{key}' is null"),
    ]


MESSAGES: list[Case] = [
    (line({"messages": "hi"}), "'messages' is a text, and not valid JSON"),
    (line({"messages": 5}), "'messages' must be a list of turns, got a number"),
    (line({"messages": True}), "'messages' must be a list of turns, got true or false"),
    (line({"messages": {"role": "user", "content": "hi"}}), "'messages' must be a list of turns, got a mapping"),
    (line({"messages": []}), "'messages' has no turn"),
    (line({"messages": ["hi"]}), "turn 1 of 'messages' must be a mapping with a role and a content, got a string"),
    (line({"messages": [None]}), "turn 1 of 'messages' must be a mapping with a role and a content, got null"),
    (line({"messages": [[]]}), "turn 1 of 'messages' must be a mapping with a role and a content, got a list"),
    (one(content="x"), "turn 2 of 'messages' has no 'role' (or 'from'); its keys: 'content'"),
    (one(role="assistant"), "turn 2 of 'messages' has no 'content' (or 'value'); its keys: 'role'"),
    (one(role="assistant", text="x"), "has no 'content' (or 'value'); its keys: 'role', 'text'"),
    (one(role=None, content="x"), "turn 2 of 'messages': 'role' is null"),
    (one(role="assistant", content=None), "turn 2 of 'messages': 'content' is null"),
    (one(role=5, content="x"), "turn 2 of 'messages' has the role a number; roles are"),
    (one(role="assistent", content="x"), "'assistent'; roles are system, user, assistant and tool. Did you mean"),
    (one(role="", content="x"), "turn 2 of 'messages' has the role ''"),
    (one(role="narrator", content="x"), "turn 2 of 'messages' has the role 'narrator'"),
    (one(role=["assistant"], content="x"), "turn 2 of 'messages' has the role a list"),
    (one(role="assistant", content="x", **{"from": "gpt"}), "turn 2 of 'messages' has both 'role' and 'from'"),
    (one(role="assistant", content="x", value="y"), "turn 2 of 'messages' has both 'content' and 'value'"),
    (one(role="assistant", content=""), "turn 2 of 'messages' is empty"),
    (one(role="assistant", content=" \n\t"), "turn 2 of 'messages' is empty"),
    (one(role="assistant", content=[]), "turn 2 of 'messages' is empty"),
    (one(role="assistant", content=5), "the content of turn 2 of 'messages' must be a string or a list of parts"),
    (one(role="assistant", content=False), "the content of turn 2 of 'messages' must be a string or a list of parts"),
    (one(role="assistant", content={"text": "x"}), "the content of turn 2 of 'messages' must be a string or a list"),
    (one(role="assistant", content=["x"]), "part 1 of turn 2 of 'messages' must be a mapping with a 'type'"),
    (one(role="assistant", content=[{"text": "x"}]), "part 1 of turn 2 of 'messages' must be a mapping with a 'type'"),
    (one(role="assistant", content=[{"type": "smell"}]), "part 1 of turn 2 of 'messages' has the type 'smell'"),
    (one(role="assistant", content=[{"type": "text"}]), "text of part 1 of turn 2 of 'messages' must be a string"),
    (one(role="assistant", content=[{"type": "text", "text": ""}]), "is empty"),
    (one(role="assistant", content=[{"type": "text", "text": 1}]), "must be a string, got a number"),
    (one(role="assistant", content="\ud800"), "turn 2 of 'messages' cannot be encoded as UTF-8: surrogates"),
    (one(role="user", content="x"), "'messages' has no turn of the assistant"),
    (one(role="system", content="x"), "'messages' has no turn of the assistant"),
    (
        line({"messages": [*json.loads(answer())["messages"], {"role": "system", "content": "x"}]}),
        "turn 3 of 'messages' is a system turn, which must be the first one",
    ),
    (one(role="assistant", content="x", tool_calls="f"), "turn 2 of 'messages': 'tool_calls' must be a list"),
    (one(role="assistant", content="x", tool_calls=[5]), "turn 2 of 'messages': a tool call must be a mapping"),
    (one(role="assistant", content="x", tool_calls=[{}]), "turn 2 of 'messages': a tool call has no name"),
    (one(role="user", content="x", tool_calls=[{"name": "f"}]), "a turn of the user cannot have 'tool_calls'"),
    (
        one(role="assistant", content="x", tool_calls=[{"name": "f", "arguments": "{"}]),
        "arguments of turn 2 of 'messages' is a text, and not valid JSON",
    ),
    (
        one(role="assistant", content="x", tool_calls=[{"name": "f", "arguments": [1]}]),
        "turn 2 of 'messages': the arguments of a tool call must be a mapping, got a list",
    ),
    (one(role="assistant", content="x", name=5), "turn 2 of 'messages': 'name' must be a string, got a number"),
    (one(role="assistant", content="x", reasoning_content=[]), "'reasoning_content' must be a string, got a list"),
    (one(role="assistant", content="x", train="yes"), "turn 2 of 'messages': 'train' must be true or false, got 'yes'"),
    (one(role="assistant", content="x", weight=2), "turn 2 of 'messages': 'weight' must be true or false, got 2"),
    (one(role="assistant", content="x", loss_mask=[0, 1]), "'loss_mask' must be true or false, got [0, 1]"),
    (
        one(role="assistant", content="x", mask=0),
        "turn 2 of 'messages': 'mask' may mean more than one thing; write 'train'",
    ),
    (one(role="assistant", content="x", ignore=True), "turn 2 of 'messages': 'ignore' may mean more than one thing"),
    (answer(tools="[{"), "'tools' is a text, and not valid JSON"),
    (answer(tools={"name": "f"}), "'tools' must be a list of mappings, got a mapping"),
    (answer(tools=["f"]), "'tools' must be a list of mappings"),
    (answer(tools=[{"function": "f"}]), "'function' of tool 1 must be a mapping, got a string"),
    (answer(system="\ud800"), "'system' cannot be encoded as UTF-8"),
    (answer(images=["missing.png"]), "image 1: the file 'missing.png' does not exist (relative to "),
    (answer(images=["good.png", "gone/x.png"]), "image 2: the file 'gone/x.png' does not exist"),
    (answer(images="missing.png"), "image 1: the file 'missing.png' does not exist"),
    (answer(images=["empty.png"]), "image 1: the file 'empty.png' is empty"),
    (answer(images=["good.png", "broken.png"]), "broken.png' cannot be read: cannot identify image file"),
    (answer(images=["huge.png"]), "huge.png' has 9000 x 9000 pixels; at most 67,108,864 are read"),
    (answer(images=[{"base64": "A"}]), "image 1: 'data:image;base64,A...' is not valid base64"),
    (answer(images=["x" * 5000]), "image 1: 'xxx"),
    (answer(images=["https://example.org/x.png"]), "image 1 is the address 'https://example.org/x.png'; download it"),
    (answer(images=[5]), "image 1 must be a path or the bytes of a file, got a number"),
    (answer(images=[None]), "image 1 must be a path or the bytes of a file, got null"),
    (answer(images=[{"bytes": None, "path": None}]), "image 1 must be a path or the bytes of a file, got null"),
    (answer(image={"path": "missing.png"}), "image 1: the file 'missing.png' does not exist"),
    (
        line({"messages": [{"role": "user", "content": "<image><image>?"}, SAY], "images": ["good.png"]}),
        "the turns refer to 2 images, but the sample has 1",
    ),
    (
        line({"messages": [{"role": "user", "content": [{"type": "image"}]}, SAY]}),
        "the turns refer to 1 image, but the sample has 0",
    ),
    (
        one(role="assistant", content=[{"type": "image", "image": "missing.png"}]),
        "the file 'missing.png' does not exist",
    ),
    (
        one(role="assistant", content=[{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]),
        "image 1 is the address 'http://x/y.png'; download it",
    ),
]

SHAREGPT: list[Case] = [
    (share(), "'conversations' has no turn"),
    (share(ASK), "'conversations' has no turn of the assistant"),
    (share(ASK, {"from": "gpt"}), "turn 2 of 'conversations' has no 'content' (or 'value'); its keys: 'from'"),
    (share(ASK, {"value": "x"}), "turn 2 of 'conversations' has no 'role' (or 'from'); its keys: 'value'"),
    (share(ASK, {"from": "gpt", "value": None}), "turn 2 of 'conversations': 'value' is null"),
    (share(ASK, {"from": None, "value": "x"}), "turn 2 of 'conversations': 'from' is null"),
    (share(ASK, {"from": "gpt", "value": ""}), "turn 2 of 'conversations' is empty"),
    (share({"from": "human", "value": " "}, SAY), "turn 1 of 'conversations' is empty"),
    (share({"from": "humen", "value": "x"}, SAY), "turn 1 of 'conversations' has the role 'humen'"),
    (share(ASK, {"from": "gpt4", "value": "x"}), "turn 2 of 'conversations' has the role 'gpt4'"),
    (share(ASK, {"from": "function_call", "value": "f()"}), "tool call of turn 2 of 'conversations' is a text"),
    (share(ASK, {"from": "function_call", "value": "{}"}), "turn 2 of 'conversations': a tool call has no name"),
    (share(ASK, {"from": "function_call", "value": "[1]"}), "a tool call must be a mapping, got a list"),
    (share(ASK, SAY, {"from": "system", "value": "x"}), "turn 3 of 'conversations' is a system turn"),
    (share(ASK, SAY, tools="f"), "'tools' is a text, and not valid JSON"),
    (share(ASK, SAY, 7), "turn 3 of 'conversations' must be a mapping"),
    (line({"conversations": "hi"}), "'conversations' is a text, and not valid JSON"),
    (line({"conversations": {"0": ASK}}), "'conversations' must be a list of turns, got a mapping"),
    (share({"from": "human", "value": "<image>?"}, SAY, images=["good.png"] * 2), "1 image, but the sample has 2"),
]

PROMPT_COMPLETION: list[Case] = [
    (line({"prompt": prompt, "completion": completion}), reason)
    for prompt, completion, reason in (
        ("", "x", "'prompt' is empty"),
        ("  ", "x", "'prompt' is empty"),
        (5, "x", "'prompt' must be a string, got a number"),
        ({}, "x", "'prompt' must be a string, got a mapping"),
        ("x", "", "'completion' is empty"),
        ("x", "\n", "'completion' is empty"),
        ("x", 5, "'completion' must be a string, got a number"),
        ("x", True, "'completion' must be a string, got true or false"),
        ("x", {"text": "y"}, "'completion' must be a string, got a mapping"),
        ("\ud800", "x", "'prompt' cannot be encoded as UTF-8"),
        ("x", "\udfff", "'completion' cannot be encoded as UTF-8"),
        ([], "x", "'prompt' has no turn"),
        ("x", [{"role": "assistant", "content": "y"}], "'prompt' and 'completion' must both be texts, or both"),
        ([{"role": "user", "content": "y"}], "x", "'prompt' and 'completion' must both be texts, or both"),
        ([{"role": "user", "content": "y"}], [{"role": "user", "content": "z"}], "has no turn of the assistant"),
        ([{"role": "user", "content": ""}], [{"role": "assistant", "content": "z"}], "turn 1 of 'prompt' is empty"),
    )
] + [
    (line({"prompt": "x"}), "no key 'completion'"),
    (line({"prompt": "x", "completion": None}), "'completion' is null"),
]

ALPACA: list[Case] = [
    (line({"instruction": "add", "output": "4", **changed}), reason)
    for changed, reason in (
        ({"instruction": ""}, "'instruction' is empty"),
        ({"instruction": 5}, "'instruction' must be a string, got a number"),
        ({"instruction": ["add"]}, "'instruction' must be a string, got a list"),
        ({"output": ""}, "'output' is empty"),
        ({"output": None}, "'output' is null"),
        ({"output": 4}, "'output' must be a string, got a number"),
        ({"output": {"text": "4"}}, "'output' must be a string, got a mapping"),
        ({"input": 5}, "'input' must be a string, got a number"),
        ({"input": ["x"]}, "'input' must be a string, got a list"),
        ({"input": " "}, "'input' is empty"),
        ({"history": [["x"]]}, "'history' must be a list of pairs, question and answer; entry -1 is not"),
        ({"history": [["x", "y", "z"], ["a", "b"]]}, "'history' must be a list of pairs, question and answer; entry"),
        ({"history": [["x", ""]]}, "'history[-1]' is empty"),
        ({"history": "x"}, "'history' must be a list of pairs"),
        ({"history": 5}, "'history' must be a list of pairs"),
        ({"system": 5}, "'system' must be a string, got a number"),
        ({"images": ["missing.png"]}, "image 1: the file 'missing.png' does not exist"),
    )
]

PREFERENCE: list[Case] = [
    (line({"prompt": "hi", "chosen": "a", "rejected": "b", **changed}), reason)
    for changed, reason in (
        ({"chosen": "b"}, "'chosen' and 'rejected' are equal"),
        ({"chosen": ""}, "'chosen' is empty"),
        ({"rejected": None}, "'rejected' is null"),
        ({"rejected": 5}, "'rejected' must be a string, got a number"),
        ({"prompt": 5}, "'prompt' must be a string, got a number"),
        ({"prompt": ""}, "'prompt' is empty"),
        ({"chosen": [{"role": "assistant", "content": "a"}]}, "'chosen' and 'rejected' must both be texts, or both be"),
        ({"chosen": [{"role": "ai", "content": "a"}]}, "turn 1 of 'chosen' has the role 'ai'"),
        ({"chosen": []}, "'chosen' has no turn"),
    )
]

TEXT: list[Case] = [
    (line({"text": text}), reason)
    for text, reason in (
        ("", "'text' is empty"),
        (" \n", "'text' is empty"),
        (5, "'text' must be a string, got a number"),
        (0.5, "'text' must be a string, got a number"),
        (True, "'text' must be a string, got true or false"),
        (["x"], "'text' must be a string, got a list"),
        ({"text": "x"}, "'text' must be a string, got a mapping"),
        ("\ud83d", "'text' cannot be encoded as UTF-8: surrogates not allowed"),
    )
]

LINES: dict[str, list[Case]] = {
    name: [*in_every_format(name), *special]
    for name, special in (
        ("messages", MESSAGES),
        ("sharegpt", SHAREGPT),
        ("prompt_completion", PROMPT_COMPLETION),
        ("alpaca", ALPACA),
        ("preference", PREFERENCE),
        ("text", TEXT),
    )
}
"""Bad lines of jsonl files, by format of samples, with the reason that is given."""
