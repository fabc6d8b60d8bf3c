"""Fine-tuning: trains the model of a recipe on conversations, prompts or texts, saves it, and writes a report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ds_trainer.data.collators import TokenPaddingCollator
from ds_trainer.monitor.report.run_files import DATA_CARD_NAME
from ds_trainer.recipes.distillation import trainer_class_of
from ds_trainer.recipes.encoding import RecordEncoder, encoder_of
from ds_trainer.recipes.fine_tuning_data import FineTuningData, SourceFigures, open_text_sources, read_fine_tuning_data
from ds_trainer.recipes.job import Job, final_evaluation, finished_in
from ds_trainer.recipes.language_model import build_language_model, language_model_config, tokenizer_of
from ds_trainer.recipes.report import last_lines, sample_of
from ds_trainer.recipes.tokenizers import PretrainedTokenizer
from ds_trainer.samples.chat.page import parts
from ds_trainer.samples.images.image_encoder import ImageCollator, ImageEncoder
from ds_trainer.samples.prepared.dataset import PreparedDataset
from ds_trainer.samples.sources.mixture_stream import MixtureStream
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.output_files import write_output_json
from ds_trainer.utils.secrets import without_secrets
from ds_trainer.utils.units import counted

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from ds_trainer.arguments.training_arguments import TrainingArguments
    from ds_trainer.training.trainer import Trainer


class FineTuningJob(Job):
    """Fine-tunes the model of a recipe on conversations, prompts or texts.

    Attributes:
        tokenizer, model_config, encoder, data: what :meth:`prepare` has read.
    """

    auto_class = "AutoModelForCausalLM"
    tokenizer: PretrainedTokenizer
    model_config: PretrainedConfig
    encoder: RecordEncoder
    data: FineTuningData

    def prepare(self, args: TrainingArguments) -> Sequence[str]:
        """Read and check the model's configuration, its tokenizer, and the data."""
        recipe, problems = self.recipe, self.problems
        with problems.collecting():
            open_text_sources(recipe.data)
        with problems.collecting():
            self.check_recipe()
        with problems.collecting():
            tokenizer = tokenizer_of(recipe)
            self.model_config = language_model_config(recipe, tokenizer)
            if not isinstance(tokenizer, PretrainedTokenizer):
                raise ConfigError(
                    "data.tokenizer: samples of up to max_length tokens need a tokenizer of transformers, not bytes. "
                    "Set data.tokenizer to a directory or a name on the Hub, or data.sequence_length in place of "
                    "max_length."
                )
            self.tokenizer, self.encoder = tokenizer, encoder_of(recipe, tokenizer.pretrained)
            self.check_model()
        problems.raise_if_any()
        self.data = read_fine_tuning_data(recipe.data, args, self.encoder)
        return self.data.lines

    def check_recipe(self) -> None:
        """Raise ConfigError if a section of the recipe cannot work with this job."""

    def check_model(self) -> None:
        """Raise ConfigError if the model cannot be trained on such samples."""

    def make_trainer(self, args: TrainingArguments) -> Trainer:
        """The Trainer, perhaps with a teacher."""
        model = build_language_model(self.recipe, self.model_config, args.seed, args.allow_new_weights, self.auto_class)
        return trainer_class_of(self.recipe, self.tokenizer, args)(
            model,
            args,
            data_collator=self.collator(args),
            train_dataset=self.data.train,
            eval_dataset=self.data.eval,
            processing_class=self.processing_class(),  # saved in every checkpoint, and with the final weights
        )

    def collator(self, args: TrainingArguments) -> Any:
        """Makes batches of samples."""
        return TokenPaddingCollator(self.padding_token())

    def padding_token(self) -> int:
        """The token that fills shorter samples of a batch."""
        token: int | None = self.encoder.encoder.tokenizer.pad_token_id
        return self.tokenizer.separator_id if token is None else token

    def processing_class(self) -> Any:
        """What makes inputs of texts for the model."""
        return self.tokenizer.pretrained

    def begin(self, trainer: Trainer) -> None:
        """Write the data card, so that a run that dies has it."""
        if trainer.is_world_process_zero():
            output_dir = Path(str(trainer.args.output_dir))
            card = data_card(self.data, self.tokenizer.pretrained)
            write_output_json(output_dir / DATA_CARD_NAME, without_secrets(card))

    def evaluate(self, trainer: Trainer) -> float | None:
        """The loss on the held-out samples."""
        return None if self.data.eval is None else final_evaluation(trainer)["eval_loss"]

    def figures(self, trainer: Trainer, evaluation: float | None) -> Mapping[str, Any]:
        """Figures of the data, the loss, and a sample."""
        recipe, data, epochs = self.recipe, self.data.to_dict(), float(trainer.state.epoch or 0.0)
        return {
            "data": data,
            "tokens_trained": tokens_trained(self.data, epochs),
            "evaluation": None if evaluation is None else _evaluation(evaluation, data),
            "sample": sample_of(recipe, self.tokenizer, trainer.args) if recipe.report.sample_prompt else None,
        }

    def report(self, results: Mapping[str, Any], evaluation: Any) -> str:
        """What was trained on, the loss, and the sample."""
        data, measured, trained = results["data"], results["evaluation"], results["tokens_trained"]
        lines = ["", finished_in(results)]
        if trained:
            lines.append(
                f"Trained on {counted(sum(trained.values()), 'token')}; {data['trained_share']:.1%} of the tokens of a "
                "sample are trained on."
            )
        else:
            lines += [f"  {row['name']}: {row['share']:.1%} of the samples, streamed" for row in data["sources"]]
        for row in data["sources"] if trained else ():
            tokens = trained[row["name"]]
            samples = counted(row["samples"], "sample")
            lines.append(f"  {row['name']}: {samples} of {row['format']}, {tokens:,} tokens trained on")
        if measured is None:
            lines.append("No evaluation: set data.eval or data.held_out for one.")
        else:
            lines.append(
                f"Held-out loss {measured['eval_loss']:.4f} nats per token (perplexity "
                f"{measured['eval_perplexity_per_token']:.2f}), {counted(measured['eval_samples'], 'sample')}."
            )
        return "\n".join([*lines, *last_lines(results)])


