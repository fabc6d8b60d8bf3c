"""Which tests run with ``-m matrix`` only, besides those that are marked so."""

from __future__ import annotations

MATRIX = {
    # Scripts of benchmarks, run small: what they compare is compared by tests of its own.
    "tests/benchmarks/test_soak.py::test_only_deliberate_leaks_grow": (
        "tests/training/test_layout_memory.py, tests/checkpoint/shards/test_opened_files.py: "
        "memory and open files of a run"
    ),
    "tests/benchmarks/test_checkpoint_formats.py::test_both_formats_are_exact_and_one_writes_less": (
        "tests/checkpoint/shards/test_layouts.py, tests/checkpoint/weights/test_model_files.py: both ways are exact"
    ),
    "tests/benchmarks/test_parallel.py::test_the_script_trains_every_layout_to_the_same_losses": (
        "tests/training/test_layouts.py: every layout trains to the losses of one process"
    ),
    "tests/benchmarks/test_overhead.py::test_the_script_runs_the_loops_on_two_ranks_and_they_do_the_same_work": (
        "tests/parity/test_two_ranks.py: both loops do the same work"
    ),
    "tests/benchmarks/test_loading_memory.py": (
        "tests/engine/loading/test_creation_memory.py: a load takes no memory beside the shards"
    ),
    "tests/benchmarks/test_loading_scale.py": (
        "tests/checkpoint/loading/test_verification_cost.py: how many reads a load makes, and of how many bytes"
    ),
    "tests/benchmarks/test_gpu_kit.py::test_every_other_stage_runs_on_the_cpu": (
        "the other tests of tests/benchmarks/test_gpu_kit.py; what its oracle compares: tests/training/test_layouts.py"
    ),
    "tests/checkpoint/loading/test_verification_cost.py::test_verifying_8b_takes_thousands_of_small_reads[64]": (
        "the same test with one rank, and tests/checkpoint/loading/test_range_reader.py"
    ),
    "tests/training/test_long_context.py::test_trajectory_is_that_of_one_process[all axes]": (
        "the same test with each axis on two ranks; all axes at once: tests/training/test_layouts.py"
    ),
    # Grids in which a part has every kind of fault.
    "tests/training/test_mixed_batches.py::"
    "test_at_stage_3_different_modules_end_all_ranks_and_are_named[not in one of the second epoch-4-100000]": (
        "the same test at this step with parameters that are gathered, and at the first step with both thresholds"
    ),
    **{
        f"tests/utils/test_failures.py::test_ranks_without_a_launcher_end[{where}-0]": (
            "the same test at ZeRO 3, and at ZeRO 0 with a failing loss"
        )
        for where in ("dataset", "callback")
    },
    **{
        f"tests/training/test_layouts.py::{name}[{case}]": (
            "the same test on four ranks under every axis; all axes at once: test_trajectory_is_that_of_one_process"
        )
        for name, case in (
            ("test_recomputation", "False-all3"),
            ("test_recomputation", "True-all3"),
            ("test_optimizer_offload", "all3"),
            ("test_bf16", "all3"),
        )
    },
    "tests/cluster/test_doctor.py::test_the_doctor_checks_both_machines[False]": (
        "the same test with two machines that differ; two that do not: tests/monitor/doctor/test_ranks.py"
    ),
    "tests/resilience/test_restarts.py::test_killed_ranks_are_restarted[False]": (
        "the same test with saves in the background, and tests/checkpoint/protocol/test_crashes.py for all others"
    ),
    **{
        f"tests/engine/test_launchers.py::test_two_ranks_train_like_one[{launcher}]": (
            "the same test under torchrun and alone; for this launcher tests/cluster/test_launchers.py"
        )
        for launcher in ("deepspeed", "openmpi", "mpich", "srun")
    },
    "tests/cluster/test_launchers.py::test_a_killed_rank_ends_the_job_with_its_exit_code[srun]": (
        "the same test with pdsh; exit codes of ranks under srun: tests/cluster/test_ends.py"
    ),
    **{
        f"tests/cluster/test_launchers.py::test_scripts_started_by_hand_with_mpi[{way}]": (
            "the same test by the other way of each MPI"
        )
        for way in ("hydra, in an allocation", "Open MPI, ssh")
    },
    **{
        f"tests/utils/test_failures.py::test_a_launched_job_ends[{case}]": (
            "the same test under torchrun and ds-trainer launch, with a failing loss and a failing dataset; "
            "failing callbacks: the other tests of the file"
        )
        for case in ("deepspeed-dataset-0-1", "deepspeed-loss-3-1", "deepspeed-callback-3-1", "torchrun-callback-0-0")
    },
    **{
        f"tests/training/test_exact_resume.py::test_a_resumed_run_is_bit_identical[{name}]": (
            "the same test with augmented data in workers, and with a stateful stream in workers"
        )
        for name in ("workers", "persistent workers", "stream, workers")
    },
    **{
        f"tests/cluster/test_launchers.py::test_four_ranks_connect_and_get_their_arguments[{launcher}]": (
            "the same test with pdsh and srun; torchrun on two machines: tests/cluster/test_scripts.py; "
            "the commands of the others: tests/launching/test_commands.py"
        )
        for launcher in ("torchrun", "openmpi", "slurm")
    },
    "tests/cluster/test_launchers.py::test_remote_ranks_end_when_the_launcher_is_killed"
    "[ds_trainer launch|deepspeed.launcher.runner]": "the same test with pdsh",
    "tests/cluster/test_launchers.py::test_the_command_for_many_machines_can_be_pasted": (
        "tests/launching/test_commands.py, and the same command started by ds-trainer in this file"
    ),
    **{
        f"tests/parity/test_evaluation.py::test_evaluation_is_the_same_under_every_layout[{kind}]": (
            "the same test with a causal LM and an encoder-decoder; this kind: test_predict_as_transformers"
        )
        for kind in ("many outputs", "token classifier", "sequence classifier")
    },
    **{
        f"tests/benchmarks/test_scale.py::{name}[dp-1-2]": "the same test with ZeRO 3 and with all axes"
        for name in (
            "test_groups_files_and_sockets_are_as_many_as_with_few_ranks",
            "test_a_step_gathers_nothing_and_opens_nothing",
            "test_rank_0_receives_little_and_requests_it_at_once",
        )
    },
    "tests/cluster/test_launchers.py::test_a_killed_rank_ends_the_job_with_its_exit_code[pdsh]": (
        "test_remote_ranks_end_when_the_launcher_is_killed[pdsh]; exit codes of ranks: tests/cluster/test_ends.py"
    ),
    "tests/cluster/test_launchers.py::test_an_abort_leaves_no_process_on_any_machine[pdsh]": (
        "the same test with srun, and test_remote_ranks_end_when_the_launcher_is_killed[pdsh]"
    ),
    "tests/cluster/test_launchers.py::test_scripts_started_by_hand_with_mpi[hydra, ssh]": (
        "the same test with srun and PMI-2, and test_mpi_over_two_machines_needs_an_address"
    ),
    "tests/cluster/test_doctor.py::test_the_doctor_checks_both_machines[True]": (
        "tests/cli/test_doctor.py: differences between ranks are reported; machines: tests/monitor/doctor"
    ),
    "tests/as_transformers/test_run_command.py::test_two_ranks_with_zero_3_give_the_same_losses": (
        "the tests of libraries, which CI runs too: tests/clients/test_clients.py"
    ),
    "tests/engine/test_launchers.py::test_two_ranks_train_like_one[python]": "the same test under torchrun",
    "tests/benchmarks/test_parallel.py::test_bytes_are_those_of_the_best_algorithm": (
        "tests/parallel/test_ring_attention.py, tests/parallel/test_ulysses.py: what is sent; collectives of a step: "
        "tests/training/test_host_syncs.py"
    ),
    "tests/examples/test_scripts.py::test_multi_node_on_two_agents_resumes": (
        "tests/cluster/test_scripts.py: the batch script on two machines; resuming: tests/resilience/test_restarts.py"
    ),
    "tests/examples/test_copy_reverse.py::test_it_learns_to_write_backwards_on_two_ranks": (
        "test_its_loss_falls_on_two_ranks"
    ),
    "tests/engine/loading/test_parameter_sharding.py::test_every_way_to_load_a_model_trains_like_one_process"
    "[4-tp2 x dp2]": "the same test on two ranks; tensor parallelism: tests/training/loading/test_training.py",
    "tests/utils/test_failures.py::test_a_launched_job_ends[torchrun-dataset-3-1]": (
        "the same test under ds-trainer launch, and test_ranks_without_a_launcher_end with a failing dataset"
    ),
    "tests/training/test_long_data.py::test_a_billion_samples_train_and_resume[sequential]": "the same test, shuffled",
    "tests/monitor/health/test_hangs.py::test_a_stopped_process_is_named[1]": (
        "the same test for rank 0, and test_a_sleeping_rank_is_named"
    ),
    **{
        f"tests/utils/test_aborts.py::test_ranks_end_whatever_the_abort_does[{how}": (
            "the same test with an abort that hangs"
        )
        for how in ("works", "raises")
    },
    **{
        f"tests/as_transformers/test_replacement.py::test_without_it_nothing_of_transformers_is_changed[{module}]": (
            "the same test for ds_trainer.cli.main, which imports this module"
        )
        for module in ("ds_trainer", "ds_trainer.training.trainer")
    },
}
"""Beginning of a test's name -> the tests of the default run that notice the same mistakes."""

