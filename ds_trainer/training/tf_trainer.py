"""Keras 3 models (torch backend) and ``tf.data`` in the Trainer, and transformers' early ``TFTrainer``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.training.loop.batches import check_run_length
from ds_trainer.training.signatures import is_from
from ds_trainer.training.trainer import Trainer
from ds_trainer.utils.errors import ConfigError

_SEED = "seed_generator_state"
_SAME_ELEMENTS = ("_PrefetchDataset", "_RepeatDataset", "_ShuffleDataset", "_TakeDataset", "_OptionsDataset")


class KerasModule(torch.nn.Module):
    """A compiled Keras 3 model as a module that returns ``{"loss", "logits"}``; its optimizer is not used.

    A Keras model ignores ``train()`` and ``eval()``, its layers are not submodules (so ZeRO-3 gathers none), and its
    moving averages are parameters (so ZeRO-3 loses their updates). Here every layer of ``model.layers`` is a submodule
    with its own weights, and all other variables are buffers. Random numbers come from torch's generator.

    Raises:
        ConfigError: the model has another backend, no weights yet, or two variables of the same name.
    """

    keras_model: Any
    accepts_loss_kwargs = False  # the compiled loss is the mean over the micro-batch

    def __init__(self, model: Any) -> None:
        if not is_from(model, "torch"):
            raise ConfigError(
                f"{type(model).__name__} does not use the torch backend. Set KERAS_BACKEND=torch in the environment "
                "before the first `import keras`, rebuild the model and load its weights; or load them into a torch "
                "class (transformers 5 has no TensorFlow models)."
            )
        if not model.built:
            raise ConfigError(f"{type(model).__name__} has no weights yet: call it on a batch, or build() it.")
        super().__init__()
        self.__dict__["keras_model"] = model  # not a submodule: it would hold every weight again
        self._policies = [(layer, layer.dtype_policy) for layer in model._flatten_layers()]
        self._state: list[tuple[torch.nn.Module, str, Any]] = []
        taken = {id(variable) for variable in model.metrics_variables}
        for layer in (*model.layers, model):
            owner = self if layer is model else layer
            if layer is not model:
                self.add_module(layer.name.replace(".", "_"), layer)
                layer._parameters.clear()  # of another KerasModule over the same model
                layer._buffers.clear()
            for part in layer.modules():
                part._modules.pop("_torch_params", None)  # Keras' own list, which repeats them in every parent
                part.__dict__["_torch_params"] = {}
            weights = {id(weight) for part in layer._flatten_layers() for weight in part._trainable_variables}
            for variable in (variable for variable in layer.variables if id(variable) not in taken):
                taken.add(id(variable))
                late = variable.regularizer is not None  # read again after its layer was called
                holder, prefix = (self, model.path) if late else (owner, layer.path)
                key = variable.path.removeprefix(f"{prefix}/")
                if key in holder._parameters or key in holder._buffers:
                    raise ConfigError(f"Two variables of the Keras model are named {variable.path}: rename a layer.")
                if id(variable) in weights:
                    holder._parameters[key] = variable._value
                else:
                    holder._buffers[key] = variable._value = variable._value.detach()
                    self._state.append((holder, key, variable))
                    holder._non_persistent_buffers_set.update({key} if key.endswith(_SEED) else ())

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> KerasModule:
        super()._apply(fn, recurse)
        for owner, key, variable in self._state:  # update Keras' references to moved buffers, and its dtype policies
            variable._value = owner._buffers[key]
        dtypes = [str(weight.dtype).removeprefix("torch.") for weight in self.parameters()]
        for layer, policy in self._policies:
            layer.dtype_policy = policy if not dtypes or policy.variable_dtype in dtypes else dtypes[0]
        return self

    def forward(self, **batch: Any) -> dict[str, Any]:
        """Loss with regularization, and logits. ``batch``: ``labels``, and ``inputs`` or the model's inputs by name."""
        import keras

        model, labels = self.keras_model, batch.pop("labels", None)
        for _, key, variable in self._state:
            if self.training and key.endswith(_SEED):
                variable._value.copy_(torch.randint(2**31 - 1, (2,)))  # resumes with the Trainer; Keras' counter not
        with keras.device(str(next(self.parameters()).device)):
            logits = model(batch["inputs"] if set(batch) == {"inputs"} else batch, training=self.training)
            if labels is None and not (self.training and model.losses):
                return {"logits": logits}
            if labels is None or not model.compiled:
                raise ConfigError("The loss of a Keras model, with its regularization, comes from compile(loss=...).")
            return {"loss": model.compute_loss(y=labels, y_pred=logits, training=self.training), "logits": logits}


