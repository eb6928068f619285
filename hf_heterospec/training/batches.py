"""Which answers train together. The plan of an epoch depends on the seed and the epoch only, so that a resumed run
continues in the middle of it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from .chains import ChainBatch, collate
from .features import Selection


def plan_epoch(shards: Sequence[Selection], *, batch_size: int, seed: int, epoch: int) -> list[tuple[int, list[int]]]:
    """Batches of an epoch as `(shard, indices)`. A batch comes from one shard; its answers are of like length, with
    some jitter, so that padding is rare and company changes from epoch to epoch."""
    rng = random.Random(f"{seed} {epoch}")
    plan: list[tuple[int, list[int]]] = []
    for number, shard in enumerate(shards):
        lengths = shard.answer_lengths
        order = sorted(range(len(shard)), key=lambda index: lengths[index] + rng.random() * 24)
        plan += [(number, order[start : start + batch_size]) for start in range(0, len(order), batch_size)]
    rng.shuffle(plan)
    return plan


class BatchLoader:
    """Training batches by step number, for one of `num_processes` processes.

    Args:
        fraction: of an answer's positions that start a chain each time the answer is seen.
    """

    def __init__(
        self,
        shards: Sequence[Selection],
        *,
        batch_size: int,
        fraction: float,
        seed: int,
        process: int = 0,
        num_processes: int = 1,
    ) -> None:
        self.shards, self.batch_size, self.fraction, self.seed = shards, batch_size, fraction, seed
        self.process, self.num_processes = process, num_processes
        batches = sum(-(-len(shard) // batch_size) for shard in shards)
        self.steps_per_epoch = -(-batches // num_processes)
        self.epoch, self.plan = -1, [(0, [0])]

    def __getitem__(self, step: int) -> ChainBatch:
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self.epoch:
            plan = plan_epoch(self.shards, batch_size=self.batch_size, seed=self.seed, epoch=epoch)
            self.epoch, self.plan = epoch, plan
        shard, indices = self.plan[(place * self.num_processes + self.process) % len(self.plan)]
        generator = torch.Generator().manual_seed(random.Random(f"{self.seed} {step} {self.process}").getrandbits(62))
        examples = [self.shards[shard][index] for index in indices]
        return collate(examples, fraction=self.fraction, generator=generator)


def held_out_batches(shards: Sequence[Selection], *, batch_size: int, fraction: float, seed: int) -> list[ChainBatch]:
    """The held-out answers with fixed anchors, so that evaluations can be compared."""
    generator = torch.Generator().manual_seed(seed)
    places = [(shard, index) for shard in shards for index in range(len(shard))]
    places.sort(key=lambda place: place[0].answer_lengths[place[1]])
    groups = [places[start : start + batch_size] for start in range(0, len(places), batch_size)]
    return [
        collate([shard[index] for shard, index in group], fraction=fraction, generator=generator) for group in groups
    ]
