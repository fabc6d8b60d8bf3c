"""Whether and how DeepSpeed can cut a model: asked before any process group exists.

What is cut, in this order: the ``partition_config`` or ``preset_model`` of the ``tensor_parallel`` block of the
configuration; the model's own plan (``_tp_plan`` and ``base_model_tp_plan`` of Hugging Face models); names of layers
that DeepSpeed knows, for the families in :data:`CUT_BY_NAME`, where that has been shown right.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.engine.tensor.adapters import is_lora

CUT_BY_NAME = ("bart", "bert", "gpt_neox", "gptj", "opt", "t5")
"""Families without a plan of their own (``config.model_type``) that come out exact when cut by the names of layers."""

PRESETS = ("llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3")
"""What DeepSpeed 0.19.8 knows as ``preset_model``; any other name it passes over without a word."""

_SECTION = "tensor_parallel"
_OWN_PLAN = "Say what to cut in tensor_parallel.partition_config of the DeepSpeed configuration"
_HEADS = ("lm_head", "embed_out")  # where DeepSpeed looks for a head


def cut_problems(model: nn.Module, config: CompiledConfig, tp: int) -> list[str]:
    """Why ``model`` cannot be cut into ``tp`` slices, a sentence each."""
    if tp == 1:
        return []
    asked = f"tensor_parallel_size={tp}"
    name = type(model).__name__
    problems = _layers_dropped_at_random(model, asked)
    if config.get(f"{_SECTION}.vocab_parallel_lm_head") is True:
        problems += _head_problems(model, config, tp)
    try:
        if (preset := config.get(f"{_SECTION}.preset_model")) is not None and preset.lower() not in PRESETS:
            said = config.said(f"{_SECTION}.preset_model")
            return [*problems, f"{said} is none of DeepSpeed's: {', '.join(PRESETS)}."]
        specs = _given_specs(config)
        if specs is None:
            specs, refused = _own_specs(model)
            if refused:
                return [
                    *problems,
                    f"{asked}: the plan of {name} asks for {', '.join(refused)}, which DeepSpeed cannot do. "
                    f"{_OWN_PLAN}, or set tensor_parallel_size=1 and shard with zero_stage=3.",
                ]
    except ValueError as error:
        return [*problems, f"tensor_parallel of the DeepSpeed configuration: {error}"]
    if specs is None:
        return problems + _by_name_problems(model, asked)
    return problems + _spec_problems(model, specs, asked)


def _given_specs(config: CompiledConfig) -> Any:
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig

    return TPTrainingConfig(**config.to_dict().get(_SECTION, {})).get_partition_config_object()


def _own_specs(model: nn.Module) -> tuple[Any, list[str]]:
    """The model's own plan as DeepSpeed reads it, None without one; and what in it DeepSpeed does not know."""
    from deepspeed.module_inject.autotp_config import AutoTPConfig
    from deepspeed.module_inject.tp_plan_converter import SUPPORTED_STYLES, TPPlanConverter
    from deepspeed.runtime.tensor_parallel.config import _get_hf_tp_plan

    plan = _get_hf_tp_plan(model)
    if not plan:
        return None, []
    unknown = [f"{layer}={style}" for layer, style in plan.items() if style.lower() not in SUPPORTED_STYLES]
    return (None, unknown) if unknown else (AutoTPConfig(layer_specs=TPPlanConverter.convert(plan)), [])


def _spec_problems(model: nn.Module, specs: Any, asked: str) -> list[str]:
    from deepspeed.module_inject.autotp_config import PartitionType

    name = type(model).__name__
    kind = getattr(getattr(model, "config", None), "model_type", None)
    cut = 0
    problems: list[str] = []
    unfit: dict[str, str] = {}
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if len(getattr(weight, "ds_shape", getattr(weight, "shape", ()))) != 2:
            continue
        spec = specs.find_matching_spec(f"{path}.weight", kind)
        if spec is None:
            if specs.strict_mode and not isinstance(module, nn.Embedding):
                problems.append(f"{asked}: strict_mode is on, and nothing in partition_config is about {path}.weight.")
            continue
        if spec.partition_type == PartitionType.SKIP:
            continue
        cut += 1
        if not (isinstance(module, nn.Linear | nn.Embedding) or is_lora(module)):
            unfit.setdefault(type(module).__name__, path)
    problems += [
        f"{asked}: {path} of {name} is a {what}, and only torch.nn.Linear and torch.nn.Embedding can be cut."
        f"{_ADAPTERS if hasattr(model.get_submodule(path), 'base_layer') else ''} Leave it out of "
        "partition_config, or set tensor_parallel_size=1 and shard with zero_stage=3."
        for what, path in unfit.items()
    ]
    if not cut:
        problems.append(
            f"{asked}: no layer of {name} has a name that is to be cut ("
            f"{', '.join(pattern for spec in specs.layer_specs for pattern in spec.patterns)}). {_OWN_PLAN}."
        )
    return problems


_ADAPTERS = (
    " Of what an adapter library wraps, only LoRA around a plain layer, without dropout and DoRA, can be cut with the "
    "layer."
)


def _by_name_problems(model: nn.Module, asked: str) -> list[str]:
    name = type(model).__name__
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in CUT_BY_NAME:
        return [
            f"{asked}: {name} has no plan of what to cut (_tp_plan), and cutting it by the names of its layers, which "
            f"is right for {', '.join(CUT_BY_NAME)}, could give wrong numbers. {_OWN_PLAN}, or set "
            "tensor_parallel_size=1."
        ]
    wrapped = [path for path, module in model.named_modules() if hasattr(module, "base_layer")]
    if wrapped:
        return [
            f"{asked}: {wrapped[0]} of {name} is wrapped by an adapter library, and without a plan only plain layers "
            "can be cut. Set it to 1."
        ]
    return []


def _head_problems(model: nn.Module, config: CompiledConfig, tp: int) -> list[str]:
    said = config.said(f"{_SECTION}.vocab_parallel_lm_head")
    heads = [
        module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and path.split(".")[-1] in _HEADS
    ]
    if len(heads) != 1 or not hasattr(model, "loss_function"):
        return [
            f"{said}: {type(model).__name__} has {len(heads)} layers torch.nn.Linear named {' or '.join(_HEADS)}"
            f"{'' if hasattr(model, 'loss_function') else ' and no loss_function'}, and needs one of each. "
            "Leave vocab_parallel_lm_head out."
        ]
    if heads[0].out_features < tp:
        return [
            f"{said}: the head has {heads[0].out_features} rows, fewer than tensor_parallel_size={tp}. Leave it out."
        ]
    return []


def _layers_dropped_at_random(model: nn.Module, asked: str) -> list[str]:
    """Layers skipped at random would be skipped by one rank and waited for by another."""
    config = getattr(model, "config", None)
    rates = vars(config) if hasattr(config, "__dict__") else {}
    return [
        f"{asked}: {name}={rate} of the model's configuration drops whole layers at random, and ranks would "
        "drop others. Set it to 0."
        for name, rate in rates.items()
        if "layerdrop" in name.lower() and isinstance(rate, float) and rate > 0.0
    ]
