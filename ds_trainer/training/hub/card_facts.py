"""What a model card can say of a trainer: read from its arguments, model, data, layout and logs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_trainer.engine.training_engine import precision_of
from ds_trainer.training.hub.card import CardFacts
from ds_trainer.training.signatures import is_from
from ds_trainer.utils.logging import get_logger

if TYPE_CHECKING:
    from ds_trainer.training.trainer import Trainer

logger = get_logger(__name__)

_PACKAGES = ("ds_trainer", "deepspeed", "torch", "transformers", "datasets", "tokenizers", "peft")
# What the names of transformers' classes end with, and the Hub's name of the task.
_TASKS = {
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
    "ForImageClassification": "image-classification",
    "ForSemanticSegmentation": "image-segmentation",
    "ForObjectDetection": "object-detection",
    "ForAudioClassification": "audio-classification",
    "ForCTC": "automatic-speech-recognition",
    "ForSpeechSeq2Seq": "automatic-speech-recognition",
}
_FILE_READERS = ("csv", "json", "pandas", "parquet", "text", "arrow", "generator", "webdataset", "imagefolder")
_LOOK_UP_SECONDS = 5.0


def facts_of(trainer: Trainer, said: Mapping[str, Any]) -> CardFacts:
    """The facts of a card: what ``said`` (arguments of ``create_model_card``) has, completed from the trainer."""
    peft = getattr(trainer.model, "peft_config", None)
    data = trainer.eval_dataset if trainer.eval_dataset is not None else trainer.train_dataset
    found_tag, found_config = _dataset_on_hub(data)
    dataset_tags = _listed(said.get("dataset_tags")) or _listed(found_tag)
    base = said.get("finetuned_from") or _base_model(trainer.model, peft)
    tags = [*_listed(said.get("tags")), *_listed(getattr(trainer.model, "model_tags", None))]
    return CardFacts(
        model_name=said.get("model_name") or Path(str(trainer.args.output_dir)).absolute().name,
        language=_listed(said.get("language")),
        license=said.get("license") or (_license_of(base) if base else None),
        tags=[*tags, "lora"] if _is_lora(peft) else tags,
        base_model=base,
        tasks=_listed(said.get("tasks")) or _listed(_task_of(trainer.model)),
        library="peft" if peft else ("transformers" if is_from(trainer.model, "transformers") else None),
        dataset_tags=dataset_tags,
        dataset_names=_listed(said.get("dataset")) or dataset_tags,
        dataset_args=_listed(said.get("dataset_args")) or _listed(found_config),
        hyperparameters=hyperparameters(trainer),
        log_history=trainer.state.log_history,
        versions=_versions(),
    )


def hyperparameters(trainer: Trainer) -> dict[str, Any]:
    """What the training was asked to do, with the sizes that its layout gives."""
    args, layout, batch, compiled = trainer.args, trainer.layout, trainer.batch_plan, trainer.compiled
    autocast = compiled.get("torch_autocast.enabled")
    optimizer = compiled.get("optimizer.type") or (
        type(trainer.optimizer).__name__ if trainer.optimizer is not None else str(args.optim)
    )
    rows: dict[str, Any] = {
        "learning_rate": args.learning_rate,
        "train_batch_size": args.per_device_train_batch_size,
        "eval_batch_size": args.per_device_eval_batch_size,
        "gradient_accumulation_steps": batch.accumulation,
        "total_train_batch_size": batch.step_size,
        "num_devices": layout.world_size,
        "layout": f"dp {layout.dp} x tp {layout.tp} x cp {layout.cp} x sp {layout.sp}",
        "zero_stage": compiled.get("zero_optimization.stage"),
        "precision": f"{precision_of(compiled)}, autocast" if autocast else precision_of(compiled),
        "seed": args.seed,
        "optimizer": optimizer,
        "weight_decay": args.weight_decay,
        "max_grad_norm": compiled.get("gradient_clipping"),
        "lr_scheduler_type": str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
        "lr_scheduler_warmup_steps": args.get_warmup_steps(max(trainer.state.max_steps, 0)),
    }
    if "adam" in optimizer.lower():
        rows["optimizer"] += f" (betas {args.adam_beta1}, {args.adam_beta2}; epsilon {args.adam_epsilon})"
    if trainer.state.max_steps > 0:
        rows["training_steps"] = trainer.state.max_steps
    else:
        rows["num_epochs"] = args.num_train_epochs
    if args.label_smoothing_factor:
        rows["label_smoothing_factor"] = args.label_smoothing_factor
    return rows


def _listed(value: Any) -> list[Any]:
    if value is None or value == "":
        return []
    return list(value) if isinstance(value, list | tuple | set) else [value]


def _dataset_on_hub(data: Any) -> tuple[str | None, str | None]:
    """Name and configuration of a data set of the library ``datasets``; nothing for files read with it."""
    if isinstance(data, Mapping):
        data = next(iter(data.values()), None)
    name = getattr(data, "builder_name", None)
    if not isinstance(name, str) or name in _FILE_READERS:
        return None, None
    return name, getattr(data, "config_name", None)


def _base_model(model: Any, peft: Any) -> str | None:
    """The repository that the weights came from; None for a local directory or new weights."""
    name = getattr(next(iter(peft.values())), "base_model_name_or_path", None) if peft else None
    name = name or getattr(getattr(model, "config", None), "_name_or_path", None)
    if not isinstance(name, str) or not name or Path(name).exists():
        return None
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:  # a path of another machine
        return None
    return name


@functools.cache
def _license_of(base_model: str) -> str | None:
    """What the Hub says of ``base_model``; None where it says nothing, or does not answer at once."""
    from huggingface_hub import HfApi
    from huggingface_hub.constants import is_offline_mode

    if is_offline_mode():
        return None
    try:
        tags = HfApi().model_info(base_model, timeout=_LOOK_UP_SECONDS).tags or []
    except Exception as error:  # a card without a license is better than no card
        logger.info("The license of %s cannot be looked up (%s).", base_model, type(error).__name__)
        return None
    return next((tag.removeprefix("license:") for tag in tags if tag.startswith("license:")), None)


def _task_of(model: Any) -> str | None:
    base = getattr(model, "get_base_model", None)  # peft's wrapper
    name = type(base() if callable(base) else model).__name__
    return next((task for ending, task in _TASKS.items() if name.endswith(ending)), None)


def _is_lora(peft: Any) -> bool:
    return bool(peft) and any("LORA" in str(getattr(config, "peft_type", "")).upper() for config in peft.values())


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # an extra that is not installed
            continue
    return found
