"""The gradient self-test: compares the gradient of the engine, on this installation and ranks, with plain PyTorch.

Some versions of DeepSpeed computed wrong gradients without an error. ZeRO-2 in 0.17.6 to 0.18.2 lost micro-batches in
accumulation (this test detects it: docs/how-to/doctor.md). ZeRO-2 with bf16 in 0.18.3 to 0.19.3 was wrong on GPUs if a
module was used more than once. So the test trains a tiny model for two steps through the same engine as a real run:

* One layer is used twice. Another one uses reentrant checkpointing, which runs a backward pass inside the outer one.
* A step has two micro-batches. Each micro-batch of a rank has a unique token, and no other micro-batch contributes to
  the gradient of its embedding row. So the report can name a contribution that is lost or counted twice.
* At most 64 ranks, spread over nodes and over places in a node, contribute to the gradient; the others contribute zero.
  This limits the number of terms in a bf16 sum, and the tolerance, the model and the reference do not depend on the
  number of ranks.
* Buckets are so small that the gradient needs several.
* With tensor parallelism two layers are partitioned, by columns and by rows. The input of the first is a transposed
  tensor, whose gradient some versions of DeepSpeed do not add up.
* With expert parallelism there is a mixture with an expert for each of its ranks; the token decides which two it uses.
* The first step has a learning rate of zero: gradients left over from it would show in the second step.
* Between them are two steps that must change nothing: one that is skipped, and one whose loss is not finite.
* The learning rate of the second step is so large that the new weights are almost equal to minus the gradient times
  this rate. The gradient is read from them in the same way for all stages and precisions.

Every rank generates the samples of all ranks and computes the reference in float64. Only the engine communicates.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.engine.expert_parallel import mark_experts, separate_experts
from ds_trainer.engine.finite_step import SkippedStepError
from ds_trainer.engine.training_engine import TrainingEngine
from ds_trainer.engine.weights import gathered
from ds_trainer.parallel.expert_exchange import ExpertExchange
from ds_trainer.parallel.groups import parallel_groups
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.two_runs import relative_difference

WIDTH = 16
WIDE = 2 * WIDTH
"""Features between the partitioned layers: as many tensor-parallel ranks can be tested."""
PARTITION = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r"wide\.weight$"], "partition_type": "column"},
        {"patterns": [r"narrow\.weight$"], "partition_type": "row"},
    ],
}
"""``tensor_parallel.partition_config`` of the model."""
ACCUMULATION = 2
MICRO_BATCH = 2
TOKENS = 3
STEPS = 2
CONTRIBUTORS = 64
"""Largest number of contributing ranks. A bf16 sum of so many terms is correct to a few percent in any order."""
COMMON_TOKENS = 4
LEARNING_RATE = 2.0**12  # the largest float16 is 65504
TOLERANCE = {"fp32": 1e-3, "fp16": 0.02, "bf16": 0.08}
"""Largest relative difference (2-norm) of a row or tensor; a lost or doubled contribution is a difference of 1.

By the coarsest dtype through which a gradient passes, in computing, accumulating or communicating.
"""


@dataclass(frozen=True)
class GradientReport:
    """The result of the self-test.

    Attributes:
        stage, precision: the tested ZeRO stage, and fp32, bf16, fp16 or the dtype of autocast.
        tp, ep: the tested numbers of tensor-parallel and expert-parallel ranks.
        ranks: number of ranks; at most :data:`CONTRIBUTORS` of them contributed to the gradient.
        error: the largest relative difference between the engine and plain PyTorch.
        tolerance: the largest allowed difference.
        wrong: a sentence for each larger difference, the largest first.
    """

    stage: int
    precision: str
    tp: int
    ranks: int
    error: float
    tolerance: float
    wrong: tuple[str, ...]
    ep: int = 1

    @property
    def good(self) -> bool:
        """Whether the gradient of the engine is correct."""
        return not self.wrong

    @property
    def title(self) -> str:
        """``ZeRO-2 bf16``, or ``ZeRO-2 bf16, tp 4``."""
        sizes = [f", {axis} {size}" for axis, size in (("tp", self.tp), ("ep", self.ep)) if size > 1]
        return f"ZeRO-{self.stage} {self.precision}{''.join(sizes)}"


class TinyExperts(nn.Module):
    """Square matrices, two of which a token is multiplied by."""

    exchange: Any = None

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.weight = nn.Parameter(torch.empty(experts, WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The results of two experts of each of ``tokens``, of shape [n], with weights 0.75 and 0.25."""
        chosen = torch.stack([tokens, tokens + 1], dim=1) % self.experts
        weights = hidden.new_tensor([0.75, 0.25]).expand(len(tokens), 2)
        return (self.exchange or _products)(self, hidden, chosen, weights)


