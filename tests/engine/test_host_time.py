"""Work of DeepSpeed without effect is left out, and nothing else."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import count_used_parameters_in_backward
from deepspeed.runtime.zero import stage3, stage_1_and_2
from deepspeed.utils import nvtx
from torch import nn

from ds_trainer.engine.host_time import check_for_duplicates, spare_host_time, used_in_backward

THEIRS = DeepSpeedEngine._check_for_duplicates  # before any test leaves it out


class Branches(nn.Module):
    """Layers that a pass uses or not, a frozen one, one that is used twice, a weight of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.frozen = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.twice, self.tied = nn.Linear(3, 3, bias=False), nn.Linear(3, 3)
        self.tied.weight = self.used.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.twice(self.twice(self.frozen(self.tied(self.used(x))))).sum()


def test_parameters_of_a_backward_pass_are_counted_as_deepspeed_counts_them() -> None:
    model = Branches()
    every = [parameter for part in model.modules() for parameter in part.parameters(recurse=False)]  # one weight twice
    found: list[tuple[int, int]] = []

    def hook(parameter: torch.Tensor) -> None:
        found.append((used_in_backward(every), count_used_parameters_in_backward(every)))
        found.append((used_in_backward([]), 0))
        found.append((used_in_backward(list(model.frozen.parameters())), 0))

    model.twice.weight.register_post_accumulate_grad_hook(hook)
    model(torch.ones(2, 3)).backward()
    torch.autograd.backward(model(torch.ones(2, 3)), inputs=[model.twice.weight, model.tied.bias])
    assert [one for one, _ in found] == [other for _, other in found]
    assert found[0] == (4, 4)
    assert found[3] == (2, 2)


@pytest.mark.parametrize("variable", ["", "NVTX_INJECTION64_PATH"])
def test_ranges_are_named_where_a_tool_reads_them(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvtx, "enable_nvtx", True)
    for name in ("NVTX_INJECTION64_PATH", "NVTX_INJECTION32_PATH"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "libToolsInjection64.so")
    ranges: list[str] = []
    monkeypatch.setattr(nvtx, "_range_push", lambda accelerator, message: ranges.append(message))
    spare_host_time()
    nvtx.instrument_w_nvtx(len)([])
    assert len(ranges) == int(bool(variable))


@pytest.mark.parametrize("doubled", [(), ("used.weight",), ("twice.weight", "frozen.bias")])
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_duplicates_are_found_as_deepspeed_finds_them(doubled: tuple[str, ...]) -> None:
    """In one group or in two, also frozen and tied ones."""
    model = Branches()
    named = dict(model.named_parameters())
    optimizer = torch.optim.SGD([{"params": [named.pop("tied.bias")]}, {"params": list(named.values())}], lr=1.0)
    for group, name in zip(optimizer.param_groups, doubled, strict=False):
        group["params"].append(named[name])
    engine: Any = SimpleNamespace(module=model)
    said: list[str] = []
    for check in (THEIRS, check_for_duplicates):
        try:
            check(engine, optimizer)
            said.append("")
        except AssertionError as error:
            said.append(str(error))
    assert said[0] == said[1]
    assert bool(said[0]) == bool(doubled)
    spare_host_time()
    assert DeepSpeedEngine._check_for_duplicates is check_for_duplicates


def test_duplicates_are_looked_for_in_linear_time() -> None:
    """18,900 tensors are those of 48 layers with 128 experts that are not stacked."""
    model = nn.ParameterList([torch.zeros(1) for _ in range(18_900)])
    engine, optimizer = SimpleNamespace(module=model), torch.optim.SGD(model.parameters(), lr=1.0)
    began = time.process_time()
    check_for_duplicates(engine, optimizer)
    assert time.process_time() - began < 5  # DeepSpeed's takes about 27 s


def test_devices_of_a_cpu_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed.utils.numa
    from deepspeed.accelerator import get_accelerator

    accelerator: Any = get_accelerator()
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    monkeypatch.delitem(vars(accelerator), "device_count", raising=False)
    asked: list[int] = []
    cores = deepspeed.utils.numa.get_numa_cores
    monkeypatch.setattr(deepspeed.utils.numa, "get_numa_cores", lambda: asked.append(1) or cores())
    expected = accelerator.device_count()
    spare_host_time()
    assert [accelerator.device_count() for _ in range(3)] == [expected] * 3
    assert len(asked) == 2
    assert (
        stage3.count_used_parameters_in_backward is stage_1_and_2.count_used_parameters_in_backward is used_in_backward
    )
