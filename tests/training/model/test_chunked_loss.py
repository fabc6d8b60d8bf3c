"""The loss of a model without whole logits: the numbers of the plain loss, for every kind of head and reader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ds_trainer.parallel.deferred_logits import DeferredLogits
from ds_trainer.parallel.linear_cross_entropy import TileSettings, linear_cross_entropy
from ds_trainer.parallel.one_pass_cross_entropy import one_pass_cross_entropy
from ds_trainer.training.model.chunked_loss import head_check, linear_head
from ds_trainer.training.model.chunked_loss.chunked_loss import ChunkedLoss, chunked_loss_problems
from ds_trainer.training.model.chunked_loss.head_check import sampled_tokens
from ds_trainer.utils.errors import ConfigError
from tests.support.models import VOCABULARY, tiny_llama
from tests.support.tensor_models import FAMILIES, GPT_LIKE, UNSHIFTED, llama_like, of_family

CHUNK = 7
_SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
_NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)

MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": tiny_llama,
    "llama, tied": lambda: tiny_llama(tied=True),
    "gpt2": lambda: of_family("GPT2", "GPT2LMHeadModel", **GPT_LIKE),
    "gemma2, soft cap": lambda: llama_like(
        "Gemma2", num_key_value_heads=2, head_dim=8, final_logit_softcapping=0.5, attn_implementation="eager"
    ),
    "granite, scaled": lambda: llama_like("Granite", num_key_value_heads=2, logits_scaling=3.0),
    "cohere, scaled": lambda: llama_like("Cohere", num_key_value_heads=2, logit_scale=0.3),
    "bert": FAMILIES["bert"],
    "roberta": lambda: of_family("Roberta", "RobertaForMaskedLM", max_position_embeddings=64, **_SIZES, **_NO_DROPOUT),
    "modernbert": lambda: of_family(
        "ModernBert", "ModernBertForMaskedLM", cls_token_id=1, sep_token_id=2, attn_implementation="eager", **_SIZES
    ),
    "t5, tied": FAMILIES["t5"],
    "bart, bias of the logits": FAMILIES["bart"],
    "mixtral, auxiliary loss": lambda: llama_like(
        "Mixtral", num_key_value_heads=2, num_local_experts=4, output_router_logits=True, router_jitter_noise=0.0
    ),
}


def batch(tokens: int = 19) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (3, tokens), generator=generator)
    labels = ids.clone()
    labels[0, :5] = labels[1, 9:12] = -100
    return {"input_ids": ids, "labels": labels}


def results(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """The loss and the gradients of all parameters."""
    named = {name: one for name, one in model.named_parameters() if one.requires_grad}
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {"loss": loss.detach(), **{name: g for name, g in zip(named, gradients, strict=True) if g is not None}}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], allowed: float = 1e-6) -> None:
    assert found.keys() == wanted.keys()
    size = max(float(one.norm()) for name, one in wanted.items() if name != "loss")
    for name, value in wanted.items():
        scale = float(value.norm()) if name == "loss" else size
        assert float((found[name] - value).norm()) <= allowed * scale, name


@pytest.fixture
def in_tiles(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each loss that was computed in tiles, or in one pass."""
    computed: list[int] = []

    def counted(function: Any) -> Any:
        def called(terms: Any, *arguments: Any) -> Any:
            computed.append(terms[0][0].shape[0])
            return function(terms, *arguments)

        return called

    for function in (linear_cross_entropy, one_pass_cross_entropy):
        monkeypatch.setattr(linear_head, function.__name__, counted(function))
    return computed


def chunked_loss(one_pass: bool, chunk: int | None = CHUNK, z_loss: float = 0.0) -> ChunkedLoss:
    found = ChunkedLoss(chunk, z_loss)
    found.one_pass = one_pass
    return found


BOTH_WAYS = pytest.mark.parametrize("one_pass", [True, False], ids=["one pass", "tiles"])


