"""PEFT adapters around a model on meta: the base comes from its files, the adapters from PEFT or their file."""

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
from ds_trainer.parallel.places import Place
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


class Renamed:
    """A weight source whose tensors have other names in the model.

    Args:
        source: where the numbers come from.
        names: for each name of the model, that of the source.
    """

    def __init__(self, source: WeightSource, names: Mapping[str, str]) -> None:
        self.sources = [source]
        self._source = source
        self._names = names

    def has(self, name: str) -> bool:
        return name in self._names and self._source.has(self._names[name])

    def fill(self, name: str, place: Place, target: torch.Tensor) -> None:
        self._source.fill(self._names[name], place, target)


def with_adapters(model: nn.Module, source: WeightSource | None, peft_config: Any, seed: int) -> tuple[Any, Any]:
    """``model`` with new adapters as ``peft_config`` says, and the source of what is on meta then.

    The adapters are made by PEFT itself, on the CPU, with its own initialization; their numbers follow from ``seed``,
    so that they are alike on all ranks. The copies of ``modules_to_save`` begin as what they copy.

    Args:
        model: the base, on meta or not; it is changed in place.
        source: of its weights; None for a model that has them.
        peft_config: of PEFT.
        seed: of the adapters' random numbers.

    Raises:
        ConfigError: PEFT is not installed or refuses, or the adapters are computed from weights that are on meta.
    """
    peft = imported_peft()
    if not isinstance(peft_config, peft.PeftConfig):
        raise ConfigError(
            f"peft_config is a {type(peft_config).__name__}: pass one of PEFT's, such as peft.LoraConfig(...)."
        )
    base = _names_of(model)
    lent = _NumbersForAdapters(model, getattr(peft_config, "modules_to_save", None) or ())
    with _refused_in_words(peft_config, model, lent.count), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with lent:
            wrapped = peft.get_peft_model(model, peft_config)
    _check_numbers(wrapped, base, lent.count)
    return wrapped, None if source is None else _source_of(wrapped, source, base)


def with_saved_adapters(model: nn.Module, source: WeightSource | None, directory: Path) -> tuple[Any, Any]:
    """``model`` with the adapters that are saved in ``directory``, to train them on.

    Raises:
        ConfigError: they do not fit the model.
    """
    peft = imported_peft()
    base = _names_of(model)
    peft_config = peft.PeftConfig.from_pretrained(str(directory))
    with _refused_in_words(peft_config, model), _NumbersForAdapters(model, ()):
        wrapped = peft.PeftModel.from_pretrained(model, str(directory), is_trainable=True, torch_device="cpu")
    lacking = [n for n, p in wrapped.named_parameters() if id(p) not in base and not p.is_meta and p.isnan().any()]
    if lacking:
        raise ConfigError(f"{directory} has no weights for {', '.join(lacking[:4])}, or some that are not finite.")
    return wrapped, None if source is None else _source_of(wrapped, source, base)


@dataclass(frozen=True)
class SavedAdapters:
    """What a directory of adapters says of the model that they belong to.

    Attributes:
        base: directory or hub name of the base.
        auto_class: the class for its task; None where it does not say one.
        modules: names of modules of which the directory has all weights.
    """

    base: str
    auto_class: str | None
    modules: tuple[str, ...]

    @classmethod
    def of(cls, directory: Path) -> SavedAdapters:
        """Read ``adapter_config.json``.

        Raises:
            ConfigError: it does not name the base.
        """
        saved = imported_peft().PeftConfig.from_pretrained(str(directory))
        base = saved.base_model_name_or_path
        if not base:
            raise ConfigError(
                f"{directory / ADAPTER_CONFIG} does not say what the adapters belong to (base_model_name_or_path). "
                "Write the directory or hub name of the base model there."
            )
        beside = directory / base
        task = getattr(saved.task_type, "value", saved.task_type)
        modules = tuple(getattr(saved, "modules_to_save", None) or ())
        return cls(str(beside if beside.is_dir() else base), _CLASS_OF_TASK.get(str(task)), modules)

    def allowing(self, patterns: Sequence[str] | bool) -> Sequence[str] | bool:
        """``allow_new_weights`` for the base: what the adapters bring need not be in its files."""
        if isinstance(patterns, bool):
            return patterns or self.allowing(())
        return [*patterns, *(form.format(name) for name in self.modules for form in ("{}.*", "*.{}.*"))]


