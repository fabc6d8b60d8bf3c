"""The comparison at the start of a run: what it accepts, and that each mistake is found and named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ds_trainer import ConfigError, Trainer, TrainingArguments
from ds_trainer.data.packing.batch import PackedFormat
from ds_trainer.training.loop.loss_rule import ItemCounter
from tests.support.layouts import Padded, PlainAttention
from tests.support.models import VOCABULARY, PlainLanguageModel, tiny_llama

_SHAPE: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=66,
    pad_token_id=1,
    bos_token_id=1,
    eos_token_id=2,
)


def library(name: str, attention: str = "sdpa", **more: Any) -> Callable[[], nn.Module]:
    """A tiny model of transformers by the name of its class."""

    def make() -> nn.Module:
        import transformers

        kind = getattr(transformers, name)
        torch.manual_seed(0)
        model: nn.Module = kind(kind.config_class(**{**_SHAPE, **more}))
        model.set_attn_implementation(attention)  # type: ignore[operator]
        return model

    return make


class OwnTokens(Padded):
    """Samples without labels."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.documents[index][0]}


def check(model: nn.Module, output_dir: Path, trainer: type[Trainer] = Trainer, data: Any = None, **more: Any) -> str:
    """What the comparison says: nothing if the samples are equal, else the message."""
    values: dict[str, Any] = {"packing": True, "max_length": 40, "per_device_train_batch_size": 1, **more}
    args = TrainingArguments(
        str(output_dir),
        use_cpu=True,
        max_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        self_test="never",
        memory_check=False,
        **values,
    )
    job = None
    try:
        job = trainer(model, args, train_dataset=Padded(30) if data is None else data)
        job.train()
    except ConfigError as error:
        return str(error)
    finally:
        if job is not None:
            job._ds_trainer.engines.close()
    assert job._ds_trainer.packing.proven
    return ""


EQUAL: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "llama": (tiny_llama, {}),
    "llama, several rows": (tiny_llama, {"per_device_train_batch_size": 3}),
    "llama, cut": (tiny_llama, {"packing_strategy": "cut"}),
    "llama, eager": (lambda: tiny_llama(attn_implementation="eager"), {}),
    "own attention": (PlainAttention, {}),
    "sliding window": (library("MistralForCausalLM", num_key_value_heads=2, sliding_window=4), {}),
    "learned positions": (library("GPT2LMHeadModel", n_positions=64, n_embd=32, n_layer=2, n_head=4), {}),
    "rows longer than the positions": (
        library("GPT2LMHeadModel", n_positions=32, n_embd=32, n_layer=2, n_head=4),
        {"max_length": 900},
    ),
    "experts": (library("MixtralForCausalLM", num_key_value_heads=2, num_local_experts=4), {}),
    "BERT": (library("BertForMaskedLM"), {}),
    "BERT, eager": (library("BertForMaskedLM", "eager"), {"per_device_train_batch_size": 2}),
    "RoBERTa": (library("RobertaForMaskedLM"), {}),
    "bf16": (tiny_llama, {"bf16": True}),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", EQUAL)
def test_packed_samples_equal_samples_alone(name: str, tmp_path: Path) -> None:
    model, more = EQUAL[name]
    assert check(model(), tmp_path, **more) == ""


def test_tokens_become_labels_of_a_causal_model(tmp_path: Path) -> None:
    assert check(tiny_llama(), tmp_path, data=OwnTokens(30)) == ""


# -- negative controls -------------------------------------------------------------------------------------------------


class LeakingBlock(nn.Module):
    """Attention within samples, in which the first token of a sample also attends to the token before it."""

    def __init__(self, leaks: bool) -> None:
        super().__init__()
        self.value, self.leaks = nn.Linear(24, 24), leaks

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        documents = (positions == 0).cumsum(1)
        allowed = (documents[:, :, None] == documents[:, None, :]).tril()
        if self.leaks:
            before = torch.diag(torch.ones(x.shape[1] - 1, dtype=torch.bool), -1)
            allowed = allowed | before
        weights = allowed.float() / allowed.sum(-1, keepdim=True)
        return x + 0.05 * weights.to(x.dtype) @ self.value(x)


class Custom(nn.Module):
    """A language model with one of several mistakes."""

    shifts_labels = True

    def __init__(self, leaks: bool = False, runs_on: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(VOCABULARY, 24), nn.Embedding(128, 24)
        self.first, self.second = LeakingBlock(False), LeakingBlock(leaks)
        self.head = nn.Linear(24, VOCABULARY)
        self.runs_on = runs_on

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None].expand(len(input_ids), -1)
        places = torch.arange(input_ids.shape[1])[None] if self.runs_on else position_ids
        x = self.tokens(input_ids) + self.places(places)
        logits = self.head(self.second(self.first(x, position_ids), position_ids))
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


