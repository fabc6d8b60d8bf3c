"""The loss rule: what counts as an item, and whether a loss uses the count."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ds_trainer.data.batch_structure import DummyBatch
from ds_trainer.training.loop.item_count import ItemCount
from ds_trainer.training.loop.loss_rule import (
    ItemCounter,
    LossRule,
    accepts_item_count,
    depends_on,
    loss_in,
    loss_rule_of,
    shifts_labels,
)
from ds_trainer.utils.errors import ConfigError
from tests.support.compare import distances
from tests.support.models import VOCABULARY, PlainLanguageModel, RaggedTokens, tiny_llama
from tests.support.oracle import train_plainly
from tests.support.pool import pool
from tests.support.runs import train_and_report

TOKENS = torch.tensor([[5, 6, -100, 7], [-100, 8, 9, -100]])


@pytest.mark.parametrize(
    ("inputs", "shifted", "items"),
    [
        ({"labels": TOKENS}, False, 5),
        ({"labels": TOKENS}, True, 4),  # the first position predicts nothing
        ({"labels": TOKENS, "shift_labels": TOKENS[:, 2:]}, True, 2),  # the collator has shifted already
        ({"labels": torch.tensor([1, -100, 0])}, True, 2),  # classes of samples
        ({"labels": torch.rand(3)}, False, 3),  # regression
        ({"labels": torch.rand(3, 5)}, False, 3),  # several targets a sample
        ({"input_ids": torch.ones(4, 7)}, False, 4),  # no labels
        ({"label": torch.tensor([1, 2])}, False, 2),
        (DummyBatch({"labels": TOKENS}), False, 0),
    ],
)
def test_items_are_counted(inputs: Any, shifted: bool, items: int) -> None:
    assert int(ItemCounter(["labels", "label"], shifted)(inputs)) == items


def test_models_that_shift_labels_are_recognized() -> None:
    from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

    assert shifts_labels(tiny_llama())
    assert shifts_labels(PlainLanguageModel())
    assert not shifts_labels(nn.Linear(1, 1))
    small = dict(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    assert not shifts_labels(BertForMaskedLM(BertConfig(**small)))
    t5 = T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=1)
    assert not shifts_labels(T5ForConditionalGeneration(t5))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def test_a_class_without_a_named_loss_uses_the_causal_loss(tmp_path: Any) -> None:
    """GPT2LMHeadModel: transformers finds no loss by its name and takes the causal one, which has no first target."""
    from transformers import BertConfig, BertForPreTraining

    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    assert shifts_labels(gpt2())
    assert not shifts_labels(BertForPreTraining(BertConfig(**small)))  # computes its loss itself
    data = partial(RaggedTokens, 37)
    wanted = train_plainly(gpt2(), data(), optimizer="sgd", learning_rate=0.1, weight_decay=0.0)
    options = {"optim": "sgd", "learning_rate": 0.1, "weight_decay": 0.0, "per_device_train_batch_size": 8}
    job = partial(train_and_report, gpt2, data, str(tmp_path), max_grad_norm=0.0, **options)
    for found in pool(2).run(job):
        differences = distances(found, wanted)
        assert max(differences["losses"], differences["grad_norms"]) < 1e-5, differences


def test_models_that_accept_the_item_count_are_recognized() -> None:
    assert accepts_item_count(tiny_llama().forward)
    assert not accepts_item_count(PlainLanguageModel().forward)
    assert accepts_item_count(lambda x, num_items_in_batch=None: x)


def test_the_autograd_graph_shows_whether_the_count_was_used() -> None:
    items = torch.tensor(3.0, requires_grad=True)
    logits = torch.randn(4, 5, requires_grad=True)
    total = F.cross_entropy(logits, torch.arange(4), reduction="sum")
    assert depends_on(total / items, items)
    assert not depends_on(total / 3.0, items)
    assert not depends_on(total.detach(), items)


def rule(normalized: bool = True) -> LossRule:
    return LossRule(ItemCounter(["labels"], False), normalized)


def test_a_loss_that_reads_the_count_with_item_is_normalized_too() -> None:
    items = torch.tensor(4.0, requires_grad=True)
    weight = torch.tensor(2.0, requires_grad=True)
    found = rule()
    found.verify(weight / items.item(), items, lambda n: 2.0 / n)
    assert found.verified and found.normalized


def test_a_loss_that_ignores_the_count_is_taken_as_a_mean_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    items = torch.tensor(4.0, requires_grad=True)
    weight = torch.tensor(2.0, requires_grad=True)
    found = rule()
    logging.getLogger("ds_trainer").propagate = True
    with caplog.at_level(logging.WARNING, "ds_trainer"):
        found.verify(weight * 1.0, items, lambda n: torch.tensor(2.0))
    assert not found.verified and not found.normalized  # its mean is not measured yet
    assert "does not depend on num_items_in_batch" in caplog.text


@pytest.mark.parametrize("named", [True, False])
def test_a_model_that_only_takes_any_keyword_causes_no_warning(named: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Such are the classifiers of transformers."""

    class Classifier(torch.nn.Module):
        if named:

            def forward(self, labels: Any, num_items_in_batch: Any = None) -> Any: ...

        else:

            def forward(self, labels: Any, **keywords: Any) -> Any: ...

    found = loss_rule_of(Classifier(), ["labels"])
    assert found.normalized and not found.verified
    logging.getLogger("ds_trainer").propagate = True
    with caplog.at_level(logging.WARNING, "ds_trainer"):
        found.verify(torch.tensor(2.0, requires_grad=True) * 1.0, torch.tensor(4.0), lambda n: torch.tensor(2.0))
    assert not found.verified and not found.normalized  # its mean is not measured yet
    assert ("does not depend on num_items_in_batch" in caplog.text) is named


