"""The rows of :mod:`ds_trainer.engine.library_rows` about engines of DeepSpeed, their gradients and their steps."""

from __future__ import annotations

from dataclasses import dataclass

ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine."
ZERO12 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer."
ZERO3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3."
OFFLOAD = "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload."
COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator."
PARTITION = "deepspeed.runtime.zero.partition_parameters:"
BF16 = "deepspeed.runtime.bf16_optimizer:BF16_Optimizer."
FUSED = "deepspeed.runtime.fp16.fused_optimizer:FP16_Optimizer."
UNFUSED = "deepspeed.runtime.fp16.unfused_optimizer:FP16_UnfusedOptimizer."
GROUPS = "deepspeed.utils.groups:"
EXECUTES = "torch.autograd.graph:register_multi_grad_hook"  # torch's own use of _will_engine_execute_node

SELF_TEST = "self-test"
TP_SELF_TEST = "self-test of tensor parallelism"
RAISES = "an error says so"
UNSEEN = "nothing shows it while training"


@dataclass(frozen=True)
class LibraryRow:
    """What one file of ds_trainer depends on.

    Attributes:
        file: its path below ``ds_trainer/``.
        risk: what goes wrong if one of the functions changes.
        shown_by: what would show it in a run: begins with :data:`SELF_TEST` if that test covers it, with :data:`RAISES`
            if it ends the run, with :data:`UNSEEN` otherwise.
        replaces: functions whose place another one takes, ``module:name``.
        relies_on: functions whose inside the file knows.
    """

    file: str
    risk: str
    shown_by: str
    replaces: tuple[str, ...] = ()
    relies_on: tuple[str, ...] = ()


def of(owner: str, *names: str) -> tuple[str, ...]:
    """The functions ``names`` of ``owner``, a prefix such as :data:`ENGINE`."""
    return tuple(owner + name for name in names)


