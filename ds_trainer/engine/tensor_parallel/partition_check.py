"""Checks whether DeepSpeed can partition a model, before any process group exists.

The layers to partition come from the first of: the ``partition_config`` or ``preset_model`` of the ``tensor_parallel``
section of the configuration; the model's own plan (``_tp_plan`` and ``base_model_tp_plan`` of Hugging Face models);
layer names that DeepSpeed knows, for the families in :data:`PARTITIONED_BY_NAME`, whose results are verified.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.utils.units import counted

PARTITIONED_BY_NAME = ("bart", "bert", "gpt_neox", "gptj", "opt", "t5")
"""Families without a plan (``config.model_type``) whose results are exact when partitioned by layer names."""

PRESETS = ("llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3")
"""DeepSpeed 0.19.8's values of ``preset_model``; it silently ignores any other name."""

_SECTION = "tensor_parallel"
_CUSTOM_PLAN = "Configure the layers in tensor_parallel.partition_config of the DeepSpeed configuration"
_HEADS = ("lm_head", "embed_out")  # the head names that DeepSpeed knows


def partition_problems(model: nn.Module, config: CompiledConfig, tp: int) -> list[str]:
    """Reasons why ``model`` cannot be partitioned over ``tp`` ranks, one sentence each."""
    if tp == 1:
        return []
    setting = f"tensor_parallel_size={tp}"
    name = type(model).__name__
    problems = _layerdrop_problems(model, setting)
    if config.vocab_parallel_lm_head:
        problems += _head_problems(model, config, tp)
    try:
        if (preset := config.tensor_parallel_preset) is not None and preset.lower() not in PRESETS:
            source = config.describe(f"{_SECTION}.preset_model")
            return [*problems, f"{source} is not one of DeepSpeed's presets: {', '.join(PRESETS)}."]
        from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig

        specs = TPTrainingConfig(**config.to_dict().get(_SECTION, {})).get_partition_config_object()
        if specs is None:
            specs, unsupported = _model_specs(model)
            if unsupported:
                return [
                    *problems,
                    f"{setting}: the plan of {name} contains {', '.join(unsupported)}, which DeepSpeed does not "
                    f"support. {_CUSTOM_PLAN}, or set tensor_parallel_size=1 and shard with zero_stage=3.",
                ]
    except ValueError as error:
        return [*problems, f"tensor_parallel of the DeepSpeed configuration: {error}"]
    if specs is None:
        return problems + _by_name_problems(model, setting)
    return problems + _spec_problems(model, specs, setting)


def _model_specs(model: nn.Module) -> tuple[Any, list[str]]:
    """The model's plan as DeepSpeed reads it (None without a plan), and the plan's unsupported entries."""
    from deepspeed.module_inject.autotp_config import AutoTPConfig
    from deepspeed.module_inject.tp_plan_converter import SUPPORTED_STYLES, TPPlanConverter
    from deepspeed.runtime.tensor_parallel.config import _get_hf_tp_plan

    plan = dense_plan(model, _get_hf_tp_plan(model))
    if not plan:
        return None, []
    unknown = [f"{layer}={style}" for layer, style in plan.items() if style.lower() not in SUPPORTED_STYLES]
    return (None, unknown) if unknown else (AutoTPConfig(layer_specs=TPPlanConverter.convert(plan)), [])


def dense_plan(model: nn.Module, plan: dict[str, str] | None) -> dict[str, str] | None:
    """``plan`` without stacked weights of experts: tensor-parallel ranks hold them whole, and compute the same."""
    stacked = [
        name
        for name, part in model.named_modules()
        if not hasattr(part, "weight") and any(p.dim() == 3 for p in part.parameters(recurse=False))
    ]
    if not plan or not stacked:
        return plan
    weights = [f"{name}.{key}" for name in stacked for key, _ in model.get_submodule(name).named_parameters()]

    def is_dense(layer: str) -> bool:
        form = re.compile(rf"(.*\.)?{re.escape(layer).replace(re.escape('*'), '[0-9]+')}")
        return not any(map(form.fullmatch, (*stacked, *weights)))

    return {layer: style for layer, style in plan.items() if is_dense(layer)}


