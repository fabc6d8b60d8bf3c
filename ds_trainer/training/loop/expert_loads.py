"""What is logged of divided experts: how evenly tokens are routed in each layer, and what ranks send each other."""

from __future__ import annotations

import torch
from torch import nn

from ds_trainer.parallel.groups import parallel_groups
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.model.expert_division import EXCHANGE, divided_layers
from ds_trainer.utils import distributed


def expert_log(model: nn.Module, layout: ParallelLayout, steps: int, device: torch.device) -> dict[str, float]:
    """The loads of experts since the last call, by log key; empty without divided experts. Collective.

    Over all ranks that see different tokens: entropy of a layer's load, 1 if all experts get as many tokens; the share
    that the busiest expert gets; experts that get none. Without a layer in the name, the worst of all layers, and the
    sum of dead experts. ``expert_exchange_gb`` is what this rank sends to others in a step, in 10^9 bytes.

    Args:
        model: the model.
        layout: the layout of the job.
        steps: optimizer steps since the last call.
        device: the device of this rank.
    """
    if layout.ep == 1:
        return {}
    exchanges = {name: vars(module)[EXCHANGE] for name, module in divided_layers(model).items()}
    loads = [exchange.take_load(device) for exchange in exchanges.values()]
    flat = torch.cat(loads)
    distributed.all_reduce_sum(flat, group=parallel_groups(layout).seq_data_parallel)
    sent = sum(exchange.take_bytes_sent() for exchange in exchanges.values())
    found: dict[str, float] = {}
    worst = [1.0, 0.0, 0]
    for name, load in zip(exchanges, flat.double().cpu().split([len(load) for load in loads]), strict=True):
        share = load / load.sum().clamp(min=1)
        entropy = float(torch.special.entr(share).sum() / max(torch.tensor(len(load)).double().log(), 1e-30))
        busiest, dead = float(share.max()), int((load == 0).sum())
        found |= {f"experts/{name}/{key}": value for key, value in zip(_KEYS, (entropy, busiest, dead), strict=True)}
        worst = [min(worst[0], entropy), max(worst[1], busiest), worst[2] + dead]
    totals = {"expert_load_entropy": worst[0], "expert_busiest_share": worst[1], "dead_experts": float(worst[2])}
    return {**totals, "expert_exchange_gb": sent / 1e9 / steps, **found}


_KEYS = ("entropy", "busiest_share", "dead")
