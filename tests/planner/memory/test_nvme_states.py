"""Offload to NVMe: host memory and files of real engines, against the model of the memory.

DeepSpeed's sizes of buffers are made for large models. Here they are small, in the engine and in the planner.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.planner.candidate import Candidate
from ds_trainer.planner.memory import estimate as states
from ds_trainer.planner.memory.elements import elements_of
from ds_trainer.planner.offload_sizes import PARAM_BUFFERS
from ds_trainer.planner.planned_model import PlannedModel
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import pool

pytestmark = [pytest.mark.jit, pytest.mark.needs("libaio.h")]

SUB_GROUP, IN_HOST = 5_000_000, 8_000_000
SIZES = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2, "vocab_size": 4096}


def measure(folder: Path, extensions: str, param: str, in_host: int, bf16: bool) -> dict[str, float]:
    """Bytes of this rank: in host memory by name, and of its files."""
    os.environ["TORCH_EXTENSIONS_DIR"] = extensions
    disk = folder / "nvme"
    disk.mkdir(parents=True, exist_ok=True)
    zero: dict[str, Any] = {"stage": 3, "sub_group_size": SUB_GROUP, "offload_optimizer": {"device": "nvme"}}
    zero["offload_param"] = {"device": param}
    zero["offload_optimizer"]["nvme_path"] = str(disk)
    if param == "nvme":
        zero["offload_param"].update(nvme_path=str(disk), max_in_cpu=in_host)
    args = TrainingArguments(
        str(folder),
        deepspeed={"zero_optimization": zero},
        max_steps=2,
        use_cpu=True,
        bf16=bf16,
        disable_tqdm=True,
        save_strategy="no",
        per_device_train_batch_size=2,
    )
    trainer = Trainer(tiny_llama(**SIZES), args, train_dataset=RaggedTokens(16))
    trainer.train()
    engine: Any = trainer.engine.deepspeed.optimizer

    def size(*tensors: torch.Tensor | None) -> float:
        storages = {one.untyped_storage()._cdata: one.untyped_storage() for one in tensors if one is not None}
        return float(sum(storage.nbytes() for storage in storages.values()))

    found = {
        "gradients": size(engine.grad_partitions_flat_buffer),
        "optimizer buffers": size(*engine.optimizer_swapper.swap_buffer_manager.all_buffers),
    }
    rank = torch.distributed.get_rank()
    masters = [path for path in disk.rglob("*") if path.is_file() and "optimizer" in path.parts]
    found["optimizer files"] = float(sum(path.stat().st_size for path in masters if f"rank{rank}" in path.parts))
    if param == "nvme":
        swapper = next(one.nvme_swapper for group in engine.fp16_groups for one in group)
        found["weights"] = size(*engine.param_groups_fp16_flat_cpu_memory)
        found["weight buffers"] = size(swapper.buffers)
        found["buffer of updated weights"] = size(swapper.partitioned_swap_buffer)
        files = [path for path in disk.rglob("*") if path.is_file() and "optimizer" not in path.parts]
        found["weight files"] = float(sum(path.stat().st_size for path in files if f"rank{rank}" in path.parts))
    trainer.engine.close()
    return found


def trained(folder: Path, extensions: str, in_host: int | None) -> tuple[list[float], list[float], int]:
    """Loss and gradient norm of each step, and most buffers that were used at a time.

    Args:
        folder: for the run.
        extensions: where compiled operators are.
        in_host: ``max_in_cpu``; None trains without offload.
    """
    os.environ["TORCH_EXTENSIONS_DIR"] = extensions
    folder.mkdir(exist_ok=True)
    zero: dict[str, Any] = {"stage": 3}
    if in_host is not None:
        for part in ("offload_param", "offload_optimizer"):
            zero[part] = {"device": "nvme", "nvme_path": str(folder)}
        zero["offload_param"]["max_in_cpu"] = in_host
    torch.manual_seed(0)
    args = TrainingArguments(
        str(folder),
        deepspeed={"zero_optimization": zero},
        max_steps=4,
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=1,
        per_device_train_batch_size=2,
    )
    trainer = Trainer(tiny_llama(**SIZES), args, train_dataset=RaggedTokens(32))
    used = 0

    def count(module: torch.nn.Module, *_: Any) -> None:
        nonlocal used
        swapper = next((getattr(one, "nvme_swapper", None) for one in module.parameters()), None)
        if swapper is not None:
            used = max(used, swapper.param_buffer_count - swapper.available_swap_in_buffers())

    for module in trainer.model.modules():
        module.register_forward_hook(count)
        module.register_full_backward_hook(count)
    trainer.train()
    steps = [step for step in trainer.state.log_history if "loss" in step]
    trainer.engine.close()
    return [step["loss"] for step in steps], [step["grad_norm"] for step in steps], used


@pytest.mark.extended
@pytest.mark.cases(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_on_nvme_train_like_without_offload(ranks: int, extensions: str, tmp_path: Path) -> None:
    """With the compiled buffers. All weights are on the disk: ``max_in_cpu`` is 0."""
    plain = pool(ranks).run(partial(trained, tmp_path / "plain", extensions, None))
    found = pool(ranks).run(partial(trained, tmp_path / "nvme", extensions, 0))
    for (losses, norms, used), (wanted, wanted_norms, none) in zip(found, plain, strict=True):
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert norms == pytest.approx(wanted_norms, rel=1e-5)
        assert 0 < used <= PARAM_BUFFERS and none == 0


@pytest.mark.cases(1)
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("param", "in_host"), [("cpu", 0), ("nvme", 10**9), ("nvme", IN_HOST)])
def test_host_memory_and_files(
    param: str, in_host: int, bf16: bool, extensions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("SUB_GROUP", SUB_GROUP), ("PARAMS_IN_HOST", in_host)):
        monkeypatch.setattr(states, name, value)
    ranks = pool(2).run(partial(measure, tmp_path, extensions, param, in_host, bf16))
    run = Candidate(
        2,
        64,
        precision="bf16" if bf16 else "fp32",
        offload_optimizer=True,
        offload_param=True,
        optimizer_on_nvme=True,
        param_on_nvme=param == "nvme",
    )
    elements = elements_of(PlannedModel.from_module(tiny_llama(**SIZES)), 1)
    _, host = states.model_states(elements, run)
    files = states.nvme_states(elements, run)
    wanted = {name: max(found[name] for found in ranks) for name in ranks[0]}
    optimizer = wanted.pop("optimizer files")
    # What is smaller than 1 MB has no file: shards of vectors, and gradients of small matrices.
    assert sum(size for name, size in files.items() if name != "weights") == pytest.approx(optimizer, rel=0.1)
    if param == "nvme":
        assert files["weights"] == pytest.approx(wanted.pop("weight files"), rel=0.1)
    # How far the last parameter of a sub-group exceeds the limit depends on the order: the largest one is counted.
    for name in ("optimizer buffers", "buffer of updated weights"):
        size = wanted.pop(name, 0.0)
        assert size <= host.get(name, 0.0) <= 1.3 * size, name
    for name, size in wanted.items():
        assert host.get(name, 0.0) == pytest.approx(size, rel=0.05, abs=1e4), name
