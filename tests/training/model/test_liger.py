"""Liger kernels: refused where they cannot run; put in where the package is; the way its loss reads weights."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.training.model.liger import apply_liger, liger_problems
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.ranks import free_port
from tests.support.compare import assert_equal
from tests.support.models import PlainLanguageModel, RaggedTokens, Regression, tiny_llama
from tests.support.pool import pool
from tests.support.runs import train_and_report

installed = importlib.util.find_spec("liger_kernel") is not None
needs_kernels = pytest.mark.skipif(
    not installed or importlib.util.find_spec("triton") is None, reason="liger-kernel or triton is not installed"
)
needs_package = pytest.mark.skipif(not installed, reason="liger-kernel is not installed")


def test_liger_is_rejected_on_the_cpu_before_anything_starts(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_liger_kernel=True, use_cpu=True)
    with pytest.raises(ConfigError, match="Liger's kernels run on GPUs, but this run is on the CPU"):
        Trainer(tiny_llama(), args)


@pytest.mark.skipif(installed, reason="liger-kernel is installed")
def test_liger_is_rejected_without_the_package() -> None:
    (problem,) = liger_problems(tiny_llama(), None, "cuda")
    assert problem == "use_liger_kernel=True needs a package that is not installed: run pip install liger-kernel."


def test_a_liger_config_without_liger_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"liger_kernel_config=.* needs use_liger_kernel=True"):
        Trainer(tiny_llama(), TrainingArguments(str(tmp_path), liger_kernel_config={"rope": True}, use_cpu=True))


@needs_package
def test_liger_kernels_are_applied() -> None:
    model: Any = tiny_llama()
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    apply_liger(model, {"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": True})
    assert "Liger" in repr(model.model.norm)
    assert model.forward.__func__.__module__.startswith("liger_kernel.")
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before


@needs_package
def test_models_that_liger_would_ignore_are_rejected() -> None:
    assert liger_problems(tiny_llama(), {"rms_norm": True}, "cuda") == []
    (problem,) = liger_problems(tiny_llama(), {"rmsnorm": True}, "cuda")
    assert "'rmsnorm' is not a kernel for llama models" in problem and "Did you mean 'rms_norm'?" in problem
    (problem,) = liger_problems(Regression(), None, "cuda")
    assert re.search("no kernels for Regression, which has no config.model_type", problem)
    with pytest.raises(ConfigError, match="no kernels for Regression"):
        apply_liger(Regression(), None)


def interpreted(*arguments: object, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """tests/training/model/liger_run.py in new processes: Triton reads its setting when kernels are defined."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_port()}"]
    script = ["-m", "tests.training.model.liger_run", *map(str, arguments)]
    return subprocess.run(
        [sys.executable, *launcher, *script], capture_output=True, text=True, timeout=300, env=environment
    )


@needs_kernels
@pytest.mark.parametrize(("ranks", "stage", "packing"), [(1, 1, 0), (2, 1, 1), (2, 3, 0)])
def test_the_losses_of_the_kernel_are_ours(ranks: int, stage: int, packing: int, tmp_path: Path) -> None:
    """The real one, interpreted on the CPU."""
    run = interpreted(tmp_path, stage, packing, 0, ranks=ranks)
    assert run.returncode == 0, run.stderr[-3000:]
    results = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("[[")]
    assert len(results) == ranks
    for ours, found in results:
        assert len(ours) == 4 and found == pytest.approx(ours, rel=1e-6)


@needs_kernels
def test_a_kernel_that_is_wrong_is_refused_at_the_first_batch(tmp_path: Path) -> None:
    run = interpreted(tmp_path, 1, 0, 1)
    assert run.returncode != 0
    assert "Liger's fused loss of a prefix" in run.stderr and "fused_linear_cross_entropy" in run.stderr


class ReadsTheHead(PlainLanguageModel):
    """As Liger's fused loss does it: the head's weight is read from outside the head, which is never called."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        hidden, _ = self.mixer(self.embedding(input_ids))
        logits = F.linear(self.norm(hidden), self.head.weight, self.head.bias)
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


@pytest.mark.cases(1)
@pytest.mark.parametrize("persistent", [True, False])
def test_zero3_gathers_a_head_that_is_only_read(persistent: bool, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"learning_rate": 2e-3, "per_device_train_batch_size": 4}
    data = partial(RaggedTokens, 24)
    (wanted, *_) = pool(2).run(partial(train_and_report, PlainLanguageModel, data, str(tmp_path), **changes))
    if not persistent:
        changes["deepspeed"] = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    else:
        changes["zero_stage"] = 3
    for found in pool(2).run(partial(train_and_report, ReadsTheHead, data, str(tmp_path), **changes)):
        assert_equal(found, wanted)
