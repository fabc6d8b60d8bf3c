"""transformers.Trainer over the same data, in a process of its own: it would join our process group."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

_PROGRAM = """
import json, sys
from transformers import Trainer, TrainingArguments
from tests.support.models import tiny_llama
from tests.support.reference import padded, token_rows
output_dir, runs, results = sys.argv[1], json.loads(sys.argv[2]), {}
for name, values in runs.items():
    mask = values.pop("mask", True)
    tokenizer = values.pop("padding", None)
    class Padding:
        pad_token_id = tokenizer
        def save_pretrained(self, *args, **kwargs): pass
    args = TrainingArguments(output_dir, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, **values)
    trainer = Trainer(tiny_llama(), args, train_dataset=token_rows(mask), data_collator=padded,
                      processing_class=None if tokenizer is None else Padding())
    output = trainer.train()
    results[name] = {"logs": trainer.state.log_history, "metrics": output.metrics,
                     "seen": trainer.state.num_input_tokens_seen}
print("RESULTS" + json.dumps(results))
"""


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
    command = [sys.executable, "-c", _PROGRAM, str(output_dir), json.dumps(runs)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert completed.returncode == 0, completed.stderr[-3000:]
    line = next(line for line in completed.stdout.splitlines() if line.startswith("RESULTS"))
    results: dict[str, Any] = json.loads(line.removeprefix("RESULTS"))
    return results
