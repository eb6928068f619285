"""The paper's policy: entropy intervals by CART, and what the lowest three of them change (HeteroSpec, section 3).

H(P*)   |----B0----|--B1--|--B2--|-----B3----| ... |--B7--
             |        |      |         `-- plain EAGLE-3: depth d, N nodes
             |        |      `-- depth d + alpha - 2, N nodes gamma_2 N + alpha - 2
             |        `-- depth d + alpha - 1, gamma_1 N + alpha - 1
             `-- depth d + alpha, gamma_0 N + alpha
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .entropy import Quantifier
from .rounds import DraftView, Step

if TYPE_CHECKING:
    from ..traces import Traces

TREE_DEPTH = 3  # of the CART: up to 8 bins
GAMMAS = (0.3, 0.6, 1.0)  # share of the nodes that B0, B1, B2 keep
BASE = "base"


class Tier(NamedTuple):
    """A tree: `depth` expansions after the first top-k, `num_nodes` verified, the root included."""

    depth: int
    num_nodes: int


@dataclass(frozen=True)
class Strata:
    """Entropy intervals and their trees. Cuts hold for one head, `top_k` and `depth` only: H is a sum over levels.

    Attributes:
        cuts: rising values of H(P*); bin i lies between cuts i - 1 and i.
        tiers: trees of the lowest bins, B0 first. Higher bins get the base tree.
        depth, num_nodes, top_k: the base tree. H(P*) is read when `depth + 1` levels are drafted.
        quantifier: how H(P*) is computed.
    """

    cuts: tuple[float, ...]
    tiers: tuple[Tier, ...]
    depth: int
    num_nodes: int
    top_k: int
    quantifier: Quantifier = field(default_factory=Quantifier)

    def __post_init__(self) -> None:
        if not all(math.isfinite(cut) for cut in self.cuts) or list(self.cuts) != sorted(set(self.cuts)):
            raise ValueError(f"`cuts` must be finite and rising; got {list(self.cuts)}. Fit the policy again.")
        if self.tiers and len(self.tiers) > len(self.cuts):
            raise ValueError(
                f"{len(self.tiers)} tiers need at least as many cuts; got {len(self.cuts)}. Fit the policy again."
            )
        for tier in (*self.tiers, Tier(self.depth, self.num_nodes)):
            if tier.depth < 0 or tier.num_nodes < 2:
                raise ValueError(f"A tier needs depth >= 0 and num_nodes >= 2; got {tier}. Fit the policy again.")

    @property
    def max_depth(self) -> int:
        return max(self.depth, *(tier.depth for tier in self.tiers)) if self.tiers else self.depth

    @property
    def max_nodes(self) -> int:
        return max(self.num_nodes, *(tier.num_nodes for tier in self.tiers)) if self.tiers else self.num_nodes

    def bin(self, entropy: float) -> int:
        """Which bin: 0 is the most predictable. A value equal to a cut lies below it, as in scikit-learn."""
        return bisect.bisect_left(self.cuts, entropy)

    def with_tiers(self, **changes: Any) -> Strata:
        """The same intervals with other trees; `changes` as for `paper_tiers`."""
        return replace(self, tiers=paper_tiers(self.depth, self.num_nodes, **changes)[: len(self.tiers)])

    def with_trees(self, trees: Sequence[Sequence[int]]) -> Strata:
        """The same intervals with these (depth, nodes) pairs, lowest entropy first. Raises ValueError for too many."""
        if len(trees) > len(self.cuts):
            raise ValueError(
                f"`draft_tiers` must be at most {len(self.cuts)}, as many as the policy has cuts; got {len(trees)}."
            )
        return replace(self, tiers=tuple(Tier(*tree) for tree in trees))

    def rounds(self) -> StratifiedRounds:
        """The policy for one call."""
        return StratifiedRounds(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "cuts": list(self.cuts),
            "tiers": [tier._asdict() for tier in self.tiers],
            "depth": self.depth,
            "num_nodes": self.num_nodes,
            "top_k": self.top_k,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, quantifier: Quantifier) -> Strata:
        """What `to_dict` gives. Raises ValueError for anything else."""
        try:
            return cls(
                cuts=tuple(map(float, data["cuts"])),
                tiers=tuple(Tier(int(tier["depth"]), int(tier["num_nodes"])) for tier in data["tiers"]),
                depth=int(data["depth"]),
                num_nodes=int(data["num_nodes"]),
                top_k=int(data["top_k"]),
                quantifier=quantifier,
            )
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"`paper` must hold cuts, tiers, depth, num_nodes and top_k; got {error!r}. Fit the policy again."
            ) from error


@dataclass
class StratifiedRounds:
    """A round: draft to depth d, read H(P*), look up the bin, draft what its tier adds, keep the best N_i."""

    policy: Strata

    @property
    def quantifier(self) -> Quantifier:
        return self.policy.quantifier

    @property
    def max_levels(self) -> int:
        return self.policy.max_depth + 1

    @property
    def max_nodes(self) -> int:
        return self.policy.max_nodes

    def begin(self, *, max_levels: int, max_nodes: int, repeated: int = 0, max_copied: int = 0) -> Step:
        if max_levels < self.policy.depth + 1:  # near the length limit: H(P*) of the cuts can't be had
            return Step(max_levels, self.policy.num_nodes, BASE)
        return Step(self.policy.depth + 1, None, BASE)

    def decide(self, draft: DraftView) -> Step:
        policy = self.policy
        place = policy.bin(draft.entropies[policy.depth])
        if place < len(policy.tiers):
            tier = policy.tiers[place]
            # What is drafted is drafted: a tier may not be shallower than the base.
            return Step(max(tier.depth, policy.depth) + 1, tier.num_nodes, f"B{place}")
        return Step(policy.depth + 1, policy.num_nodes, BASE)

    def end(self, accepted: int) -> None:
        pass


def paper_tiers(
    depth: int,
    num_nodes: int,
    *,
    alpha: int | None = None,
    gammas: Sequence[float] = GAMMAS,
    extend: bool = True,
    prune: bool = True,
) -> tuple[Tier, ...]:
    """The tiers of B0, B1, B2 (section 3.3; d=7, N=60 gives depths 11/10/9 and 22/39/62 nodes).

    Args:
        alpha: levels that B0 adds; `None` is the paper's ceil(depth / 2).
        gammas: shares of the nodes that are kept.
        extend: extended drafting (DED); without it depths stay.
        prune: top-N pruning (TNP); without it numbers of nodes stay.
    """
    alpha = math.ceil(depth / 2) if alpha is None else alpha
    return tuple(
        Tier(
            depth=depth + max(alpha - i, 0) if extend else depth,
            num_nodes=max(round(gamma * num_nodes) + alpha - i, 2) if prune else num_nodes,
        )
        for i, gamma in enumerate(gammas)
    )


def cart_cuts(entropies: ArrayLike, ranks: ArrayLike) -> tuple[float, ...]:
    """Cuts of a regression tree of depth 3 (squared error), rising; at most 7.

    Args:
        entropies: `[n]`, H(P*).
        ranks: `[n]`, what the tree predicts.
    """
    from sklearn.tree import DecisionTreeRegressor

    tree = DecisionTreeRegressor(max_depth=TREE_DEPTH, criterion="squared_error", random_state=0)
    tree.fit(np.asarray(entropies, dtype=np.float64)[:, None], np.asarray(ranks, dtype=np.float64))
    inner = tree.tree_.feature >= 0
    return tuple(sorted({float(cut) for cut in tree.tree_.threshold[inner]}))


def final_ranks(traces: Traces, *, depth: int, num_nodes: int) -> NDArray[np.int64]:
    """`[positions]`: rank of the final node of P* (the best one at the last level) in the sort by value; at most N."""
    end = traces.level(depth + 1).stop
    final = traces.values[:, traces.level(depth + 1)].max(axis=1, keepdims=True)
    return np.minimum((traces.values[:, :end] > final).sum(axis=1), num_nodes)


def fit_strata(
    traces: Traces,
    entropies: NDArray[np.floating],
    reached: NDArray[np.bool_],
    *,
    depth: int,
    num_nodes: int,
    quantifier: Quantifier,
) -> Strata:
    """Fit the paper's policy: x = H(P*), y = rank of P*'s final node, over iterations accepted to full depth.

    Args:
        traces: positions.
        entropies: `[positions, levels]`, H(P*) after each level.
        reached: `[positions]`, whether the tree's accepted path reached full depth there.
        depth, num_nodes: the base tree.

    Raises:
        ValueError: when too few iterations reached full depth to make eight bins of.
    """
    if reached.sum() < 2**TREE_DEPTH:
        raise ValueError(
            f"Fitting needs at least {2**TREE_DEPTH} iterations accepted to full depth {depth}; got {reached.sum()}. "
            "Trace more answers, or lower `draft_depth`."
        )
    ranks = final_ranks(traces, depth=depth, num_nodes=num_nodes)
    cuts = cart_cuts(entropies[reached, depth], ranks[reached])
    tiers = paper_tiers(depth, num_nodes)[: len(cuts)]
    return Strata(cuts, tiers, depth, num_nodes, traces.top_k, quantifier)
