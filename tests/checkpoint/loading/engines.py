"""Models in files, and engines over them, for tests of what engines hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.engine.training_engine import TrainingEngine
from tests.support.experts import qwen3_moe
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.tensor_models import of_family

SMALL: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64
)


def clip() -> nn.Module:
    """Two towers, convolutions, a parameter without dimensions."""
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(0)
    sizes = {**SMALL, "projection_dim": 16}
    text = {**sizes, "vocab_size": 61, "eos_token_id": 2, "bos_token_id": 1}
    return CLIPModel(CLIPConfig(text_config=text, vision_config={**sizes, "image_size": 16, "patch_size": 8}))


def t5() -> nn.Module:
    """Shared embeddings, a bucketed bias in the first layers only."""
    numbers = dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
    return of_family("T5", "T5ForConditionalGeneration", **numbers)


MODELS: dict[str, Any] = {
    "llama": tiny_llama,
    "tied": lambda: tiny_llama(tied=True),
    "qwen3_moe": qwen3_moe,
    "t5": t5,
    "bert": lambda: of_family("Bert", "BertForMaskedLM", **SMALL),
    "clip": clip,
}


def saved(name: str, directory: Path, **keywords: Any) -> Path:
    """The model in files of transformers' own."""
    path = directory / name
    model: Any = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():  # also those that begin as ones and zeros
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(path, **keywords)
    return path


def loaded(path: Path, **keywords: Any) -> Any:
    """What transformers makes of the files."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(path)
    return getattr(transformers, config.architectures[0]).from_pretrained(path, **keywords)


@contextmanager
def engine_over(model: nn.Module, output_dir: str, **arguments: Any) -> Iterator[TrainingEngine]:
    """An engine as a training makes it."""
    args = TrainingArguments(output_dir, use_cpu=True, save_strategy="no", **arguments)
    trainer = Trainer(model, args, train_dataset=RaggedTokens(8))
    engine = TrainingEngine(model, trainer._ds_trainer.parameter_groups(), trainer._ds_trainer.compiled, trainer.layout)
    try:
        yield engine
    finally:
        engine.close()
