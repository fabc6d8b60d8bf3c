"""Whether the kernels of :mod:`ds_trainer.parallel.tile_kernels` can be used: they are compiled and compared once.

Triton compiles for the GPU, and with a C compiler and Python's headers the code that launches a kernel. Machines that
only run models have neither, and a cache on a shared disk can fail on one rank alone. Whether a rank uses the kernels
changes no collective, so a rank can decide alone; :func:`set_kernel_problem` makes all ranks compute alike.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ds_trainer.utils.logging import EVERY_RANK, get_logger

logger = get_logger(__name__)

_ROWS = (4096,)
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}
_problems: dict[str, str | None] = {}  # by kind of device, once the kernels were tried


def suits(device: torch.device) -> bool:
    """Whether ``device`` is one for which the kernels are written: an NVIDIA GPU."""
    return device.type == "cuda" and torch.version.hip is None


def kernels_work(device: torch.device) -> bool:
    """Whether to use the kernels on ``device``. The first call tries them, if nothing has done so before."""
    if not suits(device):
        return False
    if device.type not in _problems:
        problem = kernel_problem(device)
        set_kernel_problem(device, problem)
        if problem is not None:
            logger.warning("The loss is computed without Triton's kernels: %s", problem, extra=EVERY_RANK)
    return _problems[device.type] is None


def set_kernel_problem(device: torch.device, problem: str | None) -> None:
    """Use the kernels on ``device`` from now on if ``problem`` is None, otherwise torch's operators."""
    _problems[device.type] = problem


def kernel_problem(
    device: torch.device,
    rows: Sequence[int] = _ROWS,
    dtype: torch.dtype = torch.float32,
    smoothing: bool = False,
) -> str | None:
    """Compile and run the kernels; why they cannot be used, or None. Waits for the device.

    Args:
        device: where.
        rows: widths of the tiles of a run: for some, Triton compiles other code.
        dtype: type of the gradients of tiles.
        smoothing: whether the loss has label smoothing.
    """
    try:
        differences = [_difference(device, width, dtype, smoothing) for width in rows]
    except Exception as error:  # whatever a compiler, a disk or a driver raises, torch's operators need none of it
        logger.log(logging.DEBUG, "Triton's kernels cannot be used.", exc_info=True)
        return f"{type(error).__name__}: {str(error).strip()[:500]}"
    allowed = _TOLERANCE.get(dtype, _TOLERANCE[torch.float32])
    if all(difference <= allowed for difference in differences):
        return None
    return f"the compiled kernels differ from torch's operators by {max(differences):.2g}; rounding allows {allowed}"


def _difference(device: torch.device, rows: int, dtype: torch.dtype, smoothing: bool) -> float:
    """The largest difference between the kernels and torch's operators, of numbers below 1 and some above."""
    from ds_trainer.parallel import tile_kernels

    # Four tokens: views of some buffers begin at a multiple of 16 bytes, for which Triton compiles other code.
    tile = torch.linspace(-2.0, 2.0, 4 * rows, device=device).view(4, rows)
    columns = torch.tensor([0, rows - 1, rows, -1], device=device)  # two of the targets are in another tile
    exponentials, at_target, total = torch.zeros(3, 4, device=device)
    largest = torch.full((4,), torch.finfo(torch.float32).min, device=device)
    tile_kernels.add_statistics(tile, columns, largest, exponentials, at_target, total if smoothing else None)
    lse = tile.logsumexp(1)
    ones = torch.ones(4, device=device)
    spread = ones / 8 if smoothing else None
    gradient = tile_kernels.gradient(
        tile=tile, columns=columns, lse=lse, share=ones, at_target=-ones, spread=spread, dtype=dtype
    )
    expected = (tile - lse[:, None]).exp() - (0.125 if smoothing else 0.0)
    targets = torch.zeros(4, device=device)
    for token, column in ((0, 0), (1, rows - 1)):
        expected[token, column] -= 1
        targets[token] = tile[token, column]
    pairs = [(largest + exponentials.log(), lse), (at_target, targets), (gradient.float(), expected)]
    if smoothing:
        pairs.append((total / rows, tile.mean(1)))
    return max(float((found - wanted).abs().max()) for found, wanted in pairs)
