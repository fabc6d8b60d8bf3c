"""Explains an index error of the model: a token id, a label or a position of a batch that is out of its range.

PyTorch reports them as ``IndexError: index out of range in self``, and on a GPU as an assertion of a kernel, often
later and in another place. Batches are looked at when such an error has occurred, so that a step costs nothing more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ds_trainer.data.columns import base_model
from ds_trainer.data.sharded_batch import ShardedBatch
from ds_trainer.training.loop.loss_rule import IGNORED
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError, text_of

_TOKENS = ("input_ids", "decoder_input_ids")
_ASSERTION = "device-side assert"


def explain_index_error(error: BaseException, batches: Sequence[Any], model: nn.Module) -> None:
    """Raise a better error than ``error`` if it says that an index was out of range and a batch has such a number.

    Args:
        error: what a step or an evaluation raised.
        batches: its batches in host memory; tensors on a device are skipped, because it may not answer any more.
        model: the model, or its engine.

    Raises:
        ConfigError: names the number, what the model has, and what to change. ``error`` is its cause.
    """
    if not (isinstance(error, IndexError) or (isinstance(error, RuntimeError) and _ASSERTION in text_of(error))):
        return
    for batch in batches:
        parts = [batch.local, batch.beginning] if isinstance(batch, ShardedBatch) else [batch]
        for part in parts:
            if isinstance(part, Mapping):
                for problem in _problems(part, base_model(model)):
                    raise ConfigError(f"A batch of rank {distributed.rank()} {problem}") from error


def _problems(batch: Mapping[str, Any], model: nn.Module) -> Iterator[str]:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    name, vocabulary = type(model).__name__, _int(text, "vocab_size")
    for key in _TOKENS:
        outside = _outside(batch.get(key), vocabulary)
        if outside is not None:
            yield (
                f"has the token id {outside} ({key}), but {name} has a vocabulary of {vocabulary} tokens, from 0 to "
                f"{vocabulary - 1}. Is the tokenizer that of the model? If tokens were added to it, call "
                "model.resize_token_embeddings(len(tokenizer))."
            )
    labels = batch.get("labels", batch.get("shift_labels"))
    per_token = isinstance(labels, torch.Tensor) and labels.dim() > 1
    classes = vocabulary if per_token and "ForTokenClassification" not in name else _int(config, "num_labels")
    outside = _outside(labels, classes, IGNORED)
    if outside is not None:
        what = "vocab_size" if classes == vocabulary and per_token else "num_labels"
        yield (
            f"has the label {outside}, but {name} has {what}={classes}, so labels go from 0 to {classes - 1} (and "
            f"{IGNORED}, which is ignored). Check the labels of the dataset"
            + (", or create the model with more num_labels." if what == "num_labels" else ".")
        )
    tokens, positions = batch.get("input_ids"), _int(text, "max_position_embeddings") or _int(text, "n_positions")
    length = tokens.shape[-1] if isinstance(tokens, torch.Tensor) and tokens.dim() > 1 else 0
    if 0 < positions < length and _has_position_table(model):
        yield (
            f"has rows of {length} tokens, but {name} has positions for {positions} "
            "(max_position_embeddings). Truncate the samples when they are tokenized, or use a model with more."
        )


def _has_position_table(model: nn.Module) -> bool:
    """Whether positions are looked up in an embedding, as in GPT-2 (``wpe``) and BERT; rotations have no last one."""
    tables = [name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    return any("pos" in name or name == "wpe" for name in tables)


def _int(config: Any, name: str) -> int:
    """An integer of a configuration; 0 if it does not have it."""
    value = getattr(config, name, None)
    return value if isinstance(value, int) else 0


def _outside(values: Any, size: int, ignored: int | None = None) -> int | None:
    """A number of ``values`` that is neither from 0 to ``size - 1`` nor ``ignored``; None if there is none."""
    if not isinstance(values, torch.Tensor) or values.device.type != "cpu" or values.is_floating_point() or not size:
        return None
    wrong = (values < 0) | (values >= size)
    if ignored is not None:
        wrong &= values != ignored
    return int(values[wrong][0]) if bool(wrong.any()) else None