@BOTH_WAYS
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_model(name: str, one_pass: bool, in_tiles: list[int]) -> None:
    model = MODELS[name]().train()
    keywords = {} if name.split(",")[0] in UNSHIFTED else {"num_items_in_batch": torch.tensor(41.0)}
    wanted = results(model, model(**batch(), **keywords).loss)
    with chunked_loss(one_pass).deferring(model):
        outputs = model(**batch(), **keywords)
    assert len(in_tiles) == 1
    assert_same(results(model, outputs.loss), wanted)
    assert (outputs.logits is None) or isinstance(outputs.logits, DeferredLogits)


def test_logits_that_are_read_are_the_logits() -> None:
    model = tiny_llama().train()
    inputs = batch()

    def distilled(outputs: Any) -> torch.Tensor:
        teacher = torch.linspace(0, 1, VOCABULARY).softmax(0)
        return outputs.loss + F.kl_div(
            outputs.logits.log_softmax(-1), teacher.expand_as(outputs.logits), reduction="batchmean"
        )

    wanted = model(**inputs)
    with ChunkedLoss(CHUNK).deferring(model):
        outputs = model(**inputs)
    assert isinstance(outputs.logits, DeferredLogits) and outputs.logits.shape == wanted.logits.shape
    assert_same(results(model, distilled(outputs)), results(model, distilled(wanted)))
    assert torch.equal(outputs.logits.argmax(-1), wanted.logits.argmax(-1))


def test_metrics_without_a_graph_do_not_take_it_from_a_later_loss() -> None:
    model = tiny_llama().train()
    with ChunkedLoss(CHUNK).deferring(model):
        outputs = model(**batch())
    with torch.no_grad():
        assert not outputs.logits.log_softmax(-1).requires_grad
    found = outputs.logits.log_softmax(-1).square().mean()
    assert_same(results(model, found), results(model, model(**batch()).logits.log_softmax(-1).square().mean()))


