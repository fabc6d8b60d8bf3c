"""``ImageEncoder``: records with images to token ids and labels."""

from __future__ import annotations

import bisect
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from ds_trainer.data.collators import TokenPaddingCollator
from ds_trainer.samples.chat.encoder import Encoded, Encoder, Sample
from ds_trainer.samples.chat.messages import Conversation, Message, Untrained
from ds_trainer.samples.chat.options import EncodeOptions
from ds_trainer.samples.chat.problems import RenderError, SampleProblem
from ds_trainer.samples.chat.rendering import SENTINEL, Renderer
from ds_trainer.samples.chat.tokens import IGNORED
from ds_trainer.samples.chat.turns import TextSpan, Turns
from ds_trainer.samples.images.image_tokens import ImageTokens
from ds_trainer.samples.sources.images import PLACEHOLDER, BadImage, data_uri, read_image, shown
from ds_trainer.samples.sources.record import Record
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.units import counted

# Stands for an image in the text of a message, until the template writes its own placeholder.
_MARK = "\u241fimage\u241f"
_LINE_AND_PLACEHOLDER = re.compile(rf"\n?{re.escape(PLACEHOLDER)}\n?")


class ImageRenderer(Renderer):
    """Applies a template to messages whose texts have a mark for each image: it gets a list of parts."""

    def __init__(self, *args: Any) -> None:
        self._always_parts = False
        super().__init__(*args)
        try:  # some templates read parts only
            self._always_parts = SENTINEL not in self.render([{"role": "user", "content": SENTINEL}], None)
        except RenderError:
            self._always_parts = True

    def _as_given(self, message: Message) -> Message:
        turn = super()._as_given(message)
        content = turn.get("content")
        if isinstance(content, str) and (_MARK in content or (self._always_parts and content)):
            parts: list[dict[str, str]] = []
            for index, text in enumerate(content.split(_MARK)):
                parts += [{"type": "image"}] if index else []
                parts += [{"type": "text", "text": text}] if text else []
            turn["content"] = parts
        return turn


