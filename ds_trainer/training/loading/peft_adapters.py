"""Adds PEFT adapters to a model on meta: base weights come from its files, adapters from PEFT or their own files."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_trainer.engine.loading.weight_source import WeightSource
from ds_trainer.parallel.shard_slices import ShardSlice
from ds_trainer.training.loading.model_files import ADAPTER_CONFIG
from ds_trainer.utils.errors import ConfigError, did_you_mean

_COPIES = re.compile(r"\.modules_to_save\.[^.]+\.")


_CLASS_OF_TASK = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
}


class RenamedSource:
    """A weight source whose tensors have different names in the model.

    Args:
        source: the underlying source.
        names: the source's name for each name of the model.
    """

    def __init__(self, source: WeightSource, names: Mapping[str, str]) -> None:
        self.sources = [source]
        self._source = source
        self._names = names

    def has(self, name: str) -> bool:
        """Whether this source holds the tensor."""
        return name in self._names and self._source.has(self._names[name])

    def fill(self, name: str, shard_slice: ShardSlice, target: torch.Tensor) -> None:
        """Write the elements of a shard into ``target``."""
        self._source.fill(self._names[name], shard_slice, target)


def add_adapters(model: nn.Module, source: WeightSource | None, peft_config: Any, seed: int) -> tuple[Any, Any]:
    """Adds new adapters to ``model``; returns the PEFT model and the source of its weights on meta.

    PEFT creates the adapters on the CPU with its own initialization. Their values depend only on ``seed``, so they are
    the same on all ranks. The copies of ``modules_to_save`` start as copies of the base.

    Args:
        model: the base, on meta or not; modified in place.
        source: the source of its weights; None if it has them.
        peft_config: a configuration of PEFT.
        seed: seed of the adapters' random values.

    Raises:
        ConfigError: PEFT is not installed or raises an error, or computes adapters from weights that are on meta.
    """
    peft = imported_peft()
    if not isinstance(peft_config, peft.PeftConfig):
        raise ConfigError(
            f"peft_config is a {type(peft_config).__name__}. Pass a PEFT configuration, such as peft.LoraConfig(...)."
        )
    base = _parameter_names(model)
    placeholders = _PlaceholderValues(model, getattr(peft_config, "modules_to_save", None) or ())
    with _peft_errors_explained(peft_config, model, placeholders.count), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with placeholders:
            wrapped = peft.get_peft_model(model, peft_config)
    _check_computed_adapters(wrapped, base, placeholders.count)
    return wrapped, None if source is None else _renamed_source(wrapped, source, base)


def load_adapters(model: nn.Module, source: WeightSource | None, directory: Path) -> tuple[Any, Any]:
    """Adds the adapters saved in ``directory`` to ``model``, to continue training them.

    Raises:
        ConfigError: the adapters do not fit the model.
    """
    peft = imported_peft()
    base = _parameter_names(model)
    peft_config = peft.PeftConfig.from_pretrained(str(directory))
    with _peft_errors_explained(peft_config, model), _PlaceholderValues(model, ()):
        wrapped = peft.PeftModel.from_pretrained(model, str(directory), is_trainable=True, torch_device="cpu")
    missing = [n for n, p in wrapped.named_parameters() if id(p) not in base and not p.is_meta and p.isnan().any()]
    if missing:
        raise ConfigError(
            f"{directory} has no weights for {', '.join(missing[:4])}, or contains NaN. Save the adapters again."
        )
    return wrapped, None if source is None else _renamed_source(wrapped, source, base)


@dataclass(frozen=True)
class AdapterDirectory:
    """A directory of saved adapters.

    Attributes:
        base: directory or Hub name of the base model.
        auto_class: the auto class for the task of the adapters; None if unspecified.
        modules: names of the modules whose weights are all in the directory.
    """

    base: str
    auto_class: str | None
    modules: tuple[str, ...]

    @classmethod
    def of(cls, directory: Path) -> AdapterDirectory:
        """Read ``adapter_config.json``.

        Raises:
            ConfigError: the file does not name the base model.
        """
        saved = imported_peft().PeftConfig.from_pretrained(str(directory))
        base = saved.base_model_name_or_path
        if not base:
            raise ConfigError(
                f"{directory / ADAPTER_CONFIG} does not name the base model. Set base_model_name_or_path in it to a "
                "directory or Hub name."
            )
        local = directory / base
        task = getattr(saved.task_type, "value", saved.task_type)
        modules = tuple(getattr(saved, "modules_to_save", None) or ())
        return cls(str(local if local.is_dir() else base), _CLASS_OF_TASK.get(str(task)), modules)

    def allowing(self, patterns: Sequence[str] | bool) -> Sequence[str] | bool:
        """Returns ``allow_new_weights`` for the base: its files may lack the weights that the adapters provide."""
        if isinstance(patterns, bool):
            return patterns or self.allowing(())
        return [*patterns, *(form.format(name) for name in self.modules for form in ("{}.*", "*.{}.*"))]


def make_peft_config(fields: Mapping[str, Any], where: str) -> Any:
    """Returns a PEFT configuration from ``fields``: ``peft_type`` and the fields of that type.

    Raises:
        ConfigError: PEFT has no such type or field.
    """
    kinds = {str(kind.value): made for kind, made in imported_peft().PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    values = dict(fields)
    kind = str(values.pop("peft_type", ""))
    if kind not in kinds:
        raise ConfigError(f"{where}: peft_type={kind!r} is not a PEFT type.{did_you_mean(kind.upper(), kinds)}")
    known = [field.name for field in dataclasses.fields(kinds[kind])]
    problems = [
        f"{where}: '{name}' is not a field of {kinds[kind].__name__}.{did_you_mean(name, known)}"
        for name in values
        if name not in known
    ]
    if problems:
        raise ConfigError(problems)
    return kinds[kind](**values)


def imported_peft() -> Any:
    """Imports and returns ``peft``.

    Raises:
        ConfigError: PEFT is not installed.
    """
    try:
        import peft
    except ImportError:
        raise ConfigError("Adapters (peft_config, adapter_config.json) require PEFT: pip install peft.") from None
    return peft


def _parameter_names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


class _PlaceholderValues:
    """Replaces parameters on meta by CPU tensors inside the block, so that PEFT creates its adapters on the CPU.

    They take no memory: all elements of a parameter are one expanded NaN, which reveals adapters that are computed from
    them. Modules that PEFT only copies stay on meta.
    """

    def __init__(self, model: nn.Module, copied: Sequence[str]) -> None:
        ends = tuple(copied)
        self._placeholders = [
            (parameter, nn.Parameter(_nan_like(parameter), parameter.requires_grad))
            for name, parameter in model.named_parameters()
            if parameter.is_meta and not (set(name.split(".")) & set(ends))
        ]
        self.count = len(self._placeholders)

    def __enter__(self) -> None:
        for parameter, placeholder in self._placeholders:
            torch.utils.swap_tensors(parameter, placeholder)

    def __exit__(self, *_: object) -> None:
        for parameter, placeholder in self._placeholders:
            requires_grad = parameter.requires_grad  # PEFT freezes the base
            torch.utils.swap_tensors(parameter, placeholder)
            parameter.requires_grad_(requires_grad)


def _nan_like(parameter: torch.Tensor) -> torch.Tensor:
    return torch.full((), float("nan"), dtype=parameter.dtype).expand(parameter.shape)


def _check_computed_adapters(wrapped: nn.Module, base: Mapping[int, str], placeholders: int) -> None:
    """Move copies of base modules to meta; raise if other adapters are computed from the base."""
    if not placeholders:
        return
    parameters = dict(wrapped.named_parameters(remove_duplicate=False))
    computed = []
    for name, parameter in parameters.items():
        if id(parameter) in base or parameter.is_meta:
            continue
        if id(parameters.get(_COPIES.sub(".original_module.", name))) in base:
            empty = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            torch.utils.swap_tensors(parameter, empty)
        elif bool(parameter.isnan().any()):
            computed.append(name)
    if computed:
        raise ConfigError(
            f"peft_config: PEFT computes {', '.join(computed[:4])}{' ...' if len(computed) > 4 else ''} from the base "
            f"weights, which are not loaded when the adapters are created. {_REMEDY}"
        )


def _renamed_source(wrapped: nn.Module, source: WeightSource, base: Mapping[int, str]) -> RenamedSource:
    """Returns a source with the wrapped model's names; the parameters of the base are the same objects as before."""
    parameters = dict(wrapped.named_parameters(remove_duplicate=False))
    names = {}
    for name, parameter in parameters.items():
        original = parameters.get(_COPIES.sub(".original_module.", name))
        known = base.get(id(parameter)) or base.get(id(original))
        if parameter.is_meta and known is not None:
            names[name] = known
    return RenamedSource(source, names)


_REMEDY = "Load the base with AutoModel...from_pretrained and pass that model with peft_config to the Trainer."


@contextmanager
def _peft_errors_explained(peft_config: Any, model: nn.Module, placeholders: int = 0) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        message = " ".join(str(error).split())[:400]
        hint = (
            f" If the adapters are computed from the base weights: those are not loaded yet. {_REMEDY}"
            if placeholders
            else ""
        )
        raise ConfigError(
            f"PEFT cannot apply {type(peft_config).__name__} to {type(model).__name__}: {message}.{hint}"
        ) from error
