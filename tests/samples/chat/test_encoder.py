import pickle

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ds_trainer.samples.chat.encoder import Encoder
from ds_trainer.samples.chat.options import EncodeOptions
from ds_trainer.samples.chat.problems import SampleProblem
from ds_trainer.samples.chat.templates import NAMED_TEMPLATES
from ds_trainer.samples.chat.tokens import CutToken, tokenize
from ds_trainer.samples.sources.record import Record
from ds_trainer.utils.errors import ConfigError
from tests.samples.chat.families import FAMILIES, make_tokenizer, marked, tokenizer_of

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "2"},
]


def shown(messages, family="chatml", tools=None, kind="messages", **options):
    encoder = Encoder(make_tokenizer(FAMILIES[family]), EncodeOptions(**options))
    fields = {"messages": messages, "tools": tools} if kind == "messages" else messages
    return marked(encoder.tokenizer, encoder(Record("chat.jsonl:7", kind, fields))[0])


def refused(messages, **options):
    with pytest.raises(SampleProblem) as caught:
        shown(messages, **options)
    assert caught.value.source == "chat.jsonl:7"
    return caught.value


def trained(text):
    return [part.split("⟧")[0] for part in text.split("⟦")[1:]]


def test_equal_contents_are_told_apart():
    messages = [{"role": role, "content": "Yes"} for role in ("user", "assistant", "user", "assistant")]
    text = "<|im_start|>user\nYes<|im_end|>\n<|im_start|>assistant\n⟦Yes<|im_end|>⟧\n"
    assert shown(messages) == 2 * text


@pytest.mark.parametrize("name", NAMED_TEMPLATES)
def test_named_templates(name):
    messages = [*CHAT[:4], {"role": "assistant", "content": "2", "thinking": "1 + 1"}]
    family = {"chatml": "qwen-3", "plain": "mistral-v0.3"}[name]
    parts = trained(shown(messages, family, chat_template=name))
    expected = {"chatml": ["1<|im_end|>", "<think>\n1 + 1\n</think>\n\n2<|im_end|>"]}
    expected["plain"] = [" 1</s>", " <think>\n1 + 1\n</think>\n\n2</s>"]
    assert parts == expected[name]
    tools = [{"name": "f", "description": "d", "parameters": {}}]
    assert '"name": "f"' in shown(messages, family, tools=tools, chat_template=name)


def test_the_given_template_becomes_the_tokenizers(tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text(NAMED_TEMPLATES["plain"])
    encoder = Encoder(make_tokenizer(FAMILIES["qwen-3"]), EncodeOptions(chat_template=str(path)))
    assert encoder.tokenizer.chat_template == encoder.options.chat_template == NAMED_TEMPLATES["plain"]


def test_template_that_does_not_exist():
    with pytest.raises(ConfigError, match=r"chat_template='chatm' is neither .* Did you mean 'chatml'\?"):
        Encoder(tokenizer_of("chatml"), EncodeOptions(chat_template="chatm"))
    tokenizer = make_tokenizer(FAMILIES["chatml"])
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="the tokenizer has no chat template; set chat_template to a name"):
        Encoder(tokenizer)(Record("a:1", "messages", {"messages": CHAT}))


def test_templates_that_write_no_generation_prompt():
    """The header of the assistant is not trained on, though the template does not say that it is a prompt."""
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    assert trained(shown(CHAT, chat_template=template)) == ["1<|im_end|>", "2<|im_end|>"]


MARKERS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("old", "new", "notice"),
    [
        ("", "", None),
        ("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>", "end_of_turn_not_in_markers"),
        (
            "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}",
            "{% if m.role == 'assistant' %}{% generation %}<|im_start|>assistant\n",
            "prompt_in_markers",
        ),
    ],
)
def test_generation_markers(old, new, notice):
    template = MARKERS.replace(old, new) if old else MARKERS
    if notice == "prompt_in_markers":
        template = template.replace("{% else %}", "{% else %}<|im_start|>{{ m.role }}\n")
    encoder = Encoder(make_tokenizer(FAMILIES["chatml"]), EncodeOptions(chat_template=template))
    found = encoder.encode(Record("a:1", "messages", {"messages": CHAT}))
    assert trained(marked(encoder.tokenizer, found.samples[0])) == ["1<|im_end|>", "2<|im_end|>"]
    assert found.notices == ({notice} if notice else set())
    assert trained(shown(CHAT, chat_template=template, train_on="last_turn")) == ["2<|im_end|>"]


def test_what_markers_leave_out_is_not_trained_on():
    template = MARKERS.replace("{% generation %}{{ m.content }}", "Well: {% generation %}{{ m.content }}")
    assert trained(shown(CHAT, chat_template=template)) == ["1<|im_end|>", "2<|im_end|>"]