def test_a_correct_custom_model_is_accepted(tmp_path: Path) -> None:
    assert check(Custom(), tmp_path) == ""


@pytest.mark.parametrize("precision", [{}, {"bf16": True}])
def test_a_mask_that_leaks_one_token_is_found(precision: dict[str, Any], tmp_path: Path) -> None:
    found = check(Custom(leaks=True), tmp_path, **precision)
    assert "with the other samples in its row" in found
    assert "The first module that mixes samples is second (LeakingBlock)" in found


def test_positions_that_run_on_are_found(tmp_path: Path) -> None:
    found = check(Custom(runs_on=True), tmp_path)
    assert (
        "its positions are different, for example. The first module with another output is places (Embedding)" in found
    )


def test_a_sample_that_predicts_the_next_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight of every sample is wrong by the targets between samples."""
    original = PackedFormat.assemble

    def with_targets_between(self: PackedFormat, rows: Any, length: int) -> dict[str, Any]:
        made = original(self, rows, length)
        made["labels"] = torch.where(made["position_ids"] == 0, made["input_ids"], made["labels"])
        return made

    monkeypatch.setattr(PackedFormat, "assemble", with_targets_between)
    assert "targets in the rows" in check(tiny_llama(), tmp_path)


def test_a_count_that_is_wrong_by_one_sample_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = ItemCounter.__call__

    def counts_rows_too(self: ItemCounter, inputs: Any) -> torch.Tensor:
        return original(self, inputs) + len(inputs["input_ids"])

    monkeypatch.setattr(ItemCounter, "__call__", counts_rows_too)
    assert "every sample would have another weight" in check(tiny_llama(), tmp_path)


class MeanOfSamples(Trainer):
    """Its loss is the mean of the losses of the samples in a row, not of their tokens."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        outputs = model(**inputs)
        if (inputs["input_ids"].shape[1]) > 32:
            outputs["loss"] = outputs["loss"] * 1.25
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


def test_a_loss_that_is_no_mean_over_tokens_is_found(tmp_path: Path) -> None:
    assert "the loss is not a mean over the labels" in check(tiny_llama(), tmp_path, MeanOfSamples, max_length=48)


# -- models that mix samples -------------------------------------------------------------------------------------------


def test_a_recurrent_layer_is_named(tmp_path: Path) -> None:
    layers = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "use_mamba_kernels": False}
    jamba = library("JambaForCausalLM", num_key_value_heads=2, num_experts=2, **layers)
    assert "mixes samples is model.layers.0.mamba (JambaMambaMixer)" in check(jamba(), tmp_path)


def test_attention_that_ignores_positions_is_named(tmp_path: Path) -> None:
    shape = {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64}
    found = check(library("OPTForCausalLM", **shape)(), tmp_path)
    assert "mixes samples is model.decoder.layers.0.self_attn (OPTAttention)" in found


def test_a_module_that_refuses_packed_samples_is_quoted(tmp_path: Path) -> None:
    pytest.importorskip("transformers.models.lfm2")
    lfm2 = library("Lfm2ForCausalLM", num_key_value_heads=2, layer_types=["conv", "full_attention"])
    assert "refuses packed samples: `causal_conv1d_fn` can't keep packed sequences apart" in check(lfm2(), tmp_path)


class Normalized(Custom):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "no positions": (PlainLanguageModel, {}, "takes no position_ids"),
    "encoder-decoder": (
        library("T5ForConditionalGeneration", d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8),
        {},
        "two sequences for each sample",
    ),
    "one prediction a row": (
        library("BertForSequenceClassification"),
        {},
        "one prediction for each row, not for each token. Set packing=False",
    ),
    "batch statistics": (Normalized, {}, r"norm \(BatchNorm1d\) normalizes with statistics of all tokens of a batch"),
    "bidirectional windows": (library("ModernBertForMaskedLM", cls_token_id=1), {}, "sliding windows"),
    "bidirectional flex": (library("BertForMaskedLM", "flex_attention"), {}, "flex_attention' does not take"),
    "no length": (Custom, {"max_length": None}, "packing=True needs max_length"),
    "group_by_length": (tiny_llama, {"train_sampling_strategy": "group_by_length"}, "all rows have the same length"),
    "cache": (tiny_llama, {"use_cache": True}, "with a key-value cache"),
    "length": (tiny_llama, {"max_length": 0}, "max_length=0 must be"),
    "eval": (tiny_llama, {"packing": False, "eval_packing": True}, "eval_packing=True needs packing=True"),
    "strategy": (tiny_llama, {"packing_strategy": "bfd"}, "packing_strategy='bfd' is not one of best_fit, cut"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_before_a_start(name: str, tmp_path: Path) -> None:
    model, more, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        args = TrainingArguments(str(tmp_path), use_cpu=True, **{"packing": True, "max_length": 40, **more})
        Trainer(model(), args, train_dataset=Padded(30))
