"""Memory that this process uses on its device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch

BYTES_PER_GB = 10**9  # as everywhere in this package: of disks, networks, the plan and files


def memory_in_use_gb(device: str | torch.device) -> float:
    """Memory of this process in GB of 10**9 bytes.

    On a CUDA device: the *peak* that torch has allocated since the start (or since
    ``torch.cuda.reset_peak_memory_stats``). This number decides whether a run fits, and reading it does not synchronize
    the device. On any other device: the current resident set size of this process.
    """
    if str(device).split(":")[0] == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device) / BYTES_PER_GB
    return psutil.Process().memory_info().rss / BYTES_PER_GB
