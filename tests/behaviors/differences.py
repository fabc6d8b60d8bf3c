"""Behaviors that differ from transformers' on purpose, with the reason that a user needs to know."""

from __future__ import annotations

_ERRORS = "Every value that is refused raises `ConfigError`, a `ValueError`; all problems are reported together."
_OLD_NAMES = "Names of transformers 4 are accepted with a warning."
_ADDED = "Keys are added: see [log keys](throughput.md)."
_ENGINE = "The engine is always DeepSpeed."
_LAST_STEP = "The last step is always logged, unless `logging_strategy` is `no`."
_COMMAND_LINE = "Problems of a command line are one `ConfigError` with their sources, not the exit code 2 of argparse."
_CHECKSUM = "A checkpoint with a file that was edited afterwards is refused: its manifest has the sizes and checksums."
_MEAN = "The loss of an evaluation is the mean over its items, not over its batches."
_RANDOM_STATE = (
    "transformers draws the order from the random state of the process, which depends on what was drawn before; here "
    "it follows from the seed and the epoch, in every layout and after a resume."
)
_MEASURED = "What the loss is a mean of is [measured](../explanation/loss.md) on the first batch, in a few calls more."
_FILES = "`ds_trainer_files.json` has the checksums of what runs wrote, so that no file of a user is replaced."
_HEADER = "The header of a run shows it."

DIFFERENCES: dict[str, str] = {
    "accelerator/gathered_scalar": "One row for each rank, as with accelerate on any distributed engine.",
    "accelerator/state_has_a_plugin": _ENGINE,
    "arguments/strategies_as_text": "Members print as their values, which is what a command line takes.",
    "arguments/warmup_ratio_is_accepted": _OLD_NAMES,
    "attributes/a_method_replaced_on_the_object": _MEASURED,
    "attributes/cache_of_the_model_is_off": "The cache is off while the model trains; its configuration is kept.",
    "attributes/deepspeed_flag": _ENGINE,
    "attributes/label_names_of_a_model_without_labels": "A subclass may take `labels` or `label`.",
    "attributes/model_placement_flag": "The engine moves the model to the device.",
    "attributes/tokenizer_keyword": _OLD_NAMES,
    "callbacks/flow_without_the_default_callback": _LAST_STEP,
    "control_flow/a_share_of_the_steps": _LAST_STEP,
    "control_flow/log_now": _LAST_STEP,
    "control_flow/the_last_step_is_logged": _LAST_STEP,
    "control_flow/training_twice_starts_at_step_zero": "Each training starts from the seed, so its order is the same.",
    "early_stopping/without_a_metric": _ERRORS,
    "early_stopping/without_evaluations": _ERRORS,
    "evaluation/all_keys_of_the_result": _ADDED,
    "evaluation/loss_of_ragged_tokens": _MEAN,
    "files/configuration_of_the_model": "The saved configuration has the model's own `use_cache`.",
    "files/names_of_a_checkpoint": "Sharded states for any layout, and a [manifest](../explanation/checkpoints.md).",
    "files/names_of_the_output_directory": "Files are added: the link `latest`; arguments are in each checkpoint.",
    "files/optimizer_files_of_a_checkpoint": "See above: states and random states are in files of each rank.",
    "files/training_args_bin": "Arguments are written as `training_args.json`, without tokens: a pickle can run code.",
    "loaders/old_name_of_group_by_length": _OLD_NAMES,
    "logs/all_keys_of_a_training_log": _ADDED,
    "logs/all_keys_of_an_evaluation_log": _ADDED,
    "losses/bf16_on_the_cpu": "bf16 means bf16 weights with float32 masters; `torch_autocast` is autocast.",
    "messages/checkpoint_of_another_version": _CHECKSUM,
    "messages/max_steps_and_epochs": _HEADER,
    "messages/no_arguments": "`output_dir` becomes absolute, because a script may change its working directory.",
    "messages/no_output_directory": _HEADER,
    "metrics/saved_file": _FILES,
    "metrics/not_combined": _FILES,
    "parser/a_required_argument": _COMMAND_LINE,
    "parser/wrong_values_end_the_process": _COMMAND_LINE,
    "parser/help_names_every_argument": "`--no_NAME` is accepted, but help lists each argument once.",
    "prediction/all_keys_of_the_metrics": _ADDED,
    "refusals/accelerator_config_as_a_class": "A class with the settings as attributes is read like an object.",
    "refusals/accelerator_config_with_an_unknown_key": _ERRORS,
    "refusals/accelerator_state_that_does_not_exist": "No state of accelerate is needed by DeepSpeed's engine.",
    "refusals/best_model_by_a_metric_that_is_not_there": _ERRORS,
    "refusals/both_kinds_of_optimizers": _ERRORS,
    "refusals/collator_that_cannot_be_called": _ERRORS,
    "refusals/model_init_that_returns_nothing": _ERRORS,
    "refusals/model_init_with_optimizers": _ERRORS,
    "refusals/model_init_with_two_arguments": _ERRORS,
    "refusals/neither_model_nor_model_init": _ERRORS,
    "refusals/search_without_model_init": _ERRORS,
    "refusals/torch_empty_cache_steps_as_a_float": "Whole numbers may be written as floats, as in YAML: `1e3`.",
    "refusals/unknown_keyword": _ERRORS,
    "resuming/a_finished_run": "A finished run does no further step.",
    "resuming/other_intervals": "New intervals take effect at the step from which the run resumes.",
    "resuming/stateful_callback_starts_anew_by_default": (
        "The state of callbacks is always restored, so that a resumed run equals an uninterrupted one."
    ),
    "seq2seq/generated_predictions": _MEAN,
    "seq2seq/losses": _MEAN,
    "seq2seq/metrics_of_generated_tokens": _MEAN,
    "sampling/batch_rebalance": "The samples of a step are the same; its micro-batches are divided in another way.",
    "sampling/group_by_length": _RANDOM_STATE,
    "sampling/group_by_length_column": _RANDOM_STATE,
    "sampling/stream_with_drop_last": "`dataloader_drop_last` holds for streams, too.",
    "sampling/without_seedable_sampler": _RANDOM_STATE,
    "serialization/to_dict_of_accelerator_config": "`use_configured_state` of other versions is a field.",
    "setters/set_logging": "Values that a setter sets are completed like those of the constructor.",
    "subclasses/loss_without_the_item_count": "A `compute_loss` without `num_items_in_batch` works.",
    "state/stateful_callbacks_in_a_checkpoint": "The flags of the control, which last for one step, are not saved.",
    "messages/the_best_checkpoint_is_gone": "The warning comes at the end, where the best model would be loaded.",
    "optimizers/create_both_of_a_subclass": (
        "An overridden `create_optimizer_and_scheduler` is called; transformers 5.23 no longer calls it."
    ),
}
