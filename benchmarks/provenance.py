"""Where recorded results lie, and what stands beside every one. Files are written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from hf_heterospec.benchmarking.provenance import describe_run

RESULTS = Path(__file__).parent / "results"


def provenance(device: str = "cpu") -> dict[str, Any]:
    """Machine, versions, commit and command of this run, as plain JSON data."""
    return describe_run(torch.device(device))


def write_json(path: Path, data: Any) -> None:
    """Write atomically: an interrupted run leaves the file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(data, indent=1) + "\n")
    unfinished.replace(path)
