"""Which messages, and which parts of them, are trained on."""

import pytest

from tests.samples.chat.test_encoder import CHAT, refused, shown, trained


@pytest.mark.parametrize(
    ("train_on", "parts"),
    [
        ("assistant", ["1<|im_end|>", "2<|im_end|>"]),
        ("last_turn", ["2<|im_end|>"]),
        (("user",), ["One?<|im_end|>", "Two?<|im_end|>"]),
        (["system", "assistant"], ["Be brief.<|im_end|>", "1<|im_end|>", "2<|im_end|>"]),
    ],
)
def test_train_on(train_on, parts):
    assert trained(shown(CHAT, train_on=train_on)) == parts


def test_a_message_within_another_can_be_trained_on():
    """Gemma writes the system message in the first user turn."""
    assert trained(shown(CHAT, "gemma-3", train_on=("system",))) == ["Be brief."]
    assert trained(shown(CHAT, "gemma-3", train_on=("user",))) == ["One?<end_of_turn>", "Two?<end_of_turn>"]


def test_conversations_that_begin_with_the_assistant():
    """Qwen's template cannot write the prompt of the first turn alone."""
    messages = [{"role": "assistant", "content": "Hello"}, *CHAT[1:3]]
    assert refused(messages, family="qwen-3").message.startswith("message 1 of 3 (assistant) cannot be found")
    messages[0]["train"] = False
    assert trained(shown(messages, "qwen-3")) == ["<think>\n\n</think>\n\n1<|im_end|>"]
    assert trained(shown(messages, "chatml")) == ["1<|im_end|>"]
    messages[0]["train"] = True
    assert trained(shown(messages, "chatml")) == ["Hello<|im_end|>", "1<|im_end|>"]


def test_train_on_all():
    text = shown(CHAT, train_on="all")
    assert text == f"⟦{text[1:-1]}⟧"


def test_train_on_all_has_the_prompt_whatever_its_form():
    fields = {"prompt": "Two and two", "completion": " is four"}
    assert shown(fields, "mistral-v0.3", kind="prompt_completion", train_on="all") == "⟦Two and two is four</s>⟧"
    fields = {"prompt": CHAT[:3], "completion": CHAT[3:]}
    assert shown(fields, kind="prompt_completion", train_on="all") == shown(CHAT, train_on="all")


def test_a_message_selects_itself():
    messages = [dict(message) for message in CHAT]
    messages[2]["train"] = False
    messages[3]["train"] = True
    assert trained(shown(messages)) == ["Two?<|im_end|>", "2<|im_end|>"]
    everything = shown(messages, train_on="all")
    assert "assistant\n⟧1<|im_end|>⟦\n<|im_start|>" in everything


@pytest.mark.parametrize("family", ["chatml", "qwen-3", "llama-3.1", "gemma-3", "mistral-v0.3", "phi-4", "gpt-oss"])
def test_parts_of_a_message_that_are_not_trained_on(family):
    """Also where the template trims the text, with text that occurs twice, and in other scripts."""
    end = trained(shown(CHAT[1:], family))[1].removeprefix("<think>\n\n</think>\n\n").rpartition("2")[2]
    pieces = [(" 日本 wrong, ", False), ("right", True), ("  wrong", False), (" and right", None), (" é ", False)]
    parts = [{"type": "text", "text": text} | ({} if train is None else {"train": train}) for text, train in pieces]
    whole = "".join(text for text, _ in pieces)
    messages = [*CHAT[1:4], {"role": "assistant", "content": parts}]
    text = shown(messages, family)
    assert trained(text)[-3:] == ["right", " and right", end]
    assert whole.strip() in text.replace("⟦", "").replace("⟧", "")
    everything = shown(messages, family, train_on="all")
    assert not any("wrong" in part or "é" in part for part in trained(everything))
    assert trained(shown([*messages[:3], {**messages[3], "train": False}], family)) == trained(text)[:1]


def test_parts_of_reasoning_that_are_not_trained_on():
    parts = [{"type": "text", "text": "5?", "train": False}, {"type": "text", "text": " No, 4."}]
    messages = [*CHAT[1:2], {"role": "assistant", "reasoning_content": parts, "content": "4"}]
    assert trained(shown(messages, "qwen-3")) == ["<think>\n", " No, 4.\n</think>\n\n4<|im_end|>"]
    assert trained(shown(messages, "gemma-3")) == ["4<end_of_turn>"]  # its template writes no reasoning


def test_segments_of_a_text():
    text = "<|im_start|>One?\n1<|im_end|>"
    fields = {"text": text, "spans": [[17, 18], [18, 28]]}
    assert shown(fields, kind="text") == "<|im_start|>One?\n⟦1<|im_end|>⟧"  # no token is added


def test_last_turn_has_the_steps_after_the_last_question():
    call = {"function": {"name": "f", "arguments": {"a": "b"}}}
    messages = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "Use f."},
        {"role": "assistant", "content": "Yes.", "tool_calls": [call]},
        {"role": "tool", "content": "c"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "Not answered."},
    ]
    assert trained(shown(messages, chat_template="chatml", train_on="last_turn")) == [
        'Yes.\n<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call><|im_end|>',
        "c<|im_end|>",
    ]
