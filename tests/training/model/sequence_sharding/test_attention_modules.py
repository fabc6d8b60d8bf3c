"""Models of transformers with sharded sequences: logits and gradients of one process, generation, error messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ds_trainer.parallel.attention import use_sharding
from ds_trainer.parallel.groups import parallel_groups
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.model.sequence_sharding.attention_modules import use_sharded_attention
from tests.support.attention import plan_of
from tests.support.full_attention import packed, padded
from tests.support.models import VOCABULARY, PlainLanguageModel
from tests.support.pool import pool
from tests.training.model.sharded_models import ENCODERS, KINDS, sharded_model

LENGTH = 16


def batch(rows: str, kind: str) -> dict[str, Any]:
    """Full sequences: the inputs of one process, and those of the plan."""
    torch.manual_seed(7)
    tokens = torch.randint(3, VOCABULARY, (2, LENGTH))
    labels = torch.randint(0, 5 if kind == "bert" else VOCABULARY, (2, LENGTH))
    positions = torch.arange(LENGTH).expand(2, -1)
    documents = valid = None
    if rows == "packed":
        documents, positions = packed(2, LENGTH)
    if rows == "padded":
        valid = padded(2, LENGTH)
        labels = labels.masked_fill(~valid, -100)
    return dict(tokens=tokens, labels=labels, positions=positions, documents=documents, valid=valid)


def loss_of(logits: torch.Tensor, labels: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum") / count


def one_process(kind: str, rows: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model, given = sharded_model(kind), batch(rows, kind)
    mask = None if given["valid"] is None else given["valid"].long()
    logits = (
        model(given["tokens"], attention_mask=mask, position_ids=given["positions"], use_cache=False).logits
        if kind not in ENCODERS
        else model(given["tokens"], attention_mask=mask, position_ids=given["positions"]).logits
    )
    loss_of(logits, given["labels"], (given["labels"] != -100).sum()).backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def case(
    kind: str, rows: str, cp: int, sp: int, checkpointing: bool | None, switch: bool = True
) -> tuple[float, float]:
    """Greatest relative difference of logits and of gradients from one process's."""
    layout = ParallelLayout(dist.get_world_size(), cp=cp, sp=sp)
    groups = parallel_groups(layout)
    logits, gradients = one_process(kind, rows)
    model, given = sharded_model(kind), batch(rows, kind)
    if checkpointing is not None:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        if checkpointing:
            model.enable_input_require_grads()
    split = use_sharded_attention(model, layout if switch else ParallelLayout(layout.world_size))
    plan = plan_of(layout, LENGTH, given["documents"], given["valid"])
    positions = plan.positions(groups.coordinates.cp, groups.coordinates.sp)
    with use_sharding(plan, groups) as sharding:
        ours = model(given["tokens"][:, positions], position_ids=given["positions"][:, positions]).logits
        loss_of(ours, given["labels"][:, positions], (given["labels"] != -100).sum()).backward()
    split.restore()
    assert sharding is not None
    assert sharding.calls == (0 if not switch else 2 if checkpointing is None else 4)
    worst = 0.0
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            assert name not in gradients
            continue
        dist.all_reduce(parameter.grad, group=groups.sequence)
        scale = max(float(gradients[name].abs().max()), 1e-3)
        worst = max(worst, float((parameter.grad - gradients[name]).abs().max()) / scale)
    kept = torch.ones(2, len(positions), dtype=torch.bool) if given["valid"] is None else given["valid"][:, positions]
    apart = (ours - logits[:, positions])[kept].abs().max() if kept.any() else torch.zeros(())
    return float(apart / logits.abs().max()), worst


LAYOUTS = [(kind, cp, sp) for kind in KINDS for cp, sp in [(1, 2), (1, 4), (2, 2)]]
LAYOUTS += [(kind, 2, 4) for kind in ("qwen2", "bert")]


@pytest.mark.cases(2)
@pytest.mark.parametrize(("kind", "cp", "sp"), LAYOUTS)
def test_logits_and_gradients_of_one_process(kind: str, cp: int, sp: int) -> None:
    for rows in ("whole", "packed", "padded"):
        if rows == "packed" and kind in ENCODERS:
            continue  # transformers' encoders know no documents
        for logits, gradients in pool(cp * sp).run(case, kind, rows, cp, sp, None):
            assert logits < 1e-10 and gradients < 1e-9, (rows, logits, gradients)


@pytest.mark.cases(2)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "bert"])
def test_recomputed_activations_give_the_same_gradients(kind: str, reentrant: bool) -> None:
    for cp, sp in [(1, 2), (2, 2)]:
        for logits, gradients in pool(cp * sp).run(case, kind, "padded", cp, sp, reentrant):
            assert logits < 1e-10 and gradients < 1e-9


def test_control_a_shard_alone_gives_different_gradients() -> None:
    for _, gradients in pool(2).run(case, "llama", "whole", 1, 2, None, False):
        assert gradients > 1e-2


# -- without sequence sharding-----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "gpt2"])
def test_generation_is_that_of_sdpa(kind: str) -> None:
    model = sharded_model(kind).float().eval()
    torch.manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, (3, 9))
    mask = torch.ones_like(tokens)
    mask[1, :4] = mask[2, :1] = 0  # padding on the left
    for cache in (True, False):
        options: dict[str, Any] = dict(max_new_tokens=12, do_sample=False, use_cache=cache, pad_token_id=0)
        expected = model.generate(tokens, attention_mask=mask, **options)
        split = use_sharded_attention(model, ParallelLayout(2, sp=2))
        assert model.config._attn_implementation == "ds_trainer"
        assert torch.equal(model.generate(tokens, attention_mask=mask, **options), expected)
        split.restore()
    assert len(set(expected[0].tolist())) > 3  # says more than one word over and over


@pytest.mark.parametrize("kind", KINDS)
def test_an_unsharded_batch_is_that_of_sdpa(kind: str) -> None:
    model = sharded_model(kind).eval()
    given = batch("padded", kind)
    before = model(given["tokens"], attention_mask=given["valid"].long()).logits
    use_sharded_attention(model, ParallelLayout(2, sp=2))
    assert torch.equal(model(given["tokens"], attention_mask=given["valid"].long()).logits, before)


def test_the_attention_implementation_is_restored(tmp_path: Path) -> None:
    model = sharded_model("llama")
    model.set_attn_implementation("eager")
    split = use_sharded_attention(model, ParallelLayout(4, cp=2, sp=2))
    assert split.before == ["eager"]
    model.save_pretrained(tmp_path)
    assert "ds_trainer" not in (tmp_path / "config.json").read_text()
    assert "_attn_implementation" not in json.loads((tmp_path / "config.json").read_text())
    split.restore()
    split.restore()
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("layout", [ParallelLayout(2), ParallelLayout(2, tp=2)])
def test_layouts_without_sequence_sharding_change_nothing(layout: ParallelLayout) -> None:
    model = sharded_model("llama")
    use_sharded_attention(model, layout)
    assert model.config._attn_implementation == "sdpa"


def test_custom_models_are_not_changed_but_nested_ones_are_found() -> None:
    layout = ParallelLayout(2, sp=2)
    assert use_sharded_attention(PlainLanguageModel(), layout).before == []
    inner = sharded_model("llama")
    use_sharded_attention(nn.Sequential(nn.ModuleDict({"inner": inner})), layout)
    assert inner.config._attn_implementation == "ds_trainer"
