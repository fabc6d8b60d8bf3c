"""Files of shards: what lies where in them, and which file has which elements."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ds_trainer.checkpoint.shards.model_plan import TensorLocation
from ds_trainer.checkpoint.shards.shard_file import ShardFile, plan_shard_file, write_shard_file
from ds_trainer.checkpoint.shards.shard_map import ShardMap, shard_summary
from ds_trainer.engine.state.state_shards import StateShard
from ds_trainer.parallel.shard_slices import ShardSlice

WHOLE = ShardSlice.whole((4, 5))


def shard(name: str, shard_slice: ShardSlice, dtype: torch.dtype = torch.float32, kind: str = "master") -> StateShard:
    return StateShard(name, kind, shard_slice, torch.arange(shard_slice.start, shard_slice.stop).to(dtype))


def written(path: Path, *shards: StateShard, **scalars: object) -> ShardFile:
    with path.open("wb") as stream:
        write_shard_file(stream, shards, {"a": scalars} if scalars else {})
    return ShardFile(path)


def test_shard_files_open_with_any_safetensors_reader(tmp_path: Path) -> None:
    some = [shard("a", WHOLE.run(0, 3), torch.bfloat16), shard("b", WHOLE.run(2, 9)), shard("c", WHOLE, torch.int64)]
    file = written(tmp_path / "one.safetensors", *some)
    by_others = load_file(tmp_path / "one.safetensors")
    for one in some:
        assert torch.equal(by_others[f"{one.name}/{one.kind}"], one.tensor)
        assert torch.equal(file.tensor(f"{one.name}/{one.kind}"), one.tensor)
        assert file.slices[f"{one.name}/{one.kind}"] == one.slice


def test_elements_are_aligned_to_their_dtype() -> None:
    """Readers map the file: eight bytes for the length, a header that is a multiple of eight, wide types first."""
    for count in range(1, 9):
        some = [shard("b" * count, WHOLE.run(0, 3), torch.bfloat16), shard("a", WHOLE, torch.int64)]
        arranged = plan_shard_file(some, {})
        assert len(arranged.header) % 8 == 0
        assert [one.tensor.element_size() for one in arranged.shards] == [8, 2]


@pytest.mark.parametrize(("stored", "written"), [(torch.float32, False), (torch.bfloat16, True)])
def test_only_elements_of_the_same_type_are_left_to_the_models_files(stored: torch.dtype, written: bool) -> None:
    """A float32 master whose model file holds bf16 is written to both: rounded there, exact here."""
    master = shard("a", WHOLE)
    plan = plan_shard_file([master], {}, lambda shard: TensorLocation("model.safetensors", 100, stored))
    assert (plan.written, plan.size) == (80 if written else 0, 80)
    assert plan.in_model == [(TensorLocation("model.safetensors", 100, stored), master, 0)]


def test_scalar_states_keep_their_dtype(tmp_path: Path) -> None:
    file = written(tmp_path / "one.safetensors", step=torch.tensor(7.0), count=3)
    step = file.scalars["a"]["step"]
    assert isinstance(step, torch.Tensor) and step.dtype == torch.float32 and float(step) == 7.0
    assert file.scalars["a"]["count"] == 3


def test_an_empty_shard_has_no_elements(tmp_path: Path) -> None:
    file = written(tmp_path / "one.safetensors", shard("a", WHOLE.run(4, 4)), shard("b", WHOLE))
    assert len(file.tensor("a/master")) == 0 and len(file.tensor("b/master")) == 20


def test_an_unsupported_dtype_is_rejected() -> None:
    one = StateShard("a", "master", WHOLE, torch.zeros(20, dtype=torch.complex64))
    with pytest.raises(ValueError, match="complex64, which safetensors cannot hold"):
        write_shard_file(io.BytesIO(), [one], {})


def mapped(tmp_path: Path, *shard_slices: ShardSlice) -> ShardMap:
    files = {}
    for number, shard_slice in enumerate(shard_slices):
        path = tmp_path / f"{number}.safetensors"
        files[str(number)] = shard_summary(written(path, shard("a", shard_slice)))
    layouts: dict[object, object] = {}  # files of one layout share it, as they do when ranks tell each other
    shared = {name: (layouts.setdefault(layout, layout), runs) for name, (layout, runs) in files.items()}
    return ShardMap(shared)  # type: ignore[arg-type]


def test_the_files_that_hold_elements_of_a_run_are_found(tmp_path: Path) -> None:
    found = mapped(tmp_path, *(WHOLE.run(start, start + 5) for start in (0, 5, 10, 15)))
    for start, stop, files in ((0, 5, "0"), (5, 10, "1"), (4, 6, "01"), (3, 16, "0123"), (7, 8, "1")):
        assert "".join(found.files("a", "master", WHOLE.run(start, stop))) == files
    assert found.files("a", "exp_avg", WHOLE) == found.files("b", "master", WHOLE) == []


def test_the_files_that_hold_elements_of_another_slice_are_found(tmp_path: Path) -> None:
    """Written by two tensor-parallel ranks that partition columns, read by one rank, or partitioned by rows."""
    halves = [ShardSlice((4, 5), 0, 4 * width, 1, ((first, width),)) for first, width in ((0, 3), (3, 2))]
    found = mapped(tmp_path, *halves)
    assert found.files("a", "master", WHOLE.run(0, 3)) == ["0"]
    assert found.files("a", "master", WHOLE.run(3, 5)) == ["1"]
    assert found.files("a", "master", WHOLE.run(2, 4)) == ["0", "1"]
    assert found.files("a", "master", ShardSlice((4, 5), 0, 4, 1, ((4, 1),))) == ["1"]
