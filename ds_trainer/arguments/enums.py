"""The closed lists of values that arguments take, under the names that Hugging Face uses."""

from __future__ import annotations

from enum import Enum


class NamedValue(str, Enum):
    """A string enum that prints as its value: it works in f-strings, JSON and comparisons with plain strings."""

    def __str__(self) -> str:
        return str(self.value)


class IntervalStrategy(NamedValue):
    """When to log or evaluate."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"


class SaveStrategy(NamedValue):
    """When to save: like :class:`IntervalStrategy`, or at every new best value of the metric."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"
    BEST = "best"


class HubStrategy(NamedValue):
    """What is pushed to the Hub, and when."""

    END = "end"
    EVERY_SAVE = "every_save"
    CHECKPOINT = "checkpoint"
    ALL_CHECKPOINTS = "all_checkpoints"


class DebugOption(NamedValue):
    """Extra checks during training."""

    UNDERFLOW_OVERFLOW = "underflow_overflow"
    TPU_METRICS_DEBUG = "tpu_metrics_debug"


class SamplingStrategy(NamedValue):
    """Order of the training samples."""

    RANDOM = "random"
    SEQUENTIAL = "sequential"
    GROUP_BY_LENGTH = "group_by_length"
    BATCH_REBALANCE = "batch_rebalance"


class PackingStrategy(NamedValue):
    """How samples are chosen for a packed row.

    ``best_fit`` keeps samples whole and fills rows as well as possible; ``cut`` cuts their concatenation.
    """

    BEST_FIT = "best_fit"
    CUT = "cut"


class SaveFailurePolicy(NamedValue):
    """What a run does when a checkpoint cannot be written: no space, no permission, no such directory."""

    STOP = "stop"
    CONTINUE = "continue"


class When(NamedValue):
    """When something that costs time or memory is done: a check, or the gathering of all weights for generation."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class HangPolicy(NamedValue):
    """What happens to a job that has stalled."""

    AUTO = "auto"
    REPORT = "report"
    ABORT = "abort"


class DivergencePolicy(NamedValue):
    """What happens to a step with a gradient that is not finite, or with a loss spike."""

    SKIP = "skip"
    STOP = "stop"
    ROLLBACK = "rollback"


class TokenCount(NamedValue):
    """Which tokens ``num_input_tokens_seen`` counts."""

    NO = "no"
    ALL = "all"
    NON_PADDING = "non_padding"


class LogLevel(NamedValue):
    """Level of this package's loggers. ``passive`` leaves the level unchanged."""

    DETAIL = "detail"
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"
    PASSIVE = "passive"


class WorkerStart(NamedValue):
    """How data loading workers are started."""

    FORK = "fork"
    SPAWN = "spawn"
    FORKSERVER = "forkserver"


class SchedulerType(NamedValue):
    """The learning rate schedule; see :mod:`ds_trainer.optim.schedules`."""

    LINEAR = "linear"
    COSINE = "cosine"
    COSINE_WITH_RESTARTS = "cosine_with_restarts"
    POLYNOMIAL = "polynomial"
    CONSTANT = "constant"
    CONSTANT_WITH_WARMUP = "constant_with_warmup"
    INVERSE_SQRT = "inverse_sqrt"
    REDUCE_ON_PLATEAU = "reduce_lr_on_plateau"
    COSINE_WITH_MIN_LR = "cosine_with_min_lr"
    COSINE_WARMUP_WITH_MIN_LR = "cosine_warmup_with_min_lr"
    WARMUP_STABLE_DECAY = "warmup_stable_decay"
    GREEDY = "greedy"


