"""A conversation with a model: its chat template, or plain continuation for a model without one."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds_trainer.recipes.saved_model import SavedModel
from ds_trainer.recipes.tokenizers import ByteTokenizer, load_processor
from ds_trainer.samples.chat.problems import RenderError
from ds_trainer.samples.chat.rendering import Renderer
from ds_trainer.samples.chat.templates import load_template
from ds_trainer.samples.images.image_tokens import ImageTokens
from ds_trainer.samples.sources.images import BadImage, read_image
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.units import counted

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image


_DEFAULT_TEMPERATURE = 0.7
_MARK = "answer-ends-here"


@dataclass(frozen=True)
class GenerationOptions:
    """How answers are drawn.

    Attributes:
        max_new_tokens: most tokens of an answer.
        temperature: 0: the most likely token. None: that of the model's generation settings, else 0.7.
        seed: seeds the random numbers of each answer; None: another one each time.
    """

    max_new_tokens: int = 512
    temperature: float | None = None
    seed: int | None = None


@dataclass(frozen=True)
class Answer:
    """What the model said.

    Attributes:
        text: the answer.
        tokens: number of its tokens.
        end: ``stop`` if the model ended it, ``length`` at max_new_tokens or the model's positions, ``interrupted``.
    """

    text: str
    tokens: int
    end: str


class ChatSession:
    """Turns of a conversation.

    Args:
        model: a model of transformers or PEFT, in evaluation mode.
        tokenizer: one of transformers, or :class:`ByteTokenizer`.
        options: how answers are drawn.
        load_images: called for the first image; None: the model takes none.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        options: GenerationOptions,
        load_images: Callable[[], ChatImages] | None = None,
    ) -> None:
        self._model, self._tokenizer, self._options = model, tokenizer, options
        self._load_images = load_images
        self._reader: ChatImages | None = None
        self._attached: list[Any] = []
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        if self.has_template:
            today = datetime.date.today().isoformat()
            self._renderer = Renderer(load_template(None, tokenizer), tokenizer, {}, today)
        self._system: str | None = None
        self._turns: list[dict[str, Any]] = []
        self._as_parts = self.has_template and self._reads_parts()
        self._stop = self._stop_tokens()
        text_config = model.config.get_text_config()
        self._positions: int = getattr(text_config, "max_position_embeddings", None) or sys.maxsize

    def reset(self) -> None:
        """Forget all turns and images; the system message stays."""
        self._turns, self._attached = [], []

    def attach(self, path: str) -> None:
        """Put the image in the file ``path`` before the next question.

        Raises:
            ConfigError: the model takes no images, or it cannot be read.
        """
        if self._load_images is None or not self.has_template:
            raise ConfigError("The model takes no images: it has no processor for them, or no chat template.")
        self._reader = self._reader or self._load_images()
        self._attached.append(self._reader.read(path))

    def set_system(self, text: str) -> None:
        """Begin a new conversation with the system message ``text``; empty: without one.

        Raises:
            ConfigError: the model has no chat template.
        """
        if not self.has_template:
            raise ConfigError("The model has no chat template, so there is no system message; it continues your text.")
        self._system = text or None
        self.reset()

    def ask(self, text: str, write: Callable[[str], None]) -> Answer:
        """The answer to ``text``, or its continuation, handed to ``write`` in pieces while it is generated.

        Raises:
            ConfigError: the conversation is too long for the model, or its template refuses it.
        """
        import torch

        question: dict[str, Any] = {"role": "user", "content": text}
        turns = [*self._turns, question | ({"images": self._attached} if self._attached else {})]
        images = [image for turn in turns for image in turn.get("images", ())]
        ids = self._prompt(turns, text, images)
        room = min(self._options.max_new_tokens, self._positions - len(ids))
        if room < 1:
            raise ConfigError(
                f"The conversation has {len(ids):,} tokens, but the model has {self._positions:,} positions. Shorten "
                "it, or begin a new one with /reset."
            )
        pieces: list[str] = []

        def record(piece: str) -> None:
            pieces.append(piece)
            write(piece)

        stream = TextStream(self._decode, record)
        input_ids = torch.tensor([ids], device=self._model.device)
        pixels = self._reader.inputs(input_ids, images, self._model.dtype) if images and self._reader else {}
        if self._options.seed is not None:
            torch.manual_seed(self._options.seed)
        end = "length"
        try:
            with torch.inference_mode():
                self._model.generate(
                    input_ids=input_ids,
                    attention_mask=torch.ones_like(input_ids),
                    streamer=stream,
                    max_new_tokens=room,
                    eos_token_id=self._stop or None,
                    pad_token_id=self._stop[0] if self._stop else 0,
                    **pixels,
                    **self._sampling(),
                )
        except KeyboardInterrupt:
            stream.end()
            end = "interrupted"
        if stream.tokens and stream.tokens[-1] in self._stop:
            end = "stop"
        answer = Answer("".join(pieces), len(stream.tokens), end)
        if self.has_template:
            self._turns = [*turns, {"role": "assistant", "content": answer.text.strip()}]
            self._attached = []
        return answer

    def _prompt(self, turns: Sequence[dict[str, Any]], text: str, images: Sequence[Any]) -> list[int]:
        if self.has_template:
            system = [] if self._system is None else [{"role": "system", "content": self._system}]
            rendered = self._render([*system, *turns], add_generation_prompt=True)
            if images and self._reader is not None:
                rendered = self._reader.expand(rendered, images)
            return list(self._tokenizer(rendered, add_special_tokens=False)["input_ids"])
        if isinstance(self._tokenizer, ByteTokenizer):  # documents begin like this in training
            return [self._tokenizer.separator_id, *text.encode("utf-8")]
        ids = list(self._tokenizer(text)["input_ids"])
        if not ids:
            raise ConfigError("The text has no tokens; type some.")
        return ids

    def _reads_parts(self) -> bool:
        """Whether the template reads lists of parts only, as those of vision-language models; found by trying."""
        probe = [{"role": "user", "content": _MARK}]
        for self._as_parts in (False, True):
            try:
                if _MARK in self._render(probe, add_generation_prompt=False):
                    return self._as_parts
            except ConfigError:
                continue
        return False

    def _render(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool) -> str:
        turns = [{"role": message["role"], "content": self._content(message)} for message in messages]
        try:
            return self._renderer.render(turns, None, add_generation_prompt)
        except RenderError as error:
            raise ConfigError(f"The model's chat template refuses the conversation: {error}") from error

    def _content(self, message: dict[str, Any]) -> str | list[dict[str, str]]:
        """The text of a message, or its images and its text as parts."""
        images, text = message.get("images", ()), message["content"]
        if not images and not self._as_parts:
            return str(text)
        return [*({"type": "image"} for _ in images), {"type": "text", "text": text}]

    def _decode(self, tokens: Sequence[int]) -> str:
        if isinstance(self._tokenizer, ByteTokenizer):
            return self._tokenizer.decode(token for token in tokens if token != self._tokenizer.separator_id)
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _stop_tokens(self) -> list[int]:
        """Tokens that end an answer: those of the generation settings, of the tokenizer, and of the template.

        A base model's settings name the end of a document; the end of a turn is another token in many templates.
        """
        settings = getattr(self._model.generation_config, "eos_token_id", None)
        stop = [settings] if isinstance(settings, int) else list(settings or ())
        if isinstance(self._tokenizer, ByteTokenizer):
            return list(dict.fromkeys([*stop, self._tokenizer.separator_id]))
        stop += [token for token in [self._tokenizer.eos_token_id] if token is not None]
        if self.has_template:
            messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}]
            tail = self._render(messages, add_generation_prompt=False).rpartition(_MARK)[2]
            tokens = self._tokenizer(tail, add_special_tokens=False)["input_ids"]
            stop += [token for token in tokens[:1] if token in self._tokenizer.all_special_ids]
        return list(dict.fromkeys(stop))

    def _sampling(self) -> dict[str, Any]:
        settings, temperature = self._model.generation_config, self._options.temperature
        if temperature is None:
            if getattr(settings, "do_sample", False):
                return {}
            temperature = _DEFAULT_TEMPERATURE
        if temperature == 0:
            return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        return {"do_sample": True, "temperature": temperature}


