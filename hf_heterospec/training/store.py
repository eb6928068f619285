"""The feature store: a folder of shards, computed once for a corpus and a target, and resumable."""

from __future__ import annotations

import hashlib
import json
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from accelerate import Accelerator
from tqdm import tqdm
from transformers import PreTrainedModel

from .answers import Answer
from .features import Example, ShardReader, target_pass, write_shard

SHARD_SIZE = 256  # answers
TOKENS_PER_PASS = 2560
TOP_K = 64  # of the target's distribution; what is below carries no weight


class Split(NamedTuple):
    """Answers for training, shuffled, and answers held out, some of every source."""

    train: list[Answer]
    held_out: list[Answer]


def split_answers(answers: Sequence[Answer], *, held_out: int, seed: int) -> Split:
    """Hold out about `held_out` answers in proportion to their sources, at least two of a source that has ten."""
    shuffled = list(answers)
    random.Random(seed).shuffle(shuffled)
    by_source: dict[str, list[Answer]] = defaultdict(list)
    for answer in shuffled:
        by_source[answer.source].append(answer)
    chosen: list[Answer] = []
    for _, group in sorted(by_source.items()):
        share = round(held_out * len(group) / len(shuffled))
        chosen += group[: max(share, 2 if len(group) >= 10 and held_out else 0)]
    ids = {answer.id for answer in chosen}
    return Split([answer for answer in shuffled if answer.id not in ids], chosen)


def passes(answers: Sequence[Answer]) -> Iterator[list[Answer]]:
    """Answers of like length together, about `TOKENS_PER_PASS` padded tokens at a time."""
    group: list[Answer] = []
    for answer in sorted(answers, key=lambda answer: answer.length):
        if group and (len(group) + 1) * answer.length > TOKENS_PER_PASS:
            yield group
            group = []
        group.append(answer)
    if group:
        yield group


class FeatureStore:
    """Features of a split corpus in `folder`.

    Args:
        description: what the features depend on besides the answers, such as the target's name and the layers read.

    Raises:
        ValueError: when the folder was filled for another corpus, target or set of layers.
    """

    def __init__(self, folder: Path, split: Split, *, description: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        train = [split.train[start : start + SHARD_SIZE] for start in range(0, len(split.train), SHARD_SIZE)]
        self.answers = {f"train-{number:05d}": part for number, part in enumerate(train)}
        if split.held_out:
            self.answers["held-out"] = split.held_out
        self.folder = folder
        listing = json.dumps(
            [[name, [a.prompt_ids + a.response_ids for a in part]] for name, part in self.answers.items()]
        )
        manifest = description | {"answers": hashlib.sha256(listing.encode()).hexdigest()}
        path = folder / "store.json"
        if path.exists() and json.loads(path.read_text()) != manifest:
            raise ValueError(
                f"{folder} must hold features of this corpus, target and layers; got {path.read_text()}, wanted "
                f"{json.dumps(manifest)}. Choose another folder, or delete it to compute the features again."
            )
        path.write_text(json.dumps(manifest))

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def missing(self) -> list[str]:
        return [name for name in self.answers if not self.path(name).exists()]

    def extract(self, target: PreTrainedModel, *, layers: Sequence[int], accelerator: Accelerator) -> None:
        """Compute the shards that are missing, each process its share."""
        mine = self.missing()[accelerator.process_index :: accelerator.num_processes]
        positions = sum(answer.length for name in mine for answer in self.answers[name])
        show = accelerator.is_local_main_process and bool(mine)
        with tqdm(total=positions, desc="target features", unit="tok", unit_scale=True, disable=not show) as bar:
            for name in mine:
                examples: list[Example] = []
                for group in passes(self.answers[name]):
                    examples += target_pass(target, group, layers=layers, top_k=TOP_K)
                    bar.update(sum(answer.length for answer in group))
                write_shard(self.path(name), examples)
        accelerator.wait_for_everyone()

    def train_shards(self) -> list[ShardReader]:
        return [ShardReader(self.path(name)) for name in self.answers if name != "held-out"]

    def held_out(self) -> ShardReader | None:
        return ShardReader(self.path("held-out")) if "held-out" in self.answers else None
