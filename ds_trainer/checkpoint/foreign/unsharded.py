"""DeepSpeed's checkpoints of ZeRO stage 0: one file, whose optimizer numbers its parameters but does not name them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from ds_trainer.checkpoint.foreign.engine_shards import ForeignState, model_files, without_parameters
from ds_trainer.checkpoint.protocol.foreign_formats import read_foreign
from ds_trainer.engine.state.pieces import BUFFER, MASTER, WEIGHT, Piece, elementwise, numbers_among
from ds_trainer.parallel.places import Place
from ds_trainer.utils.errors import ConfigError


class UnshardedFile:
    """A checkpoint of stage 0, float32 or with one master for each parameter.

    Args:
        directory: with ``mp_rank_00_model_states.pt``.
        trusted: unpickle whatever is in it.

    Raises:
        ConfigError: it holds no optimizer, slices of tensor parallelism, or an optimizer whose order is not clear.
    """

    def __init__(self, directory: Path, trusted: bool) -> None:
        files = model_files(directory)
        if len(files) > 1:
            raise ConfigError(
                f"{directory} holds the slices of {len(files)} tensor-parallel ranks at ZeRO stage 0, which "
                "DeepSpeed's converter does not read. Save it with ZeRO stage 1 or more."
            )
        model = read_foreign(files[0], trusted)
        wrapper = model.get("optimizer")
        if not wrapper:
            raise ConfigError(f"{files[0]} holds no optimizer: there are weights only, and nothing to resume from.")
        if "fp32_groups_flat" in wrapper:
            raise ConfigError(
                f"{files[0]} was written at ZeRO stage 0 with a fused optimizer in 16 bits, which flattens parameters "
                "without saying which. Save it with ZeRO stage 1 or more."
            )
        self._masters: Sequence[torch.Tensor] = [
            tensor for group in wrapper.get("fp32_groups") or () for tensor in group
        ]
        self._optimizer = wrapper.get("optimizer_state_dict", wrapper)
        self._model = model
        self._path = files[0]
        scale = {name: wrapper[name] for name in ("cur_scale", "cur_iter", "last_overflow_iter") if name in wrapper}
        self.state = ForeignState(model, without_parameters(self._optimizer["param_groups"]), scale)

    def pieces(self) -> Iterator[Piece]:
        """All tensors; fills :attr:`ForeignState.scalars` on the way.

        Raises:
            ConfigError: the optimizer's parameters are not in an order that is known.
        """
        module, buffers = self._model["module"], set(self._model.get("buffer_names") or ())
        named = {name: tensor for name, tensor in module.items() if name not in buffers}
        names = self._names(named)
        stepped = set(names.values())
        masters = self._masters or [named[name] for name in names.values()]
        states = [self._optimizer["state"].get(number, {}) for number in names]
        numbers = numbers_among(zip(masters, states, strict=True))
        for name, master, of in zip(names.values(), masters, states, strict=True):
            place, tensors = Place.whole(master.shape), elementwise(master, of, numbers)
            yield Piece(name, MASTER, place, master.reshape(-1))
            for key, value in tensors.items():
                yield Piece(name, key, place, value.reshape(-1))
            for key in of.keys() - tensors.keys():
                self.state.scalars.setdefault(name, {})[key] = of[key]
        for name, tensor in module.items():
            kind = BUFFER if name in buffers else WEIGHT
            if name not in stepped and not _is_tied(tensor, named, stepped):
                yield Piece(name, kind, Place.whole(tensor.shape), tensor.reshape(-1))

    def _names(self, named: Mapping[str, torch.Tensor]) -> dict[int, str]:
        """Which parameter a number stands for, in the order of the parameter groups.

        Parameters are numbered group by group. All trainers group them in one of two ways, in the order of the model:
        all in one group, or those with weight decay and those without (biases and norms). Shapes must agree.
        """
        groups = [list(group["params"]) for group in self._optimizer["param_groups"]]
        numbers = [number for group in groups for number in group]
        unique = {n: t for i, (n, t) in enumerate(named.items()) if not _is_tied(t, named, set(list(named)[:i]))}
        decayed = [name for name, tensor in unique.items() if tensor.dim() > 1]
        rest = [name for name in unique if name not in set(decayed)]
        orders = {1: list(unique), 2: [*decayed, *rest]}
        found = orders.get(len(groups), [])
        state = self._optimizer["state"]
        alike = len(found) == len(numbers) and all(
            any(getattr(value, "shape", None) == unique[name].shape for value in state[number].values())
            for number, name in zip(numbers, found, strict=True)
            if state.get(number)
        )
        if not alike or (len(groups) == 2 and len(groups[0]) != len(decayed)):
            raise ConfigError(
                f"{self._path} was written at ZeRO stage 0, where DeepSpeed numbers the optimizer's parameters without "
                f"naming them; its {len(groups)} parameter groups of {len(numbers)} parameters are neither all "
                f"{len(unique)} of the model in one group nor those with and without weight decay in two. Save it with "
                "ZeRO stage 1 or more."
            )
        return dict(zip(numbers, found, strict=True))


def _is_tied(tensor: torch.Tensor, named: Mapping[str, torch.Tensor], before: set[str]) -> bool:
    """Whether ``tensor`` is one of those named ``before``, under a second name."""
    return any(
        named[name].untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        and named[name].storage_offset() == tensor.storage_offset()
        for name in before & set(named)
    )
