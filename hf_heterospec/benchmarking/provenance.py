"""Where numbers come from: machine, versions, commit, command."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

from .. import __version__
from ..machine import device_name
from .peers import has_economize


def describe_run(device: torch.device) -> dict[str, Any]:
    """What a result needs to be repeated, as plain JSON data."""
    return {
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "processor": device_name(torch.device("cpu")),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "accelerator": device_name(device) if device.type == "cuda" else None,
            "read_gigabytes_per_second": round(read_bandwidth(device) / 1e9, 1),
        },
        "versions": {
            "hf_heterospec": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            **({"economize": version("economize")} if has_economize() else {}),
        },
        "commit": _commit(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def read_bandwidth(device: torch.device, *, num_bytes: int = 2**28, repeats: int = 5) -> float:
    """Bytes per second at which `device` reads memory: the fastest of several sums over a large tensor."""
    values = torch.ones(num_bytes // 4, device=device)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        float(values.sum())
        best = min(best, time.perf_counter() - start)
    return num_bytes / best


def _commit() -> str | None:
    """Of the checkout this package lies in; `None` outside of one. A `+` marks uncommitted changes."""
    folder = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
        dirty = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], cwd=folder,
                               capture_output=True, text=True, check=True)  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")
