"""Activation checkpointing changes no gradient: re-entrant or not, sharded or not, frozen or not."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.training.model.gradient_checkpointing import enable_gradient_checkpointing
from ds_trainer.utils.errors import ConfigError
from tests.support.compare import assert_equal
from tests.support.models import RaggedTokens, regression_rows, tiny_llama
from tests.support.oracle import Trajectory
from tests.support.pool import pool
from tests.support.runs import train_and_report

make_data = partial(RaggedTokens, 32)


def llama(frozen: bool) -> nn.Module:
    """With ``frozen`` as adapters leave it: only one matrix in every layer is trained."""
    model = tiny_llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or "q_proj" in name)
    return model


class Layers(nn.Module):
    """A model of its own with transformers' older method; ``outside`` counts runs of a layer."""

    def __init__(self, frozen: bool = False, named: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(6, 16)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)])
        self.head = nn.Linear(16, 1)
        self.keywords: dict[str, Any] | None = None
        self.embedding.requires_grad_(not frozen)
        if named:
            self.get_input_embeddings = lambda: self.embedding

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any]) -> None:
        self.keywords = gradient_checkpointing_kwargs

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        for layer in self.layers:
            hidden = layer(hidden) if self.keywords is None else checkpoint(layer, hidden, **self.keywords)
        loss: torch.Tensor = (self.head(hidden).squeeze(-1) - labels).square().mean()
        return loss


def run(make_model: Any, data: Any, world: int, output_dir: Path, **changes: Any) -> Trajectory:
    values = {"per_device_train_batch_size": 8 // world, "learning_rate": 2e-3, "max_grad_norm": 0.0, **changes}
    found: list[Trajectory] = pool(world).run(partial(train_and_report, make_model, data, str(output_dir), **values))
    return found[0]


@cache
def plain(frozen: bool, output_dir: Path) -> Trajectory:
    return run(partial(llama, frozen), make_data, 1, output_dir)


@pytest.fixture(scope="module")
def shared_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain")


@pytest.mark.cases(2)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["recorded", "reentrant"])
@pytest.mark.parametrize(("world", "stage"), [(1, 0), (1, 3), (2, 3)])
def test_gradient_checkpointing_does_not_change_gradients(
    world: int, stage: int, reentrant: bool, frozen: bool, tmp_path: Path, shared_dir: Path
) -> None:
    kwargs = {"use_reentrant": reentrant, "every_n_layers": world}  # of all layers, or of the first of two
    changes = {"activation_checkpointing": True, "activation_checkpointing_kwargs": kwargs, "zero_stage": stage}
    found = run(partial(llama, frozen), make_data, world, tmp_path, **changes)
    wanted = plain(frozen, shared_dir)
    assert min(wanted.grad_norms) > 1e-3
    assert_equal(found, wanted)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("reentrant", [False, True])
def test_older_method_and_frozen_embeddings(reentrant: bool, stage: int, tmp_path: Path) -> None:
    data = partial(regression_rows, 32)
    make = partial(Layers, frozen=True)
    kwargs = {"use_reentrant": reentrant}
    changes = {"activation_checkpointing": True, "activation_checkpointing_kwargs": kwargs, "zero_stage": stage}
    assert_equal(run(make, data, 1, tmp_path, **changes), run(make, data, 1, tmp_path))


def test_control_without_the_input_hook_gradients_vanish() -> None:
    """Negative control: what the hook on the embeddings is for."""
    for remedied in (False, True):
        model, row = Layers(frozen=True), regression_rows(4)
        if remedied:
            enable_gradient_checkpointing(model, {"use_reentrant": True})
            enable_gradient_checkpointing(model, {"use_reentrant": True})  # a second training adds no second hook
            assert len(model.embedding._forward_hooks) == 1
        else:
            model.gradient_checkpointing_enable({"use_reentrant": True})
        model(torch.stack([r["x"] for r in row]), torch.stack([r["labels"] for r in row])).backward()
        found = model.layers[0][0].weight.grad  # type: ignore[index]
        assert (found is not None) is remedied


def deepspeed_frozen(output_dir: Path) -> list[float]:
    config = {"activation_checkpointing": {"synchronize_checkpoint_boundary": True}}
    found = train_and_report(
        partial(llama, True),
        make_data,
        str(output_dir),
        per_device_train_batch_size=8,
        learning_rate=2e-3,
        max_grad_norm=0.0,
        activation_checkpointing=True,
        deepspeed=config,
    )
    return found.grad_norms


def test_deepspeed_checkpointing_with_frozen_embeddings(tmp_path: Path, shared_dir: Path) -> None:
    (norms,) = pool(1).run(partial(deepspeed_frozen, tmp_path))
    assert norms == pytest.approx(plain(True, shared_dir).grad_norms, rel=1e-5)


def recomputing_layers(output_dir: Path, every: int) -> tuple[list[bool], list[float], bool]:
    model: Any = tiny_llama(num_hidden_layers=4)
    args = TrainingArguments(
        str(output_dir),
        max_steps=2,
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=1,
        activation_checkpointing=every > 0,
        activation_checkpointing_kwargs={"every_n_layers": every} if every else None,
    )
    job = Trainer(model, args, train_dataset=make_data())
    job.train()
    job.engine.close()
    losses = [entry["loss"] for entry in job.state.log_history if "loss" in entry]
    return [layer.gradient_checkpointing for layer in model.model.layers], losses, model.config.use_cache


def test_every_second_layer_and_cache(tmp_path: Path) -> None:
    ((flags, wanted, _),) = pool(1).run(partial(recomputing_layers, tmp_path, 0))
    assert flags == [False] * 4
    ((flags, losses, cache_after),) = pool(1).run(partial(recomputing_layers, tmp_path, 2))
    assert sum(flags) == 2 and losses == pytest.approx(wanted, rel=1e-6)
    assert cache_after is True  # off while training, as test_use_cache shows


def test_refusals(tmp_path: Path) -> None:
    def custom_enable(model: nn.Module, **kwargs: Any) -> None:
        args = TrainingArguments(
            str(tmp_path), use_cpu=True, activation_checkpointing=True, activation_checkpointing_kwargs=kwargs
        )
        Trainer(model, args, train_dataset=regression_rows(4))

    with pytest.raises(ConfigError, match=r"Re-entrant .* with frozen parameters needs .* Layers"):
        custom_enable(Layers(frozen=True, named=False), use_reentrant=True)
    custom_enable(Layers(frozen=True, named=False))
    custom_enable(Layers(named=False), use_reentrant=True)
    with pytest.raises(ConfigError, match="moves activations from the GPU to the host, but this run is on the CPU"):
        custom_enable(tiny_llama(), offload=True)
    with pytest.raises(ConfigError, match="Sequential has no activation_checkpointing_enable"):
        custom_enable(nn.Sequential())
    with pytest.raises(ConfigError, match=r"checkpointing_enable\(\) does not take every_n_layers and offload"):
        enable_gradient_checkpointing(Layers(), {"every_n_layers": 2, "offload": True})
