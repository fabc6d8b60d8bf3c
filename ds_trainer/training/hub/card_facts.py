"""Collects the content of a model card from arguments, model, data, layout and logs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.callbacks.state import TrainerState
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.training.hub.card import CardFacts
from ds_trainer.training.signatures import is_from
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)

_PACKAGES = ("ds_trainer", "deepspeed", "torch", "transformers", "datasets", "tokenizers", "peft")
# Task names of the Hub, by the suffix of the class name in transformers.
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


@dataclass(frozen=True)
class CardSource:
    """The objects that a card describes.

    Attributes:
        model: the module.
        args: the training arguments.
        state: the trainer state, which has the logs.
        batch_plan: batch sizes and layout.
        config: the compiled DeepSpeed configuration.
        optimizer: the optimizer in use; None before a training.
        dataset: the evaluation dataset, or else the training dataset.
    """

    model: Any
    args: TrainingArguments
    state: TrainerState
    batch_plan: BatchPlan
    config: CompiledConfig
    optimizer: Any
    dataset: Any


def facts_of(source: CardSource, given: Mapping[str, Any]) -> CardFacts:
    """The content of a card: the arguments ``given`` to ``create_model_card``, completed from the Trainer."""
    model, args = source.model, source.args
    peft = getattr(model, "peft_config", None)
    found_tag, found_config = _dataset_on_hub(source.dataset)
    dataset_tags = _listed(given.get("dataset_tags")) or _listed(found_tag)
    base = given.get("finetuned_from") or _base_model(model, peft)
    tags = [*_listed(given.get("tags")), *_listed(getattr(model, "model_tags", None))]
    return CardFacts(
        model_name=given.get("model_name") or Path(str(args.output_dir)).absolute().name,
        language=_listed(given.get("language")),
        license=given.get("license") or (_license_of(base) if base else None),
        tags=[*tags, "lora"] if _is_lora(peft) else tags,
        base_model=base,
        tasks=_listed(given.get("tasks")) or _listed(_task_of(model)),
        library="peft" if peft else ("transformers" if is_from(model, "transformers") else None),
        dataset_tags=dataset_tags,
        dataset_names=_listed(given.get("dataset")) or dataset_tags,
        dataset_args=_listed(given.get("dataset_args")) or _listed(found_config),
        hyperparameters=hyperparameters(source),
        log_history=source.state.log_history,
        versions=_versions(),
    )


def hyperparameters(source: CardSource) -> dict[str, Any]:
    """The hyperparameters of the training, with the batch sizes that follow from its layout."""
    args, batch, compiled, state = source.args, source.batch_plan, source.config, source.state
    layout = batch.layout
    optimizer = compiled.optimizer_type or (
        type(source.optimizer).__name__ if source.optimizer is not None else str(args.optim)
    )
    rows: dict[str, Any] = {
        "learning_rate": args.learning_rate,
        "train_batch_size": args.per_device_train_batch_size,
        "eval_batch_size": args.per_device_eval_batch_size,
        "gradient_accumulation_steps": batch.accumulation,
        "total_train_batch_size": batch.global_batch_size,
        "num_devices": layout.world_size,
        "layout": f"dp {layout.dp} x tp {layout.tp} x cp {layout.cp} x sp {layout.sp}",
        "zero_stage": compiled.zero_stage,
        "precision": str(compiled.precision),
        "seed": args.seed,
        "optimizer": optimizer,
        "weight_decay": args.weight_decay,
        "max_grad_norm": compiled.gradient_clipping,
        "lr_scheduler_type": str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
        "lr_scheduler_warmup_steps": args.get_warmup_steps(max(state.max_steps, 0)),
    }
    if "adam" in optimizer.lower():
        rows["optimizer"] += f" (betas {args.adam_beta1}, {args.adam_beta2}; epsilon {args.adam_epsilon})"
    if state.max_steps > 0:
        rows["training_steps"] = state.max_steps
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
    """Name and configuration of a dataset of the library ``datasets``; None for one that was read from files."""
    if isinstance(data, Mapping):
        data = next(iter(data.values()), None)
    name = getattr(data, "builder_name", None)
    if not isinstance(name, str) or name in _FILE_READERS:
        return None, None
    return name, getattr(data, "config_name", None)


def _base_model(model: Any, peft: Any) -> str | None:
    """The repository of the initial weights; None for a local directory or new weights."""
    name = getattr(next(iter(peft.values())), "base_model_name_or_path", None) if peft else None
    name = name or getattr(getattr(model, "config", None), "_name_or_path", None)
    if not isinstance(name, str) or not name or Path(name).exists():
        return None
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:  # a path on another machine
        return None
    return name


@functools.cache
def _license_of(base_model: str) -> str | None:
    """The license of ``base_model`` on the Hub; None if it has none, or if the Hub does not answer quickly."""
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
    base = getattr(model, "get_base_model", None)  # the wrapper of peft
    name = type(base() if callable(base) else model).__name__
    return next((task for ending, task in _TASKS.items() if name.endswith(ending)), None)


def _is_lora(peft: Any) -> bool:
    return bool(peft) and any("LORA" in str(getattr(config, "peft_type", "")).upper() for config in peft.values())


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # an optional package
            continue
    return versions