def test_a_token_across_the_border_is_tokenized_in_parts():
    """The prompt ends with a new line, and the answer begins with one: two new lines are one token."""
    tokenizer = tokenizer_of("chatml")
    assert len(tokenizer.encode("\n\n", add_special_tokens=False)) == 1
    encoder = Encoder(tokenizer)
    answer = "\n  return 1"
    messages = [CHAT[1], {"role": "assistant", "content": answer}]
    found = encoder.encode(Record("a:1", "messages", {"messages": messages}))
    assert found.notices == {"split_token"}
    ids, labels = found.samples[0].values()
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    assert ids[: len(prompt)].tolist() == prompt
    assert tokenizer.decode(labels[len(prompt) : -1]) == answer + "<|im_end|>"


@pytest.mark.parametrize("tools", [["f"], [{"function": "f"}], [{"function": None}], {"name": "f"}])
def test_a_tool_that_is_no_function_is_refused(tools):
    with pytest.raises(SampleProblem, match="'tools' is not a list of functions"):
        shown([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], tools=tools)


def test_parts_that_give_another_text_are_refused():
    """A tokenizer that begins every text with a space cannot tokenize in parts."""
    vocabulary = {token: index for index, token in enumerate(["<unk>", "▁a", "a", "▁b", "b", "ab", "▁ab"])}
    merges = [("▁", "a"), ("▁", "b"), ("a", "b")]
    vocabulary |= {"▁": len(vocabulary)}
    inner = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    assert tokenize(tokenizer, "b ab", [1]).borders == [1]
    with pytest.raises(CutToken, match="lies across the border at character 3"):
        tokenize(tokenizer, "abab", [3])


def test_tokenizers_without_offsets():
    class Slow:
        """The same tokens, without the positions that fast tokenizers know."""

        is_fast = False

        def __init__(self, inner):
            self._inner = inner

        def encode(self, text, add_special_tokens=True):
            return self._inner.encode(text, add_special_tokens=add_special_tokens)

        def decode(self, ids):
            return self._inner.decode(ids)

    fast = tokenizer_of("chatml")
    text = "<|im_start|>user\nWie geht's? 日本<|im_end|>\n<|im_start|>assistant\nGut 🙂!<|im_end|>\n"
    borders = [text.index("Gut"), text.rindex("\n")]
    assert tokenize(Slow(fast), text, borders) == tokenize(fast, text, borders)


@pytest.mark.parametrize(
    ("messages", "reason", "text"),
    [
        ([], "bad_messages", "the conversation has no messages"),
        ([{"role": "bot", "content": "a"}], "bad_messages", "message 1 of 1 has the role 'bot'; the roles are system"),
        (["a"], "bad_messages", "message 1 of 1 is not a mapping"),
        ([{"role": "user", "content": 3}], "bad_messages", r"neither text nor a list of parts \(int\)"),
        ([{"role": "user", "content": [{"type": "image"}]}], "bad_messages", "a part of type 'image'"),
        ([{"role": "user", "content": "a", "train": "no"}], "bad_messages", "neither true nor false"),
        ([{"role": "assistant", "tool_calls": [{}]}], "bad_messages", "a tool call without the name"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "bad_messages",
            "arguments are not JSON",
        ),
        ([CHAT[1], {"role": "assistant", "content": "\ud800"}], "bad_unicode", "has a lone surrogate"),
        ([{"role": "user", "content": "a"}], "no_trained_token", r"no token is trained on \(train_on: assistant\)"),
    ],
)
def test_refused_messages(messages, reason, text):
    problem = refused(messages)
    assert problem.reason == reason
    with pytest.raises(SampleProblem, match=text):
        raise pickle.loads(pickle.dumps(problem))


def test_doubled_beginning():
    template = "{{ bos_token }}{{ bos_token }}" + MARKERS
    assert refused(CHAT, family="llama-3.1", chat_template=template).reason == "doubled_bos"


def test_parts_of_text_and_of_reasoning():
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    text = shown([CHAT[1], {"role": "assistant", "content": parts}], "qwen-3")
    assert trained(text) == ["<think>\nhm\n</think>\n\nab<|im_end|>"]


@pytest.mark.parametrize("policy", ["truncate", "drop", "error", "split"])
def test_long_samples(policy):
    tokenizer = tokenizer_of("chatml")
    record = Record("chat.jsonl:7", "messages", {"messages": CHAT})
    whole = Encoder(tokenizer)(record)[0]
    limit = len(whole["input_ids"]) - 3
    encoder = Encoder(tokenizer, EncodeOptions(max_length=limit, long_samples=policy))
    if policy in ("error", "split"):
        with pytest.raises(SampleProblem, match=rf"has {limit + 3} tokens; max_length is {limit}"):
            encoder(record)
        return
    found = encoder.encode(record)
    assert found.notices == {"truncated" if policy == "truncate" else "dropped"}
    assert len(found.samples) == (policy == "truncate")
    for sample in found.samples:
        for key, values in sample.items():
            assert values.tolist() == whole[key][:limit].tolist()