def weighted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss function of a user: each token has a weight."""
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    return (losses * torch.linspace(0, 1, len(losses))).sum()


def smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    criterion = nn.CrossEntropyLoss(label_smoothing=0.2)
    return criterion(logits[..., :-1, :].contiguous().view(-1, VOCABULARY), labels[..., 1:].reshape(-1))


@pytest.mark.parametrize("function", [weighted, smoothed])
def test_loss_functions_of_users_are_computed_in_tiles(function: Any, in_tiles: list[int]) -> None:
    model = tiny_llama().train()
    inputs = batch()
    labels = inputs.pop("labels")
    wanted = results(model, function(model(**inputs).logits, labels))
    with ChunkedLoss(CHUNK).deferring(model):
        found = function(model(**inputs).logits, labels)
    assert len(in_tiles) == 1
    assert_same(results(model, found), wanted)


@pytest.mark.parametrize("tied", [False, True])
def test_lora_on_the_head(tied: bool, in_tiles: list[int]) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["lm_head", "q_proj"], r=3, lora_alpha=7, init_lora_weights=False)
    model = peft.get_peft_model(tiny_llama(tied=tied), config).train()
    wanted = results(model, model(**batch()).loss)
    with ChunkedLoss(CHUNK).deferring(model):
        found = model(**batch())
    assert len(in_tiles) == 1 and any("lm_head.lora_B" in name for name in wanted)
    assert_same(results(model, found.loss), wanted)


def test_a_copy_of_the_head_that_is_trained(in_tiles: list[int]) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], r=3)
    model = peft.get_peft_model(tiny_llama(), config).train()
    wanted = results(model, model(**batch()).loss)
    with ChunkedLoss(CHUNK).deferring(model):
        found = model(**batch())
    assert len(in_tiles) == 1
    assert_same(results(model, found.loss), wanted)


@BOTH_WAYS
def test_z_loss_with_and_without_tiles(one_pass: bool) -> None:
    model = tiny_llama().train()
    inputs, items = batch(), torch.tensor(41.0)
    outputs = model(**inputs, num_items_in_batch=items)
    used = F.pad(inputs["labels"], (0, 1), value=-100)[:, 1:] != -100
    z_loss = outputs.logits.logsumexp(-1)[used].square().sum() / items
    wanted = results(model, outputs.loss + 1e-2 * z_loss)
    for chunk in (CHUNK, 0, None):
        chunked = chunked_loss(one_pass, chunk, 1e-2)
        with chunked.deferring(model.train()):
            assert_same(results(model, model(**inputs, num_items_in_batch=items).loss), wanted)
        with chunked.deferring(model.eval()), torch.no_grad():  # a likelihood
            torch.testing.assert_close(model(**inputs, num_items_in_batch=items).loss, outputs.loss.detach())


def test_small_batches_use_no_tiles_by_default(in_tiles: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama().train()
    with ChunkedLoss(None).deferring(model):
        assert not isinstance(model(**batch()).logits, DeferredLogits)
    monkeypatch.setattr("ds_trainer.training.model.chunked_loss.chunked_loss.PAYS_FROM", 4 * 3 * 19 * VOCABULARY)
    with ChunkedLoss(None).deferring(model):
        assert isinstance(model(**batch()).logits, DeferredLogits)
    assert in_tiles == [3 * 19]


@BOTH_WAYS
def test_autocast_computes_the_head_in_bf16(one_pass: bool, in_tiles: list[int]) -> None:
    model = tiny_llama().train()
    exact = results(model, model(**batch()).loss)
    with torch.autocast("cpu", torch.bfloat16):
        usual = results(model, model(**batch()).loss)
        with chunked_loss(one_pass).deferring(model):
            outputs = model(**batch())
    found = results(model, outputs.loss)
    assert outputs.logits.dtype == torch.bfloat16 and len(in_tiles) == 1
    head = "lm_head.weight"
    assert float((found[head] - exact[head]).norm()) < 1.1 * float((usual[head] - exact[head]).norm())


# -- what cannot be computed in tiles ---------------------------------------------------


def test_heads_that_are_not_linear_keep_their_logits_and_are_refused_if_tiles_were_asked_for() -> None:
    class Head(nn.Linear):
        pass

    model: Any = tiny_llama()
    head = Head(32, VOCABULARY, bias=False)
    model.set_output_embeddings(head)
    with ChunkedLoss(CHUNK).deferring(model):
        assert not isinstance(model(**batch()).logits, DeferredLogits)
    (problem,) = chunked_loss_problems(model, CHUNK, 0.0, compiled=False)
    assert "loss_chunk_tokens=7" in problem and "head is Head" in problem and "loss_chunk_tokens=0" in problem
    assert chunked_loss_problems(model, None, 0.0, compiled=False) == []
    (problem,) = chunked_loss_problems(nn.Linear(2, 2), None, 1e-4, compiled=False)
    assert "z_loss_factor=0.0001" in problem and "get_output_embeddings" in problem
    (problem,) = chunked_loss_problems(tiny_llama(), CHUNK, 1e-4, compiled=True)
    assert "compiled" in problem


# -- the check on the first batch ---------------------------------------------------


def broken(kind: str) -> dict[str, Any]:
    """Both functions of the loss, with a mistake."""

    def of(losses: torch.Tensor, chunk: int) -> torch.Tensor:
        if kind == "drops the last token of a chunk":
            return losses * (torch.arange(len(losses)) % chunk != chunk - 1)
        return losses * 57 / 56 if kind == "scale of one sample less" else losses

    def of_gradient(loss: torch.Tensor) -> torch.Tensor:
        return loss.detach() + 0.9 * (loss - loss.detach()) if kind == "gradient" else loss

    def tiles(terms: Any, bias: Any, targets: torch.Tensor, settings: TileSettings) -> torch.Tensor:
        return of_gradient(of(linear_cross_entropy(terms, bias, targets, settings), settings.chunk_tokens))

    def one_pass(terms: Any, bias: Any, targets: torch.Tensor, settings: TileSettings) -> Any:
        total, losses = one_pass_cross_entropy(terms, bias, targets, settings)
        return of_gradient(total), of(losses, settings.chunk_tokens)

    return {"linear_cross_entropy": tiles, "one_pass_cross_entropy": one_pass}


@BOTH_WAYS
@pytest.mark.parametrize("kind", ["none", "drops the last token of a chunk", "scale of one sample less", "gradient"])
def test_the_first_batch_is_compared_with_whole_logits(
    kind: str, one_pass: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (linear_head, head_check):
        for name, function in broken(kind).items():
            monkeypatch.setattr(module, name, function)
    model = tiny_llama().train()
    chunked = chunked_loss(one_pass)
    with chunked.deferring(model):
        if kind == "none":
            model(**batch())
            return
        with pytest.raises(ConfigError, match=r"differs from the loss of whole logits .* by a relative [01]"):
            model(**batch())


def test_only_the_first_batch_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    monkeypatch.setattr(head_check, "check_tiles", lambda *computed: compared.append(1))
    model = tiny_llama().train()
    chunked = ChunkedLoss(CHUNK)
    for _ in range(3):
        with chunked.deferring(model):
            model(**batch())
    assert compared == [1]


def test_the_sample_has_both_sides_of_borders() -> None:
    few = sampled_tokens(57, 7, 1000).tolist()
    assert few == list(range(57))
    many = set(sampled_tokens(10**6, 1024, 128).tolist())
    assert len(many) <= 128 and {0, 10**6 - 1, 1023, 1024} <= many
    assert all(one + 1 in many for one in many if one % 1024 == 1023)
    assert sum(one % 1024 in (0, 1023) for one in many) >= 64  # half of the sample, where there are so many borders
    assert sampled_tokens(1, 7, 8).tolist() == [0]


@pytest.mark.parametrize(("tokens", "classes", "most"), [(400, 11, 100), (16, 11, 8), (4096, 1 << 17, 128)])
def test_the_comparison_makes_few_of_the_logits(
    tokens: int, classes: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of those of the batch and 64 MiB at most, so that it needs less memory than the whole loss."""
    sampled: list[int] = []

    def recorded(*given: Any) -> torch.Tensor:
        sampled.append(len(found := sampled_tokens(*given)))
        return found

    monkeypatch.setattr(head_check, "sampled_tokens", recorded)
    hidden, weight, targets = torch.randn(tokens, 16), torch.randn(classes, 16), torch.randint(0, 11, (tokens,))
    settings = TileSettings(chunk_tokens=7)
    losses = linear_cross_entropy([(hidden, weight)], None, targets, settings)
    head_check.check_tiles([(hidden, weight)], None, targets, settings, losses, False)
    assert 0 < sampled[0] <= most
    assert sampled[0] * classes * 4 <= 64 << 20


