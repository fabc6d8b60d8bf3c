"""The task ``embedding``: sentence-transformers' trainer on pairs, triplets, or pairs with scores.

Its trainer is a subclass of transformers' Trainer. The command line has put this package's classes in its place
(:mod:`ds_trainer.compatibility`) before this job runs, so that ZeRO, checkpoints and layouts are those of this package.
A loss that ranks compares the samples of a batch, so here they are gathered over the ranks: the loss is that of the
micro-batches of all ranks together, as on one rank.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from ds_trainer.recipes import embedding_formats
from ds_trainer.recipes.embedding_formats import KIND, PAIRS, SCORED, TRIPLETS, embedding_format, read_row
from ds_trainer.recipes.recipe import Recipe
from ds_trainer.recipes.task_data import Reading
from ds_trainer.recipes.task_job import TaskJob, check_replaced, library_arguments
from ds_trainer.training.loading.model_files import model_directory
from ds_trainer.training.loading.peft_adapters import make_peft_config
from ds_trainer.utils.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from ds_trainer.arguments.training_arguments import TrainingArguments

_RANKING = (
    "MultipleNegativesRankingLoss",
    "CachedMultipleNegativesRankingLoss",
    "MultipleNegativesSymmetricRankingLoss",
    "CachedMultipleNegativesSymmetricRankingLoss",
)
# The default is the first.
LOSSES = {
    PAIRS: _RANKING,
    TRIPLETS: (*_RANKING, "TripletLoss"),
    SCORED: ("CoSENTLoss", "AnglELoss", "CosineSimilarityLoss"),
}


class EmbeddingJob(TaskJob):
    """Trains a model of sentence-transformers."""

    def arguments(self) -> Any:
        """The arguments of the recipe and the options of the task, in the class of sentence-transformers."""
        return library_arguments(self.recipe, _imported_library().SentenceTransformerTrainingArguments)

    def reading(self) -> Reading:
        """Pairs, triplets, or pairs with scores."""
        return Reading(KIND, KIND, lambda record: record.fields, embedding_formats.__name__, read_row)

    def make_trainer(self, args: TrainingArguments) -> Any:
        """The trainer of sentence-transformers."""
        library, recipe, data = _imported_library(), self.recipe, self.data
        format = embedding_format(dict.fromkeys(data.train.column_names))
        assert format is not None  # read_row has found it in every row
        loss_class, options = _loss(recipe, format[0])
        model = _model(recipe, library)
        evaluates = data.eval is not None and recipe.task.options.get("evaluation", True)
        from ds_trainer.recipes.embedding_trainer import EmbeddingTrainer

        trainer = EmbeddingTrainer(
            model=model,
            args=args,
            train_dataset=data.train,
            eval_dataset=data.eval,
            loss=loss_class(model, **options),
            evaluator=_evaluator(format, data.eval, args.per_device_eval_batch_size) if evaluates else None,
        )
        _check_layout(recipe, trainer, loss_class.__name__)
        return trainer


def _imported_library() -> Any:
    try:
        import sentence_transformers
    except ImportError as error:
        raise ConfigError("Task embedding needs sentence-transformers: pip install sentence-transformers.") from error
    check_replaced("embedding")
    return sentence_transformers


def _check_layout(recipe: Recipe, trainer: Any, loss: str) -> None:
    problems, where = [], recipe.where("task.options")
    if loss.startswith("Cached") and trainer._ds_trainer.compiled.zero_stage == 3:
        problems.append(
            f"{where}: {loss} runs a backward pass for each part of a micro-batch, and DeepSpeed's ZeRO stage 3 allows "
            "one for each micro-batch. Set arguments.zero_stage to 2, or remove mini_batch_size."
        )
    if trainer.layout.dp != trainer.layout.world_size:
        problems.append(
            f"{where}: task embedding compares the samples of all ranks, which therefore hold different ones, but the "
            f"layout is {trainer.layout.describe()}. Remove tensor_parallel_size, sequence_parallel_size and "
            "context_parallel_size."
        )
    if problems:
        raise ConfigError(problems)


def _loss(recipe: Recipe, format: str) -> tuple[Any, dict[str, Any]]:
    """The class of the loss and its arguments.

    Raises:
        ConfigError: the loss is not for the format, or does not take an argument.
    """
    from sentence_transformers.sentence_transformer import losses

    from ds_trainer.recipes.embedding_trainer import gathering

    task, where = recipe.task.options, f"{recipe.where('task.options')}: task.options"
    size = task.get("mini_batch_size")
    fitting = LOSSES[format]
    name = task.get("loss", fitting[1] if size is not None and fitting[0] == _RANKING[0] else fitting[0])
    name = str(name) if str(name).endswith("Loss") else f"{name}Loss"
    if name not in fitting:
        hint = did_you_mean(name, fitting)
        raise ConfigError(f"{where}.loss: {name} is not for {format}; those are for: {', '.join(fitting)}.{hint}")
    loss_class = getattr(losses, name)
    known = inspect.signature(loss_class).parameters
    options = dict(task.get("loss_options") or {})
    if size is not None:
        options["mini_batch_size"] = size
    problems = [f"{where}: {name} has no argument {key!r}.{did_you_mean(key, known)}" for key in options.keys() - known]
    if problems:
        raise ConfigError(problems)
    if "gather_across_devices" in known:
        options.setdefault("gather_across_devices", True)
    return (gathering(loss_class) if issubclass(loss_class, losses.CoSENTLoss) else loss_class), options


def _model(recipe: Recipe, library: Any) -> Any:
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    spec, where = recipe.model, recipe.where("model.path")
    if spec.path is None or recipe.data.tokenizer is not None:
        key = "model.path" if spec.path is None else "data.tokenizer"
        raise ConfigError(
            f"{recipe.where(key)}: {key}: task embedding starts from a trained model and uses its tokenizer; "
            f"{'set' if spec.path is None else 'remove'} {key}."
        )
    if spec.quantization is not None:
        raise ConfigError(f"{recipe.where('model.quantization')}: model.quantization: not for task embedding.")
    directory = model_directory(spec.path)
    kwargs = {"dtype": spec.dtype or "float32"}
    try:
        if (directory / "modules.json").is_file():
            model = library.SentenceTransformer(
                str(directory), device="cpu", local_files_only=True, model_kwargs=kwargs
            )
        else:
            transformer = Transformer(str(directory), model_kwargs={**kwargs, "local_files_only": True})
            pooling = Pooling(transformer.get_embedding_dimension(), recipe.task.options.get("pooling", "mean"))
            model = library.SentenceTransformer(modules=[transformer, pooling], device="cpu")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: model.path: {spec.path!r}: {' '.join(str(error).split())[:400]}") from error
    model.max_seq_length = recipe.tokens_per_sample
    tokenizer = model.tokenizer
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if spec.peft is not None:
        where = f"{recipe.where('model.peft')}: model.peft"
        model.add_adapter(make_peft_config({"task_type": "FEATURE_EXTRACTION", **spec.peft}, where))
    return model


def _evaluator(format: tuple[str, tuple[str, ...]], rows: Any, batch_size: int) -> Any:
    """Similarity of the pairs with scores, or retrieval of the right text among all held-out ones."""
    from sentence_transformers.sentence_transformer.evaluation import (
        EmbeddingSimilarityEvaluator,
        InformationRetrievalEvaluator,
    )

    kind, keys = format
    columns = [rows[key][:] for key in keys]
    if kind == SCORED:
        first, second, scores = columns
        return EmbeddingSimilarityEvaluator(first, second, scores, batch_size=batch_size, write_csv=False)
    texts = list(dict.fromkeys(text for column in columns[1:] for text in column))
    numbers = {text: str(number) for number, text in enumerate(texts)}
    relevant: dict[str, set[str]] = {}
    for query, document in zip(columns[0], columns[1], strict=True):
        relevant.setdefault(query, set()).add(numbers[document])
    return InformationRetrievalEvaluator(
        queries={query: query for query in relevant},
        corpus={number: text for text, number in numbers.items()},
        relevant_docs=relevant,
        batch_size=batch_size,
        write_csv=False,
    )
