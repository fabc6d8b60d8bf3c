"""ZeRO-3's gathers and reductions have DeepSpeed's results, bit for bit."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer import TrainingArguments
from ds_trainer.config.compiler import compile_config
from ds_trainer.engine.training_engine import TrainingEngine
from ds_trainer.engine.weights import gathered
from ds_trainer.engine.zero3 import coalesced_collectives as ours
from ds_trainer.monitor.doctor import gradients
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.utils import distributed
from tests.support.pool import pool

WORLDS = [1, 2, 3, 8]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


# -- one bucket -------------------------------------------------------------------------------------------------------

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
BUCKETS: dict[str, list[tuple[tuple[int, ...], torch.dtype]]] = {
    "one that the ranks divide": [((24, 5), F32)],
    "one that they do not": [((25, 7), F32)],
    "one that is smaller than the ranks": [((2,), F32)],
    "a scalar": [((), F32)],
    "several": [((24, 2), F32), ((5,), F32), ((), F32), ((0, 3), F32), ((7, 11), F32), ((48,), F32)],
    "bf16": [((7, 11), BF16), ((24,), BF16), ((1,), BF16)],
    "fp16": [((7, 11), F16), ((24,), F16)],
    "several dtypes": [((7, 11), BF16), ((24,), F32), ((3,), BF16)],
}


def reduced_alike() -> dict[str, bool]:
    from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced

    generator = torch.Generator().manual_seed(distributed.rank())
    found = {}
    for name, bucket in BUCKETS.items():
        tensors = [torch.randn(shape, generator=generator).to(dtype) for shape, dtype in bucket]
        copies = [tensor.clone() for tensor in tensors]
        pairs = zip(ours.reduce_scatter_in_rows(tensors), reduce_scatter_coalesced(copies), strict=True)
        found[name] = all(same_bits(*pair) for pair in pairs)
    # DeepSpeed raises for these.
    strided = [torch.randn(6, 8, generator=generator).t(), torch.randn(5, generator=generator)]
    for name, bucket in {"strided": strided, "one strided": strided[:1]}.items():
        copies = [tensor.clone(memory_format=torch.contiguous_format) for tensor in bucket]
        pairs = zip(ours.reduce_scatter_in_rows(bucket), reduce_scatter_coalesced(copies), strict=True)
        found[name] = all(same_bits(*pair) for pair in pairs)
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_buckets_are_reduced_as_deepspeed_reduces_them(world: int) -> None:
    for found in pool(world).run(reduced_alike):
        assert [name for name, same in found.items() if not same] == []


def weights_of(handle_class: str, ranks: int, groups: int, quantized: bool) -> list[torch.Tensor]:
    """What a handle of ours or of DeepSpeed makes of the same bucket."""
    from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle

    shapes = [(ranks, 3), (2 * ranks + 1,), (1,), (), (ranks - 1, 5)] if ranks > 1 else [(4, 3), ()]
    params: list[Any] = [ours._InFlight(torch.empty(shape, dtype=BF16), ranks * groups) for shape in shapes]
    params[0].ds_tensor.dtype = F32  # autocast: gathered in another dtype
    for parameter in params:
        parameter.ds_secondary_tensor_num_of_groups = groups
    size = sum(parameter.ds_tensor.ds_numel for parameter in params) * groups
    flat = torch.randn(ranks * size, generator=torch.Generator().manual_seed(7)).to(BF16)
    done = SimpleNamespace(wait=lambda: None)
    record = None
    if quantized:
        scales = flat.view(ranks, -1).float().abs().amax(1) / 127
        whole = (flat.view(ranks, -1) / scales[:, None]).round().to(torch.int8).view(-1)
        backend = SimpleNamespace(dequantize=lambda q, s: (q.view(ranks, -1) * s[:, None]).half().view(-1))
        record = SimpleNamespace(
            quant_handle=done, quantized_param=whole, scale_buffer=scales, backend=backend, partition_sz=size
        )
        for parameter in params:
            parameter.device = torch.device("cpu")
    if handle_class == "ours":
        ours.RowsHandle(done, params, ranks, groups > 1, None if quantized else flat, record).wait()
    else:
        parts = None if quantized else list(flat.chunk(ranks))
        AllGatherCoalescedHandle(done, params, parts, ranks, groups > 1, record).wait()  # type: ignore[arg-type]
    assert all(parameter.ds_status.name == "AVAILABLE" for parameter in params)
    return [parameter.data for parameter in params]


@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "quantized"])
@pytest.mark.parametrize("groups", [1, 4], ids=["", "hpZ"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 256])
def test_buckets_are_unpacked_as_deepspeed_unpacks_them(ranks: int, groups: int, quantized: bool) -> None:
    both = [weights_of(owner, ranks, groups, quantized) for owner in ("ours", "DeepSpeed")]
    for one, other in zip(*both, strict=True):
        assert same_bits(one, other)
        assert one.is_contiguous()


# -- engines ----------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Sizes that no number of ranks divides, a scalar, a vector smaller than eight ranks, a layer used twice.

    With a ``width``, sizes that the kernels of quantized weights accept.
    """

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.inner = nn.Linear(width or 7, width or 11)
        self.twice = nn.Linear(width or 11, width or 11, bias=False)
        self.outer = nn.Linear(width or 11, width or 5)
        self.even = nn.Linear(width or 5, width or 16)
        self.scale = nn.Parameter(torch.full((width,), 1.5) if width else torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        hidden = torch.tanh(self.twice(torch.tanh(self.twice(torch.tanh(self.inner(x))))))
        return (self.even(torch.tanh(self.outer(hidden))) * self.scale).float().square().sum()


ZERO: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "autocast": {"torch_autocast": "bf16"},
    "float32 communication": {"bf16": True, "deepspeed": {"communication_data_type": "fp32"}},
    "float32 accumulation": {"bf16": True, "deepspeed": {"data_types": {"grad_accum_dtype": "fp32"}}},
    "all-reduce": {"deepspeed": {"zero_optimization": {"reduce_scatter": False}}},
    "separate gradients": {"deepspeed": {"zero_optimization": {"contiguous_gradients": False}}},
    "sequential": {"deepspeed": {"zero_optimization": {"stage3_allgather_sequential": True}}},
    "fetched by all-reduce": {"deepspeed": {"zero_optimization": {"stage3_use_all_reduce_for_fetch_params": True}}},
    "frozen": {"frozen": "twice"},
    "offload": {"deepspeed": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}},
    "quantized weights": {"bf16": True, "deepspeed": {"zero_optimization": {"zero_quantized_weights": True}}},
    "hpZ": {"deepspeed": {"zero_optimization": {"zero_hpz_partition_size": 2}}},
}


