"""From the records of a recipe to tokens: the encoder of conversations and texts, and what else decides its samples."""

from __future__ import annotations

from typing import Any

from ds_trainer.recipes.recipe import Recipe
from ds_trainer.recipes.tokenizers import processor_of
from ds_trainer.samples.chat.encoder import Encoded, Encoder
from ds_trainer.samples.chat.options import EncodeOptions
from ds_trainer.samples.chat.problems import SampleProblem
from ds_trainer.samples.chat.templates import load_template
from ds_trainer.samples.images.image_encoder import ImageEncoder
from ds_trainer.samples.prepared.key import digest_of_code, digest_of_tokenizer
from ds_trainer.samples.sources.record import Record

BAD_LINE = "bad_line"
"""Kind of the record that stands for a bad line: its field ``reason`` says what is wrong."""

_CODE = (
    "ds_trainer.samples.chat",
    "ds_trainer.samples.sources",
    "ds_trainer.samples.images",
    "ds_trainer.recipes.encoding",
)
_LIBRARIES = ("transformers", "tokenizers", "jinja2")


class RecordEncoder:
    """Encodes records, and counts those that cannot be used, or refuses them.

    Args:
        encoder: encodes valid records.
        skips: bad lines, and records that cannot be encoded, give no sample and are counted.
    """

    def __init__(self, encoder: Encoder, skips: bool) -> None:
        self.encoder, self.skips = encoder, skips

    def __call__(self, record: Record) -> Encoded:
        """The samples of ``record``, and what was noticed.

        Raises:
            SampleProblem: it cannot be used, and such records are not skipped.
        """
        try:
            if record.kind == BAD_LINE:
                raise SampleProblem(record.source, BAD_LINE, record.fields["reason"])
            return self.encoder.encode(record)
        except SampleProblem as problem:
            if not self.skips:
                raise
            return Encoded([], {BAD_LINE if problem.reason == BAD_LINE else f"skipped_{problem.reason}"})


def encoder_of(recipe: Recipe, tokenizer: Any) -> RecordEncoder:
    """The encoder with the options of ``recipe``.

    Args:
        recipe: its section ``data`` has the options.
        tokenizer: one of transformers; it gets the recipe's chat template, so that it is saved with it. For task
            ``vision_language`` the model's processor has its own, which is used in its place.

    Raises:
        ConfigError: an option, the chat template or the processor cannot work.
    """
    processor = processor_of(recipe) if recipe.task.name == "vision_language" else None
    data = recipe.data
    named = data.chat_template
    template = None if named is None else load_template(named, tokenizer if processor is None else processor.tokenizer)
    options = EncodeOptions(
        chat_template=template,
        train_on=data.train_on,
        max_length=recipe.tokens_per_sample,
        long_samples=data.long_samples,
    )
    encoder = Encoder(tokenizer, options) if processor is None else ImageEncoder(processor, options)
    return RecordEncoder(encoder, data.bad_lines == "skip")


def identity_of(encoder: RecordEncoder) -> dict[str, Any]:
    """What decides the samples of a record besides the record: a part of the key of prepared samples."""
    return {
        "tokenizer": digest_of_tokenizer(encoder.encoder.tokenizer),
        "options": encoder.encoder.options,
        "skips": encoder.skips,
        "code": digest_of_code(*_CODE, packages=_LIBRARIES),
        **encoder.encoder.identity(),
    }
