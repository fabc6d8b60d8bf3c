"""``ChunkedLoss``: lets a model compute its loss without the logits of a whole sequence.

Inside :meth:`ChunkedLoss.deferring`, the head of the model returns deferred logits
(:mod:`ds_trainer.parallel.deferred_logits`): the cross-entropy of the model, or of a loss function of the user, is
computed in tiles. Code that reads logits gets them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ds_trainer.data.columns import base_model
from ds_trainer.parallel.deferred_logits import DeferredLogits
from ds_trainer.training.model.chunked_loss.linear_head import LinearHead, head_problem, output_embedding

PAYS_FROM = 2**26
"""Bytes of the logits of a micro-batch in float32 from which tiles are used by default."""


def chunked_loss_problems(model: nn.Module, chunk_tokens: int | None, z_loss: float, compiled: bool) -> list[str]:
    """Reasons why the arguments cannot be followed, one sentence each.

    Args:
        model: the model of the user.
        chunk_tokens: ``loss_chunk_tokens``.
        z_loss: ``z_loss_factor``.
        compiled: whether the model will be compiled.
    """
    asked = [f"loss_chunk_tokens={chunk_tokens}"] if chunk_tokens else []
    asked += [f"z_loss_factor={z_loss}"] if z_loss else []
    problem = "a compiled model computes its logits whole" if compiled else head_problem(output_embedding(model))
    if not asked or problem is None:
        return []
    remedy = " and ".join(
        [*(["loss_chunk_tokens=0"] if chunk_tokens else []), *(["z_loss_factor=0"] if z_loss else [])]
    )
    return [f"{' and '.join(asked)}: {type(base_model(model)).__name__}: {problem}. Set {remedy}."]


def uses_tiles(chunk_tokens: int | None, tokens: int, classes: int) -> bool:
    """Whether the loss of ``tokens`` with a vocabulary of ``classes`` is computed in tiles."""
    if chunk_tokens is None:
        return tokens * classes * 4 >= PAYS_FROM
    return chunk_tokens > 0


class ChunkedLoss:
    """Defers the logits of one model.

    Args:
        chunk_tokens: ``loss_chunk_tokens``: tokens of a tile, 0 for no tiles, None to use them where they pay.
        z_loss: ``z_loss_factor``; in training only, so that the loss of an evaluation stays a likelihood.

    Attributes:
        one_pass: whether a sum of losses is computed in one pass: there is room for its gradients between the passes.
        tokens_from: with fewer tokens in a micro-batch, :meth:`deferring` has no effect; 0 until the model is known.
    """

    def __init__(self, chunk_tokens: int | None, z_loss: float = 0.0) -> None:
        self._chunk_tokens = chunk_tokens
        self._z_loss = z_loss
        self.one_pass = True
        self._model: nn.Module | None = None
        self._head: LinearHead | None = None
        self._module: nn.Module | None = None
        self._is_known = False  # of these three, what they are now
        self.tokens_from = 0.0 if chunk_tokens != 0 or z_loss else math.inf
        self._active = False
        self._checked = False

    def release(self) -> None:
        """Drop the references to the model."""
        self._model = self._head = self._module = None
        self._is_known, self.tokens_from = False, 0.0

    def uses_tiles(self, model: nn.Module, tokens: int) -> bool:
        """Whether the loss of a batch of ``tokens`` is computed in tiles."""
        head = self._head_of(base_model(model))
        return head is not None and uses_tiles(self._chunk_tokens, tokens, head.classes)

    @contextmanager
    def forced(self, chunk_tokens: int) -> Iterator[None]:
        """Inside, the loss has tiles of ``chunk_tokens`` whatever the size of the batch; 0: no tiles. No z-loss."""
        before = self._chunk_tokens, self._checked, self._z_loss
        self._chunk_tokens, self._checked, self._z_loss = chunk_tokens, True, 0.0
        self._is_known = False
        try:
            yield
        finally:
            self._chunk_tokens, self._checked, self._z_loss = before
            self._is_known, self.tokens_from = False, 0.0

    @contextmanager
    def deferring(self, model: nn.Module, always: bool = False) -> Iterator[None]:
        """Inside, the head of ``model`` returns deferred logits.

        Args:
            model: the engine, or the model if there is none.
            always: also for few tokens. Ranks have batches of different sizes: needed if all must do the same.
        """
        if self._active or (self._chunk_tokens == 0 and not self._z_loss):
            yield
            return
        core = base_model(model)
        head = self._head_of(core)
        module = self._module
        if head is None or module is None:
            self.tokens_from = math.inf
            yield
            return
        # Whether code of others may read the output of `core` before the logits are given back.
        modules = (getattr(hook, "__module__", None) or "" for hook in core._forward_hooks.values())
        if any(not name.startswith(("deepspeed.", "ds_trainer.")) for name in modules) or _is_compiled(model, core):
            yield
            return
        if self._chunk_tokens is None and not self._z_loss:
            self.tokens_from = PAYS_FROM / (4 * head.classes)
        outer = model if model is not core else None
        kept: list[tuple[Any, DeferredLogits]] = []
        # DeepSpeed's hooks at the outputs of modules are operations on tensors, which would read the logits.
        handles = []
        if outer is not None:
            handles += [
                core.register_forward_hook(lambda _, __, output: _taken(output, kept), prepend=True),
                outer.register_forward_hook(lambda _, __, output: _given_back(output, kept)),
            ]
        self._active = True
        # nn.Module.__call__ calls this instead of the hooks and forward, if it is set.
        module.__dict__["_compiled_call_impl"] = self._call(head, module, core, always)
        try:
            yield
        finally:
            self._active = False
            del module.__dict__["_compiled_call_impl"]
            for handle in handles:
                handle.remove()

    def _head_of(self, core: nn.Module) -> LinearHead | None:
        module = output_embedding(core)
        if not (self._model is core and self._module is module and self._is_known):
            self._model, self._module, self._head, self._is_known = core, module, None, True
            if module is not None and head_problem(module) is None:
                self._head = LinearHead(
                    module,
                    self._chunk_tokens or None,
                    lambda: self._z_loss if core.training else 0.0,
                    lambda: self.one_pass,
                    lambda: None if self._checked else self._check,
                )
        return self._head

    def _check(self, *computed: Any) -> None:
        from ds_trainer.training.model.chunked_loss.head_check import check_tiles

        self._checked = True
        check_tiles(*computed)

    def _call(self, head: LinearHead, module: Any, core: nn.Module, always: bool) -> Any:
        def call(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            plain = bool(args or kwargs) or not isinstance(hidden, torch.Tensor) or not head.can_run()
            needed = always or (bool(self._z_loss) and core.training)
            if plain or not (needed or uses_tiles(self._chunk_tokens, hidden.shape[:-1].numel(), head.classes)):
                return module._call_impl(hidden, *args, **kwargs)
            kind = hidden.device.type
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
            return DeferredLogits.of(head, hidden, head.classes, dtype)

        return call


def _is_compiled(*modules: nn.Module) -> bool:
    """Whether the user has compiled the model as a whole, with its head."""
    parts = (getattr(module, "module", module) for module in modules)
    return any(getattr(part, "_compiled_call_impl", None) is not None for part in parts)


def _taken(output: Any, kept: list[tuple[Any, DeferredLogits]]) -> Any:
    """``output`` with None in place of deferred logits, which are added to ``kept`` with their key."""
    kept.clear()
    if isinstance(output, Mapping):
        kept += [(key, value) for key, value in output.items() if isinstance(value, DeferredLogits)]
        for key, _ in kept:
            output[key] = None  # type: ignore[index]
    elif isinstance(output, tuple) and not hasattr(output, "_fields"):
        kept += [(index, value) for index, value in enumerate(output) if isinstance(value, DeferredLogits)]
        return tuple(None if isinstance(value, DeferredLogits) else value for value in output)
    elif isinstance(output, DeferredLogits):
        return output.read()
    return output


def _given_back(output: Any, kept: list[tuple[Any, DeferredLogits]]) -> Any:
    """``output`` with the deferred logits of ``kept`` at their keys."""
    if isinstance(output, Mapping):
        for key, value in kept:
            output[key] = value  # type: ignore[index]
    elif isinstance(output, tuple) and kept:
        values = list(output)
        for index, value in kept:
            values[index] = value
        output = tuple(values)
    kept.clear()
    return output
