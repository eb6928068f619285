"""The throughput policy: the tree with the most expected tokens per second (beyond the paper).

With calibrated acceptance a(node) and measured costs T, a round of `levels` levels and N nodes is expected to run at

    rate = (1 + sum over kept nodes of a(node)) / (T_fixed + T_draft(levels) + T_target(N))      tokens per ms

Every choice is weighed at a price of time, lambda = patience * (best rate this round can reach so far):

* N: verify the next best node while its a(node) exceeds lambda times what it adds to T_target;
* depth: draft on while the forecast of the levels to come exceeds lambda times their cost;
* off: where drafting has not paid in recent rounds, decode plainly for a while, then try again;
* copy: where the end of the text stood earlier in it, verify what followed there instead of asking the head, if that
  exceeds lambda times its cost at the rate of this call's rounds so far.

Decisions are plain arithmetic over a few dozen numbers: some 20 microseconds, where arrays took 170.

`patience` is near 1 but not 1, because tokens differ. What a draft has right are the easy tokens, and they would be
cheap in the next round too; the fit finds its value by simulation. Recent acceptance scales a(node), within bounds.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .calibration import Calibration
from .costs import Costs
from .rounds import OFF, DraftView, Step

# Online adaptation: decayed sums of accepted and expected drafts, with a prior worth PRIOR drafts.
DECAY, PRIOR = 0.97, 8.0
LEAST_TRUST, MOST_TRUST = 0.2, 1.25
RATE_DECAY, RATE_PRIOR = 0.95, 4.0  # decayed sums of tokens and of milliseconds, with a prior worth so many rounds
# Switching off: decayed mean of what a round promises over plain decoding, and where it starts.
WORTH_DECAY, FIRST_WORTH = 0.8, 1.25
LONGEST_PAUSE = 32  # rounds without drafts before the next try
LEAST_CHANCE = 1e-3  # nodes that are accepted more rarely are not weighed


@dataclass
class Trust:
    """How much of the acceptance that calibration promises recent rounds have kept."""

    accepted: float = 0.0
    expected: float = 0.0

    def learn(self, *, accepted: float, expected: float) -> None:
        self.accepted = DECAY * self.accepted + accepted
        self.expected = DECAY * self.expected + expected

    @property
    def factor(self) -> float:
        return min(max((self.accepted + PRIOR) / (self.expected + PRIOR), LEAST_TRUST), MOST_TRUST)


@dataclass(frozen=True)
class ThroughputRule:
    """What was fitted; `rounds` makes a policy for one call out of it.

    Attributes:
        calibration: of this head.
        patience: factor on the price of time.
        nodes_per_level: nodes that another level is expected to add to the tree.
    """

    calibration: Calibration
    patience: float = 1.0
    nodes_per_level: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.patience < 10 or not 0 < self.nodes_per_level < 64:
            raise ValueError(
                f"`patience` must lie within 0 and 10 and `nodes_per_level` within 1 and 63; got {self.patience} and "
                f"{self.nodes_per_level}. Fit the policy again."
            )

    def rounds(self, costs: Costs, *, max_levels: int, max_nodes: int) -> ThroughputRounds:
        """The policy for one call on a machine with these costs, within bounds."""
        return ThroughputRounds(self, costs, max_levels=max_levels, max_nodes=max_nodes)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "patience": self.patience,
            "nodes_per_level": self.nodes_per_level,
            "calibration": self.calibration.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ThroughputRule:
        """What `to_dict` gives. Raises ValueError for anything else."""
        try:
            return cls(
                Calibration.from_dict(data["calibration"]), float(data["patience"]), int(data["nodes_per_level"])
            )
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"`throughput` must hold patience, nodes_per_level and calibration; got {error!r}. Fit it again."
            ) from error


@dataclass
class ThroughputRounds:
    """The rule during one call.

    On a CPU it is asked after every level. Elsewhere reading values back makes the device wait, so it is asked once,
    after the first level, and settles depth and N by the forecast.
    """

    rule: ThroughputRule
    costs: Costs
    max_levels: int
    max_nodes: int
    quantifier: None = None  # reads values only

    def __post_init__(self) -> None:
        self.max_levels = min(self.max_levels, self.rule.calibration.num_levels)
        self.asks_every_level = self.costs.device in (None, "cpu")
        self._target = [0.0, *(self.costs.target_pass(size) for size in range(1, self.max_nodes + 1))]  # by size
        self._least_added = min((b - a for a, b in itertools.pairwise(self._target[1:])), default=0.0)
        self._of_drafts, self._of_copies = Trust(), Trust()
        self._promised, self._cost = 0.0, 0.0  # accepted tokens and milliseconds of this round, as expected
        self._copying = False
        plain = self.costs.round(0, 1)
        self._tokens, self._milliseconds = RATE_PRIOR * FIRST_WORTH, RATE_PRIOR * plain  # of rounds that copied nothing
        self._worth = FIRST_WORTH  # decayed mean over tries: best rate in sight after the first level, over plain's
        self._pause = self._paused = 0

    def begin(self, *, max_levels: int, max_nodes: int, repeated: int = 0, max_copied: int = 0) -> Step:
        self._room = min(max_levels, self.max_levels), min(max_nodes, self.max_nodes)
        self._nodes: list[tuple[float, float]] = []  # (value, chance) of this round's nodes, best value first
        self._cost = self.costs.round(0, 1)
        num_copied, self._promised = self._worth_copying(repeated, min(max_copied, self._room[1] - 1))
        self._copying = num_copied > 0
        if self._copying:
            return Step(0, num_copied + 1, f"copy{_bucket(num_copied + 1)}", num_copied)
        if self._paused > 0:
            self._paused -= 1
            return Step(0, 1, OFF)
        return Step(1, None, OFF)

    def decide(self, draft: DraftView) -> Step:
        levels = draft.num_levels
        reach = self._take_in(draft)
        kept = self._acceptance_of_best()  # by N - 1: the sum of a over the tree of N nodes
        drafted = self.costs.fixed + self.costs.drafting(levels)
        rate = max((1 + gain) / (drafted + self._target[size]) for size, gain in enumerate(kept, start=1))
        price = self.rule.patience * rate
        num_nodes = max(range(1, len(kept) + 1), key=lambda size: kept[size - 1] - price * self._target[size])
        if levels == 1:
            self._learn_whether_drafting_pays(rate)
        ahead = self._levels_worth_drafting(levels, reach, num_nodes, price)
        if ahead and self.asks_every_level:
            return Step(levels + 1, None, OFF)
        num_nodes = min(num_nodes + ahead * self.rule.nodes_per_level, self._room[1])
        self._promised = kept[min(num_nodes, len(kept)) - 1]
        self._cost = self.costs.round(levels + ahead, num_nodes)
        return Step(levels + ahead, num_nodes, f"{levels + ahead}x{_bucket(num_nodes)}" if num_nodes > 1 else OFF)

    def end(self, accepted: int) -> None:
        (self._of_copies if self._copying else self._of_drafts).learn(accepted=accepted, expected=self._promised)
        if not self._copying:
            self._tokens = RATE_DECAY * self._tokens + accepted + 1
            self._milliseconds = RATE_DECAY * self._milliseconds + self._cost

    @property
    def trust(self) -> float:
        """How much of the calibrated acceptance recent drafts of the head have kept, within bounds."""
        return self._of_drafts.factor

    def _worth_copying(self, repeated: int, max_copied: int) -> tuple[int, float]:
        """How many copied tokens promise the most beyond their cost, and how many of them will be right; none where
        they promise less than rounds have brought lately."""
        if not repeated or max_copied < 1:
            return 0, 0.0
        price = self.rule.patience * self._tokens / self._milliseconds
        trust, gain, best = self._of_copies.factor, 0.0, (0.0, 0, 0.0)
        for count, curve in enumerate(self.rule.calibration.copies[:max_copied], start=1):
            gain += min(trust * curve.at(repeated), 1.0)
            best = max(best, (1 + gain - price * (self.costs.fixed + self._target[count + 1]), count, gain))
        return best[1:]

    def _take_in(self, draft: DraftView) -> float:
        """Calibrate the newest level; returns the chance that the accepted path reaches it."""
        calibration, levels = self.rule.calibration, draft.num_levels
        curve = calibration.acceptance[levels - 1]
        # Whatever else is in the tree, a node that promises less than this costs more than it brings.
        plainest = self.costs.fixed + self.costs.drafting(levels) + self._target[1]
        least = max(LEAST_CHANCE, min(self.rule.patience, 1.0) * self._least_added / (plainest * self.trust))
        chances: list[float] = []
        for value in draft.values[-1]:  # best first
            chance = curve.at(value)
            if chance < least and len(chances) >= calibration.top_k:
                break
            chances.append(chance)
        nodes = zip(draft.values[-1], chances, strict=False)
        self._nodes += itertools.takewhile(lambda node: node[1] >= least, nodes)
        self._nodes.sort(key=lambda node: -node[0])  # ranked like the tree itself
        return calibration.reach(chances)

    def _acceptance_of_best(self) -> list[float]:
        """For N = 1, 2, ..: the sum of a over the tree of N nodes."""
        best = self._nodes[: self._room[1] - 1]
        return list(itertools.accumulate((self.trust * chance for _, chance in best), initial=0.0))

    def _levels_worth_drafting(self, levels: int, reach: float, num_nodes: int, price: float) -> int:
        """How many further levels promise the most beyond what they cost; 0 when none does."""
        best, best_ahead, gain = 0.0, 0, 0.0
        curves = self.rule.calibration.forecast[levels - 1]
        for ahead, curve in enumerate(curves[: self._room[0] - levels], start=1):
            gain += self.trust * curve.at(reach) - price * self.costs.draft_level
            size = min(num_nodes + ahead * self.rule.nodes_per_level, self._room[1])
            net = gain - price * (self._target[size] - self._target[num_nodes])
            if net > best:
                best, best_ahead = net, ahead
        return best_ahead

    def _learn_whether_drafting_pays(self, rate: float) -> None:
        """Where first levels have not earned their own cost lately, pause for 1, 2, 4 .. rounds between tries."""
        self._worth = WORTH_DECAY * self._worth + (1 - WORTH_DECAY) * rate * self.costs.round(0, 1)
        if self._worth < 1:
            self._pause = min(max(2 * self._pause, 1), LONGEST_PAUSE)
            self._paused = self._pause
        else:
            self._pause = 0


def _bucket(num_nodes: int) -> int:
    """The power of two that holds so many nodes, for counting tiers."""
    return 1 << (num_nodes - 1).bit_length()
