"""Reads DeepSpeed checkpoints of ZeRO stage 0: one file, whose optimizer numbers its parameters without names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from ds_trainer.checkpoint.converters.universal_reader import ConvertedState, model_files, without_parameters
from ds_trainer.checkpoint.protocol.other_formats import load_deepspeed_pickle
from ds_trainer.engine.state.state_shards import BUFFER, MASTER, WEIGHT, StateShard, elementwise, scalar_state_keys
from ds_trainer.parallel.shard_slices import ShardSlice
from ds_trainer.utils.errors import ConfigError


class Zero0Checkpoint:
    """A checkpoint of stage 0, in float32 or with one master weight tensor per parameter.

    Args:
        directory: the directory with ``mp_rank_00_model_states.pt``.
        trusted: unpickle arbitrary objects in the file.

    Raises:
        ConfigError: it has no optimizer, contains tensor-parallel slices, or was written by a fused 16-bit optimizer.
    """

    def __init__(self, directory: Path, trusted: bool) -> None:
        files = model_files(directory)
        if len(files) > 1:
            raise ConfigError(
                f"{directory} contains slices of {len(files)} tensor-parallel ranks at ZeRO stage 0, which DeepSpeed's "
                "converter does not support. Save it with ZeRO stage 1 or higher."
            )
        model = load_deepspeed_pickle(files[0], trusted)
        wrapper = model.get("optimizer")
        if not wrapper:
            raise ConfigError(f"{files[0]} contains only weights and no optimizer, so training cannot resume from it.")
        if "fp32_groups_flat" in wrapper:
            raise ConfigError(
                f"{files[0]} was written at ZeRO stage 0 with a fused 16-bit optimizer, which flattens parameters "
                "without recording their order. Save it with ZeRO stage 1 or higher."
            )
        self._masters: Sequence[torch.Tensor] = [
            tensor for group in wrapper.get("fp32_groups") or () for tensor in group
        ]
        self._optimizer = wrapper.get("optimizer_state_dict", wrapper)
        self._model = model
        self._path = files[0]
        scale = {name: wrapper[name] for name in ("cur_scale", "cur_iter", "last_overflow_iter") if name in wrapper}
        self.state = ConvertedState(model, without_parameters(self._optimizer["param_groups"]), scale)

    def state_shards(self) -> Iterator[StateShard]:
        """Yields all tensors and fills :attr:`ConvertedState.scalars`.

        Raises:
            ConfigError: the order of the optimizer's parameters is unknown.
        """
        module, buffers = self._model["module"], set(self._model.get("buffer_names") or ())
        named = {name: tensor for name, tensor in module.items() if name not in buffers}
        names = self._names(named)
        stepped = set(names.values())
        masters = self._masters or [named[name] for name in names.values()]
        states = [self._optimizer["state"].get(number, {}) for number in names]
        scalar_keys = scalar_state_keys(zip(masters, states, strict=True))
        for name, master, state in zip(names.values(), masters, states, strict=True):
            whole, tensors = ShardSlice.whole(master.shape), elementwise(master, state, scalar_keys)
            yield StateShard(name, MASTER, whole, master.reshape(-1))
            for key, value in tensors.items():
                yield StateShard(name, key, whole, value.reshape(-1))
            for key in state.keys() - tensors.keys():
                self.state.scalars.setdefault(name, {})[key] = state[key]
        for name, tensor in module.items():
            kind = BUFFER if name in buffers else WEIGHT
            if name not in stepped and not _is_tied(tensor, named, stepped):
                yield StateShard(name, kind, ShardSlice.whole(tensor.shape), tensor.reshape(-1))

    def _names(self, named: Mapping[str, torch.Tensor]) -> dict[int, str]:
        """Maps the optimizer's parameter numbers to names, in the order of the parameter groups.

        Parameters are numbered group by group. All trainers use one of two groupings, in the order of the model: all
        parameters in one group, or one group with weight decay and one without (biases and norms). Shapes must match.
        """
        groups = [list(group["params"]) for group in self._optimizer["param_groups"]]
        numbers = [number for group in groups for number in group]
        unique = {n: t for i, (n, t) in enumerate(named.items()) if not _is_tied(t, named, set(list(named)[:i]))}
        with_decay = [name for name, tensor in unique.items() if tensor.dim() > 1]
        without_decay = [name for name in unique if name not in set(with_decay)]
        orders = {1: list(unique), 2: [*with_decay, *without_decay]}
        ordered = orders.get(len(groups), [])
        state = self._optimizer["state"]
        matches = len(ordered) == len(numbers) and all(
            any(getattr(value, "shape", None) == unique[name].shape for value in state[number].values())
            for number, name in zip(numbers, ordered, strict=True)
            if state.get(number)
        )
        if not matches or (len(groups) == 2 and len(groups[0]) != len(with_decay)):
            raise ConfigError(
                f"{self._path} was written at ZeRO stage 0, where DeepSpeed numbers the optimizer's parameters without "
                f"naming them. Its {len(groups)} parameter groups with {len(numbers)} parameters match neither one "
                f"group with all {len(unique)} parameters of the model nor two groups with and without weight decay. "
                "Save it with ZeRO stage 1 or higher."
            )
        return dict(zip(numbers, ordered, strict=True))


def _is_tied(tensor: torch.Tensor, named: Mapping[str, torch.Tensor], before: set[str]) -> bool:
    """Whether ``tensor`` is another name of one of the tensors named ``before``."""
    return any(
        named[name].untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        and named[name].storage_offset() == tensor.storage_offset()
        for name in before & set(named)
    )
