"""Which elements a rank holds, for wrappers of DeepSpeed that the round trip cannot build on a CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from torch import nn

from ds_trainer.engine.state.flat_partitions import flat_partitions, zero_shard_slice


@pytest.mark.parametrize(("rank", "run"), [(0, (0, 3)), (1, (3, 6)), (2, (6, 7)), (3, (7, 7))])
def test_padding_of_stage_3_is_no_state(rank: int, run: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks hold three elements each of a parameter of seven: the last five are padding."""
    monkeypatch.setattr("torch.distributed.get_rank", lambda group: rank)
    parameter = SimpleNamespace(ds_shape=(7,), shape=(0,), partition_numel=lambda: 3, ds_process_group="all ranks")
    held = zero_shard_slice(parameter, tp_rank=0)
    assert (held.start, held.stop, len(held)) == (*run, run[1] - run[0])


def test_masters_of_a_fused_optimizer_follow_each_other() -> None:
    """Stage 0 in fp16 on a GPU: the masters of a group are one tensor."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    parameters = list(model.parameters())
    master = nn.Parameter(torch.cat([parameter.detach().flatten() for parameter in parameters]))
    wrapper = FP16_Optimizer.__new__(FP16_Optimizer)
    wrapper.optimizer = torch.optim.Adam([master])
    wrapper.fp16_groups, wrapper.fp32_groups_flat = [parameters], [master]
    engine = SimpleNamespace(module=model, optimizer=wrapper, basic_optimizer=wrapper.optimizer)
    (partition,) = flat_partitions(engine, tp_rank=0)  # type: ignore[arg-type]
    assert [fragment.name for fragment in partition.fragments] == [name for name, _ in model.named_parameters()]
    for fragment in partition.fragments:
        held = partition.tensor[fragment.offset : fragment.offset + len(fragment.slice)]
        assert torch.equal(held, fragment.parameter.flatten())