def peft_config_of(fields: Mapping[str, Any], where: str) -> Any:
    """The configuration of PEFT with these ``fields`` (``peft_type`` and its own).

    Raises:
        ConfigError: PEFT knows no such method or field.
    """
    kinds = {str(kind.value): made for kind, made in imported_peft().PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    values = dict(fields)
    kind = str(values.pop("peft_type", ""))
    if kind not in kinds:
        raise ConfigError(f"{where}: peft_type={kind!r} is no method of PEFT.{did_you_mean(kind.upper(), kinds)}")
    known = [field.name for field in dataclasses.fields(kinds[kind])]
    problems = [
        f"{where}: '{name}' is no field of {kinds[kind].__name__}.{did_you_mean(name, known)}"
        for name in values
        if name not in known
    ]
    if problems:
        raise ConfigError(problems)
    return kinds[kind](**values)


def imported_peft() -> Any:
    """The package ``peft``.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import peft
    except ImportError:
        raise ConfigError("Adapters (peft_config, adapter_config.json) need PEFT: pip install peft.") from None
    return peft


def _names_of(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


class _NumbersForAdapters:
    """Inside, parameters on meta are on the CPU, so that PEFT makes its adapters there.

    They take no memory: all elements of a parameter are one number. It is NaN, so that an adapter that is computed from
    them can be told. Modules of which PEFT only makes copies stay on meta.
    """

    def __init__(self, model: nn.Module, copied: Sequence[str]) -> None:
        ends = tuple(copied)
        self._lent = [
            (parameter, nn.Parameter(_nan_like(parameter), parameter.requires_grad))
            for name, parameter in model.named_parameters()
            if parameter.is_meta and not (set(name.split(".")) & set(ends))
        ]
        self.count = len(self._lent)

    def __enter__(self) -> None:
        for parameter, numbers in self._lent:
            torch.utils.swap_tensors(parameter, numbers)

    def __exit__(self, *_: object) -> None:
        for parameter, numbers in self._lent:
            trained = parameter.requires_grad  # PEFT freezes the base
            torch.utils.swap_tensors(parameter, numbers)
            parameter.requires_grad_(trained)


def _nan_like(parameter: torch.Tensor) -> torch.Tensor:
    return torch.full((), float("nan"), dtype=parameter.dtype).expand(parameter.shape)


def _check_numbers(wrapped: nn.Module, base: Mapping[int, str], lent: int) -> None:
    """Copies of the base go to meta like what they copy; nothing else may have its numbers from there."""
    if not lent:
        return
    everything = dict(wrapped.named_parameters(remove_duplicate=False))
    unknown = []
    for name, parameter in everything.items():
        if id(parameter) in base or parameter.is_meta:
            continue
        if id(everything.get(_COPIES.sub(".original_module.", name))) in base:
            empty = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            torch.utils.swap_tensors(parameter, empty)
        elif bool(parameter.isnan().any()):
            unknown.append(name)
    if unknown:
        raise ConfigError(
            f"peft_config: PEFT computes {', '.join(unknown[:4])}{' ...' if len(unknown) > 4 else ''} from the weights "
            f"of the base, which are not loaded when the adapters are made. {_REMEDY}"
        )


def _source_of(wrapped: nn.Module, source: WeightSource, base: Mapping[int, str]) -> Renamed:
    """Parameters of the base are the very objects that they were, under longer names."""
    everything = dict(wrapped.named_parameters(remove_duplicate=False))
    names = {}
    for name, parameter in everything.items():
        original = everything.get(_COPIES.sub(".original_module.", name))
        known = base.get(id(parameter)) or base.get(id(original))
        if parameter.is_meta and known is not None:
            names[name] = known
    return Renamed(source, names)


_REMEDY = "Load the base by AutoModel...from_pretrained and pass that model with peft_config to the Trainer."


@contextmanager
def _refused_in_words(peft_config: Any, model: nn.Module, lent: int = 0) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        said = " ".join(str(error).split())[:400]
        hint = (
            f" If they are computed from the weights of the base: those are not loaded yet. {_REMEDY}" if lent else ""
        )
        raise ConfigError(
            f"PEFT cannot put {type(peft_config).__name__} around {type(model).__name__}: {said}.{hint}"
        ) from error