def load_session(saved: SavedModel, options: GenerationOptions, device: str, dtype: str | None = None) -> ChatSession:
    """Load the model and its tokenizer.

    Args:
        saved: where the model is.
        options: how answers are drawn.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: weights get this type; default: what the files have.

    Raises:
        ConfigError: the device, the model or its tokenizer cannot be used.
    """
    import torch
    from transformers import AutoTokenizer
    from transformers.utils import logging as transformers_logging

    from ds_trainer.recipes.saved_model import load_for_generation

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"--device {device}: write auto, cpu, cuda or cuda:N.") from None
    if place.type == "cuda" and not (place.index or 0) < torch.cuda.device_count():
        raise ConfigError(f"--device {device}: torch can use {counted(torch.cuda.device_count(), 'GPU')} here.")
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    tokenizer: Any = ByteTokenizer()
    if not saved.is_bytes:
        try:
            tokenizer = AutoTokenizer.from_pretrained(saved.tokenizer_directory, local_files_only=True)
        except Exception as error:  # code of any tokenizer, which reads the model's config.json, too
            raise ConfigError(
                f"{saved.tokenizer_directory} has no tokenizer that can be loaded "
                f"({' '.join(str(error).split())[:200]}). Copy the tokenizer's files of the base model into it."
            ) from error

    def load_images() -> ChatImages:
        return ChatImages(load_processor(str(saved.tokenizer_directory), "/image"))

    model = load_for_generation(saved, place, dtype)
    return ChatSession(model, tokenizer, options, load_images if saved.has_processor else None)


