"""torch.compile under the engine: the same numbers, the same names, nothing left behind."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.engine.compilation import CompileOptions
from ds_trainer.training.model.chunked_loss import linear_head
from ds_trainer.training.model.compilation import compile_options
from ds_trainer.utils.errors import ConfigError
from tests.support.compare import assert_equal
from tests.support.models import RaggedTokens, Regression, regression_rows, tiny_llama
from tests.support.oracle import Trajectory
from tests.support.pool import pool
from tests.support.runs import compatibility_of


def arguments(output_dir: Any, **changes: Any) -> TrainingArguments:
    values: dict[str, Any] = dict(
        max_steps=3,
        learning_rate=2e-3,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        per_device_train_batch_size=8,
    )
    return TrainingArguments(str(output_dir), **{**values, **changes})


def train(make_model: Any, make_data: Any, output_dir: Path, **changes: Any) -> tuple[Trajectory, int, set[str], bool]:
    """The trajectory, the number of compiled graphs, the saved names, whether the model stays compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = make_model()
    job = Trainer(model, arguments(output_dir, **changes), train_dataset=make_data(), eval_dataset=make_data())
    job.train()
    job.save_model()
    job.evaluate()
    graphs = int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    report = compatibility_of(job)
    job.engine.close()
    with safe_open(output_dir / "model.safetensors", "pt") as file:
        names = set(file.keys())
    torch._dynamo.reset()
    return report, graphs, names, model._compiled_call_impl is not None


regression = partial(train, Regression, partial(regression_rows, 24))


@pytest.mark.cases(1)
@pytest.mark.parametrize(("world", "stage"), [(1, 0), (1, 3), (2, 2), (2, 3)])
def test_compilation_changes_no_loss_and_no_name(world: int, stage: int, tmp_path: Path) -> None:
    ((wanted, none, names, _),) = pool(1).run(partial(regression, tmp_path, per_device_train_batch_size=8))
    changes = {"per_device_train_batch_size": 8 // world, "zero_stage": stage, "torch_compile_backend": "aot_eager"}
    for found, graphs, compiled_names, hooks in pool(world).run(partial(regression, tmp_path, **changes), timeout=300):
        assert_equal(found, wanted)
        assert none == 0 and graphs > 0
        assert compiled_names == names == set(Regression().state_dict())
        assert not hooks


@pytest.mark.extended
def test_a_language_model(tmp_path: Path) -> None:
    llama = partial(train, partial(tiny_llama, num_hidden_layers=1), partial(RaggedTokens, 24))
    ((wanted, _, names, _),) = pool(1).run(partial(llama, tmp_path))
    job = partial(llama, tmp_path, zero_stage=3, torch_compile_backend="eager")
    ((found, graphs, compiled_names, _),) = pool(1).run(job, timeout=400)
    assert_equal(found, wanted)
    assert graphs > 0 and compiled_names == names


@pytest.mark.extended
@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [0, 3])
def test_equal_blocks_are_compiled_once(stage: int, tmp_path: Path) -> None:
    """With four layers as with two: the graphs of a block, not of the model. The results are those without."""
    graphs = {}
    for layers in (2, 4):
        llama = partial(train, partial(tiny_llama, num_hidden_layers=layers), partial(RaggedTokens, 24))
        ((wanted, _, names, _),) = pool(1).run(partial(llama, tmp_path))
        job = partial(llama, tmp_path, zero_stage=stage, torch_compile_regional=True, torch_compile_backend="eager")
        ((found, graphs[layers], compiled_names, hooks),) = pool(1).run(job, timeout=400)
        assert_equal(found, wanted)
        assert compiled_names == names and not hooks
    if stage < 3:
        assert 0 < graphs[2] == graphs[4]


def counting_tiles(job: Any) -> tuple[Any, int]:
    """What ``job`` returns, and how many losses were computed from some tokens at a time."""
    ways = ("one_pass_cross_entropy", "linear_cross_entropy")
    with ExitStack() as stack:
        patches = [mock.patch.object(linear_head, name, wraps=getattr(linear_head, name)) for name in ways]
        losses = [stack.enter_context(one) for one in patches]
        return job(), sum(one.call_count for one in losses)