def test_means_are_weighted_by_items_and_empty_means_are_ignored() -> None:
    local_items, items = torch.tensor(3), ItemCount(torch.tensor(12.0))
    assert rule(False).contribution(torch.tensor(8.0), local_items, items) == 2.0
    weight = torch.ones(2, requires_grad=True)
    empty = (weight * float("nan")).sum()
    micro_batch_loss = rule(False).contribution(empty, torch.tensor(0), items)
    assert micro_batch_loss == 0.0


def test_cross_entropy_over_nothing_gives_a_zero_gradient() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    loss = F.cross_entropy(logits, torch.full((3,), -100))
    rule(False).contribution(loss, torch.tensor(0), ItemCount(torch.tensor(7.0))).backward()
    assert logits.grad is not None and torch.equal(logits.grad, torch.zeros_like(logits))


def test_the_loss_is_found_in_every_kind_of_output() -> None:
    loss = torch.tensor(1.0)
    model = nn.Linear(1, 1)
    for outputs in (loss, (loss, 1), {"loss": loss}, type("Output", (), {"loss": loss})()):
        assert loss_in(outputs, model, {}) is loss
    for outputs, what in (({"logits": loss}, "only logits"), ((torch.ones(2),), "a tuple"), ("text", "a str")):
        with pytest.raises(ConfigError, match=f"Linear returned no scalar loss for a batch of x; it returned {what}"):
            loss_in(outputs, model, {"x": 1})


def add_up(items_of_ranks: list[int], overlap: bool) -> tuple[bool, float, float, float]:
    local_items = torch.tensor(items_of_ranks[torch.distributed.get_rank()])
    items = ItemCount.of_all_ranks(local_items, overlap)
    micro_batch_loss = rule().contribution(6.0 / items.divisor, None, items)
    return items.is_exact, items.divisor.item(), items.exact().item(), micro_batch_loss.item()


@pytest.mark.parametrize("overlap", [False, True])
def test_the_item_count_is_the_same_with_and_without_overlap(overlap: bool) -> None:
    first, second = pool(2).run(add_up, [3, 5], overlap)
    assert first[0] is second[0] is not overlap
    assert (first[1], second[1]) == ((6.0, 10.0) if overlap else (8.0, 8.0))  # own count times ranks, or the sum
    assert first[2] == second[2] == 8.0
    assert first[3] == second[3] == pytest.approx(6.0 / 8.0)
    assert pool(2).run(add_up, [0, 0], overlap)[0][2] == 1.0  # nothing to predict: no division by zero


def test_a_subclass_shifts_labels_like_its_base_class() -> None:
    """transformers finds no loss by the name of such a class."""
    from transformers import LlamaForCausalLM

    class Wrapped(LlamaForCausalLM):
        def forward(self, input_ids: torch.Tensor, **more: Any) -> Any:
            return super().forward(input_ids=input_ids, **more)

    class Own(LlamaForCausalLM):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            logits = self.lm_head(self.model(input_ids).last_hidden_state)
            return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}

    config = tiny_llama().config
    assert shifts_labels(Wrapped(config))
    assert not shifts_labels(Own(config))
