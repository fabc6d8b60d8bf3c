"""``SequenceSharder``: shards a replica's batch along the sequence, one shard per rank of the sequence group.

Everything that depends on neighboring tokens comes from the full sequence: labels are shifted, positions numbered,
documents and padding identified. Afterwards no rank needs another rank's tokens outside of attention. What a rank makes
is as long as its shard: shifted labels, positions and masks never exist for the full sequence. (The numbers of
documents do while the plan of the batch is made, which holds where they begin.)

Pure arithmetic on the host; no process group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from ds_trainer.data.batch_structure import DummyBatch, kind_of
from ds_trainer.parallel.document_runs import DocumentRuns
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.parallel.sequence_plan import SequencePlan
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.units import counted

IGNORED = -100  # label of a position that is not a target
_MAIN = ("input_ids", "inputs_embeds")
_FLASH_ONLY = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_WITHOUT_SHARDING = "Or set context_parallel_size and sequence_parallel_size to 1."


class SequenceSharder:
    """Shards batches of token sequences.

    Args:
        layout: owner of ``cp`` and ``sp``.
        shifts_labels: the model compares its output at ``t`` with label ``t + 1``
            (:func:`ds_trainer.training.loop.loss_rule.shifts_labels`).
        label_names: keys of a batch that may hold labels.
        accepts: names that the model's ``forward`` accepts.
        accepts_any: ``forward`` also has ``**kwargs``.
        pad_token_id: ID of the padding token, for sequences that must be padded.
        custom_positions: without position_ids in a batch, the model numbers positions in a way of its own.
        model_name: name of the model in messages.

    Raises:
        ConfigError: the model's ``forward`` lacks an argument that a shard needs.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        *,
        shifts_labels: bool,
        label_names: Sequence[str],
        accepts: Iterable[str],
        accepts_any: bool = False,
        pad_token_id: int | None = None,
        custom_positions: bool = False,
        model_name: str = "the model",
    ) -> None:
        self.layout = layout
        self.shifts_labels = shifts_labels
        self.label_names = tuple(label_names)
        self._accepts = frozenset(accepts)
        self._accepts_any = accepts_any
        self._pad_token = 0 if pad_token_id is None else pad_token_id
        self._custom_positions = custom_positions
        self._model_name = model_name
        problems = []
        named = bool(self._accepts) or not accepts_any  # forward(**kwargs) alone names nothing
        if named and "position_ids" not in self._accepts:
            problems.append(
                f"{model_name}.forward takes no position_ids, so a rank cannot pass the positions of its tokens. Add "
                f"the argument position_ids, [batch, tokens], and use it. {_WITHOUT_SHARDING}"
            )
        if shifts_labels and not accepts_any and "shift_labels" not in self._accepts:
            problems.append(
                f"{model_name} shifts labels by one position, but its forward takes no shift_labels: at the end of a "
                "rank's shard the next label is on another rank. Accept shift_labels (label t + 1 at position t) and "
                "use it if given; or set shifts_labels = False and shift the labels in the dataset. "
                f"{_WITHOUT_SHARDING}"
            )
        if problems:
            raise ConfigError(problems)

    def accepted(self, name: str) -> bool:
        """Whether the model's ``forward`` takes an argument of this name."""
        return self._accepts_any or not self._accepts or name in self._accepts

    # -- sharding -------------------------------------------------------------------------------------------------

    def shard(
        self,
        batch: Mapping[str, Any],
        cp_rank: int,
        sp_rank: int,
        needs_labels: bool = False,
        plan: SequencePlan | None = None,
    ) -> tuple[dict[str, Any], SequencePlan]:
        """Returns the shard of one rank, and the plan that says which rank holds which tokens.

        Tensors ``[B, S]`` and ``[B, S, ...]`` are sharded, where ``S`` is the length of ``input_ids`` or
        ``inputs_embeds`` (else of the first tensor of such a shape); all other values stay as they are. ``S`` is first
        padded to a multiple of ``2 * cp * sp``. The shard of a dummy batch is a dummy batch.

        Args:
            batch: full sequences, tensors in host memory.
            cp_rank, sp_rank: the rank's coordinates.
            needs_labels: raise an error for a batch without labels, from which the inputs of the loss are unknown.
            plan: another shard of this batch has it; None: it is made.

        Raises:
            ConfigError: the batch cannot be sharded.
        """
        rows, length = self._size(batch)
        values = {key: value for key, value in batch.items() if value is not None}
        documents = self._documents(values, rows, length) if plan is None else None
        self._drop_flash_keys(values)
        shifted = self._shift(values, rows, length, needs_labels)
        self._check_positions(values, rows, length)
        sequences = [key for key, value in values.items() if self._is_sequence(key, value, rows, length)]
        padding = -length % self.layout.length_multiple
        mask = values.get("attention_mask")
        if plan is None:
            numbers = None if documents is None else _repeat_last(documents, padding)
            runs = DocumentRuns.of(numbers, _valid_tokens(mask, rows, length, padding))
            places = values.get("position_ids")
            last = length - 1 if places is None else int(places.max())
            plan = SequencePlan(self.layout, length + padding, runs, last)
        positions = plan.positions(cp_rank, sp_rank)
        later = None
        for key in sequences:
            if key not in shifted:
                values[key] = self._part(key, values[key], positions)
            else:  # labels under two names
                later = self._part(key, values[key], positions + 1) if later is None else later
                values[key] = later
        if "position_ids" not in values:
            values["position_ids"] = positions.clamp(max=length - 1).repeat(rows, 1)
        if padding and mask is None:
            mask = values["attention_mask"] = (positions < length).long().repeat(rows, 1)
        if mask is not None and self._accepts and not self._accepts_any and "attention_mask" not in self._accepts:
            del values["attention_mask"]
        return (DummyBatch(values) if isinstance(batch, DummyBatch) else values), plan

    def shifted_labels(self, batch: Mapping[str, Any]) -> tuple[str, ...]:
        """The names in a shard of ``batch`` whose value at ``t`` is that of ``t + 1`` in ``batch``."""
        rows, length = self._size(batch)
        return self._shift({key: value for key, value in batch.items() if value is not None}, rows, length, False)

    def length(self, batch: Mapping[str, Any]) -> int:
        """Tokens of each sequence of ``batch`` before padding; :func:`unshard` removes the padding again."""
        return self._size(batch)[1]

    def prefix(self, batch: Mapping[str, Any], tokens: int) -> dict[str, Any]:
        """A batch with the first ``tokens`` of each sequence of ``batch``; other values are unchanged.

        Contiguous, as models flatten labels with ``view``.

        Raises:
            ConfigError: the batch is no mapping, or has no sequence to shard.
        """
        rows, length = self._size(batch)
        values = {key: value for key, value in batch.items() if value is not None}
        self._drop_flash_keys(values)
        return {
            key: value[:, :tokens].contiguous() if self._is_sequence(key, value, rows, length) else value
            for key, value in values.items()
        }

    def beginning(self, batch: Mapping[str, Any], tokens: int) -> dict[str, Any]:
        """A batch with ``tokens`` of each sequence of ``batch``, in memory of its own: the first ones, or if none of
        them has a target, those from the first target on.

        It has the keys of ``batch``. Shorter sequences stay whole.

        Raises:
            ConfigError: the batch is no mapping, or has no sequence to shard.
        """
        rows, length = self._size(batch)
        values = dict(batch)
        if length <= tokens:
            return values
        start = min(self._first_target(batch, rows, length, tokens), length - tokens)
        for key, value in batch.items():
            if value is not None and key not in _FLASH_ONLY and self._is_sequence(key, value, rows, length):
                values[key] = value[:, start : start + tokens].clone(memory_format=torch.contiguous_format)
        for side in ("q", "k"):
            bounds, longest = batch.get(f"cu_seq_lens_{side}"), f"max_length_{side}"
            if isinstance(bounds, torch.Tensor):
                bounds = values[f"cu_seq_lens_{side}"] = (bounds - start).clamp(0, tokens).unique()
                if longest in batch:
                    values[longest] = int(bounds.diff().max())
        return values

    def _first_target(self, batch: Mapping[str, Any], rows: int, length: int, tokens: int) -> int:
        """Before the first target of any row; 0 if there is one in the first ``tokens``, or none at all."""
        for name in (*self.label_names, "shift_labels"):
            labels = batch.get(name)
            if isinstance(labels, torch.Tensor) and list(labels.shape) == [rows, length]:
                targets = labels.ne(IGNORED).any(0)
                return 0 if bool(targets[:tokens].any()) else max(0, int(targets.int().argmax()) - 1)
        return 0

    # -- which values are sequences -------------------------------------------------------------------------------

    def _size(self, batch: Mapping[str, Any]) -> tuple[int, int]:
        """Number of rows, and tokens per row."""
        if not isinstance(batch, Mapping):
            raise ConfigError(
                f"A batch is a {kind_of(batch)}, which has no sequence to shard: the data collator must return a "
                f"mapping with input_ids [batch, tokens] or a similar tensor. {_WITHOUT_SHARDING}"
            )
        name = next((key for key in _MAIN if isinstance(batch.get(key), torch.Tensor)), None)
        expected = [key for key in _MAIN if key in self._accepts]
        if name is None and expected:
            raise ConfigError(
                f"A batch of {', '.join(map(str, batch))} has no {' or '.join(expected)} for {self._model_name}. A "
                "Trainer that makes the inputs of the model from such a batch in compute_loss cannot be used with "
                f"sharded sequences. {_WITHOUT_SHARDING}"
            )
        if name is None:
            name = next((key for key, value in batch.items() if self._may_be_main(key, value)), None)
        if name is None:
            raise ConfigError(
                f"A batch of {', '.join(map(str, batch))} has no sequence to shard: it needs input_ids [batch, "
                f"tokens], inputs_embeds [batch, tokens, width], or a similar tensor. {_WITHOUT_SHARDING}"
            )
        main = batch[name]
        wanted = 3 if main.is_floating_point() else 2
        if main.dim() != wanted or main.shape[1] == 0:
            raise ConfigError(
                f"'{name}' of a batch has the shape {list(main.shape)}, which cannot be sharded along the sequence: "
                f"it must be [batch, tokens{', width' if wanted == 3 else ''}] with at least one token. "
                f"{_WITHOUT_SHARDING}"
            )
        return int(main.shape[0]), int(main.shape[1])

    def _may_be_main(self, key: str, value: Any) -> bool:
        if key in self.label_names or not isinstance(value, torch.Tensor):
            return False
        return value.dim() == (3 if value.is_floating_point() else 2)

    def _is_sequence(self, key: str, value: Any, rows: int, length: int) -> bool:
        """Whether a value has one entry per token.

        Raises:
            ConfigError: its shape is ambiguous, or it relates all tokens to all tokens.
        """
        if isinstance(value, (Mapping, list, tuple)):
            parts = value.values() if isinstance(value, Mapping) else value
            if any(isinstance(part, torch.Tensor) and part.shape[1:2] == (length,) for part in parts):
                raise ConfigError(
                    f"'{key}' of a batch is a {type(value).__name__} that contains tensors of {length} tokens, which "
                    f"would not be sharded. Put them into the batch under separate names. {_WITHOUT_SHARDING}"
                )
            return False
        if not isinstance(value, torch.Tensor):
            return False
        shape = list(value.shape)
        # Also by name: the width of some feature may equal this batch's length by chance.
        pairs = len(shape) > 2 and shape[-1] == shape[-2] == length and ("mask" in key or "bias" in key)
        if pairs or (key == "attention_mask" and len(shape) != 2):
            raise ConfigError(
                f"'{key}' of a batch has the shape {shape}: it relates tokens to tokens, and no rank holds them all. "
                "Pass an attention_mask [batch, tokens] for padding, and position_ids that restart at each document "
                f"(without an attention_mask) for packed documents. {_WITHOUT_SHARDING}"
            )
        if shape[:2] == [rows, length]:
            return True
        if key in (*_MAIN, "attention_mask", "position_ids", "token_type_ids") or (
            length in shape and shape[0] != rows and not value.is_floating_point()
        ):
            raise ConfigError(
                f"'{key}' of a batch has the shape {shape}, but the batch has {counted(rows, 'sequence')} "
                f"of {length} tokens, so it is unclear whether to shard it. The shape [{rows}, {length}] "
                f"would be clear. {_WITHOUT_SHARDING}"
            )
        return False

    # -- on full sequences ----------------------------------------------------------------------------------------

    def _documents(self, batch: Mapping[str, Any], rows: int, length: int) -> torch.Tensor | None:
        """Numbers of packed documents, int64 ``[rows, length]``; None if every sequence is one document.

        Uses the collator's information if there is any. Otherwise the convention of transformers applies: without an
        ``attention_mask``, a position that is not the previous one plus 1 starts a new document.
        """
        bounds, numbers = batch.get("cu_seq_lens_q"), batch.get("seq_idx")
        if isinstance(bounds, torch.Tensor):
            if rows != 1:
                raise ConfigError(
                    f"cu_seq_lens_q has document boundaries for one row, but the batch has {counted(rows, 'row')}."
                )
            tokens = torch.arange(length)
            return torch.searchsorted(bounds.cpu().long().flatten(), tokens, right=True)[None] - 1
        if isinstance(numbers, torch.Tensor) and list(numbers.shape) == [rows, length]:
            return numbers.cpu().long()
        positions = batch.get("position_ids")
        if isinstance(positions, torch.Tensor) and positions.dim() == 2 and batch.get("attention_mask") is None:
            starts = F.pad(positions.cpu().diff(dim=1) != 1, (1, 0))
            if bool(starts.any()):
                return starts.cumsum(1).expand(rows, -1)
        return None

    def _drop_flash_keys(self, batch: dict[str, Any]) -> None:
        """Removes document boundaries for flash kernels: they describe the full sequence, and our attention ignores
        them.
        """
        for key in _FLASH_ONLY:
            batch.pop(key, None)
        if "seq_idx" not in self._accepts:
            batch.pop("seq_idx", None)

    def _shift(self, batch: dict[str, Any], rows: int, length: int, needed: bool) -> tuple[str, ...]:
        """The keys whose values at ``t + 1`` belong to position ``t``; adds ``shift_labels`` to them."""
        unshifted = {name: batch[name] for name in self.label_names if isinstance(batch.get(name), torch.Tensor)}
        shifted = unshifted.pop("shift_labels", None) if "shift_labels" in unshifted else batch.get("shift_labels")
        if needed and not unshifted and shifted is None:
            raise ConfigError(
                f"A batch of {', '.join(map(str, batch))} has no labels ({', '.join(self.label_names)}), so the inputs "
                f"of its loss are unknown and cannot be sharded. Add labels to the dataset. {_WITHOUT_SHARDING}"
            )
        for name, labels in {**unshifted, **({} if shifted is None else {"shift_labels": shifted})}.items():
            if list(labels.shape) != [rows, length] or labels.is_floating_point():
                kind = "floats" if labels.is_floating_point() else "integers"
                raise ConfigError(
                    f"'{name}' of a batch has {kind} of the shape {list(labels.shape)}, but the batch has "
                    f"{counted(rows, 'sequence')} of {length} tokens. Only one class per token (integers "
                    f"[{rows}, {length}], {IGNORED} for no target) can be sharded with them. {_WITHOUT_SHARDING}"
                )
        if shifted is not None:
            name = next((name for name in self.label_names if name != "shift_labels"), "labels")
            batch.setdefault(name, shifted)  # transformers computes a loss only if labels are given
        elif self.shifts_labels and unshifted:
            if len(unshifted) > 1:
                raise ConfigError(
                    f"A batch has {' and '.join(unshifted)}, and it is unknown which one {self._model_name} shifts. "
                    f"Name it in label_names, or pass shift_labels. {_WITHOUT_SHARDING}"
                )
            name, labels = next(iter(unshifted.items()))
            batch["shift_labels"] = labels
            return name, "shift_labels"
        return ()

    def _check_positions(self, batch: dict[str, Any], rows: int, length: int) -> None:
        positions = batch.get("position_ids")
        if positions is None:
            if self._custom_positions:
                raise ConfigError(
                    f"{self._model_name} derives positions from its inputs or attention_mask, which is impossible from "
                    f"a shard of a sequence. Add position_ids in the data_collator. {_WITHOUT_SHARDING}"
                )
        elif list(positions.shape) == [1, length]:
            batch["position_ids"] = positions.expand(rows, -1)

    def _part(self, key: str, value: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The values at ``positions``, int64 in ascending order; padding where the sequence has ended."""
        length = value.shape[1]
        inside = int((positions < length).sum())
        part = value.index_select(1, positions.clamp(max=length - 1).to(value.device))
        if inside < len(positions) and key != "position_ids":  # these repeat the last: a table of them may end there
            is_label = key in self.label_names or key == "shift_labels"
            part[:, inside:] = IGNORED if is_label else self._pad_token if key == "input_ids" else 0
        return part


def _valid_tokens(mask: torch.Tensor | None, rows: int, length: int, padding: int) -> torch.Tensor | None:
    """Whether each token of the padded sequences is no padding; None if none of them is."""
    if mask is None and not padding:
        return None
    valid = torch.ones(rows, length, dtype=torch.bool) if mask is None else mask.cpu().bool()
    if padding:
        return F.pad(valid, (0, padding))
    return None if bool(valid.all()) else valid


def _repeat_last(value: torch.Tensor, padding: int) -> torch.Tensor:
    return torch.cat([value, value[:, -1:].expand(-1, padding)], dim=1) if padding else value


def unshard(shards: Sequence[torch.Tensor], plan: SequencePlan, length: int) -> torch.Tensor:
    """Concatenates the shards of a sequence group in sequence order, without padding.

    Args:
        shards: ``[B, tokens of a rank, ...]`` of each rank, in the order of the group.
        plan: the plan from :meth:`SequenceSharder.shard`.
        length: :meth:`SequenceSharder.length` of the batch.

    Returns:
        ``[B, length, ...]``, a new tensor.
    """
    concatenated = torch.cat(list(shards), dim=1)
    order = torch.argsort(plan.order())[:length]
    return concatenated.index_select(1, order.to(concatenated.device))
