"""A tiny model with a byte-level tokenizer and a chat template, saved as ``from_pretrained`` finds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<pad>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def chat_tokenizer(template: str | None = TEMPLATE) -> Any:
    """A tokenizer of 260 tokens: every byte, and :data:`SPECIAL`. The end of a turn is not its end-of-text token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|endoftext|>")
    fast.add_special_tokens({"additional_special_tokens": SPECIAL[2:]})
    fast.chat_template = template
    return fast


def save_chat_model(
    directory: Path, template: str | None = TEMPLATE, seed: int = 0, head: str = "CausalLM", **config: Any
) -> Path:
    """Write a one-layer Llama with random weights and :func:`chat_tokenizer`; returns ``directory``."""
    import torch
    import transformers

    tokenizer = chat_tokenizer(template)
    values: dict[str, Any] = dict(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.3,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"LlamaFor{head}")(transformers.LlamaConfig(**{**values, **config}))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def save_moe(directory: Path) -> Path:
    """Write a two-layer Qwen3-MoE with 8 experts, random weights and :func:`chat_tokenizer`; returns ``directory``."""
    import torch
    import transformers

    tokenizer = chat_tokenizer()
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def save_adapters(directory: Path, base: Path, seed: int = 1, **config: Any) -> Path:
    """Write LoRA adapters with random values for the model in ``base``; returns ``directory``."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    lora = LoraConfig(**{"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", **config})
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros otherwise: adapters that change nothing
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(directory)
    chat_tokenizer().save_pretrained(directory)
    return directory
