"""``TrainingArguments``: what the user asks for. Names, defaults and meanings as Hugging Face's, plus a few of our own.

The reference is transformers 5's ``TrainingArguments``; own additions are marked below. Values are checked together
when the object is made: every problem is reported at once, none reaches an engine. What each field does here, or why
it is refused, is in :mod:`ds_trainer.arguments.support`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from ds_trainer.arguments.construction import ArgumentsType, CheckedArguments
from ds_trainer.arguments.enums import (
    AutocastDtype,
    DebugOption,
    DivergencePolicy,
    GenerationGather,
    GradientDtype,
    HangAction,
    HubStrategy,
    IntervalStrategy,
    OffloadDevice,
    OptimizerNames,
    SaveFailure,
    SaveStrategy,
    SchedulerType,
    SelfTest,
    VerifyWeights,
)
from ds_trainer.arguments.generation import generation_problems, is_json
from ds_trainer.arguments.places import Places
from ds_trainer.arguments.serialize import Serializable
from ds_trainer.arguments.setters import Setters

_titles: dict[int, str] = {}  # by the identity of a field


def topic(title: str) -> Callable[..., Any]:
    """A maker of dataclass fields with a help text, listed by ``--help`` under the heading ``title``.

    The heading is kept apart from the field's metadata, which transformers' parser hands on to argparse as it is.
    """

    def documented(text: str, default: Any = None, **more: Any) -> Any:
        if "default_factory" not in more:
            more["default"] = default
        made = field(metadata={"help": text}, **more)
        _titles[id(made)] = title
        return made

    return documented


_length = topic("Batch and length")
_optimizer = topic("Optimizer and schedule")
_precision = topic("Precision")
_memory = topic("Memory and speed")
_engine = topic("DeepSpeed engine")
_parallel = topic("Parallelism")
_diverge = topic("Divergence")
_log = topic("Logging and trackers")
_evaluate = topic("Evaluation and metrics")
_health = topic("Health of the run")
_save = topic("Saving and resuming")
_model = topic("Loading the model")
_hub = topic("Hub")
_data = topic("Data loading")
_place = topic("Reproducibility and place")
_scripts = topic("For scripts (not used by the Trainer)")
_foreign = topic("Of other engines (accepted at their defaults)")

_Json = dict[str, Any] | str | None  # a mapping, JSON text, or a path


@dataclass(repr=False)
class TrainingArguments(Setters, Places, Serializable, CheckedArguments, metaclass=ArgumentsType):
    """Everything that steers a training run.

    Names of transformers 4 that have gone (``evaluation_strategy`` ...) are accepted with a deprecation warning.
    ``origins`` says where each given value came from: ``argument``, ``command line``, ``recipe.yaml:12``.

    Raises:
        ConfigError: one or more values are wrong; ``problems`` has a sentence for each.
    """

    output_dir: str | None = _save("Where everything goes: checkpoints, weights, records.")

    per_device_train_batch_size: int = _length("Samples of one replica in one forward pass.", 8)
    num_train_epochs: float = _length("Passes over the training data; may be fractional.", 3.0)
    max_steps: int = _length("Optimizer steps; when positive it overrides num_train_epochs.", -1)
    learning_rate: float = _optimizer("Peak learning rate.", 5e-5)
    lr_scheduler_type: SchedulerType | str = _optimizer("Shape of the learning rate over training.", "linear")
    lr_scheduler_kwargs: _Json = _optimizer("Extra arguments of the schedule.")
    warmup_steps: float = _optimizer("Steps of linear warm-up; below 1 a fraction of all steps.", 0)
    optim: OptimizerNames | str = _optimizer("Optimizer.", "adamw_torch_fused")
    optim_args: str | None = _optimizer("Extra optimizer arguments as 'name=value,name=value'.")
    weight_decay: float = _optimizer("Decay of all weights except biases and norms.", 0.0)
    adam_beta1: float = _optimizer("Adam family: decay rate of the first moment.", 0.9)
    adam_beta2: float = _optimizer("Adam family: decay rate of the second moment.", 0.999)
    adam_epsilon: float = _optimizer("Adam family: added to the denominator.", 1e-8)
    optim_target_modules: None | str | list[str] = _optimizer("Modules that GaLore and APOLLO work on.")
    gradient_accumulation_steps: int = _length("Micro-batches of each replica in one optimizer step.", 1)
    average_tokens_across_devices: bool = _length("Normalise the loss by the tokens of all ranks.", True)
    max_grad_norm: float = _optimizer("Clip the global gradient norm to this; 0 means no clipping.", 1.0)
    label_smoothing_factor: float = _optimizer("Share of the target probability spread over all classes.", 0.0)

    bf16: bool = _precision("bfloat16 weights and compute with float32 master weights.", False)
    fp16: bool = _precision("float16 weights and compute with dynamic loss scale; needs a GPU.", False)
    torch_autocast: AutocastDtype | str = _precision("(own) float32 weights, compute in bf16 where it is safe.", "none")
    communication_data_type: GradientDtype | str = _precision(
        "(own) Type in which gradients are summed over ranks: auto (that of the weights, fp32 with many ranks), fp32, "
        "bf16, fp16.",
        "auto",
    )
    grad_accum_dtype: GradientDtype | str = _precision(
        "(own) Type in which gradients are summed over micro-batches: auto (that of the weights, fp32 with many "
        "micro-batches), fp32, bf16, fp16.",
        "auto",
    )
    bf16_full_eval: bool = _precision("Evaluate with bfloat16 weights.", False)
    fp16_full_eval: bool = _precision("Evaluate with float16 weights.", False)
    tf32: bool | None = _precision("TensorFloat-32 matrix products on NVIDIA GPUs; default: as torch is set.")

    activation_checkpointing: bool | None = _memory("Recompute activations in the backward pass.")
    activation_checkpointing_kwargs: _Json = _memory("Arguments of the model's activation_checkpointing_enable().")
    gradient_checkpointing: bool | None = _memory("Older name of activation_checkpointing.")
    gradient_checkpointing_kwargs: _Json = _memory("Older name of activation_checkpointing_kwargs.")
    torch_compile: bool = _memory("Compile the model with torch.compile.", False)
    torch_compile_backend: str | None = _memory("Backend of torch.compile; setting it switches torch_compile on.")
    torch_compile_mode: str | None = _memory("Mode of torch.compile; setting it switches torch_compile on.")
    use_liger_kernel: bool = _memory("Replace modules by those of the Liger kernel library.", False)
    liger_kernel_config: dict[str, bool] | None = _memory("Which Liger kernels are used.")
    use_cache: bool = _memory("Keep key-value caches in training.", False)
    neftune_noise_alpha: float | None = _memory("NEFTune: strength of the noise on embeddings.")
    torch_empty_cache_steps: int | None = _memory("Steps between calls that empty the GPU's allocator cache.")
    auto_find_batch_size: bool = _memory("Halve the micro batch when memory runs out.", False)

    zero_stage: int | None = _engine("(own) ZeRO stage 0-3; default: 0 on one rank, 1 on several and in fp16.")
    offload_optimizer: OffloadDevice | str = _engine("(own) Where ZeRO keeps optimizer states.", "none")
    offload_param: OffloadDevice | str = _engine("(own) Where ZeRO-3 keeps parameters.", "none")
    nvme_path: str | None = _engine("(own) Directory on a local NVMe disk, for offload to nvme.")
    deepspeed: _Json = _engine("DeepSpeed configuration: a JSON or hjson file, its text, or a mapping.")
    self_test: SelfTest | str = _engine(
        "(own) Compare the engine's gradient with plain PyTorch before training: always, never, or auto, which is "
        "once for each installation, stage and precision.",
        "auto",
    )
    ddp_timeout: int = _engine("Seconds that a collective may take before the job is ended.", 1800)

    tensor_parallel_size: int = _parallel("(own) Ranks that share every layer.", 1)
    context_parallel_size: int = _parallel("(own) Ranks that share a sequence by ring attention.", 1)
    sequence_parallel_size: int = _parallel("(own) Ranks that share a sequence by Ulysses all-to-all.", 1)
    parallelism_config: Any = _parallel("accelerate's ParallelismConfig, or its fields as a mapping.")

    nonfinite_policy: DivergencePolicy | str = _diverge(
        "(own) A loss or gradient that is not finite: skip the step, stop, or rollback to the last checkpoint.", "skip"
    )
    loss_spike_factor: float | None = _diverge(
        "(own) A loss above this times the median of the steps before is a spike; default: nobody looks."
    )
    loss_spike_window: int = _diverge("(own) Steps whose median a loss is compared with.", 100)
    loss_spike_policy: DivergencePolicy | str = _diverge(
        "(own) A spike of the loss: skip the step, stop, or rollback to the last checkpoint.", "skip"
    )
    divergence_limit: int = _diverge("(own) Skips and rollbacks in divergence_window steps; one more stops.", 3)
    divergence_window: int = _diverge("(own) Steps in which divergence_limit counts.", 1000)

    logging_strategy: IntervalStrategy | str = _log("When to log.", "steps")
    logging_steps: float = _log("Steps between logs; below 1 a fraction of all steps.", 500)
    logging_first_step: bool = _log("Log the first step too.", False)
    log_on_each_node: bool = _log("Log on the main process of every machine, not only of the first.", True)
    logging_nan_inf_filter: bool = _log("Replace losses that are not finite in the log.", True)
    include_num_input_tokens_seen: str | bool = _log("Count input tokens: no, all or non_padding.", "no")
    log_level: str = _log("Level of this package's loggers on the main process.", "passive")
    log_level_replica: str = _log("The same on all other processes.", "warning")
    disable_tqdm: bool | None = _log("No progress bar.")
    report_to: None | str | list[str] = _log("Trackers that get the logs.", "none")
    run_name: str | None = _log("Name of the run for trackers.")
    project: str = _log("Name of the project for trackers.", "huggingface")
    trackio_space_id: str | None = _log("Hugging Face Space of Trackio.")
    trackio_bucket_id: str | None = _log("Hugging Face bucket of Trackio.")
    trackio_static_space_id: str | None | Literal[False] = _log("Static Space of Trackio.")

    hang_timeout: float = _health(
        "(own) Seconds without a step, and no less than hang_factor median steps, after which the job counts as hung: "
        "who it waits for and all stacks are reported. 0: no watchdog.",
        300.0,
    )
    hang_factor: float = _health("(own) The same in median step times.", 20.0)
    hang_action: HangAction | str = _health(
        "(own) After the report of a hang: report goes on waiting, abort ends the job with exit code 76.", "report"
    )
    straggler_steps: int = _health("(own) Steps between reports on the times of all ranks; 0: none.", 50)

    eval_strategy: IntervalStrategy | str = _evaluate("When to evaluate during training.", "no")
    eval_steps: float | None = _evaluate("Steps between evaluations; default: logging_steps.")
    eval_delay: float = _evaluate("Epochs or steps before the first evaluation.", 0)
    per_device_eval_batch_size: int = _evaluate("Samples of one replica in one forward pass of evaluation.", 8)
    prediction_loss_only: bool = _evaluate("Keep nothing but the loss.", False)
    eval_on_start: bool = _evaluate("Evaluate before the first step.", False)
    eval_do_concat_batches: bool = _evaluate("Join the predictions of all batches.", True)
    eval_use_gather_object: bool = _evaluate("Gather predictions as Python objects.", False)
    eval_accumulation_steps: int | None = _evaluate("Batches of predictions kept before they go to host memory.")
    include_for_metrics: list[str] = _evaluate("What compute_metrics also gets: inputs, loss.", default_factory=list)
    batch_eval_metrics: bool = _evaluate("Call compute_metrics for every batch.", False)
    load_best_model_at_end: bool = _evaluate("Load the best checkpoint when training ends.", False)
    metric_for_best_model: str | None = _evaluate("Metric that decides which is best.")
    greater_is_better: bool | None = _evaluate("Whether a larger metric is better.")

    save_strategy: SaveStrategy | str = _save("When to write a checkpoint.", "steps")
    save_steps: float = _save("Steps between checkpoints; below 1 a fraction of all steps.", 500)
    save_only_model: bool = _save("Checkpoints hold weights only.", False)
    save_on_each_node: bool = _save(
        "output_dir is on a disk of each machine: write there what its ranks hold, and what exists once.", False
    )
    save_total_limit: int | str | None = _save(
        "Keep at most this many checkpoints, or as many as fit into a size as '500GB'; the oldest go first."
    )
    save_keep_every: int | None = _save(
        "(own) Checkpoints of steps that are a multiple of this stay, and do not count for save_total_limit."
    )
    save_failure: SaveFailure | str = _save(
        "(own) When a checkpoint cannot be written (no space, say): stop, or continue without it.", "stop"
    )
    save_async: bool = _save("(own) Write checkpoints while training goes on, from a copy in host memory.", True)
    save_model_in_checkpoints: bool = _save(
        "(own) Every checkpoint is also a model: from_pretrained reads its safetensors files.", True
    )
    trust_checkpoint: bool = _save(
        "(own) Read a checkpoint of others that holds more than tensors and plain values; it may run any code.", False
    )
    max_shard_size: str = _save("(own) Largest size of one safetensors file, as '5GB'.", "5GB")
    enable_jit_checkpoint: bool = _save(
        "Save a checkpoint when the run is told to stop (SIGTERM, SIGUSR1, SIGINT), also where save_strategy is no.",
        False,
    )
    time_limit_margin: float = _save(
        "(own) Seconds before the end of the scheduler's job by which a last checkpoint is complete.", 60.0
    )
    auto_resume: bool = _save("(own) Go on from the newest checkpoint in output_dir, if there is one.", False)
    allow_changed: list[str] = _save(
        "(own) On resuming, arguments that decide the trajectory and may differ from those in the checkpoint, by name.",
        default_factory=list,
    )
    start_from_weights: str | None = _save(
        "(own) Begin with the weights of a checkpoint or of a directory of safetensors, and with nothing else of it."
    )
    verify_weights: VerifyWeights | str = _save(
        "(own) When the weights are not what the model's files hold: always stops, never does not look; auto stops "
        "where the Trainer or zero.Init loaded them, and warns of a model that was loaded whole.",
        "auto",
    )
    ignore_data_skip: bool = _save("On resuming, start the data from the beginning.", False)
    restore_callback_states_from_checkpoint: bool = _save(
        "On resuming, callbacks take their constructor's arguments from the checkpoint too, not only their state.",
        False,
    )

    model_init_kwargs: _Json = _model(
        "(own) Of a model that is given by its directory or hub name: arguments of ds_trainer.from_pretrained()."
    )
    allow_new_weights: list[str] | str | bool = _model(
        "(own) Names of weights that the model's files may lack, as patterns (classifier.*; * is all): they are new.",
        default_factory=list,
    )

    push_to_hub: bool = _hub("Push to the Hugging Face Hub when saving.", False)
    hub_model_id: str | None = _hub("Repository to push to.")
    hub_strategy: HubStrategy | str = _hub("What is pushed, and when.", "every_save")
    hub_token: str | None = _hub("Token for pushing; default: that of `hf auth login`.")
    hub_private_repo: bool | None = _hub("Make the repository private.")
    hub_always_push: bool = _hub("Push even while the push before is under way.", False)
    hub_revision: str | None = _hub("Branch to push to.")

    dataloader_drop_last: bool = _data("Leave out the samples of a ragged last micro-batch.", False)
    dataloader_num_workers: int = _data("Processes that load data; 0 loads in the training process.", 0)
    dataloader_pin_memory: bool = _data("Page-locked host memory for faster copies to a GPU.", True)
    dataloader_persistent_workers: bool = _data("Keep loading processes between epochs.", False)
    dataloader_prefetch_factor: int | None = _data("Batches that each loading process holds ready.")
    dataloader_multiprocessing_context: str | None = _data("How loading processes start: fork, spawn, forkserver.")
    dataloader_in_order: bool = _data("Batches come in order, whichever process is ready first.", True)
    remove_unused_columns: bool = _data("Drop dataset columns that the model's forward does not take.", True)
    label_names: list[str] | None = _data("Keys of the batch that are labels.")
    train_sampling_strategy: str = _data("Order of samples: random, sequential, group_by_length.", "random")
    length_column_name: str = _data("Column that holds the lengths for group_by_length.", "length")

    seed: int = _place("Seed of everything random.", 42)
    data_seed: int | None = _place("Seed of the order of samples; default: seed.")
    full_determinism: bool = _place("Deterministic kernels only; slower.", False)
    use_cpu: bool = _place("Stay on the CPU even where a GPU is present.", False)
    debug: list[DebugOption] | str | None = _place("Extra checks: underflow_overflow.", "")
    skip_memory_metrics: bool = _place("Leave memory out of the metrics.", True)
    local_rank: int = _place("Set by launchers; read from the environment instead.", -1)

    do_train: bool = _scripts("Whether the script is to train.", False)
    do_eval: bool = _scripts("Whether the script is to evaluate.", False)
    do_predict: bool = _scripts("Whether the script is to predict.", False)
    resume_from_checkpoint: str | None = _scripts("A checkpoint to hand to train().")

    accelerator_config: _Json = _foreign("accelerate's AcceleratorConfig.")
    fsdp: Any = _foreign("Fully sharded data parallelism; here: ZeRO.")
    fsdp_config: _Json = _foreign("Its configuration; here: the DeepSpeed configuration.")
    ddp_find_unused_parameters: bool | None = _foreign("A switch of DistributedDataParallel.")
    ddp_bucket_cap_mb: int | None = _foreign("A size of DistributedDataParallel.")
    ddp_broadcast_buffers: bool | None = _foreign("A switch of DistributedDataParallel.")
    ddp_static_graph: bool | None = _foreign("A switch of DistributedDataParallel.")
    ddp_backend: str | None = _foreign("Backend of collectives; follows from the device.")

    def __post_init__(self) -> None:
        self.complete()

    @classmethod
    def topics(cls) -> dict[str, str]:
        """Heading of each field in ``--help``; fields of subclasses elsewhere have none."""
        return {item.name: _titles[id(item)] for item in fields(cls) if id(item) in _titles}

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


@dataclass(repr=False)
class Seq2SeqTrainingArguments(TrainingArguments):
    """:class:`TrainingArguments` with those of sequence-to-sequence evaluation."""

    sortish_sampler: bool = _data("Batches of similar length, in roughly random order.", False)
    predict_with_generate: bool = _evaluate("Generate in evaluation, for metrics on generated text.", False)
    generation_max_length: int | None = _evaluate("Longest generated sequence.")
    generation_num_beams: int | None = _evaluate("Beams of the search in generation.")
    generation_config: Any = _evaluate("GenerationConfig, its fields as a mapping, or where it is stored.")
    generation_gather: GenerationGather | str = _evaluate(
        "(own) ZeRO-3: keep all weights gathered while an evaluation generates: auto (where they fit), always, never.",
        "auto",
    )

    def problems(self) -> list[str]:
        """As of all arguments, and of generation. See :mod:`ds_trainer.arguments.generation`."""
        return [*super().problems(), *generation_problems(self)]

    def complete(self) -> None:
        """As of all arguments, and of generation."""
        super().complete()
        self.generation_gather = GenerationGather(str(self.generation_gather))
        if isinstance(self.generation_config, str) and is_json(self.generation_config):
            self.generation_config = json.loads(self.generation_config)
