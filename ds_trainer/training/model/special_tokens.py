"""A tokenizer with new special tokens (the end of a turn, say) and a model that still names the old ones."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def align_tokens(model: nn.Module, processing_class: Any) -> None:
    """Let the configurations of ``model`` name the special tokens of its tokenizer, with a line that says so.

    Only for Hugging Face models and tokenizers, by transformers' own rule: ids that the tokenizer does not define
    stay, and several ends of text are kept side by side.
    """
    if "transformers" not in sys.modules or processing_class is None or not hasattr(model, "config"):
        return
    from transformers import PreTrainedTokenizerBase, ProcessorMixin
    from transformers.trainer_utils import align_special_tokens

    if isinstance(processing_class, (PreTrainedTokenizerBase, ProcessorMixin)):
        align_special_tokens(model, processing_class)
