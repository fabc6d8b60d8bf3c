"""Peak FLOP/s of devices by name, the denominator of MFU. Pure data: no device is queried.

The figures are the vendors': dense (no structured sparsity), matrix units if they support the format, float32
accumulation, boost clock. Figures that a vendor publishes only with sparsity are halved here.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ds_trainer.utils.errors import ConfigError

PEAK_VARIABLE = "DS_TRAINER_PEAK_TFLOPS"

FORMATS: tuple[str, ...] = ("bf16", "fp16", "tf32", "fp32")


@dataclass(frozen=True)
class Device:
    """Peak of one device in TFLOP/s (10**12 operations per second); None for a format without fast units."""

    bf16: float | None
    fp16: float | None
    tf32: float | None
    fp32: float
    source: str

    def peak(self, number_format: str) -> float | None:
        """FLOP/s in ``number_format``, one of :data:`FORMATS`."""
        tera = {"bf16": self.bf16, "fp16": self.fp16, "tf32": self.tf32, "fp32": self.fp32}[number_format]
        return None if tera is None else tera * 1e12


def _nvidia(tensor: float, tf32: float, fp32: float, source: str) -> Device:
    """A device whose matrix units have the same speed for bf16 and fp16."""
    return Device(tensor, tensor, tf32, fp32, f"NVIDIA {source}")


_H100 = _nvidia(989.4, 494.7, 66.9, "H100 data sheet (SXM)")
_H100_PCIE = _nvidia(756.5, 378.0, 51.2, "H100 data sheet (PCIe)")
_H100_NVL = _nvidia(835.5, 417.5, 60.0, "H100 data sheet (NVL)")
_A100 = _nvidia(312.0, 156.0, 19.5, "A100 data sheet")
_MI300X = Device(1307.4, 1307.4, 653.7, 163.4, "AMD Instinct MI300X data sheet")

# Words that a device's name must contain. If several rows match, the longest key counts.
DEVICES: dict[str, Device] = {
    "v100 sxm2": Device(None, 125.0, None, 15.7, "NVIDIA V100 data sheet"),
    "v100 sxm3": Device(None, 125.0, None, 15.7, "NVIDIA V100 data sheet"),
    "v100 pcie": Device(None, 112.0, None, 14.0, "NVIDIA V100 data sheet"),
    "v100s pcie": Device(None, 130.0, None, 16.4, "NVIDIA V100 data sheet"),
    "t4": Device(None, 65.0, None, 8.1, "NVIDIA T4 data sheet"),
    "a10": _nvidia(125.0, 62.5, 31.2, "A10 data sheet"),
    "a10g": _nvidia(70.0, 35.0, 31.5, "A10G data sheet"),
    "a30": _nvidia(165.0, 82.0, 10.3, "A30 data sheet"),
    "a40": _nvidia(149.7, 74.8, 37.4, "A40 data sheet"),
    "a100": _A100,
    "a800": _A100,
    "l4": _nvidia(121.0, 60.0, 30.3, "L4 data sheet"),
    "l40": _nvidia(181.05, 90.5, 90.5, "L40 data sheet"),
    "l40s": _nvidia(362.05, 183.0, 91.6, "L40S data sheet"),
    "rtx 3090": _nvidia(71.0, 35.6, 35.6, "Ampere GA102 white paper"),
    "rtx 3090 ti": _nvidia(80.0, 40.0, 40.0, "Ampere GA102 white paper"),
    "rtx 4090": _nvidia(165.2, 82.6, 82.6, "Ada white paper"),
    "rtx 5090": _nvidia(209.5, 104.8, 104.8, "RTX Blackwell white paper"),
    "rtx a5000": _nvidia(111.1, 55.6, 27.8, "Ampere GA102 white paper"),
    "rtx a6000": _nvidia(154.8, 77.4, 38.7, "Ampere GA102 white paper"),
    "rtx 6000 ada": _nvidia(364.2, 182.1, 91.1, "Ada white paper"),
    "h100": _H100,
    "h100 pcie": _H100_PCIE,
    "h100 nvl": _H100_NVL,
    "h800": _H100,
    "h800 pcie": _H100_PCIE,
    "h20": _nvidia(148.0, 74.0, 44.0, "H20 data sheet"),
    "h200": _nvidia(989.4, 494.7, 66.9, "H200 data sheet (SXM)"),
    "h200 nvl": _nvidia(835.5, 417.5, 60.0, "H200 data sheet (NVL)"),
    "gh200": _nvidia(989.4, 494.7, 66.9, "GH200 data sheet"),
    "b100": _nvidia(1750.0, 875.0, 60.0, "Blackwell data sheet (HGX B100, one of eight)"),
    "b200": _nvidia(2250.0, 1125.0, 75.0, "Blackwell data sheet (HGX B200, one of eight)"),
    "gb200": _nvidia(2500.0, 1250.0, 80.0, "GB200 NVL72 data sheet (one of 72)"),
    "b300": _nvidia(2250.0, 1125.0, 75.0, "HGX B300 data sheet (one of eight)"),
    "gb300": _nvidia(2500.0, 1250.0, 80.0, "GB300 NVL72 data sheet (one of 72)"),
    "mi100": Device(92.3, 184.6, None, 46.1, "AMD Instinct MI100 data sheet"),
    "mi210": Device(181.0, 181.0, None, 45.3, "AMD Instinct MI210 data sheet"),
    "mi250": Device(181.05, 181.05, None, 45.3, "AMD Instinct MI250 data sheet, half: one of its two dies"),
    "mi250x": Device(191.5, 191.5, None, 47.9, "AMD Instinct MI250X data sheet, half: one of its two dies"),
    "mi300a": Device(980.6, 980.6, 490.3, 122.6, "AMD Instinct MI300A data sheet"),
    "mi300x": _MI300X,
    "mi325x": _MI300X,
    "mi350x": Device(2306.9, 2306.9, None, 144.2, "AMD Instinct MI350X data sheet"),
    "mi355x": Device(2516.6, 2516.6, None, 157.3, "AMD Instinct MI355X data sheet"),
}

# Words that mark other hardware, or a part of a device, with the same name.
_OTHER_DEVICES = {"laptop", "mobile", "mig", "d", "ti", "super", "max"}


def words_of(name: str) -> set[str]:
    """The words of a device's name: ``RTX4090-24GB`` has ``rtx``, ``4090`` and ``24gb``."""
    return set(re.findall(r"rtx|[a-z0-9]+", name.lower()))