class ImageEncoder(Encoder):
    """Encodes records with the processor of a vision-language model; can be pickled.

    A sample also has ``images``, paths and data URIs, in the order of their tokens. All of them are read here, so that
    a damaged one is found before training. An image that a message names with ``<image>`` is put there, without the
    line breaks around it, which are the template's; images that no message names are put before the first user message.

    Args:
        processor: a processor of transformers.
        options: what :class:`~ds_trainer.samples.chat.encoder.Encoder` takes; a sample is truncated in its text only:
            where an image would be cut or left out, it is refused.

    Raises:
        ConfigError: the template or the processor cannot be used with images.
    """

    def __init__(self, processor: Any, options: EncodeOptions = EncodeOptions()) -> None:  # noqa: B008 (frozen)
        self.tokens = ImageTokens(processor)
        tokenizer = processor.tokenizer
        if getattr(processor, "chat_template", None) is not None:  # the one that is used, and saved
            tokenizer.chat_template = processor.chat_template
        super().__init__(tokenizer, options)
        if options.chat_template is not None:
            processor.chat_template = self.options.chat_template
        self._check_template()

    def identity(self) -> dict[str, Any]:
        """The options of the processor, and the versions of what processes images."""
        from importlib.metadata import version

        processor = self.tokens.processor
        return {"processor": [type(processor).__name__, processor.to_json_string()], "pillow": version("pillow")}

    def encode(self, record: Record) -> Encoded:
        """The samples of ``record``, with what was noticed.

        Raises:
            SampleProblem: it cannot be encoded, an image cannot be read, or its labels would be wrong.
        """
        source, fields = record.source, record.fields
        images = fields.get("images") or []
        turns = [turn for key in ("messages", "prompt", "completion") for turn in _turns(fields.get(key))]
        if not images and not any(isinstance(turn.get("content"), list) for turn in turns):
            return super().encode(record)
        if not turns:
            raise SampleProblem(source, "images", "has images, but is no conversation; give messages.")
        listed = iter(images)
        placed = {key: _placed(source, value, listed) for key, value in fields.items() if _turns(value)}
        rest = list(listed)
        if len(rest) == len(images) and rest:  # no message refers to them
            first = next((turn for value in placed.values() for turn in value if turn["role"] == "user"), None)
            if first is None:
                raise SampleProblem(source, "images", "has images, but no message of the user.")
            first["content"] = [*_image_parts(rest), *first["content"]]
        elif rest:
            raise SampleProblem(
                source, "images", f"has {counted(len(images), 'image')}, but its messages refer to fewer."
            )
        kept = {key: value for key, value in fields.items() if key != "images"}
        return super().encode(record._replace(fields={**kept, **placed}))

    def dummy(self) -> Sample:
        """A short sample with a small blank image, on which nothing is trained."""
        import io

        buffer = io.BytesIO()
        self.tokens.smallest().save(buffer, "PNG")
        images = [data_uri(buffer.getvalue())]
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
        messages = _placed("", turns, iter(()))
        messages[0]["content"] = [*_image_parts(images), *messages[0]["content"]]
        unlimited = self.options.max_length
        sample = self._conversation("the blank image", messages, None, 0)[0]
        if unlimited is not None and len(sample["input_ids"]) > unlimited:
            raise ConfigError(
                f"An image takes {len(sample['input_ids'])} tokens or more, but max_length is {unlimited}; raise it."
            )
        return {**sample, "labels": np.full_like(sample["labels"], IGNORED)}

    def _make_renderer(self, template: str) -> Renderer:
        return ImageRenderer(template, self.tokenizer, dict(self.options.template_kwargs), self.options.date)

    def _check_template(self) -> None:
        if self._renderer is None:
            raise ConfigError(
                "The processor has no chat template, which says where images are in a conversation; set chat_template."
            )
        try:
            text = self._renderer.render([{"role": "user", "content": f"{_MARK}{SENTINEL}"}], None)
        except RenderError as error:
            raise ConfigError(f"The chat template refuses a message with an image: {error}") from error
        if self.tokens.placeholder not in text or SENTINEL not in text:
            raise ConfigError(
                f"The chat template writes no {self.tokens.placeholder!r} for an image; use the model's own, or one "
                'that writes it for {"type": "image"}.'
            )

    def _conversation(self, source: str, messages: Any, tools: Any, first: int) -> tuple[Sample, set[str]]:
        images, marked = [], []
        for message in messages:
            content = message.get("content")
            untrained: list[Untrained] = []
            if isinstance(content, list):
                images += [part["image"] for part in content if part.get("type") == "image"]
                texts = [_MARK if part.get("type") == "image" else part["text"] for part in content]
                ends = list(accumulate(map(len, texts)))
                pairs = zip(content, texts, ends, strict=True)
                untrained = [
                    Untrained("content", end - len(t), end) for part, t, end in pairs if part.get("train") is False
                ]
                content = "".join(texts)
            marked.append({**message, "content": content, "untrained": untrained})
        text, spans, notices = self.rendered(source, marked, tools, first)
        marks = text.count(self.tokens.placeholder)
        if marks != len(images):
            raise SampleProblem(
                source,
                "images",
                f"has {counted(len(images), 'image')}, but its text has {self.tokens.placeholder!r} {marks} times.",
            )
        if not images:
            return self.labeled(source, text, spans, notices, self._beginning)
        replaced = self._texts_of(source, images)
        expansion = _Expansion.of(text, self.tokens.placeholder, replaced)
        moved = [TextSpan(expansion.moved(span.start), expansion.moved(span.end)) for span in spans]
        sample, notices = self.labeled(source, expansion.text, moved, notices, self._beginning)
        sample["labels"][np.isin(sample["input_ids"], self.tokens.masked_ids(replaced))] = IGNORED
        if not np.any(sample["labels"][1:] != IGNORED):
            raise SampleProblem(source, "no_trained_token", "only tokens of images would be trained on.")
        return {**sample, "images": images}, notices

    def _texts_of(self, source: str, images: Sequence[str]) -> list[str]:
        try:
            return self.tokens.texts([read_image(image) for image in images])
        except BadImage as error:
            raise SampleProblem(source, "bad_image", f"{error}.") from error
        except ValueError as error:
            raise SampleProblem(source, "bad_image", f"the processor refuses an image: {error}.") from error

    def _limited(self, source: str, sample: Sample, notices: set[str], splits: bool = False) -> Encoded:
        images = sample.get("images")
        arrays = {key: value for key, value in sample.items() if key != "images"}
        encoded = super()._limited(source, arrays, notices, splits)
        if images is None or not encoded.samples:
            return encoded
        kept = encoded.samples[0]
        last = np.flatnonzero(np.isin(arrays["input_ids"], self.tokens.ids))[-1]
        if last >= len(kept["input_ids"]) - 1:
            raise SampleProblem(
                source,
                "image_too_long",
                f"has {len(arrays['input_ids'])} tokens, and the first {len(kept['input_ids'])} (max_length) would cut "
                "or leave out an image. Raise max_length, or set long_samples to drop.",
            )
        return Encoded([{**kept, "images": images}], encoded.notices)

    def _noticed(self, source: str, conversation: Conversation, turns: Turns, spans: Any) -> set[str]:
        messages = [
            {**message, "content": max(message["content"].split(_MARK), key=len)} for message in conversation.messages
        ]
        return super()._noticed(source, conversation._replace(messages=messages), turns, spans)


