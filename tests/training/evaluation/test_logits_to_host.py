"""Whole logits without ``preprocess_logits_for_metrics``: made, gathered and copied to the host in pieces."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from ds_trainer import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments
from ds_trainer.training.evaluation import logits_in_pieces
from ds_trainer.training.model.chunked_loss import chunked_loss, head_check
from ds_trainer.training.model.chunked_loss.head_check import check_tiles
from tests.support.layouts import pad
from tests.support.models import VOCABULARY, RaggedTokens, tiny_llama
from tests.support.pool import pool
from tests.training.evaluation.test_logits_in_pieces import LargestLogits
from tests.training.test_chunked_loss_runs import adapted

CHUNK = 16  # tokens: two of each of eight rows
SAMPLES = 13  # the last batch is smaller, and one replica has none


class OnDevice(LargestLogits):
    """Without the memory of the host that is filled, and views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.hosts: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.tokens
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.overloadpacket is torch.ops.aten.full:
            self.hosts.append(result)
        memory = {host.untyped_storage()._cdata for host in self.hosts}
        if isinstance(result, torch.Tensor) and result.untyped_storage()._cdata in memory:
            self.tokens = before
        return result


class Unpadded(RaggedTokens):
    """Rows of different lengths."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index]
        used = int(row["attention_mask"].sum())
        return {name: value[:used] for name, value in row.items()}


def shares(prediction: Any) -> dict[str, float]:
    assert isinstance(prediction.predictions, np.ndarray)
    right = (prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]).sum()
    return {"right": float(right), "sum": float(prediction.predictions[prediction.predictions != -100].sum())}


def predicted(output_dir: str, chunk: int, make_model: Any = tiny_llama, ragged: bool = True, **more: Any) -> Any:
    seq2seq = more.pop("seq2seq", False)
    kinds: tuple[Any, Any] = (Seq2SeqTrainer, Seq2SeqTrainingArguments) if seq2seq else (Trainer, TrainingArguments)
    args = kinds[1](output_dir, use_cpu=True, loss_chunk_tokens=chunk, report_to="none", disable_tqdm=True, **more)
    keywords = {"data_collator": pad} if ragged else {}
    trainer = kinds[0](make_model(), args, compute_metrics=shares, **keywords)
    head_check.check_tiles = lambda *_: None  # has logits of a sample of its own
    data = Unpadded(SAMPLES) if ragged else RaggedTokens(SAMPLES)
    with OnDevice() as largest:
        found = trainer.predict(data)
    head_check.check_tiles = check_tiles
    return found.predictions, found.metrics, largest.tokens


def assert_equal(found: Any, wanted: Any) -> None:
    assert found[0].dtype == wanted[0].dtype
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5, atol=1e-6)
    for name in ("test_loss", "test_right", "test_sum"):
        assert found[1][name] == pytest.approx(wanted[1][name], rel=1e-5), name


CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"bf16": True},
    "rows of one length": {"ragged": False},
    "LoRA on the head": {"make_model": adapted},
    "in pieces of the dataset": {"eval_accumulation_steps": 2},
    "Seq2SeqTrainer": {"seq2seq": True},
}


@pytest.mark.parametrize("case", CASES)
def test_predictions_are_those_of_whole_logits(case: str, tmp_path: Any) -> None:
    wanted = predicted(str(tmp_path), 0, **CASES[case])
    found = predicted(str(tmp_path), CHUNK, **CASES[case])
    if case == "bf16":  # fewer rows in a product
        np.testing.assert_allclose(found[0], wanted[0], rtol=0.02, atol=0.02)
    else:
        assert_equal(found, wanted)
    assert found[2] <= CHUNK < wanted[2]  # tokens whose logits exist


LAYOUTS: dict[str, dict[str, Any]] = {
    "ZeRO 1": dict(zero_stage=1),
    "ZeRO 3": dict(zero_stage=3),
    "partitioned vocabulary": dict(
        tensor_parallel_size=2, zero_stage=1, deepspeed={"tensor_parallel": {"vocab_parallel_lm_head": True}}
    ),
    "ring": dict(context_parallel_size=2, zero_stage=1),
    "Ulysses, ZeRO 3": dict(sequence_parallel_size=2, zero_stage=3),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_predictions_on_two_ranks(layout: str, tmp_path: Any) -> None:
    # Rows are padded to the longest of the batches that are evaluated together, so the layout is the same.
    jobs = [
        partial(predicted, str(tmp_path), chunk, per_device_eval_batch_size=2, **LAYOUTS[layout])
        for chunk in (0, CHUNK)
    ]
    replicas = 2 if layout.startswith("ZeRO") else 1
    for wanted, found in zip(*(pool(2).run(job) for job in jobs), strict=True):
        assert_equal(found, wanted)
        assert found[2] <= replicas * CHUNK < wanted[2]  # tokens of all replicas whose logits exist
    (one,) = pool(1).run(partial(predicted, str(tmp_path), 0, per_device_eval_batch_size=4))
    same = (one[0] != -100) & (wanted[0] != -100)
    np.testing.assert_allclose(np.where(same, wanted[0], 0), np.where(same, one[0], 0), rtol=1e-5, atol=1e-6)


def predicted_where_tiles_pay(output_dir: str, tokens: float, chunk: int | None) -> Any:
    before, chunked_loss.PAYS_FROM = chunked_loss.PAYS_FROM, int(4 * VOCABULARY * tokens)
    try:
        return predicted(output_dir, chunk, per_device_eval_batch_size=2, zero_stage=3)  # type: ignore[arg-type]
    finally:
        chunked_loss.PAYS_FROM = before


def test_tiles_that_pay_on_one_rank_only_are_made_on_all(tmp_path: Any) -> None:
    """By default the number of tokens of a batch decides, and batches of different ranks are padded differently."""
    sizes = [[len(rows) * max(map(len, rows)) for rows in pairs] for pairs in batches_of_two_ranks()]
    between = next((one + other) / 2 for one, other in sizes if one != other)
    (wanted, _), (found, _) = (
        pool(2).run(partial(predicted_where_tiles_pay, str(tmp_path), between, chunk), timeout=120)
        for chunk in (0, None)
    )
    assert_equal(found, wanted)


def batches_of_two_ranks() -> list[list[list[torch.Tensor]]]:
    """The rows of both ranks in each micro-step."""
    rows = [row["input_ids"] for row in (Unpadded(SAMPLES)[index] for index in range(SAMPLES - SAMPLES % 4))]
    return [[rows[at : at + 2], rows[at + 2 : at + 4]] for at in range(0, len(rows), 4)]


def test_a_border_that_drops_a_token_is_noticed(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = predicted(str(tmp_path), 0)
    gathered = logits_in_pieces.gather_micro_steps
    monkeypatch.setattr(logits_in_pieces, "gather_micro_steps", lambda piece, *more: gathered(piece.roll(1, 1), *more))
    with pytest.raises(AssertionError):
        assert_equal(predicted(str(tmp_path), CHUNK), wanted)


class Overriding(Trainer):
    def prediction_step(self, *args: Any, **keywords: Any) -> Any:
        loss, logits, labels = super().prediction_step(*args, **keywords)
        assert logits.shape[-1] == VOCABULARY
        return loss, logits + 1, labels


def test_an_overridden_prediction_step_gets_whole_logits(tmp_path: Any) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, loss_chunk_tokens=CHUNK, report_to="none", disable_tqdm=True)
    one, other = (kind(tiny_llama(), args).predict(RaggedTokens(4)).predictions for kind in (Trainer, Overriding))
    np.testing.assert_allclose(other, one + 1, rtol=1e-5, atol=1e-5)
