"""Optimizers of libraries on several ranks: the numbers of one plain process, or a refusal."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer import ParallelLayout, Trainer, TrainerCallback, TrainingArguments, compile_config
from ds_trainer.arguments.enums import OptimizerNames
from ds_trainer.config.library_optimizer_table import LIBRARY
from ds_trainer.engine.training_engine import TrainingEngine
from ds_trainer.optim.library_optimizer_builder import build_library_optimizer
from ds_trainer.utils.errors import ConfigError
from tests.support.compare import assert_equal, distances
from tests.support.models import PlainLanguageModel, RaggedTokens, tiny_llama
from tests.support.oracle import Trajectory, train_plainly
from tests.support.pool import pool
from tests.support.runs import compatibility_of, train_and_report

RATE = 2e-3
SHAPES = ["adafactor", "stable_adamw", "grokadamw", "galore_adamw", "galore_adafactor", "apollo_adamw"]
SWAPS = ["schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd"]
ELEMENTS = [
    *(("ademamix", stage) for stage in (0, 1, 2, 3)),
    *((name, stage) for name in ("paged_adamw_32bit", "rmsprop_bnb", "paged_lion_32bit") for stage in (1, 3)),
]
EIGHT_BITS = ["adamw_8bit", "rmsprop_bnb_8bit"]
OPTIM_ARGS = {
    # One projection: a second one takes singular vectors whose signs follow from rounding, and the old momentum has the
    # old signs. On some processors LAPACK then gives two ranks another sign than one process.
    "galore_adamw": "rank=4,update_proj_gap=50",
    "galore_adafactor": "rank=4,update_proj_gap=50",
    "apollo_adamw": "rank=4,update_proj_gap=2",
    # With its own 1e-8, an update is the sign of a gradient, however small: rounding is then as large as the update.
    "rmsprop_bnb": "eps=1e-3",
    "rmsprop_bnb_8bit": "eps=1e-3",
}
make_data = partial(RaggedTokens, 37)


def chosen(name: str) -> dict[str, Any]:
    row = LIBRARY[OptimizerNames(name)]
    if importlib.util.find_spec(row.cls.partition(":")[0].partition(".")[0]) is None:
        pytest.skip(f"{row.package} is not installed")
    return {
        "optim": name,
        "optim_args": OPTIM_ARGS.get(name),
        "optim_target_modules": "all-linear" if row.low_rank else None,
        "learning_rate": RATE,
        "weight_decay": 0.1,
        "max_grad_norm": 0.7,
    }


def make_optimizer(name: str, model: torch.nn.Module, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    one = build_library_optimizer(
        TrainingArguments("out", use_cpu=True, **chosen(name)), LIBRARY[OptimizerNames(name)], model, groups
    )
    if name in SWAPS:
        one.train()  # type: ignore[attr-defined]
    return one


@cache
def reference(name: str) -> Trajectory:
    return train_plainly(
        tiny_llama(), make_data(), optimizer=partial(make_optimizer, name), learning_rate=RATE, clip=0.7
    )


def ours(output_dir: Path, name: str, world: int, **changes: Any) -> list[Trajectory]:
    sizes = {"per_device_train_batch_size": 16 // (2 * world), "gradient_accumulation_steps": 2}
    job = partial(train_and_report, tiny_llama, make_data, str(output_dir), **{**chosen(name), **sizes, **changes})
    return pool(world).run(job)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", SHAPES + SWAPS)
def test_stage_0_trains_like_one_process(name: str, tmp_path: Path) -> None:
    """Stage 0 is chosen by itself, since these need whole tensors."""
    for found in ours(tmp_path, name, 2):
        assert_equal(found, reference(name), 2e-5)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("name", "stage"), ELEMENTS)
def test_every_stage_trains_like_one_process(name: str, stage: int, tmp_path: Path) -> None:
    for found in ours(tmp_path, name, 2, zero_stage=stage):
        assert_equal(found, reference(name), 2e-5)


@pytest.mark.parametrize("name", ["adafactor", "galore_adamw"])
def test_bf16_at_stage_0_is_close(name: str, tmp_path: Path) -> None:
    for found in ours(tmp_path, name, 2, bf16=True):
        differences = distances(found, reference(name))
        assert differences["losses"] < 0.01 and differences["weights"] < 0.05, differences


def before_the_first_step() -> tuple[bool, int]:
    """Whether making an engine leaves the weights alone, and the tensors that its optimizer knows already."""
    from ds_trainer.engine.process_group import start_process_group

    start_process_group("cpu")
    model = tiny_llama()
    weights = [p.detach().to(torch.bfloat16) for p in model.parameters()]
    args = TrainingArguments("out", use_cpu=True, bf16=True, zero_stage=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.5)
    config = compile_config(args, ParallelLayout(1), client_optimizer="a test")
    engine = TrainingEngine(model, optimizer, config, ParallelLayout(1))
    masters = [p for group in engine.basic_optimizer.param_groups for p in group["params"]]
    same = all(torch.equal(a.to(torch.bfloat16), b) for a, b in zip(masters, weights, strict=True))
    known = len(engine.basic_optimizer.state)
    engine.close()
    return same, known


def test_no_optimizer_step_before_the_first() -> None:
    assert pool(1).run(before_the_first_step) == [(True, 0)]


def test_the_optimizer_can_be_offloaded(tmp_path: Path) -> None:
    for found in ours(tmp_path, "ademamix", 2, zero_stage=2, offload_optimizer="cpu"):
        assert_equal(found, reference("ademamix"), 2e-5)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", EIGHT_BITS)
def test_eight_bit_states_are_close_at_every_stage(name: str, tmp_path: Path) -> None:
    """ZeRO's flat shards are quantized in other blocks, and small tensors and embeddings with the rest."""
    for stage in (0, 1):
        for found in ours(tmp_path, name, 2, zero_stage=stage):
            differences = distances(found, reference(name))
            assert differences["losses"] < 0.02 and differences["weights"] < 0.1, (stage, differences)


