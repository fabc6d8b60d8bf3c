"""The labels of conversations with the published templates of model families, against samples marked by hand in ⟦ ⟧."""

import random

import pytest

from ds_trainer.samples.chat.encoder import Encoder
from ds_trainer.samples.chat.options import EncodeOptions
from ds_trainer.samples.chat.problems import SampleProblem
from ds_trainer.samples.sources.record import Record
from tests.samples.chat.families import BAR, FAMILIES, marked, tokenizer_of

# The first answer begins like an opened reasoning block ("<"), and the second turn has reasoning.
PLAIN = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "<b>Hello</b>"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4", "thinking": "an easy sum"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
        },
    }
]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": '{"a": "1"}'}}
WITH_TOOLS = [
    {"role": "user", "content": "Add."},
    {"role": "assistant", "content": None, "reasoning_content": "I need it", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "tool_call_id": "abcdefghi", "content": "2"},
    {"role": "assistant", "content": "It is 2"},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "Fine"},
]

_LLAMA_SYSTEM = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
    "Today Date: 26 Jul 2024\n\n"
)
_GPT_OSS_SYSTEM = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n"
    "Current date: 2025-01-01\n\nReasoning: medium\n\n# Valid channels: analysis, commentary, final. Channel must be "
    "included for every message."
)
_PHI = (
    "<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>Hi there<|im_end|>"
    "<|im_start|>assistant<|im_sep|>⟦<b>Hello</b><|im_end|>⟧<|im_start|>user<|im_sep|>2+2?<|im_end|>"
    "<|im_start|>assistant<|im_sep|>⟦4<|im_end|>⟧"
)
_CHATML = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n"
    "⟦<b>Hello</b><|im_end|>⟧\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n⟦4<|im_end|>⟧\n"
)
_DEEPSEEK = (
    "<|begin▁of▁sentence|>Be brief.<|User|>Hi there<|Assistant|>⟦<b>Hello</b><|end▁of▁sentence|>⟧"
    "<|User|>2+2?<|Assistant|>⟦4<|end▁of▁sentence|>⟧"
).replace("|", BAR)

MARKED = {
    "llama-3.1": _LLAMA_SYSTEM + "Be brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi there<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n⟦<b>Hello</b><|eot_id|>⟧<|start_header_id|>user<|end_header_id|>"
    "\n\n2+2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n⟦4<|eot_id|>⟧",
    "qwen-2.5": _CHATML,
    # Only the last turn is written with its reasoning.
    "qwen-3": _CHATML.replace("⟦4", "⟦<think>\nan easy sum\n</think>\n\n4"),
    # The system message is part of the first user turn.
    "gemma-3": "<bos><start_of_turn>user\nBe brief.\n\nHi there<end_of_turn>\n<start_of_turn>model\n"
    "⟦<b>Hello</b><end_of_turn>⟧\n<start_of_turn>user\n2+2?<end_of_turn>\n<start_of_turn>model\n⟦4<end_of_turn>⟧\n",
    # The system message is written only where the last message is of the user: never in training.
    "mistral-v0.3": "<s>[INST] Hi there[/INST]⟦ <b>Hello</b></s>⟧[INST] 2+2?[/INST]⟦ 4</s>⟧",
    "phi-4": _PHI,
    "phi-4-first": _PHI,
    # <|end|> closes earlier turns, but the model has to end with <|return|>.
    "gpt-oss": _GPT_OSS_SYSTEM + "<|end|><|start|>developer<|message|># Instructions\n\nBe brief.\n\n<|end|>"
    "<|start|>user<|message|>Hi there<|end|><|start|>assistant⟦<|channel|>final<|message|><b>Hello</b>⟧<|end|>"
    "<|start|>user<|message|>2+2?<|end|><|start|>assistant⟦<|channel|>analysis<|message|>an easy sum<|end|>"
    "<|start|>assistant<|channel|>final<|message|>4<|return|>⟧",
    # The generation prompt goes on with <think>, which the conversation lacks.
    "deepseek-r1": _DEEPSEEK,
    "deepseek-v3": _DEEPSEEK,
    "chatml": _CHATML,
}

