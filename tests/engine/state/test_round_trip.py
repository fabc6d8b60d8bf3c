"""The state of an engine is saved to shards and restored, for every optimizer wrapper of DeepSpeed.

Each case is trained for four steps with a checkpoint after two. Resumed in the same way it must give the same numbers
to the last bit; resumed in another way, to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ds_trainer import Trainer, TrainingArguments
from tests.support.models import VOCABULARY, RaggedTokens, tiny_llama
from tests.support.pool import pool
from tests.support.runs import compatibility_of
from tests.support.tensor_models import FAMILIES, GPT_LIKE, Mixer, of_family


class Oddities(nn.Module):
    """What parameters can be: frozen, tied, a single number, never used; and a buffer."""

    shifts_labels = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.wide = nn.Linear(16, 24)
        self.narrow = nn.Linear(24, 16)
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(5))
        self.scale = nn.Parameter(torch.ones(1))
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        hidden = self.embedding(input_ids)
        hidden = hidden + self.narrow(torch.tanh(self.wide(hidden)))
        hidden = self.norm(self.frozen(hidden).transpose(1, 2)).transpose(1, 2) * self.scale
        logits = self.head(hidden)
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


def small_llama() -> nn.Module:
    return tiny_llama(initializer_range=0.06)


FUSED_PARTITION = {
    "tensor_parallel": {
        "partition_config": {
            "use_default_specs": False,
            "layer_specs": [
                {"patterns": ["wide\\.weight$"], "partition_type": "column", "shape": [[20, 17], -1]},
                {
                    "patterns": ["narrow\\.weight$"],
                    "partition_type": "row",
                    "shape": [-1, [20, 17]],
                    "partition_dim": 1,
                },
            ],
        }
    }
}
"""Each of the two parts of a weight is cut by itself."""


def transposed_layers() -> nn.Module:
    """GPT-2's layers hold the transposed weight."""
    return of_family("GPT2", "GPT2LMHeadModel", initializer_range=0.06, **GPT_LIKE)


class Setup(NamedTuple):
    """World size and arguments of a run."""

    world: int
    arguments: dict[str, Any]
    deepspeed: dict[str, Any] = {}  # noqa: RUF012  never changed


def arguments_of(output_dir: str, setup: Setup, **changes: Any) -> TrainingArguments:
    sizes = [setup.arguments.get(f"{axis}_parallel_size", 1) for axis in ("tensor", "context", "sequence")]
    replicas = setup.world // (sizes[0] * sizes[1] * sizes[2])
    values: dict[str, Any] = dict(
        learning_rate=1e-2,
        weight_decay=0.1,
        adam_epsilon=1e-5,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        max_steps=4,
        per_device_train_batch_size=8 // replicas,
        deepspeed=dict(setup.deepspeed) or None,
    )
    return TrainingArguments(output_dir, **{**values, **setup.arguments, **changes})


def unbroken(make_model: Callable[[], nn.Module], output_dir: str, setup: Setup) -> Any:
    args = arguments_of(output_dir, setup, save_strategy="steps", save_steps=2)
    return _trained(make_model(), args)


def resumed(make_model: Callable[[], nn.Module], output_dir: str, setup: Setup, checkpoint: str) -> Any:
    model = make_model()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.05)  # what is not put back stays wrong
    return _trained(model, arguments_of(output_dir, setup), checkpoint)


def _trained(model: nn.Module, args: TrainingArguments, checkpoint: str | None = None) -> Any:
    job = Trainer(model, args, train_dataset=RaggedTokens(64))
    job.train(resume_from_checkpoint=checkpoint)
    found = compatibility_of(job)
    buffers = {name: buffer.clone() for name, buffer in job.model.named_buffers()}
    job.engine.close()
    return found, buffers


