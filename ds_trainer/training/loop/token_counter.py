"""``TokenCounter``: counts samples, tokens and operations of micro-batches from their shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ds_trainer.arguments.enums import TokenCount
from ds_trainer.callbacks.events import TrainingEvents
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.data.batch_structure import Dummy, number_of_samples
from ds_trainer.data.sharded_batch import ShardedBatch
from ds_trainer.engine.quantized_weights import represented_numel
from ds_trainer.monitor.throughput import ThroughputMeter
from ds_trainer.parallel.deferred_mask import DocumentMask
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.planner.flops import FlopRule, Weights
from ds_trainer.planner.hardware import peak_flops
from ds_trainer.planner.model_shape import ModelShape
from ds_trainer.utils import distributed
from ds_trainer.utils.logging import get_logger

if TYPE_CHECKING:
    from ds_trainer.data.packing.batch import PackedFormat

logger = get_logger(__name__)


def main_input(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor | None:
    """The main input of a model (``main_input_name``; default ``input_ids``); None if the batch does not have it."""
    value = batch.get(getattr(model, "main_input_name", "input_ids"))
    return value if isinstance(value, torch.Tensor) else None


def token_shape(value: torch.Tensor | None) -> tuple[int, int]:
    """Number of rows and positions per row of a tensor of token ids, with padding; zeros for any other input."""
    if value is None or value.is_floating_point() or value.dim() == 0:
        return 0, 0
    length = value.shape[-1]
    return (value.numel() // length if length else 0), length


def sequence_lengths(batch: Mapping[str, Any], rows: int, length: int) -> Counter[int]:
    """The number of sequences of each length in a batch of ``rows`` times ``length`` positions.

    Normally a row is one sequence. If ``position_ids`` restart in a row and there is no ``attention_mask``, several
    samples are packed into the row, and they do not attend to each other. The mask of such rows says it too.
    """
    mask = batch.get("attention_mask")
    if isinstance(mask, DocumentMask) and mask.documents.shape == (rows, length):
        return Counter(mask.documents.lengths)
    places = batch.get("position_ids")
    if not isinstance(places, torch.Tensor) or places.numel() != rows * length or "attention_mask" in batch:
        return Counter({length: rows})
    if places.device.type != "cpu":  # reading a device tensor would make the host wait
        return Counter({length: rows})
    places = places.reshape(rows, length)
    begins = torch.ones_like(places, dtype=torch.bool)
    begins[:, 1:] = places[:, 1:] != places[:, :-1] + 1  # the first position is not 0 in RoBERTa
    starts = begins.flatten().nonzero().flatten()
    ends = torch.cat([starts[1:], starts.new_tensor([rows * length])])
    return Counter((ends - starts).tolist())


def target_length(batch: Mapping[str, Any]) -> int:
    """Positions per row of the decoder input in an encoder-decoder model; 0 if there is none."""
    for name in ("decoder_input_ids", "labels"):
        value = batch.get(name)
        if isinstance(value, torch.Tensor) and value.dim() > 1:
            return int(value.shape[-1])
    return 0


def flop_rule(model: nn.Module) -> FlopRule | None:
    """The rule that counts the operations of ``model``; None if all its parameters are embeddings."""
    embedded = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    rest = [p for p in model.parameters() if id(p) not in embedded]
    trainable = sum(represented_numel(p) for p in rest if p.requires_grad)
    return FlopRule.of(ModelShape.from_model(model), Weights(sum(represented_numel(p) for p in rest), trainable))


def number_format(config: CompiledConfig, device: torch.device) -> str:
    """The number format of the matrix products of a run: ``bf16``, ``fp16``, ``tf32`` or ``fp32``."""
    precision = config.precision.compute
    if precision == "fp32" and device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    return precision


def device_name(device: torch.device) -> str:
    """Name of the device of this rank: ``cpu``, or the name that its driver reports."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def peak_of(config: CompiledConfig, device: torch.device) -> float | None:
    """Peak operations per second of this rank's device in the number format of the run; None if unknown."""
    return peak_flops(device_name(device), number_format(config, device))


