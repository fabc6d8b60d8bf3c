"""Packed rows in transformers' attention: sample by sample where that is the same, else with the mask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ds_trainer.data.packing.batch import PackedFormat, PairMask
from ds_trainer.parallel import document_attention as documents_module
from ds_trainer.parallel.deferred_mask import DeferredMask, RequestedMask
from ds_trainer.parallel.document_attention import Documents, use_documents
from ds_trainer.training.model.packing.attention import documents_of
from tests.training.model.packing.test_equality import library

LENGTHS = ((9, 1, 14, 16), (3, 20, 17))
ROW = sum(LENGTHS[0])

# Name of the class, arguments of its configuration, and how many of its layers are computed sample by sample.
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama, grouped queries": ("LlamaForCausalLM", {"num_key_value_heads": 2}, 2),
    "mistral, window": ("MistralForCausalLM", {"num_key_value_heads": 2, "sliding_window": 6}, 2),
    "qwen 3": ("Qwen3ForCausalLM", {"num_key_value_heads": 2, "head_dim": 8}, 2),
    "gemma 3, some windows": (
        "Gemma3ForCausalLM",
        {
            "num_key_value_heads": 2,
            "head_dim": 8,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"]
        },
        2
    ),
    "gpt-neox": ("GPTNeoXForCausalLM", {}, 2),
    "gpt-2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 66}, 2),
    "llama 4 text, chunks": (
        "Llama4ForCausalLM",
        {"num_key_value_heads": 2, "head_dim": 8, "attention_chunk_size": 8, "num_local_experts": 2,
         "intermediate_size_mlp": 48},
        0
    )
}  # fmt: skip


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
    ids = torch.randint(3, 60, positions.shape)
    return {"input_ids": ids, "labels": ids.masked_fill(positions == 0, -100), "position_ids": positions}


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Inside, the list grows with each layer that is computed sample by sample."""
    calls: list[int] = []
    original = documents_module._one_by_one

    def one_by_one(*args: Any, **named: Any) -> torch.Tensor:
        calls.append(1)
        return original(*args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(documents_module, "_one_by_one", one_by_one)
        yield calls


class Sizes(TorchDispatchMode):
    """Inside, the elements of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.untyped_storage().nbytes() // result.element_size())
        return result


@contextmanager
def masks_made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """Inside, the list gets each deferred mask that something reads."""
    made: list[torch.Tensor] = []
    original = DeferredMask.made

    def counting(mask: DeferredMask) -> torch.Tensor:
        found = original(mask)
        if not any(other is found for other in made):
            made.append(found)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(DeferredMask, "made", counting)
        yield made


def results(model: nn.Module, documents: Documents | None) -> list[torch.Tensor]:
    """Loss, logits and gradients."""
    model.zero_grad(set_to_none=True)
    with use_documents(documents):
        output = model(**batch(), use_cache=False)
        output.loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [output.loss.detach(), output.logits.detach(), *gradients]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_equal_to_the_mask(name: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, config, layers = MODELS[name]
    model = library(kind, **config)().double().train()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    if kind == "GPT2LMHeadModel":
        for part in model.modules():
            if hasattr(part, "attn_dropout"):
                part.attn_dropout.p = 0.0
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    with counted(monkeypatch) as calls:
        wanted = results(model, None)
        assert not calls
        with masks_made(monkeypatch) as made:
            found = results(model, documents_of(batch()))
        assert len(calls) == layers * (2 if checkpointing else 1)
        assert not made
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    wrong = batch()["position_ids"].clone()
    wrong[0, 9:] = torch.arange(ROW - 9)  # the second and later samples of the first row are one
    changed = results(model, Documents.of(wrong))
    assert torch.equal(changed[0], found[0]) == (layers == 0)


@pytest.mark.parametrize("packed", [True, False])
def test_no_tensor_of_all_pairs(packed: bool) -> None:
    """Neither forward nor backward."""
    positions = torch.arange(16).repeat(32)[None]
    row = {"input_ids": torch.randint(3, 60, positions.shape), "position_ids": positions}
    model = library("LlamaForCausalLM", max_position_embeddings=positions.numel())()
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    with Sizes() as sizes, use_documents(documents_of(row) if packed else None):
        model(**row, labels=row["input_ids"], use_cache=False).loss.backward()
    assert (sizes.largest < positions.numel() ** 2 // 4) == packed


@pytest.mark.parametrize("pair_mask", [PairMask.DEFERRED, PairMask.BOOLEAN])
def test_no_tensor_of_all_pairs_in_a_bidirectional_model(pair_mask: PairMask) -> None:
    """From the collator to the gradients."""
    samples = [{name: torch.randint(3, 60, (16,)) for name in ("input_ids", "labels")} for _ in range(32)]
    model = library("BertForMaskedLM", max_position_embeddings=512, attention_probs_dropout_prob=0.0)()
    with Sizes() as sizes:
        row = PackedFormat(shifts_labels=False, pair_mask=pair_mask).assemble([samples], 512)
        with use_documents(documents_of(row)):
            model(**row).loss.backward()
    assert (sizes.largest < 512**2 // 4) == (pair_mask is PairMask.DEFERRED)


@pytest.mark.parametrize("attention", ["eager"])
def test_other_attention_is_left_alone(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with counted(monkeypatch) as calls:
        results(library("LlamaForCausalLM", attention)().double(), documents_of(batch()))
        assert not calls


def test_attention_with_dropout_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = library("LlamaForCausalLM", attention_dropout=0.1)().double().train()
    with counted(monkeypatch) as calls, masks_made(monkeypatch) as made:
        torch.manual_seed(2)
        found = results(model, documents_of(batch()))
        assert not calls and len(made) == 1  # by both layers
    torch.manual_seed(2)
    assert all(map(torch.equal, found, results(model, None)))


def test_a_changed_mask_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that gets another mask than the one of the batch computes with it."""
    model = library("LlamaForCausalLM")().double()
    layer = model.model.layers[1].self_attn  # type: ignore[union-attr, index]

    def narrower(module: nn.Module, args: Any, keywords: dict[str, Any]) -> Any:
        return args, {**keywords, "attention_mask": keywords["attention_mask"] & torch.eye(ROW, dtype=torch.bool)}

    layer.register_forward_pre_hook(narrower, with_kwargs=True)
    with counted(monkeypatch) as calls, masks_made(monkeypatch) as made:
        wanted = results(model, None)
        found = results(model, documents_of(batch()))
        assert len(calls) == 1 and len(made) == 1
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-9, atol=1e-9)


