"""Writes ds_trainer/config/deepspeed_schema.json from the installed version of DeepSpeed.

Run ``python tools/build_deepspeed_schema.py`` after changing the pinned version. There are three sources,
each for what the previous one does not provide: the keys that ``DeepSpeedConfig`` reads from an empty mapping, its
pydantic models, and the table below for choices, limits and types that neither has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from schema_models import describe_model, section
from schema_signatures import RecordingDict, describe_callables, describe_recorded

from ds_trainer.config.schema import SNAPSHOT

# Limits and types that DeepSpeed checks in code or only documents, by path. auto_is_a_value: DeepSpeed itself knows the
# value "auto". any_case: DeepSpeed changes the case itself.
_AT_LEAST_1 = {"kind": "int", "minimum": 1}
_AT_LEAST_0 = {"kind": "int", "minimum": 0}
_TEXT = {"kind": "str", "nullable": True}
_NUMBER = {"kind": "int", "minimum": 1, "nullable": True}
_AUTO = {"auto_is_a_value": True}
_COMMUNICATION = {"kind": "str", "choices": ["fp32", "fp16", "bf16"], "any_case": True, "nullable": True}


def known_limits(runtime: Any) -> dict[str, dict[str, Any]]:
    """Choices and ranges that DeepSpeed checks in code, by path."""
    from deepspeed.module_inject.auto_ep_config import EXPERT_ACTIVATIONS, PRESET_MODELS
    from deepspeed.runtime import constants
    from deepspeed.runtime.model_checkpointing import constants as writer
    from deepspeed.utils.logging import log_levels

    dtypes = [name for each in ("fp32", "fp16", "bf16") for name in runtime.DtypeEnum[each]._all_values[1:]]
    dtype = {"kind": "str", "choices": dtypes, "nullable": True}
    zenflow, expert = "zero_optimization.zenflow", "expert_parallel"
    return {
        "train_batch_size": _AT_LEAST_1,
        "train_micro_batch_size_per_gpu": _AT_LEAST_1,
        "gradient_accumulation_steps": _AT_LEAST_1,
        "steps_per_print": _NUMBER,
        "communication_data_type": _COMMUNICATION,
        "seq_parallel_communication_data_type": _COMMUNICATION,
        "gradient_predivide_factor": {"above": 0},
        "gradient_allreduce_op": {"choices": list(constants.GRADIENT_ALLREDUCE_OP_SUPPORTED), "any_case": True},
        "gradient_clipping": {"minimum": 0},
        "log_level": {"kind": "str", "choices": list(log_levels), "any_case": True, "nullable": True},
        "vocabulary_size": _NUMBER,
        "sequence_parallel_size": {**_AT_LEAST_1, "default": 1},
        "torch_autocast.dtype": dtype,
        "torch_autocast.lower_precision_safe_modules": {"kind": "list", "nullable": True, "items": {"kind": "str"}},
        "data_types.grad_accum_dtype": dtype,
        "data_types.param_dtype": dtype,
        "data_types.buffer_dtype": dtype,
        "data_types.keep_in_fp32_modules": {"kind": "list", "items": {"kind": "str"}, **_AUTO},
        "pipeline.stages": {**_AT_LEAST_1, **_AUTO},
        "pipeline.activation_checkpoint_interval": _AT_LEAST_0,
        "zero_optimization.stage": {"default": 0},
        "zero_optimization.cpu_offload_use_pin_memory": {
            "replaced_by": "Set pin_memory in offload_param or offload_optimizer."
        },
        "fp16.loss_scale": {"minimum": 0},
        f"{zenflow}.select_strategy": {"choices": ["auto", "step", "epoch"], **_AUTO},
        f"{zenflow}.select_interval": {"kind": "int", **_AUTO},
        f"{zenflow}.update_interval": {**_AT_LEAST_1, **_AUTO},
        "tensor_parallel.autotp_size": {"minimum": 0},
        "tensor_parallel.tp.tp_size": {"minimum": 1},
        "activation_checkpointing.number_checkpoints": _NUMBER,
        "flops_profiler.recompute_fwd_factor": {"minimum": 0},
        "flops_profiler.profile_step": _AT_LEAST_1,
        "flops_profiler.top_modules": _AT_LEAST_1,
        "flops_profiler.output_file": _TEXT,
        "aio.block_size": _AT_LEAST_1,
        "aio.queue_depth": _AT_LEAST_1,
        "aio.intra_op_parallelism": _AT_LEAST_1,
        "checkpoint.tag_validation": {"choices": _title(writer.CHECKPOINT_TAG_VALIDATION_MODES), "any_case": True},
        "checkpoint.writer.type": {"choices": _lower(writer.CHECKPOINT_WRITER_TYPES), "any_case": True},
        "checkpoint.writer.io_buffer_size": _AT_LEAST_1,
        "checkpoint.writer.io_multiplier": _AT_LEAST_1,
        "checkpoint.writer.data_parallel": {
            **_TEXT,
            "choices": _lower(writer.CHECKPOINT_DATA_PARALLEL_UNITS),
            "any_case": True,
        },
        "data_efficiency.data_sampling.num_epochs": _AT_LEAST_1,
        "data_efficiency.data_sampling.num_workers": _AT_LEAST_0,
        "data_efficiency.data_sampling.curriculum_learning": {"open": True},
        "data_efficiency.data_sampling.dynamic_batching": {"open": True},
        "data_efficiency.data_sampling.dynamic_batching.lr_scaling_method": {"choices": ["linear", "sqrt", "none"]},
        "data_efficiency.data_sampling.dynamic_batching.min_batch_size": _AT_LEAST_1,
        "data_efficiency.data_sampling.dynamic_batching.max_batch_size": _NUMBER,
        "data_efficiency.data_sampling.dynamic_batching.sequence_picking_order": {
            "choices": ["random", "seqlen", "dataloader"]
        },
        "data_efficiency.data_routing.random_ltd": {"open": True},
        "autotuning.tuner_type": {"choices": ["gridsearch", "random", "model_based"]},
        "autotuning.metric": {"choices": ["throughput", "latency", "flops"]},
        "autotuning.metric_path": _TEXT,
        "autotuning.model_info_path": _TEXT,
        "autotuning.arg_mappings": {"kind": "dict", "nullable": True},
        "autotuning.max_train_batch_size": _NUMBER,
        "autotuning.model_info.num_params": _NUMBER,
        "autotuning.model_info.hidden_size": _NUMBER,
        "autotuning.model_info.num_layers": _NUMBER,
        f"{expert}.autoep_size": _AT_LEAST_1,
        f"{expert}.expert_tensor_parallel_size": _AT_LEAST_1,
        f"{expert}.preset_model": {**_TEXT, "choices": list(PRESET_MODELS)},
        f"{expert}.expert_activation": {**_TEXT, "choices": list(EXPERT_ACTIVATIONS)},
        f"{expert}.score_apply": {"choices": ["auto", "pre", "post"], **_AUTO},
        f"{expert}.combine_impl": {"choices": ["auto", "weighted_sum", "fused_weighted_sum", "legacy_bmm"], **_AUTO},
        f"{expert}.row_weighting_impl": {"choices": ["auto", "eager", "fused"], **_AUTO},
        f"{expert}.gate_up_impl": {"choices": ["separate", "fused"]},
        f"{expert}.comm_backend": {"choices": ["comm", "deepep"]},
        f"{expert}.comm_num_sm": _AT_LEAST_1,
        f"{expert}.comm_qp_margin": _AT_LEAST_0,
        f"{expert}.comm_max_tokens_per_rank": _AT_LEAST_0,
        f"{expert}.score_func": {"choices": ["auto", "softmax", "sigmoid"], **_AUTO},
        f"{expert}.top_k": {**_AT_LEAST_1, **_AUTO},
        f"{expert}.routed_scaling_factor": {"kind": "float", **_AUTO},
        f"{expert}.num_expert_groups": _NUMBER,
        f"{expert}.num_limited_groups": _NUMBER,
        f"{expert}.route_norm": {"kind": "bool", "nullable": True},
        f"{expert}.has_shared_experts": {"kind": "bool", "nullable": True},
        f"{expert}.load_balance_coeff": {"refused": "is not supported by AutoEP; leave it out"},
        **{
            f"{expert}.{name}": _TEXT
            for name in (
                *("moe_layer_pattern", "expert_pattern", "router_pattern", "expert_w1", "expert_w2", "expert_w3"),
                *("num_experts_attr", "top_k_attr", "shared_experts_pattern", "shared_experts_gate_pattern"),
            )
        },
    }


# Keys that are not read in DeepSpeedConfig, or only by another package (datastates), or only under some condition.
_READ_ELSEWHERE: dict[str, dict[str, Any]] = {
    "sequence_parallel_size": {},
    "pipeline": section(
        {
            "stages": {"default": "auto"},
            "partition": {"kind": "str", "default": "best"},
            "seed_layers": {"kind": "bool", "default": False},
            "activation_checkpoint_interval": {"default": 0},
            "pipe_partitioned": {"kind": "bool", "default": True},
            "grad_partitioned": {"kind": "bool", "default": True},
            "use_reentrant": {"kind": "bool", "default": True},
        }
    ),
    "datastates_ckpt": section(
        {"host_cache_size": {"kind": "float", "minimum": 0}, "parser_threads": {"kind": "int", "minimum": 1}}
    ),
    "optimizer": section(
        {
            "type": {"kind": "str"},
            "params": section({}, open=True),
            "legacy_fusion": {"kind": "bool", "default": False},
        }
    ),
    "scheduler": section({"type": {"kind": "str"}, "params": section({}, open=True)}),
}

# Removed or renamed before 0.19.8, so that DeepSpeed no longer mentions them.
_REMOVED_EARLIER = {
    "allgather_size": "Write zero_optimization.allgather_bucket_size.",
    "fp32_allreduce": 'Write communication_data_type: "fp32".',
    "load_universal_checkpoint": "Write checkpoint.load_universal.",
    "zero_allow_comm_data_type": "Set communication_data_type.",
    "fp16.fp16_opt_level": "It was an option of apex; fp16.enabled is enough.",
    "fp16.opt_level": "It was an option of apex; fp16.enabled is enough.",
    "compile.enabled": "Set torch_compile, an argument.",
    "compile.backend": "Set torch_compile_backend, an argument.",
    "compile.kwargs": "Set torch_compile_mode, an argument.",
    "compile.disable": "Leave it out, or set torch_compile=False.",
    "aio.thread_count": "Write aio.intra_op_parallelism.",
    "zero_optimization.cpu_offload_params": 'Write offload_param: {"device": "cpu"}.',
    "zero_optimization.offload_optimizer.cpu_offload": 'Set zero_optimization.offload_optimizer.device to "cpu".',
}


def build_schema() -> dict[str, Any]:
    """The description as plain data; see :class:`ds_trainer.config.schema.Schema`."""
    import deepspeed
    from deepspeed.runtime import config as runtime

    removed = {name: _without_link(text) for name, text in runtime._REMOVED_TOP_LEVEL_CONFIG_KEYS.items()}
    removed |= {
        f"zero_optimization.{name}": _without_link(text) for name, text in runtime._REMOVED_ZERO_CONFIG_KEYS.items()
    }
    removed |= _REMOVED_EARLIER
    found = describe_recorded(recorded_config(runtime.DeepSpeedConfig))["fields"]
    fields = {name: field for name, field in {**found, **_READ_ELSEWHERE, **_modelled()}.items() if name not in removed}
    root = json.loads(json.dumps(section(dict(sorted(fields.items())))))  # a copy: the tables are not modified
    for path, more in known_limits(runtime).items():
        field = field_at(root, path)
        if field is not None:  # other versions may lack it
            field.update(more)
            if "kind" in more and not more.get("nullable"):
                field.pop("nullable", None)
    root["fields"].pop("bfloat16")
    root["aliases"] = {"bfloat16": "bf16"}  # runtime/precision_config.py, get_bfloat16_config
    mark_idle(root, runtime.DeepSpeedConfig)
    types = {"optimizer": _optimizers(), "scheduler": _schedulers()}
    unread = [path for path in _REMOVED_EARLIER if _accepted(runtime.DeepSpeedConfig, nested(path, False))]
    return {"deepspeed": deepspeed.__version__, "root": root, "removed": removed, "unread": unread, "types": types}


def recorded_config(config: Any) -> RecordingDict:
    """A configuration with every section, all of them empty, that has recorded what DeepSpeed reads from it."""
    sampling = RecordingDict(curriculum_learning=RecordingDict(), dynamic_batching=RecordingDict())
    routing = RecordingDict(random_ltd=RecordingDict())
    recorded = RecordingDict(
        train_micro_batch_size_per_gpu=1,
        activation_checkpointing=RecordingDict(),
        aio=RecordingDict(),
        autotuning=RecordingDict(model_info=RecordingDict()),
        checkpoint=RecordingDict(parallel_write=RecordingDict(), writer=RecordingDict()),
        data_efficiency=RecordingDict(data_sampling=sampling, data_routing=routing),
        data_types=RecordingDict(),
        expert_parallel=RecordingDict(),
        flops_profiler=RecordingDict(),
        torch_autocast=RecordingDict(),
    )
    config(recorded)
    return recorded


def mark_idle(root: dict[str, Any], config: Any) -> None:
    """Mark the keys whose value DeepSpeed does not look at while ``enabled`` of their block is false."""
    for name, block in root["fields"].items():
        if block["kind"] == "section" and "enabled" in block["fields"] and not block.get("strict"):
            for path, field in leaves_of(block):
                written = (nested(path, value) for value in (3, -0.5, "no value", [3], {"no": "value"}))
                if path != "enabled" and all(_accepted(config, {name: {**w, "enabled": False}}) for w in written):
                    field["idle"] = block["turns_off"] = True


def _accepted(config: Any, mapping: dict[str, Any]) -> bool:
    try:
        config({"train_micro_batch_size_per_gpu": 1, **mapping})
    except Exception:  # of any class: asserts, pydantic's, TypeError
        return False
    return True


def _modelled() -> dict[str, Any]:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.inference.config import WeightQuantConfig
    from deepspeed.monitor.config import DeepSpeedMonitorConfig
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    models = {
        "zero_optimization": DeepSpeedZeroConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "compile": CompileConfig,
        "comms_logger": CommsLoggerConfig,
        "hybrid_engine": HybridEngineConfig,
        "tensor_parallel": TPTrainingConfig,
        "weight_quantization": WeightQuantConfig,
    }
    found = {name: describe_model(model) for name, model in models.items()}
    found.update(describe_model(DeepSpeedMonitorConfig)["fields"])  # its sections are at the top level
    found["timers"] = section({"throughput": describe_model(DeepSpeedThroughputTimerConfig)})
    return found


def _optimizers() -> dict[str, Any]:
    """Parameters of every optimizer that the engine can build (``engine.py``, ``_configure_basic_optimizer``)."""
    import torch
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
    from deepspeed.runtime.engine import DeepSpeedEngine

    optim = torch.optim
    classes: dict[str, tuple[Any, ...]] = {
        name: (each,)
        for name, each in vars(optim).items()
        if isinstance(each, type) and issubclass(each, optim.Optimizer) and each is not optim.Optimizer
    }
    classes |= {each.__name__: (each, FusedAdam, DeepSpeedCPUAdam) for each in (optim.Adam, optim.AdamW)}
    classes |= {"Adagrad": (optim.Adagrad, DeepSpeedCPUAdagrad), "Lamb": (FusedLamb,)}
    classes |= {"Lion": (FusedLion, DeepSpeedCPULion)}
    classes |= {"MuAdam": (optim.Adam,), "MuAdamW": (optim.AdamW,), "MuSGD": (optim.SGD,)}
    ours = ("params", "model_params", "adamw_mode", "set_grad_none", "max_grad_norm")  # set or refused by the engine
    found = {name: describe_callables(each, ours) for name, each in sorted(classes.items())}
    switch, number = {"kind": "bool", "default": False}, {"kind": "float"}
    # The engine removes these before it makes an optimizer.
    taken = {"torch_adam": switch, "adam_w_mode": {"kind": "bool", "default": True}, "fp32_optimizer_states": switch}
    halves = dict.fromkeys((*DeepSpeedEngine._MUON_HALF_KEYS, "muon_lr", "adam_lr"), number) | {
        "ns_method": {"kind": "str"}
    }
    adam_half = {name: found["Adam"]["fields"][name] for name in DeepSpeedEngine._ADAM_HALF_KEYS}
    found["Muon"] = section({**halves, **adam_half, "foreach": found["Adam"]["fields"]["foreach"]})
    for name in ("Adam", "AdamW", "Muon"):
        found[name]["fields"] |= taken
    return found


def _schedulers() -> dict[str, Any]:
    from deepspeed.runtime import lr_schedules

    ignored = ("optimizer", "last_batch_iteration")
    found = {
        name: describe_callables([getattr(lr_schedules, name).__init__], ignored)
        for name in sorted(lr_schedules.VALID_LR_SCHEDULES)
    }
    for kind in found.values():
        for name, field in kind["fields"].items():
            if name.endswith(("_lr", "_mom")):  # one value, or one for each parameter group
                field.update(kind="float", listed=True)
        for name, more in {
            "total_num_steps": _AT_LEAST_1,
            "warmup_num_steps": _AT_LEAST_1,
            "lr_range_test_step_size": _AT_LEAST_1,
            "cycle_first_step_size": _AT_LEAST_1,
            "cycle_second_step_size": _NUMBER,
            "cycle_first_stair_count": _AT_LEAST_0,
            "cycle_second_stair_count": {**_AT_LEAST_0, "nullable": True},
            "decay_step_size": _AT_LEAST_0,
            "warmup_type": {"choices": [lr_schedules.WARMUP_LOG_RATE, lr_schedules.WARMUP_LINEAR_RATE]},
        }.items():
            if name in kind["fields"]:
                kind["fields"][name].update(more)
    return found


# -- helpers ---------------------------------------------------------------------------------------------------------


def field_at(root: dict[str, Any], path: str) -> Any:
    """The description at a dotted path."""
    found: Any = root
    for name in path.split("."):
        found = (found or {}).get("fields", {}).get(name)
    return found


def leaves_of(section: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The path and the description of every key below ``section``."""
    for name, field in section["fields"].items():
        if field["kind"] == "section":
            yield from leaves_of(field, f"{path}{name}.")
        else:
            yield f"{path}{name}", field


def nested(path: str, value: Any) -> dict[str, Any]:
    """A mapping with ``value`` at the dotted ``path``."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return dict(value)


def _lower(names: list[str]) -> list[str]:
    return [name.lower() for name in names]


def _title(names: list[str]) -> list[str]:
    return [name.title() for name in names]


def _without_link(text: str) -> str:
    return re.sub(r"\s*See https://\S+", "", text).strip()


def main() -> None:
    """Write the description."""
    SNAPSHOT.write_text(json.dumps(build_schema(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
