"""The draft tree as plain data: which tokens, under which parents, in which order. No model in here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .machine import to_device


class DraftLimits(NamedTuple):
    """What a round has room for."""

    num_levels: int  # longest useful path, in drafted tokens
    num_nodes: int  # most nodes the target can take, the root included
    width: int  # 1 where the target can verify no more than a chain, 0 where it can verify nothing
    num_copied: int = 0  # most tokens that may be copied from the text


@dataclass(frozen=True)
class Candidates:
    """Every node drafted in a round, level by level, before the best are kept. All fields are `[num_candidates]`.

    `parents` indexes into the same list, -1 for children of the root; a parent always comes before its children.
    """

    token_ids: Tensor
    parents: Tensor
    depths: Tensor
    values: Tensor  # cumulative draft log-probability, fp32, natural log

    @staticmethod
    def concat(levels: list[Candidates]) -> Candidates:
        """One list out of the levels of a beam."""
        fields = ("token_ids", "parents", "depths", "values")
        return Candidates(**{name: torch.cat([getattr(level, name) for level in levels]) for name in fields})


@dataclass(frozen=True)
class DraftTree:
    """A tree to verify in one target pass. Node 0 is the root, a token that is emitted already; the others are
    drafted. Nodes are ordered by level, parents before children.

    Attributes:
        token_ids: `[num_nodes]`, target vocabulary.
        parents: `[num_nodes]`, node indices; the root is its own parent.
        depths: `[num_nodes]`, 0 for the root.
        values: `[num_nodes]`, cumulative draft log-probability, fp32; 0 for the root and for copied tokens.
        num_levels: levels that were drafted; no node is deeper. Known without asking the device, like `width`.
        width: 1 for a chain, whose node i is the child of node i - 1.
    """

    token_ids: Tensor
    parents: Tensor
    depths: Tensor
    values: Tensor
    num_levels: int
    width: int

    @property
    def num_nodes(self) -> int:
        return self.token_ids.shape[0]

    @classmethod
    def root_only(cls, root: Tensor) -> DraftTree:
        """The tree without drafts: verifying it is plain decoding. `root` is `[1]`."""
        zero = torch.zeros_like(root)
        return cls(root, zero, zero, zero.float(), num_levels=0, width=1)

    @classmethod
    def chain(cls, root: Tensor, token_ids: list[int]) -> DraftTree:
        """One branch: `token_ids` one after the other under `root`, which is `[1]`."""
        depths = torch.arange(len(token_ids) + 1, device=root.device)
        drafted = to_device(token_ids, root.device).to(root.dtype)
        return cls(
            token_ids=torch.cat((root, drafted)),
            parents=(depths - 1).clamp(min=0),
            depths=depths,
            values=torch.zeros_like(depths, dtype=torch.float32),
            num_levels=len(token_ids),
            width=1,
        )

    @classmethod
    def best_of(cls, root: Tensor, levels: list[Candidates], num_nodes: int) -> DraftTree:
        """Re-rank the candidates of all levels by value and keep the best `num_nodes - 1` (or all, if fewer).

        Values never rise along a path, so the kept set is connected; where a child ties with its parent (a
        log-probability that rounds to 0), the stable sort takes the parent first (EAGLE-2, section 4.2).
        """
        candidates = Candidates.concat(levels)
        order = candidates.values.sort(descending=True, stable=True).indices
        kept = order[: num_nodes - 1].sort().values  # [num_kept], back in level order
        # A kept node's parent is kept, so its place among the kept is its place in the sorted list; the root is 0.
        parents = torch.searchsorted(kept, candidates.parents[kept], right=True)
        zero = torch.zeros_like(root)
        return cls(
            token_ids=torch.cat((root, candidates.token_ids[kept])),
            parents=torch.cat((zero, parents)),
            depths=torch.cat((zero, candidates.depths[kept])),
            values=torch.cat((zero.float(), candidates.values[kept])),
            num_levels=len(levels),
            width=levels[0].token_ids.shape[0],
        )

    def ancestors(self) -> Tensor:
        """`[num_nodes, num_nodes]` bool: row n is true at n and at every ancestor of n."""
        rows = torch.arange(self.num_nodes, device=self.parents.device)
        seen = torch.zeros(self.num_nodes, self.num_nodes, dtype=torch.bool, device=self.parents.device)
        node = rows
        for _ in range(self.num_levels + 1):
            seen[rows, node] = True
            node = self.parents[node]
        return seen
