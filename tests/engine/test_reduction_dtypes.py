"""Gradients are summed in the type that is asked for: over micro-batches and over ranks, at every ZeRO stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.utils import distributed
from tests.support.pool import pool
from tests.support.runs import compatibility_of

MICRO_BATCHES = 512
CLASSES, WIDTH = 8, 16


class Classifier(nn.Module):
    """Small, so that 512 micro-batches take a second; a layer is used twice, and a parameter never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.unused = nn.Parameter(torch.ones(3))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(parameter.bfloat16())  # the same weights in both precisions

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.layer(self.embedding(input_ids)))
        logits = self.head(torch.tanh(self.layer(hidden)).mean(dim=1))
        return {"loss": F.cross_entropy(logits.float(), labels), "logits": logits}


class Alike(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples that agree about the direction of the gradient, as those of a model that learns something do."""

    def __len__(self) -> int:
        return MICRO_BATCHES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.tensor([index % 2, 2, 3, 4])
        return {"input_ids": tokens, "labels": torch.tensor(5)}


class Found(NamedTuple):
    norm: float
    compiled: Any
    origin: str
    weights: dict[str, torch.Tensor]


def one_step(output_dir: str, micro_batches: int = MICRO_BATCHES, **arguments: Any) -> Found:
    args = TrainingArguments(
        output_dir,
        use_cpu=True,
        optim="adamw_torch" if "offload_optimizer" in arguments else "sgd",
        learning_rate=1e-3,
        max_steps=1,
        logging_steps=1,
        per_device_train_batch_size=MICRO_BATCHES // micro_batches // distributed.world_size(),
        gradient_accumulation_steps=micro_batches,
        max_grad_norm=0.0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        self_test="never",
        **arguments,
    )
    job = Trainer(Classifier(), args, train_dataset=Alike())
    job.train()
    found = compatibility_of(job)
    path = "data_types.grad_accum_dtype"
    value = job._ds_trainer.compiled.get(path)
    origin = "" if value is None else str(job._ds_trainer.compiled.origin(path))
    job.engine.close()
    return Found(found.grad_norms[0], value, origin, found.weights)


@pytest.fixture(scope="module")
def in_float32(tmp_path_factory: pytest.TempPathFactory) -> Found:
    job = partial(one_step, str(tmp_path_factory.mktemp("fp32")), zero_stage=0)
    return pool(1).run(job)[0]


WAYS: dict[str, dict[str, Any]] = {
    "stage 0": {"zero_stage": 0},
    "stage 1": {"zero_stage": 1},
    "stage 2": {"zero_stage": 2},
    "stage 3": {"zero_stage": 3},
    "stage 1, offloaded": {"zero_stage": 1, "offload_optimizer": "cpu"},
    "stage 2, offloaded": {"zero_stage": 2, "offload_optimizer": "cpu"},
    "stage 3, offloaded": {"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", WAYS)
def test_the_norm_of_512_bf16_micro_batches_is_that_of_float32(name: str, in_float32: Found, tmp_path: Path) -> None:
    found = pool(1).run(partial(one_step, str(tmp_path), bf16=True, **WAYS[name]))[0]
    assert found.compiled == "fp32"
    assert "bf16 with 512 micro-batches" in found.origin
    assert found.norm == pytest.approx(in_float32.norm, rel=2e-3)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["stage 0", "stage 1", "stage 2", "stage 3"])
def test_without_float32_accumulation_the_norm_is_wrong(name: str, in_float32: Found, tmp_path: Path) -> None:
    """The negative control, and an argument that wins."""
    job = partial(one_step, str(tmp_path), bf16=True, grad_accum_dtype="bf16", **WAYS[name])
    found = pool(1).run(job)[0]
    assert found.compiled == "bf16"
    assert abs(found.norm / in_float32.norm - 1) > 1e-2


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", range(4))
def test_the_norm_is_right_on_two_ranks(stage: int, in_float32: Found, tmp_path: Path) -> None:
    for found in pool(2).run(partial(one_step, str(tmp_path), 256, bf16=True, zero_stage=stage)):
        assert found.compiled == "fp32"
        assert found.norm == pytest.approx(in_float32.norm, rel=2e-3)


# -- over ranks -------------------------------------------------------------------------------------------------------


@contextmanager
def reduced_types(into: set[torch.dtype]) -> Iterator[None]:
    """Notes the types of what DeepSpeed's backend reduces with real collectives; single numbers are norms and flags."""
    from deepspeed.comm import comm

    backend = comm.cdb
    names = (
        "all_reduce",
        "reduce",
        "reduce_scatter_tensor",
        "reduce_scatter_fn",
        "all_to_all_single",
        "reduce_scatter",
    )
    originals = {name: getattr(backend, name) for name in names if hasattr(backend, name)}

    def noting(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 8:
                    into.add(value.dtype)
            return original(*args, **kwargs)

        return call

    for name, original in originals.items():
        setattr(backend, name, noting(original))
    try:
        yield
    finally:
        for name in originals:
            delattr(backend, name)


def types_of(output_dir: str, **arguments: Any) -> set[torch.dtype]:
    from ds_trainer.engine.training_engine import TrainingEngine

    found: set[torch.dtype] = set()
    backward, step = TrainingEngine.backward, TrainingEngine.step

    def noted(method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with reduced_types(found):
                return method(*args, **kwargs)

        return call

    TrainingEngine.backward, TrainingEngine.step = noted(backward), noted(step)  # type: ignore[method-assign]
    try:
        one_step(output_dir, 2, **arguments)
    finally:
        TrainingEngine.backward, TrainingEngine.step = backward, step  # type: ignore[method-assign]
    return found


BF16, FP32 = torch.bfloat16, torch.float32
REDUCTIONS: list[tuple[dict[str, Any], torch.dtype]] = [
    *(({"bf16": True, "zero_stage": stage}, BF16) for stage in range(4)),
    *(({"bf16": True, "zero_stage": stage, "communication_data_type": "fp32"}, FP32) for stage in range(4)),
    *(({"bf16": True, "zero_stage": stage, "grad_accum_dtype": "fp32"}, BF16) for stage in range(4)),
    *(
        ({"bf16": True, "zero_stage": stage, "grad_accum_dtype": "fp32", "communication_data_type": "fp32"}, FP32)
        for stage in range(4)
    ),
    *(
        ({"bf16": True, "zero_stage": stage, "offload_optimizer": "cpu", "communication_data_type": "fp32"}, FP32)
        for stage in (1, 2, 3)
    ),
    ({"torch_autocast": "bf16", "zero_stage": 2, "communication_data_type": "fp32"}, FP32),
    ({"torch_autocast": "bf16", "zero_stage": 3, "communication_data_type": "fp32"}, FP32),
    ({"zero_stage": 2, "communication_data_type": "bf16"}, BF16),
]


@pytest.mark.cases(9)
@pytest.mark.parametrize(("arguments", "dtype"), REDUCTIONS)
def test_gradients_are_reduced_in_the_requested_dtype(
    arguments: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    for found in pool(2).run(partial(types_of, str(tmp_path), **arguments)):
        assert found == {dtype}


def after_autocast(output_dir: str) -> list[set[torch.dtype]]:
    """DeepSpeed remembers autocast in a global of the process."""
    first = types_of(output_dir, torch_autocast="bf16", zero_stage=2)
    return [first, types_of(output_dir, bf16=True, zero_stage=2, communication_data_type="fp32")]


def test_an_engine_with_autocast_does_not_affect_the_next_engine(tmp_path: Path) -> None:
    for first, second in pool(2).run(partial(after_autocast, str(tmp_path))):
        assert BF16 in first
        assert second == {FP32}


def gradients_are_as_they_were(output_dir: str) -> bool:
    from ds_trainer.config.compiler import compile_config
    from ds_trainer.engine.training_engine import TrainingEngine
    from ds_trainer.parallel.layout import ParallelLayout

    args = TrainingArguments(output_dir, use_cpu=True, bf16=True, zero_stage=0, grad_accum_dtype="fp32")
    layout = ParallelLayout(1)
    model = Classifier()
    config = compile_config(args, layout, client_optimizer="a test")
    engine = TrainingEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), config, layout)
    during = {parameter.grad_dtype for parameter in model.parameters()}
    engine.close()
    return during == {FP32} and all(p.grad_dtype == p.dtype == BF16 for p in model.parameters())


def test_a_closed_engine_restores_the_gradient_dtype(tmp_path: Path) -> None:
    assert pool(1).run(partial(gradients_are_as_they_were, str(tmp_path))) == [True]
