"""What the creation of a ZeRO-3 engine is spared: counted operations, and the warning where one is not spared."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_trainer.engine.loading import creation_memory
from tests.checkpoint.loading.engines import engine_over
from tests.support.models import tiny_llama
from tests.support.pool import pool

PATCHES = (
    "defragment",
    "_create_fp32_partitions",
    "initialize_optimizer_states",
    "create_reduce_and_remove_grad_hooks",
)
BF16: dict[str, Any] = {"zero_stage": 3, "bf16": True}
WAYS: dict[str, dict[str, Any]] = {
    "bf16": BF16,
    "float32": {"zero_stage": 3},
    "optimizer on the host": {**BF16, "offload_optimizer": "cpu"},
    "parameters on the host": {**BF16, "offload_optimizer": "cpu", "offload_param": "cpu"},
    "Adagrad": {**BF16, "optim": "adagrad"},
    "ZeRO 2": {"zero_stage": 2, "bf16": True},
}


class Operations(TorchDispatchMode):
    """Counts what takes memory or network in proportion to the model, and how often freed memory goes back."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()
        self._numel = numel

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d" and "gather" in str(func):
            self.counted["gathered"] += 1
        if isinstance(result, torch.Tensor) and result.numel() >= self._numel and result.dtype == torch.float32:
            self.counted[str(func.overloadpacket).removeprefix("aten.")] += 1
        return result


@contextmanager
def without(patch: str | None) -> Iterator[None]:
    """Restore DeepSpeed's own code instead of one patch."""
    replace = creation_memory._replace

    def kept(undo: Any, owner: Any, name: str, by: Any) -> None:
        if name != patch:
            replace(undo, owner, name, by)

    creation_memory._replace = kept
    try:
        yield
    finally:
        creation_memory._replace = replace


def patched() -> list[Any]:
    from deepspeed.runtime.zero import stage3

    return [getattr(owner, name) for owner in (stage3, stage3.DeepSpeedZeroOptimizer_Stage3) for name in PATCHES
            if hasattr(owner, name)]  # fmt: skip


def creation(directory: str, patch: str | None, **arguments: Any) -> tuple[Counter[str], list[str]]:
    """What one engine's creation does, and its warnings."""
    model, messages, before = tiny_llama(), [], patched()
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    creation_memory.logger.addHandler(handler)
    operations = Operations(sum(parameter.numel() for parameter in model.parameters()) // 3)  # of a half
    give_back = creation_memory.return_freed_memory

    def counted() -> None:
        operations.counted["memory went back"] += 1
        give_back()

    creation_memory.return_freed_memory = counted
    try:
        with without(patch), operations, engine_over(model, directory, **arguments):
            assert patched() == before  # nothing stays patched
            assert len(before) == len(PATCHES)
    finally:
        creation_memory.return_freed_memory = give_back
        creation_memory.logger.removeHandler(handler)
    return operations.counted, messages


def creations(directory: str) -> dict[str, Any]:
    found = {way: creation(directory, None, **arguments) for way, arguments in WAYS.items()}
    return found | {patch: creation(directory, patch, **BF16) for patch in PATCHES}


@pytest.fixture(scope="module")
def created(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Counter[str], list[str]]]:
    """Of rank 0 of two."""
    first, second = pool(2).run(creations, str(tmp_path_factory.mktemp("out")), timeout=600)
    assert {key: counted["gathered"] for key, (counted, _) in first.items()} == {
        key: counted["gathered"] for key, (counted, _) in second.items()
    }
    return first  # type: ignore[no-any-return]


@pytest.mark.cases(3)
@pytest.mark.parametrize("way", WAYS)
def test_this_deepspeed_version_creates_engines_as_expected(way: str, created: Any) -> None:
    assert created[way][1] == []


@pytest.mark.parametrize(
    ("patch", "operation"),
    [
        ("_create_fp32_partitions", "clone"),
        ("initialize_optimizer_states", "zeros"),
        ("create_reduce_and_remove_grad_hooks", "gathered"),
    ],
)
def test_the_patch_avoids_an_operation(patch: str, operation: str, created: Any) -> None:
    assert created["bf16"][0][operation] == 0
    assert created[patch][0][operation] > 0
    assert (
        len(created[patch][1]) == 1
        and f"from 0.19.8, whose memory use is bounded here: {patch} (" in created[patch][1][0]
    )


def test_memory_of_freed_shards_is_returned_to_the_system(created: Any) -> None:
    assert created["bf16"][0]["memory went back"] == 2
    assert created["defragment"][0]["memory went back"] == 1
    assert "defragment (freed shards stay in host memory)" in created["defragment"][1][0]


def test_adagrad_states_are_created(created: Any) -> None:
    assert created["Adagrad"][0]["zeros"] > 0


def test_changed_deepspeed_code_is_detected(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Names that were removed, and names that are not called."""
    from types import SimpleNamespace

    from deepspeed.runtime.zero import stage3

    class Moved:
        """An optimizer of ZeRO-3 without the methods that are patched."""

        fp16_partitioned_groups_flat = (torch.zeros(4, dtype=torch.bfloat16),)
        fp32_partitioned_groups_flat = (torch.zeros(4),)
        offload_param = swap_optimizer = offload_optimizer = False
        optimizer = SimpleNamespace()

    monkeypatch.setattr(stage3, "DeepSpeedZeroOptimizer_Stage3", Moved)
    monkeypatch.delattr(stage3, "defragment")
    with creation_memory.bounded_creation() as spared:
        assert not hasattr(stage3, "defragment")
    creation_memory.check_creation(Moved(), spared)
    (message,) = [record.getMessage() for record in caplog.records]
    assert all(name in message for name in PATCHES)


def test_patches_are_removed_after_an_error() -> None:
    before = patched()
    with pytest.raises(RuntimeError, match="on purpose"), creation_memory.bounded_creation():
        assert not any(now is then for now, then in zip(patched(), before, strict=True))
        raise RuntimeError("on purpose")
    assert patched() == before