@pytest.mark.extended
@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [1, 3])
def test_the_loss_stays_in_tiles_beside_compiled_blocks(stage: int, tmp_path: Path) -> None:
    """The head is not compiled; where all of the model is, the argument is refused."""
    llama = partial(train, partial(tiny_llama, num_hidden_layers=2), partial(RaggedTokens, 24))
    changes = {"zero_stage": stage, "loss_chunk_tokens": 16, "torch_compile_backend": "eager"}
    ((wanted, *_),) = pool(1).run(partial(llama, tmp_path, zero_stage=stage))
    job = partial(counting_tiles, partial(llama, tmp_path, torch_compile_regional=True, **changes))
    (((found, graphs, _, hooks), tiles),) = pool(1).run(job)
    assert_equal(found, wanted)
    assert graphs > 0 and not hooks and tiles > 3
    with pytest.raises(ConfigError, match="a compiled model computes its logits whole"):
        Trainer(tiny_llama(), arguments(tmp_path, **changes), train_dataset=RaggedTokens(4))


class WithoutBlocks(torch.nn.Module):
    """Regional compilation compiles all of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = torch.nn.Embedding(128, 16), torch.nn.Linear(16, 128)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embedding(input_ids))
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def test_a_model_without_repeated_blocks_is_compiled_whole_and_has_whole_logits(tmp_path: Path) -> None:
    job = partial(train, WithoutBlocks, partial(RaggedTokens, 24), tmp_path, per_device_train_batch_size=1)
    (((wanted, *_), tiles),) = pool(1).run(partial(counting_tiles, partial(job, loss_chunk_tokens=16)))
    assert tiles > 3
    job = partial(job, loss_chunk_tokens=16, torch_compile_regional=True, torch_compile_backend="eager")
    (((found, graphs, *_), tiles),) = pool(1).run(partial(counting_tiles, job))
    assert_equal(found, wanted)
    assert graphs > 0 and tiles == 0


@pytest.mark.needs("g++")
def test_inductor_is_the_default(tmp_path: Path) -> None:
    """The real compiler: C++ on the CPU."""
    ((wanted, _, _, _),) = pool(1).run(partial(regression, tmp_path))
    ((found, graphs, _, _),) = pool(1).run(partial(regression, tmp_path, torch_compile=True), timeout=400)
    assert_equal(found, wanted)
    assert graphs > 0


def test_one_compile_argument_implies_the_others() -> None:
    plain = arguments("out")
    assert compile_options(plain) is None and not plain.torch_compile
    assert compile_options(arguments("out", torch_compile=True)) == CompileOptions("inductor")
    assert compile_options(arguments("out", torch_compile_backend="eager")) == CompileOptions("eager")
    assert compile_options(arguments("out", torch_compile_regional=True)) == CompileOptions("inductor", regional=True)
    by_mode = arguments("out", torch_compile_mode="max-autotune")
    assert by_mode.torch_compile is True
    assert compile_options(by_mode) == CompileOptions("inductor", {"mode": "max-autotune"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"torch_compile_backend": "tensorflow"}, "torch_compile_backend=tensorflow is unknown to torch"),
        ({"torch_compile_mode": "fastest"}, "torch_compile_mode=fastest is unknown to torch. Modes: default,"),
        (
            {"torch_compile_mode": "max-autotune", "torch_compile_backend": "eager"},
            "applies to the inductor backend, but torch_compile_backend=eager",
        ),
    ],
)
def test_refusals(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(Regression(), arguments(tmp_path, **changes), train_dataset=regression_rows(4))


def _compiled_by_script(whole: bool) -> Any:
    if whole:
        return torch.compile(Regression(), backend="eager")
    model = tiny_llama(num_hidden_layers=1)
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    return model


@pytest.mark.extended
@pytest.mark.cases(1)
@pytest.mark.parametrize(("whole", "stage"), [(True, 0), (True, 3), (False, 0)])
def test_a_model_that_the_script_has_compiled(whole: bool, stage: int, tmp_path: Path) -> None:
    """``torch.compile(model)`` is a module around the model: its name must not be in those of saved weights."""
    plain = Regression if whole else partial(tiny_llama, num_hidden_layers=1)
    data = partial(regression_rows, 24) if whole else partial(RaggedTokens, 24)
    ((wanted, _, names, _),) = pool(1).run(partial(train, plain, data, tmp_path, zero_stage=stage))
    job = partial(train, partial(_compiled_by_script, whole), data, tmp_path, zero_stage=stage)
    ((found, graphs, compiled_names, _),) = pool(1).run(job)
    assert_equal(found, wanted)
    assert graphs > 0
    assert compiled_names == names == set(plain().state_dict())
