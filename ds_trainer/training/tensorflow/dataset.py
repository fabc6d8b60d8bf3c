"""A ``tf.data.Dataset`` as a stream of samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from ds_trainer.utils.errors import ConfigError

_SAME_ELEMENTS = ("_PrefetchDataset", "_RepeatDataset", "_ShuffleDataset", "_TakeDataset", "_OptionsDataset")


def is_tf_dataset(data: Any) -> bool:
    """Whether ``data`` is a ``tf.data.Dataset``; does not import tensorflow."""
    return any(base.__module__.startswith("tensorflow.") for base in type(data).__mro__)


def as_sample(element: Any) -> dict[str, Any]:
    """``(features, labels)`` or a dict of arrays as one dict of torch tensors.

    A dict of features keeps its names, an array of them is ``inputs``; labels are ``labels`` or keep their names.

    Raises:
        ConfigError: it is neither, has sample weights, or holds something that torch has no type for.
    """
    features, labels = element if isinstance(element, tuple) and len(element) == 2 else (element, None)
    parts = {} if labels is None else dict(labels) if isinstance(labels, Mapping) else {"labels": labels}
    if isinstance(features, (tuple, list)):
        raise ConfigError(f"An element is a tuple of {len(features)}: map() it to (features, labels) or to a dict.")
    parts = {**(features if isinstance(features, Mapping) else {"inputs": features}), **parts}
    try:
        return {key: value if isinstance(value, torch.Tensor) else torch.tensor(value) for key, value in parts.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        kinds = ", ".join(f"{key}: {np.asarray(value).dtype}" for key, value in parts.items())
        raise ConfigError(f"An element cannot become torch tensors ({kinds}): map() it to numbers.") from error


class TensorStream(IterableDataset[Any]):
    """The elements of a dataset, one sample each; epoch ``e`` is the dataset's iteration number ``e``.

    Args:
        dataset: unbatched; the Trainer batches. A shuffle in it needs a seed, so that all ranks read the same order.
        endless: whether it may repeat for ever.

    Raises:
        ConfigError: it is batched or endless, or TensorFlow holds this process's GPUs.
    """

    def __init__(self, dataset: Any, endless: bool = False) -> None:
        import tensorflow as tf

        if tf.config.get_visible_devices("GPU"):
            raise ConfigError(
                "TensorFlow would take the GPU's memory: call tf.config.set_visible_devices([], 'GPU') right after "
                "`import tensorflow as tf`, before the first dataset is made."
            )
        inner = dataset
        while type(inner).__name__ in _SAME_ELEMENTS:
            inner = inner._inputs()[0]
        if "BatchDataset" in type(inner).__name__ and "Unbatch" not in type(inner).__name__:
            raise ConfigError("The tf.data.Dataset is batched: leave batch() out, or append unbatch().")
        self._size = int(dataset.cardinality())
        if self._size == tf.data.INFINITE_CARDINALITY and not endless:
            raise ConfigError("The tf.data.Dataset repeats for ever, so its evaluation would not end: add take(n).")
        self.dataset = dataset
        self._epoch = self._begun = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration reads."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for _ in range(self._begun, self._epoch):  # after resuming: shuffles count the iterators
            iter(self.dataset)
        self._begun = max(self._begun, self._epoch) + 1
        return map(as_sample, self.dataset.as_numpy_iterator())

    def __len__(self) -> int:
        if self._size < 0:
            raise TypeError("The cardinality of the tf.data.Dataset is unknown or infinite.")
        return self._size
