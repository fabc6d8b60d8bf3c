"""However a model comes (with its weights, on meta with a source of them, made under zero.Init), it trains the same.

Every case is trained by ranks and compared with plain PyTorch in one process: losses, gradient norms, weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.engine.loading import placement
from ds_trainer.engine.loading.weight_source import attached_weight_source
from tests.engine.state.test_round_trip import FUSED_PARTITION
from tests.parity.test_tensor_families import unshifted
from tests.support import layouts
from tests.support.compare import assert_equal, distances
from tests.support.loading import on_meta, under_zero_init
from tests.support.models import PlainLanguageModel, RaggedTokens, tiny_llama
from tests.support.oracle import Trajectory, stack, token_loss, train_plainly
from tests.support.pool import pool
from tests.support.runs import train_and_report
from tests.support.scalar_models import clip, collate_pairs, contrastive_loss, pairs
from tests.support.tensor_models import FAMILIES, Mixer, llama_like

make_data = partial(RaggedTokens, 37)
GLOBAL_BATCH, STEPS = 8, 3
ARGUMENTS: dict[str, Any] = dict(optim="sgd", learning_rate=0.2, weight_decay=0.0, max_grad_norm=0.5, max_steps=STEPS)

HOW: dict[str, Callable[[Callable[[], nn.Module]], nn.Module]] = {
    "handed in": lambda make: make(),
    "on meta": lambda make: on_meta(make()),
    "shifted": lambda make: on_meta(make(), shift=1),
    "zero.Init": under_zero_init,
}


def moe() -> nn.Module:
    """A Qwen 3 with experts, without a loss of its routers."""
    return llama_like(
        "Qwen3Moe", num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    )


class Job(NamedTuple):
    """What is trained on, and what plain PyTorch makes of it."""

    data: Any = make_data
    collator: Any = None
    loss: Any = token_loss
    collate: Any = stack


SHIFTED = Job()
UNSHIFTED = Job(loss=unshifted)
PAIRS = Job(partial(pairs, 32), collate_pairs, partial(contrastive_loss, 4), collate_pairs)


class Case(NamedTuple):
    """A model, how it comes, and how it is trained."""

    make: Any
    how: str
    arguments: dict[str, Any]
    job: Job = SHIFTED


def report(directory: str, case: Case) -> tuple[Trajectory, dict[str, int]]:
    """The trajectory of this rank, and how many elements of each tensor it asked for."""
    model = HOW[case.how](case.make)
    source: Any = attached_weight_source(model)
    sizes = [case.arguments.get(f"{axis}_parallel_size", 1) for axis in ("tensor", "context", "sequence")]
    replicas = torch.distributed.get_world_size() // math.prod(sizes)
    arguments = {**ARGUMENTS, "per_device_train_batch_size": GLOBAL_BATCH // replicas, **case.arguments}
    found = train_and_report(lambda: model, case.job.data, directory, collator=case.job.collator, **arguments)
    return found, {} if source is None else source.asked


def reports(directory: str, cases: dict[str, Case]) -> dict[str, Any]:
    return {name: report(f"{directory}/{name}", case) for name, case in cases.items()}


def expected(make: Callable[[], nn.Module], job: Job = SHIFTED) -> Trajectory:
    return train_plainly(
        make(),
        job.data(),
        loss=job.loss,
        collate=job.collate,
        optimizer="sgd",
        learning_rate=0.2,
        weight_decay=0.0,
        clip=0.5,
        steps=STEPS,
        global_batch=GLOBAL_BATCH,
    )


TP: dict[str, Any] = {"tensor_parallel_size": 2}
KEPT = {"deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 0}}}
OFFLOADED = {"deepspeed": {"zero_optimization": {"offload_param": {"device": "cpu"}}}}
HPZ = {"deepspeed": {"zero_optimization": {"zero_hpz_partition_size": 2}}}
TWO_RANKS: dict[str, Case] = {
    "handed in": Case(tiny_llama, "handed in", {"zero_stage": 3}),
    "handed in, offloaded": Case(tiny_llama, "handed in", {"zero_stage": 3, **OFFLOADED}),
    **{f"on meta, ZeRO {stage}": Case(tiny_llama, "on meta", {"zero_stage": stage}) for stage in range(4)},
    **{f"zero.Init, ZeRO {stage}": Case(tiny_llama, "zero.Init", {"zero_stage": stage}) for stage in (0, 2, 3)},
    "on meta, offloaded": Case(tiny_llama, "on meta", {"zero_stage": 3, **OFFLOADED}),
    "zero.Init, offloaded": Case(tiny_llama, "zero.Init", {"zero_stage": 3, **OFFLOADED}),
    "nothing persists": Case(tiny_llama, "on meta", {"zero_stage": 3, **KEPT}),
    "tied": Case(partial(tiny_llama, tied=True), "on meta", {"zero_stage": 3}),
    "recurrent": Case(PlainLanguageModel, "on meta", {"zero_stage": 3}),
    "recurrent, ZeRO 1": Case(PlainLanguageModel, "on meta", {"zero_stage": 1}),
    "experts": Case(moe, "on meta", {"zero_stage": 3}),
    "bert": Case(FAMILIES["bert"], "on meta", {"zero_stage": 3}, UNSHIFTED),
    "t5": Case(FAMILIES["t5"], "on meta", {"zero_stage": 3}, UNSHIFTED),
    "clip": Case(clip, "on meta", {"zero_stage": 3}, PAIRS),
    "clip, ZeRO 1": Case(clip, "on meta", {"zero_stage": 1}, PAIRS),
    "tp": Case(tiny_llama, "on meta", {"zero_stage": 3, **TP}),
    "tp, ZeRO 1": Case(tiny_llama, "on meta", {"zero_stage": 1, **TP}),
    "tp, handed in": Case(tiny_llama, "handed in", {"zero_stage": 3, **TP}),
    "tp, handed in, ZeRO 0": Case(tiny_llama, "handed in", {"zero_stage": 0, **TP}),
    "tp, zero.Init": Case(tiny_llama, "zero.Init", {"zero_stage": 3, **TP}),
    "tp, norms of heads": Case(FAMILIES["qwen3"], "on meta", {"zero_stage": 3, **TP}),
    "tp, norms of heads, ZeRO 2": Case(FAMILIES["qwen3"], "on meta", {"zero_stage": 2, **TP}),
    "tp, tied": Case(layouts.tied, "on meta", {"zero_stage": 3, **TP}),
    "tp, empty slices": Case(FAMILIES["llama with 1 key-value head"], "on meta", {"zero_stage": 3, **TP}),
    "tp, fused": Case(Mixer, "on meta", {"zero_stage": 3, **TP, "deepspeed": FUSED_PARTITION}),
    "tp, gpt_neox": Case(FAMILIES["gpt_neox"], "on meta", {"zero_stage": 3, **TP}),
    "tp, t5": Case(FAMILIES["t5"], "on meta", {"zero_stage": 3, **TP}, UNSHIFTED),
    "tp, t5, ZeRO 0": Case(FAMILIES["t5"], "on meta", {"zero_stage": 0, **TP}, UNSHIFTED),
    "tp, bert": Case(FAMILIES["bert"], "on meta", {"zero_stage": 3, **TP}, UNSHIFTED),
}
FOUR_RANKS: dict[str, Case] = {
    "tp2 x dp2": Case(tiny_llama, "on meta", {"zero_stage": 3, **TP}),
    "tp2 x dp2, ZeRO 2": Case(tiny_llama, "on meta", {"zero_stage": 2, **TP}),
    "tp2 x dp2, handed in": Case(tiny_llama, "handed in", {"zero_stage": 3, **TP}),
    "tp2 x dp2, zero.Init over all ranks": Case(tiny_llama, "zero.Init", {"zero_stage": 3, **TP}),
    "tp2 x dp2, t5": Case(FAMILIES["t5"], "on meta", {"zero_stage": 3, **TP}, UNSHIFTED),
    "cp2": Case(layouts.grouped_query, "on meta", {"zero_stage": 3, "context_parallel_size": 2}),
    "sp2": Case(layouts.grouped_query, "on meta", {"zero_stage": 3, "sequence_parallel_size": 2}),
    "hpZ": Case(tiny_llama, "on meta", {"zero_stage": 3, **HPZ}),
    "hpZ, handed in": Case(tiny_llama, "handed in", {"zero_stage": 3, **HPZ}),
}
CASES = {2: TWO_RANKS, 4: FOUR_RANKS}
ALL = [(world, name) for world, cases in CASES.items() for name in cases]


@pytest.fixture(scope="module")
def found(tmp_path_factory: Any) -> Callable[[int], list[dict[str, Any]]]:
    @cache
    def of(world: int) -> list[dict[str, Any]]:
        job = partial(reports, str(tmp_path_factory.mktemp("ranks")))
        return pool(world).run(job, CASES[world], timeout=1200)

    return of


@pytest.mark.cases(1)
@pytest.mark.parametrize(("world", "name"), ALL)
def test_every_way_to_load_a_model_trains_like_one_process(world: int, name: str, found: Any) -> None:
    case = CASES[world][name]
    for rank in found(world):
        assert_equal(rank[name][0], expected(case.make, case.job))


@pytest.mark.cases(3)
@pytest.mark.parametrize(("world", "name"), [(w, n) for w, n in ALL if CASES[w][n].how == "on meta"])
def test_a_rank_reads_only_its_own_shard(world: int, name: str, found: Any) -> None:
    """At ZeRO 3 every element is read once (with tensor parallelism, replicated weights once per rank)."""
    case = CASES[world][name]
    sizes = {n: p.numel() for n, p in case.make().named_parameters()}
    requested = [rank[name][1] for rank in found(world)]
    assert all(n in sizes or "num_batches" in n for n in requested[0])
    tp = case.arguments.get("tensor_parallel_size", 1)
    second = 3 if case.arguments.get("deepspeed") == HPZ["deepspeed"] else 1  # and a half of it twice
    for parameter, size in sizes.items():
        total = sum(rank[parameter] for rank in requested)
        assert size <= total <= size * tp * second
        assert total in (size, size * tp) or second > 1
        if case.arguments["zero_stage"] == 3 and second == 1:
            shard_size = math.ceil(size / (world // tp))
            assert all(rank[parameter] <= shard_size for rank in requested)


def shifted(directory: str) -> Trajectory:
    return report(directory, Case(tiny_llama, "shifted", {"zero_stage": 3}))[0]


def test_a_source_shifted_by_one_element_is_detected(tmp_path: Path) -> None:
    """The control of the comparison above."""
    differences = distances(pool(2).run(shifted, str(tmp_path))[0], expected(tiny_llama))
    assert differences["losses"] > 1e-3
    assert differences["weights"] > 1e-1


# -- never whole -------------------------------------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """The largest tensor that an operator made."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (list, tuple)) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta" and not tensor._is_view():
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return made