# From the first user message on; what is before it are the tools.
MARKED_TOOLS = {
    "llama-3.1": "Add.<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    '⟦{"name": "add", "parameters": {"a": "1"}}<|eot_id|>⟧<|start_header_id|>ipython<|end_header_id|>\n\n"2"<|eot_id|>'
    "<|start_header_id|>assistant<|end_header_id|>\n\n⟦It is 2<|eot_id|>⟧<|start_header_id|>user<|end_header_id|>\n\n"
    "Thanks<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n⟦Fine<|eot_id|>⟧",
    "qwen-3": 'Add.<|im_end|>\n<|im_start|>assistant\n⟦<tool_call>\n{"name": "add", "arguments": {"a": "1"}}\n'
    "</tool_call><|im_end|>⟧\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    "⟦It is 2<|im_end|>⟧\n<|im_start|>user\nThanks<|im_end|>\n<|im_start|>assistant\n"
    "⟦<think>\n\n</think>\n\nFine<|im_end|>⟧\n",
    "mistral-v0.3": 'Add.[/INST]⟦[TOOL_CALLS] [{"name": "add", "arguments": {"a": "1"}, "id": "abcdefghi"}]</s>⟧'
    '[TOOL_RESULTS] {"content": 2, "call_id": "abcdefghi"}[/TOOL_RESULTS]⟦ It is 2</s>⟧'
    '[AVAILABLE_TOOLS] [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": '
    '{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}}}][/AVAILABLE_TOOLS]'
    "[INST] Thanks[/INST]⟦ Fine</s>⟧",
    "gpt-oss": 'Add.<|end|><|start|>assistant⟦ to=functions.add<|channel|>commentary json<|message|>{"a": "1"}<|call|>⟧'
    '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"2"<|end|>'
    "<|start|>assistant⟦<|channel|>final<|message|>It is 2⟧<|end|><|start|>user<|message|>Thanks<|end|>"
    "<|start|>assistant⟦<|channel|>final<|message|>Fine<|return|>⟧",
    "deepseek-v3": (
        "Add.<|Assistant|>⟦<|tool▁calls▁begin|><|tool▁call▁begin|>function<|tool▁sep|>add\n```json\n"
        '{"a": "1"}\n```<|tool▁call▁end|><|tool▁calls▁end|><|end▁of▁sentence|>⟧<|tool▁outputs▁begin|>'
        "<|tool▁output▁begin|>2<|tool▁output▁end|><|tool▁outputs▁end|>⟦It is 2<|end▁of▁sentence|>⟧"
        "<|User|>Thanks<|Assistant|>⟦Fine<|end▁of▁sentence|>⟧"
    ).replace("|", BAR),
}
MARKED_TOOLS["qwen-2.5"] = MARKED_TOOLS["qwen-3"].replace("<think>\n\n</think>\n\n", "")
# This template forgets to close a single tool call.
MARKED_TOOLS["deepseek-r1"] = MARKED_TOOLS["deepseek-v3"].replace(
    "<|tool▁calls▁end|><|end▁of▁sentence|>⟧".replace("|", BAR), "⟧", 1
)


def encoded(family, messages, tools=None, **options):
    encoder = Encoder(tokenizer_of(family), EncodeOptions(**options))
    return encoder.encode(Record("chat.jsonl:1", "messages", {"messages": messages, "tools": tools}))


@pytest.mark.parametrize("family", MARKED)
def test_several_turns(family):
    assert marked(tokenizer_of(family), encoded(family, PLAIN).samples[0]) == MARKED[family]


@pytest.mark.parametrize("family", MARKED_TOOLS)
def test_tool_calls(family):
    text = marked(tokenizer_of(family), encoded(family, WITH_TOOLS, TOOLS).samples[0])
    assert text[text.index("Add.") :] == MARKED_TOOLS[family]


