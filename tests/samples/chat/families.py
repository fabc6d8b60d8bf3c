"""Tokenizers of the model families, made here: byte-level BPE with their special tokens, and their chat templates.

The templates that publishers ship are read from TRL, which has them for its own tests; those in ``templates`` were
written here, and give the text that the models of the name are trained on.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ds_trainer.samples.chat.encoder import trained_runs

BAR = "\uff5c"  # the full-width bar of DeepSeek's tokens
OWN_TEMPLATES = Path(__file__).parent / "templates"
TEMPLATES_OF_TRL = {
    "llama-3.1": "llama3_1",
    "qwen-2.5": "qwen2_5",
    "qwen-3": "qwen3",
    "gemma-2": "gemma",
    "gemma-3": "gemma3",
    "gpt-oss": "gptoss",
    "deepseek-r1": "deepseek_r1_distill",
    "deepseek-v3": "deepseekv3",
}


class Family(NamedTuple):
    template: str
    bos: str | None
    eos: str
    others: tuple[str, ...]


_IM = ("<|im_start|>", "<|im_end|>")
_DEEPSEEK = tuple(
    f"<{BAR}{name}{BAR}>"
    for name in [
        "User",
        "Assistant",
        "tool▁calls▁begin",
        "tool▁calls▁end",
        "tool▁call▁begin",
        "tool▁call▁end",
        "tool▁sep",
        "tool▁outputs▁begin",
        "tool▁outputs▁end",
        "tool▁output▁begin",
        "tool▁output▁end",
    ]
)
_MISTRAL = tuple(
    f"[{name}]"
    for name in ["INST", "/INST", "TOOL_CALLS", "AVAILABLE_TOOLS", "/AVAILABLE_TOOLS", "TOOL_RESULTS", "/TOOL_RESULTS"]
)
FAMILIES = {
    "llama-3.1": Family(
        "llama-3.1", "<|begin_of_text|>", "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>")
    ),
    "qwen-2.5": Family("qwen-2.5", None, "<|im_end|>", _IM),
    "qwen-3": Family("qwen-3", None, "<|im_end|>", (*_IM, "<think>", "</think>", "<tool_call>", "</tool_call>")),
    "gemma-2": Family("gemma-2", "<bos>", "<eos>", ("<start_of_turn>", "<end_of_turn>")),
    "gemma-3": Family("gemma-3", "<bos>", "<eos>", ("<start_of_turn>", "<end_of_turn>")),
    "mistral-v0.3": Family("mistral-v0.3", "<s>", "</s>", _MISTRAL),
    "phi-4": Family("phi-4", "<|endoftext|>", "<|im_end|>", ("<|im_start|>", "<|im_sep|>")),
    "phi-4-first": Family("phi-4-first", "<|endoftext|>", "<|im_end|>", ("<|im_start|>", "<|im_sep|>")),
    "gpt-oss": Family(
        "gpt-oss",
        "<|startoftext|>",
        "<|return|>",
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|constrain|>"),
    ),
    "deepseek-r1": Family(
        "deepseek-r1",
        f"<{BAR}begin▁of▁sentence{BAR}>",
        f"<{BAR}end▁of▁sentence{BAR}>",
        (*_DEEPSEEK, "<think>", "</think>"),
    ),
    "deepseek-v3": Family("deepseek-v3", f"<{BAR}begin▁of▁sentence{BAR}>", f"<{BAR}end▁of▁sentence{BAR}>", _DEEPSEEK),
    "chatml": Family("chatml", None, "<|im_end|>", _IM),
}


def template_of(name: str) -> str:
    """The text of a template; skips the test where it is TRL's and TRL is not installed."""
    if name not in TEMPLATES_OF_TRL:
        return (OWN_TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    found = importlib.util.find_spec("trl")  # not imported: that takes seconds
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"TRL (extra test), which ships the chat template of {name}, is not installed")
    path = Path(found.submodule_search_locations[0]) / "chat_templates" / f"{TEMPLATES_OF_TRL[name]}.jinja"
    return path.read_text(encoding="utf-8")


@functools.cache
def _trained() -> str:
    """A byte-level BPE of 2,000 tokens, trained on source text of the standard library."""
    tokenizer = Tokenizer(models.BPE())
    # Words, numbers of up to three digits, punctuation with the new lines after it, new lines: as in Llama 3 and Qwen.
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
        r"\s+(?!\S)|\s+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(words), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    sources = (Path(module.__file__).read_text(encoding="utf-8") for module in (json, textwrap, functools))
    tokenizer.train_from_iterator(sources, trainer)
    return str(tokenizer.to_str())


@functools.cache
def tokenizer_of(family: str) -> Any:
    """The tokenizer of a family; do not change it."""
    return make_tokenizer(FAMILIES[family])


def make_tokenizer(family: Family) -> Any:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()), bos_token=family.bos, eos_token=family.eos
    )
    tokenizer.add_tokens(list(family.others), special_tokens=True)
    tokenizer.chat_template = template_of(family.template)
    return tokenizer


def sentence_piece_tokenizer(family: Family, spaces: str) -> Any:
    """As SentencePiece models are converted: spaces are "▁", and unknown characters are bytes.

    Args:
        family: special tokens and template.
        spaces: ``none`` adds no space (Gemma), ``first`` one to the beginning of a text (Mistral), ``each`` also one
            after every special token (Llama 2).
    """
    inner = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if spaces == "first":
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        prepended = [normalizers.Prepend("▁")] if spaces == "each" else []
        inner.normalizer = normalizers.Sequence([*prepended, normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(steps if spaces == "none" else [*steps, decoders.Strip(" ", 1, 0)])
    known = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=1200, special_tokens=known, show_progress=False, max_token_length=12)
    inner.train_from_iterator(Path(textwrap.__file__).read_text(encoding="utf-8").splitlines(), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token=family.bos, eos_token=family.eos, unk_token="<unk>"
    )
    tokenizer.add_tokens(list(family.others), special_tokens=True)
    tokenizer.chat_template = template_of(family.template)
    return tokenizer


def marked(tokenizer: Any, sample: dict[str, Any]) -> str:
    """The text of a sample, with what is trained on in ⟦ ⟧."""
    ids, position, text = sample["input_ids"].tolist(), 0, ""
    for first, last in trained_runs(sample["labels"]):
        text += tokenizer.decode(ids[position:first]) + "⟦" + tokenizer.decode(ids[first:last]) + "⟧"
        position = last
    return text + tokenizer.decode(ids[position:])