class OptimizerNames(NamedValue):
    """Names of optimizers: those of Hugging Face, and those of DeepSpeed that have no name there."""

    ADAMW_TORCH = "adamw_torch"
    ADAMW_TORCH_FUSED = "adamw_torch_fused"
    ADAMW_TORCH_XLA = "adamw_torch_xla"
    ADAMW_TORCH_NPU_FUSED = "adamw_torch_npu_fused"
    ADAFACTOR = "adafactor"
    ADAMW_ANYPRECISION = "adamw_anyprecision"
    ADAMW_TORCH_4BIT = "adamw_torch_4bit"
    ADAMW_TORCH_8BIT = "adamw_torch_8bit"
    ADEMAMIX = "ademamix"
    SGD = "sgd"
    ADAGRAD = "adagrad"
    ADAMW_BNB = "adamw_bnb_8bit"
    ADAMW_8BIT = "adamw_8bit"
    ADEMAMIX_8BIT = "ademamix_8bit"
    LION_8BIT = "lion_8bit"
    LION = "lion_32bit"
    PAGED_ADAMW = "paged_adamw_32bit"
    PAGED_ADAMW_8BIT = "paged_adamw_8bit"
    PAGED_ADEMAMIX = "paged_ademamix_32bit"
    PAGED_ADEMAMIX_8BIT = "paged_ademamix_8bit"
    PAGED_LION = "paged_lion_32bit"
    PAGED_LION_8BIT = "paged_lion_8bit"
    RMSPROP = "rmsprop"
    RMSPROP_BNB = "rmsprop_bnb"
    RMSPROP_8BIT = "rmsprop_bnb_8bit"
    RMSPROP_32BIT = "rmsprop_bnb_32bit"
    GALORE_ADAMW = "galore_adamw"
    GALORE_ADAMW_8BIT = "galore_adamw_8bit"
    GALORE_ADAFACTOR = "galore_adafactor"
    GALORE_ADAMW_LAYERWISE = "galore_adamw_layerwise"
    GALORE_ADAMW_8BIT_LAYERWISE = "galore_adamw_8bit_layerwise"
    GALORE_ADAFACTOR_LAYERWISE = "galore_adafactor_layerwise"
    LOMO = "lomo"
    ADALOMO = "adalomo"
    GROKADAMW = "grokadamw"
    SCHEDULE_FREE_RADAM = "schedule_free_radam"
    SCHEDULE_FREE_ADAMW = "schedule_free_adamw"
    SCHEDULE_FREE_SGD = "schedule_free_sgd"
    APOLLO_ADAMW = "apollo_adamw"
    APOLLO_ADAMW_LAYERWISE = "apollo_adamw_layerwise"
    STABLE_ADAMW = "stable_adamw"
    # DeepSpeed only
    LAMB = "lamb"
    MUON = "muon"


class OffloadDevice(NamedValue):
    """Where ZeRO keeps optimizer states or parameters."""

    NONE = "none"
    CPU = "cpu"
    NVME = "nvme"


class AutocastDtype(NamedValue):
    """Compute dtype of ``torch_autocast``: weights stay float32, safe modules run in this dtype. fp16 is refused."""

    NONE = "none"
    BF16 = "bf16"
    FP16 = "fp16"


class GradientDtype(NamedValue):
    """Dtype in which gradients are summed. ``auto`` depends on the number of terms."""

    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


CHOICES: dict[str, type[Enum]] = {
    "lr_scheduler_type": SchedulerType,
    "optim": OptimizerNames,
    "torch_autocast": AutocastDtype,
    "communication_data_type": GradientDtype,
    "grad_accum_dtype": GradientDtype,
    "offload_optimizer": OffloadDevice,
    "offload_param": OffloadDevice,
    "logging_strategy": IntervalStrategy,
    "eval_strategy": IntervalStrategy,
    "save_strategy": SaveStrategy,
    "hub_strategy": HubStrategy,
    "train_sampling_strategy": SamplingStrategy,
    "packing_strategy": PackingStrategy,
    "log_level": LogLevel,
    "log_level_replica": LogLevel,
    "dataloader_multiprocessing_context": WorkerStart,
    "generation_gather": When,
    "save_failure_policy": SaveFailurePolicy,
    "self_test": When,
    "verify_weights": When,
    "hang_policy": HangPolicy,
    "nonfinite_policy": DivergencePolicy,
    "loss_spike_policy": DivergencePolicy,
}
"""Fields that take one of a closed list of values."""
