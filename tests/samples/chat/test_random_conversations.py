"""Random conversations with reasoning and tools: the labels against a regular expression for each family.

Contents have no control tokens here, so the control tokens in the text that a template makes say which parts are the
assistant's. That shares nothing with the search for turns, which knows no family.
"""

import random
import re

import pytest

from ds_trainer.samples.chat.encoder import Encoder
from ds_trainer.samples.chat.options import EncodeOptions
from ds_trainer.samples.chat.problems import SampleProblem
from ds_trainer.samples.sources.record import Record
from tests.samples.chat.families import BAR, FAMILIES, make_tokenizer, marked, sentence_piece_tokenizer, tokenizer_of
from tests.samples.chat.test_families import TOOLS

IM = r"(<\|im_start\|>assistant\n)(.*?<\|im_end\|>)"
PHI = r"(<\|im_start\|>assistant<\|im_sep\|>)(.*?<\|im_end\|>)"
EOS = f"<{BAR}end▁of▁sentence{BAR}>"
DEEPSEEK = f"(<{BAR}Assistant{BAR}>|<{BAR}tool▁outputs▁end{BAR}>)(.*?{EOS})"
GEMMA = r"(<start_of_turn>model\n)(.*?<end_of_turn>)"
# An analysis goes on with the next message of the assistant; <|end|> after an answer is not what the model writes.
GPT_OSS = (
    r"(<\|start\|>assistant)((?:<\|channel\|>analysis<\|message\|>.*?<\|end\|><\|start\|>assistant)?"
    r"(?: to=.*?<\|call\|>|<\|channel\|>final<\|message\|>.*?(?:<\|return\|>|(?=<\|end\|>))))"
)
ORACLES = {
    "llama-3.1": r"(<\|start_header_id\|>assistant<\|end_header_id\|>\n\n)(.*?<\|eot_id\|>)",
    "qwen-2.5": IM,
    "qwen-3": IM,
    "gemma-2": GEMMA,
    "gemma-3": GEMMA,
    "mistral-v0.3": r"(\[/INST\]|\[/TOOL_RESULTS\])(.*?</s>)",
    "phi-4": PHI,
    "phi-4-first": PHI,
    "gpt-oss": GPT_OSS,
    "deepseek-r1": DEEPSEEK,
    "deepseek-v3": DEEPSEEK,
    "chatml": IM,
}
WITHOUT_TOOLS = ("gemma-2", "gemma-3", "phi-4", "phi-4-first", "chatml", "deepseek-r1")
PIECES = [
    "a",
    "no",
    " ",
    "\n",
    "\n\n",
    "assistant",
    "user\n",
    "é",
    "日本",
    "🙂",
    "<",
    "<thi",
    "model",
    "```py\nx = 1\n```",
    "\t",
]


def text(draw):
    found = "".join(draw.choices(PIECES, k=draw.randint(1, 5)))
    return found if found.strip() else f"{found}x{found}"


def conversation(draw, family):
    """Messages of one to four questions; some answers have reasoning, and some use tools before."""
    messages = []
    if draw.random() < 0.5 and family != "gemma-2":
        messages.append({"role": "system", "content": text(draw)})
    for question in range(draw.randint(1, 4)):
        # Mistral's template compares messages: two equal questions would both get the tools.
        messages.append({"role": "user", "content": f"Q{question}{text(draw)}"})
        steps = 0 if family in WITHOUT_TOOLS else draw.choice([0, 0, 1, 2])
        if family == "deepseek-v3":  # its template writes no second call: see test_a_broken_template
            steps = min(steps, int(question == 0))
        for step in range(steps):
            call = {"id": f"call{step:05}", "function": {"name": "add", "arguments": {"a": text(draw)}}}
            answer = {"role": "assistant", "content": None, "tool_calls": [call]}
            if draw.random() < 0.4:
                answer["reasoning_content"] = "R" + text(draw)
            result = {"role": "tool", "name": "add", "tool_call_id": call["id"], "content": text(draw)}
            messages += [answer, result]
        answer = {"role": "assistant", "content": text(draw)}
        if draw.random() < 0.4:
            answer["thinking"] = "R" + text(draw)
        messages.append(answer)
    return messages


