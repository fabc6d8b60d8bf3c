"""``TrainingArguments``: the options of a training run, with the names, defaults and meanings of Hugging Face.

The reference is ``TrainingArguments`` of transformers 5; ``(own)`` in a help text marks an addition. Construction
checks all values together and reports all problems at once. :mod:`ds_trainer.arguments.checks.unsupported` lists the
values that are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ds_trainer.arguments.compat.dict_fields import VALID_DICT_FIELDS
from ds_trainer.arguments.compat.setters import Setters
from ds_trainer.arguments.construction import ArgumentsType, CheckedArguments
from ds_trainer.arguments.enums import (
    AutocastDtype,
    DebugOption,
    DivergencePolicy,
    GradientDtype,
    HangPolicy,
    HubStrategy,
    IntervalStrategy,
    OffloadDevice,
    OptimizerNames,
    PackingStrategy,
    SaveFailurePolicy,
    SaveStrategy,
    SchedulerType,
    When,
)
from ds_trainer.arguments.field_topics import topic, topics_of
from ds_trainer.arguments.process_info import ProcessInfo
from ds_trainer.arguments.serialize import Serializable
from ds_trainer.utils.files import parse_json

_length = topic("Batch and length")
_optimizer = topic("Optimizer and schedule")
_precision = topic("Precision")
_memory = topic("Memory and speed")
_engine = topic("DeepSpeed engine")
_parallel = topic("Parallelism")
_divergence = topic("Divergence")
_logging = topic("Logging and trackers")
_evaluation = topic("Evaluation and metrics")
_health = topic("Job health")
_saving = topic("Saving and resuming")
_model = topic("Loading the model")
_hub = topic("Hub")
_data = topic("Data loading")
_device = topic("Reproducibility and device")
_scripts = topic("For scripts (not used by the Trainer)")
_other_engines = topic("For other engines (accepted at their defaults)")

_Json = dict[str, Any] | str | None  # a mapping, JSON text, or a path


@dataclass(repr=False)
class TrainingArguments(Setters, ProcessInfo, Serializable, CheckedArguments, metaclass=ArgumentsType):
    """All options of a training run.

    Removed names of transformers 4 (``evaluation_strategy`` ...) are accepted with a deprecation warning. ``origins``
    holds the source of each given value: ``argument``, ``command line``, ``recipe.yaml:12``.

    Raises:
        ConfigError: one or more values are invalid; ``problems`` has one sentence for each.
    """

    _VALID_DICT_FIELDS = VALID_DICT_FIELDS

    output_dir: str | None = _saving("Directory for checkpoints, weights and metrics.")

    per_device_train_batch_size: int = _length("Samples per replica in one forward pass.", 8)
    num_train_epochs: float = _length("Passes over the training data; may be fractional.", 3.0)
    max_steps: int = _length("Number of optimizer steps; a positive value overrides num_train_epochs.", -1)
    learning_rate: float = _optimizer("Peak learning rate.", 5e-5)
    lr_scheduler_type: SchedulerType | str = _optimizer("Learning rate schedule.", "linear")
    lr_scheduler_kwargs: _Json = _optimizer("Extra arguments for the schedule.")
    warmup_steps: float = _optimizer("Linear warmup steps; below 1 a fraction of all steps.", 0)
    optim: OptimizerNames | str = _optimizer("Optimizer.", "adamw_torch_fused")
    optim_args: str | None = _optimizer("Extra optimizer arguments as 'name=value,name=value'.")
    weight_decay: float = _optimizer("Weight decay of all parameters except biases and norms.", 0.0)
    adam_beta1: float = _optimizer("Adam family: decay rate of the first moment.", 0.9)
    adam_beta2: float = _optimizer("Adam family: decay rate of the second moment.", 0.999)
    adam_epsilon: float = _optimizer("Adam family: added to the denominator.", 1e-8)
    optim_target_modules: None | str | list[str] = _optimizer("Modules to which GaLore and APOLLO apply.")
    gradient_accumulation_steps: int = _length("Micro-batches of each replica per optimizer step.", 1)
    max_length: int | str | None = _length(
        "(own) Tokens of a packed row, also as '64K' or '1M'; default: the positions of the model. From 128K on, "
        "long_context is on by default."
    )
    packing: bool = _length("(own) Pack samples of different lengths into rows of max_length tokens.", False)
    packing_strategy: PackingStrategy | str = _length(
        "(own) best_fit: whole samples, chosen so that rows are full; cut: samples are concatenated and cut into rows.",
        "best_fit",
    )
    eval_packing: bool | None = _length(
        "(own) Pack the samples of evaluations too; default: as packing, but not if there is a compute_metrics."
    )
    length_buckets: int | None = _length(
        "(own) Pad micro-batches to at most this many lengths; 0: any; default: 8 with torch_compile on a GPU, else 0."
    )
    average_tokens_across_devices: bool = _length("Normalize the loss by the tokens of all ranks.", True)
    max_grad_norm: float = _optimizer("Clip the global gradient norm to this value; 0 means no clipping.", 1.0)
    label_smoothing_factor: float = _optimizer("Probability mass spread over all classes.", 0.0)
    z_loss_factor: float = _optimizer(
        "(own) Factor of the squared log of the sum of exp(logits), added to the loss.", 0.0
    )

    bf16: bool = _precision("bfloat16 weights and compute with float32 master weights.", False)
    fp16: bool = _precision("float16 weights and compute with dynamic loss scale; needs a GPU.", False)
    torch_autocast: AutocastDtype | str = _precision("(own) float32 weights, bf16 compute where it is safe.", "none")
    communication_data_type: GradientDtype | str = _precision(
        "(own) Dtype of gradient reduction over ranks: auto (the dtype of the weights, fp32 with many ranks), fp32, "
        "bf16, fp16.",
        "auto",
    )
    grad_accum_dtype: GradientDtype | str = _precision(
        "(own) Dtype of gradient accumulation over micro-batches: auto (the dtype of the weights, fp32 with many "
        "micro-batches), fp32, bf16, fp16.",
        "auto",
    )
    bf16_full_eval: bool = _precision("Evaluate in bfloat16.", False)
    fp16_full_eval: bool = _precision("Evaluate in float16.", False)
    fp8: bool = _precision(
        "(own) Matrix products of linear layers in 8 bits, with torchao; needs bf16 and a GPU that has them.", False
    )
    tf32: bool | None = _precision("TensorFloat-32 matrix products on NVIDIA GPUs; default: torch's current setting.")

    activation_checkpointing: bool | None = _memory("Recompute activations in the backward pass.")
    activation_checkpointing_kwargs: _Json = _memory("Arguments for the model's activation_checkpointing_enable().")
    gradient_checkpointing: bool | None = _memory("Older name of activation_checkpointing.")
    gradient_checkpointing_kwargs: _Json = _memory("Older name of activation_checkpointing_kwargs.")
    activation_offload: bool | None = _memory(
        "(own) Keep the inputs of checkpointed layers in host memory; default: with long_context, on a GPU."
    )
    tiled_mlp: bool | None = _memory(
        "(own) Run MLPs and norms on a few tokens at a time, forward and backward; default: with long_context."
    )
    long_context: bool | None = _memory(
        "(own) Save memory for long sequences: turns on activation_checkpointing, activation_offload and tiled_mlp, "
        "unless they are given; default: if max_length is 128K or more."
    )
    torch_compile: bool = _memory("Compile the model with torch.compile.", False)
    torch_compile_backend: str | None = _memory("Backend of torch.compile; setting it turns torch_compile on.")
    torch_compile_mode: str | None = _memory("Mode of torch.compile; setting it turns torch_compile on.")
    torch_compile_regional: bool = _memory(
        "(own) Compile the repeated blocks of the model one by one, in a fraction of the time; turns torch_compile on.",
        False,
    )
    loss_chunk_tokens: int | None = _memory(
        "(own) Tokens whose logits exist together in the loss of a language model; 0: all, "
        "default: 1024 (GPUs: 4096) where it pays."
    )
    use_liger_kernel: bool = _memory("Replace modules with Liger kernels.", False)
    liger_kernel_config: dict[str, bool] | None = _memory("Liger kernels to use, by name.")
    use_cache: bool = _memory("Use key-value caches in training.", False)
    neftune_noise_alpha: float | None = _memory("NEFTune: scale of the noise added to embeddings.")
    torch_empty_cache_steps: int | None = _memory("Steps between calls that empty the GPU's allocator cache.")
    auto_find_batch_size: bool = _memory("Halve the micro-batch if memory runs out.", False)
    calibrate_planner: bool = _memory(
        "(own) After training, keep the ratios of measured to predicted step time and memory for later predictions.",
        False,
    )
    memory_check: bool = _memory("(own) Refuse to start a run whose predicted memory a GPU does not have.", True)
    profile_steps: int = _memory(
        "(own) Profile this many optimizer steps on the first rank, after two others: output_dir/profile gets a trace "
        "and a page with where the time goes. 0: none.",
        0,
    )

    zero_stage: int | None = _engine("(own) ZeRO stage 0-3; default: 0 on one rank, 1 on several and in fp16.")
    offload_optimizer: OffloadDevice | str = _engine("(own) Device for optimizer states: none, cpu or nvme.", "none")
    offload_param: OffloadDevice | str = _engine("(own) Device for ZeRO-3 parameters: none, cpu or nvme.", "none")
    nvme_path: str | None = _engine("(own) Directory on a local NVMe disk for offload to nvme.")
    generation_gather: When | str = _engine(
        "(own) ZeRO-3: how generate gets the weights: auto (gathered once if they fit), always, never (for each token, "
        "layer by layer).",
        "auto",
    )
    deepspeed: _Json = _engine("DeepSpeed configuration: a JSON or hjson file, its text, or a mapping.")
    self_test: When | str = _engine(
        "(own) Compare the engine's gradient with plain PyTorch before training: always, never, or auto (once for each "
        "installation, ZeRO stage and precision).",
        "auto",
    )
    ddp_timeout: int = _engine("Timeout of a collective in seconds; the job then ends.", 1800)

    tensor_parallel_size: int = _parallel("(own) Number of ranks that partition every layer.", 1)
    context_parallel_size: int = _parallel("(own) Number of ranks that shard a sequence by ring attention.", 1)
    sequence_parallel_size: int = _parallel("(own) Number of ranks that shard a sequence by Ulysses all-to-all.", 1)
    expert_parallel_size: int = _parallel(
        "(own) Number of ranks, of those that see different tokens, that divide the experts of a mixture.", 1
    )
    global_router_aux_loss: bool = _parallel("(own) Balance routers over the micro-batches of all ranks.", False)
    parallelism: Literal["auto"] | None = _parallel(
        "(own) auto: choose ZeRO stage, offload, parallel sizes and activation checkpointing, except those that are "
        "given, and split the global batch, so that the run fits and is fast."
    )
    parallelism_config: Any = _parallel("accelerate's ParallelismConfig, or its fields as a mapping.")

    nonfinite_policy: DivergencePolicy | str = _divergence(
        "(own) When a loss or gradient is not finite: skip the step, stop, or rollback to the last checkpoint.", "skip"
    )
    loss_spike_factor: float | None = _divergence(
        "(own) A loss above this factor times the median of the previous steps is a spike; default: no detection."
    )
    loss_spike_window: int = _divergence("(own) Number of previous steps for the median loss.", 100)
    loss_spike_policy: DivergencePolicy | str = _divergence(
        "(own) When the loss spikes: skip the step, stop, or rollback to the last checkpoint.", "skip"
    )
    divergence_limit: int = _divergence("(own) Skips and rollbacks allowed in divergence_window steps.", 3)
    divergence_window: int = _divergence("(own) Number of steps over which divergence_limit counts.", 1000)

    logging_strategy: IntervalStrategy | str = _logging("When to log.", "steps")
    logging_steps: float = _logging("Steps between logs; below 1 a fraction of all steps.", 500)
    logging_first_step: bool = _logging("Log the first step too.", False)
    log_on_each_node: bool = _logging("Log on the main process of every node, not only of the first.", True)
    logging_nan_inf_filter: bool = _logging("Filter NaN and infinite losses out of the logged loss.", True)
    loss_per_source: bool | None = _logging("Log the mean loss of each source; default: if possible (own).")
    include_num_input_tokens_seen: str | bool = _logging("Count input tokens: no, all or non_padding.", "no")
    log_level: str = _logging("Level of this package's loggers on the main process.", "passive")
    log_level_replica: str = _logging(
        "Level on all other processes. At warning, they log what concerns them alone; at info or debug, everything.",
        "warning",
    )
    disable_tqdm: bool | None = _logging("Do not show a progress bar.")
    report_to: None | str | list[str] = _logging("Trackers that receive the logs.", "none")
    run_name: str | None = _logging("Run name for trackers.")
    project: str = _logging("Project name for trackers.", "huggingface")
    trackio_space_id: str | None = _logging("Hugging Face Space of Trackio.")
    trackio_bucket_id: str | None = _logging("Hugging Face bucket of Trackio.")
    trackio_static_space_id: str | None | Literal[False] = _logging("Static Space of Trackio.")

    hang_timeout: float = _health(
        "(own) A job hangs if a step takes longer than this many seconds and longer than hang_factor median steps: the "
        "ranks it waits for and all stacks are reported. 0: no watchdog.",
        300.0,
    )
    hang_factor: float = _health("(own) Median step times without progress after which a job can count as hung.", 20.0)
    hang_policy: HangPolicy | str = _health(
        "(own) After the report of a hang: report keeps waiting, abort ends the job with exit code 76, auto aborts on "
        "several machines.",
        "auto",
    )
    straggler_steps: int = _health("(own) Steps between reports of slow ranks; 0: no reports.", 50)
    run_report: bool = _health(
        "(own) Record the run in run_history.jsonl, and write report.html and report.json at its end.", True
    )
    report_device_hour_price: float | None = _health(
        "(own) Price of one device for one hour, in any currency, for the cost in the report."
    )

    eval_strategy: IntervalStrategy | str = _evaluation("When to evaluate during training.", "no")
    eval_steps: float | None = _evaluation("Steps between evaluations; default: logging_steps.")
    eval_delay: float = _evaluation("Epochs or steps before the first evaluation.", 0)
    per_device_eval_batch_size: int = _evaluation("Samples per replica in one forward pass of evaluation.", 8)
    prediction_loss_only: bool = _evaluation("Return only the loss.", False)
    eval_on_start: bool = _evaluation("Evaluate before the first step.", False)
    eval_do_concat_batches: bool = _evaluation("Concatenate the predictions of all batches.", True)
    eval_use_gather_object: bool = _evaluation("Gather predictions as Python objects.", False)
    eval_accumulation_steps: int | None = _evaluation("Batches of predictions kept on the device; default: 256 MB.")
    include_for_metrics: list[str] = _evaluation("Extra inputs of compute_metrics: inputs, loss.", default_factory=list)
    batch_eval_metrics: bool = _evaluation("Call compute_metrics for every batch.", False)
    load_best_model_at_end: bool = _evaluation("Load the best checkpoint when training ends.", False)
    metric_for_best_model: str | None = _evaluation("Metric that selects the best checkpoint.")
    greater_is_better: bool | None = _evaluation("Whether a larger metric is better.")

    save_strategy: SaveStrategy | str = _saving("When to write a checkpoint.", "steps")
    save_steps: float = _saving("Steps between checkpoints; below 1 a fraction of all steps.", 500)
    save_only_model: bool = _saving("Save only the weights in checkpoints.", False)
    save_on_each_node: bool = _saving(
        "output_dir is on a local disk of each node: each node writes its ranks' files and the common files.", False
    )
    save_total_limit: int | str | None = _saving(
        "Keep at most this many checkpoints, or as many as fit into a size such as '500GB'; delete the oldest first."
    )
    save_keep_every: int | None = _saving(
        "(own) Keep every checkpoint whose step is a multiple of this; it does not count for save_total_limit."
    )
    save_failure_policy: SaveFailurePolicy | str = _saving(
        "(own) When a checkpoint cannot be written (disk full, for example): stop, or continue without it.", "stop"
    )
    save_async: bool = _saving("(own) Write checkpoints in the background, from a copy in host memory.", True)
    save_model_in_checkpoints: bool = _saving(
        "(own) Also write the model's safetensors files to every checkpoint, so that from_pretrained can read it.", True
    )
    trust_checkpoint: bool = _saving(
        "(own) Read a checkpoint that holds more than tensors and plain values. Such a file can run any code.", False
    )
    max_shard_size: str = _saving("(own) Maximum size of one safetensors file, such as '5GB'.", "5GB")
    enable_jit_checkpoint: bool = _saving(
        "Save a checkpoint when a signal stops the run (SIGTERM, SIGUSR1, SIGINT), also if save_strategy is no.", False
    )
    time_limit_margin: float = _saving(
        "(own) Seconds before the job's time limit by which a last checkpoint is complete.", 60.0
    )
    auto_resume: bool = _saving("(own) Resume from the newest checkpoint in output_dir, if there is one.", False)
    strict_resume: bool = _saving(
        "(own) Refuse to resume if an argument that affects results differs from the checkpoint's.", False
    )
    allow_changed_on_resume: list[str] = _saving(
        "(own) Names of arguments that may differ although strict_resume is set. Without it, only another optimizer "
        "needs this (optim, optimizer, optim_target_modules, deepspeed); its states are then new.",
        default_factory=list,
    )
    start_from_weights: str | None = _saving(
        "(own) Start with only the weights of a checkpoint or of a directory of safetensors files."
    )
    verify_weights: When | str = _saving(
        "(own) Compare the weights with the model's files: always stops if they differ, never does not compare, auto "
        "stops if the Trainer or zero.Init loaded the weights, and warns about any other model.",
        "auto",
    )
    ignore_data_skip: bool = _saving("Start the data from the beginning when resuming.", False)
    restore_callback_states_from_checkpoint: bool = _saving(
        "When resuming, also restore the constructor arguments of callbacks, not only their state.", False
    )

    model_init_kwargs: _Json = _model(
        "(own) Arguments for ds_trainer.from_pretrained() if the model is given as a directory or Hub name."
    )
    allow_new_weights: list[str] | str | bool = _model(
        "(own) Patterns of weights that may be missing from the model's files and are newly initialized, such as "
        "classifier.*; * is all.",
        default_factory=list,
    )

    push_to_hub: bool = _hub("Push to the Hugging Face Hub when saving.", False)
    hub_model_id: str | None = _hub("Repository to push to.")
    hub_strategy: HubStrategy | str = _hub("What to push, and when.", "every_save")
    hub_token: str | None = _hub("Token for pushing; default: the token of `hf auth login`.")
    hub_private_repo: bool | None = _hub("Make the repository private.")
    hub_always_push: bool = _hub("Push even if the previous push is still running.", False)
    hub_revision: str | None = _hub("Branch to push to.")

    dataloader_drop_last: bool = _data("Drop the samples of an incomplete last micro-batch.", False)
    dataloader_num_workers: int = _data("Number of data loading workers; 0 loads in the training process.", 0)
    dataloader_pin_memory: bool = _data("Page-locked host memory for faster copies to a GPU.", True)
    dataloader_persistent_workers: bool = _data("Keep the workers between epochs.", False)
    dataloader_prefetch_factor: int | None = _data("Batches that each worker prefetches.")
    dataloader_multiprocessing_context: str | None = _data("How workers are started: fork, spawn, forkserver.")
    dataloader_in_order: bool = _data("Return batches in order, whichever worker is ready first.", True)
    remove_unused_columns: bool = _data("Drop dataset columns that the model's forward does not accept.", True)
    label_names: list[str] | None = _data("Keys of the batch that are labels.")
    train_sampling_strategy: str = _data("Order of samples: random, sequential, group_by_length.", "random")
    stream_shards: int | str | None = _data(
        "(own) Shards of a stream that replicas read side by side: auto (one per replica and worker), a number, own "
        "(the dataset gives each replica its own samples); default: each replica reads the whole stream."
    )
    length_column_name: str = _data("Column with the lengths for group_by_length.", "length")

    seed: int = _device("Seed of all random number generators.", 42)
    data_seed: int | None = _device("Seed of the sample order; default: seed.")
    replica_specific_rng: bool = _device(
        "(own) Draw other random numbers in the model (dropout, NEFTune noise, sampled tokens) on every data-parallel "
        "replica.",
        False,
    )
    full_determinism: bool = _device("Use deterministic kernels only; slower.", False)
    use_cpu: bool = _device("Use the CPU even if a GPU is present.", False)
    debug: list[DebugOption] | str | None = _device("Extra checks: underflow_overflow.", "")
    skip_memory_metrics: bool = _device("Leave memory usage out of the metrics.", True)
    local_rank: int = _device("Set by launchers; read from the environment instead.", -1)

    do_train: bool = _scripts("Whether the script trains.", False)
    do_eval: bool = _scripts("Whether the script evaluates.", False)
    do_predict: bool = _scripts("Whether the script predicts.", False)
    resume_from_checkpoint: str | None = _scripts("Checkpoint to pass to train().")

    accelerator_config: Any = _data(
        "accelerate's AcceleratorConfig: an object, a mapping, JSON, or the path of a JSON or YAML file."
    )
    fsdp: Any = _other_engines("Fully sharded data parallelism; use ZeRO instead.")
    fsdp_config: _Json = _other_engines("FSDP configuration; use the DeepSpeed configuration instead.")
    ddp_find_unused_parameters: bool | None = _other_engines("No effect: unused parameters are always accepted.")
    ddp_bucket_cap_mb: int | None = _other_engines("An option of DistributedDataParallel.")
    ddp_broadcast_buffers: bool | None = _other_engines("An option of DistributedDataParallel.")
    ddp_static_graph: bool | None = _other_engines("An option of DistributedDataParallel.")
    ddp_backend: str | None = _other_engines("Backend of DistributedDataParallel; it follows from the device.")

    def __post_init__(self) -> None:
        self.complete()

    @classmethod
    def topics(cls) -> dict[str, str]:
        """Topic of each field in ``--help``. Fields of other packages' subclasses have none."""
        return topics_of(cls)

    def optimizer_arguments(self, own: bool = False) -> dict[str, Any]:
        """``optim_args`` for the optimizer, or the Trainer's ``own``: parsed as JSON; what is not JSON is a string."""
        parsed: dict[str, Any] = {}
        for part in (self.optim_args or "").replace(" ", "").split(","):
            if part and part.startswith("gate_bias_rate=") == own:
                name, _, text = part.partition("=")
                try:
                    parsed[name] = parse_json(text.lower() if text in ("True", "False") else text)
                except ValueError:
                    parsed[name] = text
        return parsed