def test_truncation_leaves_something_to_train_on():
    assert refused(CHAT, max_length=10).message.startswith("none of the first 10 of ")


def test_split_texts_have_every_token_once():
    tokenizer = tokenizer_of("llama-3.1")
    record = Record("a.txt", "text", {"text": "def f(x):\n    return x\n" * 20})
    whole = Encoder(tokenizer)(record)[0]["input_ids"]
    parts = Encoder(tokenizer, EncodeOptions(max_length=32, long_samples="split"))(record)
    assert np.concatenate([part["input_ids"] for part in parts]).tolist() == whole.tolist()
    assert max(len(part["labels"]) for part in parts) == 32


def with_beginning(family):
    """A tokenizer that puts its beginning-of-text token before what it encodes, as Llama's does."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer(FAMILIES[family])
    bos = (tokenizer.bos_token, tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    return tokenizer


@pytest.mark.parametrize("text", ["some text", "<s>some text", "some text</s>"])
def test_texts_begin_and_end_once(text):
    tokenizer = with_beginning("mistral-v0.3")
    sample = Encoder(tokenizer)(Record("a", "text", {"text": text}))[0]
    assert tokenizer.decode(sample["input_ids"]) == "<s>some text</s>"
    assert sample["labels"][1:].tolist() == sample["input_ids"][1:].tolist()


def test_conversations_begin_once():
    """The template writes the token that the tokenizer would add too."""
    sample = Encoder(with_beginning("llama-3.1"))(Record("a", "messages", {"messages": CHAT}))[0]
    assert (sample["input_ids"] == tokenizer_of("llama-3.1").bos_token_id).sum() == 1


def test_prompt_and_completion():
    fields = {"prompt": "Two and two", "completion": " is four"}
    assert shown(fields, "mistral-v0.3", kind="prompt_completion") == "Two and two⟦ is four</s>⟧"
    fields = {"prompt": CHAT[:3], "completion": CHAT[3:]}
    assert trained(shown(fields, kind="prompt_completion")) == ["2<|im_end|>"]
    assert trained(shown({"prompt": "", "completion": "all"}, "mistral-v0.3", kind="prompt_completion")) == ["all</s>"]


def test_preferences():
    encoder = Encoder(tokenizer_of("chatml"))
    answers = [[{"role": "assistant", "content": text}] for text in ("good", "bad")]
    with_prompt = {"prompt": CHAT[:2], "chosen": answers[0], "rejected": answers[1]}
    whole = {"chosen": CHAT[:2] + answers[0], "rejected": CHAT[:2] + answers[1]}
    (sample,) = encoder(Record("a", "preference", with_prompt))
    assert sample.keys() == {"chosen_input_ids", "chosen_labels", "rejected_input_ids", "rejected_labels"}
    for side, text in (("chosen", "good"), ("rejected", "bad")):
        one = {key: sample[f"{side}_{key}"] for key in ("input_ids", "labels")}
        assert trained(marked(encoder.tokenizer, one)) == [f"{text}<|im_end|>"]
    (other,) = encoder(Record("a", "preference", whole))
    assert all(np.array_equal(sample[key], other[key]) for key in sample)


def test_samples_do_not_depend_on_the_day():
    encoder = Encoder(tokenizer_of("gpt-oss"), EncodeOptions(date="2031-02-03"))
    sample = encoder(Record("a", "messages", {"messages": CHAT}))[0]
    assert "Current date: 2031-02-03\n" in encoder.tokenizer.decode(sample["input_ids"])


def test_encoders_can_be_pickled_and_options_hashed():
    encoder = Encoder(tokenizer_of("qwen-3"), EncodeOptions(template_kwargs={"enable_thinking": False}))
    record = Record("a", "messages", {"messages": CHAT})
    copied = pickle.loads(pickle.dumps(encoder))
    assert hash(copied.options) == hash(encoder.options)
    assert copied(record)[0]["labels"].tolist() == encoder(record)[0]["labels"].tolist()
    assert "enable_thinking" in (encoder.options.chat_template or "")


def test_options_that_cannot_work():
    with pytest.raises(ConfigError) as caught:
        EncodeOptions(train_on="user", max_length=1, long_samples="cut", date="today")
    assert len(caught.value.problems) == 4
    assert EncodeOptions(train_on=("assistant",)) == EncodeOptions()
    with pytest.raises(ConfigError, match="'bot' is no role"):
        EncodeOptions(train_on=("assistant", "bot"))
