"""Parameters without dimensions: trained to the numbers of one process, saved, resumed and exported as they were."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.checkpoint.export.checkpoint_export import export_checkpoint
from ds_trainer.engine.scalar_parameters import ScalarsAsBytes
from tests.support.compare import assert_equal
from tests.support.models import regression_rows
from tests.support.oracle import Trajectory, sample_loss, stack, train_plainly
from tests.support.pool import pool
from tests.support.runs import compatibility_of, whole_weights
from tests.support.scalar_models import Line, Scalars

BATCH, STEPS, STOP, CLIP = 8, 4, 2, 0.5
MODELS: dict[str, Callable[[], nn.Module]] = {"line": Line, "scalars": Scalars}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "nadam": partial(torch.optim.NAdam, lr=1e-2),  # has a number of its own for each parameter, besides the step
    "asgd": partial(torch.optim.ASGD, lr=1e-2, t0=1),
}


class Setup(NamedTuple):
    """World size, stage and arguments of a run."""

    world: int
    stage: int
    arguments: dict[str, Any] = {}  # noqa: RUF012  never changed
    zero: dict[str, Any] = {}  # noqa: RUF012


OFFLOAD = {"offload_optimizer": "cpu"}
BOTH = {**OFFLOAD, "offload_param": "cpu"}
SETUPS = {
    "1 rank, stage 0": Setup(1, 0),
    "1 rank, stage 3": Setup(1, 3),
    "stage 0": Setup(2, 0),
    "stage 1": Setup(2, 1),
    "stage 2": Setup(2, 2),
    "stage 2, offload": Setup(2, 2, {**OFFLOAD, "gradient_accumulation_steps": 2}),
    "stage 3": Setup(2, 3),
    "stage 3, nothing kept": Setup(2, 3, {}, {"stage3_param_persistence_threshold": 0, "sub_group_size": 3}),
    "stage 3, offload": Setup(2, 3, BOTH),
    "4 ranks, stage 1": Setup(4, 1),
    "4 ranks, stage 3": Setup(4, 3),
}
BF16 = {
    "bf16, stage 0": Setup(2, 0, {"bf16": True}),
    "bf16, stage 1": Setup(2, 1, {"bf16": True}),
    "bf16, stage 2, offload": Setup(2, 2, {"bf16": True, **OFFLOAD}),
    "bf16, stage 3": Setup(4, 3, {"bf16": True}),
}


def trainer_of(model: str, output_dir: str, setup: Setup, optimizer: str = "adamw", **changes: Any) -> Trainer:
    accumulation = setup.arguments.get("gradient_accumulation_steps", 1)
    values: dict[str, Any] = dict(
        zero_stage=setup.stage,
        per_device_train_batch_size=BATCH // (setup.world * accumulation),
        learning_rate=1e-2,
        weight_decay=0.1,
        max_grad_norm=CLIP,
        max_steps=STEPS,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        deepspeed={"zero_optimization": setup.zero} if setup.zero else None,
    )
    args = TrainingArguments(output_dir, **{**values, **setup.arguments, **changes})
    made = MODELS[model]()
    chosen = None if optimizer == "adamw" else OPTIMIZERS[optimizer](p for p in made.parameters() if p.requires_grad)
    return Trainer(made, args, train_dataset=regression_rows(32), optimizers=(chosen, None))


def trained(model: str, output_dir: str, setup: Setup, resume: str | None = None, **changes: Any) -> Any:
    """Trajectory, shapes of the parameters as the model shows them, buffers, and keys of what the optimizer holds."""
    trainer = trainer_of(model, output_dir, setup, **changes)
    if resume is not None:
        with torch.no_grad():
            for tensor in trainer.model.state_dict().values():
                tensor.add_(1)  # what is not put back stays wrong
    trainer.train(resume_from_checkpoint=resume)
    found = with_elements(compatibility_of(trainer))
    shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in trainer.model.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in trainer.model.named_buffers()}
    trainer.engine.close()
    return found, shapes, buffers


def with_elements(found: Trajectory) -> Trajectory:
    """Without the weights that have no elements: there is nothing to compare."""
    return replace(found, weights={name: value for name, value in found.weights.items() if value.numel()})


@cache
def reference(model: str) -> Trajectory:
    data = regression_rows(32)
    return with_elements(
        train_plainly(MODELS[model](), data, loss=sample_loss, clip=CLIP, global_batch=BATCH, steps=STEPS)
    )


def shapes_of(model: str) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in MODELS[model]().named_parameters()}


@pytest.mark.cases(6)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", SETUPS)
def test_losses_weights_and_shapes_are_those_of_one_process(name: str, model: str, tmp_path: Path) -> None:
    wanted = reference(model)
    assert min(wanted.grad_norms) > CLIP
    for found, shapes, _ in pool(SETUPS[name].world).run(partial(trained, model, str(tmp_path), SETUPS[name])):
        assert_equal(found, wanted, 1e-6)
        assert shapes == shapes_of(model)
        assert all(tuple(value.shape) == shapes[weight] for weight, value in found.weights.items())


@pytest.mark.parametrize("name", BF16)
def test_half_precision(name: str, tmp_path: Path) -> None:
    model = "scalars"
    wanted = reference(model)
    for found, shapes, _ in pool(BF16[name].world).run(partial(trained, model, str(tmp_path), BF16[name])):
        assert_equal(found, wanted, 0.03)
        assert shapes == shapes_of(model)


RESUMED = [
    ("stage 0", "scalars", "adamw", {}, Setup(2, 3)),
    ("stage 0", "scalars", "nadam", {}, Setup(2, 1)),
    ("stage 0", "line", "momentum", {}, Setup(2, 1)),
    ("stage 0", "line", "nadam", {}, Setup(2, 3)),
    ("stage 0", "line", "asgd", {}, Setup(2, 1)),
    ("stage 2", "scalars", "nadam", {}, Setup(1, 0)),
    ("stage 3, nothing kept", "scalars", "adamw", {}, Setup(1, 0)),
    ("stage 3, offload", "line", "adamw", {}, Setup(1, 0)),
    ("4 ranks, stage 1", "line", "adamw", {"save_async": True}, Setup(2, 3)),
    ("stage 2", "scalars", "adamw", {"save_async": True}, Setup(4, 3)),
]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("name", "model", "optimizer", "saving", "other"), RESUMED)
def test_a_run_resumes_bit_for_bit_and_in_another_setup(
    name: str, model: str, optimizer: str, saving: dict[str, Any], other: Setup, tmp_path: Path
) -> None:
    setup, changes = SETUPS[name], {"optimizer": optimizer, **saving}
    checkpoint = str(tmp_path / f"checkpoint-{STOP}")
    saves = {"save_strategy": "steps", "save_steps": STOP}
    wanted = pool(setup.world).run(partial(trained, model, str(tmp_path), setup, **changes, **saves))
    found = pool(setup.world).run(partial(trained, model, str(tmp_path / "again"), setup, checkpoint, **changes))
    for (expected, _, reference_buffers), (ours, shapes, our_buffers) in zip(wanted, found, strict=True):
        assert (ours.losses, ours.grad_norms) == (expected.losses, expected.grad_norms)
        assert shapes == shapes_of(model)
        assert all(torch.equal(ours.weights[weight], value) for weight, value in expected.weights.items())
        assert all(torch.equal(our_buffers[buffer], value) for buffer, value in reference_buffers.items())
    job = partial(trained, model, str(tmp_path / "other"), other, checkpoint, **changes)
    for ours, shapes, buffers in pool(other.world).run(job):
        assert ours.losses == pytest.approx(wanted[0][0].losses, abs=2e-6)
        assert shapes == shapes_of(model)
        for weight, value in wanted[0][0].weights.items():
            assert (ours.weights[weight] - value).abs().max() < 1e-6, weight
        if model == "scalars":
            assert buffers["norm.num_batches_tracked"].shape == () and buffers["norm.num_batches_tracked"] == STEPS


def saved(model: str, output_dir: str, setup: Setup) -> dict[str, torch.Tensor]:
    trainer = trainer_of(model, output_dir, setup, save_strategy="steps", save_steps=STEPS)
    trainer.train()
    trainer.save_model(f"{output_dir}/live")
    weights = whole_weights(trainer)
    trainer.engine.close()
    return weights


FILES = [("stage 0", "line"), ("stage 0", "scalars"), ("stage 2", "scalars"), ("stage 3", "scalars")]


@pytest.mark.cases(2)
@pytest.mark.parametrize(("name", "model"), [*FILES, ("stage 3, offload", "scalars"), ("4 ranks, stage 3", "line")])
def test_files_hold_scalars_with_their_shapes(name: str, model: str, tmp_path: Path) -> None:
    weights = pool(SETUPS[name].world).run(partial(saved, model, str(tmp_path), SETUPS[name]))[0]
    exported = export_checkpoint(tmp_path / f"checkpoint-{STEPS}", tmp_path / "exported", 2**20).directory
    plain = MODELS[model]()
    wanted = {key: tuple(value.shape) for key, value in plain.state_dict().items() if "second.temp" not in key}
    for directory in (exported, tmp_path / "live"):
        tensors = load_file(directory / "model.safetensors")
        assert {key: tuple(value.shape) for key, value in tensors.items()} == wanted
        plain.load_state_dict(tensors, strict=model == "line")  # the name of a tied tensor is missing
        for key, parameter in plain.named_parameters():
            assert torch.equal(parameter, weights[key]), key
        if model == "scalars":
            assert plain.norm.num_batches_tracked == STEPS  # type: ignore[attr-defined]


def set_in_gathered(output_dir: str, setup: Setup) -> tuple[float, tuple[int, ...]]:
    """A number that the first rank alone sets, as every rank reads it afterwards."""
    import deepspeed

    trainer = trainer_of("scalars", output_dir, setup, max_steps=1)
    trainer.train()
    scale = trainer.model.scale
    with deepspeed.zero.GatheredParameters([scale], modifier_rank=0):
        if trainer.is_world_process_zero():
            scale.data.fill_(7.0)
    with deepspeed.zero.GatheredParameters([scale]):
        found = scale.item(), tuple(trainer.model.get_parameter("scale").shape)
    trainer.engine.close()
    return found


@pytest.mark.parametrize("name", ["stage 3", "stage 3, nothing kept"])
def test_a_scalar_set_on_one_rank_is_set_on_all_ranks(name: str, tmp_path: Path) -> None:
    assert pool(2).run(partial(set_in_gathered, str(tmp_path), SETUPS[name])) == [(7.0, ())] * 2


def evaluated_first(model: str, output_dir: str, setup: Setup) -> tuple[float, Any, Trajectory]:
    trainer = trainer_of(model, output_dir, setup, per_device_eval_batch_size=4)
    rows = regression_rows(12, seed=1)
    loss = trainer.evaluate(rows)["eval_loss"]
    predictions = trainer.predict(rows).predictions
    trainer.save_model(f"{output_dir}/untrained")
    trainer.train()
    found = with_elements(compatibility_of(trainer))
    trainer.engine.close()
    return loss, predictions, found


BEFORE = [("stage 0", "line"), ("stage 3", "line"), ("stage 3, nothing kept", "scalars")]


@pytest.mark.parametrize(("name", "model"), BEFORE)
def test_evaluation_before_training(name: str, model: str, tmp_path: Path) -> None:
    plain, batch = MODELS[model]().eval(), stack(regression_rows(12, seed=1))
    with torch.no_grad():
        loss, expected = plain(**batch)
    for found, predictions, trajectory in pool(2).run(partial(evaluated_first, model, str(tmp_path), SETUPS[name])):
        assert found == pytest.approx(loss.item(), rel=1e-6)
        assert torch.allclose(torch.from_numpy(predictions), expected, atol=1e-6)
        assert_equal(trajectory, reference(model), 1e-6)
    tensors = load_file(tmp_path / "untrained" / "model.safetensors")
    assert all(torch.equal(value, plain.state_dict()[key]) for key, value in tensors.items())


def test_bytes_of_other_tensors_do_not_change() -> None:
    """What lets DeepSpeed broadcast numbers changes nothing else, and a view shares the number's memory."""
    number, vector = torch.tensor(1.0), torch.tensor([1.0, 2.0])
    with ScalarsAsBytes():
        assert torch.equal(vector.view(torch.uint8), torch.tensor([0, 0, 128, 63, 0, 0, 0, 64], dtype=torch.uint8))
        assert vector.view(2, 1).shape == (2, 1) and number.view(1).shape == (1,)
        number.view(torch.uint8).zero_()
        with pytest.raises(RuntimeError):
            number.view(torch.int8)
    assert number == 0.0
    with pytest.raises(RuntimeError, match="cannot be 0"):
        number.view(torch.uint8)
