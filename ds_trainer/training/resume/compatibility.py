"""The compatibility fingerprint: the arguments that decide the next weights, compared when a run resumes.

Layout, ZeRO stage, offload and everything else that changes rounding only may differ. The fingerprint covers the order
and the size of the global batches, the optimizer, its schedule, the loss and the number format.

A run resumes with other values, unless the states of the optimizer mean nothing to the new one. With ``strict_resume``
it resumes only with the same values.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds_trainer.arguments.completion import as_mapping
from ds_trainer.arguments.enums import SamplingStrategy, SchedulerType
from ds_trainer.arguments.serialize import plain
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.data.stream import length_of
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.utils.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from pathlib import Path

_SCHEDULE = ("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "max_steps")
_SETTINGS = {
    "weight_decay": ("weight_decay",),
    "adam_beta1": ("betas",),
    "adam_beta2": ("betas",),
    "adam_epsilon": ("eps",),
}
_PLAIN = (
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
    *("optim", "optim_args", "optim_target_modules", *_SETTINGS),
    *(
        "max_grad_norm",
        "label_smoothing_factor",
        "z_loss_factor",
        "fp8",
        "neftune_noise_alpha",
        "bf16",
        "fp16",
        "torch_autocast",
    ),
    *("seed", "data_seed", "train_sampling_strategy", "sortish_sampler", "remove_unused_columns"),
    *("packing", "packing_strategy", "max_length"),
)
_ENGINE = (
    *("optimizer", "scheduler", "gradient_clipping", "fp16", "bf16", "torch_autocast", "data_types"),
    *("compression_training", "data_efficiency", "progressive_layer_drop", "prescale_gradients"),
)
_BY_LENGTH = (
    *(SchedulerType.LINEAR, SchedulerType.COSINE, SchedulerType.COSINE_WITH_RESTARTS, SchedulerType.POLYNOMIAL),
    *(SchedulerType.COSINE_WITH_MIN_LR, SchedulerType.COSINE_WARMUP_WITH_MIN_LR, SchedulerType.WARMUP_STABLE_DECAY),
)
# Names of one optimizer: these have the same states.
_SAME_STATES = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adam": "adamw",
    "fusedadam": "adamw",
    "deepspeedcpuadam": "adamw",
}
_OPTIMIZER = ("optimizer", "optim", "optim_target_modules", "deepspeed.optimizer.type")
_OTHER_NAMES = {
    "num_train_epochs": "max_steps",
    "per_device_train_batch_size": "global_batch",
    "gradient_accumulation_steps": "global_batch",
}
_ABOUT = {
    "global_batch": "per_device_train_batch_size x gradient_accumulation_steps x replicas",
    "max_steps": "the steps of the schedule, from max_steps or num_train_epochs",
    "train_dataset": "samples in an epoch",
    "optimizer": "the class that was passed to the Trainer",
}
NAMES = (
    *(*_PLAIN, "grad_accum_dtype", "replica_specific_rng", "stream_shards", "max_steps", "global_batch"),
    *("train_dataset", "optimizer", "deepspeed"),
    "distillation",
    *_OTHER_NAMES,
)
"""The valid values in ``allow_changed_on_resume``."""


def compatibility_of(
    args: TrainingArguments,
    batch_plan: BatchPlan,
    config: CompiledConfig,
    train_dataset: Any,
    max_steps: int,
    user_schedule: bool,
    user_optimizer: type | None = None,
) -> dict[str, Any]:
    """The compatibility fingerprint of a run: plain data by name.

    Args:
        args: the training arguments.
        batch_plan: sizes of the batches.
        config: the compiled configuration, with the values of the user's DeepSpeed file.
        train_dataset: the training dataset; None if a subclass builds the loader.
        max_steps: optimizer steps of the run.
        user_schedule: whether the user passed the schedule, so that the arguments do not describe it.
        user_optimizer: the class of the optimizer that the user passed; None if the arguments describe it.
    """
    values = {name: plain(getattr(args, name)) for name in _PLAIN if hasattr(args, name)}
    if str(args.grad_accum_dtype) != "auto":
        values["grad_accum_dtype"] = str(args.grad_accum_dtype)
    if args.replica_specific_rng:
        values["replica_specific_rng"] = True
    if args.stream_shards is not None:
        values["stream_shards"] = args.stream_shards
    values["lr_scheduler_kwargs"] = plain(as_mapping(args.lr_scheduler_kwargs)) or {}
    values["data_seed"] = args.seed if args.data_seed is None else args.data_seed
    values["global_batch"] = batch_plan.global_batch_size
    of_file = config.user_values()
    if "scheduler" in config:
        total = "scheduler.params.total_num_steps"
        by_length = total in config and total not in of_file  # auto
    else:
        by_length = not user_schedule and (
            str(args.lr_scheduler_type) in map(str, _BY_LENGTH) or 0 < args.warmup_steps < 1
        )
    values["max_steps"] = max_steps if by_length else None
    samples = None if train_dataset is None else length_of(train_dataset)
    values["train_dataset"] = None if samples is None else batch_plan.samples_used(samples)
    values["optimizer"] = None if user_optimizer is None else user_optimizer.__name__
    if args.train_sampling_strategy == SamplingStrategy.GROUP_BY_LENGTH:
        values["length_column_name"] = args.length_column_name
    for path, value in of_file.items():
        if path.partition(".")[0] in _ENGINE:
            values[f"deepspeed.{path}"] = value
    return dict(json.loads(json.dumps(values, default=str)))


@dataclass(frozen=True)
class Changes:
    """The differences from the run that wrote a checkpoint.

    Attributes:
        values: pairs of old and new value, by name of :func:`compatibility_of`.
        optimizer: whether the optimizer has changed, so that it cannot use the states in the checkpoint.
    """

    values: Mapping[str, tuple[Any, Any]]
    optimizer: bool = False

    @property
    def schedule(self) -> bool:
        """Whether the schedule has changed, so that it is moved to the current step instead of restored."""
        begins = ("deepspeed.scheduler.", "deepspeed.optimizer.params.lr")
        return self.optimizer or any(name in _SCHEDULE or name.startswith(begins) for name in self.values)

    def settings(self, args: TrainingArguments) -> set[str]:
        """Settings of the optimizer's parameter groups that keep their new values."""
        kept = {key for name in self.values for key in _SETTINGS.get(name, ())}
        kept |= {n.rpartition(".")[2] for n in self.values if n.startswith("deepspeed.optimizer.params.")}
        if "optim_args" in self.values:
            kept |= set(args.optimizer_arguments())
        return kept | ({"lr", "initial_lr", "schedule"} if self.schedule else set())


