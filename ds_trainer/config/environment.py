"""``Environment``: packages, disks and devices of the machine that runs a job, found without importing torch."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

_AIO_HEADERS = ("/usr/include/libaio.h", "/usr/local/include/libaio.h")


def _has_async_io() -> bool:
    """Whether DeepSpeed's ``async_io`` operator can be built: it needs the header of libaio."""
    paths = [Path(path) for path in _AIO_HEADERS]
    for name in ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH"):
        paths += [Path(part) / "libaio.h" for part in os.environ.get(name, "").split(":") if part]
    return any(path.is_file() for path in paths)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_directory(path: str) -> bool:
    return os.path.isdir(path) and os.access(path, os.W_OK)


@dataclass(frozen=True)
class Environment:
    """Facts about a machine. By default each call asks this machine.

    Attributes:
        has_async_io: whether files can be read asynchronously (offload to NVMe).
        version: installed version of a package, or None.
        is_writable_directory: whether a path is a writable directory.
    """

    has_async_io: Callable[[], bool] = field(default=_has_async_io)
    version: Callable[[str], str | None] = field(default=_version)
    is_writable_directory: Callable[[str], bool] = field(default=_is_directory)


@functools.cache
def device_type() -> str:
    """``"cuda"`` if torch is built for CUDA and the driver sees a GPU, else ``"cpu"``. Does not import torch."""
    return "cuda" if _torch_built_for_cuda() and _gpu_count() > 0 else "cpu"


def _torch_built_for_cuda() -> bool:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return False
    return re.search(r"^cuda\b[^=]*=\s*['\"]", text, re.MULTILINE) is not None


def _gpu_count() -> int:
    """Number of GPUs that this process sees (subject to ``CUDA_VISIBLE_DEVICES``); 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value
