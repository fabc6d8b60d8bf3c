from __future__ import annotations

import torch
from torch import nn

from ds_trainer.engine.fake_group import fake_process_group
from ds_trainer.engine.meta_engine import engines_on_meta, move_to_meta
from tests.support.forks import in_a_fork


def test_a_model_on_meta_keeps_its_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    model[0].weight.mark = "kept"  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = list(map(id, model.parameters()))
    move_to_meta(model)
    assert list(map(id, model.parameters())) == before == list(map(id, optimizer.param_groups[0]["params"]))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model[1].weight is model[0].weight
    assert model[0].weight.mark == "kept"  # type: ignore[comparison-overlap]
    assert not model[0].bias.requires_grad


def initialize(large: int) -> tuple[list[str], list[bool], bool]:
    """The devices of tensors that are made inside ``deepspeed.initialize``, and the operators it would load."""
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    found: list[torch.Tensor] = []

    def stand_in() -> None:
        found.append(torch.empty(large))
        found.append(torch.zeros(2, large, device="cpu"))
        found.append(torch.zeros(1))
        found.append(torch.empty(large, device="meta").to("cpu", dtype=torch.float64))
        found.append(torch.empty(large, device="meta").cpu())
        DeepSpeedCPUAdam([nn.Parameter(torch.zeros(1))])

    with fake_process_group(16, 8):
        real, deepspeed.initialize = deepspeed.initialize, stand_in
        with engines_on_meta() as operators:
            deepspeed.initialize()
            outside = torch.empty(1).is_meta
        assert deepspeed.initialize is stand_in
        deepspeed.initialize = real
    return operators, [tensor.is_meta for tensor in found], outside


def test_what_deepspeed_allocates_on_the_host_is_on_meta() -> None:
    operators, on_meta, outside = in_a_fork(initialize, 2**40)
    assert operators == ["cpu_adam"]
    assert (on_meta, outside) == ([True, True, False, True, True], False)


def groups_of(ranks: int, local_ranks: int) -> tuple[int, int, int, str, str | None]:
    import os

    import torch.distributed as dist

    with fake_process_group(ranks, local_ranks) as made:
        dist.new_group([0, 1], backend="gloo", use_local_synchronization=True)
        values = dist.get_world_size(), made.groups, made.members, dist.get_backend(), os.environ["LOCAL_WORLD_SIZE"]
    assert not dist.is_initialized()
    return values


def test_a_fake_group_has_any_number_of_ranks() -> None:
    assert in_a_fork(groups_of, 4096, 8) == (4096, 1, 2, "fake", "8")
