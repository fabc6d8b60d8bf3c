"""Tiled MLPs and offloaded activations train like plain PyTorch, under every ZeRO stage and every axis."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer import ConfigError, Trainer, TrainingArguments
from ds_trainer.engine.tiling import tiled_forward
from ds_trainer.training.assembly import Assembly
from ds_trainer.training.model import activation_offload
from tests.support.collectives import Collectives
from tests.support.compare import assert_equal, distances
from tests.support.layouts import DATA, MODELS, Documents, documents_as_rows, pad
from tests.support.oracle import Trajectory, train_plainly
from tests.support.pool import RankFailure, pool
from tests.support.runs import train_and_report

ADAM_EPSILON = 1e-5
GLOBAL_BATCH = 16


def adamw(model: torch.nn.Module, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1.0, eps=ADAM_EPSILON)


def llama(seed: int = 0) -> torch.nn.Module:
    return MODELS["grouped_query"](seed)


def with_adapters() -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "up_proj", "down_proj"]))


MAKERS = {"llama": llama, "adapters": with_adapters}


@cache
def reference(model: str) -> Trajectory:
    data = Documents(DATA["padded"]())
    return train_plainly(MAKERS[model](), data, optimizer=adamw, learning_rate=2e-3, collate=documents_as_rows)


class Watched(Trainer):
    """Every tensor is large enough to be moved; counts what was tiled and moved."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        activation_offload.SMALLEST, kept = 0, activation_offload.SMALLEST
        created: list[activation_offload.ActivationOffload] = []
        calls = [0]
        init, apply = activation_offload.ActivationOffload.__init__, tiled_forward._Tiled.apply

        def counted(*args: Any) -> Any:
            calls[0] += 1
            return apply(*args)

        def noted(self: Any, layers: int) -> None:
            init(self, layers)
            created.append(self)

        activation_offload.ActivationOffload.__init__ = noted  # type: ignore[method-assign]
        tiled_forward._Tiled.apply = counted  # type: ignore[method-assign]
        try:
            return super().train(*args, **kwargs)
        finally:
            activation_offload.SMALLEST = kept
            activation_offload.ActivationOffload.__init__ = init  # type: ignore[method-assign]
            tiled_forward._Tiled.apply = apply  # type: ignore[method-assign]
            assert (calls[0] > 0) is bool(self.args.tiled_mlp)
            assert [offload.stored > 0 for offload in created] == [True] * bool(self.args.activation_offload)


def run(
    world: int,
    output_dir: Path,
    model: str = "llama",
    accumulation: int = 2,
    trainer: type[Trainer] = Watched,
    **values: Any,
) -> list[Trajectory]:
    sharded = 1
    for axis in ("tensor", "context", "sequence"):
        sharded *= values.get(f"{axis}_parallel_size", 1)
    arguments = {
        "optim": "adamw_torch_fused",
        "learning_rate": 2e-3,
        "adam_epsilon": ADAM_EPSILON,
        "max_grad_norm": 0.0,
        "per_device_train_batch_size": GLOBAL_BATCH * sharded // (world * accumulation),
        "gradient_accumulation_steps": accumulation,
        **values,
    }
    job = partial(train_and_report, MAKERS[model], DATA["padded"], str(output_dir), trainer, pad, **arguments)
    found: list[Trajectory] = pool(world).run(job)
    return found


EVERYTHING: dict[str, Any] = {"long_context": True, "activation_offload": True}
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"ZeRO {stage}": (2, {"zero_stage": stage, "tiled_mlp": True}) for stage in (0, 3)},
    **{f"ZeRO {stage}, everything": (2, {"zero_stage": stage, **EVERYTHING}) for stage in (1, 2, 3)},
    "re-entrant": (2, {"zero_stage": 3, **EVERYTHING, "activation_checkpointing_kwargs": {"use_reentrant": True}}),
    "tensor parallel": (2, {"zero_stage": 1, "tensor_parallel_size": 2, **EVERYTHING}),
    "sequence parallel": (2, {"zero_stage": 2, "sequence_parallel_size": 2, **EVERYTHING}),
    "context parallel, offload only": (
        2,
        {"context_parallel_size": 2, "activation_checkpointing": True, "activation_offload": True},
    ),
    "all axes": (
        8,
        {"zero_stage": 3, **{f"{axis}_parallel_size": 2 for axis in ("tensor", "context", "sequence")}, **EVERYTHING},
    ),
    "adapters": (2, {"zero_stage": 3, "model": "adapters", **EVERYTHING}),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", RUNS)
