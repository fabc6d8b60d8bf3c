"""The table of activations: it is read as it was written, and predicts what models of other sizes keep."""

from __future__ import annotations

import json

import pytest
import torch

from ds_trainer.planner.activations.formula import TABLE, Formula, activations_of, as_json, from_json
from ds_trainer.planner.activations.probe import gpu_dropout, probe
from ds_trainer.planner.layer_sizes import layer_sizes
from ds_trainer.planner.transformer_shape import Stack
from ds_trainer.training.model.gradient_checkpointing import enable_gradient_checkpointing
from tests.support.tiny_models import EXPERT_DECODERS, FAMILIES, Tiny, positions, tiny

pytest.importorskip("transformers")
ROWS = json.loads(TABLE.read_text(encoding="utf-8"))
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

# Other sizes than those of the probe.
FREE = {
    **{"hidden": 96, "inner": 312, "queries": 128, "keys": 64, "heads": 8, "key_heads": 4},
    **{"vocabulary": 700, "length": 49, "one": 1},
}
EQUAL = {**FREE, "queries": 96, "keys": 96, "key_heads": 8}
WIDER = {**EQUAL, "hidden": 128, "queries": 128, "keys": 128}  # an even quarter of a head is rotated
EXPERTS = {"experts": 6, "active": 2}


def kept(made: Tiny) -> int:
    """Bytes of everything that autograd keeps in a forward pass, without weights and buffers."""
    given = [one for one in made.inputs.values() if isinstance(one, torch.Tensor) and one.is_floating_point()]
    ignored = {one.untyped_storage()._cdata for one in (*made.model.parameters(), *made.model.buffers(), *given)}
    found: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in ignored:
            found[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with gpu_dropout(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made.model(**made.inputs)
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


def other_sizes(family: str, attention: str, number_format: str, **lengths: int) -> tuple[dict[str, int], Tiny, int]:
    """Sizes that the family can have, and what a layer keeps: the difference of a model with three layers and one."""
    batch = lengths.pop("batch", 2)
    experts = EXPERTS if family in EXPERT_DECODERS else {}
    for sizes in (FREE, EQUAL, WIDER, {**EQUAL, "inner": 4 * EQUAL["hidden"]}):
        wanted = {**sizes, **experts, **lengths}
        try:
            pair = [
                tiny(
                    family,
                    attention,
                    DTYPES[number_format],
                    wanted,
                    layers=layers,
                    batch=batch,
                    source=wanted["length"],
                )
                for layers in (4, 2)
            ]
            return positions(family, wanted), pair[0], (kept(pair[0]) - kept(pair[1])) // 2
        except (ValueError, RuntimeError):
            continue
    raise AssertionError(f"{family} runs with no sizes")


def test_rows_are_read_as_they_were_written() -> None:
    assert ROWS
    for key, row in ROWS.items():
        found = from_json(row)
        assert json.loads(json.dumps(as_json(found))) == row, key
        family, attention, number_format = key.rsplit(" ", 2)
        assert activations_of(family, attention, number_format) == found
    assert activations_of("unheard of", "sdpa", "bf16") is None


def test_every_family_has_a_row() -> None:
    missing = {family for family in FAMILIES if not any(key.startswith(f"{family} ") for key in ROWS)}
    assert missing == {"codegen", "gpt_bigcode", "gptj"}


# A bias of positions that every layer has and all sequences of a batch share is not in proportion to tokens; half of a
# key head that is rotated looks like another dimension; one in three layers of ModernBERT has no mask.
LOOSE = {"umt5 encoder": 0.06, "umt5 decoder": 0.06, "ernie4_5": 0.02, "modernbert": 0.03}
CASES = [key for key in ROWS if key.endswith("sdpa bf16") or (key.endswith("eager fp32"))]


@pytest.mark.cases(7)
@pytest.mark.parametrize("key", CASES)
def test_a_layer_of_other_sizes(key: str) -> None:
    family, attention, number_format = key.rsplit(" ", 2)
    sizes, _, wanted = other_sizes(family, attention, number_format)
    formulas = activations_of(family, attention, number_format)
    assert formulas is not None
    found = formulas.layer.bytes_per_token({**sizes, "source": 1}) * 2 * sizes["length"]
    assert found == pytest.approx(wanted, rel=LOOSE.get(family, 0.01))


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["bert", "t5 decoder", "gpt2"])
def test_the_table_is_what_the_probe_finds(family: str) -> None:
    from ds_trainer.planner.activations.probe import SIZES

    equal = {**SIZES, "queries": SIZES["hidden"], "keys": SIZES["hidden"], "key_heads": SIZES["heads"]}
    sizes = SIZES if family == "t5 decoder" else equal
    made = tiny(family, "sdpa", torch.bfloat16, sizes)
    assert as_json(probe(made.model, made.layers, sizes, made.inputs)) == ROWS[f"{family} sdpa bf16"]


@pytest.mark.cases(5)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("batch", "length"), [(1, 96), (3, 33), (2, 256)])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "gemma3_text", "gpt2", "bert", "t5 encoder", "t5 decoder", "mixtral"]
)
def test_a_grid_of_runs(family: str, attention: str, batch: int, length: int, checkpointing: bool) -> None:
    """A whole model, with the formulas that the planner uses; checkpointed layers keep their input."""
    experts = EXPERTS if family in EXPERT_DECODERS else {}
    layers, base = 4, EQUAL if family in ("gpt2", "bert") else FREE
    sizes = {**base, **experts, "length": length}
    pair = [
        tiny(family, attention, torch.bfloat16, sizes, layers=one, batch=batch, source=length) for one in (layers, 2)
    ]
    if checkpointing:
        for made in pair:
            enable_gradient_checkpointing(made.whole)
    formulas = activations_of(family, attention, "bf16")
    assert formulas is not None
    per_token = formulas.layer.bytes_per_token({**sizes, "source": 1}) if not checkpointing else 2 * sizes["hidden"]
    wanted = kept(pair[0]) - kept(pair[1])
    assert (layers - 2) * per_token * batch * length == pytest.approx(wanted, rel=0.05)


def test_dropout_keeps_a_byte_for_each_element() -> None:
    """GPT-2 drops two outputs of a layer, and scores outside of fused attention."""
    for attention, scores in (("sdpa", 0), ("eager", 2 + 2 + 1)):  # softmax, its dropped copy, the mask
        found = activations_of("gpt2", attention, "bf16")
        assert found is not None
        assert found.layer.terms.get("heads*length", 0) == scores
    x = torch.randn(5, 7, requires_grad=True)
    sizes = []
    with gpu_dropout(), torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes), lambda t: t):
        torch.nn.functional.dropout(x, 0.5, True)
    assert sizes == [5 * 7]


def test_sizes_of_a_layer_of_a_rank() -> None:
    stack = Stack(2, 96, 8, 4, 16, 312, 3, True)
    whole, half = layer_sizes(stack, 700, 48), layer_sizes(stack, 700, 48, tp=2)
    assert whole == {**{name: FREE[name] for name in FREE if name != "length"}, "length": 48, "source": 1.0,
                     "experts": 1, "active": 1}  # fmt: skip
    formula = Formula({"hidden": 2, "inner": 2, "queries": 2, "keys": 2})
    assert formula.bytes_per_token(half) == 2 * (96 + 312 / 2 + 64 + 32)