def test_reasoning_of_the_last_tool_call_stays():
    text = marked(tokenizer_of("qwen-3"), encoded("qwen-3", WITH_TOOLS[:4], TOOLS).samples[0])
    assert text[text.index("Add.") :] == (
        "Add.<|im_end|>\n<|im_start|>assistant\n⟦<think>\nI need it\n</think>\n\n<tool_call>\n"
        '{"name": "add", "arguments": {"a": "1"}}\n</tool_call><|im_end|>⟧\n<|im_start|>user\n<tool_response>\n2\n'
        "</tool_response><|im_end|>\n<|im_start|>assistant\n⟦<think>\n\n</think>\n\nIt is 2<|im_end|>⟧\n"
    )


def test_reasoning_that_is_switched_off_belongs_to_the_prompt():
    found = encoded("qwen-3", PLAIN[:3], template_kwargs={"enable_thinking": False})
    assert marked(tokenizer_of("qwen-3"), found.samples[0]).endswith(
        "assistant\n<think>\n\n</think>\n\n⟦<b>Hello</b><|im_end|>⟧\n"
    )
    assert not found.notices


@pytest.mark.parametrize(
    ("family", "notices"),
    {
        "llama-3.1": {"reasoning_not_rendered"},
        "qwen-3": set(),
        "mistral-v0.3": {"content_not_rendered", "earlier_text_differs", "reasoning_not_rendered"},
        "gpt-oss": {"end_of_turn_differs"},
        "deepseek-r1": {"generation_prompt_differs", "reasoning_not_rendered"},
    }.items(),
)
def test_what_a_template_does_to_a_conversation_is_noticed(family, notices):
    assert encoded(family, PLAIN).notices == notices


def test_what_a_template_refuses_is_said_in_its_words():
    with pytest.raises(SampleProblem, match=r"chat\.jsonl:1: the chat template refuses it: System role not supported"):
        encoded("gemma-2", PLAIN)
    with pytest.raises(SampleProblem, match="has tool calls, which the chat template does not write"):
        encoded("phi-4", WITH_TOOLS, TOOLS)


# Templates that are simple enough to write the marked text with one line per message.
SIMPLE = {
    "llama-3.1": ("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>", ""),
    "qwen-2.5": ("<|im_start|>{}\n", "<|im_end|>", "\n"),
    "chatml": ("<|im_start|>{}\n", "<|im_end|>", "\n"),
    "phi-4": ("<|im_start|>{}<|im_sep|>", "<|im_end|>", ""),
    "phi-4-first": ("<|im_start|>{}<|im_sep|>", "<|im_end|>", ""),
    "gemma-2": ("<start_of_turn>{}\n", "<end_of_turn>", "\n"),
}


@pytest.mark.parametrize("family", SIMPLE)
def test_random_conversations(family):
    """Contents that repeat, look like headers, are of any script or empty, and have white space at the ends."""
    draw = random.Random(family)
    header, end, after = SIMPLE[family]
    trims = family in ("llama-3.1", "gemma-2")
    pieces = [
        "a",
        " ",
        "\n",
        "\n\n",
        "assistant",
        "user\n",
        "é",
        "日本",
        "🙂",
        "<",
        "|",
        "model",
        "```py\nx = 1\n```",
        "\t",
    ]
    encoder = Encoder(tokenizer_of(family))
    for _ in range(60):
        messages, expected = [], ""
        for number in range(2 * draw.randint(1, 3)):
            role = ("user", "assistant")[number % 2]
            content = "".join(draw.choices(pieces, k=draw.randint(0 if role == "user" else 1, 6)))
            messages.append({"role": role, "content": content})
            shown = content.strip() if trims else content
            name = "model" if family == "gemma-2" and role == "assistant" else role
            answer = f"⟦{shown}{end}⟧" if role == "assistant" else shown + end
            expected += header.format(name) + answer + after
        sample = encoder(Record("x", "messages", {"messages": messages}))[0]
        text = marked(tokenizer_of(family), sample)
        assert text.endswith(expected)


def test_every_family_is_marked():
    assert MARKED.keys() | {"gemma-2"} == FAMILIES.keys()
