"""The layers of a module of any family: their number and dimensions, read from its configuration and its own weights.

The weights of a layer say what they say about dimensions (widths, gates, experts, key heads); the configuration says
the rest (number of heads, windows, experts of a token). Nothing is computed, and the module may be on the meta device.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ds_trainer.planner.parameters.groups import ParameterGroup
from ds_trainer.planner.parameters.modules import layer_lists, whole_shape
from ds_trainer.planner.transformer_shape import Stack, Transformer, first_count, window_of

if TYPE_CHECKING:
    from torch import nn

_HEADS = (
    *("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads"),
    *("encoder_attention_heads", "decoder_attention_heads"),
)
_WIDTHS = ("embed_dim", "hidden_size", "n_embd", "d_model", "dim")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
_CROSS = ("encoder_attn", "EncDecAttention", "crossattention", "cross_attn", "encoder_decoder")
_QUERIES = re.compile(r"(^|\.)(q|query|q_proj|q_lin|query_proj|to_q)$")
_KEYS = re.compile(r"(^|\.)(k|key|k_proj|k_lin|key_proj|to_k|kv_a_proj_with_mqa)$")
_FUSED = re.compile(r"(^|\.)(qkv|c_attn|query_key_value|Wqkv|qkv_proj|in_proj)$", re.IGNORECASE)

ANY_RESOLUTION = 32 * 32
"""Patches of an image, for towers that take any resolution: 448 x 448 pixels with patches of 14 x 14."""


def module_transformer(model: nn.Module, groups: Sequence[ParameterGroup]) -> Transformer:
    """The stacks of ``model``, in the order of :func:`layer_lists`. Without a list of layers it is one layer itself.

    Args:
        model: any module.
        groups: its parameters.
    """
    names = layer_lists(model)
    if not names:
        return _single(model, groups)
    lists = [_Layers(model, name, index, tuple(_of(groups, index))) for index, name in enumerate(names)]
    config = _as_mapping(getattr(model, "config", None))
    encoder_decoder = bool(config.get("is_encoder_decoder")) and len(lists) == 2
    # Rows and columns of the LM head; 0 without one.
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    weight = getattr(head, "weight", None)
    rows, head_width = (0, 0) if weight is None else (whole_shape(weight)[0], whole_shape(weight)[1])
    stacks = [layers.stack(encoder_decoder) for layers in lists]
    last = stacks[-1]
    if encoder_decoder:
        kind = "encoder-decoder"
    elif len(stacks) == 1:
        kind = "decoder" if last.causal else "encoder"
    else:
        kind = "vision-language" if any(stack.positions for stack in stacks[:-1]) else "other"
    # Narrower embeddings (ELECTRA, ALBERT) have a projection from and one to their width.
    is_narrow = rows and head_width < last.hidden_size
    narrower = rows * (head_width - last.hidden_size) + 2 * head_width * last.hidden_size if is_narrow else 0
    causal = last.causal or (kind == "vision-language" and bool(rows))
    stacks[-1] = last = replace(last, causal=causal, outside_weights=last.outside_weights + narrower)
    width = last.hidden_size
    transform = any(
        group.stack is None and group.kind in ("head", "other") and group.shape == (width, width) for group in groups
    )
    return Transformer(kind, tuple(stacks), rows, head_transform=bool(rows) and kind == "encoder" and transform)


def _single(model: nn.Module, groups: Sequence[ParameterGroup]) -> Transformer:
    matrices = [group for group in groups if len(group.shape) > 1 and group.kind != "embedding"]
    width = max((group.shape[-1] for group in matrices or groups if group.shape), default=1)
    weights = sum(group.total for group in matrices)
    stack = Stack(
        layers=1,
        hidden_size=width,
        heads=1,
        kv_heads=1,
        head_dim=0,
        intermediate_size=0,
        mlp_matrices=1,
        causal=False,
        family=type(model).__name__,
        projection_weights=weights,
    )
    return Transformer("other", (stack,), 0)


def _of(groups: Sequence[ParameterGroup], index: int) -> list[ParameterGroup]:
    return [group for group in groups if group.stack == index]


@dataclass(frozen=True)
class _Layers:
    """A list of layers in a model."""

    model: nn.Module
    name: str
    index: int
    groups: tuple[ParameterGroup, ...]

    def stack(self, encoder_decoder: bool) -> Stack:
        """Its dimensions."""
        attention, mlp = self._matrices("attention"), self._matrices("mlp")
        experts = self._experts(mlp)
        inner = experts.pop("intermediate_size")
        config, layers = self.config, self.layers
        role = (" encoder", " decoder")[self.index] if encoder_decoder else ""
        windowed = window_of(config, layers) if self.family != "modernbert" else _modernbert_window(config, layers)
        heads, key_heads, head_dim = self._heads(attention)
        stack = Stack(
            layers=layers,
            hidden_size=self.hidden,
            heads=heads,
            kv_heads=key_heads,
            head_dim=head_dim,
            intermediate_size=inner,
            mlp_matrices=self._gates(mlp, inner),
            causal=self.index == 1 if encoder_decoder else self._is_causal,
            cross_attention=encoder_decoder and self.index == 1,
            family=f"{self.family}{role}",
            positions=_positions(config),
            outside_weights=self._outside(),
            **windowed,
            **experts,
        )
        # `found` with as many weights as there are: what dimensions do not explain belongs to the projections.
        shared = stack.layers // len(self.model.get_submodule(self.name))  # type: ignore[arg-type]
        multiplied = (group for group in self.groups if len(group.shape) > 1 and not group.name.endswith("bias"))
        matrices = shared * sum(group.total for group in multiplied)
        cross = stack.attention_weights if stack.cross_attention else 0
        rest = round((matrices - stack.mlp_weights(stack.experts)) / stack.layers) - cross
        return stack if abs(rest - stack.attention_weights) <= 1 else replace(stack, projection_weights=rest)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """Configuration of the nearest part of the model that has one."""
        parts = self.name.split(".")
        for number in range(len(parts), -1, -1):
            config = getattr(self.model.get_submodule(".".join(parts[:number])), "config", None)
            if config is not None:
                values = _as_mapping(config)
                nested = [value for key, value in values.items() if key in ("text_config", "vision_config")]
                wanted = "vision" if any(word in self.name for word in ("vision", "visual")) else "text"
                part = values.get(f"{wanted}_config")
                return part if nested and isinstance(part, Mapping) else values
        return {}

    @property
    def family(self) -> str:
        """``model_type`` of its configuration."""
        return str(self.config.get("model_type") or type(self.model).__name__)

    @cached_property
    def layers(self) -> int:
        """Number of layers. ALBERT runs one several times."""
        number = len(self.model.get_submodule(self.name))  # type: ignore[arg-type]
        return int(self.config["num_hidden_layers"]) if self.family == "albert" else number

    @cached_property
    def hidden(self) -> int:
        """Width of the residual stream: the configured one, if norms have it; else that of most norms."""
        widths: Counter[int] = Counter()
        for group in self.groups:
            if group.kind == "norm" and len(group.shape) == 1:
                widths[group.shape[0]] += group.copies
        configured = first_count(self.config, _WIDTHS)
        if configured in widths:
            return int(configured or 0)
        if widths:
            return max(widths, key=lambda width: (widths[width], width))
        matrices = [group for group in self.groups if len(group.shape) > 1]
        return configured or (matrices[0].shape[-1] if matrices else 1)

    def _matrices(self, kind: str) -> list[ParameterGroup]:
        return [group for group in self.groups if group.kind == kind and len(group.shape) == 2]

    def _heads(self, attention: list[ParameterGroup]) -> tuple[int, int, int]:
        """Query heads, key heads, width of a head."""
        own = [group for group in attention if not any(word in group.name for word in _CROSS)]
        if not own:
            return 1, 1, 0
        heads = self._number_of_heads()
        named = {group.name.removesuffix(".weight").removesuffix(".base_layer"): group.shape for group in own}
        queries = next((_outputs(shape, self.hidden) for name, shape in named.items() if _QUERIES.search(name)), None)
        keys = next((_outputs(shape, self.hidden) for name, shape in named.items() if _KEYS.search(name)), None)
        fused = next((_outputs(shape, self.hidden) for name, shape in named.items() if _FUSED.search(name)), None)
        head_dim = first_count(self.config, ("head_dim", "d_kv"))
        if head_dim is not None and queries is not None and queries % head_dim == 0 and queries // head_dim != heads:
            head_dim = None  # the model does not read it
        latent = [first_count(self.config, (f"{name}_head_dim",)) for name in ("qk_nope", "qk_rope", "v")]
        if all(latent):  # scores are products of two parts of the heads, values of a third
            return heads, heads, sum(size for size in latent if size) // 2
        if queries is None and fused is not None:
            queries = heads * (head_dim or self.hidden // heads)
            keys = (fused - queries) // 2
        head_dim = head_dim or max(1, (queries or self.hidden) // heads)
        configured = first_count(self.config, ("num_key_value_heads", "num_kv_heads"))
        return heads, configured or max(1, (keys or heads * head_dim) // head_dim), head_dim

    def _number_of_heads(self) -> int:
        side = "decoder" if "decoder" in self.name else "encoder"
        heads = first_count(self.config, (f"{side}_attention_heads", *_HEADS))
        if heads is not None:
            return heads
        for _, part in self.model.get_submodule(self.name).named_modules():
            number = first_count(vars(part), _HEADS)
            if number is not None:
                return number
        return 1

    @property
    def _is_causal(self) -> bool:
        if self.config.get("is_decoder"):
            return True
        if _is_family_of_decoders(str(self.config.get("model_type"))) and self._matrices("attention"):
            return True
        parts = self.model.get_submodule(self.name).modules()
        return any(getattr(part, "is_causal", False) is True for part in parts)

    def _gates(self, mlp: list[ParameterGroup], inner: int) -> int:
        """Matrices of the MLP: 3 with a gate."""
        routed = [group for group in self.groups if group.kind == "experts" and len(group.shape) == 3]
        if routed:
            total = sum(group.numel for group in routed)
            return round(total / (routed[0].shape[0] * self.hidden * inner))
        if not mlp:
            return 2
        numel = sum(group.total for group in mlp) / max(1, max(group.copies for group in mlp))
        return min(3, max(1, round(numel / (self.hidden * inner))))

    def _experts(self, mlp: list[ParameterGroup]) -> dict[str, int]:
        """Inner width of the MLP, or of an expert, and what else there is to say about experts."""
        group = [one for one in self.groups if one.kind == "experts"]
        number, active = first_count(self.config, _EXPERTS), first_count(self.config, _ACTIVE)
        dense = self._inner(mlp)
        routed = [one for one in group if len(one.shape) == 3]
        if not routed or number is None:
            return {"intermediate_size": dense}
        layers = max(one.copies for one in routed)
        down = next((one for one in routed if "down" in one.name), routed[-1])
        inner = next((size for size in down.shape[1:] if size != self.hidden), self.hidden)
        shared = [one for one in group if "shared" in one.name and len(one.shape) == 2 and min(one.shape) > 1]
        return {
            "intermediate_size": inner,
            "experts": number,
            "experts_per_token": active or 1,
            "expert_layers": layers,
            "dense_intermediate_size": dense,
            "shared_intermediate_size": sum(one.numel for one in shared) // (3 * self.hidden),
        }

    def _inner(self, mlp: list[ParameterGroup]) -> int:
        """Inner width: such that the matrices of a layer have as many weights as there are."""
        if not mlp:
            return first_count(self.config, ("intermediate_size",)) or 1
        widths = Counter(
            size for group in mlp for size in group.shape if size != self.hidden and self.hidden in group.shape
        )
        if not widths:
            return self.hidden
        return min(widths)

    def _outside(self) -> float:
        """Weights of the patch embedding and the projector, for a tower, on average over its positions."""
        positions = _positions(self.config)
        if positions is None or self.index:
            return 0.0
        merge = int(self.config.get("spatial_merge_size") or 1) ** 2
        total = 0.0
        for name, parameter in self.model.named_parameters():
            if name.startswith(f"{self.name}.") or parameter.dim() < 2:
                continue
            if parameter.dim() >= 4:  # a convolution over patches
                total += parameter.numel()
            elif "merger" in name or "multi_modal_projector" in name:
                total += parameter.numel() / merge
        return total


def _is_family_of_decoders(family: str) -> bool:
    """Whether transformers trains this family to continue texts, and not to fill gaps in them."""
    auto: Any = sys.modules.get("transformers.models.auto.modeling_auto")
    if auto is None:
        return False
    causal, masked = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return family in causal and family not in masked and family not in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES


def _outputs(shape: tuple[int, ...], hidden: int) -> int:
    """Outputs of a projection of the residual stream, stored either way."""
    return shape[0] if shape[-1] == hidden else shape[-1]


def _positions(config: Mapping[str, Any]) -> int | None:
    """Patches of an image; None for a stack of tokens."""
    image, patch = config.get("image_size"), config.get("patch_size")
    if isinstance(patch, int) and patch > 0:
        if isinstance(image, int) and image > 0:
            family = str(config.get("model_type"))
            class_token = 1 if family.startswith(("clip", "vit", "deit", "dinov2", "beit")) else 0
            return (image // patch) ** 2 + class_token
        return ANY_RESOLUTION
    return None


def _modernbert_window(config: Mapping[str, Any], layers: int) -> dict[str, int]:
    every, window = first_count(config, ("global_attn_every_n_layers",)), first_count(config, ("local_attention",))
    if every is None or window is None:
        return window_of(config, layers)
    return {"window": window, "windowed_layers": sum(index % every != 0 for index in range(layers))}


def _as_mapping(config: Any) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    return dict(config.to_dict()) if hasattr(config, "to_dict") else {}
