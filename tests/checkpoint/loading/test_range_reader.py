"""Bytes out of files: straight, through the buffer, strided, by several threads; what is refused."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from ds_trainer.checkpoint.loading import range_reader
from ds_trainer.checkpoint.loading.range_reader import RangeReader
from ds_trainer.checkpoint.loading.stored_tensors import StoredTensor
from ds_trainer.checkpoint.weights.strided_views import StridedView, contiguous_strides
from ds_trainer.utils.errors import ConfigError

PREFIX = 100  # bytes before the elements


def stored(path: Path, tensor: torch.Tensor) -> StoredTensor:
    path.write_bytes(b"x" * PREFIX + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    shape = tuple(tensor.shape)
    return StoredTensor(path, tensor.dtype, str(tensor.dtype), shape, contiguous_strides(shape), PREFIX)


def flat(size: int, offset: int = 0) -> StridedView:
    return StridedView((size,), (1,), offset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 1000, 300_001])
def test_a_run_is_read(size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Straight into the target, or converted through the buffer; 300,001 elements are many chunks."""
    tensor = torch.randn(300_100)
    source = stored(tmp_path / "file", tensor)
    reader = RangeReader(64 * 1024)
    target = torch.zeros(size + 2, dtype=dtype)
    reader.read([(source, flat(size, 7), flat(size, 1))], target)
    assert torch.equal(target[1:-1], tensor[7 : 7 + size].to(dtype))
    assert target[0] == target[-1] == 0
    assert reader.bytes_read == 4 * size
    assert reader.seconds > 0


def test_columns_are_read(tmp_path: Path) -> None:
    """Long rows are read alone; small gaps are read along, and bounded."""
    tensor = torch.randn(64, 3000)
    source = stored(tmp_path / "file", tensor)
    for width, start, along in ((1200, 1800, False), (2000, 0, True), (2990, 10, True), (3, 5, False)):
        reader = RangeReader(64 * 1024)
        target = torch.zeros(64 * width)
        wanted = StridedView((64, width), (3000, 1), start)
        reader.read([(source, wanted, StridedView((64, width), (width, 1)))], target)
        assert torch.equal(target.view(64, width), tensor[:, start : start + width])
        assert reader.bytes_read >= 4 * 64 * width
        if not along:
            assert reader.bytes_read == 4 * 64 * width
        assert reader.bytes_read <= 4 * 64 * 3000


def test_a_transposed_tensor_larger_than_the_buffer(tmp_path: Path) -> None:
    tensor = torch.randn(5, 70, 90)
    source = stored(tmp_path / "file", tensor)
    reader = RangeReader(16 * 1024)
    target = torch.zeros(tensor.numel(), dtype=torch.bfloat16)
    reader.read([(source, StridedView((5, 90, 70), (6300, 1, 90)), StridedView((5, 90, 70), (6300, 70, 1)))], target)
    assert torch.equal(target.view(5, 90, 70), tensor.transpose(1, 2).to(torch.bfloat16))
    assert reader.bytes_read == tensor.nbytes


def test_reading_takes_only_the_memory_of_the_buffer(tmp_path: Path) -> None:
    """256 MiB are converted: nothing but the target and 8 MiB come on top."""
    path, size = tmp_path / "file", 64 * 2**20
    with path.open("wb") as stream:
        stream.truncate(4 * size)
    source = StoredTensor(path, torch.float32, "F32", (size,), (1,), 0)
    reader = RangeReader(8 * 2**20)
    target = torch.zeros(size, dtype=torch.bfloat16)
    reader.read([(source, flat(1000), flat(1000))], target)  # threads and buffers are there
    reader.read([(source, flat(2**22), flat(2**22))], target)
    gc.collect()
    before = psutil.Process().memory_info().rss
    peak = _peak_while(lambda: reader.read([(source, flat(size), flat(size))], target))
    assert peak - before < 4 * 2**20
    buffer_bytes = sum(buffer.numel() for buffer in _buffers(reader))
    assert buffer_bytes <= 8 * 2**20


def _buffers(reader: RangeReader) -> list[torch.Tensor]:
    assert reader._buffers is not None
    return [reader._buffers.get() for _ in range(4)]


def _peak_while(work: object) -> int:
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM is reset
    work()  # type: ignore[operator]
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def test_a_file_that_became_shorter_is_detected(tmp_path: Path) -> None:
    tensor = torch.randn(100_000)
    source = stored(tmp_path / "file", tensor)
    reader = RangeReader(16 * 1024)
    for dtype in (torch.float32, torch.bfloat16):  # straight, and through the buffer on several threads
        target = torch.zeros(100_000, dtype=dtype)
        reader.read([(source, flat(100_000), flat(100_000))], target)
        os.truncate(source.path, 300_000)
        with pytest.raises(ConfigError, match="file ended at byte 300000"):
            reader.read([(source, flat(100_000), flat(100_000))], target)
        stored(tmp_path / "file", tensor)
        reader.read([(source, flat(100_000), flat(100_000))], target)  # no buffer was lost
        assert torch.equal(target, tensor.to(dtype))


def test_few_files_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_reader, "_OPEN_FILES", 3)
    tensors = [torch.randn(10) for _ in range(8)]
    files = [stored(tmp_path / str(number), tensor) for number, tensor in enumerate(tensors)]
    reader = RangeReader()
    for number in [*range(8), 0, 7]:
        target = torch.empty(10)
        reader.read([(files[number], flat(10), flat(10))], target)
        assert torch.equal(target, tensors[number])
        assert len(reader._files) <= 3
    descriptors = [*reader._files.values()]
    del reader
    gc.collect()
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_the_buffer_has_a_minimum_size() -> None:
    with pytest.raises(ConfigError, match="buffer_bytes=100 is too small"):
        RangeReader(100)


def test_reading_nothing_works() -> None:
    reader = RangeReader()
    reader.read([], torch.empty(0))
    assert reader.bytes_read == 0


AT_EXIT = """
import abc, sys
from pathlib import Path
from ds_trainer.checkpoint.loading.range_reader import RangeReader
reader = RangeReader()
reader._open({Path(sys.argv[1])})
abc.kept = reader  # a module that is taken apart after os
"""


def test_no_warning_when_the_interpreter_exits(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    argv = [sys.executable, "-W", "error", "-c", AT_EXIT, str(tmp_path / "file")]
    completed = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert (completed.returncode, completed.stderr) == (0, "")
