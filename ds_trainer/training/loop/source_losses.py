"""The mean loss of the trained tokens of each source, from the losses that the model computes anyway.

While a loss is computed, ``torch.nn.functional.cross_entropy`` is replaced by a function that asks the original for
the losses of single tokens, keeps them without their graph, and returns their sum or mean. The gradients are the same
numbers. A ``TorchFunctionMode`` would do the same, but is called for every operation of the model. With deferred
logits (``loss_chunk_tokens``) the original computes the losses of tokens in tiles, as it always does.

The token of each loss is known by its place: as many losses as tokens, or one less per row. The number of a source is
that of the token that predicts, which is in the same sample as its target. Sums stay on the device, in float64; they
are added over ranks when they are logged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional as F

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.data.source_ids import source_names
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = get_logger(__name__)


def records_sources(args: TrainingArguments) -> bool:
    """Whether the losses of the sources of a dataset that names several are logged."""
    return args.loss_per_source is not False and not _reasons(args)


def check_sources(args: TrainingArguments, dataset: Any) -> None:
    """Refuse ``loss_per_source=True`` where the losses of sources cannot be known.

    Raises:
        ConfigError: one sentence for each reason.
    """
    reasons = _reasons(args) if args.loss_per_source else []
    if args.loss_per_source and dataset is not None and not source_names(dataset):
        reasons.append(
            f"the train_dataset, a {type(dataset).__name__}, has no source_names: in a recipe, give data.train several "
            "sources; in Python, see ds_trainer.data.source_ids"
        )
    if reasons:
        raise ConfigError([f"loss_per_source=True: {reason}. Or remove loss_per_source." for reason in reasons])


def _reasons(args: TrainingArguments) -> list[str]:
    reasons = ["torch_compile=True computes the loss inside of compiled code"] if args.torch_compile else []
    if args.use_liger_kernel:
        reasons.append("use_liger_kernel=True computes the loss of all tokens in one kernel")
    return reasons


class TokenLosses(NamedTuple):
    """The losses of a micro-batch on this rank, all ``[tokens]``: sources, losses, whether the token has a target."""

    sources: torch.Tensor
    losses: torch.Tensor
    valid: torch.Tensor


class SourceSums:
    """Sums of losses by source, on the device.

    Args:
        names: names of the sources, by number.
        device: where the losses are.
        filtered: leave losses that are not finite out.
        group: ranks that have different tokens; default: all.
    """

    def __init__(
        self, names: tuple[str, ...], device: torch.device, filtered: bool, group: ProcessGroup | None = None
    ) -> None:
        self.names = names
        self._device = device
        self._filtered = filtered
        self._group = group
        self._warned = False
        self.forget()

    def forget(self) -> None:
        """Begin again."""
        # Losses and tokens, of all steps and of the current one.
        self._total = torch.zeros(2, len(self.names), dtype=torch.float64, device=self._device)
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the micro-batches since the last :meth:`end_step`, which are computed again."""
        self._step: list[torch.Tensor] = []

    def add(self, tokens: TokenLosses | None) -> None:
        """Add a micro-batch; None: nothing is known of it. Does not wait for the device."""
        if tokens is None:
            return
        losses, valid = tokens.losses.double(), tokens.valid
        if self._filtered:
            valid = valid & losses.isfinite()
        values = torch.stack([torch.where(valid, losses, 0.0), valid.double()])
        self._step.append(torch.zeros_like(self._total).index_add_(1, tokens.sources, values))

    def end_step(self) -> None:
        """The micro-batches since :meth:`begin_step` count."""
        for values in self._step:
            self._total += values
        self.begin_step()

    def close(self) -> dict[str, float]:
        """Mean loss by name of each source that had a target, and begin again. Collective."""
        self.end_step()
        distributed.all_reduce_sum(self._total, group=self._group)
        sums, counts = self._total.tolist()
        self.forget()
        if not any(counts) and not self._warned:
            self._warned = True
            logger.warning(
                "The losses of the sources (%s) are not known: the loss is not computed by cross_entropy of "
                "torch.nn.functional over all tokens of a batch, or the data_collator drops source_ids.",
                ", ".join(self.names),
            )
        return {name: s / n for name, s, n in zip(self.names, sums, counts, strict=True) if n}


class SourceLosses:
    """Records the losses of single tokens while the loss of a micro-batch is computed.

    Args:
        args: say whether anything is recorded.
        device: where the losses are.

    Attributes:
        window: sums of the training since the last log; None if the sources are not known.
        ids: the numbers of the sources in the batch that was prepared last, ``[samples, tokens]``; None without.
    """

    window: SourceSums | None = None
    ids: torch.Tensor | None = None

    def __init__(self, args: TrainingArguments, device: torch.device) -> None:
        self._enabled = records_sources(args)
        self._filtered = args.logging_nan_inf_filter
        self._device = device
        self._found: TokenLosses | None = None

    def sums(self, dataset: Any, group: ProcessGroup | None) -> SourceSums | None:
        """Sums for the sources of ``dataset``; None if nothing is recorded, or its sources are not known."""
        names = source_names(dataset) if self._enabled else ()
        return SourceSums(names, self._device, self._filtered, group) if names else None

    def take(self) -> TokenLosses | None:
        """What the last loss recorded, once."""
        found, self._found = self._found, None
        return found

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, the first cross-entropy over all tokens of the batch is recorded."""
        self._found = None
        if not self._enabled:
            yield
            return
        original = F.cross_entropy

        def recorded(*args: Any, **kwargs: Any) -> Any:
            # The original hands itself to tensors with functions of their own by its name in the module.
            F.cross_entropy = original
            try:
                return self._record(original, *args, **kwargs)
            finally:
                F.cross_entropy = recorded

        F.cross_entropy = recorded
        try:
            yield
        finally:
            F.cross_entropy = original

    def _record(
        self,
        original: Any,
        input: Any,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        sources = self._sources_of(target)
        options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
        unknown = self._found is not None or weight is not None or not (size_average is reduce is None)
        if unknown or sources is None:
            given = {"weight": weight, "size_average": size_average, "reduce": reduce, "reduction": reduction}
            return original(input, target, **given, **options)
        losses = original(input, target, reduction="none", **options)
        valid = target != ignore_index
        self._found = TokenLosses(sources, losses.detach().flatten(), valid.flatten())
        if reduction == "none":
            return losses
        return losses.sum() if reduction == "sum" else losses.sum() / valid.sum()

    def _sources_of(self, target: torch.Tensor) -> torch.Tensor | None:
        """The source of each of the targets, ``[targets]``; None if they are not those of all tokens."""
        ids = self.ids
        if ids is None or ids.dim() != 2 or target.dim() not in (1, 2) or target.is_floating_point():
            return None
        rows, length = ids.shape
        if target.numel() == rows * length:
            return ids.flatten()
        return ids[:, :-1].flatten() if target.numel() == rows * (length - 1) else None