def test_trajectory_is_that_of_one_process(name: str, tmp_path: Path) -> None:
    world, values = RUNS[name]
    for found in run(world, tmp_path, **values):
        assert_equal(found, reference(values.get("model", "llama")))


class LosesATile(Watched):
    """Negative control: of all gradients of tiles only that of the last counts, after the verification at the start."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        added, tiled_forward._added = tiled_forward._added, lambda total, new: new
        try:
            return super().training_step(*args, **kwargs)
        finally:
            tiled_forward._added = added


class LosesATileAtTheStart(Watched):
    """The same from the start: the verification finds it."""

    class _ds_assembly(Assembly):
        def build_engine(self, num_training_steps: int) -> None:
            added, tiled_forward._added = tiled_forward._added, lambda total, new: new
            try:
                super().build_engine(num_training_steps)
            finally:
                tiled_forward._added = added


def test_control_a_lost_tile_is_detected(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=r"no MLP of LlamaForCausalLM can be tiled \(model.layers.0.mlp: its result"):
        run(2, tmp_path, trainer=LosesATileAtTheStart, zero_stage=1, tiled_mlp=True)
    for found in run(2, tmp_path, trainer=LosesATile, zero_stage=1, tiled_mlp=True):
        assert distances(found, reference("llama"))["weights"] > 1e-3


def gatherings(output_dir: str, tiled: bool) -> int:
    """On a rank: how often layers get their weights in a run with ZeRO-3."""
    with Collectives() as counted:
        train_and_report(
            llama,
            DATA["padded"],
            output_dir,
            Trainer,
            pad,
            zero_stage=3,
            per_device_train_batch_size=8,
            tiled_mlp=tiled,
            self_test="never",
            deepspeed={"zero_optimization": {"stage3_param_persistence_threshold": 0}},
        )
    return counted["_dist_allgather_fn"]


def test_weights_are_gathered_once_for_all_tiles(tmp_path: Path) -> None:
    """Fewer gatherings than of the plain model, whose MLPs gather each matrix when it is used."""
    plain, tiled = (pool(2).run(gatherings, str(tmp_path), tiled)[0] for tiled in (False, True))
    assert 0 < tiled <= plain


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_what_long_context_turns_on() -> None:
    names = ("activation_checkpointing", "gradient_checkpointing", "tiled_mlp")
    on = TrainingArguments("o", long_context=True, use_cpu=True)
    assert [getattr(on, name) for name in names] == [True, True, True]
    assert not activation_offload.offloads_activations(on)  # there is no GPU
    off = TrainingArguments("o", use_cpu=True)
    assert [getattr(off, name) for name in names] == [False, False, False]
    assert not activation_offload.offloads_activations(off)
    given = TrainingArguments("o", long_context=True, activation_checkpointing=False, tiled_mlp=False, use_cpu=True)
    assert [getattr(given, name) for name in names] == [False, False, False]


def plain_model() -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


REFUSALS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "offload without checkpointing": (llama, {"activation_offload": True}, "activation_checkpointing is off"),
    "two offloads": (
        llama,
        {
            "activation_checkpointing": True,
            "activation_offload": True,
            "activation_checkpointing_kwargs": {"offload": True},
        },
        "move the same tensors",
    ),
    "DeepSpeed's checkpointing": (
        llama,
        {
            "activation_checkpointing": True,
            "activation_offload": True,
            "deepspeed": {"activation_checkpointing": {"synchronize_checkpoint_boundary": True}},
        },
        "keeps the inputs of layers itself",
    ),
    "compiled": (llama, {"long_context": True, "torch_compile": True}, "turns on tiled_mlp, and torch_compile=True"),
    "no MLP": (plain_model, {"tiled_mlp": True}, "Linear has no MLP"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str, tmp_path: Path) -> None:
    make_model, values, message = REFUSALS[name]
    with pytest.raises(ConfigError, match=message):
        Trainer(make_model(), TrainingArguments(str(tmp_path), use_cpu=True, **values), train_dataset=DATA["padded"]())


def test_the_prediction_of_a_run_knows_them(tmp_path: Path) -> None:
    values = {"long_context": True, "activation_offload": True}
    args = TrainingArguments(str(tmp_path), use_cpu=True, **values)
    job = Trainer(llama(), args, train_dataset=DATA["padded"](), data_collator=pad)
    estimate = job._ds_trainer.setup.estimate()
    assert estimate is not None
    run = estimate.candidate
    assert run.tiled_mlp and run.offload_activations and run.checkpointing
