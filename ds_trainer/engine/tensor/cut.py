"""What happens between DeepSpeed's cut of a model and the optimizer that is built over the slices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ds_trainer.engine.tensor.adapters import lora_is_cut
from ds_trainer.engine.tensor.embeddings import embeddings_are_cut_in_place
from ds_trainer.engine.tensor.head import install_whole_logits, loss_of_its_own
from ds_trainer.engine.tensor.randomness import separate_randomness
from ds_trainer.engine.tensor.repairs import mark_sliced_embeddings, repair_layers
from ds_trainer.engine.tensor.slices import is_sliced
from ds_trainer.parallel.groups import ParallelGroups
from ds_trainer.utils.errors import ConfigError


@contextmanager
def completed_cut(groups: ParallelGroups, whole_logits: bool) -> Iterator[None]:
    """While an engine is made, complete what DeepSpeed does to the model when it cuts it.

    Args:
        groups: whose ``tp`` group shares the slices.
        whole_logits: somebody besides the model's own loss reads logits in training.

    Raises:
        ConfigError: the model was left whole.
    """
    if groups.layout.tp == 1:
        yield
        return
    from deepspeed.runtime.engine import DeepSpeedEngine

    original = DeepSpeedEngine._apply_autotp_partitioning

    def cut(engine: Any, model: nn.Module, settings: Any) -> Any:
        if getattr(model, "ds_autotp_parsed", False):
            return original(engine, model, settings)  # by an engine before, and completed then
        given_loss = loss_of_its_own(model)
        with (
            lora_is_cut(),
            embeddings_are_cut_in_place(),
            _on_the_host(settings),
            _input_embeddings_may_be_missing(model),
        ):
            replaced = original(engine, model, settings)
        mark_sliced_embeddings(model, groups.tp)
        if not any(is_sliced(parameter) for parameter in model.parameters()):
            raise ConfigError(
                f"tensor_parallel_size={groups.layout.tp}, but DeepSpeed sliced no parameter of "
                f"{type(model).__name__}: every rank would compute the same. Say what to slice in "
                "tensor_parallel.partition_config of the DeepSpeed configuration, or set tensor_parallel_size=1."
            )
        install_whole_logits(model, whole_logits, given_loss)
        separate_randomness(model, groups)
        return replaced

    repair_layers()
    DeepSpeedEngine._apply_autotp_partitioning = cut
    try:
        yield
    finally:
        DeepSpeedEngine._apply_autotp_partitioning = original


@contextmanager
def _on_the_host(settings: Any) -> Iterator[None]:
    """Slices stay where the whole tensors are: they go to the device one at a time, when they are needed there.

    DeepSpeed would move every slice to the device, where ZeRO-3 wants no more than shards. Only while it cuts: it asks
    the same switch when a weight that was gathered is cut again.
    """
    from deepspeed.module_inject.layers import TensorParallel_Layer

    settings.keep_module_on_host = True
    try:
        yield
    finally:
        TensorParallel_Layer.set_keep_module_on_host(False)


@contextmanager
def _input_embeddings_may_be_missing(model: Any) -> Iterator[None]:
    """DeepSpeed 0.19.8 asks for ``get_input_embeddings()``, which models of two towers (CLIP) do not implement.

    It only wants a tied embedding that is no ``nn.Embedding``; the others it finds by itself.
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
