"""``WorkCounter``: what the micro-batches since the last look were, counted from their shapes alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_trainer.arguments.enums import TokenCount
from ds_trainer.data.loader import FillerBatch
from ds_trainer.engine.quantized import represented_numel
from ds_trainer.monitor.throughput import ThroughputMeter
from ds_trainer.planner.flops import FlopRule, Weights
from ds_trainer.planner.hardware import peak_flops
from ds_trainer.planner.model_shape import ModelShape
from ds_trainer.training.batches import number_of_samples
from ds_trainer.utils import distributed
from ds_trainer.utils.logging import get_logger

if TYPE_CHECKING:
    from ds_trainer.training.trainer import Trainer

logger = get_logger(__name__)


def main_input(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor | None:
    """The tensor that a model is mainly about (``main_input_name``; ``input_ids``); None where the batch lacks it."""
    value = batch.get(getattr(model, "main_input_name", "input_ids"))
    return value if isinstance(value, torch.Tensor) else None


def token_shape(model: nn.Module, batch: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and positions of a row of a batch of token numbers, padding included; zeros for any other input."""
    value = main_input(model, batch)
    if value is None or value.is_floating_point() or value.dim() == 0:
        return 0, 0
    length = value.shape[-1]
    return (value.numel() // length if length else 0), length


def sequence_lengths(batch: Mapping[str, Any], rows: int, length: int) -> Counter[int]:
    """How many sequences of which length a batch of ``rows`` times ``length`` positions holds.

    One for each row; but where ``position_ids`` begin anew inside a row and nothing else masks it, several samples are
    packed into it, which do not see each other.
    """
    places = batch.get("position_ids")
    if not isinstance(places, torch.Tensor) or places.numel() != rows * length or "attention_mask" in batch:
        return Counter({length: rows})
    if places.device.type != "cpu":  # reading what lies on a device would make the host wait
        return Counter({length: rows})
    begins = places.reshape(rows, length) == 0
    begins[:, 0] = True
    starts = begins.flatten().nonzero().flatten()
    ends = torch.cat([starts[1:], starts.new_tensor([rows * length])])
    return Counter((ends - starts).tolist())


def target_length(batch: Mapping[str, Any]) -> int:
    """Positions of a row of the decoder's sequence, in a model that has a second one; 0 where there is none."""
    for name in ("decoder_input_ids", "labels"):
        value = batch.get(name)
        if isinstance(value, torch.Tensor) and value.dim() > 1:
            return int(value.shape[-1])
    return 0


def flop_rule(model: nn.Module) -> FlopRule | None:
    """How the operations of ``model`` are counted; None for a model without parameters outside its embeddings."""
    embedded = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    rest = [p for p in model.parameters() if id(p) not in embedded]
    trainable = sum(represented_numel(p) for p in rest if p.requires_grad)
    return FlopRule.of(ModelShape.from_model(model), Weights(sum(represented_numel(p) for p in rest), trainable))


def number_format(trainer: Trainer) -> str:
    """In which format the matrix products of a run are computed: ``bf16``, ``fp16``, ``tf32`` or ``fp32``."""
    if trainer.compiled.get("torch_autocast.enabled"):
        return "bf16"
    precision = trainer.engine.precision
    if precision == "fp32" and trainer.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    return precision


def device_name(trainer: Trainer) -> str:
    """Name of this rank's device: ``cpu``, or what its driver calls it."""
    return torch.cuda.get_device_name(trainer.device) if trainer.device.type == "cuda" else "cpu"


def peak_of(trainer: Trainer) -> float | None:
    """Operations a second that this rank's device reaches at best in the run's number format; None if unknown."""
    return peak_flops(device_name(trainer), number_format(trainer))


class WorkCounter:
    """Counts samples, tokens and operations of this rank, and adds up those of all ranks when asked.

    Args:
        trainer: whose state and meter are kept up to date.
        meter: gets the work of the whole job.

    Batches that only keep a replica in step with the others count for nothing. Of the ranks that share samples
    (tensor, sequence, context parallelism), one counts for all.
    """

    def __init__(self, trainer: Trainer, meter: ThroughputMeter) -> None:
        self.trainer = trainer
        self.meter = meter
        self.peak = peak_of(trainer)
        self.has_tokens = False
        self.counts_operations = False
        self._speaks = trainer.layout.speaks(distributed.rank())
        self._mode = trainer.args.include_num_input_tokens_seen
        self._warned = False
        self._begin()

    def _begin(self) -> None:
        self._batches = self._samples = self._tokens = self._seen = 0
        # Counts of masks that lie on a device stay there: reading one would make the host wait.
        self._seen_there: torch.Tensor | None = None

    def add(self, batch: Any) -> None:
        """Count one micro-batch. Looks at shapes; does not wait for the device."""
        self._batches += 1
        if isinstance(batch, FillerBatch) or not self._speaks:
            return
        trainer = self.trainer
        self._samples += number_of_samples(batch)
        rows, length = token_shape(trainer.model, batch)
        self._tokens += rows * length
        trainer.current_flos += float(trainer.floating_point_ops(batch))
        if self._mode != TokenCount.NO:
            self._see(batch)

    def settle(self) -> None:
        """Add what was counted on all ranks to the state and the meter. Collective; nothing where nothing was done."""
        if self._batches == 0:  # on all ranks: they run the same number of micro-batches
            return
        trainer = self.trainer
        seen = self._seen + (0 if self._seen_there is None else int(self._seen_there))
        own = torch.tensor([self._samples, self._tokens, seen, trainer.current_flos], dtype=torch.float64)
        total = own.to(distributed.collective_device())
        distributed.all_reduce_sum(total)
        samples, tokens, all_seen, operations = total.tolist()
        self._begin()
        trainer.current_flos = 0.0
        trainer.state.total_flos += operations
        trainer.state.num_input_tokens_seen += int(all_seen)
        self.has_tokens |= tokens > 0
        self.counts_operations |= operations > 0
        self.meter.add(int(tokens), int(samples), steps=0, flops=operations)

    def rates(self) -> dict[str, float]:
        """Speed since the last call, by the names under which it is logged; only what this model has."""
        rates = self.meter.read()
        logs = {"tokens_per_second": rates.tokens_per_second} if self.has_tokens else {}
        logs["samples_per_second"] = rates.samples_per_second
        if self.counts_operations:
            per_device = rates.flops_per_second / self.trainer.layout.world_size
            logs["tflops_per_device"] = per_device / 1e12
            if self.peak is not None:
                logs["mfu"] = per_device / self.peak
        logs["data_wait"] = rates.data_wait
        return logs

    def _see(self, batch: Mapping[str, Any]) -> None:
        """Count the input elements of a batch, as ``include_num_input_tokens_seen`` says."""
        tokens = main_input(self.trainer.model, batch)
        if tokens is None:
            name = getattr(self.trainer.model, "main_input_name", "input_ids")
            self._warn(f"batches have no {name}, so no input tokens are counted. Set main_input_name on the model.")
            return
        used: torch.Tensor | None = None
        if self._mode == TokenCount.NON_PADDING:
            padding = getattr(self.trainer.processing_class, "pad_token_id", None)
            if isinstance(batch.get("attention_mask"), torch.Tensor):
                used = batch["attention_mask"].sum()
            elif padding is not None:
                used = (tokens != padding).sum()
            else:
                self._warn("there is neither an attention_mask nor a pad_token_id, so padding is counted as well.")
        if used is None:
            self._seen += tokens.numel()
        elif used.device.type == "cpu":
            self._seen += int(used)
        else:
            self._seen_there = used if self._seen_there is None else self._seen_there + used

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("include_num_input_tokens_seen=%s: %s", self._mode, what)
