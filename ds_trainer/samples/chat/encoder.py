"""Records to token ids and labels."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ds_trainer.samples.chat.messages import Conversation, read_conversation
from ds_trainer.samples.chat.options import EncodeOptions
from ds_trainer.samples.chat.problems import RenderError, SampleProblem, unread_key
from ds_trainer.samples.chat.rendering import Renderer
from ds_trainer.samples.chat.selection import selected_messages, trained_spans, without_parts
from ds_trainer.samples.chat.templates import load_template
from ds_trainer.samples.chat.tokens import IGNORED, CutToken, beginning_tokens, special_tokens, tokenize
from ds_trainer.samples.chat.turns import TextSpan, Turns
from ds_trainer.samples.sources.record import Record
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.host_memory import free_host_memory
from ds_trainer.utils.units import human_bytes

Sample = dict[str, Any]
_LONG, _BYTES_OF_A_CHARACTER = 1_000_000, 130  # measured; a tokenizer without memory ends the process
_EMPTY_REASONING = re.compile(r"<think>\s*</think>")


class Encoded(NamedTuple):
    """What a record became: its samples (none if it was dropped) and what was noticed (keys of NOTICES)."""

    samples: list[Sample]
    notices: set[str]


class Encoder:
    """Encodes records with one tokenizer; can be pickled.

    Calling it with a record gives its samples: mostly one; none if it is longer than ``max_length`` and such records
    are dropped; several if long texts are split. A sample has ``input_ids`` and ``labels``, int32 of shape [tokens];
    labels are not shifted, and -100 where nothing is trained on. The sample of a preference has both keys twice,
    with the prefixes ``chosen_`` and ``rejected_``.

    Args:
        tokenizer: a Hugging Face tokenizer.
        options: ``chat_template`` may be a name or a file; :attr:`options` has its text.

    Attributes:
        options: the options, with the text of the template (None if no conversation can be encoded).
        tokenizer: the tokenizer, which got the given template as its own, so that a saved model has it.

    Raises:
        ConfigError: the template does not exist.
    """

    def __init__(self, tokenizer: Any, options: EncodeOptions = EncodeOptions()) -> None:  # noqa: B008 (frozen)
        self.tokenizer = tokenizer
        own = getattr(tokenizer, "chat_template", None)
        template = load_template(options.chat_template, tokenizer) if options.chat_template or own else None
        if options.chat_template is not None:
            tokenizer.chat_template = template
        self.options = dataclasses.replace(options, chat_template=template)
        self._special = special_tokens(tokenizer)
        self._beginning = beginning_tokens(tokenizer)
        self._renderer = None if template is None else self._make_renderer(template)

    def _make_renderer(self, template: str) -> Renderer:  # images have another
        return Renderer(template, self.tokenizer, dict(self.options.template_kwargs), self.options.date)

    def identity(self) -> dict[str, Any]:
        """What decides the samples besides tokenizer, options and code; a part of the key of prepared samples."""
        return {}

    def __call__(self, record: Record) -> list[Sample]:
        """The samples of ``record``.

        Raises:
            SampleProblem: it cannot be encoded, or its labels would be wrong.
        """
        return self.encode(record).samples

    def encode(self, record: Record) -> Encoded:
        """The samples of ``record``, with what was noticed.

        Raises:
            SampleProblem: it cannot be encoded, or its labels would be wrong.
        """
        encoded = self._encode(record.source, record.kind, record.fields)
        encoded.notices.update(unread_key(name) for name in record.unread)
        return encoded

    def _encode(self, source: str, kind: str, fields: dict[str, Any]) -> Encoded:
        if fields.get("images"):
            raise SampleProblem(source, "images", "has images; they need a processor (task: vision_language).")
        if kind == "text":
            return self._text(source, fields["text"], fields.get("spans"))
        if kind == "messages":
            return self._limited(source, *self._conversation(source, fields["messages"], fields.get("tools"), 0))
        if kind == "prompt_completion":
            return self._limited(source, *self._answer(source, fields["prompt"], fields["completion"], fields))
        if kind == "preference":
            return self._preference(source, fields)
        raise SampleProblem(source, "bad_kind", f"has the unknown kind {kind!r}.")

    # --- kinds ---

    def _text(self, source: str, text: str, spans: list[list[int]] | None) -> Encoded:
        if not text:
            raise SampleProblem(source, "no_trained_token", "the text is empty.")
        if spans is not None:  # its author has written all tokens, those of the beginning and the end too
            return self._limited(source, *self.labeled(source, text, [TextSpan(*span) for span in spans], set()))
        text = self._ended(text)
        sample, notices = self.labeled(source, text, [TextSpan(0, len(text))], set(), self._beginning)
        return self._limited(source, sample, notices, splits=True)

    def _preference(self, source: str, fields: dict[str, Any]) -> Encoded:
        prompt = fields.get("prompt")
        if prompt is None and isinstance(fields["chosen"], list) and isinstance(fields["rejected"], list):
            pairs = zip(fields["chosen"], fields["rejected"], strict=False)
            shared = next((index for index, (one, other) in enumerate(pairs) if one != other), 0)
            prompt = fields["chosen"][:shared]
            fields = {**fields, "chosen": fields["chosen"][shared:], "rejected": fields["rejected"][shared:]}
        joined: Sample = {}
        notices: set[str] = set()
        for side in ("chosen", "rejected"):
            sample, noticed = self._answer(source, prompt or "", fields[side], fields)
            encoded = self._limited(source, sample, noticed)
            if not encoded.samples:
                return encoded
            joined |= {f"{side}_{key}": value for key, value in encoded.samples[0].items()}
            notices |= encoded.notices
        return Encoded([joined], notices)

    def _answer(self, source: str, prompt: Any, answer: Any, fields: dict[str, Any]) -> tuple[Sample, set[str]]:
        """A prompt that is not trained on, and what follows it; both text or both messages."""
        if isinstance(answer, list):
            before = prompt or []
            if isinstance(before, str):
                before = [{"role": "user", "content": before}]
            first = 0 if self.options.train_on == "all" else len(before)
            return self._conversation(source, [*before, *answer], fields.get("tools"), first)
        if not isinstance(prompt, str) or not isinstance(answer, str):
            raise SampleProblem(source, "bad_messages", "prompt and completion must both be text, or both be messages.")
        text = self._ended(prompt + answer)
        start = 0 if self.options.train_on == "all" else len(prompt)
        spans = [TextSpan(start, len(text))] if answer else []
        return self.labeled(source, text, spans, set(), self._beginning)

    def _ended(self, text: str) -> str:
        """``text`` with the end-of-text token, once."""
        eos = self.tokenizer.eos_token or ""
        return text if text.endswith(eos) else text + eos

    def _conversation(self, source: str, messages: Any, tools: Any, first: int) -> tuple[Sample, set[str]]:
        """A conversation, of whose messages those from ``first`` on may be trained on."""
        text, spans, notices = self.rendered(source, messages, tools, first)
        return self.labeled(source, text, spans, notices)

    def rendered(self, source: str, messages: Any, tools: Any, first: int) -> tuple[str, list[TextSpan], set[str]]:
        """The text of a conversation, the characters that are trained on, and what was noticed.

        Args:
            source: file and line, for messages.
            messages, tools: the conversation.
            first: messages before it are not trained on.

        Raises:
            ConfigError: there is no chat template.
            SampleProblem: the template refuses the conversation, or its turns are not found in the text.
        """
        if self._renderer is None:
            raise ConfigError(
                f"{source} is a conversation, but the tokenizer has no chat template; set chat_template to a name "
                "(chatml, plain), a file, or the text of a template."
            )
        conversation = read_conversation(source, messages, tools)
        selected = selected_messages(conversation, self.options.train_on, first)
        try:
            turns = Turns(self._renderer, conversation, self._special)
            everything = self.options.train_on == "all"
            spans, notices = trained_spans(self._renderer, turns, conversation, selected, everything)
            kept = spans if isinstance(spans, str) else without_parts(turns, conversation, selected, spans)
        except RenderError as error:
            raise SampleProblem(source, "template_error", f"the chat template refuses it: {error}") from error
        if isinstance(spans, str) or isinstance(kept, str):
            raise SampleProblem(source, "turn_not_found", str(kept))
        notices |= self._noticed(source, conversation, turns, spans)
        return turns.text, kept, notices | turns.notices

    # --- labels ---

    def labeled(
        self, source: str, text: str, spans: Sequence[TextSpan], notices: set[str], beginning: Sequence[int] = ()
    ) -> tuple[Sample, set[str]]:
        """Tokens with labels for ``spans`` of ``text``, checked; before them the tokens ``beginning``.

        Raises:
            SampleProblem: no token would be trained on, or the labels would be wrong.
        """
        if not any(span.end > span.start for span in spans):
            chosen = self.options.train_on
            chosen = chosen if isinstance(chosen, str) else f"[{', '.join(chosen)}]"
            raise SampleProblem(source, "no_trained_token", f"no token is trained on (train_on: {chosen}).")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise SampleProblem(source, "bad_unicode", f"has a lone surrogate, {text[error.start]!r}.") from error
        edges = sorted({edge for span in spans for edge in span})
        if len(text) > _LONG and (needed := len(text) * _BYTES_OF_A_CHARACTER) > (free := free_host_memory()):
            memory = f"about {human_bytes(needed)} of memory, and {human_bytes(free)} are free"
            raise SampleProblem(source, "no_memory", f"finding the tokens of {len(text):,} characters takes {memory}.")
        try:
            ids, borders, in_parts = tokenize(self.tokenizer, text, edges)
        except CutToken as error:
            raise SampleProblem(source, "cut_token", f"{error}, between what is trained on and what is not.") from error
        if list(beginning) == ids[: len(beginning)]:
            beginning = ()  # the text has them itself
        input_ids = np.asarray([*beginning, *ids], dtype=np.int32)
        labels = np.full_like(input_ids, IGNORED)
        at = {edge: border + len(beginning) for edge, border in zip(edges, borders, strict=True)}
        for span in spans:
            labels[at[span.start] : at[span.end]] = input_ids[at[span.start] : at[span.end]]
        if doubled_beginning(input_ids, self.tokenizer.bos_token_id):
            raise SampleProblem(
                source,
                "doubled_bos",
                f"begins with two {self.tokenizer.bos_token!r}: the template or the first message adds another one.",
            )
        if problem := mask_problem(self.tokenizer, input_ids, labels, text, spans):
            raise SampleProblem(source, "wrong_mask", f"the labels are wrong: {problem}.")
        if in_parts:
            notices.add("split_token")
        return {"input_ids": input_ids, "labels": labels}, notices

    def _limited(self, source: str, sample: Sample, notices: set[str], splits: bool = False) -> Encoded:
        """The sample under the policy for long ones."""
        limit, length = self.options.max_length, len(sample["input_ids"])
        if limit is None or length <= limit:
            return Encoded([sample], notices)
        policy = self.options.long_samples
        if policy == "drop":
            return Encoded([], {"dropped"})
        if policy == "error" or (policy == "split" and not splits):
            hint = " Only texts can be split; choose truncate or drop for conversations." if policy == "split" else ""
            raise SampleProblem(source, "too_long", f"has {length} tokens; max_length is {limit}.{hint}")
        if policy == "split":
            starts = range(0, length, limit)
            parts = [{key: value[start : start + limit] for key, value in sample.items()} for start in starts]
            return Encoded([part for part in parts if len(part["input_ids"]) > 1], notices | {"split"})
        cut = {key: value[:limit] for key, value in sample.items()}
        if not np.any(cut["labels"][1:] != IGNORED):
            raise SampleProblem(
                source, "no_trained_token", f"none of the first {limit} of {length} tokens is trained on (max_length)."
            )
        return Encoded([cut], notices | {"truncated"})

    def _noticed(self, source: str, conversation: Conversation, turns: Turns, spans: Iterable[TextSpan]) -> set[str]:
        """What in a conversation deserves to be counted."""
        assert self._renderer is not None
        text = turns.text
        notices = set()
        trained = [text[span.start : span.end] for span in spans]
        for message in conversation.messages:
            for call in message.get("tool_calls", ()):
                if not self._renderer.renders_tool_calls or call["function"]["name"] not in text:
                    raise SampleProblem(
                        source, "tool_call_not_rendered", "has tool calls, which the chat template does not write."
                    )
            reasoning = message.get("reasoning_content") or message["content"].rpartition("</think>")[0]
            if reasoning and reasoning.rpartition("<think>")[2].strip() not in text:
                notices.add("reasoning_not_rendered")
            if message["role"] in ("system", "user") and message["content"].strip() not in text:
                notices.add("content_not_rendered")
            if message["role"] != "assistant" and self._special.search(message["content"]):
                notices.add("special_token_in_text")
        for tool in conversation.tools or ():
            if str(tool["function"].get("name")) not in text:
                notices.add("tools_not_rendered")
        if any(_EMPTY_REASONING.search(part) for part in trained):
            notices.add("empty_reasoning")
        if "end_of_turn_differs" in turns.notices:  # known, and the last turn has its token
            trained = trained[-1:]
        if isinstance(self.options.train_on, str) and not all(
            any(match.end() == len(part) for match in self._special.finditer(part)) for part in trained
        ):
            notices.add("no_end_of_turn")
        return notices


# -- checks of a finished sample, by decoding it: independent of how its labels were made ------------------------------


def trained_runs(labels: np.ndarray) -> list[tuple[int, int]]:
    """(first, last + 1) of each run of trained tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], (labels != IGNORED).astype(np.int8), [0]))))
    return [(int(first), int(last)) for first, last in zip(edges[::2], edges[1::2], strict=True)]


