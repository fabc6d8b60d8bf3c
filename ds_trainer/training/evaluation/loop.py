"""The evaluation loop: loss, predictions and metrics over a dataset, equal for every layout.

One pass::

    for each round (one batch of every replica):
        prediction_step: forward pass -> mean loss of the batch, logits, labels
        preprocess_logits_for_metrics
        gather what is kept from all ranks, in the dataset's order
        every eval_accumulation_steps: to host memory, at their places in the result
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
from ds_trainer.training.evaluation.kept import Kept
from ds_trainer.training.evaluation.loss_mean import Loss, LossMean
from ds_trainer.training.evaluation.nested import detached, map_leaves, plain_numbers
from ds_trainer.training.evaluation.outputs import EvalLoopOutput, EvalPrediction
from ds_trainer.training.evaluation.rounds import rounds_in_step, with_last_marked
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError

if TYPE_CHECKING:
    from ds_trainer.training.hooks.evaluation import EvaluationHooks

_KINDS = ("predictions", "label_ids", "inputs", "losses")


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
        rows = loader.samples if isinstance(loader, PlannedLoader) else 0
        self._kept = {kind: Kept(args.eval_do_concat_batches, self._as_objects, rows) for kind in _KINDS}
        self._every = args.eval_accumulation_steps or self._waits(trainer.device)
        # A CUDA graph writes the outputs of its next batch to the place of these. What is gathered is a copy already.
        self._copies = args.torch_compile and distributed.world_size() == 1 and self._every != 1
        self._speaks = trainer.layout.speaks(distributed.rank())
        self._loss = LossMean(trainer.device, args.logging_nan_inf_filter, counts=self._speaks)
        self._samples = 0
        self._metrics: dict[str, Any] = {}

    @staticmethod
    def _waits(device: torch.device) -> int | None:
        """Rounds to be kept on ``device`` by default: all of them (None). On the CPU that would only cost memory."""
        return 1 if device.type == "cpu" else None

    def run(self, model: nn.Module, ignore_keys: list[str] | None, prefix: str) -> EvalLoopOutput:
        """Evaluate ``model``; metrics have ``prefix`` before their names. The model is left in evaluation mode."""
        trainer, every = self.trainer, self._every
        model.eval()
        weights_of_evaluation(trainer.optimizer)
        for index, (inputs, last) in enumerate(with_last_marked(rounds_in_step(self.loader, trainer.layout)), start=1):
            found = self._round(model, inputs, ignore_keys)
            trainer.control = trainer.callback_handler.on_prediction_step(trainer.args, trainer.state, trainer.control)
            trainer.health_beat()
            if not last:
                trainer.give_up_if_asked()
            if found is None:
                continue
            if self._batch_metrics and found["predictions"] is not None and found["label_ids"] is not None:
                self._metrics = self._compute(found, compute_result=last)
            if self._keep:
                places = self.loader.places(index - 1) if isinstance(self.loader, PlannedLoader) else None
                for kind in _KINDS[:2] if self._batch_metrics else _KINDS:
                    self._kept[kind].add(map_leaves(_copied, found[kind]) if self._copies else found[kind], places)
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
            return self.loader.samples
        counted = torch.tensor(self._samples if self._speaks else 0)
        counted = counted.to(distributed.collective_device())
        distributed.all_reduce_sum(counted)
        return int(counted)


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
