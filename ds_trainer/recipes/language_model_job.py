"""The task ``sft`` without samples: trains a language model on text, all of it, in blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ds_trainer.callbacks.metrics_recorder import MetricsFileCallback
from ds_trainer.recipes.distillation import trainer_class_of
from ds_trainer.recipes.job import Job, final_evaluation
from ds_trainer.recipes.language_model import build_language_model, language_model_config, tokenizer_of
from ds_trainer.recipes.recipe import Recipe
from ds_trainer.recipes.report import Evaluation, compression_baselines, nats_per_token, report_text, sample_of
from ds_trainer.recipes.text_dataset import Corpus, TokenBlocks, TokenStream, tokenize
from ds_trainer.recipes.tokenizers import Tokenizer
from ds_trainer.utils.errors import ConfigError, Problems
from ds_trainer.utils.units import counted

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from ds_trainer.arguments.training_arguments import TrainingArguments
    from ds_trainer.training.trainer import Trainer


class LanguageModelJob(Job):
    """Trains the language model of a recipe on text in blocks.

    Attributes:
        tokenizer, model_config, train, train_blocks: what :meth:`prepare` has read.
        eval, eval_blocks, eval_text: the same of evaluation; None and no bytes without evaluation data.
        baselines: compressed sizes of ``eval_text``, on the main process if the recipe asks for them.
    """

    tokenizer: Tokenizer
    model_config: PretrainedConfig
    train: TokenStream
    train_blocks: TokenBlocks
    eval: TokenStream | None = None
    eval_blocks: TokenBlocks | None = None
    eval_text: bytes = b""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.baselines: dict[str, dict[str, float]] = {}

    def prepare(self, args: TrainingArguments) -> Sequence[str]:
        """Read the corpus and tokenize it; read the model's configuration."""
        recipe, problems = self.recipe, Problems()
        with problems.collecting():
            corpus = Corpus(recipe.data)
        with problems.collecting():
            self.tokenizer = tokenizer_of(recipe)
            self.model_config = language_model_config(recipe, self.tokenizer)
        problems.raise_if_any()
        length = recipe.data.sequence_length
        self.train = tokenize(corpus.train_documents(), self.tokenizer)
        if self.train.documents == 0:
            raise ConfigError(f"data.train: there is no text in {counted(len(corpus.train_files), 'file')}.")
        self.train_blocks = TokenBlocks(self.train.tokens, length)
        if not corpus.has_eval:
            return ()
        documents = list(corpus.eval_documents())
        if not documents:
            raise ConfigError(
                "data: the evaluation data has no text; set data.eval to other files, or use held_out_every."
            )
        self.eval = tokenize(documents, self.tokenizer)
        self.eval_blocks = TokenBlocks(self.eval.tokens, length, keep_ragged=True)
        self.eval_text = b"".join(document.data for document in documents)
        return ()

    def make_trainer(self, args: TrainingArguments) -> Trainer:
        """The Trainer, perhaps with a teacher."""
        model = build_language_model(self.recipe, self.model_config, args.seed, args.allow_new_weights)
        return trainer_class_of(self.recipe, self.tokenizer, args)(
            model,
            args,
            train_dataset=self.train_blocks,
            eval_dataset=self.eval_blocks,
            processing_class=self.tokenizer,  # saved in every checkpoint, and with the final weights
        )

    def begin(self, trainer: Trainer) -> None:
        """Add what compressors achieve to the loss plot as horizontal lines, in nats per token."""
        text = self.eval
        if text is None or not self.recipe.report.compression_baselines or not trainer.is_world_process_zero():
            return
        self.baselines = compression_baselines(self.eval_text)
        for callback in trainer.callback_handler.own:
            if isinstance(callback, MetricsFileCallback):
                callback.baselines = {
                    name: nats_per_token(packed["bits_per_byte"], text.targets, text.bytes)
                    for name, packed in self.baselines.items()
                }

    def evaluate(self, trainer: Trainer) -> Evaluation | None:
        """The loss on the held-out text, compared with the baselines."""
        text = self.eval
        if text is None:
            return None
        return Evaluation(
            final_evaluation(trainer)["eval_loss"], text.targets, text.documents, text.bytes, self.baselines
        )

    def figures(self, trainer: Trainer, evaluation: Evaluation | None) -> Mapping[str, Any]:
        """Sizes of the text, the evaluation, and a sample."""
        return {
            "train_documents": self.train.documents,
            "train_bytes": self.train.bytes,
            "evaluation": evaluation.to_dict() if evaluation else None,
            "sample": sample_of(self.recipe, self.tokenizer, trainer.args),
        }

    def report(self, results: Mapping[str, Any], evaluation: Evaluation | None) -> str:
        """The comparison with the baselines, and the sample."""
        return report_text(results, evaluation)
