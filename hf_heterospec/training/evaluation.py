"""How well a head drafts answers it never saw: the chance that a chain's first tokens are all accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..head import HeteroSpecHead
from .chains import ChainBatch, draft_chains, step_targets, target_to_draft


class ChainAcceptance(NamedTuple):
    """`accepted[s]`: share of anchors whose first s + 1 drafted tokens all equal the target's greedy choice."""

    accepted: list[float]
    anchors: int

    @property
    def tau(self) -> float:
        """Mean accepted tokens per round plus one, for a greedy chain of that many tokens."""
        return 1 + sum(self.accepted)


@torch.no_grad()
def chain_acceptance(
    head: HeteroSpecHead, batches: Iterable[ChainBatch], *, embed: Callable[[Tensor], Tensor], steps: int
) -> ChainAcceptance:
    """Acceptance over anchors with room for `steps` drafted tokens.

    Args:
        embed: the target's token embedding.

    Drafting is teacher-forced, which is exact here: up to the first refusal a greedy chain's tokens are the answer's.
    """
    table = target_to_draft(head)
    accepted, anchors = torch.zeros(steps), 0
    for batch in batches:
        count = batch.anchors.shape[1]
        alive = (batch.room >= steps).flatten()  # [rows]
        anchors += int(alive.sum())
        embeddings = embed(batch.input_ids)
        drafts = draft_chains(head, batch, embeddings=embeddings, num_anchors=[count] * steps)
        for step, hidden in enumerate(drafts):
            targets = step_targets(batch, step=step, count=count, target_to_draft=table)
            drafted = head.lm_head(head.norm(hidden)).argmax(dim=-1).flatten()
            alive = alive & targets.draftable & (drafted == targets.ids[:, 0])
            accepted[step] += alive.sum().cpu()
    return ChainAcceptance((accepted / max(anchors, 1)).tolist(), anchors)
