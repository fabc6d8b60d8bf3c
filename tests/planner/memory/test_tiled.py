"""A layer with a tiled MLP and tiled norms at the width of 8B, counted with fake tensors, beside the planner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ds_trainer.engine.tiling.per_token import tile_modules
from ds_trainer.planner.activations.device_probe import LiveTensors, _fake_weights, _one_sequence
from ds_trainer.planner.activations.probe import gpu_dropout
from ds_trainer.planner.candidate import Candidate
from ds_trainer.planner.memory.micro_batch import micro_batch
from ds_trainer.planner.meta_model import meta_model
from ds_trainer.planner.planned_model import PlannedModel
from tests.planner.test_anchors import LLAMA_8B

TOKENS, LAYERS = 32768, 2


class _Counted:
    """Bytes of the decoder layers: kept after the forward pass, and at most in the forward and backward passes."""

    def __init__(self, tiled: bool, checkpointing: bool) -> None:
        config = {**LLAMA_8B, "num_hidden_layers": LAYERS, "vocab_size": 1024, "use_cache": False}
        model: Any = meta_model(config, "8B").to(torch.bfloat16).train()
        if tiled:
            assert len(tile_modules(model, torch.device("cpu")).mlps) == LAYERS
        _fake_weights(model)
        live = LiveTensors()
        live.ignore((*model.parameters(), *model.buffers()))
        with gpu_dropout(), _one_sequence(), next(model.parameters()).fake_mode:
            hidden = torch.empty(1, TOKENS, LLAMA_8B["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
            positions = torch.arange(TOKENS).unsqueeze(0)
            rotary = model.model.rotary_emb(hidden, positions)
            live.ignore((hidden, positions, *rotary))
            with live:
                for layer in model.model.layers:
                    given = {"position_embeddings": rotary, "attention_mask": None, "position_ids": positions}
                    if checkpointing:
                        hidden = checkpoint(layer, hidden, use_reentrant=False, preserve_rng_state=False, **given)
                    else:
                        hidden = layer(hidden, **given)
                self.kept, self.forward = live.now, live.peak
                gradient = torch.empty_like(hidden)
                live.reset_peak()
                hidden.backward(gradient)
                weights = sum(one.grad.nbytes for one in model.model.layers.parameters() if one.grad is not None)
                self.backward = live.peak - weights // 2 + hidden.nbytes  # the input of the first layer was not counted


@pytest.fixture
def no_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors have no random numbers to compare."""
    monkeypatch.setattr(torch, "get_rng_state", lambda: None)
    monkeypatch.setattr(torch, "set_rng_state", lambda state: None)


@pytest.mark.cases(1)
@pytest.mark.usefixtures("no_random_state")
@pytest.mark.parametrize(
    ("tiled", "checkpointing"),
    [pytest.param(False, True, marks=pytest.mark.extended), (False, False), (True, True), (True, False)],
)
def test_a_layer_of_8b(tiled: bool, checkpointing: bool) -> None:
    run = Candidate(1, TOKENS, checkpointing=checkpointing, tiled_mlp=tiled)
    model = PlannedModel.from_config({**LLAMA_8B, "num_hidden_layers": LAYERS})
    counted, planned = _Counted(tiled, checkpointing), micro_batch(model, run)
    boundary = planned.output
    assert planned.kept == pytest.approx(counted.kept, rel=0.05)
    assert planned.kept + planned.recomputed + planned.backward == pytest.approx(counted.backward, rel=0.07)
    if checkpointing:
        assert planned.forward == pytest.approx(counted.forward - (LAYERS - 1) * boundary, rel=0.05)
    other = micro_batch(model, replace(run, tiled_mlp=not tiled))
    assert other.kept + other.recomputed + other.backward != pytest.approx(counted.backward, rel=0.3)