def find_device(name: str) -> Device | None:
    """The row for a name from ``torch.cuda.get_device_name``; None for a device that is not in the table.

    Laptop versions, parts of a device (MIG) and other variants with a similar name are not in the table.
    """
    tokens = words_of(name)
    matching = [key for key in DEVICES if tokens.issuperset(key.split())]
    matching = [key for key in matching if not (tokens & _OTHER_DEVICES) - set(key.split())]
    return DEVICES[max(matching, key=len)] if matching else None


def peak_flops(name: str, number_format: str, environment: Mapping[str, str] = os.environ) -> float | None:
    """Peak FLOP/s of one device in ``number_format`` (one of :data:`FORMATS`); None if it is not known.

    The environment variable ``DS_TRAINER_PEAK_TFLOPS`` (TFLOP/s of one device in the format of the run) overrides the
    table, for hardware that is not in it.

    Raises:
        ConfigError: the variable is not a positive number.
    """
    override = environment.get(PEAK_VARIABLE)
    if override is not None:
        return _positive_number(override) * 1e12
    device = find_device(name)
    return None if device is None else device.peak(number_format)


def _positive_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(
            f"{PEAK_VARIABLE}={text!r} in the environment is not a positive number. Set it to the peak "
            "TFLOP/s of one device in the number format of the run (989 for an H100 in bf16), or unset it."
        )
    return value
