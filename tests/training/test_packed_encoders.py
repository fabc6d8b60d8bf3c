"""Packed bidirectional models train like plain PyTorch on the samples alone, without the mask of all pairs."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ds_trainer import ConfigError, Trainer, TrainingArguments
from ds_trainer.arguments.enums import PackingStrategy
from ds_trainer.data.order import epoch_order
from ds_trainer.data.packing import batch as batch_module
from ds_trainer.data.packing.rows import packed_rows
from ds_trainer.parallel.deferred_mask import DocumentMask
from ds_trainer.parallel.document_attention import Documents
from tests.support.compare import assert_equal, relative
from tests.support.layouts import Padded, Row, pad
from tests.support.models import VOCABULARY
from tests.support.oracle import Trajectory, train_plainly
from tests.support.pool import pool
from tests.support.runs import train_and_report
from tests.training.model.packing.test_attention import counted, masks_made
from tests.training.model.packing.test_equality import library

SAMPLES, ROW, ROWS_A_STEP = 60, 40, 4
_DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout")


def model(name: str, **more: Any) -> nn.Module:
    shape: dict[str, Any] = {**dict.fromkeys(_DROPOUT, 0.0), "bos_token_id": 1, "pad_token_id": 0, **more}
    if name.startswith("DistilBert"):
        shape.update(dim=32, n_layers=2, n_heads=4, hidden_dim=48)
    made = library(name, vocab_size=VOCABULARY, **shape)()
    for key, bias in made.named_parameters():
        if key.endswith(("key.bias", "k_lin.bias")):  # the softmax does not see it: its gradient is rounding
            bias.requires_grad_(False).fill_(0.1)
    return made


NAMES = ("BertForMaskedLM", "RobertaForMaskedLM", "DistilBertForMaskedLM", "ElectraForMaskedLM")
bert = partial(model, NAMES[0])


class Masked(Padded):
    """Targets are some of the tokens."""

    def __getitem__(self, index: int) -> Row:
        row = super().__getitem__(index)
        predicted = torch.arange(len(row["labels"])) % 3 == index % 3
        return {**row, "labels": row["labels"].masked_fill(~predicted, -100)}


make_data = partial(Masked, SAMPLES)


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """What the oracle gets: for each row the samples in it, which it trains on alone."""

    def __init__(self) -> None:
        self.data = make_data()
        lengths = [len(document) for (document,) in self.data.documents]
        self.rows = packed_rows(lengths, ROW, PackingStrategy.BEST_FIT, epoch_order(SAMPLES, 42, 0, True), 42)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> list[Row]:
        return [self.data[int(sample)] for sample, _, _ in self.rows.row(index)]


def samples_alone(rows: list[list[Row]]) -> Row:
    return pad([sample for row in rows for sample in row])


def loss_of_targets(model: nn.Module, batch: Row) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])["logits"].float()
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


@cache
def reference(name: str) -> Trajectory:
    return train_plainly(
        model(name),
        Rows(),
        loss=loss_of_targets,
        optimizer="sgd",
        learning_rate=0.5,
        weight_decay=0.0,
        global_batch=ROWS_A_STEP,
        collate=samples_alone,
    )


def arguments(replicas: int = 1, accumulation: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "packing": True,
        "max_length": ROW,
        "optim": "sgd",
        "learning_rate": 0.5,
        "weight_decay": 0.0,
        "max_grad_norm": 0.0,
        "per_device_train_batch_size": ROWS_A_STEP // (replicas * accumulation),
        "gradient_accumulation_steps": accumulation,
        **more,
    }


def train(make_model: Any, output_dir: str, **values: Any) -> tuple[Trajectory, int, int]:
    """The trajectory, the masks that were made, and the calls of attention sample by sample."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        made, calls = stack.enter_context(masks_made(patch)), stack.enter_context(counted(patch))
        found = train_and_report(make_model, make_data, output_dir, **values)
        return found, len(made), len(calls)