class HandedIn(Trainer):
    """Negative control: the same optimizer past the rule that refuses it."""

    def create_optimizer(self) -> Any:
        row = LIBRARY[OptimizerNames(self.args.optim)]
        self.optimizer = build_library_optimizer(self.args, row, self.model, self._ds_trainer.parameter_groups())
        return self.optimizer


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", ["adafactor", "stable_adamw", "grokadamw"])
def test_control_zero_would_give_other_losses(name: str, tmp_path: Path) -> None:
    for found in ours(tmp_path, name, 2, zero_stage=1, trainer_class=HandedIn):
        assert distances(found, reference(name))["weights"] > 1e-3
    with pytest.raises(ConfigError, match="depends on the shape of each tensor"):
        trainer(tmp_path, name, zero_stage=1)


class StopAt(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= 3


def trainer(
    output_dir: Path, name: str, stop: bool = False, handed_in: Callable[..., Any] | None = None, **changes: Any
) -> Trainer:
    values: dict[str, Any] = dict(
        max_steps=6, logging_steps=1, save_steps=3, disable_tqdm=True, per_device_train_batch_size=4, use_cpu=True
    )
    args = TrainingArguments(str(output_dir), **{**chosen(name), **values, **changes})
    data = make_data()
    callbacks = [StopAt()] if stop else []
    model = PlainLanguageModel()
    optimizer = handed_in(model) if handed_in else None
    return Trainer(
        model, args, train_dataset=data, eval_dataset=data, callbacks=callbacks, optimizers=(optimizer, None)
    )


def run(output_dir: Path, name: str, stop: bool, resume: bool, **changes: Any) -> Trajectory:
    job = trainer(output_dir, name, stop, **changes)
    job.train(resume_from_checkpoint=resume)
    report = compatibility_of(job)
    job.engine.close()
    return report


def grokadamw(model: torch.nn.Module) -> Any:
    from grokadamw import GrokAdamW

    return GrokAdamW(model.parameters(), lr=RATE)


RESUMED = [
    *((name, 0, {}) for name in ("adafactor", "grokadamw", "galore_adamw", "apollo_adamw", "schedule_free_radam")),
    ("schedule_free_adamw", 0, {"eval_strategy": "steps", "eval_steps": 1}),
    ("ademamix", 3, {}),
    ("adamw_8bit", 1, {}),
    ("grokadamw", 0, {"handed_in": grokadamw}),
]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("name", "stage", "changes"), RESUMED)
def test_a_resumed_run_is_the_same(name: str, stage: int, changes: dict[str, Any], tmp_path: Path) -> None:
    arguments = {**changes, "zero_stage": stage}
    uninterrupted = pool(2).run(partial(run, tmp_path / "whole", name, False, False, **arguments))
    pool(2).run(partial(run, tmp_path / "parts", name, True, False, **arguments))
    resumed = pool(2).run(partial(run, tmp_path / "parts", name, False, True, **arguments))
    for found, wanted in zip(resumed, uninterrupted, strict=True):
        assert found.losses == wanted.losses
        assert all(torch.equal(found.weights[key], wanted.weights[key]) for key in wanted.weights)


def averaged(output_dir: Path) -> tuple[float, float, float, float]:
    """Loss of an evaluation after training; that of the file it saves; of averaged and of trained weights by hand."""
    from safetensors.torch import load_file

    job = trainer(output_dir, "schedule_free_adamw", save_strategy="no", logging_steps=6)
    job.train()
    trained = {key: value.detach().clone() for key, value in job.model.state_dict().items()}
    evaluated = job.evaluate()["eval_loss"]
    job.save_model()
    losses = []
    optimizer: Any = job.optimizer
    optimizer.train()
    optimizer.eval()
    by_hand = {key: value.detach().clone() for key, value in job.model.state_dict().items()}
    for weights in (load_file(Path(output_dir) / "model.safetensors"), by_hand, trained):
        other = trainer(output_dir, "schedule_free_adamw", save_strategy="no")
        other.model.load_state_dict(weights, strict=False)
        losses.append(other.evaluate()["eval_loss"])
    job.engine.close()
    return evaluated, losses[0], losses[1], losses[2]


def test_schedule_free_evaluates_and_saves_the_averaged_weights(tmp_path: Path) -> None:
    evaluated, saved, by_hand, trained = pool(1).run(averaged, tmp_path)[0]
    assert evaluated == pytest.approx(by_hand, rel=1e-5) and saved == pytest.approx(by_hand, rel=1e-5)
    assert abs(trained - by_hand) > 1e-4 * by_hand


def test_a_given_optimizer_may_swap_weights(tmp_path: Path) -> None:
    chosen("schedule_free_sgd")
    messages = pool(2).run(handed_in_swapping, tmp_path)
    assert all("AdamWScheduleFree uses different weights" in message for message in messages)


def handed_in_swapping(output_dir: Path) -> str:
    import schedulefree

    model = tiny_llama()
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=RATE)
    args = TrainingArguments(str(output_dir), use_cpu=True, zero_stage=1, max_steps=1, disable_tqdm=True)
    with pytest.raises(ConfigError) as error:
        Trainer(model, args, train_dataset=make_data(), optimizers=(optimizer, None)).train()
    return str(error.value)
