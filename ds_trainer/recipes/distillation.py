"""The Trainer of a recipe: with a teacher if the recipe has a section ``distillation``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_trainer.recipes.recipe import Recipe
from ds_trainer.recipes.tokenizers import ByteTokenizer, Tokenizer
from ds_trainer.utils.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ds_trainer.arguments.training_arguments import TrainingArguments
    from ds_trainer.training.trainer import Trainer


def trainer_class_of(recipe: Recipe, tokenizer: Tokenizer, args: TrainingArguments) -> Callable[..., Trainer]:
    """``Trainer``, or ``DistillationTrainer`` with the teacher of ``recipe``.

    Args:
        recipe: with the section ``distillation`` or without.
        tokenizer: the tokenizer of the model that is trained.
        args: the arguments of the run; its precision is that of the teacher.

    Raises:
        ConfigError: the teacher is missing, or has another tokenizer.
    """
    from ds_trainer.training.trainer import Trainer

    spec = recipe.distillation
    if spec is None:
        return Trainer
    from ds_trainer.training.distillation_trainer import DistillationTrainer
    from ds_trainer.training.loading.model_files import model_directory
    from ds_trainer.training.loading.pretrained import from_pretrained
    from ds_trainer.training.model.distillation_loss import DistillationLoss

    where = f"{recipe.where('distillation.teacher')}: distillation.teacher"
    try:
        directory = model_directory(str(spec.teacher))
        _check_tokenizer(directory, tokenizer)
        half = "bfloat16" if args.bf16 or args.torch_autocast == "bf16" else "float16" if args.fp16 else "float32"
        teacher = from_pretrained(directory, "AutoModelForCausalLM", dtype=spec.dtype or half)
    except ConfigError as error:
        raise ConfigError([f"{where}: {problem}" for problem in error.problems]) from error
    loss = DistillationLoss(spec.temperature, spec.hard_loss_weight, spec.divergence, tokenizer.vocab_size)
    return partial(DistillationTrainer, teacher=teacher, distillation=loss)


def _check_tokenizer(directory: Path, tokenizer: Tokenizer) -> None:
    """Refuse a teacher whose tokens have other meanings.

    Raises:
        ConfigError: its tokenizer is missing or has another vocabulary.
    """
    is_bytes = (directory / ByteTokenizer.FILE_NAME).is_file()
    own = getattr(tokenizer, "pretrained", None)
    if is_bytes != (own is None):
        kinds = ("bytes", "a tokenizer") if is_bytes else ("a tokenizer", "bytes")
        raise ConfigError(f"the teacher reads {kinds[0]}, the model {kinds[1]}; they need the same vocabulary.")
    if own is None:
        return
    from ds_trainer.recipes.tokenizers import load_tokenizer

    other: Any = load_tokenizer(str(directory))
    theirs, ours = other.pretrained.get_vocab(), own.get_vocab()
    if theirs != ours:
        different = [token for token in {**ours, **theirs} if ours.get(token) != theirs.get(token)]
        raise ConfigError(
            f"the vocabularies of teacher ({len(theirs):,} tokens) and model ({len(ours):,}) differ in "
            f"{len(different):,} tokens, such as {different[0]!r}. Use a teacher with the model's tokenizer."
        )
