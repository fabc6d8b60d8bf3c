"""The table of :mod:`ds_trainer.engine.library_functions`: one row per file of ds_trainer and effect.

After a change run ``python tools/library_functions.py``, and keep docs/explanation/deepspeed-patches.md in step.
"""

from __future__ import annotations

from ds_trainer.engine.engine_rows import (
    BF16,
    COORDINATOR,
    ENGINE,
    ENGINE_ROWS,
    FUSED,
    GROUPS,
    PARTITION,
    RAISES,
    TP_SELF_TEST,
    UNFUSED,
    UNSEEN,
    ZERO3,
    ZERO12,
    LibraryRow,
    of,
)

LAYERS = "deepspeed.module_inject.layers:"
AUTO_TP = "deepspeed.module_inject.auto_tp:AutoTP."
C10D = "torch.distributed.distributed_c10d:"

ROWS = (
    *ENGINE_ROWS,
    # -- tensor parallelism
    LibraryRow(
        "engine/tensor_parallel/repairs.py",
        "sums over tensor-parallel ranks are discarded, gradients are wrong",
        TP_SELF_TEST,
        replaces=of(LAYERS, "RowParallel.forward", "ColumnParallel.backward", "AsyncColumnParallel.backward"),
        relies_on=of(LAYERS, "RowParallel.backward", "ColumnParallel.forward", "AsyncColumnParallel.forward"),
    ),
    LibraryRow(
        "engine/tensor_parallel/repairs.py",
        "layers without elements on a rank are rejected, or inputs are compared in vain",
        RAISES,
        replaces=of(COORDINATOR, "fetch_sub_module"),
        relies_on=of(ENGINE, "_configure_tensor_parallel"),
    ),
    LibraryRow(
        "engine/tensor_parallel/partitioning.py",
        "the optimizer holds an old embedding, or its slice is saved as the whole",
        UNSEEN,
        replaces=of(AUTO_TP, "_slice_embedding"),
        relies_on=(
            *of(AUTO_TP, "_gather_zero3_params"),
            *of(LAYERS, "_build_param_uc_restore_meta"),
            "deepspeed.module_inject.tp_shard:get_shard_size_list",
        ),
    ),
    LibraryRow(
        "engine/tensor_parallel/partitioning.py",
        "slices are cut differently from the plan that ds_trainer has checked",
        TP_SELF_TEST,
        replaces=(
            *of(ENGINE, "_apply_autotp_partitioning"),
            "deepspeed.runtime.tensor_parallel.config:_get_hf_tp_plan",
        ),
        relies_on=(
            *of(AUTO_TP, "_replace_with_config", "_create_row_parallel_layer", "_create_column_parallel_layer"),
            *of(LAYERS, "LinearLayer._tp_partition", "LinearAllreduce._tp_partition"),
            *of(LAYERS, "LinearLayer.forward", "LinearAllreduce.forward"),
        ),
    ),
    LibraryRow(
        "engine/tensor_parallel/partitioning.py",
        "an adapter is dropped, or partitioned differently from its layer",
        UNSEEN,
        replaces=of(AUTO_TP, "_replace_with_config"),
        relies_on=(
            *of(AUTO_TP, "_create_row_parallel_layer", "_create_column_parallel_layer", "_get_model_type"),
            *of("peft.tuners.lora.layer:", "Linear.forward"),
        ),
    ),
    LibraryRow(
        "engine/tensor_parallel/partition_check.py",
        "a plan is accepted that DeepSpeed reads differently",
        "an error if no parameter is partitioned",
        relies_on=(
            "deepspeed.runtime.tensor_parallel.config:_get_hf_tp_plan",
            "deepspeed.module_inject.tp_plan_converter:TPPlanConverter",
            "deepspeed.module_inject.autotp_config:AutoTPConfig.find_matching_spec",
        ),
    ),
    LibraryRow(
        "engine/tensor_parallel/vocab_parallel_head.py",
        "losses and metrics read a slice of the logits",
        RAISES,
        relies_on=of(LAYERS, "VocabParallelLinear", "GatherFromTensorParallelRegion"),
    ),
    LibraryRow(
        "engine/tensor_parallel/partitioning.py",
        "dropout masks of different slices are equal",
        UNSEEN,
        relies_on=of(LAYERS, "LinearAllreduce.forward", "SubParamLinearAllreduce", "SubParamLinearLayer"),
    ),
    # -- optimizer states
    LibraryRow(
        "engine/state/flat_partitions.py",
        "checkpoints describe wrong elements of weights and optimizer states",
        "the check of loaded states",
        relies_on=(
            *of(ZERO12, "__init__", "get_data_parallel_partitions", "_round_robin_reorder"),
            *of(ZERO3, "_create_fp16_partitions_with_defragmentation", "_create_fp32_partitions"),
            *of(BF16, "_setup_for_real_optimizer"),
            *of(FUSED, "__init__"),
            *of(UNFUSED, "__init__"),
        ),
    ),
    LibraryRow(
        "engine/state/state_shards.py",
        "weights are not refreshed from loaded masters, or offloaded states are read in the middle of a step",
        "the check of loaded states",
        relies_on=(*of(ZERO3, "checkpoint_event_prologue", "checkpoint_event_epilogue"),),
    ),
    # -- process groups and libraries
    LibraryRow(
        "engine/process_group.py",
        "DeepSpeed compiles an operator on CPUs; groups of a closed engine are kept",
        UNSEEN,
        replaces=("deepspeed.ops:__getattr__",),
        relies_on=of(GROUPS, "_release_process_group_references"),
    ),
    LibraryRow(
        "utils/collective_limit.py",
        "the limit of collectives (ddp_timeout) does not hold for groups that DeepSpeed creates",
        "the report of a hang",
        replaces=of(C10D, "default_pg_timeout", "default_pg_nccl_timeout"),
        relies_on=of(C10D, "new_group", "split_group", "_world", "_set_pg_timeout", "set_timeout"),
    ),
    LibraryRow(
        "utils/store.py",
        "ranks cannot exchange messages through the store",
        RAISES,
        relies_on=of(C10D, "_get_default_store"),
    ),
    LibraryRow(
        "utils/failures.py",
        "a rank waits for the others when it ends after an error",
        "the report of a hang",
        relies_on=of(C10D, "_abort_process_group"),
    ),
    LibraryRow(
        "parallel/groups.py",
        "creating a group of one rank enters a communicator of all ranks",
        "the report of a hang",
        relies_on=of(C10D, "new_group", "split_group"),
    ),
    LibraryRow(
        "monitor/health/waits.py",
        "seconds of waiting are not counted, and a hang is described without its collective",
        UNSEEN,
        replaces=("torch._C._distributed_c10d:Work.wait",),
        relies_on=("torch._C._distributed_c10d:Work", *of(C10D, "_world")),
    ),
    LibraryRow(
        "engine/loading/transformers_zero3.py",
        "from_pretrained in a callback becomes a collective, or generate stops at different tokens",
        "the report of a hang",
        replaces=(
            "transformers.integrations.deepspeed:_hf_deepspeed_config_weak_ref",
            *of("transformers.modeling_utils:PreTrainedModel.", "from_pretrained", "_from_config"),
        ),
        relies_on=of("transformers.integrations.deepspeed:", "is_deepspeed_zero3_enabled", "set_hf_deepspeed_config"),
    ),
    LibraryRow(
        "engine/quantized_weights.py",
        "4-bit weights are repacked for inference in evaluation, and train without gradients",
        RAISES,
        replaces=("bitsandbytes.nn.modules:Linear4bit.forward",),
        relies_on=of("bitsandbytes.nn.modules:", "Params4bit", "Int8Params"),
    ),
    LibraryRow(
        "engine/activation_checkpointing.py",
        "DeepSpeed's options of activation checkpointing have no effect",
        UNSEEN,
        replaces=("transformers.modeling_utils:PreTrainedModel._set_gradient_checkpointing",),
        relies_on=("transformers.modeling_layers:GradientCheckpointingLayer",),
    ),
    LibraryRow(
        "training/model/activation_offload.py",
        "activations are not moved to the host",
        "the memory of a step",
        relies_on=("transformers.modeling_layers:GradientCheckpointingLayer",),
    ),
    LibraryRow(
        "training/model/chunked_loss/linear_head.py",
        "a loss in tiles skips what torch.compile has made of the head",
        "the check of the tiled loss at start",
        relies_on=("torch.nn.modules.module:Module._call_impl", "torch.nn.modules.module:Module._wrapped_call_impl"),
    ),
    LibraryRow(
        "training/loop/source_losses.py",
        "losses by source of data are those of another loss",
        UNSEEN,
        replaces=("torch.nn.functional:cross_entropy",),
        relies_on=of("transformers.loss.loss_utils:", "fixed_cross_entropy", "ForCausalLMLoss"),
    ),
    LibraryRow(
        "engine/loading/empty_model.py",
        "a model is created in memory instead of on meta",
        RAISES,
        replaces=("torch.nn.modules.module:Module.register_parameter",),
    ),
    LibraryRow(
        "engine/loading/empty_model.py",
        "a large tensor is filled too early or never",
        "the check of loaded weights",
        relies_on=("torch.storage:UntypedStorage",),
    ),
    LibraryRow(
        "engine/loading/initialization_record.py",
        "new weights are drawn differently from a model that is created in memory",
        UNSEEN,
        replaces=("torch.nn.init:_no_grad_trunc_normal_",),
    ),
    LibraryRow(
        "utils/accelerate_state.py",
        "accelerate starts a process group of its own",
        RAISES,
        relies_on=of("accelerate.state:PartialState.", "__init__", "_reset_state"),
    ),
    LibraryRow(
        "checkpoint/weights/saved_names.py",
        "weights are saved under other names or in another layout",
        "the check of loaded weights",
        relies_on=of("transformers.core_model_loading:", "WeightConverter", "WeightRenaming", "PrefixChange"),
    ),
    LibraryRow(
        "checkpoint/loading/name_mapping.py",
        "weights are read from other names or in another layout",
        "the check of loaded weights",
        relies_on=(
            *of("transformers.core_model_loading:", "rename_source_key", "dot_natural_key"),
            "transformers.conversion_mapping:get_model_conversion_mapping",
        ),
    ),
    LibraryRow(
        "checkpoint/loading/expected_weights.py",
        "weights of a file are reported as missing, or missing ones are not",
        "the check of loaded weights",
        relies_on=of("transformers.core_model_loading:", "rename_source_key", "dot_natural_key"),
    ),
    LibraryRow(
        "training/loading/build_on_meta.py",
        "weights stay in another dtype than transformers gives them",
        "the check of loaded weights",
        relies_on=of("transformers.core_model_loading:", "build_glob_alternation"),
    ),
    LibraryRow(
        "checkpoint/converters/conversion.py",
        "slices of tensor-parallel checkpoints are merged wrongly",
        "the check of loaded weights",
        relies_on=("deepspeed.checkpoint.ds_to_universal:merge_tp_slices",),
    ),
    LibraryRow(
        "samples/chat/rendering.py",
        "templates are rendered otherwise than apply_chat_template renders them",
        UNSEEN,
        relies_on=of("transformers.utils.chat_template_utils:", "_compile_jinja_template", "render_jinja_template"),
    ),
    LibraryRow(
        "planner/activations/device_probe.py",
        "the planner measures another attention mask",
        UNSEEN,
        replaces=("transformers.masking_utils:find_packed_sequence_indices",),
    ),
    LibraryRow(
        "config/rules/zero_rules.py",
        "a combination that this version supports is refused",
        RAISES,
        relies_on=of(PARTITION, "Init._partition_param", "Init._partition_param_sec"),
    ),
    LibraryRow(
        "config/rules/precision_rules.py",
        "quantized gradients of dtypes that this version supports are refused",
        RAISES,
        relies_on=("deepspeed.runtime.comm.coalesced_collectives:all_to_all_quant_reduce",),
    ),
    LibraryRow(
        "utils/row_random.py",
        "a loss that draws random numbers is measured with others for each sample, and its mean is not recognized",
        UNSEEN,
        relies_on=of("torch.utils._python_dispatch:TorchDispatchMode.", "__init__", "__enter__", "__exit__"),
    ),
    LibraryRow(
        "data/stream.py",
        "a stream that shards itself by worker is read in part",
        UNSEEN,
        replaces=("torch.utils.data._utils.worker:_worker_info",),
        relies_on=("torch.utils.data._utils.worker:get_worker_info",),
    ),
)
