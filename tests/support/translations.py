"""Small models that generate, and ragged pairs of sequences for them: for the tests of generation in evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ds_trainer import Seq2SeqTrainer, Seq2SeqTrainingArguments

VOCABULARY, PAD, END, START = 29, 3, 1, 2  # beam search of transformers fills up with END where PAD is 0
ENDS = [END, 4, 8, 22, 23]


def tiny_t5(seed: int = 0, **changes: Any) -> nn.Module:
    """A T5."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(seed)
    values: dict[str, Any] = dict(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        pad_token_id=PAD,
        eos_token_id=END,
        decoder_start_token_id=PAD,
        dropout_rate=0.0,
        tie_word_embeddings=False,
    )
    return _spread(T5ForConditionalGeneration(T5Config(**{**values, **changes})))


def tiny_bart(seed: int = 0) -> nn.Module:
    """A BART; its collator may hand in decoder_input_ids."""
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(seed)
    config = BartConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
        pad_token_id=PAD,
        bos_token_id=START,
        eos_token_id=END,
        decoder_start_token_id=START,
        forced_eos_token_id=None,
        dropout=0.0,
    )
    return _spread(BartForConditionalGeneration(config))


def tiny_decoder(seed: int = 0) -> nn.Module:
    """A Llama that generates."""
    from tests.support.models import tiny_llama

    model = _spread(tiny_llama(seed, vocab_size=VOCABULARY, pad_token_id=PAD, eos_token_id=END, bos_token_id=START))
    return model


def _spread(model: nn.Module) -> nn.Module:
    """Weights so wide that other inputs give other tokens, and several tokens that end a text: some rows end early."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5, generator=generator)
    model.generation_config.eos_token_id = ENDS  # type: ignore[union-attr]
    return model


def pairs(samples: int, seed: int = 0) -> list[dict[str, list[int]]]:
    """Sources of 2 to 9 tokens with targets of 2 to 7."""
    generator = torch.Generator().manual_seed(seed)

    def sequence(longest: int) -> list[int]:
        length = int(torch.randint(1, longest, (), generator=generator))
        return [*torch.randint(4, VOCABULARY, (length,), generator=generator).tolist(), END]

    return [{"input_ids": sequence(9), "labels": sequence(7)} for _ in range(samples)]


def prompts(samples: int) -> list[dict[str, list[int]]]:
    """For a decoder alone: the labels are those of the prompt. All of one length, so that it does not matter who shares
    a batch."""
    rows = [[PAD] * (9 - len(row["input_ids"])) + row["input_ids"] for row in pairs(samples)]
    return [{"input_ids": row, "labels": [-100 if token == PAD else token for token in row]} for row in rows]


def pad_pairs(rows: Sequence[dict[str, list[int]]], left: bool = False) -> dict[str, torch.Tensor]:
    """A batch as long as its longest rows."""

    def filled(key: str, fill: int) -> torch.Tensor:
        length = max(len(row[key]) for row in rows)
        room = [[fill] * (length - len(row[key])) for row in rows]
        return torch.tensor([r + row[key] if left else row[key] + r for row, r in zip(rows, room, strict=True)])

    ids = filled("input_ids", PAD)
    batch = {"input_ids": ids, "attention_mask": (ids != PAD).long()}
    return {**batch, "labels": filled("labels", -100)} if "labels" in rows[0] else batch


def pad_left(rows: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """As decoders want it: prompts end together."""
    return pad_pairs(rows, left=True)


def text_metrics(found: Any) -> dict[str, float]:
    """Metrics as scripts compute them: -100 becomes padding, which is left out; plus sums that see every number."""
    tokens = np.where(found.predictions == -100, PAD, found.predictions)
    labels = np.where(found.label_ids == -100, PAD, found.label_ids)

    def decoded(row: Any) -> list[int]:
        return [int(token) for token in row if token != PAD]

    rows = list(zip(map(decoded, tokens), map(decoded, labels), strict=True))
    return {
        "exact": float(np.mean([a == b for a, b in rows])),
        "words": float(np.mean([len(a) for a, _ in rows])),
        "order": float(sum(sum(a) * (i + 1) for i, (a, _) in enumerate(rows))),
        "targets": float(sum(sum(b) * (i + 1) for i, (_, b) in enumerate(rows))),
    }


MODELS: dict[str, Any] = {"t5": tiny_t5, "bart": tiny_bart, "decoder": tiny_decoder}


def arguments(output_dir: Any, **changes: Any) -> Seq2SeqTrainingArguments:
    """Quiet, on the CPU, generating in batches of 2."""
    values: dict[str, Any] = dict(
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        per_device_eval_batch_size=2,
        per_device_train_batch_size=2,
        predict_with_generate=True,
        logging_steps=1,
    )
    return Seq2SeqTrainingArguments(str(output_dir), **{**values, **changes})


def make(
    kind: str, output_dir: Any, samples: int, labelled: bool = True, trains: bool = True, **changes: Any
) -> Seq2SeqTrainer:
    """A trainer of a model of ``kind`` with ``samples`` evaluation samples; without training data unless it trains."""
    alone = kind == "decoder"
    rows = prompts(samples) if alone else pairs(samples)
    if not labelled:
        rows = [{"input_ids": row["input_ids"]} for row in rows]
    return Seq2SeqTrainer(
        MODELS[kind](),
        arguments(output_dir, **changes),
        data_collator=pad_left if alone else pad_pairs,
        train_dataset=pairs(8, seed=1) if trains else None,
        eval_dataset=rows,
        compute_metrics=text_metrics,
    )