def _spec_problems(model: nn.Module, specs: Any, setting: str) -> list[str]:
    from deepspeed.module_inject.autotp_config import PartitionType

    name = type(model).__name__
    kind = getattr(getattr(model, "config", None), "model_type", None)
    partitioned = 0
    problems: list[str] = []
    unsupported: dict[str, str] = {}
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if len(getattr(weight, "ds_shape", getattr(weight, "shape", ()))) != 2:
            continue
        spec = specs.find_matching_spec(f"{path}.weight", kind)
        if spec is None:
            if specs.strict_mode and not isinstance(module, nn.Embedding):
                problems.append(f"{setting}: strict_mode is on, but partition_config has no rule for {path}.weight.")
            continue
        if spec.partition_type == PartitionType.SKIP:
            continue
        partitioned += 1
        if not (isinstance(module, nn.Linear | nn.Embedding) or is_lora(module)):
            unsupported.setdefault(type(module).__name__, path)
    problems += [
        f"{setting}: {path} of {name} is a {cls}, but only torch.nn.Linear and torch.nn.Embedding can be partitioned."
        f"{_ADAPTERS if hasattr(model.get_submodule(path), 'base_layer') else ''} Remove it from "
        "partition_config, or set tensor_parallel_size=1 and shard with zero_stage=3."
        for cls, path in unsupported.items()
    ]
    if not partitioned:
        problems.append(
            f"{setting}: no layer name of {name} matches the patterns of partition_config ("
            f"{', '.join(pattern for spec in specs.layer_specs for pattern in spec.patterns)}). {_CUSTOM_PLAN}."
        )
    return problems


_ADAPTERS = (
    " Among adapters, only LoRA around a plain layer, without dropout and DoRA, can be partitioned with its layer."
)


def _by_name_problems(model: nn.Module, setting: str) -> list[str]:
    name = type(model).__name__
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in PARTITIONED_BY_NAME:
        return [
            f"{setting}: {name} has no plan for tensor parallelism (_tp_plan). Partitioning by layer names, which is "
            f"verified for {', '.join(PARTITIONED_BY_NAME)}, could give wrong results. {_CUSTOM_PLAN}, or set "
            "tensor_parallel_size=1."
        ]
    wrapped = [path for path, module in model.named_modules() if hasattr(module, "base_layer")]
    if wrapped:
        return [
            f"{setting}: {wrapped[0]} of {name} is wrapped by an adapter library, and without a plan only plain layers "
            "can be partitioned. Set it to 1."
        ]
    return []


def _head_problems(model: nn.Module, config: CompiledConfig, tp: int) -> list[str]:
    source = config.describe(f"{_SECTION}.vocab_parallel_lm_head")
    heads = [
        module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and path.split(".")[-1] in _HEADS
    ]
    if len(heads) != 1 or not hasattr(model, "loss_function"):
        return [
            f"{source} needs exactly one torch.nn.Linear named {' or '.join(_HEADS)} and a loss_function, but "
            f"{type(model).__name__} has {len(heads)} such layers"
            f"{'' if hasattr(model, 'loss_function') else ' and no loss_function'}. Remove vocab_parallel_lm_head."
        ]
    if heads[0].out_features < tp:
        return [
            f"{source}: the head has {counted(heads[0].out_features, 'row')}, fewer than "
            f"tensor_parallel_size={tp}. Remove it."
        ]
    return []


def _layerdrop_problems(model: nn.Module, setting: str) -> list[str]:
    """LayerDrop would skip a layer on one rank while another rank waits for it."""
    config = getattr(model, "config", None)
    rates = vars(config) if hasattr(config, "__dict__") else {}
    return [
        f"{setting}: {name}={rate} in the model's configuration drops layers at random, different ones on each rank. "
        "Set it to 0."
        for name, rate in rates.items()
        if "layerdrop" in name.lower() and isinstance(rate, float) and rate > 0.0
    ]


def is_lora(module: Any) -> bool:
    """Whether ``module`` is peft's LoRA around a plain linear layer, without features that need full weights."""
    return (
        type(module).__module__ == "peft.tuners.lora.layer"
        and type(getattr(module, "base_layer", None)) is nn.Linear
        and not any(module.use_dora.values())
        and not any(isinstance(dropout, nn.Dropout) and dropout.p > 0.0 for dropout in module.lora_dropout.values())
    )
