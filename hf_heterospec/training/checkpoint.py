"""Checkpoints of a training run: safetensors and JSON, written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

KEPT = 2


def named_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's state by parameter name, as `name/key`."""
    return {
        f"{name}/{key}": value.detach().cpu()
        for name, parameter in module.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def save_checkpoint(
    folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, Any]
) -> Path:
    """Write `folder/step-NNNNNNN` and delete all but the newest `KEPT` checkpoints.

    Args:
        progress: plain data; `progress["step"]` names the checkpoint.
    """
    final = folder / f"step-{progress['step']:07d}"
    partial = folder / f"{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    weights = {name: value.detach().cpu().contiguous() for name, value in module.state_dict().items()}
    save_file(weights, partial / "model.safetensors")
    save_file(named_state(module, optimizer), partial / "optimizer.safetensors")
    (partial / "progress.json").write_text(json.dumps(progress))
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)
    for old in checkpoints(folder)[:-KEPT]:
        shutil.rmtree(old)
    return final


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.suffix != ".partial")


def load_checkpoint(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Restore `module` and `optimizer` from a checkpoint (mutates both) and return its progress.

    Raises:
        ValueError: naming the file, when one is missing, truncated or of another model.
    """
    file = path
    try:
        file = path / "model.safetensors"
        module.load_state_dict(load_file(file))
        file = path / "optimizer.safetensors"
        state = load_file(file)
        file = path / "progress.json"
        progress = json.loads(file.read_text())
    except (SafetensorError, OSError, RuntimeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{file} must be a file of a whole checkpoint of this model; it cannot be read ({error}). "
            f"Delete {path} to resume from the checkpoint before it."
        ) from error
    parameters = dict(module.named_parameters())
    for key, value in state.items():
        name, _, kind = key.rpartition("/")
        parameter = parameters[name]
        # The step counter stays where AdamW keeps it.
        optimizer.state[parameter][kind] = value.to(parameter.device) if value.ndim else value
    return progress
