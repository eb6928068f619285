"""The feature store: a folder of shards, each computed once, and resumable.

A shard holds 256 answers in the order of the corpus, and is named after what it was computed from. So a corpus that
grows at its end keeps the shards it has, and one folder can serve several corpora.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from accelerate import Accelerator
from tqdm import tqdm
from transformers import PreTrainedModel

from .answering import by_length, hash_text
from .answers import Answer
from .features import Example, Selection, ShardReader, target_pass, write_shard

SHARD_SIZE = 256  # answers
TOKENS_PER_PASS = 2560
TOP_K = 64  # of the target's distribution; what is below carries no weight


class Split(NamedTuple):
    """Answers for training and answers held out, both in the order of the corpus."""

    train: list[Answer]
    held_out: list[Answer]


def split_answers(answers: Sequence[Answer], *, held_out: int, seed: int) -> Split:
    """Hold out `held_out` answers, by a hash of their ids: more answers may replace some of them, but never by one that
    was trained on before."""
    ranked = sorted(answers, key=lambda answer: hash_text(f"{seed} {answer.id}"))
    chosen = {answer.id for answer in ranked[:held_out]}
    return Split(
        [answer for answer in answers if answer.id not in chosen], [answer for answer in answers if answer.id in chosen]
    )


def passes(answers: Sequence[Answer]) -> Iterator[list[Answer]]:
    """Answers of like length together, about `TOKENS_PER_PASS` padded tokens at a time."""
    return by_length(answers, lambda answer: answer.length, max_tokens=TOKENS_PER_PASS)


class FeatureStore:
    """Features of a corpus in `folder`.

    Args:
        answers: the corpus, those held out included.
        held_out: how many answers `split_answers` keeps from training, with `seed`.
        description: what the features depend on besides the answers, such as the target's name and the layers read.
    """

    def __init__(
        self, folder: Path, answers: Sequence[Answer], *, held_out: int, seed: int, description: dict[str, Any]
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        parts = [list(answers[start : start + SHARD_SIZE]) for start in range(0, len(answers), SHARD_SIZE)]
        # In the order in which their features lie in the file.
        self.answers = {shard_name(part, description): [a for group in passes(part) for a in group] for part in parts}
        self.held_out_ids = {answer.id for answer in split_answers(answers, held_out=held_out, seed=seed).held_out}

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

    def train_shards(self) -> list[Selection]:
        """What to train on, shard by shard."""
        return [shard for name in self.answers if len(shard := self._select(name, held_out=False))]

    def held_out(self) -> list[Selection]:
        """What to evaluate on, shard by shard."""
        return [shard for name in self.answers if len(shard := self._select(name, held_out=True))]

    def _select(self, name: str, *, held_out: bool) -> Selection:
        wanted = [(answer.id in self.held_out_ids) == held_out for answer in self.answers[name]]
        return Selection(ShardReader(self.path(name)), [index for index, take in enumerate(wanted) if take])


def shard_name(answers: Sequence[Answer], description: dict[str, Any]) -> str:
    """A hash of the answers' tokens and of the description."""
    content = [description, [[answer.prompt_ids, answer.response_ids] for answer in answers]]
    return "shard-" + hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