def batch_flops(model: nn.Module, rule: FlopRule | None, batch: Mapping[str, Any]) -> float:
    """Operations of the forward and backward pass of one micro-batch by ``rule``; 0 if it has no token ids."""
    rows, length = token_shape(main_input(model, batch))
    if rule is None or rows == 0:
        return 0.0
    if _has_two_stacks(rule):
        return rule.flops(rows, length, target_length(batch))
    return sum(rule.flops(count, size) for size, count in sequence_lengths(batch, rows, length).items())


def _has_two_stacks(rule: FlopRule) -> bool:
    return rule.transformer is not None and len(rule.transformer.stacks) > 1


class BatchSize(NamedTuple):
    """What is counted of one micro-batch.

    Attributes:
        samples, tokens: how many.
        seen, seen_on_device: input elements, of which those counted on a device stay there.
        flops: operations, by a method of the user.
        sequences: the number of sequences of each length and target length.
    """

    samples: int = 0
    tokens: int = 0
    seen: int = 0
    seen_on_device: torch.Tensor | None = None
    flops: float = 0.0
    sequences: Sequence[tuple[tuple[int, int], int]] = ()


class TokenCounter:
    """Counts samples, tokens and operations of this rank, and sums them over all ranks on :meth:`flush`.

    For each micro-batch it only records shapes. The operations follow from the number of sequences of each length, so
    they are computed on demand.

    Args:
        model: has the name of the input with the tokens.
        events: arguments, and the state that is updated.
        meter: receives the counts of the whole job.
        layout: the layout of the job.
        rule: counts operations; None if the model is unknown.
        peak: peak operations per second of this rank's device; None if unknown.
        padding: token id of padding; None if unknown.
        flops: a method of the user that counts the operations of a batch, in place of ``rule``.
        packed: the format of packed rows, which knows their padding.

    Dummy batches are not counted. In each replica (tensor, sequence, context parallelism), the replica leader counts
    for all its ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        events: TrainingEvents,
        meter: ThroughputMeter,
        layout: ParallelLayout,
        *,
        rule: FlopRule | None,
        peak: float | None,
        padding: int | None = None,
        flops: Callable[[Any], float] | None = None,
        packed: PackedFormat | None = None,
    ) -> None:
        self.meter = meter
        self.peak = peak
        self.has_tokens = False
        self.counts_operations = False
        self._main_input = getattr(model, "main_input_name", "input_ids")
        self._events = events
        self._layout = layout
        self._rule = rule
        self._two_stacks = rule is not None and _has_two_stacks(rule)
        self._padding = padding
        self._flops_of = flops
        self._packed = packed
        self._counts = layout.is_replica_leader(distributed.rank())
        self._mode = events.args.include_num_input_tokens_seen
        self._warned = False
        self._reset()

    def _reset(self) -> None:
        self._batches = self._samples = self._tokens = self._seen = 0
        self._flops = 0.0
        self._sequences: Counter[tuple[int, int]] = Counter()  # number of them, by length and target length
        # The sum over masks on a device stays there: reading it would make the host wait.
        self._seen_on_device: torch.Tensor | None = None

    def add(self, batch: Any) -> None:
        """Count one micro-batch by its shapes. Does not wait for the device."""
        self._batches += 1
        if not self._counts:
            return
        size = batch.facts.size if isinstance(batch, ShardedBatch) else self.size(batch)
        self._samples += size.samples
        self._tokens += size.tokens
        self._flops += size.flops
        self._seen += size.seen
        for kind, count in size.sequences:
            self._sequences[kind] += count
        if size.seen_on_device is not None:
            before = self._seen_on_device
            self._seen_on_device = size.seen_on_device if before is None else before + size.seen_on_device

    def size(self, batch: Any) -> BatchSize:
        """What :meth:`add` counts of a whole micro-batch of a replica."""
        if isinstance(batch, Dummy):
            return BatchSize()
        if not isinstance(batch, Mapping):  # it becomes tensors in the Trainer's _prepare_inputs
            return BatchSize(samples=number_of_samples(batch))
        rows, length = 0, 0
        tokens: Any = batch.get(self._main_input)
        if isinstance(tokens, torch.Tensor) and tokens.dim() and not tokens.is_floating_point():
            length = tokens.shape[-1]
            rows = tokens.numel() // max(length, 1)
        flops, sequences = 0.0, [((length, 0), rows)]
        if self._flops_of is not None:
            flops, sequences = float(self._flops_of(batch)), []
        elif self._two_stacks:
            sequences = [((length, target_length(batch)), rows)]
        elif "position_ids" in batch:  # samples may be packed into a row
            sequences = [((one, 0), count) for one, count in sequence_lengths(batch, rows, length).items()]
        seen, on_device = (0, None) if self._mode == TokenCount.NO else self._see(batch, tokens)
        samples = tokens.shape[0] if rows else number_of_samples(batch)
        return BatchSize(samples, rows * length, seen, on_device, flops, sequences)

    @property
    def flops(self) -> float:
        """Operations of this rank since the last :meth:`flush`."""
        rule = self._rule
        if rule is None:
            return self._flops
        return self._flops + sum(
            rule.flops(count, length, target) for (length, target), count in self._sequences.items() if count
        )

    def flush(self) -> None:
        """Add the counts of all ranks since the last call to the state and the meter. Collective."""
        if self._batches == 0:  # on all ranks: they run the same number of micro-batches
            return
        state = self._events.state
        seen = self._seen + (0 if self._seen_on_device is None else int(self._seen_on_device))
        local = torch.tensor([self._samples, self._tokens, seen, self.flops], dtype=torch.float64)
        total = local.to(distributed.collective_device())
        distributed.all_reduce_sum(total)
        samples, tokens, all_seen, operations = total.tolist()
        self._reset()
        state.total_flos += operations
        state.num_input_tokens_seen += int(all_seen)
        self.has_tokens |= tokens > 0
        self.counts_operations |= operations > 0
        self.meter.add(int(tokens), int(samples), steps=0, flops=operations)

    def rates(self) -> dict[str, float]:
        """Speed since the last call, by log key; only the values that apply to this model."""
        rates = self.meter.read()
        logs = {"tokens_per_second": rates.tokens_per_second} if self.has_tokens else {}
        logs["samples_per_second"] = rates.samples_per_second
        if rates.steps_per_second:
            logs["step_seconds"] = 1.0 / rates.steps_per_second
        if self.counts_operations:
            per_device = rates.flops_per_second / self._layout.world_size
            logs["tflops_per_device"] = per_device / 1e12
            if self.peak is not None:
                logs["mfu"] = per_device / self.peak
        logs["data_wait"] = rates.data_wait
        return logs

    def _see(self, batch: Mapping[str, Any], tokens: Any) -> tuple[int, torch.Tensor | None]:
        """The input elements of a batch, according to ``include_num_input_tokens_seen``: here, or on the device."""
        if not isinstance(tokens, torch.Tensor):
            self._warn(
                f"batches have no {self._main_input}, so no input tokens are counted. Set main_input_name on the model."
            )
            return 0, None
        used: torch.Tensor | None = None
        if self._mode == TokenCount.NON_PADDING:
            if self._packed is not None and "position_ids" in batch and tokens.device.type == "cpu":
                return self._packed.text_tokens(batch), None
            mask = batch.get("attention_mask")
            if isinstance(mask, torch.Tensor) and mask.dim() < 4:  # not of pairs of tokens
                used = mask.sum()
            elif self._padding is not None:
                used = (tokens != self._padding).sum()
            else:
                self._warn("there is neither an attention_mask per token nor a pad_token_id, so padding counts too.")
        if used is None:
            return tokens.numel(), None
        return (int(used), None) if used.device.type == "cpu" else (0, used)

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("include_num_input_tokens_seen=%s: %s", self._mode, what)