@pytest.mark.cases(6)
@pytest.mark.parametrize("family", ORACLES)
def test_labels(family):
    draw = random.Random(f"labels of {family}")
    tokenizer = tokenizer_of(family)
    encoder = Encoder(tokenizer)
    for number in range(40):
        messages = conversation(draw, family)
        tools = TOOLS if any("tool_calls" in message for message in messages) else None
        sample = encoder(Record(str(number), "messages", {"messages": messages, "tools": tools}))[0]
        whole = tokenizer.decode(sample["input_ids"])
        expected = re.sub(ORACLES[family], r"\1⟦\2⟧", whole, flags=re.DOTALL)
        assert marked(tokenizer, sample) == expected
        assert expected.count("⟦") == sum(message["role"] == "assistant" for message in messages)


@pytest.mark.parametrize("family", ["qwen-3", "llama-3.1", "mistral-v0.3", "gpt-oss", "gemma-3"])
def test_the_text_is_that_of_the_template(family):
    """The tokens are those of apply_chat_template, unless a token would lie across a border."""
    draw = random.Random(f"text of {family}")
    tokenizer = make_tokenizer(FAMILIES[family])
    tokenizer.chat_template = tokenizer.chat_template.replace('strftime_now("%Y-%m-%d")', '"2025-01-01"')
    encoder = Encoder(tokenizer, EncodeOptions(train_on="last_turn"))
    for number in range(20):
        messages = [message for message in conversation(draw, family) if message["role"] != "tool"]
        messages = [
            {**message, "content": message["content"] or ""} for message in messages if "tool_calls" not in message
        ]
        found = encoder.encode(Record(str(number), "messages", {"messages": messages}))
        # transformers 5.20 leaves `thinking` to the template; newer ones, as the encoder, name it reasoning_content.
        named = [{**one, "reasoning_content": one["thinking"]} if "thinking" in one else one for one in messages]
        same = tokenizer.apply_chat_template(named, return_dict=False)
        if "split_token" not in found.notices:
            assert found.samples[0]["input_ids"].tolist() == same
        assert tokenizer.decode(found.samples[0]["input_ids"]) == tokenizer.decode(same)


def test_a_broken_template():
    """After one tool call, DeepSeek's template writes the next without the end of the results before it."""
    call = {"function": {"name": "add", "arguments": {"a": "1"}}}
    step = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "2"}]
    messages = [{"role": "user", "content": "Add."}, *step, *step, {"role": "assistant", "content": "4"}]
    record = Record("a:1", "messages", {"messages": messages, "tools": TOOLS})
    with pytest.raises(SampleProblem, match=r"message 4 of 6 \(assistant\) cannot be found with certainty"):
        Encoder(tokenizer_of("deepseek-v3"))(record)


@pytest.mark.parametrize("spaces", ["none", "first", "each"])
@pytest.mark.parametrize("family", ["chatml", "mistral-v0.3", "gemma-3"])
def test_tokenizers_that_add_spaces(family, spaces):
    """Trained parts are those of a byte-level tokenizer, whose decoded text is exact."""
    draw = random.Random(f"spaces of {family}")
    exact = Encoder(tokenizer_of(family))
    tokenizer = sentence_piece_tokenizer(FAMILIES[family], spaces)
    encoder = Encoder(tokenizer)
    for number in range(8):
        messages = [message for message in conversation(draw, "gemma-2") if message["role"] != "system"]
        messages[-1]["content"] = draw.choice(["  two spaces", "\n\nlines", "\ttab", "日本 "])
        record = Record(str(number), "messages", {"messages": messages})
        ids, labels = encoder(record)[0].values()
        _, expected = exact(record)[0].values()
        found = "".join(tokenizer.decode(labels[labels != -100]).split())
        assert found == "".join(exact.tokenizer.decode(expected[expected != -100]).split())
        assert len(ids) > (labels != -100).sum() > 1
