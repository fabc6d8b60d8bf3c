"""The tasks ``dpo`` and ``reward``: TRL's trainers on pairs of a chosen and a rejected answer.

TRL's trainers are subclasses of transformers' Trainer. The command line has put this package's classes in its place
(:mod:`ds_trainer.compatibility`) before this job runs, so that ZeRO, checkpoints and layouts are those of this package.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.data.sources.record import Record
from ds_trainer.recipes.recipe import Recipe
from ds_trainer.recipes.record_reading import read_split
from ds_trainer.recipes.task_run import task_tokenizer, train_and_report
from ds_trainer.training.loading.model_files import model_directory
from ds_trainer.training.loading.peft_adapters import make_peft_config
from ds_trainer.utils.errors import ConfigError, did_you_mean

_CLASSES = {
    "dpo": ("DPOConfig", "DPOTrainer", "AutoModelForCausalLM", "CAUSAL_LM"),
    "reward": ("RewardConfig", "RewardTrainer", "AutoModelForSequenceClassification", "SEQ_CLS"),
}


def run(recipe: Recipe) -> dict[str, Any]:
    """Train the model of ``recipe`` on preferences, evaluate it, save it and report. Called by every rank.

    Returns:
        The content of ``results.json`` on the main process, an empty dict elsewhere.

    Raises:
        ConfigError: the recipe cannot work; lists all problems found.
    """
    began = time.perf_counter()
    config_name, trainer_name, auto_class, task_type = _CLASSES[recipe.task.name]
    trl = _imported_trl()
    args = _arguments(recipe, getattr(trl, config_name))
    tokenizer = task_tokenizer(recipe)
    split = read_split(recipe.data, "preference", recipe.task.name)
    more: dict[str, Any] = {}
    if recipe.task.name == "dpo" and recipe.model.peft is None:  # with adapters, the base is the reference
        more["ref_model"] = _model(recipe, auto_class, args.seed, tokenizer)
    trainer = getattr(trl, trainer_name)(
        model=_model(recipe, auto_class, args.seed, tokenizer),
        args=args,
        train_dataset=_dataset(split.train),
        eval_dataset=_dataset(split.eval) if split.eval else None,
        processing_class=tokenizer,
        peft_config=_adapters(recipe, task_type),
        **more,
    )
    return train_and_report(recipe, trainer, {"train": len(split.train), "eval": len(split.eval)}, began)


def _imported_trl() -> Any:
    try:
        import trl
    except ImportError as error:
        raise ConfigError("The tasks dpo and reward need TRL: pip install trl.") from error
    import transformers

    if transformers.TrainingArguments is not TrainingArguments:
        raise ConfigError(
            "The tasks dpo and reward need this package's classes in the place of transformers'. In a script, import "
            "ds_trainer.as_transformers first; 'ds-trainer train' does it."
        )
    return trl


def _arguments(recipe: Recipe, config_class: Any) -> Any:
    """The arguments of the recipe and the options of the task, in TRL's class. Its defaults hold for all others."""
    names = [field.name for field in dataclasses.fields(config_class) if field.init]
    problems = [
        f"{recipe.where(f'task.options.{key}')}: task.options: {key!r} is not a field of {config_class.__name__}."
        f"{did_you_mean(key, names)}"
        for key in recipe.task.options
        if key not in names
    ]
    twice = [key for key in recipe.task.options if key in recipe.arguments]
    problems += [f"{recipe.where('task.options')}: {key} is also in arguments; remove one." for key in twice]
    if problems:
        raise ConfigError(problems)
    return config_class(**{"max_length": recipe.tokens_per_sample, **recipe.arguments, **recipe.task.options})


def _model(recipe: Recipe, auto_class: str, seed: int, tokenizer: Any) -> Any:
    import torch
    import transformers

    spec, where = recipe.model, recipe.where("model.path")
    if spec.path is None:
        raise ConfigError(f"{where}: task {recipe.task.name} starts from a trained model; set model.path.")
    options: dict[str, Any] = {"dtype": spec.dtype or "float32", "local_files_only": True}
    if spec.quantization is not None:
        options["quantization_config"] = transformers.BitsAndBytesConfig(**spec.quantization)
    if recipe.task.name == "reward":
        options["num_labels"] = 1
    torch.manual_seed(seed)  # a new head has the same values on all ranks
    try:
        model = getattr(transformers, spec.auto_class or auto_class).from_pretrained(
            model_directory(spec.path), **options
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: model.path: {spec.path!r}: {' '.join(str(error).split())[:400]}") from error
    if recipe.task.name == "reward":
        model.config.pad_token_id = tokenizer.pad_token_id  # the score is read at the last token that is not padding
    return model


def _adapters(recipe: Recipe, task_type: str) -> Any:
    if recipe.model.peft is None:
        return None
    where = f"{recipe.where('model.peft')}: model.peft"
    return make_peft_config({"task_type": task_type, **recipe.model.peft}, where)


def _dataset(records: Sequence[Record]) -> Any:
    from datasets import Dataset

    return Dataset.from_list([_fields(record) for record in records])


def _fields(record: Record) -> dict[str, Any]:
    """Prompt and answers in one of TRL's forms: all texts, or all conversations."""
    fields: dict[str, Any] = {
        key: record.fields[key] for key in ("prompt", "chosen", "rejected") if key in record.fields
    }
    prompt = fields.get("prompt")
    if isinstance(fields["chosen"], str) or not isinstance(prompt, str):
        return fields
    if fields["chosen"][0]["role"] == "assistant":
        return {**fields, "prompt": [{"role": "user", "content": prompt}]}
    return {key: fields[key] for key in ("chosen", "rejected")}  # whole conversations, which begin with the prompt
