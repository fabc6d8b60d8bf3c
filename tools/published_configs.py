"""Configurations of the models on the documentation's pages, from their cards: shapes without weights."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def llama(hidden: int, inner: int, layers: int, heads: int, tied: bool = False) -> dict[str, Any]:
    """The configuration of a Llama 3 model."""
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": tied,
    }


MODERNBERT_BASE: dict[str, Any] = {
    "model_type": "modernbert",
    "architectures": ["ModernBertForMaskedLM"],
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "vocab_size": 50_368,
    "max_position_embeddings": 8192,
}
QWEN2_5_VL_7B: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "text_config": {
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152_064,
        "max_position_embeddings": 128_000,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1_000_000.0},
    },
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "patch_size": 14,
        "out_hidden_size": 3584,
    },
    "tie_word_embeddings": False,
}


@contextmanager
def models(configs: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Inside, the working directory has these configurations, as directories of models, and this repository's."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "ds_configs").symlink_to(ROOT / "ds_configs")
        for name, config in configs.items():
            (Path(directory) / name).mkdir(parents=True)
            (Path(directory) / name / "config.json").write_text(json.dumps(config))
        os.chdir(directory)
        try:
            yield
        finally:
            os.chdir(before)
