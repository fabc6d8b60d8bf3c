"""transformers.Trainer over the same data, in a process of its own: it would join our process group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.forks import in_a_fork


def token_rows(mask: bool = True) -> list[dict[str, Any]]:
    """37 samples of 3 to 12 tokens, none of them padding."""
    import torch

    generator = torch.Generator().manual_seed(7)
    rows = []
    for _ in range(37):
        length = int(torch.randint(3, 13, (), generator=generator))
        tokens = torch.randint(3, 61, (length,), generator=generator)
        rows.append({"input_ids": tokens, "labels": tokens.clone()})
        if mask:
            rows[-1]["attention_mask"] = torch.ones(length, dtype=torch.long)
    return rows


def padded(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows of different lengths as one batch, as long as the longest."""
    from torch.nn.utils.rnn import pad_sequence

    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {key: pad_sequence([row[key] for row in rows], True, fill[key]) for key in rows[0]}


def train_with_transformers(output_dir: Path, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Train once for each of ``runs``: arguments, ``mask`` (whether samples have one), ``padding`` (a token number)."""
    found: dict[str, Any] = in_a_fork(_train, str(output_dir), runs)
    return found


def _train(output_dir: str, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    from transformers import Trainer, TrainingArguments

    from tests.support.models import tiny_llama

    class Padding:
        def __init__(self, token: int) -> None:
            self.pad_token_id = token

        def save_pretrained(self, *args: Any, **kwargs: Any) -> None: ...

    results = {}
    for name, values in runs.items():
        mask, token = values.pop("mask", True), values.pop("padding", None)
        quiet = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
        args = TrainingArguments(output_dir, **quiet, **values)
        tokenizer: Any = None if token is None else Padding(token)
        trainer = Trainer(
            tiny_llama(), args, train_dataset=token_rows(mask), data_collator=padded, processing_class=tokenizer
        )
        metrics = trainer.train().metrics
        state = trainer.state
        results[name] = {"logs": state.log_history, "metrics": metrics, "seen": state.num_input_tokens_seen}
    return results
