"""Builds the description of DeepSpeed's configuration from DeepSpeed itself.

``python -m ds_trainer.config.schema_build`` rewrites the one in this folder. The only module of this floor that imports
deepspeed. Pydantic models are walked; classes without a model are asked for the attributes of an empty configuration;
keys that DeepSpeed reads one by one are listed by hand (sources: ``runtime/config.py``, ``runtime/constants.py``).
"""

from __future__ import annotations

import enum
import inspect
import json
import re
import types
import typing
from pathlib import Path
from typing import Any

_DTYPES = ["fp32", "fp16", "bf16"]
_LONG_DTYPES = [*_DTYPES, "float32", "float16", "bfloat16", "torch.float32", "torch.float16", "torch.bfloat16"]

# "auto" is a value of DeepSpeed's own here, not a request to us.
_AUTO_IS_A_VALUE = {
    "zero_optimization.zenflow.select_strategy",
    "zero_optimization.zenflow.select_interval",
    "zero_optimization.zenflow.update_interval",
    "data_types.keep_in_fp32_modules",
    "pipeline.stages",
    "expert_parallel.score_apply",
    "expert_parallel.combine_impl",
    "expert_parallel.row_weighting_impl",
    "expert_parallel.score_func",
    "expert_parallel.top_k",
    "expert_parallel.routed_scaling_factor",
}
# Removed or renamed before 0.19.8, so that DeepSpeed no longer says anything about them.
_REMOVED_EARLIER = {
    "bfloat16": "Write bf16.",
    "fp16.fp16_opt_level": "It was apex's; fp16.enabled is all that is needed.",
    "zero_allow_comm_data_type": "Set communication_data_type.",
    "zero_optimization.offload_optimizer.cpu_offload": 'Set zero_optimization.offload_optimizer.device to "cpu".',
}


def build_schema() -> dict[str, Any]:
    """The description as plain data; see :class:`ds_trainer.config.schema.Schema`."""
    import deepspeed
    from deepspeed.runtime import config as runtime

    fields = {**_scalars(), **_modelled(), **_introspected(), **_by_hand()}
    for name, path in [(path.rpartition(".")[2], path) for path in _AUTO_IS_A_VALUE]:
        _at(fields, path.rpartition(".")[0])["fields"][name]["auto_is_a_value"] = True
    removed = {name: _without_link(text) for name, text in runtime._REMOVED_TOP_LEVEL_CONFIG_KEYS.items()}
    removed |= {
        f"zero_optimization.{name}": _without_link(text) for name, text in runtime._REMOVED_ZERO_CONFIG_KEYS.items()
    }
    return {
        "deepspeed": deepspeed.__version__,
        "root": _section(dict(sorted(fields.items()))),
        "removed": {**_REMOVED_EARLIER, **removed},
        "schedulers": _schedulers(),
    }


# -- pydantic models -------------------------------------------------------------------------------------------------


def _modelled() -> dict[str, Any]:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.inference.config import WeightQuantConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
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
        "tensorboard": TensorBoardConfig,
        "wandb": WandbConfig,
        "csv_monitor": CSVConfig,
        "comet": CometConfig,
        "tensor_parallel": TPTrainingConfig,
        "weight_quantization": WeightQuantConfig,
    }
    found = {name: _model(model) for name, model in models.items()}
    found["timers"] = _section({"throughput": _model(DeepSpeedThroughputTimerConfig)})
    stage = found["zero_optimization"]["fields"]["stage"]
    stage.update(kind="int", default=0, choices=[0, 1, 2, 3])
    found["fp16"]["fields"]["loss_scale"]["minimum"] = 0  # checked by a validator, not by the model
    for name in ("loss_scale_window", "min_loss_scale"):
        found["fp16"]["fields"][name]["above"] = 0
    return found


def _model(model: Any) -> dict[str, Any]:
    fields, aliases = {}, {}
    for name, info in model.model_fields.items():
        printed = info.alias or name
        if printed != name:
            aliases[name] = printed
        fields[printed] = _of_hint(info.annotation)
        fields[printed].update(_limits(info.metadata))
        if fields[printed]["kind"] != "section":
            default = None if info.is_required() else info.get_default(call_default_factory=True)
            fields[printed]["default"] = _plain(default)
        extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
        if extra.get("deprecated"):
            new = str(extra.get("new_param", ""))
            fields[printed]["replaced_by"] = f"Use {_new_name(model, new)} instead." if new else "Leave it out."
    return _section(fields, aliases)


