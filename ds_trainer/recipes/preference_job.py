"""The tasks ``dpo`` and ``reward``: TRL's trainers on pairs of a chosen and a rejected answer.

TRL's trainers are subclasses of transformers' Trainer. The command line has put this package's classes in its place
(:mod:`ds_trainer.compatibility`) before this job runs, so that ZeRO, checkpoints and layouts are those of this package.
"""

from __future__ import annotations

import time
from typing import Any

from ds_trainer.recipes.recipe import Recipe
from ds_trainer.recipes.task_data import Reading, TaskData, read_task_data, seed_of
from ds_trainer.recipes.task_run import check_replaced, library_arguments, task_tokenizer, train_task
from ds_trainer.samples.sources.record import Record
from ds_trainer.training.loading.model_files import model_directory
from ds_trainer.training.loading.peft_adapters import make_peft_config
from ds_trainer.utils.errors import ConfigError

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
    args = arguments_of(recipe)
    trainer, data = _trainer_with_data(recipe, args)
    return train_task(recipe, trainer, data, began)


def arguments_of(recipe: Recipe) -> Any:
    """The arguments of the recipe and the options of the task, in TRL's class."""
    trl = _imported_trl()
    return library_arguments(recipe, getattr(trl, _CLASSES[recipe.task.name][0]), max_length=recipe.tokens_per_sample)


def trainer_of(recipe: Recipe, args: Any) -> Any:
    """TRL's trainer with its data; ``args`` are those of :func:`arguments_of`, which a dry run adapts."""
    return _trainer_with_data(recipe, args)[0]


def _trainer_with_data(recipe: Recipe, args: Any) -> tuple[Any, TaskData]:
    _, trainer_name, auto_class, task_type = _CLASSES[recipe.task.name]
    tokenizer = task_tokenizer(recipe)
    data = read_task_data(recipe.data, Reading(recipe.task.name, "preference", _fields, __name__), seed_of(args))
    more: dict[str, Any] = {}
    if recipe.task.name == "dpo" and recipe.model.peft is None:  # with adapters, the base is the reference
        more["ref_model"] = _model(recipe, auto_class, args.seed, tokenizer)
    trainer = getattr(_imported_trl(), trainer_name)(
        model=_model(recipe, auto_class, args.seed, tokenizer),
        args=args,
        train_dataset=data.train,
        eval_dataset=data.eval,
        processing_class=tokenizer,
        peft_config=_adapters(recipe, task_type),
        **more,
    )
    return trainer, data


def _imported_trl() -> Any:
    try:
        import trl
    except ImportError as error:
        raise ConfigError("The tasks dpo and reward need TRL: pip install trl.") from error
    check_replaced("dpo or reward")
    return trl


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
