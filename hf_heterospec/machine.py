"""Which machine this is, the dtype it is fast in, and the way to its device."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor


def device_name(device: torch.device) -> str:
    """Of the accelerator, or of the processor behind `device`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def to_device(numbers: int | Sequence[int], device: torch.device) -> Tensor:
    """Integers of the host as an int64 tensor on `device`. Does not wait for what runs there, which
    `torch.tensor(numbers, device=device)` does on CUDA."""
    return torch.tensor(numbers, dtype=torch.long).to(device, non_blocking=True)


DTYPES = ("auto", "bfloat16", "float16", "float32")
AUTO = "auto: bfloat16 where the machine multiplies it, else float32"  # help of the options that take one of them


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether `device` has instructions for bf16 products. A processor without them (AVX2) takes twice as long as in
    fp32 over 8 rows, and 6 times as long over 128."""
    if device.type == "cpu":
        return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def resolve_dtype(name: str, device: torch.device | str) -> str:
    """`name`, one of `DTYPES`, with `auto` made float32 on a device without bf16 products, and bfloat16 elsewhere."""
    if name != "auto":
        return name
    return "bfloat16" if multiplies_bfloat16(torch.device(device)) else "float32"
