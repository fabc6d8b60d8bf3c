"""A Keras 3 model, built on the torch backend, as a module that the Trainer trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ds_trainer.utils.errors import ConfigError

_ELSEWHERE = (
    "{0} is a Keras model of the {1} backend: its weights are no torch parameters, so a DeepSpeed engine cannot train "
    "them. Set the environment variable KERAS_BACKEND=torch before the first `import keras`, build the model and load "
    "its weights (model.load_weights('x.weights.h5')); or load them into a torch class. transformers 5 has no "
    "TensorFlow models any more: take the torch class of the same name without TF."
)


def is_keras(model: Any) -> bool:
    """Whether ``model`` is a Keras layer or model of any version and backend (or another module of TensorFlow)."""
    return any(base.__module__.split(".")[0] in ("keras", "tf_keras", "tensorflow") for base in type(model).__mro__)


class KerasModule(nn.Module):
    """``{"loss", "logits"}`` of a compiled Keras model; without labels in the batch only ``"logits"``.

    Called as it is, a Keras model on the torch backend ignores ``train()`` and ``eval()`` (dropout is always off), its
    layers are no submodules (ZeRO-3 never gathers them), and what it updates by itself (moving averages, counters of
    its random numbers) are parameters, which ZeRO-3 throws away. Here the mode is handed on, every layer of
    ``model.layers`` is a submodule that holds its weights, and that state is in buffers.

    Args:
        model: built, and compiled with its loss. Its optimizer and metrics are not used.

    Raises:
        ConfigError: it has another backend, no weights yet, or two weights of one name.
    """

    accepts_loss_kwargs = False  # the loss is the mean over the micro-batch
    keras_model: Any

    def __init__(self, model: Any) -> None:
        if not isinstance(model, nn.Module):
            backend = __import__("keras").backend.backend() if "keras.src" in type(model).__module__ else "tensorflow"
            raise ConfigError(_ELSEWHERE.format(type(model).__name__, backend))
        if not model.built:
            raise ConfigError(f"{type(model).__name__} has no weights yet: call it on a batch, or build() it.")
        super().__init__()
        object.__setattr__(self, "keras_model", model)  # no submodule: it would hold every weight once more
        self._policies = [(layer, layer.dtype_policy) for layer in model._flatten_layers()]
        self._state: list[tuple[nn.Module, str, Any]] = []
        self._seeds: list[Any] = []
        self._adopted = {id(variable) for variable in model.metrics_variables}
        for layer in model.layers:
            self.add_module(layer.name.replace(".", "_"), layer)
            self._adopt(layer, layer, f"{layer.path}/")
        self._adopt(self, model, f"{model.path}/")

    def _adopt(self, owner: nn.Module, layer: Any, prefix: str) -> None:
        """Make the variables of ``layer`` parameters and buffers of ``owner``."""
        for part in layer.modules():
            part._modules.pop("_torch_params", None)  # Keras' own list, in which every parent has them again
            part.__dict__["_torch_params"] = {}
        weights = {id(variable) for part in layer._flatten_layers() for variable in part._trainable_variables}
        for variable in layer.variables:
            key = variable.path.removeprefix(prefix)
            if id(variable) in self._adopted:
                continue
            if key in owner._parameters or key in owner._buffers:
                raise ConfigError(f"Two variables of the Keras model are called {variable.path}: rename a layer.")
            self._adopted.add(id(variable))
            if id(variable) in weights:
                owner._parameters[key] = variable._value
            else:
                owner._buffers[key] = variable._value = variable._value.detach()
                self._state.append((owner, key, variable))
                if key.endswith("seed_generator_state"):
                    owner._non_persistent_buffers_set.add(key)
                    self._seeds.append(variable)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> KerasModule:
        """As every module's; then Keras is told of buffers that moved and of the weights' new type."""
        super()._apply(fn, recurse)
        for owner, key, variable in self._state:
            variable._value = owner._buffers[key]
        found = {str(p.dtype).removeprefix("torch.") for p in self.parameters() if p.is_floating_point()}
        for layer, policy in self._policies:
            layer.dtype_policy = policy if policy.variable_dtype in found or not found else min(found)
        return self

    def forward(self, **batch: Any) -> dict[str, Any]:
        """Loss (the compiled one, with regularisation) and logits of ``batch``.

        Args:
            batch: ``labels``, and either ``inputs`` or the model's inputs by name.
        """
        import keras

        labels = batch.pop("labels", None)
        features = batch["inputs"] if set(batch) == {"inputs"} else batch
        if self.training:  # Keras' own counters are the same on all ranks; the Trainer seeds torch's generator for each
            for seed in self._seeds:
                seed._value.copy_(torch.randint(2**31 - 1, (2,)))
        with keras.device(str(next(self.parameters()).device)):
            logits = self.keras_model(features, training=self.training)
            if labels is None:
                if self.training and self.keras_model.losses:
                    raise ConfigError("A compute_loss_func does not see the Keras model's regularisation: compile it.")
                return {"logits": logits}
            if not self.keras_model.compiled:
                raise ConfigError("The Keras model has no loss: compile(loss=...) it, or pass a compute_loss_func.")
            loss = self.keras_model.compute_loss(y=labels, y_pred=logits, training=self.training)
        return {"loss": loss, "logits": logits}