def compare(
    written: Mapping[str, Any], present: Mapping[str, Any], args: TrainingArguments, checkpoint: Path
) -> Changes:
    """Compare two fingerprints, and return the differences.

    Refused are another optimizer, and with ``strict_resume`` any difference, unless ``allow_changed_on_resume`` names
    it.

    Args:
        written: :func:`compatibility_of` the run that wrote the checkpoint.
        present: :func:`compatibility_of` this run.
        args: arguments of this run.
        checkpoint: for the message.

    Raises:
        ConfigError: changes that are not allowed; one sentence for each.
    """
    allowed = allowed_names(args.allow_changed_on_resume)
    another_optimizer = _optimizer_of(written) != _optimizer_of(present)
    different = {
        name: (written.get(name), present.get(name))
        for name in dict.fromkeys([*present, *written])
        if written.get(name) != present.get(name)
    }
    if "global_batch" in allowed and "max_steps" in different and args.max_steps <= 0:
        allowed.add("max_steps")  # the same epochs have another number of steps
    refused = [name for name in different if name not in allowed and name.partition(".")[0] not in allowed]
    if not args.strict_resume:
        refused = [name for name in refused if another_optimizer and name in _OPTIMIZER]
    if refused:
        raise ConfigError([_sentence(name, different[name], args, checkpoint) for name in refused])
    return Changes(different, another_optimizer)


def _optimizer_of(fingerprint: Mapping[str, Any]) -> tuple[str, Any]:
    """The optimizer of a run: its name, the same for all implementations, and the weights that it treats specially."""
    of_file = fingerprint.get("deepspeed.optimizer.type")
    lowered = str(fingerprint.get("optimizer") or of_file or fingerprint.get("optim")).lower()
    return _SAME_STATES.get(lowered, lowered), fingerprint.get("optim_target_modules")


def allowed_names(given: Collection[str]) -> set[str]:
    """Convert ``allow_changed_on_resume`` to names of :func:`compatibility_of`.

    Raises:
        ConfigError: an unknown name.
    """
    unknown = [name for name in given if name not in NAMES]
    if unknown:
        raise ConfigError(
            f"allow_changed_on_resume: {', '.join(map(repr, unknown))} is not compared when a run resumes."
            f"{did_you_mean(unknown[0], NAMES)} Known names: {', '.join(NAMES)}."
        )
    return {_OTHER_NAMES.get(name, name) for name in given}


def _sentence(name: str, values: tuple[Any, Any], args: TrainingArguments, checkpoint: Path) -> str:
    before, now = values
    where = _ABOUT.get(name) or (args.where(name) if hasattr(args, name) else "")
    about = f" ({where})" if where else ""
    key = name.partition(".")[0]  # of deepspeed and distillation
    why, so = "", "resume with the new value"
    if not args.strict_resume:
        why, so = "; the optimizer's states in the checkpoint mean nothing to another one", "begin with new states"
    return (
        f"{name} was {shown(before)} when {checkpoint} was written, and is {shown(now)}{about}{why}. Set it back, or "
        f"{so}: allow_changed_on_resume=['{key}'], or on the command line --allow_changed_on_resume {key}."
    )


def shown(value: Any) -> str:
    """``value``, plain data, in a message."""
    return value if isinstance(value, str) else json.dumps(value)
