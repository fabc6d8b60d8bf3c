"""Completes DeepSpeed's partitioning of a model, before the optimizer is built over the slices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ds_trainer.engine.tensor_parallel.embedding_partitioning import partition_embeddings_in_place
from ds_trainer.engine.tensor_parallel.lora_partitioning import partition_lora_layers
from ds_trainer.engine.tensor_parallel.partition_check import dense_plan
from ds_trainer.engine.tensor_parallel.repairs import mark_sliced_embeddings, repair_layers
from ds_trainer.engine.tensor_parallel.slices import is_sliced
from ds_trainer.engine.tensor_parallel.tensor_parallel_rng import separate_randomness
from ds_trainer.engine.tensor_parallel.vocab_parallel_head import custom_loss_function, install_logit_gathering
from ds_trainer.parallel.groups import ParallelGroups
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)

_HEAD = "get_output_embeddings"
_REMEDY = (
    "Configure the layers in tensor_parallel.partition_config of the DeepSpeed configuration, or set "
    "tensor_parallel_size=1."
)


@contextmanager
def complete_partitioning(groups: ParallelGroups, gather_logits: bool) -> Iterator[None]:
    """Inside, constructing an engine also completes DeepSpeed's partitioning of the model.

    Args:
        groups: the process groups; the slices are distributed over ``tp``.
        gather_logits: code other than the model's own loss reads logits in training.

    Raises:
        ConfigError: DeepSpeed partitioned no parameter.
    """
    if groups.layout.tp == 1:
        yield
        return
    from deepspeed.runtime.engine import DeepSpeedEngine

    original = DeepSpeedEngine._apply_autotp_partitioning

    def partition(engine: Any, model: nn.Module, settings: Any) -> Any:
        if getattr(model, "ds_autotp_parsed", False):
            return original(engine, model, settings)  # an earlier engine has completed it
        given_loss, inner = custom_loss_function(model), _transformers_model(model)
        own_loss = getattr(model, "loss_function", None)
        with (
            partition_lora_layers(),
            partition_embeddings_in_place(),
            _on_the_host(settings),
            _input_embeddings_may_be_missing(inner),
            _head_left_whole(inner),
            _experts_left_whole(),
        ):
            try:
                replaced = original(engine, inner, settings)
            except AssertionError as error:
                raise ConfigError(
                    f"tensor_parallel_size={groups.layout.tp}: DeepSpeed does not know how to partition "
                    f"{type(inner).__name__}: {error} {_REMEDY}"
                ) from error
        model.ds_autotp_parsed = True  # type: ignore[assignment]
        mark_sliced_embeddings(model, groups.tp)
        if not any(is_sliced(parameter) for parameter in model.parameters()):
            raise ConfigError(
                f"tensor_parallel_size={groups.layout.tp}, but DeepSpeed partitioned no parameter of "
                f"{type(model).__name__}: every rank would compute the same. {_REMEDY}"
            )
        install_logit_gathering(model, gather_logits, given_loss, own_loss)
        separate_randomness(model, groups)
        return replaced

    repair_layers()
    DeepSpeedEngine._apply_autotp_partitioning = partition
    try:
        yield
    finally:
        DeepSpeedEngine._apply_autotp_partitioning = original


def _transformers_model(model: nn.Module) -> nn.Module:
    """The transformers model in a wrapper (sentence-transformers), if there is one; otherwise ``model``.

    DeepSpeed finds the layers by the names of its modules, and reads the number of heads from its configuration.
    """
    parts: list[nn.Module] = []
    for part in model.modules():  # parents before their children
        inside = any(part is inner for found in parts for inner in found.modules())
        if hasattr(type(part), "config_class") and not inside:
            parts.append(part)
    return parts[0] if len(parts) == 1 else model


@contextmanager
def _on_the_host(settings: Any) -> Iterator[None]:
    """Inside, slices stay on the device of the full tensors; they move to the GPU one at a time later.

    DeepSpeed would move every slice to the GPU at once, where ZeRO-3 should hold only shards. The switch is reset
    afterwards, because DeepSpeed also reads it when a gathered weight is partitioned again.
    """
    from deepspeed.module_inject.layers import TensorParallel_Layer

    settings.keep_module_on_host = True
    try:
        yield
    finally:
        TensorParallel_Layer.set_keep_module_on_host(False)


@contextmanager
def _experts_left_whole() -> Iterator[None]:
    """Inside, DeepSpeed reads the plan of a model without its stacked experts, whose styles it does not know."""
    from deepspeed.runtime.tensor_parallel import config

    original = config._get_hf_tp_plan
    config._get_hf_tp_plan = lambda model: dense_plan(model, original(model))
    try:
        yield
    finally:
        config._get_hf_tp_plan = original


@contextmanager
def _head_left_whole(model: nn.Module) -> Iterator[None]:
    """Inside, the plan of a model with a replaced ``forward`` leaves its output embedding whole.

    Such a forward, like that of TRL, multiplies by the weight of the head itself, in pieces. A slice of the weight
    would give the logits of a part of the vocabulary.
    """
    core = next((part for part in model.modules() if "forward" in vars(part) and hasattr(part, _HEAD)), None)
    plan: Any = getattr(core, "_tp_plan", None) or {}
    head = getattr(core, _HEAD)() if core is not None and plan else None
    names = [name for name, part in core.named_modules() if part is head and name in plan] if core is not None else []
    if not names:
        yield
        return
    logger.info("%s.forward was replaced, so %s is not partitioned.", type(core).__name__, ", ".join(names))
    own = vars(model).get("_tp_plan")
    # The plan of the instance overrides that of the class; of the styles, this one means that a layer stays whole.
    core_plan: Any = {**plan, **dict.fromkeys(names, "embedding_rowwise")}
    model._tp_plan = core_plan
    try:
        yield
    finally:
        del model._tp_plan
        if own is not None:
            model._tp_plan = own


@contextmanager
def _input_embeddings_may_be_missing(model: Any) -> Iterator[None]:
    """DeepSpeed 0.19.8 calls ``get_input_embeddings()``, which models with two towers (CLIP) do not implement.

    It only needs the result for a tied embedding that is not an ``nn.Embedding``; others it finds itself.
    """
    getter = getattr(model, "get_input_embeddings", None)
    try:
        if getter is not None:
            getter()
        missing = False
    except NotImplementedError:
        missing = True
        model.get_input_embeddings = lambda: None
    try:
        yield
    finally:
        if missing:
            del model.get_input_embeddings