def _new_name(model: Any, new: str) -> str:
    info = model.model_fields.get(new)
    name = info.alias or new if info is not None else new
    return f'{name}: {{"device": "cpu"}}' if name in ("offload_param", "offload_optimizer") else name


def _of_hint(hint: Any) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        members = [_of_hint(member) for member in arguments if member is not type(None)]
        nullable = {"nullable": True} if type(None) in arguments else {}
        return {**(members[0] if len(members) == 1 else {"kind": "any"}), **nullable}
    if origin is typing.Literal:
        return {"kind": "str", "choices": list(arguments)}
    if isinstance(hint, type) and hasattr(hint, "model_fields"):
        return _model(hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        values = list(dict.fromkeys(member.value for member in hint))
        return {"kind": "str", "choices": values} if isinstance(values[0], str) else {"kind": "any"}
    for kind, known in (("bool", bool), ("int", int), ("float", float), ("list", list | tuple), ("dict", dict)):
        if isinstance(origin or hint, type) and issubclass(origin or hint, known):
            return {"kind": kind}
    if isinstance(hint, type) and issubclass(hint, str | Path):
        return {"kind": "str"}
    return {"kind": "any"}


def _limits(metadata: list[Any]) -> dict[str, Any]:
    names = {"ge": "minimum", "le": "maximum", "gt": "above", "lt": "below"}
    return {ours: getattr(item, theirs) for item in metadata for theirs, ours in names.items() if hasattr(item, theirs)}


# -- classes without a model -----------------------------------------------------------------------------------------


def _introspected() -> dict[str, Any]:
    from deepspeed.module_inject.auto_ep_config import AutoEPConfig
    from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
    from deepspeed.runtime.activation_checkpointing.config import DeepSpeedActivationCheckpointingConfig
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT

    nullable_numbers = {"number_checkpoints": "int", "output_file": "str"}
    found = {}
    for name, empty in (
        ("flops_profiler", vars(DeepSpeedFlopsProfilerConfig({}))),
        ("activation_checkpointing", vars(DeepSpeedActivationCheckpointingConfig({}))),
        ("aio", AIO_DEFAULT_DICT),
        ("expert_parallel", {key: value for key, value in vars(AutoEPConfig()).items() if not key.startswith("_")}),
    ):
        found[name] = _section({key: _of_default(value, nullable_numbers.get(key)) for key, value in empty.items()})
    return found


def _of_default(value: Any, kind: str | None = None) -> dict[str, Any]:
    if value is None:
        return {"kind": kind or "any", "nullable": True}
    if value == "auto" or type(value) is object:  # a word or a number; a mark of something not given
        return {"kind": "any", "default": value if value == "auto" else None}
    return {"kind": type(value).__name__, "default": _plain(value)}


# -- by hand ---------------------------------------------------------------------------------------------------------


def _leaf(kind: str, default: Any = None, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "default": default, **more}


def _scalars() -> dict[str, Any]:
    positive = {"minimum": 1}
    return {
        "train_batch_size": _leaf("int", **positive),
        "train_micro_batch_size_per_gpu": _leaf("int", **positive),
        "gradient_accumulation_steps": _leaf("int", **positive),
        "managed_gradient_accumulation": _leaf("bool", True),
        "steps_per_print": _leaf("int", nullable=True, **positive),
        "dump_state": _leaf("bool", False),
        "disable_python_gc": _leaf("bool", False),
        "disable_allgather": _leaf("bool", False),
        "communication_data_type": _leaf("str", choices=_DTYPES, nullable=True),
        "seq_parallel_communication_data_type": _leaf("str", "fp32", choices=_DTYPES),
        "prescale_gradients": _leaf("bool", False),
        "gradient_predivide_factor": _leaf("float", 1.0, above=0),
        "gradient_allreduce_op": _leaf("str", "mean", choices=["mean", "avg", "sum"]),
        "gradient_clipping": _leaf("float", 1.0, minimum=0),
        "zero_allow_untested_optimizer": _leaf("bool", False),
        "zero_force_ds_cpu_optimizer": _leaf("bool", True),
        "wall_clock_breakdown": _leaf("bool", False),
        "memory_breakdown": _leaf("bool", False),
        "dataloader_drop_last": _leaf("bool", False),
        "log_level": _leaf("str", nullable=True),
        "use_data_before_expert_parallelism": _leaf("bool", False),
        "vocabulary_size": _leaf("int", nullable=True, **positive),
        "sequence_parallel_size": _leaf("int", 1, **positive),
    }


def _by_hand() -> dict[str, Any]:
    dtype = _leaf("str", choices=_LONG_DTYPES, nullable=True)
    writer = {
        "type": _leaf("str", "fast", choices=["mock", "python", "fast"]),
        "decoupled": _leaf("bool", False),
        "io_buffer_size": _leaf("int", 64_000_000, minimum=1),
        "io_buffer_double": _leaf("bool", True),
        "show_statistics": _leaf("bool", False),
        "data_parallel": _leaf("str", nullable=True, choices=["replica", "socket", "machine"]),
        "io_multiplier": _leaf("int", 1, minimum=1),
    }
    return {
        "optimizer": _section(
            {"type": _leaf("str"), "params": _section({}, open_=True), "legacy_fusion": _leaf("bool", False)}
        ),
        "scheduler": _section({"type": _leaf("str"), "params": _section({}, open_=True)}),
        "torch_autocast": _section(
            {
                "enabled": _leaf("bool", False),
                "dtype": dict(dtype),
                "lower_precision_safe_modules": _leaf("list", nullable=True),
            }
        ),
        "data_types": _section(
            {
                "grad_accum_dtype": dict(dtype),
                "param_dtype": dict(dtype),
                "buffer_dtype": dict(dtype),
                "keep_in_fp32_modules": _leaf("any", "auto"),
            }
        ),
        "checkpoint": _section(
            {
                "tag_validation": _leaf("str", "Warn", choices=["Ignore", "Warn", "Fail"]),
                "checkpoint_serialization": _leaf("bool", True),
                "load_universal": _leaf("bool", False),
                "use_node_local_storage": _leaf("bool", False),
                "parallel_write": _section({"pipeline_stage": _leaf("bool", False)}),
                "writer": _section(writer),
            }
        ),
        "pipeline": _section(
            {
                "stages": _leaf("any", "auto"),
                "partition": _leaf("str", "best"),
                "seed_layers": _leaf("bool", False),
                "activation_checkpoint_interval": _leaf("int", 0, minimum=0),
                "pipe_partitioned": _leaf("bool", True),
                "grad_partitioned": _leaf("bool", True),
            }
        ),
        "datastates_ckpt": _section({"host_cache_size": _leaf("float", 0, minimum=0), "parser_threads": _leaf("int")}),
        # Not run by the Trainer (see the rules); what is inside is DeepSpeed's business.
        "autotuning": _section({"enabled": _leaf("bool", False)}, open_=True),
        "data_efficiency": _section({"enabled": _leaf("bool", False)}, open_=True),
    }


def _schedulers() -> dict[str, list[str]]:
    from deepspeed.runtime import lr_schedules

    ignored = ("self", "optimizer", "last_batch_iteration")
    return {
        name: [
            parameter
            for parameter in inspect.signature(getattr(lr_schedules, name).__init__).parameters
            if parameter not in ignored
        ]
        for name in lr_schedules.VALID_LR_SCHEDULES
    }


# -- small things ----------------------------------------------------------------------------------------------------


def _section(fields: dict[str, Any], aliases: dict[str, str] | None = None, open_: bool = False) -> dict[str, Any]:
    more: dict[str, Any] = {"aliases": aliases} if aliases else {}
    return {"kind": "section", "fields": fields, **more, **({"open": True} if open_ else {})}


def _at(fields: dict[str, Any], path: str) -> dict[str, Any]:
    section: dict[str, Any] = {"fields": fields}
    for name in path.split("."):
        section = section["fields"][name]
    return section


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)  # DeepSpeed's integers print themselves with commas
    return value if value is None or isinstance(value, bool | float | str | dict) else str(value)


def _without_link(text: str) -> str:
    return re.sub(r"\s*See https://\S+", "", text).strip()


def main() -> None:
    """Rewrite the description in this folder."""
    from ds_trainer.config.schema import SNAPSHOT
    from ds_trainer.utils.files import write_text_atomic

    write_text_atomic(SNAPSHOT, json.dumps(build_schema(), indent=1) + "\n")


if __name__ == "__main__":
    main()
