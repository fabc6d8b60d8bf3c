"""The evaluation loop: loss, predictions and metrics over a dataset, equal for every layout.

One pass::

    for each round (one batch of every replica):
        prediction_step: forward pass -> mean loss of the batch, logits, labels
        preprocess_logits_for_metrics
        gather what is kept from all ranks, in the dataset's order
        every eval_accumulation_steps: to host memory
    divide the summed loss by the items of all ranks, once
    compute_metrics

All ranks end with all predictions, as in Hugging Face's Trainer, so that ``compute_metrics`` may run anywhere: host
memory for the whole result is needed on every rank. Keep less of each batch by ``preprocess_logits_for_metrics``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_trainer.data.loader import FillerBatch, PlannedLoader
from ds_trainer.optim.swapping import weights_of_evaluation
from ds_trainer.training.batches import number_of_samples, on_device
from ds_trainer.training.evaluation.gathering import gather_rounds
from ds_trainer.training.evaluation.loss_mean import Loss, LossMean
from ds_trainer.training.evaluation.nested import detached, joined, on_host, plain_numbers
from ds_trainer.training.evaluation.outputs import EvalLoopOutput, EvalPrediction
from ds_trainer.training.evaluation.rounds import rounds_in_step, with_last_marked
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError

if TYPE_CHECKING:
    from ds_trainer.training.hooks.evaluation import EvaluationHooks

_KINDS = ("predictions", "label_ids", "inputs", "losses")


class Kept:
    """One kind of result over all rounds: on the device first, in host memory after :meth:`to_host`.

    Args:
        join: one structure of whole arrays at the end, instead of a list with an entry for each round.
        samples_in_lists: see :func:`ds_trainer.training.evaluation.nested.joined`.
    """

    def __init__(self, join: bool, samples_in_lists: bool) -> None:
        self._join = join
        self._samples_in_lists = samples_in_lists
        self._on_device: list[Any] = []
        self._on_host: list[Any] = []

    def add(self, piece: Any) -> None:
        """Add what a round gave; None for nothing."""
        if piece is not None:
            self._on_device.append(piece)

    def to_host(self) -> None:
        """Bring what has been added since to host memory."""
        if not self._join:
            self._on_host += [on_host(piece) for piece in self._on_device]
        elif self._on_device:
            self._on_host.append(on_host(self._joined(self._on_device)))
        self._on_device = []

    def result(self) -> Any:
        """Everything, as numpy arrays; None where nothing was added."""
        self.to_host()
        if not self._on_host:
            return None
        return self._joined(self._on_host) if self._join else self._on_host

    def _joined(self, pieces: list[Any]) -> Any:
        try:
            return joined(pieces, self._samples_in_lists)
        except TypeError as error:
            raise ConfigError(
                f"The outputs of the batches of an evaluation cannot be joined: {error}. Set "
                "eval_do_concat_batches=False to get a list of batches, or name such outputs in ignore_keys."
            ) from error


class EvalLoop:
    """One pass over a loader.

    Args:
        trainer: whose hooks and callbacks are used.
        loader: batches of this replica.
        loss_only: keep nothing but the loss.
        keep: keep predictions for the caller, also where metrics are computed batch by batch.
    """

    def __init__(self, trainer: EvaluationHooks, loader: Any, loss_only: bool, keep: bool) -> None:
        args = trainer.args
        self.trainer = trainer
        self.loader = loader
        self.loss_only = loss_only
        self._batch_metrics = args.batch_eval_metrics and trainer.compute_metrics is not None
        self._keep = keep or not self._batch_metrics
        self._as_objects = args.eval_use_gather_object
        self._kept = {kind: Kept(args.eval_do_concat_batches, self._as_objects) for kind in _KINDS}
        self._speaks = trainer.layout.speaks(distributed.rank())
        self._loss = LossMean(trainer.device, args.logging_nan_inf_filter, counts=self._speaks)
        self._samples = 0
        self._metrics: dict[str, Any] = {}

    def run(self, model: nn.Module, ignore_keys: list[str] | None, prefix: str) -> EvalLoopOutput:
        """Evaluate ``model``; metrics have ``prefix`` before their names. The model is left in evaluation mode."""
        trainer, every = self.trainer, self.trainer.args.eval_accumulation_steps
        model.eval()
        weights_of_evaluation(trainer.optimizer)
        for index, (inputs, last) in enumerate(with_last_marked(rounds_in_step(self.loader, trainer.layout)), start=1):
            found = self._round(model, inputs, ignore_keys)
            trainer.control = trainer.callback_handler.on_prediction_step(trainer.args, trainer.state, trainer.control)
            if found is None:
                continue
            if self._batch_metrics and found["predictions"] is not None and found["label_ids"] is not None:
                self._metrics = self._compute(found, compute_result=last)
            if self._keep:
                for kind in _KINDS[:2] if self._batch_metrics else _KINDS:
                    self._kept[kind].add(found[kind])
            if every is not None and index % every == 0:
                for kept in self._kept.values():
                    kept.to_host()
        return self._output(prefix)

    def _round(self, model: nn.Module, inputs: Mapping[str, Any], ignore_keys: list[str] | None) -> Any:
        """One batch; what all ranks have of each kind, or None where only the loss matters."""
        trainer = self.trainer
        filler = isinstance(inputs, FillerBatch)
        items = trainer.loss_rule.count(inputs)
        samples = number_of_samples(inputs)
        self._samples += 0 if filler else samples
        wanted = self._inputs_wanted(inputs)
        # The reference's signature: a subclass may have its own.
        with trainer.accelerator.batch(inputs):
            loss, logits, labels = trainer.prediction_step(
                model,
                inputs,  # type: ignore[arg-type]
                self.loss_only,
                ignore_keys=ignore_keys,
            )
        if loss is not None:
            loss = torch.as_tensor(loss).detach().mean()
            if not filler:
                self._loss.add(loss, items)
        if logits is not None and trainer.preprocess_logits_for_metrics is not None:
            logits = trainer.preprocess_logits_for_metrics(logits, labels)
        if self.loss_only and logits is None and labels is None:
            return None
        tree = {"predictions": detached(logits), "label_ids": detached(labels), "inputs": wanted, "losses": None}
        if loss is not None and self._includes("loss"):
            tree["losses"] = loss.to(trainer.device).repeat(samples)
        return gather_rounds(tree, filler, trainer.layout, self._as_objects)

    def _includes(self, what: str) -> bool:
        return self.trainer.compute_metrics is not None and what in self.trainer.args.include_for_metrics

    def _inputs_wanted(self, inputs: Mapping[str, Any]) -> Any:
        """What ``compute_metrics`` gets of the inputs: the main one; all of them where it is called batch by batch."""
        if not self._includes("inputs") or self.loss_only:
            return None
        if self._batch_metrics:
            return on_device({k: v for k, v in inputs.items() if isinstance(v, torch.Tensor)}, self.trainer.device)
        name = getattr(self.trainer.model, "main_input_name", "input_ids")
        if name not in inputs:
            raise ConfigError(
                f"include_for_metrics has 'inputs', but a batch of {', '.join(inputs)} has no '{name}', the main input "
                f"of {type(self.trainer.model).__name__}. Set its attribute main_input_name to one of these."
            )
        return on_device({name: inputs[name]}, self.trainer.device)[name]

    def _compute(self, found: Mapping[str, Any], **keywords: Any) -> dict[str, Any]:
        assert self.trainer.compute_metrics is not None  # asked before
        metrics = self.trainer.compute_metrics(EvalPrediction(*(found[kind] for kind in _KINDS)), **keywords)
        if keywords.get("compute_result", True) and not isinstance(metrics, Mapping):
            raise ConfigError(
                f"compute_metrics returned a {type(metrics).__name__}; let it return a dict like {{'accuracy': 0.5}}."
            )
        return dict(metrics or {})

    def _output(self, prefix: str) -> EvalLoopOutput:
        arrays = {kind: kept.result() for kind, kept in self._kept.items()}
        complete = arrays["predictions"] is not None and arrays["label_ids"] is not None
        if self.trainer.compute_metrics is not None and complete and not self._batch_metrics:
            self._metrics = self._compute(arrays)
        metrics = plain_numbers(self._metrics)
        loss: Loss | None = self._loss.result()
        if loss is not None:
            metrics = {**metrics, f"{prefix}_loss": loss.mean, f"{prefix}_items": loss.items}
        named = {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": v for name, v in metrics.items()}
        return EvalLoopOutput(arrays["predictions"], arrays["label_ids"], named, self._number_of_samples())

    def _number_of_samples(self) -> int:
        if isinstance(self.loader, PlannedLoader):
            return len(self.loader.dataset)  # type: ignore[arg-type]  # it has a length: it is planned
        counted = torch.tensor(self._samples if self._speaks else 0)
        counted = counted.to(distributed.collective_device())
        distributed.all_reduce_sum(counted)
        return int(counted)
