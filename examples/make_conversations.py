"""Conversations from the docstrings of Python's standard library, and a small model with a chat template for them.

python examples/make_conversations.py conversations.jsonl --model base

Every function and class with a docstring gives a question and an answer; the file is in the format of ``messages``.
"""

from __future__ import annotations

import argparse
import ast
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def conversations(library: Path, limit: int) -> Iterator[dict[str, Any]]:
    """A question and its answer for each documented function and class of the modules in ``library``."""
    count = 0
    for path in sorted(library.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            text = ast.get_docstring(node)
            if not text or count == limit:
                continue
            count += 1
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            question = f"What does the {kind} {node.name} of the module {path.stem} do?"
            turns = [("user", question), ("assistant", text.split("\n\n")[0])]
            yield {"messages": [{"role": role, "content": content} for role, content in turns]}


def save_model(directory: Path, texts: list[str]) -> None:
    """Write a small Llama with random weights, and a byte-level BPE tokenizer of ``texts`` with a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<pad>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2048, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=special[0], eos_token=special[1])
    tokenizer.add_special_tokens({"additional_special_tokens": special[2:]})
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=1024, initializer_range=0.06, **sizes, **ids
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def main() -> None:
    """Write the conversations and, if asked for, the model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="jsonl file to write")
    parser.add_argument("--model", type=Path, help="directory for a small model")
    parser.add_argument("--limit", type=int, default=5000, help="most conversations; default: 5000")
    options = parser.parse_args()
    rows = list(conversations(Path(sysconfig.get_path("stdlib")), options.limit))
    options.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{options.out}: {len(rows):,} conversations")
    if options.model is not None:
        save_model(options.model, [turn["content"] for row in rows for turn in row["messages"]])
        print(f"{options.model}: a model with random weights")


if __name__ == "__main__":
    main()