class Quantizer:
    """DeepSpeed's kernels for quantized weights, in torch."""

    Symmetric = 0

    def quantize(self, values: torch.Tensor, groups: int, bits: int, kind: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Integers and scales."""
        rows = values.float().view(groups, -1)
        scales = rows.abs().amax(1).clamp(min=1e-8) / 127
        return (rows / scales[:, None]).round().to(torch.int8).view(values.shape), scales

    def dequantize(self, values: torch.Tensor, scales: torch.Tensor, groups: int, bits: int, kind: int) -> torch.Tensor:
        """As the kernel, in float16."""
        return (values.float().view(groups, -1) * scales[:, None]).half().view(values.shape)


def trained(deepspeeds: bool, frozen: str = "", **settings: Any) -> tuple[list[torch.Tensor], int, int]:
    """Losses, norms and weights of two steps, and how often ours packed and unpacked."""
    from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer

    used: Counter[str] = Counter()
    pack, wait = ours._pack, ours.RowsHandle.wait

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            used[name] += 1
            return function(*args, **keywords)

        return call

    config = settings.pop("deepspeed", {})
    quantized = "zero_quantized_weights" in config.get("zero_optimization", {})
    model = Odd(192 if quantized else None)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in name)
    bucket = 50_000 if quantized else 130
    zero = {
        "reduce_bucket_size": bucket,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": bucket + 70,
    }
    config = {
        "zero_allow_untested_optimizer": True,
        **config,
        "zero_optimization": {**zero, **config.get("zero_optimization", {})},
    }
    args = TrainingArguments(
        "unused",
        use_cpu=True,
        zero_stage=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        deepspeed=config,
        **settings,
    )
    layout = ParallelLayout(distributed.world_size())
    # Quantized weights are refused on CPUs.
    compiled = compile_config(args, layout, device="cuda" if quantized else "cpu", client_optimizer="a test")
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    ours.leave_to_deepspeed(deepspeeds)
    CUDAQuantizer.quantizer_cuda_module = Quantizer()
    ours._pack, ours.RowsHandle.wait = counted("pack", pack), counted("wait", wait)  # type: ignore[method-assign]
    found: list[torch.Tensor] = []
    try:
        engine = TrainingEngine(model, torch.optim.AdamW(trainable, lr=0.1), compiled, layout)
        generator = torch.Generator().manual_seed(100 + distributed.rank())
        dtype = BF16 if args.bf16 else F32
        for micro_batch in range(4):
            engine.begin_micro_batch(last=micro_batch % 2 == 1)
            loss = engine.deepspeed(torch.randn(2, model.inner.in_features, generator=generator).to(dtype))
            engine.backward(loss / distributed.world_size())
            found.append(loss.detach())
            if micro_batch % 2:
                engine.step()
                found.append(torch.tensor(engine.grad_norm()))
        with gathered(list(model.parameters())):
            found += [parameter.detach().clone() for parameter in model.parameters()]
        scatter = vars(engine.deepspeed.optimizer).get(ours._SCATTER)
        assert (scatter is None) == deepspeeds
        engine.close()
        assert not [p for p in model.parameters() if getattr(p.all_gather_coalesced, "__self__", None)]
        assert not [p for p in model.parameters() if isinstance(p.partition, partial)]
    finally:
        ours._pack, ours.RowsHandle.wait = pack, wait  # type: ignore[method-assign]
        ours.leave_to_deepspeed(False)
    return found, used["pack"], used["wait"]


def trained_alike(name: str) -> tuple[bool, int, int]:
    theirs, *unused = trained(True, **ZERO[name])
    found, packed, unpacked = trained(False, **ZERO[name])
    assert unused == [0, 0]
    return all(map(same_bits, found, theirs)), packed, unpacked


_DEFAULT = {
    (1, "fp32"),
    (2, "bf16"),
    (2, "frozen"),
    (4, "hpZ"),
    (8, "bf16"),
    *((3, name) for name in ZERO if name != "hpZ"),
}
CASES = [
    pytest.param(world, name, marks=() if (world, name) in _DEFAULT else pytest.mark.extended)
    for name in ZERO
    for world in ((2, 4, 8) if name == "hpZ" else WORLDS)
]


@pytest.mark.parametrize(("world", "name"), CASES)
def test_training_has_deepspeeds_bits(world: int, name: str) -> None:
    for same, packed, unpacked in pool(world).run(partial(trained_alike, name)):
        assert same
        assert (packed > 0) == (name != "all-reduce")
        assert (unpacked > 0) == (world > 1 and name not in ("sequential", "fetched by all-reduce"))


def reduced_with_quantized_gradients() -> tuple[bool, int]:
    """Gradients that DeepSpeed does not quantize: whether they have its bits, and how many reductions were ours."""
    from deepspeed.runtime.comm import coalesced_collectives as library

    library.quantizer_module = library.quantizer_module or Quantizer()
    generator = torch.Generator().manual_seed(distributed.rank())
    tensors = [torch.randn(shape, generator=generator) for shape in ((7,), (25,), (3, 5))]
    theirs = library.all_to_all_quant_reduce([tensor.clone() for tensor in tensors], {})
    patch, packed, pack = pytest.MonkeyPatch(), Counter[str](), ours._pack

    def counted(*args: Any) -> torch.Tensor:
        packed["pack"] += 1
        return pack(*args)

    patch.setattr(ours, "_pack", counted)
    with ours._reduces_in_rows():
        found = library.all_to_all_quant_reduce(tensors, {})
    patch.undo()
    return all(map(same_bits, found, theirs)), packed["pack"]


def test_what_quantized_gradients_reduce_plainly_has_deepspeeds_bits() -> None:
    assert pool(2).run(reduced_with_quantized_gradients) == [(True, 3)] * 2


# -- compared at start ------------------------------------------------------------------------------------------------


def first_starts(directory: str, wrong: str) -> list[Any]:
    """Two starts with ``wrong`` collectives: DeepSpeed's are used, the log says so, and nothing is recorded."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("XDG_CACHE_HOME", directory)
    monkeypatch.setenv(gradients.ENVIRONMENT, "auto")
    logs: list[str] = []
    monkeypatch.setattr(gradients.logger, "warning", lambda message, *rest: logs.append(message))
    pack, wait = ours._pack, ours.RowsHandle.wait
    if wrong == "reduction":
        monkeypatch.setattr(ours, "_pack", lambda tensors, ranks: pack(tensors, ranks).flip(0).contiguous())
    if wrong == "gather on one rank":

        def shifted(handle: Any, handle_dependency: bool = True) -> None:
            if distributed.rank() == 1:
                handle._flat = handle._flat.roll(1)
            wait(handle, handle_dependency)

        monkeypatch.setattr(ours.RowsHandle, "wait", shifted)
    args = TrainingArguments("unused", use_cpu=True, zero_stage=3, bf16=True, self_test="auto")
    layout = ParallelLayout(distributed.world_size())
    compiled = compile_config(args, layout, device="cpu", client_optimizer="a test")
    try:
        reports = []
        for _ in range(2):
            reports.append(gradients.self_test_once(args, compiled, layout))
            distributed.barrier()  # the record of one rank is written
        return [[report is not None for report in reports], len(logs), ours._left_to_deepspeed]
    finally:
        monkeypatch.undo()
        ours.leave_to_deepspeed(False)


@pytest.mark.parametrize("wrong", ["nothing", "reduction", "gather on one rank"])
def test_collectives_with_other_bits_are_found_at_start_and_left_to_deepspeed(wrong: str, tmp_path: Path) -> None:
    first, second = pool(2).run(partial(first_starts, str(tmp_path), wrong))
    if wrong == "nothing":
        assert first == second == [[True, False], 0, False]
    else:
        assert first == [[True, True], 2, True]  # compared again: nothing is recorded
        assert second == [[True, True], 0, True]
