"""Models, a tokenizer and data for the scripts of this folder: made on this machine, the same in every process."""

import json
import os
import sys
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import BartConfig, BertConfig, LlamaConfig, PreTrainedTokenizerFast, T5Config

SPECIAL = ["<pad>", "<unk>", "<s>", "</s>", "[CLS]", "[SEP]", "[MASK]"]
TEMPLATE = (
    "{% for message in messages %}<s> {{ message['role'] }} "
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}</s>{% endgeneration %}"
    "{% else %}{{ message['content'] }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<s> assistant {% endif %}"
)


def sentences(number: int) -> list[str]:
    """Lines of Python's own library."""
    found: list[str] = []
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            words = line.split()
            if 4 <= len(words) <= 12:
                found.append(" ".join(words))
        if len(found) >= number:
            return found[:number]
    return found


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-pair tokenizer of 512 tokens with a chat template."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        sentences(400), trainers.BpeTrainer(vocab_size=512, special_tokens=SPECIAL, show_progress=False)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        chat_template=TEMPLATE,
        model_max_length=128,
    )


SIZES = dict(vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
ENDS = dict(pad_token_id=0, bos_token_id=2, eos_token_id=3)
WIDTHS = dict(vocab_size=512, d_model=64, pad_token_id=0, decoder_start_token_id=0, eos_token_id=3)


def llama_config(**changes) -> LlamaConfig:
    """Two layers of width 64 for the tokenizer."""
    return LlamaConfig(**{**SIZES, **ENDS, "num_key_value_heads": 2, "max_position_embeddings": 256, **changes})


def bert_config(**changes) -> BertConfig:
    """Two layers of width 64 for the tokenizer, without dropout."""
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertConfig(**{**SIZES, "max_position_embeddings": 128, "pad_token_id": 0, **dropout, **changes})


def t5_config(**changes) -> T5Config:
    """Two layers of width 64 on each side, without dropout."""
    return T5Config(
        **{**WIDTHS, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0, **changes}
    )


def bart_config(**changes) -> BartConfig:
    """Two layers of width 64 on each side, without dropout."""
    sides = {
        f"{side}_{name}": size
        for side in ("encoder", "decoder")
        for name, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 96))
    }
    dropout = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
    ends = {**ENDS, "decoder_start_token_id": 3, "forced_eos_token_id": 3}
    return BartConfig(**{**WIDTHS, **sides, **dropout, **ends, "max_position_embeddings": 128, **changes})


def seeded(make, *args, **kwargs):
    """``make(...)`` with the same random weights at every call."""
    torch.manual_seed(1)
    return make(*args, **kwargs)


def language_modeling(number: int = 96) -> Dataset:
    """Texts."""
    return Dataset.from_dict({"text": sentences(number)})


def conversations(number: int = 96) -> Dataset:
    """A question and an answer each."""
    lines = sentences(2 * number)
    pairs = zip(lines[::2], lines[1::2], strict=True)
    return Dataset.from_dict(
        {
            "messages": [
                [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
                for question, answer in pairs
            ]
        }
    )


def preferences(number: int = 96) -> Dataset:
    """A prompt with a better and a worse answer each."""
    lines = sentences(3 * number)
    return Dataset.from_dict(
        {
            "prompt": lines[::3],
            "chosen": [" " + each for each in lines[1::3]],
            "rejected": [" " + each for each in lines[2::3]],
        }
    )


TIMES = ("runtime", "per_second", "total_flos", "num_tokens", "memory", "_time", "data_wait", "tflops", "step_seconds")


def numbers(values: dict) -> dict[str, float]:
    """The numbers among ``values`` that do not depend on the speed of the machine."""
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, (int, float)) and not any(each in name for each in TIMES)
    }


def report(trainer, **more) -> None:
    """Write what the test compares to standard output, as the main process."""
    if trainer.args.process_index:
        return
    import transformers

    found = {
        "history": [numbers(entry) for entry in trainer.state.log_history],
        "trainer": transformers.Trainer.__module__.split(".")[0],
        "files": sorted(path.name for path in Path(trainer.args.output_dir).iterdir() if path.is_file()),
        **{name: numbers(value) if isinstance(value, dict) else value for name, value in more.items()},
    }
    sys.stdout.write(f"found {json.dumps(found)}\n")
