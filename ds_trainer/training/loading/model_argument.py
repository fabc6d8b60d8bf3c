"""Resolves the model argument of a Trainer: a module, a directory or Hub name, or a configuration."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_trainer.arguments.completion import as_mapping
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.checkpoint.weights.model_description import DESCRIPTION_FILE, ModelDescription
from ds_trainer.engine.compilation import compiled_in_place
from ds_trainer.engine.loading.load_report import LoadReport, load_meter
from ds_trainer.engine.loading.placement import materialize
from ds_trainer.engine.loading.weight_source import ChainedSource, attach_weight_source, attached_weight_source
from ds_trainer.parallel.shard_slices import ShardSlice
from ds_trainer.utils.errors import ConfigError

_CONFIGURATION_KEYWORDS = {"auto_class", "dtype"}


def is_model_reference(model: Any) -> bool:
    """Whether ``model`` is a directory, Hub name or configuration instead of a module."""
    return isinstance(model, (str, os.PathLike)) or _is_configuration(model)


def resolve_model(given: Any, args: TrainingArguments, peft_config: Any = None, for_generation: bool = False) -> Any:
    """Returns the module for ``given``. A reference becomes a module on meta with a weight source.

    Args:
        given: a module, a directory or Hub name, or a transformers configuration.
        args: provides ``model_init_kwargs``, ``allow_new_weights``, ``seed`` and ``device``.
        peft_config: a PEFT configuration; adds adapters to the model.
        for_generation: build a language model from a configuration that names no class.

    Raises:
        ConfigError: the model cannot be built, or ``model_init_kwargs`` do not apply to it.
    """
    keywords = dict(as_mapping(args.model_init_kwargs) or {})
    if is_model_reference(given):  # imported here: a start with a module does not need it
        from ds_trainer.training.loading.pretrained import from_config, from_pretrained
    if isinstance(given, (str, os.PathLike)):
        keywords.setdefault("allow_new_weights", args.allow_new_weights)
        defaults = {"seed": args.seed, "peft_config": peft_config, "device": args.device}
        return from_pretrained(given, **{**defaults, **keywords})
    if _is_configuration(given) and keywords.keys() <= _CONFIGURATION_KEYWORDS:
        if for_generation and not given.architectures:
            kind = "AutoModelForSeq2SeqLM" if given.is_encoder_decoder else "AutoModelForCausalLM"
            keywords.setdefault("auto_class", kind)
        return from_config(given, **{"seed": args.seed, "peft_config": peft_config, **keywords})
    if keywords:
        raise ConfigError(
            f"model_init_kwargs={keywords} ({args.where('model_init_kwargs')}) require a model given as a directory or "
            f"Hub name (auto_class and dtype: also as a configuration), but the model is a {type(given).__name__}. "
            "Remove them."
        )
    given = compiled_in_place(given)
    if peft_config is None:
        return given
    from ds_trainer.training.loading.peft_adapters import add_adapters

    source = attached_weight_source(given)
    wrapped, source = add_adapters(given, source, peft_config, args.seed)
    if source is not None:
        attach_weight_source(wrapped, source)
    return wrapped


def is_on_meta(model: nn.Module) -> bool:
    """Whether ``model`` has parameters on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())


def put_on_device(model: nn.Module, device: torch.device) -> None:
    """Move ``model`` to ``device``; tensors on meta are loaded there."""
    if is_on_meta(model):
        materialize(model, device)
    model.to(device)


class DeferredWeights:
    """A weight source for tensors that a checkpoint restores after the engine is built; fills them with zeros.

    Args:
        names: names of the tensors in the checkpoint.
    """

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def has(self, name: str) -> bool:
        """Whether this source holds the tensor."""
        return name in self._names

    def fill(self, name: str, shard_slice: ShardSlice, target: torch.Tensor) -> None:
        """Write the elements of a shard into ``target``."""
        target.zero_()


def defer_to_checkpoint(model: nn.Module, checkpoint: Path) -> None:
    """Skip reading the weights of ``model`` that ``checkpoint`` contains."""
    source = attached_weight_source(model)
    if source is None or not (checkpoint / DESCRIPTION_FILE).is_file():
        return
    restored = {tensor.kept_as for tensor in ModelDescription.read(checkpoint).tensors if tensor.kept_as is not None}
    attach_weight_source(model, ChainedSource([DeferredWeights(restored), source]))


class MeasuredLoad:
    """Measures a load of a model; ``report`` covers all ranks and is None if there was nothing to load."""

    def __init__(self) -> None:
        self.report: LoadReport | None = None

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Measures the block that loads ``model``. Collective at the end of the block."""
        meter = load_meter(model, _name_of(model))
        if meter is None:
            yield
            return
        with meter.running():
            yield
        assert meter.report is not None  # it has ended
        self.report = meter.report.of_all_ranks()


def _name_of(model: Any) -> str:
    return str(getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__)


def _is_configuration(model: Any) -> bool:
    return any(kind.__module__ == "transformers.configuration_utils" for kind in type(model).__mro__)