def tokens_trained(data: FineTuningData, epochs: float) -> dict[str, int]:
    """Targets that were trained on, by source: their mean number per sample times the samples that were seen.

    Empty for a stream, of which that is not known.
    """
    if isinstance(data.train, MixtureStream):
        return {}
    return {
        row.name: round(epochs * samples * row.trained_tokens / row.samples)
        for row, samples in zip(data.sources, data.train.samples, strict=True)
    }


def _evaluation(loss: float, figures: dict[str, Any]) -> dict[str, Any]:
    return {
        "eval_loss": loss,
        "eval_perplexity_per_token": math.exp(min(loss, 700.0)),
        "eval_samples": figures["eval_samples"],
        "eval_target_tokens": figures["eval_target_tokens"],
    }


# -- the data card, which the report shows: counts, lengths, and samples with what is trained on -----------------------

SAMPLES = 3
"""Samples of each source."""
_SOURCES, _TOKENS = 6, 1500  # of how many sources samples are shown, and how much of each


def data_card(data: FineTuningData, tokenizer: Any) -> dict[str, Any]:
    """The content of ``data_card.json``; its form: :mod:`ds_trainer.monitor.report.figures`."""
    figures = data.to_dict()
    if isinstance(data.train, MixtureStream):
        rows = [{**row, "share": f"{row['share']:.1%}"} for row in figures["sources"]]
        return {"figures": {"samples for evaluation": figures["eval_samples"], "training data": "streamed"},
                "sources": rows}  # fmt: skip
    return {
        "figures": {
            "samples of an epoch": len(data.train),
            "tokens": figures["tokens"],
            "trained on": f"{figures['trained_tokens']:,} tokens ({figures['trained_share']:.1%})",
            "samples for evaluation": figures["eval_samples"],
            "bad lines left out": figures["bad_lines"],
        },
        "sources": [_row(source) for source in data.sources],
        "lengths": _histogram(data.train.lengths),
        "samples": [
            _sample(row.name, dataset, index, tokenizer)
            for row, dataset in list(zip(data.sources, data.train.datasets, strict=True))[:_SOURCES]
            for index in range(min(SAMPLES, len(dataset)))
        ],
    }


def _row(source: SourceFigures) -> dict[str, Any]:
    share = source.trained_tokens / max(source.tokens, 1)
    return {
        "name": source.name,
        "format": source.format,
        "records": source.records,
        "samples": source.samples,
        "tokens": source.tokens,
        "trained on": f"{share:.1%}",
        "without a sample": source.without_sample,
        **source.notices,
        **({"keys not used": ", ".join(source.unread)} if source.unread else {}),
    }


def _histogram(lengths: np.ndarray) -> dict[str, list[int]]:
    """Samples by length, in powers of two."""
    last = int(np.ceil(np.log2(int(lengths.max()) + 1)))
    edges = 2 ** np.arange(last + 1)
    counts = np.histogram(lengths, edges)[0]
    first = int(np.flatnonzero(counts)[0])
    return {"edges": edges[first:].tolist(), "counts": counts[first:].tolist()}


def _sample(name: str, dataset: PreparedDataset, index: int, tokenizer: Any) -> dict[str, Any]:
    sample = dataset[index]
    ids, labels = sample["input_ids"][:_TOKENS].numpy(), sample["labels"][:_TOKENS].numpy()
    pieces = [{"text": tokenizer.decode(run.tolist()), "trained": trained} for trained, run in parts(ids, labels)]
    return {"source": f"{name}: {dataset.source(index)}", "pieces": pieces}


# The task ``vision_language``: fine-tunes a vision-language model on conversations with images.


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
