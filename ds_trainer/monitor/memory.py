"""How much memory this process uses on the device that it computes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch

BYTES_PER_GB = 2**30  # the unit in which GPU memory is sold: an "80 GB" card holds about 80 of these


def memory_in_use_gb(device: str | torch.device) -> float:
    """Memory of this process in units of 2**30 bytes.

    On a CUDA device the *peak* that torch has allocated on it since the start (or since
    ``torch.cuda.reset_peak_memory_stats``): that number decides whether a run fits, and reading it does not wait for
    the device. On any other device the resident set of this process, now.
    """
    if str(device).split(":")[0] == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device) / BYTES_PER_GB
    return psutil.Process().memory_info().rss / BYTES_PER_GB
