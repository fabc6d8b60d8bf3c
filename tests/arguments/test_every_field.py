"""A walk over every field: what another value than the default does, or the sentence that refuses it.

No field may be a silent no-op. A field is either *refused*, has an *effect* that is computed here from real parts, is
*shown* by a test of its own (which must exist), or is for scripts only, according to its help text.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from ds_trainer.arguments.checks.unsupported import ENGINE
from ds_trainer.arguments.enums import SaveStrategy
from ds_trainer.arguments.seq2seq_training_arguments import Seq2SeqTrainingArguments
from ds_trainer.callbacks.defaults import DefaultFlowCallback, PrinterCallback
from ds_trainer.callbacks.state import TrainerControl, TrainerState
from ds_trainer.config.compiler import compile_config
from ds_trainer.optim.schedules import build_schedule
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.loop.best_model import judge
from ds_trainer.training.loop.run_plan import RunPlan
from ds_trainer.training.model.compilation import compile_options
from ds_trainer.training.trainer import Trainer
from ds_trainer.utils.errors import ConfigError
from tests.support.models import Regression, regression_rows

Arguments = Seq2SeqTrainingArguments


@dataclass(frozen=True)
class Refused:
    """Any other value than the default is refused in these words."""

    value: Any
    words: str


@dataclass(frozen=True)
class Effect:
    """Another value changes what real code computes."""

    value: Any
    of: Callable[[Arguments], Any]
    beside: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Shown:
    """A test of its own shows the effect: ``tests.<module>::<function>``."""

    test: str


@dataclass(frozen=True)
class ForScripts:
    """The Trainer does not use it; the help text is under that heading."""


def in_config(path: str) -> Callable[[Arguments], Any]:
    def read(args: Arguments) -> Any:
        return compile_config(args, ParallelLayout.of(args, 4), device="cuda").get(path)

    return read


def plan(args: Arguments) -> RunPlan:
    return RunPlan.of(args, 10)


def curve(args: Arguments) -> list[float]:
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    kwargs = args.lr_scheduler_kwargs
    assert not isinstance(kwargs, str)
    schedule = build_schedule(args.lr_scheduler_type, optimizer, args.get_warmup_steps(20), 20, kwargs)
    rates = []
    for _ in range(20):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return rates


def switches(args: Arguments) -> list[tuple[int, bool, bool, bool]]:
    """When the default flow logs, evaluates and saves in ten steps of two epochs."""
    state = TrainerState()
    state.max_steps = 10
    state.compute_steps(args, 10)
    flow, seen = DefaultFlowCallback(), []
    for step in range(1, 11):
        control = TrainerControl()
        state.global_step, state.epoch = step, step / 5
        flow.on_step_end(args, state, control)
        if step % 5 == 0:
            flow.on_epoch_end(args, state, control)
        seen.append((step, control.should_log, control.should_evaluate, control.should_save))
    return seen


def trainer(args: Arguments) -> Trainer:
    args.use_cpu = True
    return Trainer(Regression(), args, train_dataset=regression_rows(10), eval_dataset=regression_rows(9))


def of_trainer(read: Callable[[Trainer], Any]) -> Callable[[Arguments], Any]:
    return lambda args: read(trainer(args))


def loader(name: str) -> Callable[[Arguments], Any]:
    return of_trainer(lambda job: getattr(job.get_train_dataloader(), name))


def order(args: Arguments) -> Any:
    return [batch["x"].tolist() for batch in trainer(args).get_train_dataloader()]


def columns(args: Arguments) -> list[str]:
    import datasets

    rows = [{"x": [0.0] * 6, "labels": 1.0, "unused": 2.0} for _ in range(4)]
    args.use_cpu = True
    job = Trainer(Regression(), args, train_dataset=datasets.Dataset.from_list(rows))
    return sorted(next(iter(job.get_train_dataloader())))


def best(args: Arguments) -> tuple[Any, Any]:
    """The best value and its step, of a loss and an accuracy that both fall and rise."""
    args.save_strategy = SaveStrategy.EPOCH
    state = TrainerState()
    for step, (loss, accuracy) in enumerate([(0.5, 0.1), (0.3, 0.4), (0.4, 0.2)], start=1):
        state.global_step = step
        judge(args, state, {"eval_loss": loss, "eval_accuracy": accuracy})
    return state.best_metric, state.best_global_step


def printer(job: Trainer) -> bool:
    return any(isinstance(callback, PrinterCallback) for callback in job.callback_handler.callbacks)


_WEIGHTS = "tests.checkpoint.weights."
_RUN = "tests.training.test_argument_behaviour::"
_MODEL = "tests.training.model."
_DIVERGENCE = "tests.training.loop.test_divergence_guard::"
_GENERATION = "tests.training.generation.test_seq2seq_trainer"
_TRACKERS = "tests.callbacks.integrations."
_PROTOCOL = "tests.checkpoint.protocol."
_STEPS: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2}
_WORKERS: dict[str, Any] = {"dataloader_num_workers": 1}

FIELDS: dict[str, Refused | Effect | Shown | ForScripts] = {
    "output_dir": Effect("elsewhere", of_trainer(lambda job: job._ds_trainer.output_dir)),
    "per_device_train_batch_size": Effect(3, in_config("train_micro_batch_size_per_gpu")),
    "num_train_epochs": Effect(1.5, plan),
    "max_steps": Effect(7, plan),
    "learning_rate": Effect(1.0, in_config("optimizer.params.lr")),
    "lr_scheduler_type": Effect("cosine", curve),
    "lr_scheduler_kwargs": Effect({"num_cycles": 2.0}, curve, {"lr_scheduler_type": "cosine"}),
    "warmup_steps": Effect(0.5, curve),
    "optim": Effect("sgd", in_config("optimizer.type")),
    "optim_args": Effect("momentum=0.5", in_config("optimizer.params"), {"optim": "sgd"}),
    "weight_decay": Effect(0.5, in_config("optimizer.params.weight_decay")),
    "adam_beta1": Effect(0.5, in_config("optimizer.params.betas")),
    "adam_beta2": Effect(0.5, in_config("optimizer.params.betas")),
    "adam_epsilon": Effect(0.5, in_config("optimizer.params.eps")),
    "optim_target_modules": Shown("tests.optim.test_library_optimizer_builder::test_matrices_have_their_own_group"),
    "gradient_accumulation_steps": Effect(3, in_config("gradient_accumulation_steps")),
    "average_tokens_across_devices": Refused(False, "makes the gradient depend on the number of ranks"),
    "max_grad_norm": Effect(0.0, in_config("gradient_clipping")),
    "label_smoothing_factor": Shown(_MODEL + "test_label_smoothing::test_trajectory_is_that_of_one_process"),
    "fp8": Shown("tests.training.model.test_fp8::test_it_is_refused_in_words"),
    "z_loss_factor": Shown("tests.training.model.test_chunked_loss::test_z_loss_with_and_without_tiles"),
    "loss_chunk_tokens": Shown("tests.training.test_chunked_loss_runs::test_trajectory_is_that_of_one_process"),
    "bf16": Effect(True, in_config("bf16.enabled")),
    "fp16": Effect(True, in_config("fp16.enabled")),
    "torch_autocast": Effect("bf16", in_config("torch_autocast.dtype")),
    "communication_data_type": Effect("fp32", in_config("communication_data_type")),
    "grad_accum_dtype": Effect("fp32", in_config("data_types.grad_accum_dtype")),
    "bf16_full_eval": Shown("tests.training.evaluation.test_evaluation::test_half_precision_evaluation"),
    "fp16_full_eval": Shown("tests.training.evaluation.test_evaluation::test_half_precision_evaluation"),
    "tf32": Shown(_RUN + "test_tf32_determinism_log_level_and_seed"),
    "activation_checkpointing": Shown(_RUN + "test_activation_checkpointing"),
    "activation_checkpointing_kwargs": Shown(_RUN + "test_activation_checkpointing_kwargs"),
    "gradient_checkpointing": Shown(_RUN + "test_activation_checkpointing"),
    "gradient_checkpointing_kwargs": Shown(_RUN + "test_activation_checkpointing_kwargs"),
    "activation_offload": Shown("tests.training.test_long_context::test_trajectory_is_that_of_one_process"),
    "tiled_mlp": Shown("tests.training.test_long_context::test_trajectory_is_that_of_one_process"),
    "long_context": Shown("tests.training.test_long_context::test_what_long_context_turns_on"),
    "torch_compile": Shown("tests.training.model.test_compilation::test_inductor_is_the_default"),
    "torch_compile_backend": Shown(_MODEL + "test_compilation::test_compilation_changes_no_loss_and_no_name"),
    "torch_compile_mode": Effect("max-autotune", compile_options),
    "torch_compile_regional": Shown("tests.training.model.test_compilation::test_equal_blocks_are_compiled_once"),
    "use_liger_kernel": Shown(_MODEL + "test_liger::test_liger_is_rejected_on_the_cpu_before_anything_starts"),
    "liger_kernel_config": Shown("tests.training.model.test_liger::test_a_liger_config_without_liger_is_rejected"),
    "use_cache": Shown(_RUN + "test_use_cache"),
    "neftune_noise_alpha": Shown("tests.training.model.test_neftune::test_losses_are_those_of_transformers"),
    "torch_empty_cache_steps": Shown(_RUN + "test_torch_empty_cache_steps"),
    "auto_find_batch_size": Shown(
        "tests.training.startup.test_batch_size_search::test_a_smaller_micro_batch_gives_the_same_losses"
    ),
    "zero_stage": Effect(3, in_config("zero_optimization.stage")),
    "offload_optimizer": Effect("cpu", in_config("zero_optimization.offload_optimizer.device")),
    "offload_param": Effect("cpu", in_config("zero_optimization.offload_param.device"), {"zero_stage": 3}),
    "nvme_path": Shown("tests.config.test_compiler::test_nvme_path"),
    "deepspeed": Effect({"steps_per_print": 5}, in_config("steps_per_print")),
    "ddp_timeout": Shown("tests.arguments.test_process_info::test_the_group_is_started_when_there_is_none"),
    "tensor_parallel_size": Effect(2, in_config("tensor_parallel.autotp_size")),
    "context_parallel_size": Effect(2, lambda args: ParallelLayout.of(args, 4).cp),
    "sequence_parallel_size": Effect(2, lambda args: ParallelLayout.of(args, 4).sp),
    "expert_parallel_size": Effect(2, lambda args: ParallelLayout.of(args, 4).ep),
    "global_router_aux_loss": Shown("tests.training.loop.test_auxiliary_loss::test_batches_of_all_ranks"),
    "parallelism_config": Effect({"tp_size": 2}, in_config("tensor_parallel.autotp_size")),
    "logging_strategy": Effect("epoch", switches, {"logging_steps": 2}),
    "logging_steps": Effect(2, switches),
    "logging_first_step": Effect(True, switches),
    "log_on_each_node": Shown("tests.arguments.test_process_info::test_which_ranks_log_and_write"),
    "nonfinite_policy": Shown(_DIVERGENCE + "test_the_stop_policy_names_the_rank_and_saves_the_batch"),
    "loss_spike_factor": Shown(_DIVERGENCE + "test_a_spike_is_skipped"),
    "loss_spike_window": Shown("tests.monitor.health.test_divergence::test_a_short_window_forgets"),
    "loss_spike_policy": Shown(_DIVERGENCE + "test_a_spike_can_stop_training"),
    "divergence_limit": Shown(_DIVERGENCE + "test_after_too_many_incidents_training_stops"),
    "divergence_window": Shown(_DIVERGENCE + "test_after_too_many_incidents_training_stops"),
    "loss_per_source": Shown("tests.training.test_source_losses::test_losses_are_those_of_each_source_alone"),
    "logging_nan_inf_filter": Shown(_RUN + "test_logging_nan_inf_filter"),
    "include_num_input_tokens_seen": Shown(
        "tests.training.loop.test_token_counter::test_input_tokens_are_counted_as_transformers_does"
    ),
    "log_level": Shown(_RUN + "test_tf32_determinism_log_level_and_seed"),
    "log_level_replica": Shown(_RUN + "test_replicas_have_their_own_log_level"),
    "disable_tqdm": Effect(True, of_trainer(printer)),
    "report_to": Effect("tensorboard", of_trainer(lambda job: len(job.callback_handler.callbacks))),
    "run_name": Shown(_RUN + "test_run_name"),
    "project": Shown(_TRACKERS + "test_wandb::test_environment_and_project"),
    "trackio_space_id": Shown(_TRACKERS + "test_trackio::test_trackio_space_id"),
    "trackio_bucket_id": Shown(_TRACKERS + "test_trackio::test_trackio_bucket_id"),
    "trackio_static_space_id": Shown(_TRACKERS + "test_trackio::test_trackio_static_space_id"),
    "eval_strategy": Effect("epoch", switches),
    "eval_steps": Effect(3, switches, {"eval_strategy": "steps", "logging_steps": 2}),
    "eval_delay": Effect(5, switches, _STEPS),
    "per_device_eval_batch_size": Effect(2, of_trainer(lambda job: len(job.get_eval_dataloader()))),
    "prediction_loss_only": Shown(_RUN + "test_evaluation_keeps_the_loss_only"),
    "eval_on_start": Shown(_RUN + "test_eval_on_start"),
    "eval_do_concat_batches": Shown("tests.training.evaluation.test_predictions::test_predict_as_transformers"),
    "eval_use_gather_object": Shown(
        "tests.training.evaluation.test_predictions::test_objects_are_gathered_for_every_sample"
    ),
    "eval_accumulation_steps": Shown("tests.training.evaluation.test_predictions::test_host_memory_in_chunks"),
    "include_for_metrics": Shown("tests.training.evaluation.test_predictions::test_metrics_as_transformers"),
    "batch_eval_metrics": Shown("tests.training.evaluation.test_predictions::test_batch_eval_metrics_as_transformers"),
    "load_best_model_at_end": Shown("tests.training.loop.test_best_model::test_the_best_weights_are_back_at_the_end"),
    "metric_for_best_model": Effect("accuracy", best),
    "greater_is_better": Effect(True, best, {"metric_for_best_model": "loss"}),
    "save_strategy": Effect("no", switches, {"save_steps": 2}),
    "save_steps": Effect(2, switches),
    "save_only_model": Shown(_RUN + "test_save_only_model"),
    "save_on_each_node": Shown(_PROTOCOL + "test_writer_groups::test_every_node_commits_its_own_directory"),
    "save_total_limit": Shown(
        "tests.training.resume.test_resumption::test_old_checkpoints_are_removed_beyond_the_limit"
    ),
    "save_keep_every": Shown(_PROTOCOL + "test_checkpoint_directory::test_save_keep_every_keeps_checkpoints"),
    "trust_checkpoint": Shown("tests.checkpoint.converters.test_conversion::test_code_in_a_checkpoint_is_not_executed"),
    "hang_timeout": Shown("tests.monitor.health.test_hangs::test_a_sleeping_rank_is_named"),
    "hang_factor": Shown("tests.monitor.health.test_heartbeat::test_a_hang_is_many_median_steps"),
    "hang_policy": Shown("tests.monitor.health.test_hangs::test_a_hung_job_is_ended"),
    "profile_steps": Shown("tests.training.loop.test_step_profiler::test_the_page_says_where_the_time_goes"),
    "straggler_steps": Shown("tests.monitor.health.test_stragglers_in_runs::test_a_slow_rank_is_named"),
    "run_report": Shown("tests.monitor.report.test_reports_of_runs::test_no_report_is_written_with_run_report_false"),
    "report_device_hour_price": Shown("tests.monitor.report.test_reports_of_runs::test_a_finished_run"),
    "save_failure_policy": Shown(_PROTOCOL + "test_save_failures::test_the_run_continues_with_save_failure_continue"),
    "verify_weights": Shown(
        "tests.training.loading.test_weight_check::test_the_weight_check_raises_only_if_users_cannot_have_changed_the_weights"
    ),
    "calibrate_planner": Shown("tests.training.planning.test_run_estimates::test_a_calibrated_prediction_is_nearer"),
    "memory_check": Shown("tests.training.planning.test_memory_check::test_other_runs_start"),
    "parallelism": Shown(
        "tests.training.planning.test_automatic_parallelism::test_ranks_choose_alike_and_train_as_without_it"
    ),
    "self_test": Shown("tests.training.startup.test_preflight::test_a_wrong_gradient_stops_startup"),
    "save_async": Shown("tests.training.resume.test_background_saves::test_without_memory_for_a_copy_training_waits"),
    "save_model_in_checkpoints": Shown(_WEIGHTS + "test_model_files::test_checkpoints_without_a_model_resume"),
    "max_shard_size": Shown(_WEIGHTS + "test_model_saving::test_files_are_filled_and_a_large_tensor_has_its_own_file"),
    "enable_jit_checkpoint": Shown("tests.training.stopping.test_stopping::test_a_run_without_checkpoints_stops"),
    "time_limit_margin": Shown("tests.training.stopping.test_stopping::test_a_run_stops_before_the_time_limit"),
    "auto_resume": Shown("tests.training.stopping.test_stopping::test_the_same_command_starts_and_resumes"),
    "strict_resume": Shown("tests.training.resume.test_changed_runs::test_strict_resume_refuses_every_change_at_once"),
    "allow_changed_on_resume": Shown(
        "tests.training.test_changed_arguments::test_an_allowed_schedule_change_continues_at_the_step"
    ),
    "start_from_weights": Shown("tests.training.test_changed_arguments::test_a_run_can_start_from_weights_only"),
    "model_init_kwargs": Shown("tests.training.loading.test_named_models::test_arguments_reach_from_pretrained"),
    "allow_new_weights": Shown("tests.training.loading.test_named_models::test_arguments_reach_from_pretrained"),
    "ignore_data_skip": Shown(_RUN + "test_ignore_data_skip"),
    "restore_callback_states_from_checkpoint": Shown(_RUN + "test_restore_callback_states_from_checkpoint"),
    "push_to_hub": Shown("tests.training.hub.test_repository::test_without_push_to_hub_no_request_is_sent"),
    "hub_model_id": Shown("tests.training.hub.test_repository::test_the_name_of_the_repository"),
    "hub_strategy": Shown("tests.training.hub.test_pushes::test_each_hub_strategy_pushes_its_files"),
    "hub_token": Shown("tests.training.hub.test_repository::test_rejections_by_the_hub_are_raised_at_construction"),
    "hub_private_repo": Shown("tests.training.hub.test_repository::test_a_private_repository"),
    "hub_always_push": Shown("tests.training.hub.test_pushes::test_every_save_is_pushed_if_requested"),
    "hub_revision": Shown("tests.training.hub.test_repository::test_a_branch_is_made_and_pushed_to"),
    "dataloader_drop_last": Effect(True, of_trainer(lambda job: len(job.get_train_dataloader()))),
    "dataloader_num_workers": Effect(1, loader("num_workers")),
    "dataloader_pin_memory": Effect(
        False,
        in_config("zero_optimization.offload_optimizer.pin_memory"),
        {"zero_stage": 1, "offload_optimizer": "cpu"},
    ),
    "dataloader_persistent_workers": Effect(True, loader("persistent_workers"), _WORKERS),
    "dataloader_prefetch_factor": Effect(5, loader("prefetch_factor"), _WORKERS),
    "dataloader_multiprocessing_context": Effect(
        "spawn",
        lambda args: getattr(loader("multiprocessing_context")(args), "get_start_method", lambda: None)(),
        _WORKERS,
    ),
    "dataloader_in_order": Refused(False, "makes the order of samples depend on timing"),
    "remove_unused_columns": Effect(False, columns),
    "label_names": Effect(["y"], of_trainer(lambda job: job.label_names)),
    "train_sampling_strategy": Effect("sequential", order),
    "stream_shards": Shown("tests.data.test_stream_shards::test_each_replica_reads_what_it_trains_on"),
    "packing": Shown("tests.training.test_packed_runs::test_every_layout_trains_like_the_samples_alone"),
    "packing_strategy": Shown("tests.training.test_packed_runs::test_every_layout_trains_like_the_samples_alone"),
    "eval_packing": Shown("tests.training.test_packed_runs::test_metrics_of_single_samples_are_not_packed"),
    "max_length": Shown("tests.training.test_packed_runs::test_what_packing_did_is_reported"),
    "length_buckets": Shown("tests.data.test_length_buckets::test_runs_are_equal_and_have_few_shapes"),
    "length_column_name": Shown("tests.data.test_lengths::test_a_length_column_orders_the_batches"),
    **dict.fromkeys(("seed", "data_seed"), Effect(7, order)),
    "replica_specific_rng": Shown("tests.engine.tensor_parallel.test_tensor_parallel_rng::test_masks_of_each_replica"),
    "full_determinism": Shown(_RUN + "test_tf32_determinism_log_level_and_seed"),
    "use_cpu": Effect(True, lambda args: (args.device_type, args.dataloader_pin_memory)),
    "debug": Refused("tpu_metrics_debug", "makes no sense under a DeepSpeed engine"),
    "skip_memory_metrics": Shown("tests.training.loop.test_token_counter::test_memory_of_every_stage_is_reported"),
    "local_rank": Refused(5, "but the environment"),
    **dict.fromkeys(("do_train", "do_eval", "do_predict", "resume_from_checkpoint"), ForScripts()),
    "accelerator_config": Effect(
        {"gradient_accumulation_kwargs": {"num_steps": 3}}, in_config("gradient_accumulation_steps")
    ),
    "fsdp": Refused("full_shard", "full_shard is zero_stage=3"),
    "fsdp_config": Refused({"min_num_params": 1}, "zero_optimization"),
    "ddp_find_unused_parameters": Shown("tests.arguments.test_unsupported::test_harmless_options_of_ddp_are_accepted"),
    "ddp_bucket_cap_mb": Refused(25, "reduce_bucket_size"),
    "ddp_broadcast_buffers": Refused(True, "DeepSpeed broadcasts weights once"),
    "ddp_static_graph": Refused(True, "compile.deepcompile"),
    "ddp_backend": Refused("nccl", "follows from the device"),
    "sortish_sampler": Shown("tests.data.test_lengths::test_the_sortish_sampler_of_a_trainer"),
    "predict_with_generate": Shown(f"{_GENERATION}::test_metrics_tokens_and_labels_are_those_of_transformers"),
    "generation_max_length": Shown(f"{_GENERATION}::test_keywords_override_arguments"),
    "generation_num_beams": Shown(f"{_GENERATION}::test_keywords_override_arguments"),
    "generation_config": Shown(f"{_GENERATION}::test_a_generation_config_may_have_every_form"),
    "generation_gather": Shown("tests.training.generation.test_gather::test_weights_are_gathered_once"),
}


def test_every_field_has_a_case() -> None:
    assert list(FIELDS.keys() - {f.name for f in dataclasses.fields(Arguments)}) == []
    assert [f.name for f in dataclasses.fields(Arguments) if f.name not in FIELDS] == []
    limited = {limit.field for limit in ENGINE}
    partly = {"optim"}  # some of its values
    assert {n for n, kind in FIELDS.items() if isinstance(kind, Refused)} - limited == {"local_rank"}
    assert limited - {n for n, kind in FIELDS.items() if isinstance(kind, Refused)} == partly


@pytest.mark.parametrize("name", [n for n, kind in FIELDS.items() if isinstance(kind, Refused)])
def test_unsupported_fields_are_rejected(name: str) -> None:
    kind: Any = FIELDS[name]
    with pytest.raises(ConfigError) as error:
        Arguments("out", **{name: kind.value})
    assert len(error.value.problems) == 1
    assert name in str(error.value) and kind.words in str(error.value)
    default = getattr(Arguments("out"), name)
    assert Arguments("out", **{name: default}) is not None  # the default itself is accepted


@pytest.mark.parametrize("name", [n for n, kind in FIELDS.items() if isinstance(kind, Effect)])
def test_every_argument_has_an_effect(name: str) -> None:
    kind: Any = FIELDS[name]
    without = kind.of(Arguments(**{"output_dir": "out", **kind.beside}))
    with_it = kind.of(Arguments(**{"output_dir": "out", **kind.beside, name: kind.value}))
    assert with_it != without


@pytest.mark.parametrize("name", [n for n, kind in FIELDS.items() if isinstance(kind, Shown)])
def test_arguments_tested_elsewhere_name_existing_tests(name: str) -> None:
    kind: Any = FIELDS[name]
    module, function = kind.test.split("::")
    assert callable(getattr(importlib.import_module(module), function))


def test_arguments_for_scripts_only_are_documented_as_such() -> None:
    topics = Arguments.topics()
    scripts = {n for n, kind in FIELDS.items() if isinstance(kind, ForScripts)}
    assert {n for n, topic in topics.items() if topic.startswith("For scripts")} == scripts
