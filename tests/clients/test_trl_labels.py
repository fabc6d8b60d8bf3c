"""The tokens and labels of TRL's SFTTrainer with assistant_only_loss, for its templates with generation markers."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from ds_trainer.samples.chat.encoder import Encoder
from ds_trainer.samples.chat.options import EncodeOptions
from ds_trainer.samples.sources.record import Record
from tests.samples.chat.families import FAMILIES, make_tokenizer

CONVERSATIONS = [
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi there"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "It is 4.\n"},
    ],
    [{"role": "user", "content": "Wie geht's?"}, {"role": "assistant", "content": "Gut, 日本 🙂!"}],
]
TEMPLATES = {"llama3_training": "llama-3.1", "qwen3_training": "qwen-3", "gemma3_training": "gemma-3"}
# Their markers include the end of the generation prompt, which the model is given: TRL trains on it, we do not.
WITH_PROMPT = {
    "qwen2_5_training": ("qwen-2.5", "\n"),
    "gptoss_training": ("gpt-oss", "<|start|>assistant"),
    "deepseekv3_training": ("deepseek-v3", "<\uff5cAssistant\uff5c>"),
}


def labels_of_trl(template: str, family: str, folder: Path) -> tuple[Any, list[tuple[list[int], list[int]]]]:
    """The tokenizer with a template of TRL, and (token ids, labels) of each conversation as SFTTrainer makes them."""
    import trl
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer(FAMILIES[family])
    path = Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja"
    tokenizer.chat_template = path.read_text(encoding="utf-8")
    tokenizer.pad_token = tokenizer.eos_token
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
    )
    arguments = trl.SFTConfig(
        output_dir=str(folder), assistant_only_loss=True, use_cpu=True, bf16=False, report_to="none", max_length=None
    )
    dataset = Dataset.from_list([{"messages": messages} for messages in CONVERSATIONS])
    trainer = trl.SFTTrainer(model, arguments, train_dataset=dataset, processing_class=tokenizer)
    batch = trainer.data_collator([trainer.train_dataset[index] for index in range(len(CONVERSATIONS))])
    pairs = []
    for ids, labels, kept in zip(batch["input_ids"], batch["labels"], batch["attention_mask"].bool(), strict=True):
        pairs.append((ids[kept].tolist(), labels[kept].tolist()))
    return tokenizer, pairs


def ours(tokenizer: Any, messages: list[dict[str, Any]]) -> tuple[list[int], list[int], set[str]]:
    """Token ids, labels, and what was noticed."""
    encoder = Encoder(tokenizer, EncodeOptions(date=datetime.date.today().isoformat()))
    samples, notices = encoder.encode(Record("a:1", "messages", {"messages": messages}))
    return samples[0]["input_ids"].tolist(), samples[0]["labels"].tolist(), notices


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_labels_are_those_of_trl(template: str, tmp_path: Path) -> None:
    tokenizer, theirs = labels_of_trl(template, TEMPLATES[template], tmp_path)
    for messages, (ids, labels) in zip(CONVERSATIONS, theirs, strict=True):
        assert ours(tokenizer, messages)[:2] == (ids, labels)
        assert sum(label != -100 for label in labels) > 2


@pytest.mark.parametrize("template", WITH_PROMPT)
def test_the_generation_prompt_within_markers_is_not_trained_on(template: str, tmp_path: Path) -> None:
    family, prompt = WITH_PROMPT[template]
    tokenizer, theirs = labels_of_trl(template, family, tmp_path)
    for messages, (ids, labels) in zip(CONVERSATIONS, theirs, strict=True):
        found, own, notices = ours(tokenizer, messages)
        assert found == ids
        assert "prompt_in_markers" in notices
        further = [token for token, label in zip(labels, own, strict=True) if token != label]
        turns = sum(message["role"] == "assistant" for message in messages)
        assert tokenizer.decode(further) == prompt * turns
