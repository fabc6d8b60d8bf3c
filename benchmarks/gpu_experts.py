"""One layer of divided experts on one GPU: tokens per second, the share of the exchange, grouped products and the loop.

The experts of a layer of Qwen3-30B-A3B (128 of width 768, hidden size 2,048, 8 of a token) in bf16, with even routing
and with all tokens at the experts of one rank. With 1, 2 and 4 ranks, which share the GPU: the numbers say whether
NCCL's code works and what the exchange costs beside the products, not what several GPUs reach. ``loop`` is the loop
over experts of transformers' class, ``grouped`` torch's ``grouped_mm``.

    python benchmarks/gpu_experts.py --out experts.json
    python benchmarks/gpu_experts.py --device cpu          the same code, small: does it run?
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from gpu_loss import ROUNDS, WARMUP, milliseconds
from gpu_throughput import synchronize
from kept_results import Results
from torch import nn

from ds_trainer.parallel.expert_exchange import ExpertExchange
from ds_trainer.parallel.groups import parallel_groups
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.utils.devices import nccl_on_one_gpu
from ds_trainer.utils.ranks import free_port

SHAPE = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
SMALL = {"hidden_size": 32, "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2}
CALLS = ROUNDS + WARMUP
SECONDS = 120  # of all cases of a number of ranks


def experts_of(shape: dict[str, int], device: str) -> Any:
    """Experts with weights."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    torch.manual_seed(0)
    config = Qwen3MoeConfig(**shape)
    config._experts_implementation = "eager"
    with torch.device(device):
        experts = Qwen3MoeExperts(config).to(torch.bfloat16)
    for weight in experts.parameters():
        nn.init.normal_(weight, std=0.02)
    return experts


def cases(shape: dict[str, int], device: str, tokens: int) -> Iterator[dict[str, Any]]:
    """Those of this rank."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    ranks, number, k = torch.distributed.get_world_size(), shape["num_experts"], shape["num_experts_per_tok"]
    experts = experts_of({**shape, "num_experts": number // ranks}, device)
    group = parallel_groups(ParallelLayout(ranks, ep=ranks)).experts
    exchange = ExpertExchange("layer", group, number // ranks, grouped_mm_experts_forward)
    ways: dict[str, Callable[..., torch.Tensor]] = {"exchange": lambda *values: exchange(experts, *values)}
    if ranks == 1:
        ways |= {"loop": experts, "grouped": lambda *values: grouped_mm_experts_forward(experts, *values)}
    hidden = torch.randn(tokens, shape["hidden_size"], device=device, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.full((tokens, k), 1 / k, device=device, dtype=torch.bfloat16)
    places = torch.arange(tokens * k, device=device).view(tokens, k)
    for routing, chosen in (("even", places % number), ("to one rank", places % (number // ranks))):
        for name, way in ways.items():

            def both(way: Any = way, chosen: Any = chosen) -> None:
                torch.autograd.grad(way(hidden, chosen, weights).sum(), [hidden, *experts.parameters()])

            both()  # NCCL connects
            synchronize(device)
            exchange.take_seconds(), exchange.take_bytes_sent()
            ms, _ = milliseconds(device, both)
            share, sent = exchange.take_seconds() * 1e3 / (CALLS * ms), exchange.take_bytes_sent() // CALLS
            found = {"ranks": ranks, "routing": routing, "way": name, "ms": ms, "exchange_share": share}
            yield {**found, "tokens_per_second": 1e3 * tokens * ranks / ms, "bytes_sent": sent}


def serve(options: argparse.Namespace) -> None:
    """A rank: writes its cases, if it is the first one."""
    rank, is_gpu = int(os.environ["RANK"]), options.device == "cuda"
    os.environ |= nccl_on_one_gpu(rank) if is_gpu else {}
    torch.distributed.init_process_group("nccl" if is_gpu else "gloo")
    for found in cases(SHAPE if is_gpu else SMALL, options.device, 4096 if is_gpu else 64):
        if rank == 0:
            with options.serve.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
    torch.distributed.destroy_process_group()


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no case after this time")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options)
        return 0
    results, passed = Results(options.out, options.device, options.minutes), True
    for ranks in options.ranks:
        if results.out_of_time:
            break
        with TemporaryDirectory() as directory:
            file = Path(directory) / "cases.jsonl"
            launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_port()}"]
            command = [sys.executable, *launcher, __file__, "--device", options.device, "--serve", str(file)]
            ended = subprocess.run(command, timeout=SECONDS if options.device == "cuda" else None).returncode
            for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
                results.add(json.loads(line))
                print(results.cases[-1], flush=True)
        passed &= ended == 0
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
