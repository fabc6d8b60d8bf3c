"""Each mistake in labels must be noticed by the check that every sample passes."""

import resource
import time
from types import SimpleNamespace

import numpy as np
import pytest

from ds_trainer.samples.chat import encoder as encoder_module
from ds_trainer.samples.chat.encoder import Encoder, mask_problem
from ds_trainer.samples.chat.problems import RenderError, SampleProblem
from ds_trainer.samples.chat.rendering import Renderer
from ds_trainer.samples.chat.templates import load_template
from ds_trainer.samples.chat.tokens import IGNORED
from ds_trainer.samples.chat.turns import TextSpan
from ds_trainer.samples.sources.record import Record
from ds_trainer.utils.errors import ConfigError
from tests.samples.chat.families import tokenizer_of

TEXT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello you<|im_end|>\n"
SPAN = TextSpan(TEXT.index("Hello"), TEXT.rindex("\n"))


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


_DOUBLED = (
    "{% set ns = namespace(x=START) %}{% for i in range(100) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x|tojson }}"
)
_LONG = "{% set x = 'a' * 1000000 %}"
_MANY = "{% for i in range(100000) %}"
GROWING = [
    *(
        "{{ 'a' * 10**10 }}",
        "{{ 9**(9**9) }}",
        "{{ [1] * 10**9 }}",
        "{{ (10 * -10**8) * 'a' }}",
        "{{ 'a'|center(1000000000) }}",
    ),
    *(
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 10**9) }}",
    ),
    *(
        "{{ 'a'.ljust(10**9) }}",
        "{{ '\t'.expandtabs(10**9) }}",
        "{{ 'a'|indent(10**9, true) }}",
        "{{ [1]|tojson(indent=10**9) }}",
    ),
    *(
        _DOUBLED.replace("START", start).replace("STEP", step)
        for start, step in (
            ("'a'", "ns.x + ns.x"),
            ("'a'", "ns.x ~ ns.x"),
            ("'a'", "ns.x * 3"),
            ("'a'", "ns.x.replace('a', 'aaaa')"),
            ("'a'", "[ns.x, ns.x]"),
            ("'a'", "ns.x|replace('a', 'aaaa')"),
            ("'a'", "[ns.x, ns.x]|join"),
            ("[1]", "ns.x + ns.x"),
            ("9", "ns.x * ns.x"),
            ("'a'", "'%s%s' % (ns.x, ns.x)"),
        )
    ),
    *(
        f"{_MANY}{_MANY}{body}{{% endfor %}}{{% endfor %}}"
        for body in ("", "{{ i }}", "some text", "{% set x = 1 %}" * 50)
    ),
    *(
        f"{_MANY}{_MANY.replace(' %', ' if false %')}{{% endfor %}}{{% endfor %}}",
        f"{_MANY}{{{{ range(100000)|sum }}}}{{% endfor %}}",
    ),
    *(
        f"{_MANY}{{{{ range(100000)|map('string')|list|length }}}}{{% endfor %}}",
        f"{_LONG}{_MANY}{{{{ x }}}}{{% endfor %}}",
    ),
    *(
        f"{_LONG}{_MANY}{_MANY}{{% if x[1:] == x %}}{{% endif %}}{{% endfor %}}{{% endfor %}}",
        _LONG + "{{ ([x] * 9999)|join }}",
    ),
    _LONG + "{{ [[x] * 9999] }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "{% generation %}" + _MANY + "{{ 'a' * 10000 }}{% endfor %}{% endgeneration %}",
]


@pytest.mark.parametrize("template", GROWING)
def test_a_template_that_grows_without_end_is_refused(template: str) -> None:
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        ConfigError, match=r"The chat template (makes or reads|takes) more than [\d,]+ (characters|steps)"
    ):
        Renderer(template, SimpleNamespace(special_tokens_map={}), {}, "2026-01-01")
    assert time.process_time() - began < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 << 10


def test_a_template_that_grows_with_the_data_refuses_the_sample_that_makes_it_grow() -> None:
    nested = "".join(f"{{% for x{level} in messages[0].content %}}" for level in range(5))
    renderer = Renderer(nested + "{% endfor %}" * 5, SimpleNamespace(special_tokens_map={}), {}, "2026-01-01")
    assert renderer.render([{"role": "user", "content": "abc"}], None) == ""
    with pytest.raises(RenderError, match="takes more than 1,000,000 steps"):
        renderer.render([{"role": "user", "content": "abc" * 1000}], None)


def test_long_conversations_and_long_texts_are_no_excess() -> None:
    """4,000 turns, and a message of 60 million characters, with a template that copies what it has so far."""
    renderer = Renderer(
        load_template("chatml", SimpleNamespace()), SimpleNamespace(special_tokens_map={}), {}, "2026-01-01"
    )
    turns = [{"role": role, "content": "word " * 100} for _ in range(2000) for role in ("user", "assistant")]
    assert renderer.render(turns, None).count("<|im_start|>") == 4000
    assert len(renderer.render([{"role": "user", "content": "word " * 12_000_000}], None)) > 60_000_000


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
