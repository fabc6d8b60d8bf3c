"""The data card of a fine-tuning run, which its report shows: counts, lengths, and samples with what is trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ds_trainer.monitor.report.run_files import DATA_CARD_NAME
from ds_trainer.recipes.fine_tuning_data import FineTuningData, SourceFigures
from ds_trainer.samples.chat.display import parts
from ds_trainer.samples.prepared.dataset import PreparedDataset
from ds_trainer.samples.sources.mixture_stream import MixtureStream
from ds_trainer.utils.files import write_json
from ds_trainer.utils.secrets import without_secrets

SAMPLES = 3
"""Samples of each source."""
_SOURCES, _TOKENS = 6, 1500  # of how many sources samples are shown, and how much of each


def write_data_card(data: FineTuningData, tokenizer: Any, output_dir: Path) -> None:
    """Write the card of ``data`` to ``output_dir``.

    Args:
        data: the samples of the run.
        tokenizer: of transformers; decodes.
        output_dir: directory of the run.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    write_json(output_dir / DATA_CARD_NAME, without_secrets(data_card(data, tokenizer)))


def data_card(data: FineTuningData, tokenizer: Any) -> dict[str, Any]:
    """The content of ``data_card.json``; its form: :mod:`ds_trainer.monitor.report.figures`."""
    figures = data.to_dict()
    if isinstance(data.train, MixtureStream):
        rows = [{**row, "share": f"{row['share']:.1%}"} for row in figures["sources"]]
        return {"figures": {"samples for evaluation": figures["eval_samples"], "training data": "streamed"},
                "sources": rows}  # fmt: skip
    return {
        "figures": {
            "samples of an epoch": len(data.train),
            "tokens": figures["tokens"],
            "trained on": f"{figures['trained_tokens']:,} tokens ({figures['trained_share']:.1%})",
            "samples for evaluation": figures["eval_samples"],
            "bad lines left out": figures["bad_lines"],
        },
        "sources": [_row(source) for source in data.sources],
        "lengths": _histogram(data.train.lengths),
        "samples": [
            _sample(row.name, dataset, index, tokenizer)
            for row, dataset in list(zip(data.sources, data.train.datasets, strict=True))[:_SOURCES]
            for index in range(min(SAMPLES, len(dataset)))
        ],
    }


def _row(source: SourceFigures) -> dict[str, Any]:
    share = source.trained_tokens / max(source.tokens, 1)
    return {
        "name": source.name,
        "format": source.format,
        "records": source.records,
        "samples": source.samples,
        "tokens": source.tokens,
        "trained on": f"{share:.1%}",
        "without a sample": source.without_sample,
        **source.notices,
        **({"keys not used": ", ".join(source.unread)} if source.unread else {}),
    }


def _histogram(lengths: np.ndarray) -> dict[str, list[int]]:
    """Samples by length, in powers of two."""
    last = int(np.ceil(np.log2(int(lengths.max()) + 1)))
    edges = 2 ** np.arange(last + 1)
    counts = np.histogram(lengths, edges)[0]
    first = int(np.flatnonzero(counts)[0])
    return {"edges": edges[first:].tolist(), "counts": counts[first:].tolist()}


def _sample(name: str, dataset: PreparedDataset, index: int, tokenizer: Any) -> dict[str, Any]:
    sample = dataset[index]
    ids, labels = sample["input_ids"][:_TOKENS].numpy(), sample["labels"][:_TOKENS].numpy()
    pieces = [{"text": tokenizer.decode(run.tolist()), "trained": trained} for trained, run in parts(ids, labels)]
    return {"source": f"{name}: {dataset.source(index)}", "pieces": pieces}
