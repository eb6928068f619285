"""What a recorded number needs beside it: machine, versions, commit, command. Files are written whole or not at all."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_heterospec

RESULTS = Path(__file__).parent / "results"


def provenance() -> dict[str, Any]:
    """Of this run, as plain JSON data."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "commit": _git("rev-parse", "HEAD") + ("+changes" if _git("status", "--porcelain", "-uno") else ""),
        "machine": {
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "versions": {
            "hf_heterospec": hf_heterospec.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }


def write_json(path: Path, data: Any) -> None:
    """Write atomically: an interrupted run leaves the file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(data, indent=1) + "\n")
    unfinished.replace(path)


def _git(*args: str) -> str:
    result = subprocess.run(["git", *args], capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    return result.stdout.strip()


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    named = {name.strip(): value.strip() for name, value in fields.items()}
    if "model name" in named:
        return f"{named['model name']} (family {named.get('cpu family')}, model {named.get('model')})"
    return platform.processor() or platform.machine()
