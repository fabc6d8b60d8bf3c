"""The task ``vision_language``: fine-tunes a vision-language model on conversations with images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ds_trainer.recipes.fine_tuning_job import FineTuningJob
from ds_trainer.samples.images.image_collator import ImageCollator
from ds_trainer.samples.images.image_encoder import ImageEncoder
from ds_trainer.utils.errors import ConfigError

if TYPE_CHECKING:
    from ds_trainer.arguments.training_arguments import TrainingArguments


class VisionLanguageJob(FineTuningJob):
    """Fine-tunes the model of a recipe on conversations with images."""

    auto_class = "AutoModelForImageTextToText"

    def check_recipe(self) -> None:
        """Refuse a sample of text in the report."""
        if self.recipe.report.sample_prompt:
            where = self.recipe.where("report.sample_prompt")
            raise ConfigError(f"{where}: report.sample_prompt: not with task vision_language.")

    def check_model(self) -> None:
        """Refuse a model that takes no images."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

        kind = self.model_config.model_type
        if self.recipe.model.auto_class is None and kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
            raise ConfigError(
                f"{self.recipe.where('model.path')}: model.path: a model of type {kind!r} takes no images "
                f"({self.auto_class} does not know it). For text alone use task sft."
            )

    def collator(self, args: TrainingArguments) -> Any:
        """Makes batches with the images of the samples, in the precision of the model."""
        args.remove_unused_columns = False  # the collator reads the images of samples
        dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        return ImageCollator(self._image_encoder(), self.padding_token(), dtype)

    def processing_class(self) -> Any:
        """The processor, which has the tokenizer."""
        return self._image_encoder().tokens.processor

    def _image_encoder(self) -> ImageEncoder:
        assert isinstance(self.encoder.encoder, ImageEncoder)
        return self.encoder.encoder