class ChatImages:
    """Makes inputs of images with a processor, as training does.

    Args:
        processor: a processor of transformers.

    Raises:
        ConfigError: it does not say which text an image becomes.
    """

    def __init__(self, processor: Any) -> None:
        self._tokens = ImageTokens(processor)

    def read(self, path: str) -> Image:
        """The image in a file.

        Raises:
            ConfigError: it cannot be read.
        """
        try:
            return read_image(path)
        except BadImage as error:
            raise ConfigError(f"The image {error}.") from error

    def expand(self, rendered: str, images: Sequence[Image]) -> str:
        """The text of a conversation with the text of each image in its place.

        Raises:
            ConfigError: the template has no place for an image, or the processor refuses one.
        """
        pieces = rendered.split(self._tokens.placeholder)
        if len(pieces) != len(images) + 1:
            raise ConfigError(
                f"The conversation has {counted(len(images), 'image')}, but the template wrote "
                f"{self._tokens.placeholder!r} {len(pieces) - 1} times."
            )
        try:
            texts = self._tokens.texts(images)
        except ValueError as error:
            raise ConfigError(f"The model's processor refuses an image: {error}.") from error
        return "".join(part for pair in zip(pieces, [*texts, ""], strict=True) for part in pair)

    def inputs(self, input_ids: torch.Tensor, images: Sequence[Image], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The inputs of the model besides tokens ``input_ids`` of shape [1, tokens], pixels in ``dtype``."""
        inputs, _ = self._tokens.inputs([images])
        inputs |= self._tokens.token_types(input_ids)
        device = input_ids.device
        return {
            key: value.to(device, dtype if value.is_floating_point() else value.dtype) for key, value in inputs.items()
        }


_INCOMPLETE = "\ufffd"  # what decoders give for a part of a character


class TextStream:
    """Hands the text of tokens to ``write`` as soon as it cannot change any more; a ``streamer`` of transformers.

    A token may be a part of a character, and the text of a token may depend on the one before it. So the last tokens
    are decoded together with the new one, and only what is new is written. The work per token does not grow.

    Args:
        decode: token ids to text.
        write: receives pieces of text; together they are the text of all tokens.
        prompt: whether the first tokens are the prompt, which is not written.

    Attributes:
        tokens: the generated tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], write: Callable[[str], None], prompt: bool = True):
        self.tokens: list[int] = []
        self._decode, self._write = decode, write
        self._skip = prompt
        self._start = self._done = 0  # tokens[start:done] are written, and decoded again with the next ones

    def put(self, value: Any) -> None:
        """Take a tensor of token ids of one sequence."""
        if self._skip:
            self._skip = False
            return
        self.tokens += value.reshape(-1).tolist()
        self._emit(final=False)

    def end(self) -> None:
        """Write what was held back."""
        self._emit(final=True)

    def _emit(self, final: bool) -> None:
        before = self._decode(self.tokens[self._start : self._done])
        text = self._decode(self.tokens[self._start :])
        if len(text) <= len(before) or (text.endswith(_INCOMPLETE) and not final):
            return
        self._write(text[len(before) :])
        self._start, self._done = self._done, len(self.tokens)
