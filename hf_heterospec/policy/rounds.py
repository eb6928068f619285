"""What a policy is asked in a round, and what it answers. Plain numbers on the host.

begin  ->  draft some levels  ->  decide  ->  draft some more, or verify N nodes  ->  end
                 ^                  |
                 +------------------+   until an answer names the nodes to verify
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from .entropy import Quantifier

OFF = "off"  # the tier of a round in which nothing is drafted


class Step(NamedTuple):
    """Draft until there are `num_levels` levels, then verify the best `num_nodes` (the root included).

    `num_nodes=None` means: ask again when those levels are there. `num_levels=0` asks nothing of the head; then
    `num_copied` tokens, if any, are copied from the text.
    """

    num_levels: int
    num_nodes: int | None
    tier: str
    num_copied: int = 0


@dataclass
class DraftView:
    """What has been drafted so far in a round, read back from the device.

    Attributes:
        values: per level, the cumulative draft log-probabilities of its best nodes, best first.
        entropies: H(P*) after each level (`policy.entropy`); empty for a policy without quantifier.
    """

    values: list[list[float]] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)

    @property
    def num_levels(self) -> int:
        return len(self.values)


class RoundPolicy(Protocol):
    """The state of a policy during one `generate` call.

    Attributes:
        quantifier: how H(P*) is computed; `None` where the policy does not ask for it.
        max_levels, max_nodes: no tree of this policy is deeper or larger.
    """

    @property
    def quantifier(self) -> Quantifier | None: ...

    @property
    def max_levels(self) -> int: ...

    @property
    def max_nodes(self) -> int: ...

    def begin(self, *, max_levels: int, max_nodes: int, repeated: int = 0, max_copied: int = 0) -> Step:
        """The first step of a round that has room for so many levels and nodes.

        The last `repeated` tokens of the text stand earlier in it as well (`repeats`), and up to `max_copied` of those
        that followed there can be a draft.
        """

    def decide(self, draft: DraftView) -> Step:
        """The next step, given what has been drafted."""

    def end(self, accepted: int) -> None:
        """The round is over: the target accepted that many drafted tokens."""


@dataclass
class FixedRounds:
    """The same tree every round."""

    max_levels: int
    max_nodes: int
    quantifier: Quantifier | None = None

    def begin(self, *, max_levels: int, max_nodes: int, repeated: int = 0, max_copied: int = 0) -> Step:
        return Step(self.max_levels, self.max_nodes, "fixed")

    def decide(self, draft: DraftView) -> Step:
        raise AssertionError("a fixed tree asks nothing")

    def end(self, accepted: int) -> None:
        pass
