"""``PlannedModel``: what the planner knows about a model: parameters, layers, formulas of activations. No weights."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_trainer import __version__
from ds_trainer.planner.activations.formula import Activations, BytesPerToken, activations_of
from ds_trainer.planner.activations.probed import Probe
from ds_trainer.planner.flops import forward_flops
from ds_trainer.planner.parameters.groups import ParameterGroup, total
from ds_trainer.planner.parameters.modules import has_tensor_parallel_plan, with_partition
from ds_trainer.planner.transformer_shape import Stack, Transformer
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import read_json, user_cache, write_json
from ds_trainer.utils.logging import get_logger

if TYPE_CHECKING:
    from torch import nn

logger = get_logger(__name__)

IMBALANCE = 1.3
"""Tokens of the rank whose experts get most of them, relative to the mean, where experts are divided: an assumption."""


@dataclass(frozen=True)
class PlannedModel:
    """A model of any kind.

    Args:
        name: for reports.
        family: ``model_type`` of the configuration, or the class of a module without one.
        parameters: groups of equal parameters, tied ones once, without adapters.
        transformer: dimensions of its layers, in one or more stacks.
        rows: rows of the vocabulary at the LM head; 0 for a model without one.
        max_length: positions that it was made for; None if its configuration does not say.
        lora_rank: rank of adapters on all linear layers, which alone are trained; 0 without them.
        class_name: class of the model.
        own_adapters: the adapters of a module of PEFT.
        probe: what its layers took on a device, which corrects the formulas; None if that was not measured.
        busiest_expert: share of a layer's tokens that its busiest expert gets, as runs have it; None without any.
    """

    name: str
    family: str
    parameters: tuple[ParameterGroup, ...]
    transformer: Transformer
    rows: int
    max_length: int | None = None
    lora_rank: int = 0
    class_name: str = ""
    own_adapters: tuple[ParameterGroup, ...] = ()
    probe: Probe | None = None
    busiest_expert: float | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str = "the model", lora_rank: int = 0) -> PlannedModel:
        """Read a Hugging Face configuration.

        The model is made on the meta device by transformers, which takes some seconds. What was read is kept in a file
        of the user, from which it comes if the same configuration is planned again.

        Raises:
            ConfigError: transformers does not know this family, or cannot make this configuration.
        """
        known = read_description(config)
        if known is None:
            from ds_trainer.planner.meta_model import meta_model

            module = meta_model(config, name)
            known = cls.from_module(module, name)
            write_description(config, known)
        return replace(known, name=name, lora_rank=lora_rank)

    @classmethod
    def from_module(cls, module: nn.Module, name: str | None = None) -> PlannedModel:
        """Read any module, which may be on the meta device. Its weights are not read.

        Frozen parameters are those without ``requires_grad``; the adapters of PEFT are kept apart; weights that
        bitsandbytes quantized count with their elements before, and the bytes that they have.

        Raises:
            ConfigError: it has no parameters.
        """
        from ds_trainer.planner.module_stacks import module_transformer
        from ds_trainer.planner.parameters.modules import module_parameters

        unwrap: Any = getattr(module, "get_base_model", None)
        base = unwrap() if callable(unwrap) else module
        groups = module_parameters(module)
        if not groups:
            raise ConfigError(f"{type(base).__name__} has no parameters to plan for.")
        own = with_partition((group for group in groups if group.kind != "adapter"), has_tensor_parallel_plan(base))
        adapters = tuple(group for group in groups if group.kind == "adapter")
        config = _as_mapping(getattr(base, "config", None))
        transformer = module_transformer(module, own)
        text = config.get("text_config")
        return cls(
            name or type(base).__name__,
            str(config.get("model_type") or type(base).__name__),
            own,
            transformer,
            transformer.vocabulary,
            _max_length({**config, **(text if isinstance(text, Mapping) else {})}),
            class_name=type(base).__name__,
            own_adapters=adapters,
        )

    def quantized(self, element_bytes: float) -> PlannedModel:
        """The model with the weights of linear layers in so many bytes an element, but the LM head, as bitsandbytes
        stores the frozen base of adapters (:func:`bitsandbytes_bytes`).
        """
        groups = tuple(
            replace(group, element_bytes=element_bytes)
            if group.kind in ("attention", "mlp") and len(group.shape) == 2
            else group
            for group in self.parameters
        )
        return replace(self, parameters=groups)

    @property
    def stack(self) -> Stack:
        """Dimensions of the layers that the LM head follows: of the decoder, if there are several stacks."""
        return self.transformer.stacks[-1]

    @cached_property
    def total(self) -> int:
        """Parameters, without adapters."""
        return total(self.parameters)

    @cached_property
    def tensors(self) -> int:
        """Number of parameters as tensors, with adapters."""
        return sum(group.copies for group in (*self.parameters, *self.adapters))

    @cached_property
    def trainable(self) -> int:
        """Parameters that are trained."""
        return total(self.trained_parameters)

    @cached_property
    def trained_parameters(self) -> tuple[ParameterGroup, ...]:
        """Those that have gradients: adapters, or what is not frozen."""
        own = () if self.lora_rank else self.parameters
        return tuple(group for group in (*own, *self.adapters) if group.trained)

    @cached_property
    def adapters(self) -> tuple[ParameterGroup, ...]:
        """The adapters of PEFT, or those of ``lora_rank`` on all linear layers.

        Two matrices for each linear layer, ``rank x inputs`` and ``outputs x rank``.
        """
        if not self.lora_rank:
            return self.own_adapters
        adapters = []
        for group in self.parameters:
            if group.stack is not None and len(group.shape) == 2 and group.kind in ("attention", "mlp"):
                outputs, inputs = group.shape
                first, second = (None, 0) if group.split == 0 else (1, None)
                made = replace(group, kind="adapter", trained=True, element_bytes=None)
                adapters.append(replace(made, name=f"{group.name}.A", shape=(self.lora_rank, inputs), split=first))
                adapters.append(replace(made, name=f"{group.name}.B", shape=(outputs, self.lora_rank), split=second))
        return (*self.own_adapters, *adapters)

    def weight_bytes(self, width: float) -> float:
        """Bytes of all weights with adapters, if those that are not quantized have ``width`` bytes an element."""
        elements, quantized = self._stored
        return width * elements + quantized

    @cached_property
    def _stored(self) -> tuple[int, float]:
        """Elements that are not quantized, and bytes of those that are."""
        groups = (*self.parameters, *self.adapters)
        elements = sum(group.total for group in groups if group.element_bytes is None)
        return elements, sum(group.total * group.element_bytes for group in groups if group.element_bytes is not None)

    def flops(self, length: int) -> tuple[float, float]:
        """FLOPs of the forward pass of a sequence: products with weights; products of queries, keys and values.

        Args:
            length: tokens of the sequence.
        """
        flops = self._flops.get(length)
        if flops is None:
            flops = self._flops[length] = forward_flops(self.transformer, length, length, True)
        return flops

    @cached_property
    def _flops(self) -> dict[int, tuple[float, float]]:
        return {}

    @cached_property
    def stacked_experts(self) -> int:
        """Experts of a layer, if its weights have them stacked, so that ranks can divide them; otherwise 1."""
        counts = {group.shape[0] for group in self.parameters if group.is_stacked_experts}
        return math.gcd(*counts) if counts else 1

    def imbalance(self, ep: int) -> float:
        """Tokens of the rank whose experts get most, relative to the mean of ``ep`` ranks that divide the experts.

        As runs have it: that of the busiest expert, whose neighbors get what the others leave. Else an assumption.
        """
        experts = self.stack.experts
        if self.busiest_expert is None or experts <= 1:
            return IMBALANCE
        beside = (1 - self.busiest_expert) * (experts // ep - 1) / (experts - 1)
        return max(1.0, ep * (self.busiest_expert + beside))

    @cached_property
    def expert_elements(self) -> tuple[int, int]:
        """Elements of stacked experts, and those that are trained."""
        groups, trained = [g for g in self.parameters if g.is_stacked_experts], set(self.trained_parameters)
        return total(groups), total(group for group in groups if group in trained)

    def with_layers(self, layers: int) -> PlannedModel:
        """The same model with another number of layers in the stack before its head."""
        last, stack = len(self.transformer.stacks) - 1, self.stack
        stack = replace(
            stack,
            layers=layers,
            windowed_layers=min(layers, stack.windowed_layers),
            expert_layers=min(layers, stack.expert_layers * layers // stack.layers),
        )

        def scaled(groups: tuple[ParameterGroup, ...]) -> tuple[ParameterGroup, ...]:
            return tuple(
                replace(group, copies=max(1, group.copies * layers // self.stack.layers))
                if group.stack == last
                else group
                for group in groups
            )

        transformer = replace(self.transformer, stacks=(*self.transformer.stacks[:-1], stack))
        own = scaled(self.own_adapters)
        return replace(self, parameters=scaled(self.parameters), transformer=transformer, own_adapters=own)

    def bytes_per_token(
        self, sizes: Mapping[str, float], attention: str, number_format: str, stack: Stack | None = None
    ) -> BytesPerToken:
        """Activations of a stack for the dimensions of a rank, corrected by :attr:`probe`.

        Args:
            sizes: the result of :func:`~ds_trainer.planner.layer_sizes.layer_sizes`.
            attention: see :meth:`activations`.
            number_format: see :meth:`activations`.
            stack: see :meth:`activations`.
        """
        sizes_of_layer, probe = self.activations(attention, number_format, stack)[0].bytes_per_token(sizes), self.probe
        if probe is None or (probe.attention, probe.number_format) != (attention, number_format):
            return sizes_of_layer
        return probe.corrected(
            sizes_of_layer, self._probed_layer(attention, number_format, sizes["length"]), sizes["length"]
        )

    def _probed_layer(self, attention: str, number_format: str, length: float) -> float:
        """Bytes per token that a whole layer keeps, as the formulas say."""
        from ds_trainer.planner.layer_sizes import layer_sizes

        sizes = layer_sizes(self.stack, self.rows, int(length))
        return self.activations(attention, number_format)[0].bytes_per_token(sizes).layer

    def activations(self, attention: str, number_format: str, stack: Stack | None = None) -> tuple[Activations, str]:
        """Formulas of the activations of a stack, and the family from which they are.

        A family whose models have only eager attention has that. A stack that the table does not have is taken for one
        like Llama, or like BERT if it is not causal.

        Args:
            attention: ``sdpa`` (also FlashAttention and FlexAttention) or ``eager``.
            number_format: ``bf16`` (also fp16) or ``fp32``.
            stack: one of ``transformer.stacks``; default: :attr:`stack`.
        """
        stack = self.stack if stack is None else stack
        similar = ("llama",) if stack.causal else ("bert", "llama")
        own = stack.family or self.family
        for family, kind in ((own, attention), (own, "eager"), *((family, attention) for family in similar)):
            activations = activations_of(family, kind, number_format)
            if activations is not None:
                return activations, family
        raise LookupError("the table of activations has no entry for llama")


def elements_of_rank(groups: Sequence[ParameterGroup], stack: Stack, tp: int) -> list[tuple[int, int]]:
    """Elements of one parameter and number of such parameters, for the rank of ``tp`` ranks that has most."""
    return [(_sliced(group, stack, tp), group.copies) for group in groups]


def _sliced(group: ParameterGroup, stack: Stack, tp: int) -> int:
    if tp == 1 or group.split is None:
        return group.numel
    width = group.shape[group.split]
    if group.kind == "attention":  # whole key heads with their queries
        share = math.ceil(stack.kv_heads / tp) / stack.kv_heads
        return int(group.numel // width * math.ceil(width * share))
    return group.numel // width * math.ceil(width / tp)


def _max_length(config: Mapping[str, Any]) -> int | None:
    lengths = (config.get("max_position_embeddings"), config.get("n_positions"))
    return next((int(value) for value in lengths if value), None)


def _as_mapping(config: Any) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    return dict(config.to_dict()) if hasattr(config, "to_dict") else {}


def bitsandbytes_bytes(options: Mapping[str, Any]) -> float:
    """Bytes of an element of a weight with its scales.

    Args:
        options: fields of transformers' BitsAndBytesConfig.

    Source: bitsandbytes, ``functional.quantize_4bit``: a float32 scale for 64 elements, or with double quantization a
    byte, and a float32 for 256 of these.
    """
    if not options.get("load_in_4bit"):
        return 1.0  # 8 bits, and a scale for each row
    return 0.5 + (1 + 4 / 256) / 64 if options.get("bnb_4bit_use_double_quant") else 0.5 + 4 / 64


_DESCRIPTION = 1
"""Version of the files of :func:`write_description`."""
_DESCRIBED = ("name", "family", "parameters", "transformer", "rows", "max_length", "class_name")


def _description_file(config: Mapping[str, Any]) -> Path | None:
    """The file for a configuration and the versions that read it; None without transformers."""
    try:
        libraries = version("transformers")
    except PackageNotFoundError:
        return None
    key = json.dumps([_DESCRIPTION, __version__, libraries, config], sort_keys=True, default=str)
    return user_cache() / "models" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def read_description(config: Mapping[str, Any]) -> PlannedModel | None:
    """The model of ``config`` as an earlier call read it; None if there was none, or its file is damaged."""
    path = _description_file(config)
    try:
        values = None if path is None else read_json(path)
        if values is None:
            return None
        groups = tuple(ParameterGroup(**{**group, "shape": tuple(group["shape"])}) for group in values["parameters"])
        stacks = tuple(Stack(**stack) for stack in values["transformer"]["stacks"])
        transformer = Transformer(**{**values["transformer"], "stacks": stacks})
        return PlannedModel(**{**values, "parameters": groups, "transformer": transformer})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.info("%s is written again: %s %s", path, type(error).__name__, error)
        return None


def write_description(config: Mapping[str, Any], model: PlannedModel) -> None:
    """Keep what was read of the model of ``config``. A disk that cannot be written only costs the time again."""
    path = _description_file(config)
    if path is None:
        return
    values = {name: value for name, value in asdict(model).items() if name in _DESCRIBED}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, values)
    except OSError as error:
        logger.info("%s cannot be written: %s", path, error)
