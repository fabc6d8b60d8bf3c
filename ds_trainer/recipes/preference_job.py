"""The tasks ``dpo`` and ``reward``: TRL's trainers on pairs of a chosen and a rejected answer.

TRL's trainers are subclasses of transformers' Trainer. The command line has put this package's classes in its place
(:mod:`ds_trainer.compatibility`) before this job runs, so that ZeRO, checkpoints and layouts are those of this package.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ds_trainer.recipes.recipe import Recipe
from ds_trainer.recipes.task_data import Reading
from ds_trainer.recipes.task_job import TaskJob, check_replaced, library_arguments, task_tokenizer
from ds_trainer.samples.sources.record import Record
from ds_trainer.training.loading.model_files import model_directory
from ds_trainer.training.loading.peft_adapters import make_peft_config
from ds_trainer.utils.errors import ConfigError

if TYPE_CHECKING:
    from ds_trainer.arguments.training_arguments import TrainingArguments

_CLASSES = {
    "dpo": ("DPOConfig", "DPOTrainer", "AutoModelForCausalLM", "CAUSAL_LM"),
    "reward": ("RewardConfig", "RewardTrainer", "AutoModelForSequenceClassification", "SEQ_CLS"),
}


class PreferenceJob(TaskJob):
    """Trains a model to prefer the chosen answers, or to score them higher."""

    tokenizer: Any

    def arguments(self) -> Any:
        """The arguments of the recipe and the options of the task, in TRL's class."""
        config_class = getattr(_imported_trl(), _CLASSES[self.recipe.task.name][0])
        return library_arguments(self.recipe, config_class, max_length=self.recipe.tokens_per_sample)

    def reading(self) -> Reading:
        """A prompt and two answers."""
        return Reading(self.recipe.task.name, "preference", _fields, __name__)

    def prepare(self, args: TrainingArguments) -> Sequence[str]:
        """Load the tokenizer and read the samples."""
        self.tokenizer = task_tokenizer(self.recipe)
        return super().prepare(args)

    def make_trainer(self, args: TrainingArguments) -> Any:
        """TRL's trainer."""
        recipe, tokenizer = self.recipe, self.tokenizer
        _, trainer_name, auto_class, task_type = _CLASSES[recipe.task.name]
        more: dict[str, Any] = {}
        if recipe.task.name == "dpo" and recipe.model.peft is None:  # with adapters, the base is the reference
            more["ref_model"] = _model(recipe, auto_class, args.seed, tokenizer)
        return getattr(_imported_trl(), trainer_name)(
            model=_model(recipe, auto_class, args.seed, tokenizer),
            args=args,
            train_dataset=self.data.train,
            eval_dataset=self.data.eval,
            processing_class=tokenizer,
            peft_config=_adapters(recipe, task_type),
            **more,
        )


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
