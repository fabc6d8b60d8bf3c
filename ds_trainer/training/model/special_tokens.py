"""Aligns a model's special tokens with its tokenizer's, for example after adding an end-of-turn token."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def align_tokens(model: nn.Module, processing_class: Any) -> None:
    """Sets the special token ids in the configurations of ``model`` to those of its tokenizer, and logs the change.

    Only for Hugging Face models and tokenizers, with transformers' rule: ids that the tokenizer does not define are
    unchanged, and several end-of-text ids are all kept.
    """
    if "transformers" not in sys.modules or processing_class is None or not hasattr(model, "config"):
        return
    from transformers import PreTrainedTokenizerBase, ProcessorMixin
    from transformers.trainer_utils import align_special_tokens

    if isinstance(processing_class, (PreTrainedTokenizerBase, ProcessorMixin)):
        align_special_tokens(model, processing_class)
