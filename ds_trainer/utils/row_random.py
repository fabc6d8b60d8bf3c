"""Random numbers that are the same for every row of a tensor, and for every number of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_SIZED = {"aten::rand", "aten::randn"}
_LIKE = {"aten::rand_like", "aten::randn_like", "aten::randint_like"}
_IN_PLACE = {"aten::uniform_", "aten::normal_", "aten::exponential_", "aten::log_normal_", "aten::random_"}


class SameForRows(TorchDispatchMode):
    """Inside, a random tensor has the same numbers in each row (index of its first dimension).

    So a model that draws for each sample (masked autoencoders, diffusion) gives a sample the same loss alone and in a
    batch. Only draws that do not depend on other tensors are changed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seed = torch.initial_seed() % 2**31
        self._draws = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, overload = func._schema.name, func._schema.overload_name
        if name in _SIZED or (name == "aten::randint" and overload in ("", "low")):
            place = 0 if name in _SIZED else 1 + (overload == "low")
            size = list(args[place])
            if size:
                self._reseed()
                row = func(*args[:place], [1, *size[1:]], *args[place + 1 :], **kwargs)
                return row.expand(size).contiguous()
        elif name in _LIKE and args[0].dim():
            self._reseed()
            return func(args[0][:1], *args[1:], **kwargs).expand_as(args[0]).contiguous()
        elif name == "aten::native_dropout" and args[2] and args[0].dim():  # of CUDA; the CPU's is made of the others
            self._reseed()
            row = func(torch.ones_like(args[0][:1]), *args[1:], **kwargs)
            return args[0] * row[0], row[1].expand_as(args[0]).contiguous()
        elif (name in _IN_PLACE or (name == "aten::bernoulli_" and overload == "float")) and args[0].dim():
            self._reseed()
            row = func(torch.empty_like(args[0][:1]), *args[1:], **kwargs)
            return args[0].copy_(row.expand_as(args[0]))
        return func(*args, **kwargs)

    def _reseed(self) -> None:
        """The numbers of a draw must not depend on how many earlier draws took."""
        self._draws += 1
        torch.manual_seed(self._seed + self._draws)
