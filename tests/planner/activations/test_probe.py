"""Formulas that were read off a tiny model give the bytes of models of other sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_trainer.planner.activations.formula import Formula
from ds_trainer.planner.activations.probe import EXPERTS, SIZES, probe

transformers = pytest.importorskip("transformers")


def model_of(family: str, attention: str, dtype: torch.dtype, sizes: dict[str, int], layers: int = 2) -> Any:
    heads = {"num_attention_heads": sizes["heads"], "num_key_value_heads": sizes["key_heads"]}
    more = {"head_dim": sizes["queries"] // sizes["heads"], "intermediate_size": sizes["inner"]}
    if "experts" in sizes:
        more |= {"num_experts": sizes["experts"], "num_local_experts": sizes["experts"]}
        more |= {"num_experts_per_tok": sizes["active"], "moe_intermediate_size": sizes["inner"]}
    config = transformers.AutoConfig.for_model(
        family,
        hidden_size=sizes["hidden"],
        vocab_size=sizes["vocabulary"],
        num_hidden_layers=layers,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation=attention,
        **heads,
        **more,
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def kept_bytes(model: Any, batch: int, length: int) -> int:
    """Bytes of all tensors that autograd keeps, except weights and what does not grow with the batch."""
    ignored = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage._cdata not in ignored and (storage.nbytes() // tensor.element_size()) % (batch * length) == 0:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    ids = torch.randint(0, model.config.vocab_size, (batch, length))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=ids, labels=ids, use_cache=False)
    return sum(kept.values())


@pytest.mark.cases(2)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma", "phi3", "mixtral"])
@pytest.mark.parametrize(("attention", "dtype"), [("sdpa", torch.bfloat16), ("eager", torch.float32)])
def test_other_sizes_keep_what_the_formula_says(family: str, attention: str, dtype: torch.dtype) -> None:
    own = {**SIZES, **EXPERTS} if family == "mixtral" else dict(SIZES)
    tiny = model_of(family, attention, dtype, own)
    found = probe(tiny, tiny.model.layers, own)
    other = own | {"hidden": 96, "inner": 312, "queries": 128, "keys": 64, "heads": 8, "key_heads": 4}
    other |= {"vocabulary": 700, "length": 101, **({"experts": 6, "active": 2} if "experts" in own else {})}
    layers, batch = 3, 2
    formula = sum((found.layer for _ in range(layers)), found.outside)
    wanted = kept_bytes(model_of(family, attention, dtype, other, layers), batch, other["length"])
    assert formula.bytes_per_token(other) * batch * other["length"] == pytest.approx(wanted, rel=0.002)


def test_a_llama_layer_by_hand() -> None:
    """bf16, no dropout: two norms keep their input in float32 and their output, and a number per token; and so on."""
    tiny = model_of("llama", "sdpa", torch.bfloat16, dict(SIZES))
    found = probe(tiny, tiny.model.layers, SIZES)
    norms = {"hidden": 2 * (4 + 2 + 2), "one": 2 * 4}  # input, normalized, scaled; the inverse root of the mean square
    attention = {"queries": 2 + 2, "keys": 2 + 2, "heads": 4}  # queries, keys, values, output; log-sum-exp
    mlp = {"inner": 4 * 2}  # gate, up, activation of the gate, product
    assert found.layer == Formula({**norms, **attention, **mlp})
    twelve = [dict(one.terms).get("vocabulary") for one in found.loss]
    assert max(value for value in twelve if value) == 12  # log-probabilities, their gradient, that of float32 logits


def test_an_unknown_product_is_an_error() -> None:
    tiny = model_of("llama", "sdpa", torch.bfloat16, dict(SIZES))
    with pytest.raises(ValueError, match="no known product"):
        probe(tiny, tiny.model.layers, {**SIZES, "inner": 1000})