class _Expansion(NamedTuple):
    """A text whose placeholders are replaced.

    Attributes:
        text: the new text.
        ends: where each placeholder ended in the old text, ascending.
        shifts: by how much the characters behind each of them moved.
    """

    text: str
    ends: list[int]
    shifts: list[int]

    @classmethod
    def of(cls, text: str, placeholder: str, replaced: Sequence[str]) -> _Expansion:
        pieces = text.split(placeholder)
        ends, shifts, position, shift = [], [], 0, 0
        for piece, new in zip(pieces, replaced, strict=False):
            position += len(piece) + len(placeholder)
            shift += len(new) - len(placeholder)
            ends.append(position)
            shifts.append(shift)
        joined = "".join(part for pair in zip(pieces, [*replaced, ""], strict=True) for part in pair)
        return cls(joined, ends, shifts)

    def moved(self, position: int) -> int:
        """The position in the new text of a character of the old one."""
        before = bisect.bisect_right(self.ends, position)
        return position + (self.shifts[before - 1] if before else 0)


def _turns(value: Any) -> list[dict[str, Any]]:
    return value if isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0] else []


def _image_parts(images: Sequence[str]) -> list[dict[str, Any]]:
    return [{"type": "image", "image": image} for image in images]


def _placed(source: str, turns: list[dict[str, Any]], listed: Any) -> list[dict[str, Any]]:
    """Copies of ``turns`` whose contents are lists of parts, each image with its path or content."""
    placed = []
    for turn in turns:
        parts: list[dict[str, Any]] = []
        content = turn.get("content") or ""
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if part["type"] == "image":
                parts.append(part if "image" in part else {**part, "image": _next(source, listed)})
                continue
            if part["type"] != "text":
                raise SampleProblem(source, "bad_part", f"has a part of type {part['type']!r}; only images are read.")
            for index, text in enumerate(_LINE_AND_PLACEHOLDER.split(part["text"])):
                parts += _image_parts([_next(source, listed)]) if index else []
                parts += [{**part, "text": text}] if text else []
        placed.append({**turn, "content": parts})
    return placed


def _next(source: str, listed: Any) -> str:
    image: str | None = next(listed, None)
    if image is None:
        raise SampleProblem(source, "images", "its messages refer to more images than it has.")
    return image


# ``ImageCollator``: batches of samples with and without images, whose pixels are read here.


class ImageCollator:
    """Pads samples to the longest of the batch, and reads and processes their images.

    Runs in the processes of the data loader: only the batches that are on their way are in memory. A batch has the
    keys of :class:`~ds_trainer.data.collators.TokenPaddingCollator`, and whatever the processor makes of the images.

    Args:
        encoder: that made the samples.
        pad_token_id: the token of padding.
        dtype: pixels get this type; None: what the processor makes (float32).
        always: a batch without any image gets one more row, a blank image on which nothing is trained, so that the
            model runs its vision tower in every batch, on every rank. Otherwise the ranks would disagree at ZeRO 3 on
            the parameters that they gather, and wait for each other. The row adds nothing to the loss and to gradients.
    """

    def __init__(
        self, encoder: ImageEncoder, pad_token_id: int = 0, dtype: torch.dtype | None = None, always: bool = True
    ) -> None:
        self._tokens = encoder.tokens
        self._pad = TokenPaddingCollator(pad_token_id)
        self._dtype = dtype
        self._dummy = encoder.dummy() if always else None

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """The batch of ``features``: samples with ``input_ids``, ``labels`` and perhaps ``images``.

        Raises:
            ConfigError: an image cannot be read any more, or is not the one that was prepared.
        """
        rows = list(features)
        if self._dummy is not None and not any(row.get("images") for row in rows):
            rows.append(_like(rows[0], self._dummy))
        batch = self._pad(rows)
        batch |= self._tokens.token_types(batch["input_ids"])
        with_images = [index for index, row in enumerate(rows) if row.get("images")]
        if not with_images:
            return batch
        images = [[self._read(image) for image in rows[index]["images"]] for index in with_images]
        pixels, counts = self._tokens.inputs(images)
        expected = self._tokens.are_images(batch["input_ids"][with_images]).sum(-1).tolist()
        for index, count, wanted in zip(with_images, counts, expected, strict=True):
            if count != wanted:
                listed = ", ".join(map(shown, rows[index]["images"]))
                raise ConfigError(
                    f"The images of a sample ({listed}) take {count} tokens, but took {wanted} when it was prepared: a "
                    "file has changed. Delete the prepared samples (data.prepared_dir), or restore the file."
                )
        return batch | {key: self._cast(value) for key, value in pixels.items()}

    def _read(self, image: str) -> Any:
        try:
            return read_image(image)
        except BadImage as error:
            raise ConfigError(
                f"An image that could be read when it was prepared cannot be read now: {error}"
            ) from error

    def _cast(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self._dtype) if self._dtype is not None and value.is_floating_point() else value


def _like(row: Mapping[str, Any], dummy: Mapping[str, Any]) -> Mapping[str, Any]:
    """``dummy`` with zeros for the other values per token that ``row`` has."""
    size = len(dummy["input_ids"])
    others = {key: value for key, value in row.items() if isinstance(value, torch.Tensor) and key not in dummy}
    return {**{key: value.new_zeros(size) for key, value in others.items()}, **dummy}