class TensorStream(IterableDataset[Any]):
    """The elements of a ``tf.data.Dataset`` as samples; epoch ``e`` is the dataset's iteration number ``e``.

    A shuffle in it needs a seed, so that all ranks read the same order.

    Raises:
        ConfigError: the dataset is batched, or infinite without ``endless``, or TensorFlow uses this process's GPUs.
    """

    def __init__(self, dataset: Any, endless: bool = False) -> None:
        import tensorflow as tf

        inner = dataset
        while type(inner).__name__ in _SAME_ELEMENTS:
            inner = inner._inputs()[0]
        if type(inner).__name__ in ("_BatchDataset", "_ParallelBatchDataset", "_PaddedBatchDataset"):
            raise ConfigError("The tf.data.Dataset is batched: remove batch(), or append unbatch().")
        if dataset.cardinality() == tf.data.INFINITE_CARDINALITY and not endless:
            raise ConfigError("The tf.data.Dataset is infinite, so its evaluation would not end: add take(n).")
        if tf.config.get_visible_devices("GPU"):
            raise ConfigError("TensorFlow uses the GPU: call tf.config.set_visible_devices([], 'GPU') first.")
        self.dataset, self._epoch, self._begun = dataset, 0, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next iterator belongs to."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for _ in range(self._begun, self._epoch):  # in a resumed run: a shuffle counts the iterators created
            iter(self.dataset)
        self._begun = max(self._begun, self._epoch) + 1
        return map(as_sample, self.dataset.as_numpy_iterator())

    def __len__(self) -> int:
        return len(self.dataset)  # TypeError if it is unknown or infinite, as intended


def as_sample(element: Any) -> dict[str, torch.Tensor]:
    """``(features, labels)`` or a dict, of arrays, as a dict of tensors; unnamed ones become ``inputs``, ``labels``."""
    features, labels = element if isinstance(element, tuple) and len(element) == 2 else (element, {})
    if isinstance(features, tuple):
        raise ConfigError(f"An element is a tuple of {len(features)}: map() it to (features, labels) or to a dict.")
    named = dict(features) if isinstance(features, Mapping) else {"inputs": features}
    named.update(labels if isinstance(labels, Mapping) else {"labels": labels})
    return {key: torch.tensor(np.asarray(value)) for key, value in named.items()}


class TFTrainer(Trainer):
    """A Trainer for Keras 3 models (torch backend) or torch models, with ``tf.data.Dataset`` or any other data.

    It takes the Trainer's arguments by keyword.

    Raises:
        ConfigError: ``dataloader_num_workers`` is above 0, or ``run_model`` is overridden.
    """

    def __init__(self, model: Any = None, args: TrainingArguments | None = None, **more: Any) -> None:
        args = TrainingArguments("tmp_trainer") if args is None else args
        if type(self).run_model is not TFTrainer.run_model:
            raise ConfigError("Training does not call run_model: override compute_loss instead.")
        if workers := args.dataloader_num_workers:
            raise ConfigError(f"dataloader_num_workers={workers}, but TensorFlow must not be forked. Set it to 0.")
        check_run_length(more.get("train_dataset"), args)  # the Trainer skips it if get_train_dataloader is overridden
        model = KerasModule(model) if is_from(model, "keras", "tf_keras", "tensorflow") else model
        super().__init__(model, args, **more)

    def get_train_tfdataset(self) -> Any:
        """Single elements for training, in a new order for every epoch. Override it for another pipeline."""
        size = int(self.train_dataset.cardinality())
        return self.train_dataset if size < 0 else self.train_dataset.shuffle(size, seed=self.args.seed)

    def get_eval_tfdataset(self, eval_dataset: Any = None) -> Any:
        """Single elements for evaluation: the given dataset, the one of that name, or the Trainer's own."""
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        return self.eval_dataset.get(data) if isinstance(data, str) and isinstance(self.eval_dataset, dict) else data

    def get_test_tfdataset(self, test_dataset: Any) -> Any:
        """Single elements for prediction: the given dataset. Override it for another pipeline."""
        return test_dataset

    def get_train_dataloader(self) -> Any:
        """Micro-batches of this replica for training."""
        given = self.train_dataset
        try:
            if is_from(given, "tensorflow"):
                self.train_dataset = TensorStream(self.get_train_tfdataset(), endless=True)
            return super().get_train_dataloader()
        finally:
            self.train_dataset = given

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Micro-batches of this replica for evaluation."""
        data = self.get_eval_tfdataset(eval_dataset)
        return super().get_eval_dataloader(TensorStream(data) if is_from(data, "tensorflow") else eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Micro-batches of this replica for ``predict``."""
        data = self.get_test_tfdataset(test_dataset)
        return super().get_test_dataloader(TensorStream(data) if is_from(data, "tensorflow") else data)

    def run_model(self, features: Any, labels: Any, training: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and logits of a batch of arrays; with dropout and gradients if ``training``; collective with ZeRO-3."""
        before = self.model_wrapped.training
        self.model_wrapped.train(training)
        with torch.set_grad_enabled(training):
            outputs = self.model_wrapped(**self._prepare_inputs(as_sample((features, labels))))
        self.model_wrapped.train(before)
        return outputs["loss"], outputs["logits"]
