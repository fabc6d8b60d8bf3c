"""Compilers that fail on one rank: one decision, one warning, the same numbers; what was asked for is refused."""

from __future__ import annotations

import logging
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.engine import muon_compilation
from ds_trainer.parallel import kernel_trial
from ds_trainer.utils.errors import ConfigError
from tests.support.compare import assert_equal
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import pool
from tests.support.runs import compatibility_of


class Kernels(ModuleType):
    """The two functions of ``tile_kernels`` in torch, for ranks whose compiler works. ``fault``: what goes wrong."""

    def __init__(self, fault: str | None) -> None:
        super().__init__("ds_trainer.parallel.tile_kernels")
        self.fault, self.calls = fault, 0

    def add_statistics(self, tile: Any, columns: Any, largest: Any, exponentials: Any, at_target: Any, _: Any) -> None:
        if self.fault == "compiler":
            raise RuntimeError("Failed to find C compiler.")
        if self.fault == "disk":
            raise OSError(116, "Stale file handle")
        self.calls += 1
        now = torch.maximum(largest, tile.amax(1))
        added = (tile - now[:, None]).exp().sum(1) * (2 if self.fault == "wrong" else 1)
        exponentials.copy_(exponentials * (largest - now).exp() + added)
        largest.copy_(now)
        inside = (columns >= 0) & (columns < tile.shape[1])
        found = tile.gather(1, columns.clamp(0, tile.shape[1] - 1)[:, None]).squeeze(1)
        at_target.copy_(torch.where(inside, found, at_target))

    def gradient(self, tile: Any, columns: Any, lse: Any, share: Any, at_target: Any, spread: Any, dtype: Any) -> Any:
        inside = (columns >= 0) & (columns < tile.shape[1])
        found = (tile - lse[:, None]).exp() * share[:, None]
        place = columns.clamp(0, tile.shape[1] - 1)[:, None]
        return found.scatter_add(1, place, torch.where(inside, at_target, 0.0)[:, None]).to(dtype)


class Warnings(logging.Handler):
    """The warnings of this package."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def train(directory: Path, **changes: Any) -> tuple[Any, list[str]]:
    """The trajectory, and what was warned of."""
    values = {"loss_chunk_tokens": 16, "max_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 4}
    values |= {"save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "self_test": "never", **changes}
    args = TrainingArguments(str(directory), **values)
    trainer = Trainer(tiny_llama(num_hidden_layers=1), args, train_dataset=RaggedTokens(16))
    heard = Warnings()
    logging.getLogger("ds_trainer").addHandler(heard)
    try:
        trainer.train()
    finally:
        logging.getLogger("ds_trainer").removeHandler(heard)
    found = compatibility_of(trainer)
    trainer.engine.close()
    return found, [text for text in heard.messages if "compil" in text]


def train_with(faults: list[str | None], directory: Path) -> tuple[Any, list[str], bool, int]:
    """A run whose device is taken for a GPU, with a fault of the kernels on some ranks. Last: their calls."""
    kernels = Kernels(faults[torch.distributed.get_rank()])
    device = torch.device("cpu")
    with (
        mock.patch.object(kernel_trial, "suits", lambda device: True),
        mock.patch("ds_trainer.training.startup.compilers.suits", lambda device: True),
        mock.patch.dict(kernel_trial._problems, clear=True),
        mock.patch.dict(sys.modules, {kernels.__name__: kernels}),
        mock.patch("ds_trainer.parallel.tile_kernels", kernels, create=True),
    ):
        found, warnings = train(directory)
        return found, warnings, kernel_trial.kernels_work(device), kernels.calls


@pytest.mark.parametrize("fault", [None, "compiler", "disk", "wrong"])
def test_all_ranks_take_torchs_operators_if_one_cannot_compile(fault: str | None, tmp_path: Path) -> None:
    ((wanted, _),) = pool(1).run(partial(train, tmp_path / "plain", per_device_train_batch_size=8))
    ranks = pool(2).run(train_with, [None, fault], tmp_path)
    for found, _, works, _ in ranks:
        assert_equal(found, wanted)
        assert works == (fault is None)
    used = [calls for *_, calls in ranks]
    messages = [text for _, warnings, *_ in ranks for text in warnings]
    if fault is None:
        assert min(used) > 4 and not messages
        return
    assert max(used) <= 2, "the kernels ran after the trial"
    (message,) = messages
    said = {
        "compiler": "RuntimeError: Failed to find C compiler. All ranks",
        "disk": "Stale file handle",
        "wrong": "differ from",
    }
    assert "on rank 1 (" in message and said[fault] in message and "C compiler and Python's headers" in message


def compile_without(rank_without: int, directory: Path, **changes: Any) -> tuple[str, list[str]]:
    """What a compiled run raises where inductor finds no C++ compiler on a rank."""
    from torch._inductor import config, cpp_builder

    missing = torch.distributed.get_rank() == rank_without
    cpp_builder.cpp_compiler_search.cache_clear()
    with mock.patch.object(config.cpp, "cxx", (None, "no-such-compiler" if missing else "g++")):
        try:
            return "", train(directory, **changes)[1]
        except ConfigError as error:
            return str(error), []
        finally:
            torch._dynamo.reset()
            cpp_builder.cpp_compiler_search.cache_clear()


@pytest.mark.needs("g++")  # what inductor compiles with on CPUs, where a rank has it
def test_a_missing_compiler_of_one_rank_is_refused_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"loss_chunk_tokens": 0, "torch_compile": True, "per_device_train_batch_size": 2}
    for error, _ in pool(2).run(partial(compile_without, 1, tmp_path, **changes)):
        assert "torch_compile=True: inductor cannot compile on rank 1 (" in error
        assert "No working C++ compiler" in error and "set it to False" in error


def muon(directory: Path, without: bool) -> tuple[Any, list[str]]:
    from torch._inductor import config, cpp_builder

    cpp_builder.cpp_compiler_search.cache_clear()
    cxx = mock.patch.object(config.cpp, "cxx", (None, "no-such-compiler"))
    plain = mock.patch.object(torch, "compile", lambda function=None, **_: function or (lambda given: given))
    with cxx if without else plain, mock.patch.object(muon_compilation, "_compiles", True):
        for name in [name for name in sys.modules if name.startswith("deepspeed.runtime.zero.muon")]:
            del sys.modules[name]
        try:
            return train(directory, optim="muon", zero_stage=1)
        finally:
            cpp_builder.cpp_compiler_search.cache_clear()


def test_muon_runs_without_a_compiler(tmp_path: Path) -> None:
    ((wanted, none),) = pool(1).run(muon, tmp_path, False)
    ((found, (warning,)),) = pool(1).run(muon, tmp_path, True)
    assert_equal(found, wanted)
    assert not none and "Muon's kernels run uncompiled" in warning and "No working C++ compiler" in warning
