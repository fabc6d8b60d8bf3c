"""Inputs of checkpointed layers leave the device after a layer's forward pass and are back for its backward pass."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer.training.model import activation_offload
from ds_trainer.training.model.activation_offload import HostBuffers, offload_activations
from ds_trainer.training.model.gradient_checkpointing import enable_gradient_checkpointing
from ds_trainer.utils.errors import ConfigError
from tests.support.compare import weight_distance
from tests.support.models import tiny_llama

LAYERS = 6


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of tests are large enough."""
    monkeypatch.setattr(activation_offload, "SMALLEST", 0)


class Watched:
    """A Llama with checkpointed layers that notes the inputs of layers: which of them are on the device, when."""

    def __init__(self, offload: bool, reentrant: bool = False, dropout: float = 0.0) -> None:
        self.model: Any = tiny_llama(num_hidden_layers=LAYERS, attention_dropout=dropout)
        enable_gradient_checkpointing(self.model, {"use_reentrant": reentrant})
        if offload:
            self.offload = offload_activations(self.model)
        self.inputs: list[weakref.ref[torch.UntypedStorage]] = []
        self.alive: list[int] = []
        for layer in self.model.model.layers:
            layer.register_forward_pre_hook(self._note)

    def _note(self, module: nn.Module, args: Any) -> None:
        self.inputs.append(weakref.ref(args[0].untyped_storage()))
        self.alive.append(sum(ref() is not None for ref in self.inputs))

    def step(self, rows: int = 2) -> dict[str, torch.Tensor]:
        self.model.train()
        torch.manual_seed(3)
        tokens = torch.randint(3, 61, (rows, 20))
        loss = self.model(input_ids=tokens, labels=tokens)["loss"]
        self.forward = list(self.alive)
        loss.backward()
        return {name: parameter.grad.clone() for name, parameter in self.model.named_parameters()}


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_are_the_same_and_tensors_leave_the_device(reentrant: bool) -> None:
    plain = Watched(offload=False, reentrant=reentrant, dropout=0.2)
    wanted = plain.step()
    moved = Watched(offload=True, reentrant=reentrant, dropout=0.2)
    found = moved.step()
    assert weight_distance(found, wanted) < 1e-6
    assert plain.forward == list(range(1, LAYERS + 1))  # without it, all inputs stay
    assert max(moved.forward) <= 4  # the present one, the one before it as its residual, and two whose copies may run
    offload = moved.offload
    assert offload.stored == LAYERS
    assert offload.buffers.bytes == LAYERS * 2 * 20 * 32 * 4


def test_buffers_are_used_again_by_the_next_micro_batch() -> None:
    moved = Watched(offload=True)
    for _ in range(3):
        moved.step()
    offload = moved.offload
    assert offload.stored == 3 * LAYERS and len(offload.buffers._free) == LAYERS
    assert offload.buffers.bytes == LAYERS * 2 * 20 * 32 * 4
    moved.step(rows=4)  # longer ones replace them
    assert offload.buffers.bytes == LAYERS * 4 * 20 * 32 * 4


def test_the_pool_is_bounded() -> None:
    """Two forward passes before a backward pass: the second finds no buffer, and its tensors stay on the device."""
    moved = Watched(offload=True)
    tokens = torch.randint(3, 61, (2, 20))
    losses = [moved.model.train()(input_ids=tokens, labels=tokens)["loss"] for _ in range(2)]
    offload = moved.offload
    assert offload.stored == LAYERS and offload.buffers.bytes == LAYERS * 2 * 20 * 32 * 4
    sum(losses).backward()
    found = {name: p.grad.clone() for name, p in moved.model.named_parameters()}
    plain = Watched(offload=False).model.train()
    (2 * plain(input_ids=tokens, labels=tokens)["loss"]).backward()
    assert weight_distance(found, {name: p.grad for name, p in plain.named_parameters()}) < 1e-6


def test_a_pass_without_a_backward_pass_leaves_nothing() -> None:
    moved = Watched(offload=True)
    tokens = torch.randint(3, 61, (2, 20))
    loss = moved.model.train()(input_ids=tokens, labels=tokens)["loss"]
    del loss
    gc.collect()
    assert len(moved.offload.buffers._free) == LAYERS
    with torch.no_grad():
        moved.model(input_ids=tokens)
    assert moved.offload.stored == LAYERS


def test_control_a_buffer_that_is_used_too_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: all layers share one buffer."""
    wanted = Watched(offload=False).step()
    moved = Watched(offload=True)
    shared = torch.empty(2 * 20 * 32 * 4, dtype=torch.uint8)
    monkeypatch.setattr(HostBuffers, "take", lambda self, size, pinned: shared)
    assert weight_distance(moved.step(), wanted) > 1e-2


def test_masks_and_small_tensors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "SMALLEST", 2**20)
    moved = Watched(offload=True)
    moved.step()
    assert moved.offload.stored == 0


def test_the_best_buffer_is_taken() -> None:
    buffers = HostBuffers(limit=2)
    small, large = buffers.take(100, False), buffers.take(200, False)
    assert small is not None and large is not None and buffers.take(1, False) is None
    buffers.give(large)
    buffers.give(small)
    assert buffers.take(90, False) is small
    assert buffers.take(150, False) is large
    buffers.give(small)
    bigger = buffers.take(300, False)  # the small one is dropped for it
    assert bigger is not None and len(bigger) == 300 and buffers.bytes == 500


def test_only_checkpointed_layers_count() -> None:
    model: Any = tiny_llama(num_hidden_layers=4)
    enable_gradient_checkpointing(model, {"every_n_layers": 2})
    assert offload_activations(model).buffers.limit == 2


def test_a_model_without_replaceable_checkpointing_is_refused() -> None:
    with pytest.raises(ConfigError, match="activation_offload=True, but Linear has no layers"):
        offload_activations(nn.Linear(2, 2))


def test_copies_of_a_model_train_too() -> None:
    """A reference model may be a copy."""
    model: Any = tiny_llama(num_hidden_layers=2)
    enable_gradient_checkpointing(model, None, offload=True)
    tokens = torch.randint(3, 61, (2, 20))
    copied = copy.deepcopy(model).train()
    copied(input_ids=tokens, labels=tokens)["loss"].backward()
    assert copied.model.layers[0].mlp.up_proj.weight.grad is not None
