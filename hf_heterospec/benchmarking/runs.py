"""The measurement: every prompt goes through all arms, one after the other, in one process.

Arms take turns prompt by prompt (A B C, B C A, ...), so that a machine that slows down slows all of them down.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..configuration import HeteroSpecGenerationConfig
from ..head import HeteroSpecHead
from .arms import Arm
from .peers import EconomizeChain

WARM_UP_TOKENS = 24


@dataclass(frozen=True)
class Record:
    """One call of `generate`.

    Attributes:
        seconds: wall time of the call, prompt included.
        rounds: target passes after the prompt's; for arms that do not count them, `None` like the rest.
        split: seconds of the prompt's pass, head, target and everything else.
        peak_bytes: most memory in use during the call (resident on the CPU, allocated on a GPU).
    """

    arm: str
    prompt_set: str
    prompt: int
    repeat: int
    seconds: float
    new_tokens: int
    peak_bytes: int
    rounds: int | None = None
    verified_tokens: int | None = None
    tau: float | None = None
    split: dict[str, float] | None = None
    tiers: dict[str, int] | None = None
    graphs: str | None = None

    @property
    def key(self) -> tuple[str, str, int, int]:
        return self.arm, self.prompt_set, self.prompt, self.repeat


class RecordFile:
    """Settings on the first line, then a record a line, written as measured: a run can go on where it broke off."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.records: list[Record] = []
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(settings) + "\n")
            return
        first, *rest = path.read_text().splitlines()
        if json.loads(first) != json.loads(json.dumps(settings)):
            raise ValueError(
                f"{path} holds records of a run with other settings; got {settings}; it has {first}. Choose another "
                "--output or delete the file."
            )
        self.records = [Record(**json.loads(line)) for line in rest]

    def append(self, record: Record) -> None:
        self.records.append(record)
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(record)) + "\n")


@torch.inference_mode()
def run_arms(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    head: HeteroSpecHead,
    *,
    arms: Sequence[Arm],
    prompt_sets: dict[str, list[str]],
    max_new_tokens: int,
    repeats: int = 1,
    done: RecordFile | None = None,
) -> list[Record]:
    """Measure all arms on all prompts, greedily, batch 1.

    Args:
        arms: compared in turns; the first call of each warms up and does not count.
        prompt_sets: user messages by set; the tokenizer's chat template wraps them, where it has one.
        done: records that exist already, skipped, and the place where new ones go.
    """
    records = list(done.records) if done is not None else []
    seen = {record.key for record in records}
    jobs = [
        (arm, name, number, repeat)
        for repeat in range(repeats)
        for name, prompts in prompt_sets.items()
        for number in range(len(prompts))
        for arm in _rotated(arms, number)
        if (arm.name, name, number, repeat) not in seen
    ]
    peer = EconomizeChain(model, head) if jobs and any(arm.peer_levels is not None for arm in arms) else None
    if jobs:
        first_set = next(iter(prompt_sets.values()))
        for arm in tqdm(arms, desc="warming up", disable=None, file=sys.stderr):
            _call(model, head, encode(tokenizer, first_set[0], model.device), arm, WARM_UP_TOKENS, peer)
    for arm, name, number, repeat in tqdm(jobs, desc="bench", disable=None, file=sys.stderr):
        ids = encode(tokenizer, prompt_sets[name][number], model.device)
        record = Record(arm.name, name, number, repeat, **_call(model, head, ids, arm, max_new_tokens, peer))
        records.append(record)
        if done is not None:
            done.append(record)
    return records


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, device: torch.device) -> Tensor:
    """`[1, length]`: one user message in the chat template, or the bare text where there is none."""
    if getattr(tokenizer, "chat_template", None):
        message = [{"role": "user", "content": prompt}]
        encoding = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        encoding = tokenizer(prompt, return_tensors="pt")
    return encoding["input_ids"].to(device)


def _rotated(arms: Sequence[Arm], number: int) -> list[Arm]:
    start = number % len(arms)
    return [*arms[start:], *arms[:start]]


def _call(
    model: PreTrainedModel,
    head: HeteroSpecHead,
    ids: Tensor,
    arm: Arm,
    max_new_tokens: int,
    peer: EconomizeChain | None,
) -> dict[str, Any]:
    """One call, as the fields of a `Record`."""
    config = arm.config(head, do_sample=False, max_new_tokens=max_new_tokens, **_special_ids(model))
    _reset_peak(model.device)
    start = time.perf_counter()
    if arm.peer_levels is not None:
        assert peer is not None
        new_tokens, fields = peer.decode(ids, num_levels=arm.peer_levels, max_new_tokens=max_new_tokens)
    else:
        new_tokens, fields = _generate(model, head if arm.draft is not None else None, ids, config)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "new_tokens": new_tokens, "peak_bytes": _peak_bytes(model.device)} | fields


def _generate(
    model: PreTrainedModel, head: HeteroSpecHead | None, ids: Tensor, config: HeteroSpecGenerationConfig
) -> tuple[int, dict[str, Any]]:
    """Through `generate`: the number of new tokens, and what a `Record` tells of the rounds."""
    assistant = {"assistant_model": head} if head is not None else {}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, **assistant)
    new_tokens = output.shape[1] - ids.shape[1]
    statistics = head.last_statistics if head is not None else None
    if statistics is None:
        return new_tokens, {}
    return new_tokens, {
        "rounds": statistics.rounds,
        "verified_tokens": statistics.verified_tokens,
        "tau": statistics.tau,
        "split": statistics.seconds,
        "tiers": dict(statistics.tiers),
        "graphs": statistics.graphs,
    }


def _special_ids(model: PreTrainedModel) -> dict[str, Any]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(model.generation_config, name) for name in names}


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif os.access("/proc/self/clear_refs", os.W_OK):
        Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the highest resident size so far


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
