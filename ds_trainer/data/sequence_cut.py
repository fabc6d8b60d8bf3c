"""``SequenceCut``: the batch of a replica -> the part of it that one rank of its sequence group works on.

What follows from neighbouring tokens is settled before the cut, on the whole sequence: labels are shifted, positions
numbered, documents told apart, padding found. After it, no rank needs a token of another outside of attention.

Pure arithmetic on the host; no process group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from ds_trainer.data.loader import FillerBatch
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.parallel.sequence_plan import SequencePlan
from ds_trainer.utils.errors import ConfigError

IGNORED = -100  # label of a position that is no target
_MAIN = ("input_ids", "inputs_embeds")
_FLASH_ONLY = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_WITHOUT_CUT = "Or set context_parallel_size and sequence_parallel_size to 1."


class SequenceCut:
    """Cuts batches of token sequences.

    Args:
        layout: owner of ``cp`` and ``sp``.
        shifts_labels: the model compares its output at ``t`` with label ``t + 1``
            (:func:`ds_trainer.training.loss.shifts_labels`).
        label_names: keys of a batch that may hold labels.
        takes: names that the model's ``forward`` accepts.
        takes_any: it has ``**kwargs`` besides.
        pad_token_id: number of the padding token, where a sequence must be made longer.
        own_positions: the model numbers positions in its own way where a batch brings none.
        model_name: for messages.

    Raises:
        ConfigError: the model cannot be given what a part of a sequence needs.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        *,
        shifts_labels: bool,
        label_names: Sequence[str],
        takes: Iterable[str],
        takes_any: bool = False,
        pad_token_id: int | None = None,
        own_positions: bool = False,
        model_name: str = "the model",
    ) -> None:
        self.layout = layout
        self.shifts_labels = shifts_labels
        self.label_names = tuple(label_names)
        self._takes = frozenset(takes)
        self._takes_any = takes_any
        self._pad_token = 0 if pad_token_id is None else pad_token_id
        self._own_positions = own_positions
        self._model_name = model_name
        problems = []
        named = bool(self._takes) or not takes_any  # forward(**kwargs) alone names nothing
        if named and "position_ids" not in self._takes:
            problems.append(
                f"{model_name}.forward takes no position_ids, without which a rank cannot know where in the sequence "
                f"its tokens are. Add the argument, [batch, tokens] of places, and use it. {_WITHOUT_CUT}"
            )
        if shifts_labels and not takes_any and "shift_labels" not in self._takes:
            problems.append(
                f"{model_name} shifts labels by one position, but its forward takes no shift_labels: at the end of a "
                "rank's part the next label is on another rank. Accept shift_labels (label t + 1 at position t) and "
                f"use it where it is given; or set shifts_labels = False and shift in the dataset. {_WITHOUT_CUT}"
            )
        if problems:
            raise ConfigError(problems)

    # -- the cut --------------------------------------------------------------------------------------------------

    def cut(
        self, batch: Mapping[str, Any], cp_rank: int, sp_rank: int, needs_labels: bool = False
    ) -> tuple[dict[str, Any], SequencePlan]:
        """The part of one rank, and who holds the rest.

        Tensors ``[B, S]`` and ``[B, S, ...]`` are cut, where ``S`` is the length of ``input_ids`` or ``inputs_embeds``
        (else of the first tensor that can be one of them); all others stay whole. ``S`` is filled up to a multiple of
        ``2 x cp x sp`` first, however short it is. A filler stays a filler.

        Args:
            batch: whole sequences, tensors in host memory.
            cp_rank, sp_rank: the rank's place.
            needs_labels: refuse a batch without labels: what a loss is computed from then cannot be told.

        Raises:
            ConfigError: the batch cannot be cut; says why and what to do.
        """
        rows, length = self._size(batch)
        whole = {key: value for key, value in batch.items() if value is not None}
        documents = self._documents(whole, rows, length)
        self._drop_flash_keys(whole)
        self._shift(whole, rows, length, needs_labels)
        self._number_positions(whole, rows, length)
        more = -length % self.layout.length_multiple
        if more and not isinstance(whole.get("attention_mask"), torch.Tensor):
            whole["attention_mask"] = torch.ones(rows, length, dtype=torch.int64)
        along = [key for key, value in whole.items() if self._is_cut(key, value, rows, length)]
        mask = whole.get("attention_mask")
        plan = SequencePlan(
            self.layout,
            length + more,
            None if documents is None else _repeat_last(documents, more),
            None if mask is None or (bool(mask.all()) and not more) else _filled(mask.cpu(), more, 0).bool(),
        )
        own = plan.positions(cp_rank, sp_rank)
        for key in along:
            whole[key] = self._filled_up(key, whole[key], more).index_select(1, own.to(whole[key].device))
        if mask is not None and self._takes and not self._accepts("attention_mask"):
            del whole["attention_mask"]
        return (FillerBatch(whole) if isinstance(batch, FillerBatch) else whole), plan

    def length(self, batch: Mapping[str, Any]) -> int:
        """Tokens of each sequence of ``batch`` before it is filled up: what :func:`join` cuts off again."""
        return self._size(batch)[1]

    def head(self, batch: Mapping[str, Any], tokens: int) -> dict[str, Any]:
        """The first ``tokens`` of each sequence of ``batch``, as a batch of its own, with what stays whole."""
        rows, length = self._size(batch)
        kept = {key: value for key, value in batch.items() if value is not None}
        self._drop_flash_keys(kept)
        return {key: v[:, :tokens] if self._is_cut(key, v, rows, length) else v for key, v in kept.items()}

    def _accepts(self, name: str) -> bool:
        return self._takes_any or name in self._takes

    # -- what is a sequence ---------------------------------------------------------------------------------------

    def _size(self, batch: Mapping[str, Any]) -> tuple[int, int]:
        """Rows and tokens of a row."""
        name = next((key for key in _MAIN if isinstance(batch.get(key), torch.Tensor)), None)
        if name is None:
            name = next((key for key, value in batch.items() if self._may_be_main(key, value)), None)
        if name is None:
            raise ConfigError(
                f"A batch of {', '.join(map(str, batch))} has no sequence to cut: there must be input_ids [batch, "
                f"tokens], inputs_embeds [batch, tokens, width], or one like them. {_WITHOUT_CUT}"
            )
        main = batch[name]
        wanted = 3 if main.is_floating_point() else 2
        if main.dim() != wanted or main.shape[1] == 0:
            raise ConfigError(
                f"'{name}' of a batch has the shape {list(main.shape)}, which cannot be cut along the sequence: "
                f"[batch, tokens{', width' if wanted == 3 else ''}] is needed, with one token at least. {_WITHOUT_CUT}"
            )
        return int(main.shape[0]), int(main.shape[1])

    def _may_be_main(self, key: str, value: Any) -> bool:
        if key in self.label_names or not isinstance(value, torch.Tensor):
            return False
        return value.dim() == (3 if value.is_floating_point() else 2)

    def _is_cut(self, key: str, value: Any, rows: int, length: int) -> bool:
        """Whether a value lies along the sequence.

        Raises:
            ConfigError: nobody can tell, or it relates all tokens to all tokens.
        """
        if isinstance(value, (Mapping, list, tuple)):
            parts = value.values() if isinstance(value, Mapping) else value
            if any(isinstance(part, torch.Tensor) and part.shape[1:2] == (length,) for part in parts):
                raise ConfigError(
                    f"'{key}' of a batch is a {type(value).__name__} with tensors of {length} tokens inside, which are "
                    f"not cut. Put them into the batch under names of their own. {_WITHOUT_CUT}"
                )
            return False
        if not isinstance(value, torch.Tensor):
            return False
        shape = list(value.shape)
        # By its name too: the width of some feature may be this batch's length by chance.
        pairs = len(shape) > 2 and shape[-1] == shape[-2] == length and ("mask" in key or "bias" in key)
        if pairs or (key == "attention_mask" and len(shape) != 2):
            raise ConfigError(
                f"'{key}' of a batch has the shape {shape}: it relates tokens to tokens, and no rank has all of them. "
                "Give an attention_mask [batch, tokens] for padding, and position_ids that begin anew (without an "
                f"attention_mask) for packed documents. {_WITHOUT_CUT}"
            )
        if shape[:2] == [rows, length]:
            return True
        if key in (*_MAIN, "attention_mask", "position_ids", "token_type_ids") or (
            length in shape and shape[0] != rows and not value.is_floating_point()
        ):
            raise ConfigError(
                f"'{key}' of a batch has the shape {shape}, but its sequences are {rows} of {length} tokens: whether "
                f"it is to be cut cannot be told. [{rows}, {length}] would be. {_WITHOUT_CUT}"
            )
        return False

    # -- before the cut -------------------------------------------------------------------------------------------

    def _documents(self, batch: Mapping[str, Any], rows: int, length: int) -> torch.Tensor | None:
        """Numbers of packed documents, int64 ``[rows, length]``; None where every sequence is one document.

        By the collator's own account where it gives one. Else as transformers takes it: where there is no
        ``attention_mask``, a position that does not follow the one before begins another document.
        """
        bounds, numbers = batch.get("cu_seq_lens_q"), batch.get("seq_idx")
        if isinstance(bounds, torch.Tensor):
            if rows != 1:
                raise ConfigError(f"cu_seq_lens_q says where documents end in one row, but the batch has {rows} rows.")
            places = torch.arange(length)
            return torch.searchsorted(bounds.cpu().long().flatten(), places, right=True)[None] - 1
        if isinstance(numbers, torch.Tensor) and list(numbers.shape) == [rows, length]:
            return numbers.cpu().long()
        positions = batch.get("position_ids")
        if isinstance(positions, torch.Tensor) and positions.dim() == 2 and batch.get("attention_mask") is None:
            begins = F.pad(positions.cpu().diff(dim=1) != 1, (1, 0))
            if bool(begins.any()):
                return begins.cumsum(1).expand(rows, -1)
        return None

    def _drop_flash_keys(self, batch: dict[str, Any]) -> None:
        """Attention is ours: what tells a flash kernel of documents would describe the whole sequence."""
        for key in _FLASH_ONLY:
            batch.pop(key, None)
        if "seq_idx" not in self._takes:
            batch.pop("seq_idx", None)

    def _shift(self, batch: dict[str, Any], rows: int, length: int, needed: bool) -> None:
        """Put the target of position ``t`` at ``t``."""
        found = {name: batch[name] for name in self.label_names if isinstance(batch.get(name), torch.Tensor)}
        ready = found.pop("shift_labels", None) if "shift_labels" in found else batch.get("shift_labels")
        if needed and not found and ready is None:
            raise ConfigError(
                f"A batch of {', '.join(map(str, batch))} has no labels ({', '.join(self.label_names)}). What its loss "
                f"is computed from cannot be told, and so not cut: let the dataset give labels. {_WITHOUT_CUT}"
            )
        for name, labels in {**found, **({} if ready is None else {"shift_labels": ready})}.items():
            if list(labels.shape) != [rows, length] or labels.is_floating_point():
                kind = "floats" if labels.is_floating_point() else "integers"
                raise ConfigError(
                    f"'{name}' of a batch are {kind} of the shape {list(labels.shape)}, but its sequences are {rows} "
                    f"of {length} tokens: only a class for each token (integers [{rows}, {length}], {IGNORED} for "
                    f"none) can be cut with them. {_WITHOUT_CUT}"
                )
        if ready is not None:
            name = next((name for name in self.label_names if name != "shift_labels"), "labels")
            batch.setdefault(name, ready)  # transformers computes a loss only where labels are given
        elif self.shifts_labels and found:
            if len(found) > 1:
                raise ConfigError(
                    f"A batch has {' and '.join(found)}, and which of them {self._model_name} shifts cannot be told. "
                    f"Name one in label_names, or give shift_labels. {_WITHOUT_CUT}"
                )
            name, labels = next(iter(found.items()))
            batch[name] = batch["shift_labels"] = F.pad(labels[:, 1:], (0, 1), value=IGNORED)

    def _number_positions(self, batch: dict[str, Any], rows: int, length: int) -> None:
        positions = batch.get("position_ids")
        if positions is None:
            if self._own_positions:
                raise ConfigError(
                    f"{self._model_name} numbers positions in its own way (from its inputs or attention_mask), which a "
                    f"part of a sequence does not show. Let the data_collator give position_ids. {_WITHOUT_CUT}"
                )
            positions = torch.arange(length)[None]
        if list(positions.shape) == [1, length]:
            batch["position_ids"] = positions.expand(rows, -1)

    def _filled_up(self, key: str, value: torch.Tensor, more: int) -> torch.Tensor:
        if key == "position_ids":
            return _repeat_last(value, more)  # a table of positions may end there
        if key in self.label_names or key == "shift_labels":
            return _filled(value, more, IGNORED)
        return _filled(value, more, self._pad_token if key == "input_ids" else 0)


def _filled(value: torch.Tensor, more: int, fill: int) -> torch.Tensor:
    return torch.cat([value, value.new_full((value.shape[0], more, *value.shape[2:]), fill)], dim=1) if more else value


def _repeat_last(value: torch.Tensor, more: int) -> torch.Tensor:
    return torch.cat([value, value[:, -1:].expand(-1, more)], dim=1) if more else value


def join(parts: Sequence[torch.Tensor], plan: SequencePlan, length: int) -> torch.Tensor:
    """What the ranks of a sequence group made of their parts, as one process would have made it.

    Args:
        parts: ``[B, tokens of a rank, ...]`` of each rank, in the order of the group.
        plan: of the cut.
        length: :meth:`SequenceCut.length` of the batch.

    Returns:
        ``[B, length, ...]``, a new tensor.
    """
    side_by_side = torch.cat(list(parts), dim=1)
    back = torch.argsort(plan.order())[:length]
    return side_by_side.index_select(1, back.to(side_by_side.device))