def doubled_beginning(ids: Sequence[int] | np.ndarray, bos: int | None) -> bool:
    """Whether the sample begins with two beginning-of-text tokens."""
    return bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos


def mask_problem(
    tokenizer: Any, ids: np.ndarray, labels: np.ndarray, text: str, spans: Sequence[TextSpan]
) -> str | None:
    """What is wrong with the labels of a sample, or None.

    Args:
        tokenizer: decodes.
        ids: token ids, shape [tokens].
        labels: a number for each of them, -100 where nothing is trained on.
        text: the rendered text.
        spans: the characters of ``text`` that are to be trained on, ascending.
    """
    trained = labels != IGNORED
    if not np.array_equal(ids[trained], labels[trained]):
        return "a label differs from its token"
    joined = _joined(spans)
    runs = trained_runs(labels)
    if len(runs) != len(joined):
        return f"{len(runs)} parts are trained on, not {len(joined)}"
    for (first, last), span in zip(runs, joined, strict=True):
        expected = text[span.start : span.end]
        decoded = tokenizer.decode(ids[first:last].tolist())
        if decoded != expected and not _same_in_context(tokenizer, ids, first, last, expected):
            return f"{_ends(decoded)} is trained on, not {_ends(expected)}"
    return None


def _same_in_context(tokenizer: Any, ids: np.ndarray, first: int, last: int, expected: str) -> bool:
    """Whether tokens ``first`` to ``last`` mean ``expected``, for tokenizers that change a text or treat its beginning
    differently (SentencePiece adds a space, and drops it when it decodes).
    """
    before, whole = tokenizer.decode(ids[:first].tolist()), tokenizer.decode(ids[:last].tolist())
    normalized = tokenizer.decode(tokenizer.encode(expected, add_special_tokens=False))
    within = whole[len(before) :] if whole.startswith(before) else None
    return within in (expected, normalized) or tokenizer.decode(ids[first:last].tolist()) == normalized


def _joined(spans: Sequence[TextSpan]) -> list[TextSpan]:
    """Spans without gaps between them as one."""
    joined: list[TextSpan] = []
    for span in spans:
        if joined and span.start <= joined[-1].end:
            joined[-1] = TextSpan(joined[-1].start, max(span.end, joined[-1].end))
        else:
            joined.append(span)
    return joined


def _ends(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:28]} ... {text[-28:]}")