CHECKPOINTED: dict[str, Any] = {"activation_checkpointing": True}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    **{name: (name, 1, arguments(zero_stage=0)) for name in NAMES},
    "reentrant": (
        NAMES[0],
        1,
        arguments(accumulation=1, **CHECKPOINTED, activation_checkpointing_kwargs={"use_reentrant": True}),
    ),
    "not reentrant": (NAMES[1], 1, arguments(**CHECKPOINTED, activation_checkpointing_kwargs={"use_reentrant": False})),
    "offload": (NAMES[0], 1, arguments(**CHECKPOINTED, activation_offload=True)),
    "dp2": (NAMES[1], 2, arguments(2, zero_stage=3)),
    "dp2, one micro-batch": (NAMES[3], 2, arguments(2, accumulation=1, zero_stage=2)),
    "dp2, stage 1": (NAMES[2], 2, arguments(2, zero_stage=1)),
    "tp2": (NAMES[0], 2, arguments(tensor_parallel_size=2, zero_stage=1)),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_encoders_train_like_the_samples_alone(layout: str, tmp_path: Path) -> None:
    name, world, values = LAYOUTS[layout]
    for found, made, calls in pool(world).run(partial(train, partial(model, name), str(tmp_path), **values)):
        assert_equal(found, reference(name), tolerance=3e-5)
        assert not made and calls >= 2 * 4  # layers, steps


class Short(Masked):
    """Samples of at most five tokens, so that the beginning of a row has several."""

    def __getitem__(self, index: int) -> Row:
        return {key: value[: 2 + index % 4] for key, value in super().__getitem__(index).items()}


def train_short(output_dir: str, **values: Any) -> Trajectory:
    return train_and_report(bert, partial(Short, SAMPLES), output_dir, **arguments(**values))


@pytest.mark.cases(1)
@pytest.mark.parametrize("axis", ["context_parallel_size", "sequence_parallel_size"])
def test_packed_encoders_train_with_sharded_sequences(axis: str, tmp_path: Path) -> None:
    (whole,) = pool(1).run(partial(train_short, str(tmp_path / "whole")))
    for found in pool(2).run(partial(train_short, str(tmp_path / axis), **{axis: 2})):
        assert_equal(found, whole, tolerance=3e-5)


def test_data_loader_workers(tmp_path: Path) -> None:
    """In this process: those of the pool may not start others."""
    found, made, calls = train(bert, str(tmp_path), **arguments(dataloader_num_workers=1))
    assert_equal(found, reference(NAMES[0]), tolerance=3e-5)
    assert not made and calls


def test_negative_control_samples_in_one_row_are_not_alone() -> None:
    def joined(rows: list[list[Row]]) -> Row:
        return pad([{key: torch.cat([sample[key] for sample in row]) for key in row[0]} for row in rows])

    mixed = train_plainly(
        bert(), Rows(), loss=loss_of_targets, optimizer="sgd", learning_rate=0.5, weight_decay=0.0,
        global_batch=ROWS_A_STEP, collate=joined
    )  # fmt: skip
    assert relative(mixed.losses, reference(NAMES[0]).losses) > 1e-4


@pytest.mark.extended
def test_sixteen_bits_and_compiled_blocks(tmp_path: Path) -> None:
    ((found, made, _),) = pool(1).run(partial(train, bert, str(tmp_path), **arguments(bf16=True)))
    assert not made and relative(found.losses, reference(NAMES[0]).losses) < 2e-2
    compiled = arguments(torch_compile=True, torch_compile_backend="eager", torch_compile_regional=True)
    ((found, made, calls),) = pool(1).run(partial(train, bert, str(tmp_path), **compiled), timeout=400)
    assert_equal(found, reference(NAMES[0]), tolerance=3e-5)
    assert not made and not calls  # the batch has the mask itself


def with_dropout(output_dir: str, deferred: bool) -> tuple[Trajectory, int, int]:
    with pytest.MonkeyPatch.context() as patch:
        if not deferred:
            patch.setattr(batch_module, "DocumentMask", lambda documents: DocumentMask(documents).made())
        values = arguments(**CHECKPOINTED)
        return train(partial(bert, attention_probs_dropout_prob=0.2), output_dir, **values)


