"""What a Trainer is given as a model: a module, a directory or hub name, or a configuration. Each becomes a module."""

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
from ds_trainer.checkpoint.weights.description import DESCRIPTION_FILE, ModelDescription
from ds_trainer.engine.loading.placement import materialize
from ds_trainer.engine.loading.report import LoadReport, load_meter
from ds_trainer.engine.loading.weight_source import FirstThatHas, attach_weights, attached_weights
from ds_trainer.parallel.places import Place
from ds_trainer.training.loading.adapters import with_adapters
from ds_trainer.training.loading.pretrained import from_config, from_pretrained
from ds_trainer.utils.errors import ConfigError

_OF_CONFIGURATIONS = {"auto_class", "dtype"}


def is_named(model: Any) -> bool:
    """Whether ``model`` says where the model is, or what it is, instead of being one."""
    return isinstance(model, (str, os.PathLike)) or _is_configuration(model)


def model_of(given: Any, args: TrainingArguments, peft_config: Any = None, for_generation: bool = False) -> Any:
    """The module that ``given`` means; what is named comes on meta, with its weight source.

    Args:
        given: a module, a directory or hub name, or a configuration of transformers.
        args: ``model_init_kwargs``, ``allow_new_weights`` and ``seed`` are read.
        peft_config: of PEFT; puts adapters around it.
        for_generation: a configuration that names no class is of a language model.

    Raises:
        ConfigError: it cannot be made, or ``model_init_kwargs`` are of no use for it.
    """
    keywords = dict(as_mapping(args.model_init_kwargs) or {})
    if isinstance(given, (str, os.PathLike)):
        keywords.setdefault("allow_new_weights", args.allow_new_weights)
        of_args = {"seed": args.seed, "peft_config": peft_config, "device": args.device}
        return from_pretrained(given, **{**of_args, **keywords})
    if _is_configuration(given) and keywords.keys() <= _OF_CONFIGURATIONS:
        if for_generation and not given.architectures:
            kind = "AutoModelForSeq2SeqLM" if given.is_encoder_decoder else "AutoModelForCausalLM"
            keywords.setdefault("auto_class", kind)
        return from_config(given, **{"seed": args.seed, "peft_config": peft_config, **keywords})
    if keywords:
        raise ConfigError(
            f"model_init_kwargs={keywords} ({args.where('model_init_kwargs')}) are for a model that is named by its "
            f"directory or hub name (auto_class and dtype: also by its configuration), but a {type(given).__name__} is "
            "given. Leave them out."
        )
    if peft_config is None:
        return given
    source = attached_weights(given)
    wrapped, source = with_adapters(given, source, peft_config, args.seed)
    if source is not None:
        attach_weights(wrapped, source)
    return wrapped


def is_on_meta(model: nn.Module) -> bool:
    """Whether ``model`` has parameters on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())


def put_on_device(model: nn.Module, device: torch.device) -> None:
    """Move all of ``model`` to ``device``; what is on meta is loaded there."""
    if is_on_meta(model):
        materialize(model, device)
    model.to(device)


class LeftToCheckpoint:
    """Weights that a checkpoint brings after the engine is built: nothing is read for them before.

    Args:
        names: of the tensors that the checkpoint holds.
    """

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def has(self, name: str) -> bool:
        return name in self._names

    def fill(self, name: str, place: Place, target: torch.Tensor) -> None:
        target.zero_()


def leave_to_checkpoint(model: nn.Module, checkpoint: Path) -> None:
    """Read no file for the weights of ``model`` that ``checkpoint`` holds."""
    source = attached_weights(model)
    if source is None or not (checkpoint / DESCRIPTION_FILE).is_file():
        return
    held = {tensor.kept_as for tensor in ModelDescription.read(checkpoint).tensors if tensor.kept_as is not None}
    attach_weights(model, FirstThatHas([LeftToCheckpoint(held), source]))


class MeasuredLoad:
    """A load of a model; ``report`` tells what it took, of all ranks. None where there was nothing to load."""

    def __init__(self) -> None:
        self.report: LoadReport | None = None

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Inside, ``model`` gets its weights. Collective at the end."""
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