GRIDS = {
    "tests/training/test_layouts.py::test_trajectory_is_that_of_one_process": 4,
    "tests/training/test_exact_resume.py::test_a_resumed_run_is_bit_identical": 3,
    "tests/engine/state/test_round_trip.py::test_state_moves_from_every_optimizer_wrapper_to_another": 3,
    "tests/training/test_packed_runs.py::test_every_layout_trains_like_the_samples_alone": 2,
    "tests/engine/state/test_round_trip.py::test_state_of_every_optimizer_wrapper_survives_a_round_trip": 2,
    "tests/training/generation/test_layouts.py::test_every_layout_gives_what_one_process_gives": 3,
    "tests/training/generation/test_generation_in_training.py::test_generation_in_training": 3,
    "tests/training/loop/test_memory_recovery.py::test_zero_3_with_gathered_and_prefetched_parameters": 3,
    "tests/training/loop/test_memory_recovery.py::test_in_the_first_or_the_last_micro_batch_of_a_step": 2,
    "tests/training/loop/test_memory_recovery.py::test_two_ranks_of_which_one_is_short_of_memory": 2,
    "tests/training/test_killed_runs.py::test_a_run_killed_at_any_moment_resumes": 2,
    "tests/training/test_killed_runs.py::test_a_run_killed_during_a_save_resumes": 2,
    "tests/training/test_reshape.py::test_every_layout_resumes_from_every_other": 4,
    "tests/training/test_scalar_models.py::test_contrastive_models": 3,
    "tests/training/loop/test_divergence_guard.py::test_a_skipped_step_leaves_no_trace": 3,
    "tests/training/loop/test_divergence_guard.py::test_a_rollback_skips_the_batches_that_caused_it": 2,
    "tests/training/loop/test_divergence_guard.py::test_a_spike_is_skipped": 2,
    "tests/checkpoint/shards/test_layouts.py::test_a_run_resumes_bit_for_bit": 2,
    "tests/training/loop/test_auxiliary_loss.py::test_sharded_sequences": 2,
    "tests/checkpoint/export/test_checkpoint_export.py::test_export_is_the_live_save_and_the_single_process_save": 2,
    "tests/training/test_host_syncs.py::test_a_step_does_not_wait_for_the_device": 2,
    "tests/training/model/test_compilation.py::test_compilation_changes_no_loss_and_no_name": 2,
    "tests/training/test_library_runs.py::test_a_resumed_run_is_the_same": 2,
    "tests/checkpoint/shards/test_layouts.py::test_the_file_matches_that_of_one_process": 2,
    "tests/engine/test_reduction_dtypes.py::test_the_norm_of_512_bf16_micro_batches_is_that_of_float32": 2,
    "tests/engine/test_reduction_dtypes.py::test_without_float32_accumulation_the_norm_is_wrong": 4,
    "tests/training/test_layouts.py::test_recomputation": 2,
    "tests/training/test_mixed_batches.py::test_mixed_batches_train_like_one_process": 3,
    "tests/parity/test_steps.py::test_steps_losses_rates_and_weights": 3,
    "tests/training/loop/test_best_model.py::test_the_best_checkpoint_is_that_of_transformers": 2,
    "tests/utils/test_devices.py::test_a_rank_selects_its_gpu_and_keeps_its_local_rank": 2,
    "tests/checkpoint/shards/test_opened_files.py::test_a_rank_opens_only_its_own_file_in_the_same_layout": 2,
    "tests/checkpoint/shards/test_frozen_weights.py::test_frozen_weights_are_written_once": 2,
    "tests/parity/test_tensor_families.py::test_trajectory_is_that_of_one_process": 2,
    "tests/checkpoint/shards/test_tensor_parallel_shards.py::test_the_file_matches_that_of_one_process": 2,
    "tests/training/test_schedule_runs.py::test_a_resumed_run_continues_with_the_same_rates": 2,
    "tests/cluster/test_ends.py::test_final_exit_codes_are_not_requeued": 2,
    "tests/engine/loading/test_parameter_sharding.py::test_every_way_to_load_a_model_trains_like_one_process": 4,
    "tests/recipes/test_dry_run.py::test_a_good_run_passes": 3,
    "tests/recipes/test_dry_run.py::test_partitions_are_those_of_a_real_engine": 3,
    "tests/planner/activations/test_table.py::test_a_layer_of_other_sizes": 4,
    "tests/planner/activations/test_table.py::test_a_grid_of_runs": 4,
    "tests/planner/activations/test_probe.py::test_other_sizes_keep_what_the_formula_says": 2,
    "tests/planner/test_flops.py::test_every_family_that_is_named": 3,
    "tests/checkpoint/protocol/test_crashes.py::test_every_crash_leaves_a_complete_checkpoint": 2,
    "tests/training/test_tf_trainer.py::test_losses_are_those_of_a_torch_loop_over_the_same_model": 3,
    "tests/training/test_oracle.py::test_trajectory_is_that_of_one_process": 2,
    "tests/training/test_streams.py::test_a_stream_run_resumes_where_it_stopped": 2,
    "tests/training/loading/test_training.py::test_losses_and_weights_are_those_of_one_process": 2,
    "tests/training/model/sequence_sharding/test_attention_modules.py::test_logits_and_gradients_of_one_process": 3,
    "tests/training/resume/test_changed_runs.py::test_streams_continue_with_the_next_sample": 3,
    "tests/training/resume/test_changed_runs.py::test_another_seed_orders_the_next_epoch": 2,
    "tests/training/resume/test_changed_runs.py::test_a_longer_run_is_bit_for_bit_one_run": 3,
    "tests/training/loop/test_token_counter.py::test_input_tokens_are_counted_as_transformers_does": 2,
    "tests/training/test_library_runs.py::test_every_stage_trains_like_one_process": 2,
    "tests/training/test_library_runs.py::test_stage_0_trains_like_one_process": 2,
    "tests/training/stopping/test_stopping.py::test_a_signal_to_one_rank_stops_all": 2,
    "tests/training/stopping/test_stops_and_evaluations.py::"
    "test_an_interrupted_evaluation_is_repeated_after_resuming": 2,
    "tests/parity/test_events.py::test_events_and_their_arguments": 2,
    "tests/parity/test_events.py::test_callbacks_that_set_the_control": 2,
    "tests/parity/test_steps.py::test_logs_have_the_same_steps": 2,
    "tests/parity/test_files.py::test_checkpoints": 2,
    "tests/engine/test_reduction_dtypes.py::test_the_norm_is_right_on_two_ranks": 2,
    "tests/training/test_exact_resume.py::test_custom_loaders_resume": 3,
    "tests/training/loop/test_auxiliary_loss.py::test_trajectory_is_that_of_one_process": 3,
    "tests/checkpoint/converters/test_conversion.py::test_a_deepspeed_run_resumes_after_conversion": 2,
    "tests/checkpoint/converters/test_transformers_reader.py::test_a_transformers_run_resumes": 3,
    "tests/engine/test_scalar_parameters.py::test_a_run_resumes_bit_for_bit_and_in_another_setup": 3,
    "tests/engine/test_scalar_parameters.py::test_losses_weights_and_shapes_are_those_of_one_process": 3,
    "tests/training/test_changed_arguments.py::test_an_allowed_schedule_change_continues_at_the_step": 2,
    "tests/training/model/test_gradient_checkpointing.py::test_gradient_checkpointing_does_not_change_gradients": 3,
    "tests/training/loop/test_best_model.py::test_early_stopping_stops_where_transformers_stops": 2,
    "tests/parallel/test_attention.py::test_attention_over_a_sharded_sequence_is_that_of_one_process": 2,
    "tests/training/startup/test_batch_size_search.py::test_a_smaller_micro_batch_gives_the_same_losses": 2,
    "tests/training/test_host_syncs.py::test_an_evaluation_does_not_wait_for_the_device": 2,
    "tests/training/test_mixed_batches.py::test_experts_with_tokens_on_one_rank_only": 2,
    "tests/checkpoint/loading/test_verification.py::test_every_tensor_is_verified_against_the_files": 2,
    "tests/checkpoint/export/test_adapter_export.py::test_adapters_are_exported_alone_and_merged": 2,
    "tests/engine/tensor_parallel/test_partitioning.py::test_metrics_and_custom_losses_read_gathered_logits": 2,
    "tests/training/resume/test_resumption.py::test_resumed_run_is_bit_identical": 2,
    "tests/training/evaluation/test_generation.py::test_the_tokens_are_those_of_one_process": 2,
    "tests/training/evaluation/test_layouts.py::test_evaluation_before_between_and_after_steps_changes_no_weight": 2,
    "tests/training/evaluation/test_layouts.py::test_evaluation_before_training": 3,
    "tests/checkpoint/shards/test_in_place.py::test_shards_of_any_layout_are_written_in_place": 2,
    "tests/training/test_sequence_sharded_runs.py::test_custom_losses_and_steps": 2,
    "tests/accelerator/test_backward.py::test_the_same_step_trains_as_under_transformers": 2,
    "tests/planner/memory/test_measured.py::test_a_run_of_today_is_that_of_the_file": 2,
}
"""Test -> N: one in N of its cases runs by default, the others with ``-m matrix``."""


def is_left_out(nodeid: str, number: int) -> bool:
    """Whether a test runs with ``-m matrix`` only.

    Args:
        nodeid: its name.
        number: its place among the cases of its function.
    """
    return nodeid.startswith(tuple(MATRIX)) or number % GRIDS.get(nodeid.partition("[")[0], 1) != 0