def _products(module: TinyExperts, rows: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.einsum("ni,nkoi,nk->no", rows, module.weight[experts], weights)


class TinyModel(nn.Module):
    """An embedding, a layer that is used twice, a recomputed layer, a pair that tensor parallelism partitions, a head.

    The same weights on all ranks. With more than one of ``experts`` it has a mixture of them.
    """

    def __init__(self, tokens: int, experts: int = 1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.embedding = nn.Embedding(tokens, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.recomputed = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Linear(WIDTH, WIDE)
        self.narrow = nn.Linear(WIDE, WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        self.mixture = TinyExperts(experts) if experts > 1 else None
        with torch.no_grad():
            for parameter in self.parameters():
                values = (
                    torch.randn(parameter.shape, generator=generator) / 4
                )  # rounded to bf16, so they are exact in all formats
                parameter.copy_(values.bfloat16())

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Summed squared error of ``tokens`` (batch, length) and ``targets`` (batch,)."""
        hidden = torch.tanh(self.first(self.embedding(tokens)))
        hidden = torch.tanh(self.shared(hidden))
        hidden = hidden + checkpoint(self._block, hidden, use_reentrant=True)
        transposed = hidden.flatten(0, -2).t().contiguous().t()
        hidden = hidden + self.narrow(torch.tanh(self.wide(transposed))).view_as(hidden)
        if self.mixture is not None:
            hidden = hidden + self.mixture(hidden.flatten(0, -2), tokens.flatten()).view_as(hidden)
        predicted = self.head(self.shared(hidden)).squeeze(-1).mean(dim=-1)
        return (predicted.to(targets.dtype) - targets).square().sum()

    def _block(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.recomputed(hidden))


def contributors(ranks: int) -> list[int]:
    """The ranks that contribute to the gradient: one of each block of consecutive ranks, at varying offsets."""
    blocks = min(ranks, CONTRIBUTORS)
    starts = [block * ranks // blocks for block in range(blocks + 1)]
    return [start + block % (end - start) for block, (start, end) in enumerate(pairwise(starts))]


def unique_token(contributor: int, micro_batch: int) -> int:
    """The token that occurs only in this micro-batch of this contributor (both counted from zero)."""
    return COMMON_TOKENS + contributor * ACCUMULATION + micro_batch


def samples(contributor: int, micro_batch: int, step: int) -> dict[str, torch.Tensor]:
    """A micro-batch of a contributor, with its unique token and common tokens."""
    generator = torch.Generator().manual_seed(1_000_003 * step + 1009 * contributor + micro_batch)
    tokens = torch.randint(0, COMMON_TOKENS, (MICRO_BATCH, TOKENS), generator=generator)
    tokens[:, 0] = unique_token(contributor, micro_batch)
    return {"tokens": tokens, "targets": torch.randn(MICRO_BATCH, generator=generator) + 2}


def expected_gradient(ranks: int, step: int, experts: int = 1) -> dict[str, torch.Tensor]:
    """Plain PyTorch in float64: the gradient of the mean over the samples of all contributors, by parameter name."""
    number = len(contributors(ranks))
    model = TinyModel(COMMON_TOKENS + number * ACCUMULATION, experts).double()
    batches = [samples(one, micro_batch, step) for one in range(number) for micro_batch in range(ACCUMULATION)]
    tokens = torch.cat([batch["tokens"] for batch in batches])
    targets = torch.cat([batch["targets"] for batch in batches])
    (model(tokens, targets.double()) / len(targets)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def check_gradient(config: CompiledConfig, layout: ParallelLayout, device: torch.device) -> GradientReport:
    """Run the test. Collective; needs a process group.

    Args:
        config: the result of :func:`ds_trainer.monitor.doctor.gradients.self_test_config`: two micro-batches of two
            samples, no clipping, no optimizer.
        layout: every rank has different samples, also with sequence sharding; only tensor-parallel ranks share them.
        device: the device of the model.

    Afterward the random state is restored, and the memory of the engine and DeepSpeed's record of its layout are
    released.
    """
    with _restored_state(device):  # includes model creation: new layers draw random numbers
        return _checked(config, layout, device)


def _checked(config: CompiledConfig, layout: ParallelLayout, device: torch.device) -> GradientReport:
    ranks = layout.seq_data_parallel_size
    model = TinyModel(COMMON_TOKENS + len(contributors(ranks)) * ACCUMULATION, layout.ep).to(device)
    before = {name: parameter.detach().cpu().double() for name, parameter in model.named_parameters()}
    if model.mixture is not None:
        groups = parallel_groups(layout)
        mark_experts(model.mixture.weight, groups)
        model.mixture.exchange = ExpertExchange("mixture", groups.experts, 1, _products)
    optimizer = torch.optim.SGD(separate_experts([{"params": list(model.parameters())}]), lr=0.0)
    engine = TrainingEngine(model, optimizer, config, layout)
    try:
        norms: list[float] = []
        wrong: tuple[str, ...] = ()
        for step in range(STEPS):
            for group in engine.optimizer.param_groups:
                group["lr"] = LEARNING_RATE if step == STEPS - 1 else 0.0
            if step == STEPS - 1:
                wrong = _steps_without_effect(engine, step, device)
            _take_step(engine, step, device)
            norms.append(engine.grad_norm())
        after = _whole(engine.deepspeed.module)
    except (SkippedStepError, ConfigError) as error:  # the second: tensor-parallel ranks have different gradients
        norms, wrong, after = [], (str(error),), {}
    finally:
        engine.close()
    found = {name: (before[name] - after[name]) / LEARNING_RATE for name in after}
    low = config.precision.compute
    precision = f"autocast {low}" if config.precision.autocast else low
    tolerance = TOLERANCE[config.coarsest_dtype]
    report = GradientReport(
        stage=engine.stage,
        precision=precision,
        tp=layout.tp,
        ep=layout.ep,
        ranks=layout.world_size,
        error=0.0,
        tolerance=tolerance,
        wrong=wrong,
    )
    return _compare(found, norms, ranks, report) if found else report


def _steps_without_effect(engine: TrainingEngine, step: int, device: torch.device) -> tuple[str, ...]:
    """Take a step that is skipped, and one with a loss that is not finite; a sentence for each that has an effect."""
    wrong = []
    before = _whole(engine.deepspeed.module)
    for title, skip, factor in (("was skipped", True, 1.0), ("had a loss that is not finite", False, float("nan"))):
        applied = _take_step(engine, step, device, skip, factor)
        after = _whole(engine.deepspeed.module)
        changed = [name for name, value in before.items() if not torch.equal(value, after[name])]
        if changed or applied:
            wrong.append(f"a step that {title} changed {', '.join(changed[:3]) or 'no weight, but counts as applied'}")
    return tuple(wrong)


def _take_step(
    engine: TrainingEngine, step: int, device: torch.device, skip: bool = False, factor: float = 1.0
) -> bool:
    """Train one step; whether it was applied. Only one rank has a loss times ``factor``."""
    replica = distributed.rank() // engine.layout.tp  # tensor-parallel ranks are neighbors
    adding = contributors(engine.layout.seq_data_parallel_size)
    contributor = adding.index(replica) if replica in adding else None
    weight = 0.0 if contributor is None else 1 / (len(adding) * ACCUMULATION * MICRO_BATCH)
    for micro_batch in range(ACCUMULATION):
        batch = {name: value.to(device) for name, value in samples(contributor or 0, micro_batch, step).items()}
        engine.begin_micro_batch(last=micro_batch == ACCUMULATION - 1)
        engine.backward(engine.deepspeed(**batch) * weight * (factor if contributor == 0 else 1.0))
    return engine.step(skip_update=skip)


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    with gathered(list(model.parameters())):
        return {name: parameter.detach().cpu().double() for name, parameter in model.named_parameters()}


def _compare(found: dict[str, torch.Tensor], norms: list[float], ranks: int, report: GradientReport) -> GradientReport:
    """Complete ``report``: compare each row of the embedding, each other tensor, and the gradient norm of each step."""
    parts: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    for step, norm in enumerate(norms):
        wanted = expected_gradient(ranks, step, report.ep)
        total = torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
        if norm == norm:  # nan if the engine computes no norm
            parts.append((f"the norm of the gradient of step {step}", torch.tensor(norm).double(), total))
    for name, gradient in wanted.items():  # only the gradient of the last step was measured
        if name != "embedding.weight":
            parts.append((f"the gradient of {name}", found[name], gradient))
            continue
        parts.append((f"the gradient of {name}, common rows", found[name][:COMMON_TOKENS], gradient[:COMMON_TOKENS]))
        for contributor, replica in enumerate(contributors(ranks)):
            for micro_batch in range(ACCUMULATION):
                row = unique_token(contributor, micro_batch)
                title = f"the gradient contribution of micro-batch {micro_batch} of rank {replica * report.tp}"
                parts.append((title, found[name][row], gradient[row]))
    differences = [(relative_difference(value, wanted), title, value, wanted) for title, value, wanted in parts]
    # nan comes first.
    differences.sort(key=lambda part: part[0] if part[0] == part[0] else float("inf"), reverse=True)
    wrong = tuple(
        f"{title} is {_ratio(value, wanted)} the correct value (relative difference {error:.2g})"
        for error, title, value, wanted in differences
        if not error <= report.tolerance
    )
    return replace(report, error=differences[0][0], wrong=report.wrong + wrong)


def _ratio(value: torch.Tensor, wanted: torch.Tensor) -> str:
    """The ratio of the projection of ``value`` on ``wanted`` to ``wanted``."""
    ratio = float((value * wanted).sum() / wanted.square().sum())
    return "lost: 0 times" if abs(ratio) < 1e-3 else f"{ratio:.3g} times"


@contextmanager
def _restored_state(device: torch.device) -> Iterator[None]:
    """Restore random state and grad mode, free memory, and suppress DeepSpeed's messages about plain SGD."""
    from deepspeed.utils.logging import logger as deepspeed_logger

    level = deepspeed_logger.level
    deepspeed_logger.setLevel("ERROR")
    python, numpy_state = random.getstate(), np.random.get_state()
    gradients: Any = torch.is_grad_enabled()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            yield
    finally:
        deepspeed_logger.setLevel(level)
        random.setstate(python)
        np.random.set_state(numpy_state)
        torch.set_grad_enabled(gradients)
        gc.collect()  # the engine has reference cycles that keep buffers alive
        if device.type == "cuda":
            torch.cuda.empty_cache()
