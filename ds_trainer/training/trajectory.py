"""What decides where a run's weights go: compared when it is resumed, so that nothing changes unnoticed.

Layout, ZeRO stage, offload and all that changes rounding only are free. What counts is the order and the size of the
global batches, the optimizer, its schedule, the loss and the number format.
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
from ds_trainer.data.stream import length_of
from ds_trainer.training.run_plan import RunPlan
from ds_trainer.utils.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from pathlib import Path

    from ds_trainer.training.trainer import Trainer

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
    *("max_grad_norm", "label_smoothing_factor", "neftune_noise_alpha", "bf16", "fp16", "torch_autocast"),
    *("seed", "data_seed", "train_sampling_strategy", "sortish_sampler", "remove_unused_columns"),
)
_ENGINE = (
    *("optimizer", "scheduler", "gradient_clipping", "fp16", "bf16", "torch_autocast", "data_types"),
    *("compression_training", "data_efficiency", "progressive_layer_drop", "prescale_gradients"),
)
_BY_LENGTH = (
    *(SchedulerType.LINEAR, SchedulerType.COSINE, SchedulerType.COSINE_WITH_RESTARTS, SchedulerType.POLYNOMIAL),
    *(SchedulerType.COSINE_WITH_MIN_LR, SchedulerType.COSINE_WARMUP_WITH_MIN_LR, SchedulerType.WARMUP_STABLE_DECAY),
)
_OTHER_NAMES = {
    "num_train_epochs": "max_steps",
    "per_device_train_batch_size": "global_batch",
    "gradient_accumulation_steps": "global_batch",
}
_ABOUT = {
    "global_batch": "per_device_train_batch_size x gradient_accumulation_steps x replicas",
    "max_steps": "the steps over which the schedule is spread, from max_steps or num_train_epochs",
    "train_dataset": "samples of an epoch",
}
NAMES = (*_PLAIN, "grad_accum_dtype", "max_steps", "global_batch", "train_dataset", "deepspeed", *_OTHER_NAMES)
"""What ``allow_changed`` may name."""


def trajectory_of(trainer: Trainer, plan: RunPlan) -> dict[str, Any]:
    """All that decides the trajectory, as plain data by name."""
    args = trainer.args
    found = {name: plain(getattr(args, name)) for name in _PLAIN if hasattr(args, name)}
    if str(args.grad_accum_dtype) != "auto":
        found["grad_accum_dtype"] = str(args.grad_accum_dtype)
    found["lr_scheduler_kwargs"] = plain(as_mapping(args.lr_scheduler_kwargs)) or {}
    found["data_seed"] = args.seed if args.data_seed is None else args.data_seed
    found["global_batch"] = trainer.batch_plan.step_size
    found["max_steps"] = plan.max_steps if _depends_on_length(trainer) else None
    samples = None if trainer.train_dataset is None else length_of(trainer.train_dataset)
    found["train_dataset"] = None if samples is None else trainer.batch_plan.samples_used(samples)
    if args.train_sampling_strategy == SamplingStrategy.GROUP_BY_LENGTH:
        found["length_column_name"] = args.length_column_name
    for path in trainer.compiled.paths():
        if path.partition(".")[0] in _ENGINE and trainer.compiled.origin(path).kind == "user":
            found[f"deepspeed.{path}"] = trainer.compiled.get(path)
    return dict(json.loads(json.dumps(found, default=str)))


def _depends_on_length(trainer: Trainer) -> bool:
    if "scheduler" in trainer.compiled or trainer.has_own_schedule:
        return False  # what its length is stands in it, or nobody knows
    args = trainer.args
    return str(args.lr_scheduler_type) in map(str, _BY_LENGTH) or 0 < args.warmup_steps < 1


@dataclass(frozen=True)
class Changes:
    """What is different from the run that wrote a checkpoint, and was allowed.

    Attributes:
        values: what it was and what it is, by name.
    """

    values: Mapping[str, tuple[Any, Any]]

    @property
    def optimizer(self) -> bool:
        """Whether the optimizer is another one, which can do nothing with the states of the old one."""
        return "optim" in self.values or "deepspeed.optimizer.type" in self.values

    @property
    def schedule(self) -> bool:
        """Whether the schedule is another one: moved to the step, instead of put back."""
        begins = ("deepspeed.scheduler.", "deepspeed.optimizer.params.lr")
        return self.optimizer or any(name in _SCHEDULE or name.startswith(begins) for name in self.values)

    def settings(self, args: TrainingArguments) -> set[str]:
        """Settings of the optimizer's parameter groups that stay what they are now."""
        kept = {key for name in self.values for key in _SETTINGS.get(name, ())}
        kept |= {n.rpartition(".")[2] for n in self.values if n.startswith("deepspeed.optimizer.params.")}
        if "optim_args" in self.values:
            kept |= set(args.optimizer_arguments())
        return kept | ({"lr", "initial_lr", "schedule"} if self.schedule else set())

    def lines(self) -> list[str]:
        """One for each: ``learning_rate: 0.002 -> 0.001``."""
        return [f"{name}: {_shown(before)} -> {_shown(now)}" for name, (before, now) in self.values.items()]


def compare(
    written: Mapping[str, Any], present: Mapping[str, Any], args: TrainingArguments, checkpoint: Path
) -> Changes:
    """What has changed, where all of it is in ``args.allow_changed``.

    Args:
        written: :func:`trajectory_of` the run that wrote the checkpoint.
        present: of this one.
        args: arguments of this one.
        checkpoint: for the message.

    Raises:
        ConfigError: something changed that is not allowed to; one sentence for each.
    """
    allowed = allowed_names(args.allow_changed)
    different = {
        name: (written.get(name), present.get(name))
        for name in dict.fromkeys([*present, *written])
        if written.get(name) != present.get(name)
    }
    if "global_batch" in allowed and "max_steps" in different and args.max_steps <= 0:
        allowed.add("max_steps")  # other steps for the same epochs
    refused = [name for name in different if name not in allowed and name.partition(".")[0] not in allowed]
    if refused:
        raise ConfigError([_sentence(name, different[name], args, checkpoint) for name in refused])
    return Changes(different)


def allowed_names(given: Collection[str]) -> set[str]:
    """``allow_changed`` as names of :func:`trajectory_of`.

    Raises:
        ConfigError: a name that is none.
    """
    unknown = [name for name in given if name not in NAMES]
    if unknown:
        raise ConfigError(
            f"allow_changed: {', '.join(map(repr, unknown))} does not decide the trajectory of a training."
            f"{did_you_mean(unknown[0], NAMES)} Known are {', '.join(NAMES)}."
        )
    return {_OTHER_NAMES.get(name, name) for name in given}


def _sentence(name: str, values: tuple[Any, Any], args: TrainingArguments, checkpoint: Path) -> str:
    before, now = values
    where = _ABOUT.get(name) or (args.where(name) if hasattr(args, name) else "")
    about = f" ({where})" if where else ""
    key = "deepspeed" if name.startswith("deepspeed.") else name
    return (
        f"{name} was {_shown(before)} when {checkpoint} was written, and is {_shown(now)}{about}. Set it back, or go "
        f"on with the new one by allow_changed=[{key}]."
    )


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
