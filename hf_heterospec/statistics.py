"""What happened during a call: rounds, acceptance, and where the time went."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from .tree import DraftTree


@dataclass
class SpeculationStatistics:
    """Counts of one `generate` call.

    Attributes:
        rounds: target passes that verified a tree (the prefill is none).
        accepted_tokens: drafted tokens that were emitted.
        verified_tokens: nodes the target computed in those rounds, roots included.
        accepted_at_depth: how many rounds accepted at least d drafted tokens, for d = 1, 2, ...
        drafted_at_depth: how many rounds drafted at least d levels.
        tiers: how many rounds each tier served.
        graphs: `"compiled"`, or `"eager: "` and why.
        seconds: `"head"`, `"target"` and `"other"` of the decoding loop, and `"prefill"`, which comes before it.
    """

    rounds: int = 0
    accepted_tokens: int = 0
    verified_tokens: int = 0
    accepted_at_depth: list[int] = field(default_factory=list)
    drafted_at_depth: list[int] = field(default_factory=list)
    tiers: Counter[str] = field(default_factory=Counter)
    graphs: str = "eager"
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def tau(self) -> float:
        """Mean acceptance length: tokens per target pass, accepted drafts and the bonus token."""
        return self.accepted_tokens / self.rounds + 1 if self.rounds else 1.0

    @property
    def acceptance_per_depth(self) -> list[float]:
        """Share of rounds that accepted depth d, among those that drafted as deep."""
        return [a / d for a, d in zip(self.accepted_at_depth, self.drafted_at_depth, strict=True)]

    def record_round(self, tree: DraftTree, *, accepted: int, tier: str) -> None:
        """Count one verified tree of which `accepted` drafted tokens were emitted."""
        self.rounds += 1
        self.verified_tokens += tree.num_nodes
        self.accepted_tokens += accepted
        self.tiers[tier] += 1
        missing = [0] * (tree.num_levels - len(self.drafted_at_depth))
        self.drafted_at_depth += missing
        self.accepted_at_depth += missing
        for depth in range(tree.num_levels):
            self.drafted_at_depth[depth] += 1
            self.accepted_at_depth[depth] += depth < accepted

    def record_time(self, seconds: dict[str, float]) -> None:
        """Take over a stopwatch's seconds; what of `"decode"` is neither head nor target becomes `"other"`."""
        parts = {name: seconds.get(name, 0.0) for name in ("prefill", "head", "target")}
        self.seconds = parts | {"other": seconds.get("decode", 0.0) - parts["head"] - parts["target"]}

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain JSON data."""
        return asdict(self) | {
            "tau": self.tau,
            "acceptance_per_depth": self.acceptance_per_depth,
            "tiers": dict(self.tiers),
        }


class Stopwatch:
    """Adds up seconds by name. On CUDA it records events and reads them at the end, so that it never waits."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        if self._cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._events.append((name, start, end))
        else:
            start_time = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - start_time

    def seconds(self) -> dict[str, float]:
        """Seconds by name so far. Waits for the device on CUDA."""
        if self._cuda:
            torch.cuda.synchronize()
            for name, start, end in self._events:
                self._seconds[name] += start.elapsed_time(end) / 1000
            self._events.clear()
        return dict(self._seconds)