def test_functions_of_logits_are_part_of_the_comparison() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 4), torch.randn(11, 4)
    targets = torch.randint(0, 11, (9,))
    settings = TileSettings(chunk_tokens=4, z_loss=0.1, label_smoothing=0.1)
    losses = linear_cross_entropy([(hidden, weight)], None, targets, settings)
    head_check.check_tiles([(hidden, weight)], None, targets, settings, losses, False)
    with pytest.raises(ConfigError, match="differs"):
        other = replace(settings, functions=(lambda tile, rows: tile * 2,))
        head_check.check_tiles([(hidden, weight)], None, targets, other, losses, False)


def test_a_hook_of_the_user_reads_whole_logits() -> None:
    """A hook on the model runs before the logits of an engine are given back, so they are not deferred then."""
    engine = nn.Module()
    engine.module = model = tiny_llama()
    engine.forward = lambda **inputs: model(**inputs)  # type: ignore[method-assign]
    read: list[Any] = []
    plain = model(**batch()).logits
    with ChunkedLoss(CHUNK).deferring(engine):
        assert isinstance(engine(**batch()).logits, DeferredLogits)
    model.register_forward_hook(lambda module, given, output: read.append(output.logits))
    with ChunkedLoss(CHUNK).deferring(engine):
        engine(**batch())
    assert type(read[0]) is torch.Tensor
    assert torch.equal(read[0], plain)