ZERO_1, ZERO_2, ZERO_3 = ({"zero_stage": stage} for stage in (1, 2, 3))
BF16 = {"bf16": True}
FEW_GATHERED = {"stage3_param_persistence_threshold": 0}
CASES: dict[str, tuple[Callable[[], nn.Module], Setup]] = {
    "oddities, stage 0": (Oddities, Setup(2, {"zero_stage": 0})),
    "oddities, stage 1": (Oddities, Setup(2, ZERO_1)),
    "oddities, stage 3": (Oddities, Setup(2, ZERO_3)),
    "oddities, hpZ": (
        Oddities,
        Setup(2, ZERO_3, {"zero_optimization": {"zero_hpz_partition_size": 2, **FEW_GATHERED}}),
    ),
    "bf16, stage 0": (small_llama, Setup(2, {**BF16, "zero_stage": 0})),
    "bf16, stage 0, sums in float32": (
        small_llama,
        Setup(2, {**BF16, "zero_stage": 0, "grad_accum_dtype": "fp32", "gradient_accumulation_steps": 2}),
    ),
    "bf16, stage 1": (small_llama, Setup(2, {**BF16, **ZERO_1})),
    "bf16, stage 1, sums in float32": (
        small_llama,
        Setup(2, {**BF16, **ZERO_1}, {"data_types": {"grad_accum_dtype": "fp32"}}),
    ),
    "bf16, stage 3": (small_llama, Setup(2, {**BF16, **ZERO_3})),
    "round robin": (small_llama, Setup(2, ZERO_2, {"zero_optimization": {"round_robin_gradients": True}})),
    "sub-groups": (small_llama, Setup(2, ZERO_3, {"zero_optimization": {"sub_group_size": 2000}})),
    "few gathered": (small_llama, Setup(2, ZERO_3, {"zero_optimization": FEW_GATHERED})),
    "offloaded optimizer": (small_llama, Setup(2, {**ZERO_2, "offload_optimizer": "cpu"})),
    "offloaded parameters": (small_llama, Setup(2, {**ZERO_3, "offload_optimizer": "cpu", "offload_param": "cpu"})),
    "fused weights, tp 2, stage 1": (Mixer, Setup(2, {**ZERO_1, "tensor_parallel_size": 2}, FUSED_PARTITION)),
    "fused weights, tp 2, stage 3": (Mixer, Setup(2, {**ZERO_3, "tensor_parallel_size": 2}, FUSED_PARTITION)),
    "uneven slices, tp 2": (FAMILIES["opt with 3 heads"], Setup(2, {**ZERO_1, "tensor_parallel_size": 2})),
    "embeddings cut by width, tp 2": (FAMILIES["t5"], Setup(2, {**ZERO_1, "tensor_parallel_size": 2})),
    "transposed layers, stage 3": (transposed_layers, Setup(2, ZERO_3)),
    "idle ranks of tp 4": (small_llama, Setup(4, {**ZERO_1, "tensor_parallel_size": 4})),
}
ELSEWHERE = [Setup(1, {"zero_stage": 0}), Setup(2, ZERO_3), Setup(2, ZERO_1)]


@pytest.mark.cases(
    1,
    "bf16, stage 0, sums in float32",
    "bf16, stage 0",
    "bf16, stage 1, sums in float32",
    "oddities, hpZ",
    "oddities, stage 1",
    "round robin",
    "sub-groups",
)
@pytest.mark.parametrize("name", CASES)
def test_state_of_every_optimizer_wrapper_survives_a_round_trip(name: str, tmp_path: Path) -> None:
    make_model, setup = CASES[name]
    checkpoint = str(tmp_path / "unbroken/checkpoint-2")
    wanted = pool(setup.world).run(partial(unbroken, make_model, str(tmp_path / "unbroken"), setup))
    found = pool(setup.world).run(partial(resumed, make_model, str(tmp_path / "resumed"), setup, checkpoint))
    for (reference, reference_buffers), (ours, our_buffers) in zip(wanted, found, strict=True):
        assert ours.losses == reference.losses
        assert ours.grad_norms == reference.grad_norms
        for weight, value in reference.weights.items():
            assert torch.equal(ours.weights[weight], value), weight
        for buffer, value in reference_buffers.items():
            assert torch.equal(our_buffers[buffer], value), buffer


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith(("bf16", "oddities"))])
def test_state_moves_from_every_optimizer_wrapper_to_another(name: str, tmp_path: Path) -> None:
    make_model, setup = CASES[name]
    checkpoint = str(tmp_path / "unbroken/checkpoint-2")
    wanted, _ = pool(setup.world).run(partial(unbroken, make_model, str(tmp_path / "unbroken"), setup))[0]
    for index, other in enumerate(ELSEWHERE):
        found, _ = pool(other.world).run(partial(resumed, make_model, str(tmp_path / f"{index}"), other, checkpoint))[0]
        assert found.losses == pytest.approx(wanted.losses, abs=1e-6)
        for weight, value in wanted.weights.items():
            # Adam makes steps of gradients that are nothing but rounding; a wrong position is off by 0.01 or more.
            assert (found.weights[weight] - value).abs().max() < 1e-4, weight
