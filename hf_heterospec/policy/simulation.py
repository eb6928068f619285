"""Any policy on recorded traces, without a model: replay whole answers, round by round.

The policies run here are the objects that run in `generate`; only the tree and the target are replaced by what the
traces know. Replaying the target calls of a greedy run needs traces of every position of the answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from .costs import Costs
from .entropy import Quantifier
from .rounds import OFF, DraftView, RoundPolicy

if TYPE_CHECKING:
    from ..traces import Traces


@dataclass
class Replay:
    """What a policy led to.

    Attributes:
        tokens: tokens emitted, after the first one of each answer, which comes from the prompt's pass.
        rounds: target calls.
        verified_tokens: nodes verified, roots included.
        milliseconds: by the cost table.
        plain_milliseconds: plain decoding of the same tokens, by the cost table.
        tiers: rounds per tier.
    """

    tokens: int = 0
    rounds: int = 0
    verified_tokens: int = 0
    milliseconds: float = 0.0
    plain_milliseconds: float = 0.0
    tiers: Counter[str] = field(default_factory=Counter)

    def count(self, tokens: int, nodes: int, milliseconds: float, plain_milliseconds: float, tier: str) -> None:
        """Add one round; `plain_milliseconds` is the cost of one plain token."""
        self.rounds += 1
        self.tokens += tokens
        self.verified_tokens += nodes
        self.milliseconds += milliseconds
        self.plain_milliseconds += tokens * plain_milliseconds
        self.tiers[tier] += 1

    @property
    def tau(self) -> float:
        """Tokens per target call."""
        return self.tokens / self.rounds

    @property
    def tokens_per_second(self) -> float:
        return 1000 * self.tokens / self.milliseconds

    @property
    def speedup(self) -> float:
        """Over plain decoding."""
        return self.plain_milliseconds / self.milliseconds


class Simulator:
    """Traces, prepared for replay.

    Args:
        traces: positions of whole answers, every one.
        max_nodes: most nodes a tree may have.
        quantifier: its `path` is applied here; its other fields are those that the traces were made with.
    """

    def __init__(self, traces: Traces, *, max_nodes: int = 64, quantifier: Quantifier | None = None) -> None:
        if (np.diff(traces.position)[np.diff(traces.answer) == 0] != 1).any():
            raise ValueError("Replaying answers needs traces of every position; got some only. Trace with every=1.")
        self.traces, self.max_nodes = traces, max_nodes
        self.ranks = path_ranks(traces)  # [positions, levels, depths]
        k = traces.top_k
        self.level_values = [
            -np.sort(-traces.values[:, traces.level(level)], axis=1)[:, : max_nodes - 1]
            for level in range(1, traces.num_levels + 1)
        ]
        self.entropies = meta_path_entropies(traces, quantifier or Quantifier())
        self.starts = np.flatnonzero(np.diff(traces.answer, prepend=-1))  # first position of each answer
        self.width = k

    def accepted(self, position: int, *, num_levels: int, num_nodes: int) -> int:
        """Drafted tokens that the tree of the best `num_nodes` among `num_levels` levels has right; without levels, the
        copy of so many nodes."""
        if num_levels == 0:
            return min(int(self.traces.copied[position]), num_nodes - 1)
        if num_nodes < 2:
            return 0
        ranks = self.ranks[position, :num_levels, num_levels - 1]
        kept = (ranks >= 0) & (ranks < num_nodes - 1)
        return int(kept.all()) * num_levels if kept.all() else int(kept.argmin())

    def draft(self, view: DraftView, position: int, num_levels: int) -> None:
        """Let `view` know so many levels at a position."""
        for level in range(view.num_levels, num_levels):
            view.values.append(self.level_values[level][position].tolist())
            view.entropies.append(float(self.entropies[position, level]))

    def run(
        self,
        new_policy: Callable[[], RoundPolicy],
        costs: Costs,
        *,
        source: str | None = None,
        copies: bool = True,
    ) -> Replay:
        """Replay all answers, or those of one `source`, each under a policy of its own, which may copy if `copies`."""
        replay, traces = Replay(), self.traces
        for start in self.starts:
            if source is None or traces.sources[traces.answer[start]] == source:
                self._run_answer(int(start), new_policy(), costs, replay, copies)
        return replay

    def run_oracle(self, costs: Costs, *, iterations: int = 6) -> Replay:
        """Replay a policy that knows what will be accepted: a bound on what any rule can reach.

        At a price of time lambda it takes the tree with the most tokens minus lambda * cost; lambda is the rate that
        this leads to, found by iteration (Dinkelbach 1967).
        """
        price = 1 / costs.round(0, 1)
        for _ in range(iterations):
            replay = Replay()
            for start in self.starts:
                self._run_oracle_answer(int(start), price, costs, replay)
            price = replay.tokens / replay.milliseconds
        return replay

    def _run_oracle_answer(self, position: int, price: float, costs: Costs, replay: Replay) -> None:
        remaining = int(self.traces.remaining[position])
        while remaining > 0:
            copied = int(self.traces.copied[position])
            trees = [(0, 1, 0), (0, copied + 1, copied)]  # levels, nodes, accepted
            for levels in range(1, self.traces.num_levels + 1):
                needed = 0
                for accepted, rank in enumerate(self.ranks[position, :levels, levels - 1].tolist(), start=1):
                    if rank < 0 or rank > self.max_nodes - 2:
                        break
                    needed = max(needed, rank)
                    trees.append((levels, needed + 2, accepted))
            levels, nodes, accepted = max(trees, key=lambda tree: tree[2] - price * costs.round(tree[0], tree[1]))
            emitted = min(accepted + 1, remaining)
            replay.count(emitted, nodes, costs.round(levels, nodes), costs.round(0, 1), "oracle")
            position, remaining = position + emitted, remaining - emitted

    def _run_answer(self, position: int, policy: RoundPolicy, costs: Costs, replay: Replay, copies: bool) -> None:
        remaining = int(self.traces.remaining[position])
        while remaining > 0:
            levels, nodes, tier = self._run_round(position, policy, copies)
            accepted = self.accepted(position, num_levels=levels, num_nodes=nodes)
            emitted = min(accepted + 1, remaining)
            policy.end(accepted)
            replay.count(emitted, nodes, costs.round(levels, nodes), costs.round(0, 1), tier)
            position, remaining = position + emitted, remaining - emitted

    def _run_round(self, position: int, policy: RoundPolicy, copies: bool) -> tuple[int, int, str]:
        """What the policy makes of a position: levels, nodes, tier. Mirrors `HeteroSpecCandidateGenerator.propose`."""
        # A draft past the end of the text is of no use.
        remaining, max_nodes = int(self.traces.remaining[position]), self.max_nodes
        max_levels, levels, view = min(self.traces.num_levels, remaining - 1), 0, DraftView()
        step = policy.begin(
            max_levels=max_levels,
            max_nodes=max_nodes,
            repeated=int(self.traces.repeated[position]),
            max_copied=min(remaining, max_nodes) - 1 if copies else 0,
        )
        if step.num_copied:
            return 0, step.num_copied + 1, step.tier
        if min(step.num_levels, max_levels) < 1:
            return 0, 1, OFF
        while True:
            levels = max(levels, min(step.num_levels, max_levels))
            if step.num_nodes is not None:
                return levels, min(step.num_nodes, max_nodes), step.tier
            self.draft(view, position, levels)
            step = policy.decide(view)


def meta_path_entropies(traces: Traces, quantifier: Quantifier) -> NDArray[np.float32]:
    """H(P*) after each level, `[positions, levels]`."""
    levels = range(1, traces.num_levels + 1)
    best = [-np.sort(-traces.values[:, traces.level(level)], axis=1)[:, : traces.top_k] for level in levels]
    values = torch.from_numpy(np.stack(best, axis=1))  # [positions, levels, k]
    return quantifier.of_beam(values, torch.from_numpy(traces.entropies)).numpy()


def path_ranks(traces: Traces) -> NDArray[np.int16]:
    """Where the nodes of the answer's path stand among the candidates.

    Returns:
        `[positions, levels, depths]`: rank by value (0 is best, earlier candidates first among equals) of the path's
        node at level l + 1 among the candidates of the first d + 1 levels; -1 where the path has no such node or that
        tree has no such level. The node is in the tree of N nodes exactly when 0 <= rank < N - 1.
    """
    num_levels = traces.num_levels
    starts = [traces.level(level).start for level in range(1, num_levels + 1)]
    index = np.arange(traces.values.shape[1])
    ranks = np.full((len(traces), num_levels, num_levels), -1, dtype=np.int16)
    for level in range(num_levels):
        rows = np.flatnonzero(traces.path[:, level] >= 0)
        node = traces.path[rows, level, None].astype(np.int64)
        value = np.take_along_axis(traces.values[rows], node, axis=1)
        ahead = (traces.values[rows] > value) | ((traces.values[rows] == value) & (index < node))
        per_level = np.add.reduceat(ahead, starts, axis=1, dtype=np.int16)  # [rows, levels]
        ranks[rows, level, level:] = per_level.cumsum(axis=1)[:, level:]
    return ranks