class Seen(NamedTuple):
    """Of the moment when DeepSpeed is about to move the module: bytes."""

    whole: int
    largest_parameter: int
    largest_made: int
    present_at_once: int
    moved: int
    dtypes: tuple[str, ...]


def seen_by_the_engine(directory: str, how: str, arguments: dict[str, Any]) -> Seen:
    """What is whole when the engine is configured, and how much was on the device at once until then."""
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.partition_parameters import Init

    model = HOW[how](tiny_llama)
    largest = max(parameter.nbytes for parameter in tiny_llama().parameters())
    configure, convert, move = (
        DeepSpeedEngine._configure_distributed_model,
        Init._convert_to_deepspeed_param,
        nn.Module.to,
    )
    allocations, kept = Allocations(), {"whole": -1, "moved": 0, "at once": 0}

    def configured(engine: Any, module: Any) -> None:
        kept["whole"] = sum(parameter.nbytes for parameter in module.parameters())
        configure(engine, module)

    def converted(init: Any, parameter: Any) -> None:
        resident_bytes = sum(p.nbytes for p in model.parameters() if not p.is_meta)
        kept["at once"] = max(kept["at once"], resident_bytes)
        convert(init, parameter)

    def moved(module: Any, *to: Any, **keywords: Any) -> Any:
        if module is model:
            kept["moved"] += sum(p.nbytes for p in model.parameters())
        return move(module, *to, **keywords)

    DeepSpeedEngine._configure_distributed_model = configured
    Init._convert_to_deepspeed_param = converted
    nn.Module.to = moved  # type: ignore[assignment]
    args = TrainingArguments(
        directory, zero_stage=3, max_steps=1, disable_tqdm=True, use_cpu=True, optim="sgd", save_strategy="no",
        **arguments
    )  # fmt: skip
    original_place = placement._place

    def placed(*given: Any) -> None:
        with allocations:
            original_place(*given)

    placement._place = placed
    try:
        trainer = Trainer(model, args, train_dataset=RaggedTokens(16))
        trainer.train()
    finally:
        DeepSpeedEngine._configure_distributed_model, Init._convert_to_deepspeed_param = configure, convert
        nn.Module.to, placement._place = move, original_place  # type: ignore[method-assign]
    dtypes = tuple(
        sorted({str(p.dtype) for p in model.parameters()} | {str(p.ds_tensor.dtype) for p in model.parameters()})
    )
    trainer.engine.close()
    return Seen(kept["whole"], largest, allocations.largest, kept["at once"], kept["moved"], dtypes)


def seen_in_every_way(directory: str) -> dict[str, Seen]:
    ways = {
        **{how: (how, {}) for how in ("handed in", "on meta", "zero.Init")},
        "bf16": ("handed in", {"bf16": True}),
        "bf16 on meta": ("on meta", {"bf16": True}),
        "bf16, zero.Init": ("zero.Init", {"bf16": True}),
        "offloaded": ("on meta", OFFLOADED),
        "tp": ("handed in", TP),
    }
    return {name: seen_by_the_engine(f"{directory}/{name}", *way) for name, way in ways.items()}


def test_no_parameter_is_unsharded_when_the_engine_is_configured(tmp_path: Path) -> None:
    for rank in pool(2).run(seen_in_every_way, str(tmp_path), timeout=600):
        for name, seen in rank.items():
            assert seen.whole == seen.moved == 0, name
            assert seen.largest_made <= seen.largest_parameter, name
            if "meta" in name or name == "offloaded":
                assert seen.present_at_once <= seen.largest_parameter, name
            wanted = "torch.bfloat16" if "bf16" in name else "torch.float32"
            assert seen.dtypes == (wanted,), name