ENGINE_ROWS = (
    # -- engine construction
    LibraryRow(
        "engine/optimizer_state_init.py",
        "the optimizer takes a step with zero gradients at construction",
        UNSEEN,
        replaces=of(UNFUSED, "initialize_optimizer_states"),
        relies_on=of(UNFUSED, "__init__"),
    ),
    LibraryRow(
        "engine/adagrad.py",
        "Adagrad loses the settings of its groups under ZeRO",
        UNSEEN,
        replaces=(*of(ZERO12, "initialize_optimizer_states"), *of(ZERO3, "initialize_optimizer_states")),
    ),
    LibraryRow(
        "engine/scalar_parameters.py",
        "models with zero-dimensional parameters are rejected",
        RAISES,
        replaces=(
            *of(ENGINE, "_broadcast_model"),
            *of(PARTITION, "Init._zero_init_param", "GatheredParameters._exit"),
        ),
    ),
    LibraryRow(
        "engine/loading/placement.py",
        "weights are loaded at the wrong time, or in the wrong dtype",
        "the check of loaded weights",
        replaces=of(ENGINE, "_configure_distributed_model"),
        relies_on=(
            *of(ENGINE, "__init__", "_mixed_precision_dtypes"),
            *of("deepspeed.runtime.keep_in_fp32:", "keep_buffers_in_fp32", "keep_in_fp32_pattern"),
        ),
    ),
    LibraryRow(
        "engine/loading/placement.py",
        "shards of ZeRO-3 are wrong",
        f"{SELF_TEST}, and the check of loaded weights",
        relies_on=(
            *of(PARTITION, "Init.__init__", "Init._zero_init_param", "Init._convert_to_deepspeed_param"),
            *of(GROUPS, "_get_zero_param_intra_parallel_group"),
        ),
    ),
    LibraryRow(
        "engine/loading/parameter_data.py",
        "a parameter loses its identity when its elements are replaced",
        RAISES,
        relies_on=("torch.utils:swap_tensors", "deepspeed.runtime.engine:CASTABLE_DTYPES"),
    ),
    LibraryRow(
        "engine/loading/creation_memory.py",
        "creating a ZeRO-3 engine needs more memory and traffic",
        "a warning at creation",
        replaces=of(ZERO3, "_create_fp32_partitions", "create_reduce_and_remove_grad_hooks"),
        relies_on=("deepspeed.runtime.zero.stage3:defragment", *of(ZERO3, "initialize_optimizer_states")),
    ),
    LibraryRow(
        "engine/topology.py",
        "ranks reduce over wrong groups",
        "an error at start if sizes or members differ",
        replaces=(
            *of(GROUPS, "mpu", "_DATA_PARALLEL_GROUP", "_TENSOR_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP"),
            *of(GROUPS, "_EXPERT_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP"),
        ),
        relies_on=of(
            GROUPS,
            "get_tensor_model_parallel_group",
            "_get_data_parallel_group",
            "_get_zero_param_intra_parallel_group",
        ),
    ),
    LibraryRow(
        "engine/expert_parallel.py",
        "gradients of experts are reduced or averaged over wrong ranks",
        "the self-test, which trains a mixture where experts are divided",
        relies_on=(
            *of(ENGINE, "_reduce_expert_gradients", "_broadcast_model", "_get_gradients_for_reduction"),
            *of(ZERO12, "average_tensor", "_configure_moe_settings"),
            *of(ZERO3, "_get_param_partition_group", "_autoep_expert_parallel_group"),
            "deepspeed.moe.utils:is_moe_param",
        ),
    ),
    LibraryRow(
        "engine/zero3/parts.py",
        "closed engines stay in memory, and the next one gathers with their coordinator",
        UNSEEN,
        relies_on=(
            "deepspeed.runtime.zero.parameter_offload:FWD_MODULE_STACK",
            *of(COORDINATOR, "__params_to_release"),
            *of(OFFLOAD, "_register_deepspeed_module"),
        ),
    ),
    LibraryRow(
        "engine/evaluation_engine.py",
        "model.training is True in evaluations",
        UNSEEN,
        replaces=of(ENGINE, "train", "eval"),
    ),
    LibraryRow(
        "engine/muon_compilation.py",
        "a start takes two seconds longer",
        UNSEEN,
        replaces=("deepspeed.runtime.compiler:compile",),
        relies_on=("deepspeed.runtime.zero.muon.original_muon:zeropower_via_newtonschulz5",),
    ),
    LibraryRow(
        "engine/meta_engine.py",
        "the engine of a dry run differs from the real one",
        "the tests of dry runs only",
        replaces=("deepspeed.ops.op_builder.builder:OpBuilder.load", "deepspeed.runtime.zero.stage3:defragment"),
    ),
    LibraryRow(
        "engine/training_engine.py",
        "secrets are written into checkpoints; a loss is scaled twice",
        f"{SELF_TEST} (the scale of the loss)",
        relies_on=of(ENGINE, "backward", "_backward_prologue", "step", "_take_model_step", "was_step_applied"),
    ),
    # -- gradients and steps
    LibraryRow(
        "engine/backward_passes.py",
        "gradients of backward passes that a script runs itself are divided or lost",
        UNSEEN,
        replaces=of(ENGINE, "_backward_prologue", "_backward_prologue_per_tensor"),
        relies_on=(
            *of(ENGINE, "forward", "_backward_post_hook", "_backward_epilogue", "allreduce_gradients"),
            *of(ZERO12, "finalize_gradient_accumulation_boundary", "setup_buckets", "clear_backward_seen_flag"),
            *of(ZERO3, "finalize_gradient_accumulation_boundary", "clear_backward_seen_flag", "partition_grads"),
            "deepspeed.runtime.utils:OutputBackwardHookManager._make_backward_hook",
            EXECUTES,
        ),
    ),
    LibraryRow(
        "engine/training_engine.py",
        "float32 without ZeRO is clipped by a wrong norm",
        SELF_TEST,
        replaces=of(ENGINE, "clip_fp32_gradients"),
        relies_on=of(ENGINE, "_take_model_step", "allreduce_gradients", "buffered_allreduce_fallback"),
    ),
    LibraryRow(
        "engine/finite_step.py",
        "a step that must be skipped is applied: non-finite gradients and loss spikes reach the weights",
        f"{SELF_TEST}, and an error if a skipped step was applied",
        replaces=(
            *of(ZERO12, "check_overflow", "scaled_global_norm", "_update_scale"),
            *of(ZERO3, "_overflow_check_and_loss_scale_update"),
        ),
        relies_on=(
            *of(ZERO12, "step"),
            *of(ZERO3, "step", "_loss_scale_update_and_overflow_cleanup"),
            *of(BF16, "step"),
            *of(FUSED, "step", "_skip_invalid_grad_norm"),
            *of(UNFUSED, "step", "_skip_invalid_grad_norm"),
            *of(ENGINE, "_take_model_step", "was_step_applied"),
        ),
    ),
    LibraryRow(
        "engine/gradient_norm.py",
        "gradients are clipped by a wrong norm at ZeRO 1 to 3",
        SELF_TEST,
        replaces=(*of(ZERO12, "scaled_global_norm"), *of(ZERO3, "_get_norm_groups")),
        relies_on=(
            *of(ZERO12, "get_grad_norm_direct", "_model_parallel_all_reduce", "_muon_update_lacks_loss_scale"),
            *of(ZERO3, "get_grad_norm_direct", "_get_param_partition_group", "_autoep_expert_parallel_group"),
            *of(ZERO3, "_grad_norm_counts_every_rank", "_muon_update_lacks_loss_scale"),
            "deepspeed.runtime.utils:is_model_parallel_parameter",
            "deepspeed.runtime.zero.utils:get_norm_dtype",
        ),
    ),
    LibraryRow(
        "engine/gradient_partitions.py",
        "gradients of ZeRO 1 and 2 are read at the wrong elements",
        SELF_TEST,
        replaces=of(
            ZERO12,
            "initialize_gradient_partitioning_data_structures",
            "initialize_gradient_partition",
            "get_first_param_index",
        ),
        relies_on=(
            *of(ZERO12, "__init__", "average_tensor", "allreduce_and_scatter", "reset_partition_gradient_structures"),
            *of(ZERO12, "allreduce_and_copy_with_multiple_ranks", "_get_compact_grad_partition_slice"),
        ),
    ),
    LibraryRow(
        "engine/host_time.py",
        "the end of a backward pass is seen too early, and gradients are not reduced",
        SELF_TEST,
        replaces=(
            "deepspeed.runtime.utils:count_used_parameters_in_backward",
            "deepspeed.utils.nvtx:enable_nvtx",
            *of(ENGINE, "_check_for_duplicates"),
            "deepspeed.accelerator.cpu_accelerator:CPU_Accelerator.device_count",
        ),
        relies_on=(
            "deepspeed.utils.nvtx:instrument_w_nvtx",
            *of(ZERO3, "create_reduce_and_remove_grad_hooks"),
            EXECUTES,
        ),
    ),
    LibraryRow(
        "engine/overlapped_reduction.py",
        "gradients are read before they are summed, or buckets of different gradients are added",
        SELF_TEST,
        replaces=of(ZERO12, "reduce_ipg_grads", "process_gradients", "reduce_gradients"),
        relies_on=(
            *of(ZERO12, "average_tensor", "allreduce_and_scatter", "allreduce_bucket", "copy_grads_in_partition"),
            *of(ZERO12, "_get_compact_grad_partition_slice", "_release_ipg_buffers", "setup_buckets"),
            *of(ZERO12, "_fill_param_grad_accum_attribute", "independent_gradient_partition_epilogue"),
        ),
    ),
    LibraryRow(
        "engine/reduction_order.py",
        "ranks that use different modules hang, or add gradients of different parameters",
        f"{SELF_TEST} (gradients of equal modules)",
        replaces=(
            *of(ZERO12, "reduce_independent_p_g_buckets_and_remove_grads"),
            *of(ZERO12, "overlapping_partition_gradients_reduce_epilogue"),
        ),
        relies_on=of(ZERO12, "process_gradients", "setup_buckets", "get_gradient_for_reduction", "backward_epilogue"),
    ),
    LibraryRow(
        "engine/seen_gradients.py",
        "parameters that a step does not use are moved, or keep the gradient of an earlier step",
        UNSEEN,
        replaces=(
            *of(ENGINE, "_get_gradients_for_reduction"),
            *of(BF16, "get_grads_for_reduction", "get_grads_for_norm"),
            *of(ZERO3, "reduce_ready_partitions_and_remove_grads", "overlapping_partition_gradients_reduce_epilogue"),
        ),
        relies_on=(
            *of(ENGINE, "_reduce_non_expert_gradients", "buffered_allreduce_fallback"),
            *of(ZERO3, "partition_grads", "_offload_grad_partition_at_boundary", "_swap_out_offload_fp32_gradients"),
            *of(ZERO3, "reduce_independent_p_g_buckets_and_remove_grads", "create_reduce_and_remove_grad_hooks"),
        ),
    ),
    LibraryRow(
        "engine/state/separate_steps.py",
        "parameters that a step does not use are moved by momentum and weight decay",
        UNSEEN,
        relies_on=(
            *of(ZERO12, "_optimizer_step"),
            *of(ZERO3, "_optimizer_step"),
            *of(BF16, "step"),
            *of(FUSED, "step"),
            *of(UNFUSED, "step"),
        ),
    ),
    LibraryRow(
        "engine/reduction_dtypes.py",
        "gradients are reduced or accumulated in another dtype",
        f"{SELF_TEST} (to the tolerance of 16 bits)",
        replaces=(
            *of(ZERO12, "__init__"),  # sets get_param_comm_dtype
            *of("deepspeed.runtime.torch_autocast:", "TORCH_AUTOCAST_INITIALIZED", "TORCH_AUTOCAST_DTYPE"),
        ),
        relies_on=(
            "deepspeed.runtime.torch_autocast:get_comm_dtype",
            "deepspeed.runtime.torch_autocast:PARAM_COMM_DTYPE_ATTR_NAME",
            *of(ENGINE, "_backward_epilogue", "buffered_allreduce_fallback"),
        ),
    ),
    LibraryRow(
        "engine/zero3/leaf_modules.py",
        "gradients of a leaf module are reduced before they are computed",
        RAISES,
        relies_on=(
            *of("deepspeed.utils.z3_leaf_module:", "set_z3_leaf_module", "get_z3_leaf_modules"),
            *of(ZERO3, "create_reduce_and_remove_grad_hooks"),
        ),
    ),
    LibraryRow(
        "engine/zero3/coalesced_collectives.py",
        "weights or gradients of ZeRO-3 are cut at the wrong elements",
        "self-test: compares with DeepSpeed's own, and leaves it to DeepSpeed if they differ",
        replaces=(
            "deepspeed.runtime.comm.coalesced_collectives:reduce_scatter_coalesced",
            *of(PARTITION, "AllGatherCoalescedHandle.wait", "Init._convert_to_deepspeed_param"),
            *of(ZERO3, "__avg_scatter_grads"),
        ),
        relies_on=(
            "deepspeed.runtime.comm.coalesced_collectives:all_to_all_quant_reduce",
            "deepspeed.runtime.comm.coalesced_collectives:_torch_reduce_scatter_fn",
            *of(PARTITION, "_dist_allgather_fn", "get_allgather_dtype", "MultipleAllGatherHandles"),
            *of(PARTITION, "Init._partition", "Init._partition_param", "free_param"),
        ),
    ),
    LibraryRow(
        "engine/zero3/parts.py",
        "weights of ZeRO-3 are gathered or freed at the wrong time",
        f"{SELF_TEST}: gradients of a model whose weights are gathered with these hooks",
        replaces=(
            *of(COORDINATOR, "fetch_sub_module", "_fetch_sub_module_impl", "release_sub_module", "__release_param"),
            *of(OFFLOAD, "pre_sub_module_forward_function", "post_sub_module_forward_function"),
            *of(OFFLOAD, "pre_sub_module_backward_function", "post_sub_module_backward_function"),
            *of(OFFLOAD, "_register_deepspeed_module"),  # its autograd functions
        ),
        relies_on=(
            *of(COORDINATOR, "__init__", "reset_step", "__all_gather_params", "__params_to_release"),
            "deepspeed.runtime.zero.partitioned_param_coordinator:iter_params",
            "deepspeed.utils.z3_leaf_module:z3_leaf_module",
            "torch.autograd.function:Function.apply",
        ),
    ),
    LibraryRow(
        "engine/zero3/module_guard.py",
        "ranks that call different modules hang, or exchange parameters of different modules",
        UNSEEN,
        replaces=(
            *of(COORDINATOR, "trace_prologue"),
            *of(ZERO3, "reduce_ready_partitions_and_remove_grads"),
            *of(ZERO3, "overlapping_partition_gradients_reduce_epilogue"),
        ),
        relies_on=(
            *of(OFFLOAD, "pre_sub_module_forward_function", "pre_sub_module_backward_function"),
            "deepspeed.runtime.zero.partitioned_param_coordinator:iter_params",
        ),
    ),
    LibraryRow(
        "engine/whole_weights.py",
        "generation gathers all weights for every token, or uses released ones",
        RAISES,
        relies_on=(
            *of(COORDINATOR, "release_sub_module", "_invalidate_trace", "is_invalid_trace"),
            *of(ZERO3, "empty_partition_cache"),
        ),
    ),
    LibraryRow(
        "engine/zero3/registered_hooks.py",
        "hooks are lost when a library registers DeepSpeed's again",
        UNSEEN,
        replaces=of(OFFLOAD, "_register_deepspeed_module"),
    ),
    LibraryRow(
        "engine/rehearsal.py",
        "a trial pass of a batch-size search communicates, and ranks hang",
        "the report of a hang",
        replaces=("deepspeed.comm.comm:cdb", "deepspeed.runtime.zero.utils:assert_ints_same_as_other_ranks"),
    ),
    LibraryRow(
        "engine/interrupted_pass.py",
        "gradients of an interrupted pass are left in buckets, and a repeated pass leaves out wrong collectives",
        UNSEEN,
        replaces=("deepspeed.comm.comm:cdb",),
        relies_on=(
            *of(COORDINATOR, "is_complete_trace", "release_backward_leftovers", "_clean_inflight_param_registry"),
            *of(COORDINATOR, "reset_step", "record_module", "construct_parameter_trace_from_module_trace"),
            "deepspeed.runtime.base_optimizer:ZeROOptimizer",
            *of(ZERO12, "reduce_ipg_grads", "setup_buckets"),
        ),
    ),
)
