"""``TrainingArguments``: what the user asks for. Names, defaults and meanings as Hugging Face's, plus a few of our own.

The reference is transformers 5's ``TrainingArguments``; own additions are marked below. Values are checked together
when the object is made: every problem is reported at once, none reaches an engine.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ds_trainer.arguments.checks import argument_problems
from ds_trainer.arguments.enums import AutocastDtype, IntervalStrategy, OffloadDevice, OptimizerNames, SchedulerType
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.ranks import resolve_ranks

if TYPE_CHECKING:
    import torch


def _doc(text: str, default: Any) -> Any:
    """A dataclass field with its help text."""
    return field(default=default, metadata={"help": text})


@dataclass
class TrainingArguments:
    """Everything that steers a training run.

    Raises:
        ConfigError: one or more values are wrong; ``problems`` has a sentence for each.
    """

    output_dir: str | None = _doc("Where everything goes: checkpoints, weights, records.", None)

    # batch and length
    per_device_train_batch_size: int = _doc("Samples of one replica in one forward pass.", 8)
    per_device_eval_batch_size: int = _doc("The same in evaluation.", 8)
    gradient_accumulation_steps: int = _doc("Micro-batches of each replica in one optimizer step.", 1)
    num_train_epochs: float = _doc("Passes over the training data; may be fractional.", 3.0)
    max_steps: int = _doc("Optimizer steps; when positive it overrides num_train_epochs.", -1)

    # optimizer and schedule
    learning_rate: float = _doc("Peak learning rate.", 5e-5)
    lr_scheduler_type: SchedulerType | str = _doc("Shape of the learning rate over training.", "linear")
    lr_scheduler_kwargs: dict[str, Any] | None = _doc("Extra arguments of the schedule.", None)
    warmup_steps: float = _doc("Steps of linear warm-up; below 1 a fraction of all steps.", 0)
    optim: OptimizerNames | str = _doc("Optimizer.", "adamw_torch_fused")
    optim_args: str | None = _doc("Extra optimizer arguments as 'name=value,name=value'.", None)
    weight_decay: float = _doc("Decay of all weights except biases and norms.", 0.0)
    adam_beta1: float = _doc("AdamW: decay rate of the first moment.", 0.9)
    adam_beta2: float = _doc("AdamW: decay rate of the second moment.", 0.999)
    adam_epsilon: float = _doc("AdamW: added to the denominator.", 1e-8)
    max_grad_norm: float = _doc("Clip the global gradient norm to this; 0 means no clipping.", 1.0)

    # precision and memory
    bf16: bool = _doc("bfloat16 weights and compute with float32 master weights.", False)
    fp16: bool = _doc("float16 weights and compute with dynamic loss scale; needs a GPU.", False)
    torch_autocast: AutocastDtype | str = _doc("(own) float32 weights, compute in this type.", "none")
    gradient_checkpointing: bool | None = _doc("Recompute activations in the backward pass.", None)

    # engine (own)
    zero_stage: int | None = _doc("(own) ZeRO stage 0-3; default: 0 on one rank, 1 on several.", None)
    offload_optimizer: OffloadDevice | str = _doc("(own) Where ZeRO keeps optimizer states: none or cpu.", "none")
    tensor_parallel_size: int = _doc("(own) Ranks that share every layer.", 1)
    context_parallel_size: int = _doc("(own) Ranks that share a sequence by ring attention.", 1)
    sequence_parallel_size: int = _doc("(own) Ranks that share a sequence by Ulysses all-to-all.", 1)

    # log, evaluate, save
    logging_strategy: IntervalStrategy | str = _doc("When to log.", "steps")
    logging_steps: float = _doc("Steps between logs; below 1 a fraction of all steps.", 500)
    logging_first_step: bool = _doc("Log the first step too.", False)
    eval_strategy: IntervalStrategy | str = _doc("When to evaluate during training.", "no")
    eval_steps: float | None = _doc("Steps between evaluations; default: logging_steps.", None)
    eval_delay: float = _doc("Epochs or steps before the first evaluation.", 0)
    save_strategy: IntervalStrategy | str = _doc("When to write a checkpoint.", "steps")
    save_steps: float = _doc("Steps between checkpoints; below 1 a fraction of all steps.", 500)
    save_total_limit: int | None = _doc("Keep at most this many checkpoints; the oldest go first.", None)
    max_shard_size: str = _doc("(own) Largest size of one safetensors file, as '5GB'.", "5GB")
    disable_tqdm: bool | None = _doc("No progress bar.", None)
    resume_from_checkpoint: str | None = _doc("For scripts: a checkpoint to hand to train().", None)

    # data
    dataloader_drop_last: bool = _doc("Leave out the samples of a ragged last micro-batch.", False)
    dataloader_num_workers: int = _doc("Processes that load data; 0 loads in the training process.", 0)
    dataloader_pin_memory: bool = _doc("Page-locked host memory for faster copies to a GPU.", True)
    remove_unused_columns: bool = _doc("Drop dataset columns that the model's forward does not take.", True)
    label_names: list[str] | None = _doc("Keys of the batch that are labels.", None)

    # reproducibility and place
    seed: int = _doc("Seed of everything random.", 42)
    data_seed: int | None = _doc("Seed of the order of samples; default: seed.", None)
    use_cpu: bool = _doc("Stay on the CPU even where a GPU is present.", False)
    local_rank: int = _doc("Set by launchers; read from the environment instead.", -1)

    def __post_init__(self) -> None:
        if self.output_dir is None:
            self.output_dir = "trainer_output"
        self.output_dir = os.path.expanduser(os.fspath(self.output_dir))
        for name in ("learning_rate", "weight_decay", "warmup_steps", "max_grad_norm", "adam_epsilon"):
            value = getattr(self, name)
            if isinstance(value, str):  # YAML 1.1 reads 1e-3 as a string
                with suppress(ValueError):  # the checks below report it with the field's name
                    setattr(self, name, float(value))
        problems = argument_problems(self)
        if problems:
            raise ConfigError(problems)
        self.lr_scheduler_type = SchedulerType(self.lr_scheduler_type)
        self.optim = OptimizerNames(self.optim)
        self.torch_autocast = AutocastDtype(self.torch_autocast)
        self.offload_optimizer = OffloadDevice(self.offload_optimizer)
        self.logging_strategy = IntervalStrategy(self.logging_strategy)
        self.eval_strategy = IntervalStrategy(self.eval_strategy)
        self.save_strategy = IntervalStrategy(self.save_strategy)
        if self.eval_strategy == IntervalStrategy.STEPS and self.eval_steps is None:
            self.eval_steps = self.logging_steps
        if self.disable_tqdm is None:
            self.disable_tqdm = False

    # -- where this process stands --------------------------------------------------------------------------------

    @property
    def process_index(self) -> int:
        """Global rank of this process."""
        return resolve_ranks(os.environ).rank

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its machine."""
        return resolve_ranks(os.environ).local_rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return resolve_ranks(os.environ).world_size

    @property
    def should_log(self) -> bool:
        """Whether this process speaks: the main process only."""
        return self.process_index == 0

    @property
    def should_save(self) -> bool:
        """Whether this process writes files that exist once: the main process only."""
        return self.process_index == 0

    @property
    def device_type(self) -> str:
        """``"cuda"`` when a GPU is to be used, else ``"cpu"``. Imports torch."""
        import torch

        return "cuda" if torch.cuda.is_available() and not self.use_cpu else "cpu"

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        import torch

        if self.device_type == "cuda":
            return torch.device("cuda", self.local_process_index)
        return torch.device("cpu")

    # -- derived values -------------------------------------------------------------------------------------------

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Steps of linear warm-up out of ``num_training_steps``."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil(num_training_steps * self.warmup_steps)

    def optimizer_arguments(self) -> dict[str, Any]:
        """``optim_args`` as a dict; values are read as JSON where they are JSON, as strings elsewhere."""
        parsed: dict[str, Any] = {}
        for part in (self.optim_args or "").replace(" ", "").split(","):
            if part:
                name, _, text = part.partition("=")
                try:
                    parsed[name] = json.loads(text.lower() if text in ("True", "False") else text)
                except json.JSONDecodeError:
                    parsed[name] = text
        return parsed

    def to_dict(self) -> dict[str, Any]:
        """Plain values by field name, ready for JSON."""
        return {name: str(value) if hasattr(value, "value") else value for name, value in asdict(self).items()}

    def to_json_string(self) -> str:
        """:meth:`to_dict` as indented JSON."""
        return json.dumps(self.to_dict(), indent=2)