def test_padding_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask with padding, of a model that makes one itself, is more than the borders of the samples."""
    model = library("LlamaForCausalLM")().double()
    inputs = {**batch(), "attention_mask": torch.ones(2, ROW, dtype=torch.long)}
    inputs["attention_mask"][:, 3] = 0
    with counted(monkeypatch) as calls, use_documents(documents_of(batch())):
        found = model(**inputs).logits
    assert not calls
    assert torch.equal(found, model(**inputs).logits)


def test_a_deferred_mask() -> None:
    """It is a tensor like the one that it makes, which is made once."""
    made: list[torch.Tensor] = []

    def make() -> torch.Tensor:
        made.append(torch.rand(2, 1, 5, 5) > 0.5)
        return made[-1]

    documents = Documents((2, 5), [0, 5, 10])
    mask = DeferredMask(make, documents, RequestedMask(causal=True, window=None), torch.device("cpu"))
    assert isinstance(mask, torch.Tensor) and (mask.dtype, mask.device.type) == (torch.bool, "cpu")
    assert mask.shape == (2, 1, 5, 5) and mask.dim() == 4 and not mask.requires_grad
    assert not made
    query = torch.rand(2, 3, 5, 4)
    attended = nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)
    whole = made[0]
    wanted = nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=whole)
    assert torch.equal(attended, wanted)
    for one, other in (
        (mask[:, :, :, :3], whole[:, :, :, :3]),
        (mask & whole, whole),
        (mask.to(torch.float32), whole.float()),
        (torch.where(mask, 0.0, 1.0), torch.where(whole, 0.0, 1.0)),
        (mask.expand(2, 3, 5, 5), whole.expand(2, 3, 5, 5)),
        (torch.cat([mask, mask]), torch.cat([whole, whole])),
    ):
        assert type(one) is torch.Tensor and torch.equal(one, other)
    assert len(made) == 1


def test_batches_that_are_not_packed() -> None:
    assert documents_of({"input_ids": torch.ones(1, 3)}) is None
    assert documents_of({**batch(), "attention_mask": torch.ones(2, 40)}) is None
    assert documents_of({"position_ids": torch.zeros(2, 40, device="meta")}) is None
    assert documents_of([1, 2]) is None