def test_attention_with_dropout_gets_the_mask(tmp_path: Path) -> None:
    """The numbers are those of a batch that has the mask, to the bit."""
    ((found, made, calls),) = pool(1).run(with_dropout, str(tmp_path), True)
    ((wanted, none, _),) = pool(1).run(with_dropout, str(tmp_path), False)
    assert found.losses == wanted.losses and found.grad_norms == wanted.grad_norms
    assert made == 2 * 4 and none > 0  # once for each micro-batch, for all layers
    assert calls  # by the proof, which has no dropout


def leaking(output_dir: str) -> str:
    """What the proof says of a collator whose mask does not know the last sample of a row."""

    def wrong(documents: Documents) -> DocumentMask:
        rows, tokens = documents.shape
        return DocumentMask(Documents((rows, tokens), [0, *(row * tokens for row in range(1, rows + 1))]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_module, "DocumentMask", wrong)
        try:
            train_and_report(bert, make_data, output_dir, **arguments())
        except ConfigError as error:
            return str(error)
    return ""


def test_negative_control_the_proof_finds_wrong_borders(tmp_path: Path) -> None:
    (message,) = pool(1).run(leaking, str(tmp_path))
    assert "the outputs of a sample change" in message
    assert "bert.encoder.layer.0.attention" in message


def evaluated(output_dir: str, **values: Any) -> tuple[float, float, int]:
    args = TrainingArguments(output_dir, use_cpu=True, disable_tqdm=True, per_device_eval_batch_size=2, **values)
    trainer = Trainer(bert(), args, eval_dataset=make_data(), data_collator=None if args.packing else pad)
    with pytest.MonkeyPatch.context() as patch, masks_made(patch) as made:
        metrics = trainer.evaluate()
        return metrics["eval_loss"], metrics["eval_items"], len(made)


def test_an_evaluation_of_packed_rows_has_the_same_loss(tmp_path: Path) -> None:
    ((plain, items, _),) = pool(1).run(partial(evaluated, str(tmp_path)))
    ((packed, same, made),) = pool(1).run(partial(evaluated, str(tmp_path), packing=True, max_length=ROW))
    assert packed == pytest.approx(plain, rel=1e-5) and same == items and not made


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_the_loader_in_a_model_called_directly(name: str, tmp_path: Path) -> None:
    """The mask is made at its first use."""
    args = TrainingArguments(str(tmp_path), use_cpu=True, packing=True, max_length=ROW, per_device_train_batch_size=2)
    trainer = Trainer(model(name), args, train_dataset=make_data())
    batch = next(iter(trainer.get_train_dataloader()))
    assert type(batch["attention_mask"]) is DocumentMask
    with pytest.MonkeyPatch.context() as patch, masks_made(patch) as made:
        found = trainer.model(**batch).loss
        assert len(made) == 1
    mask = DocumentMask(batch["attention_mask"].documents).made()
    assert torch.equal(found, trainer.model(**{**batch, "attention_mask": mask}).loss)


def counts(output_dir: str) -> tuple[float, int]:
    trainer = Trainer(
        bert(),
        TrainingArguments(
            output_dir, use_cpu=True, max_steps=2, save_strategy="no", disable_tqdm=True,
            include_num_input_tokens_seen="non_padding", **arguments(accumulation=1)
        ),
        train_dataset=make_data(),
        processing_class=SimpleNamespace(pad_token_id=0)
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch, masks_made(patch) as made:
        trainer.train()
        assert not made
    seen = trainer.state.num_input_tokens_seen
    trainer.engine.close()
    rows = [Rows()[index] for index in torch.randperm(len(Rows()), generator=torch.Generator().manual_seed(42))[:8]]
    return seen, sum(len(sample["input_ids"]) for row in rows for sample in row)


def test_tokens_are_counted_without_the_mask(tmp_path: Path) -> None:
    ((seen, wanted),) = pool(1).run(counts, str(tmp_path))
    assert seen == wanted
