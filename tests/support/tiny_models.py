"""Models of two layers with given sizes, of every family whose activations are in the table of the planner."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ds_trainer.planner.activations.probe import BATCH, SOURCE, projections

GATED_DECODERS = (
    *("cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "granite", "helium"),
    *(
        "hunyuan_v1_dense",
        "llama",
        "ministral",
        "mistral",
        "mixtral",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "phi3",
        "qwen2",
    ),
    *("qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm"),
)
PLAIN_DECODERS = (
    *(
        "biogpt",
        "bloom",
        "codegen",
        "falcon",
        "gpt2",
        "gpt_bigcode",
        "gpt_neo",
        "gpt_neox",
        "gptj",
        "mpt",
        "opt",
        "phi",
    ),
    *("starcoder2", "xglm"),
)
EXPERT_DECODERS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
ENCODERS = (
    *("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "electra", "modernbert", "ernie"),
    *("data2vec-text", "mpnet", "deberta-v2"),
)
SEQ2SEQ = ("t5", "mt5", "umt5", "bart", "mbart", "pegasus", "marian", "m2m_100", "blenderbot", "plbart")
TOWERS = ("clip_vision_model", "siglip_vision_model")
FAMILIES = (
    *sorted((*GATED_DECODERS, *PLAIN_DECODERS)),
    *sorted(ENCODERS),
    *sorted(f"{family} {side}" for family in SEQ2SEQ for side in ("encoder", "decoder")),
    *TOWERS,
)


@dataclass(frozen=True)
class Tiny:
    """What a probe needs: a model that returns a loss, a list of layers, and the model's arguments."""

    model: nn.Module
    layers: nn.ModuleList
    inputs: dict[str, Any]

    @property
    def whole(self) -> nn.Module:
        """The model of transformers."""
        return self.model.model if isinstance(self.model, _MeanLoss) else self.model


class _MeanLoss(nn.Module):
    """A model without a loss of its own: the mean of its output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        return SimpleNamespace(loss=self.model(**inputs).last_hidden_state.mean())


def tiny(
    family: str,
    attention: str,
    dtype: torch.dtype,
    sizes: dict[str, int],
    *,
    layers: int = 2,
    batch: int = BATCH,
    source: int = SOURCE,
) -> Tiny:
    """A model of a family of :data:`FAMILIES` in training mode, and a batch.

    Args:
        family: ``model_type``; of a model with two stacks, with ``encoder`` or ``decoder``.
        attention: ``sdpa`` or ``eager``.
        dtype: of the weights.
        sizes: dimensions; ``length`` positions, for an encoder of images the next lower square.
        layers: number of layers.
        batch: sequences.
        source: positions of the encoder's output, for a decoder with cross attention.

    Raises:
        ValueError: the family cannot have these sizes.
    """  # fmt: skip
    import transformers

    name, _, side = family.partition(" ")
    values = _values(name, sizes, layers)
    known = transformers.AutoConfig.for_model(name)
    given = {key: value for key, value in values.items() if hasattr(known, key) and value is not None}
    if (
        hasattr(known, "num_key_value_heads") and name != "falcon"
    ):  # many families read a width of heads that they do not have by default
        given["head_dim"] = values["head_dim"]
    if name == "falcon":
        del given["head_dim"]  # a property
        given |= {"new_decoder_architecture": True, "num_kv_heads": sizes["key_heads"]}
    config = transformers.AutoConfig.for_model(name, **given, attn_implementation=attention)
    ids = torch.randint(3, sizes["vocabulary"], (batch, sizes["length"]))
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if name in TOWERS:
        model: Any = _MeanLoss(transformers.AutoModel.from_config(config, dtype=dtype))
        inputs = {"pixel_values": torch.randn(batch, 3, config.image_size, config.image_size, dtype=dtype)}
    elif side == "encoder":
        whole = transformers.AutoModelForSeq2SeqLM.from_config(config, dtype=dtype)
        model, inputs = _MeanLoss(whole.get_encoder()), {"input_ids": ids}
    elif side:
        model = transformers.AutoModelForSeq2SeqLM.from_config(config, dtype=dtype)
        states = torch.randn(batch, source, sizes["hidden"], dtype=dtype, requires_grad=True)
        outputs = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=states)
        inputs = {"encoder_outputs": outputs, "labels": ids, "decoder_input_ids": ids, "use_cache": False}
    elif name in ENCODERS:
        model = transformers.AutoModelForMaskedLM.from_config(config, dtype=dtype)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        inputs["use_cache"] = False
    part: Any = model.get_decoder() if side == "decoder" else model
    stack = next(one for one in part.modules() if isinstance(one, nn.ModuleList) and len(one) == layers)
    for *_, outward in projections(stack[0]):
        if sizes["queries"] not in outward.get_parameter("weight").shape:
            raise ValueError(f"heads of {sizes['queries']} in all are not those of {family}")
    widths = {width for one in stack[0].parameters() for width in one.shape}
    if not widths & {sizes["inner"], 2 * sizes["inner"]}:
        raise ValueError(f"{family} has another inner width than {sizes['inner']}")
    return Tiny(model.train(), stack, inputs)


def positions(family: str, sizes: dict[str, int]) -> dict[str, int]:
    """``sizes`` with the length that a model of ``family`` has: an encoder of images has a square of patches."""
    if family not in TOWERS:
        return sizes
    side = int(sizes["length"] ** 0.5)
    return {**sizes, "length": side * side + (family == "clip_vision_model")}


def _values(name: str, sizes: dict[str, int], layers: int) -> dict[str, Any]:
    """The same dimensions under all their names."""
    found: dict[str, Any] = {
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 0,
        "head_dim": sizes["queries"] // sizes["heads"],
        "d_kv": sizes["queries"] // sizes["heads"],
        "rotary_dim": 8,
        "num_key_value_heads": sizes["key_heads"],
        "num_experts_per_tok": sizes.get("active"),
        "attention_types": [[["global", "local"], (layers + 1) // 2]],
        "patch_size": 2,
        "image_size": 2 * int(sizes["length"] ** 0.5),
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
        "layerdrop": 0.0,
    }
    for value, names in (
        (sizes["hidden"], ("hidden_size", "d_model", "dim", "word_embed_proj_dim", "embedding_size")),
        (sizes["heads"], ("num_attention_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")),
        (sizes["heads"], ("n_heads", "attention_heads")),
        (sizes["inner"], ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim")),
        (sizes["inner"], ("moe_intermediate_size", "shared_expert_intermediate_size", "ffn_hidden_size")),
        (layers, ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")),
        (sizes["vocabulary"], ("vocab_size",)),
        (512, ("max_position_embeddings", "n_positions")),
        (sizes.get("experts"), ("num_experts", "num_local_experts")),
    ):
        found |= dict.fromkeys(names, value)
    if name in ("distilbert", "data2vec-text"):
        found |= {"hidden_dim": sizes["inner"]}
    if name == "distilbert":
        found |= {"n_layers": layers}
    if name in ("mpt", "xglm"):
        found |= {"n_layers": layers, "num_layers": layers}
    return found
