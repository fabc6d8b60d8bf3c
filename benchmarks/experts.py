"""Divided experts at size, on one rank of many: bytes, kernels, host time, largest weight, time to divide.

The ranks are fake (torch's fake process group): the others send what this rank sends. The whole model is on the meta
device, and divided as in a training. One layer of its experts has small weights of its own, so that the time is that
of the host; its rows and kernels are counted, and bytes are rows times the width of the real layer. Without division,
ZeRO 3 gathers all weights twice and reduces their gradients once: by arithmetic. Nothing here is measured on GPUs::

    python benchmarks/experts.py
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.fake_world import Counts, fake_world
from ds_trainer.parallel.expert_exchange import ExpertExchange
from ds_trainer.parallel.groups import parallel_groups
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.model.expert_division import divide_experts

MODELS: dict[str, dict[str, int]] = {
    "30B-A3B": dict(hidden_size=2048, num_hidden_layers=48, moe_intermediate_size=768, num_attention_heads=32),
    "235B-A22B": dict(hidden_size=4096, num_hidden_layers=94, moe_intermediate_size=1536, num_attention_heads=64),
}
SHARED: dict[str, Any] = dict(
    num_experts=128,
    num_experts_per_tok=8,
    num_key_value_heads=4,
    head_dim=128,
    vocab_size=151936,
    intermediate_size=6144,
    tie_word_embeddings=False,
)
TOKENS, WIDTH, ROUNDS = 4096, 16, 5
_NO_KERNEL = ("view", "detach", "alias", "as_strided", "slice", "select", "expand", "transpose", "t.default", "permute")


class Kernels(TorchDispatchMode):
    """Counts the operations that start a kernel on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if not any(part in name for part in _NO_KERNEL):
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


class SameEverywhere(ExpertExchange):
    """As if all other ranks had the tokens and routes of this one."""

    def send(
        self,
        arriving: torch.Tensor,
        rows: torch.Tensor,
        received: list[int] | None = None,
        sent: list[int] | None = None,
    ) -> None:
        """All ranks have the counts of this one."""
        super().send(arriving, rows, received, sent)  # counts, and the fake group
        ranks = self.group.size()
        if sent is None:
            arriving.view(ranks, -1)[:] = rows
        else:
            arriving.zero_()


class Layer(nn.Module):
    """The experts of a layer with a small width, on this rank or all."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        config = dict(hidden_size=WIDTH, moe_intermediate_size=WIDTH, num_experts=experts, num_experts_per_tok=8)
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        made = Qwen3MoeConfig(**config)
        made._experts_implementation = "grouped_mm"
        self.experts = Qwen3MoeExperts(made)
        nn.init.normal_(self.experts.gate_up_proj)
        nn.init.normal_(self.experts.down_proj)


def _even(tokens: int) -> torch.Tensor:
    """Each expert gets as many tokens."""
    return (torch.arange(tokens * 8) * 16 + torch.arange(tokens * 8) // 8).view(tokens, 8) % SHARED["num_experts"]


def layer_figures(layout: ParallelLayout, tokens: int) -> dict[str, float]:
    """Kernels, CPU seconds and rows to other ranks of a forward and backward pass of a layer, in the exchange alone."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    experts = SHARED["num_experts"] // layout.ep
    layer = Layer(experts).experts
    compute: Any = grouped_mm_experts_forward
    exchange = None
    if layout.ep > 1:
        compute = exchange = SameEverywhere(
            "layer", parallel_groups(layout).experts, experts, grouped_mm_experts_forward, lambda _: 2**40
        )
    chosen, weights = _even(tokens), torch.full((tokens, 8), 0.125, requires_grad=True)

    def both_passes() -> None:
        hidden = torch.randn(tokens, WIDTH, requires_grad=True)
        compute(layer, hidden, chosen, weights).sum().backward()

    both_passes()
    if exchange is not None:
        exchange.take_bytes_sent()
    with Kernels() as kernels:
        both_passes()
    sent = exchange.take_bytes_sent() / (4 * WIDTH) if exchange is not None else 0.0
    few = tokens
    tokens = 8  # the host's part alone
    chosen, weights = _even(tokens), torch.full((tokens, 8), 0.125, requires_grad=True)
    both_passes()
    began = time.process_time()
    for _ in range(ROUNDS):
        both_passes()
    seconds = (time.process_time() - began) / ROUNDS
    return {"kernels": sum(kernels.counts.values()), "seconds": seconds, "rows": sent / few}


def model_figures(name: str, layout: ParallelLayout) -> dict[str, float]:
    """Elements of a rank and of its largest tensor, and CPU seconds to divide the model, which is on meta."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SHARED, **MODELS[name]))
    whole = sum(parameter.numel() for parameter in model.parameters())
    began = time.process_time()
    if layout.ep > 1:
        divide_experts(model, parallel_groups(layout))
    seconds = time.process_time() - began
    sizes = [parameter.numel() for parameter in model.parameters()]
    return {"all": whole, "elements": sum(sizes), "largest": max(sizes), "divide": seconds}


def line(name: str, devices: int, ep: int, tokens: int) -> str:
    """A line of the table."""
    shape = MODELS[name]
    with fake_world(devices, Counts()):
        layout = ParallelLayout(devices, ep=ep)
        parallel_groups(layout)
        of_model, of_layer = model_figures(name, layout), layer_figures(layout, tokens)
    layers, width = shape["num_hidden_layers"], shape["hidden_size"]
    exchanged = of_layer["rows"] * tokens * width * 2 * layers
    gathered = 3 * 2 * of_model["all"] * (devices - 1) / devices if ep == 1 else 0.0
    cells = (
        *(name, f"{devices}", "whole, ZeRO 3" if ep == 1 else f"over {ep}"),
        *(f"{gathered / 1e9:,.0f}" if gathered else f"{exchanged / 1e9:,.1f}", f"{of_layer['kernels'] * layers:,.0f}"),
        *(f"{of_layer['seconds'] * layers:.3f}", f"{of_model['largest'] * 2 / 1e9:.2f}"),
        *(f"{of_model['elements'] * 2 / 1e9:,.0f}", f"{of_model['divide']:.2f}"),
    )
    return f"| {' | '.join(cells)} |"


HEADS = (
    "model",
    "devices",
    "experts",
    "GB sent",
    "kernels",
    "host, s",
    "largest weight, GB",
    "weights, GB",
    "divide, s",
)


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a rank in a micro-batch")
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    options = parser.parse_args(arguments)
    print(f"| {' | '.join(HEADS)} |\n{'|---' * len(HEADS)}|")
    for name in options.models:
        for devices in options.devices:
            for ep in (1, 8, *([64] if devices >= 64 else [])):
                print(line(name, devices, ep, options.tokens), flush=True)


if __name__ == "__main__":
    main()
