"""``TFTrainer`` and ``TFTrainingArguments`` of the early reference, as far as a DeepSpeed engine can serve them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.training.batches import check_run_length, on_device
from ds_trainer.training.tensorflow.dataset import TensorStream, as_sample, is_tf_dataset
from ds_trainer.training.tensorflow.keras_module import KerasModule, is_keras
from ds_trainer.training.trainer import Trainer
from ds_trainer.utils.errors import ConfigError


@dataclass(repr=False)
class TFTrainingArguments(TrainingArguments):
    """:class:`TrainingArguments` that know TensorFlow's own fields, and refuse to ignore them."""

    tpu_name: str | None = None
    tpu_zone: str | None = None
    gcp_project: str | None = None
    xla: bool = False
    poly_power: float = 1.0

    def __post_init__(self) -> None:
        given = [name for name in ("tpu_name", "tpu_zone", "gcp_project", "xla") if getattr(self, name)]
        problems = [f"{name}={getattr(self, name)!r} has no meaning for a torch engine: leave it out." for name in given]
        if self.poly_power != 1.0:
            problems.append(
                f"poly_power={self.poly_power}: say lr_scheduler_type='polynomial' and "
                f"lr_scheduler_kwargs={{'power': {self.poly_power}, 'lr_end': 0.0}} instead."
            )
        if problems:
            raise ConfigError(problems)
        super().__post_init__()


def _as_module(model: Any) -> Any:
    return KerasModule(model) if is_keras(model) else model


class TFTrainer(Trainer):
    """A Trainer of Keras 3 models (torch backend) or torch models, over unbatched ``tf.data.Dataset`` or other data.

    Args:
        model, args, train_dataset, eval_dataset, compute_metrics: as of :class:`Trainer`, in the order of old.
        more: all other keywords of :class:`Trainer`.

    Raises:
        ConfigError: the model has another backend, ``run_model`` is overridden, or data is to be loaded by forks.
    """

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        compute_metrics: Any = None,
        **more: Any,
    ) -> None:
        make = more.get("model_init")
        if callable(make):
            more["model_init"] = wraps(make)(lambda *trial: _as_module(make(*trial)))
        args = args if args is not None else TFTrainingArguments("tmp_trainer")
        if type(self).run_model is not TFTrainer.run_model:
            raise ConfigError("run_model is not called by training here: override compute_loss instead.")
        if args.dataloader_num_workers and any(map(is_tf_dataset, (train_dataset, eval_dataset))):
            raise ConfigError(
                f"dataloader_num_workers={args.dataloader_num_workers}: a process that TensorFlow runs in must not be "
                "forked. Set it to 0; tf.data has threads of its own (map(num_parallel_calls=...), prefetch())."
            )
        check_run_length(train_dataset, args)
        keywords = {"train_dataset": train_dataset, "eval_dataset": eval_dataset, "compute_metrics": compute_metrics}
        super().__init__(_as_module(model), args, **keywords, **more)

    def get_train_tfdataset(self) -> Any:
        """The elements to train on, unbatched, in a new order for every epoch: override it for another pipeline."""
        size = int(self.train_dataset.cardinality())
        return self.train_dataset if size < 0 else self.train_dataset.shuffle(size, seed=self.args.seed)

    def get_eval_tfdataset(self, eval_dataset: Any = None) -> Any:
        """The elements to evaluate on, unbatched: those given, or of that name, or the Trainer's own."""
        given = self.eval_dataset if eval_dataset is None else eval_dataset
        return self.eval_dataset.get(given) if isinstance(given, str) and isinstance(self.eval_dataset, dict) else given

    def get_test_tfdataset(self, test_dataset: Any) -> Any:
        """The elements to predict, unbatched."""
        return test_dataset

    def get_train_dataloader(self) -> Any:
        """Micro-batches of this replica, from :meth:`get_train_tfdataset` where the data is TensorFlow's."""
        if not is_tf_dataset(self.train_dataset):
            return super().get_train_dataloader()
        given = self.train_dataset
        try:
            self.train_dataset = TensorStream(self.get_train_tfdataset(), endless=True)
            return super().get_train_dataloader()
        finally:
            self.train_dataset = given

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Micro-batches of this replica, from :meth:`get_eval_tfdataset` where the data is TensorFlow's."""
        data = self.get_eval_tfdataset(eval_dataset)
        return super().get_eval_dataloader(TensorStream(data) if is_tf_dataset(data) else eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Micro-batches of this replica, from :meth:`get_test_tfdataset` where the data is TensorFlow's."""
        data = self.get_test_tfdataset(test_dataset)
        return super().get_test_dataloader(TensorStream(data) if is_tf_dataset(data) else data)

    def run_model(self, features: Any, labels: Any, training: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and logits of one batch; with ``training`` with dropout and a graph. Collective under ZeRO-3.

        Args:
            features: a dict by name, or one array or tensor (of numpy, torch or TensorFlow).
            labels: the labels, or a dict of them.
            training: the mode.
        """
        inputs = on_device(as_sample((features, labels)), self.device)
        before = self.model_wrapped.training
        self.model_wrapped.train(training)
        try:
            with torch.set_grad_enabled(training):
                outputs = self.model_wrapped(**inputs)
        finally:
            self.model_wrapped.train(before)
        return outputs["loss"], outputs["logits"]
