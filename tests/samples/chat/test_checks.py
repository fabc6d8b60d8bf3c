"""Each mistake in labels must be noticed by the check that every sample passes."""

from types import SimpleNamespace

import numpy as np
import pytest

from ds_trainer.samples.chat import encoder as encoder_module
from ds_trainer.samples.chat.encoder import Encoder, mask_problem
from ds_trainer.samples.chat.problems import RenderError, SampleProblem
from ds_trainer.samples.chat.rendering import Renderer
from ds_trainer.samples.chat.tokens import IGNORED
from ds_trainer.samples.chat.turns import Span
from ds_trainer.samples.sources.record import Record
from ds_trainer.utils.errors import ConfigError
from tests.samples.chat.families import tokenizer_of

TEXT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello you<|im_end|>\n"
SPAN = Span(TEXT.index("Hello"), TEXT.rindex("\n"))


def sample():
    tokenizer = tokenizer_of("chatml")
    ids = np.asarray(tokenizer.encode(TEXT, add_special_tokens=False), dtype=np.int32)
    first = len(tokenizer.encode(TEXT[: SPAN.start], add_special_tokens=False))
    labels = np.full_like(ids, IGNORED)
    labels[first:-1] = ids[first:-1]
    return tokenizer, ids, labels, first


def test_right_labels_pass():
    tokenizer, ids, labels, _ = sample()
    assert mask_problem(tokenizer, ids, labels, TEXT, [SPAN]) is None


@pytest.mark.parametrize(
    "wrong",
    [
        "one token early",
        "one token late",
        "without the end",
        "with what follows",
        "the prompt",
        "shifted",
        "a hole",
        "no",
    ],
)
def test_wrong_labels_are_noticed(wrong):
    tokenizer, ids, labels, first = sample()
    if wrong == "one token early":
        labels[first - 1] = ids[first - 1]
    elif wrong == "one token late":
        labels[first] = IGNORED
    elif wrong == "without the end":
        labels[-2] = IGNORED
    elif wrong == "what follows":
        labels[-1] = ids[-1]
    elif wrong == "the prompt":
        labels = ids.copy()
    elif wrong == "shifted":
        labels[first - 1 : -1] = labels[first:].copy()
    elif wrong == "a hole":
        labels[first + 1] = IGNORED
    else:
        labels[:] = IGNORED
    assert mask_problem(tokenizer, ids, labels, TEXT, [SPAN]) is not None


@pytest.mark.parametrize("shift", [-1, 1])
def test_an_encoder_with_a_border_one_token_off_refuses_every_sample(monkeypatch, shift):
    right = encoder_module.tokenize

    def off_by_one(*args):
        found = right(*args)
        return found._replace(borders=[found.borders[0] + shift, *found.borders[1:]])

    monkeypatch.setattr(encoder_module, "tokenize", off_by_one)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello you"}]
    with pytest.raises(SampleProblem, match=r"the labels are wrong: .* is trained on, not 'Hello you<\|im_end\|>'"):
        Encoder(tokenizer_of("chatml"))(Record("a:1", "messages", {"messages": messages}))


@pytest.mark.parametrize(
    "template",
    [
        *("{{ 'a' * 10**10 }}", "{{ 9**9**9 }}", "{{ [1] * 10**9 }}", "{{ x * 99999999999 }}", "{{ 2**x }}"),
        *("{{ 'a' * 1000 * 10000 }}", "{{ 'a'|center(10**9) }}", "{{ '%1000000000d' % 1 }}", "{{ 'a'.ljust(10**9) }}"),
        *("{{ '{:>1000000000}'.format(1) }}", "{{ (10*-10**6) * 'a' }}", "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}"),
        "{% generation %}{% for i in range(10**10) %}{% endfor %}{% endgeneration %}",
    ],
)
def test_a_template_that_grows_without_end_is_refused_unrun(template: str) -> None:
    with pytest.raises(ConfigError, match=r"The chat template is nested|of the chat template makes a value"):
        Renderer(template, SimpleNamespace(special_tokens_map={}), {}, "2026-01-01")


@pytest.mark.parametrize(
    "template", ["{{ 1 / 0 }}", "{% for i in range(200000) %}{% endfor %}", "{{ 'a' * messages|length * 10 }}"]
)
def test_an_error_of_arithmetic_is_that_of_the_template(template: str) -> None:
    renderer = Renderer(template, SimpleNamespace(special_tokens_map={}), {}, "2026-01-01")
    if "messages" in template:
        assert renderer.render([{"role": "user", "content": "a"}], None) == "a" * 10
    else:
        with pytest.raises(RenderError):
            renderer.render([{"role": "user", "content": "a"}], None)
