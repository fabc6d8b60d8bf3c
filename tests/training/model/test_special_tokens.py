"""A tokenizer with tokens of its own: the model's configurations name them from the start of training."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.recipes.tokenizers import ByteTokenizer
from ds_trainer.training.model.preparation import align_tokens
from tests.support.models import RaggedTokens, Regression, tiny_llama
from tests.support.pool import pool


def chat_tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", *map(str, range(40)), "<end>"])}
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<end>", pad_token="<pad>")


def tokens_after_training(output_dir: Path) -> tuple[int, list[int], int, int]:
    model: Any = tiny_llama()
    args = TrainingArguments(str(output_dir), max_steps=1, use_cpu=True, disable_tqdm=True, save_strategy="no")
    job = Trainer(model, args, train_dataset=RaggedTokens(8), processing_class=chat_tokenizer())
    job.train()
    job.engine.close()
    config, generation = model.config, model.generation_config
    return config.eos_token_id, generation.eos_token_id, config.bos_token_id, generation.pad_token_id


def test_configurations_follow_the_tokenizer(tmp_path: Path) -> None:
    assert (tiny_llama().config.eos_token_id, chat_tokenizer().eos_token_id) == (2, 43)  # type: ignore[union-attr]
    ((eos, generation_eos, bos, pad),) = pool(1).run(partial(tokens_after_training, tmp_path))
    assert eos == 43 and generation_eos == [43, 2]  # generation ends at either
    assert bos == 1 and pad == 0  # the tokenizer has no first token: what the model says stays


def test_other_models_and_tokenizers_are_not_changed() -> None:
    model: Any = tiny_llama()
    align_tokens(model, ByteTokenizer())
    align_tokens(model, None)
    align_tokens(Regression(), chat_tokenizer())
    assert model.config.eos_token_id == 2
