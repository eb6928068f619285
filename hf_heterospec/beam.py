"""The draft beam, level by level (EAGLE-2, section 4.1), and reading it back for the policy.

A level holds the k most likely children of each of its parents, the k most valuable nodes of the level before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .configuration import WIDEST_BEAM
from .head import HeteroSpecHead
from .policy.entropy import Quantifier
from .policy.rounds import DraftView
from .tree import Candidates


class Level(NamedTuple):
    """One drafted level: C = P * k nodes, parent by parent, P = 1 below the root and k below a beam.

    Attributes:
        token_ids, parents, depths, values: `[C]`, as in `Candidates`.
        ranked: `[C]`, the values, best first.
        order: `[C]`, their places. Among equals the first comes first.
        log_probs: `[P, k]`, of the nodes given their parents, fp32.
        hidden: `[1, P, hidden]`, the head's outputs at the parents.
        mask: `[P, columns]`, additive: which rows of the head's cache the parents see.
        entropies: `[P]`, H of the paths that end in each parent's children (`policy.entropy`), or `None`.
    """

    token_ids: Tensor
    parents: Tensor
    depths: Tensor
    values: Tensor
    ranked: Tensor
    order: Tensor
    log_probs: Tensor
    hidden: Tensor
    mask: Tensor
    entropies: Tensor | None = None

    @property
    def candidates(self) -> Candidates:
        return Candidates(self.token_ids, self.parents, self.depths, self.values)

    @property
    def width(self) -> int:
        return self.log_probs.shape[1]

    @property
    def beam(self) -> Tensor:
        """`[k]`, places of the best nodes, best first."""
        return self.order[: self.width]

    @property
    def beam_entropies(self) -> Tensor:
        """`[k]`, H of the paths to the beam's entries."""
        assert self.entropies is not None
        return self.entropies[self.beam // self.width]

    def with_entropies(self, quantifier: Quantifier | None, above: Level | None, *, depth: int) -> Level:
        """This level, of that depth, with its `entropies`, given the level above; below the root there is none."""
        if quantifier is None:
            return self
        paths = self.values.new_zeros(1) if above is None else above.beam_entropies  # to the parents
        return self._replace(entropies=quantifier.extend(paths, self.log_probs, level=depth))

    def quantify(self, quantifier: Quantifier) -> Tensor:
        """H(P*), a scalar tensor."""
        return quantifier.of_beam(self.ranked[: self.width], self.beam_entropies)


def first_level(head: HeteroSpecHead, hidden: Tensor, log_probs: Tensor, *, width: int, length: int) -> Level:
    """The children of the root.

    Args:
        hidden, log_probs: what `head.read` said at the newest pair, `[1, 1, hidden]` and `[1, draft_vocab]`.
        length: rows of the cache that belong to the context.
    """
    best, draft_ids = top(log_probs, width)
    return Level(
        token_ids=head.draft_to_target(draft_ids[0]),
        parents=draft_ids.new_full((width,), -1),
        depths=draft_ids.new_ones(width),
        values=best[0],
        ranked=best[0],
        order=torch.arange(width, device=best.device),
        log_probs=best,
        hidden=hidden,
        mask=hidden.new_zeros(1, length),
    )


def next_level(
    head: HeteroSpecHead,
    embeddings: nn.Module,
    beam: Tensor,
    token_ids: Tensor,
    values: Tensor,
    hidden: Tensor,
    mask: Tensor,
    next_position: Tensor,
    *,
    depth: Any,
    length: Any,
    cache: Any,
) -> Level:
    """One pass of the head over the `beam` of a level; the children it gives are the next.

    Args:
        embeddings: the target's.
        beam, token_ids, values, hidden, mask: of the level, see `Level`.
        next_position: `[1]`, of the root's children's parent.
        depth: of the level, 1 for the root's children. An int, or a scalar tensor in a traced graph, like `length`.
        length: rows of the cache that belong to the context; a level's own rows go behind them.
        cache: the head's.
    """
    width = beam.shape[0]
    parents = beam // width  # the row of `hidden` and `mask` that each beam entry descends from
    itself = torch.eye(width, dtype=torch.bool, device=beam.device)
    own = torch.where(itself, 0.0, torch.finfo(mask.dtype).min).to(mask.dtype)
    mask = torch.cat((mask[parents], own), dim=1)
    hidden = head(
        embeddings(token_ids[beam][None]),
        hidden[:, parents],
        position_ids=(next_position + depth - 1).expand(1, width),
        cache=cache,
        start=length + (depth - 1) * width,
        mask=mask,
    )
    log_probs, draft_ids = top(head.log_probs(hidden[0]), width)  # [k, k]
    children = (values[beam, None] + log_probs).flatten()
    ranked, order = children.sort(descending=True, stable=True)
    first = (depth > 1) * (width + (depth - 2) * width * width)  # index of the level's first node among all
    return Level(
        token_ids=head.draft_to_target(draft_ids).flatten(),
        parents=(beam + first).repeat_interleave(width, output_size=width * width),
        depths=torch.zeros_like(order) + (depth + 1),
        values=children,
        ranked=ranked,
        order=order,
        log_probs=log_probs,
        hidden=hidden,
        mask=mask,
    )


CHUNK = 64


def top(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`scores.topk(k)`, `[rows, k]` each, in two steps where `[rows, columns]` is wide: the k best lie in the k chunks
    with the largest maxima. Over 10 rows of 16384 that takes half the time on a CPU (123 against 241 microseconds).

    Which way is taken must not depend on `k`, for which one graph is traced."""
    rows, columns = scores.shape
    if columns % CHUNK or columns < WIDEST_BEAM * CHUNK:
        return scores.topk(k)
    chunks = scores.view(rows, columns // CHUNK, CHUNK)
    chosen = chunks.amax(dim=-1).topk(k).indices  # [rows, k]
    among = chunks.gather(1, chosen[..., None].expand(rows, k, CHUNK)).flatten(1)  # [rows, k * CHUNK]
    best, places = among.topk(k)
    return best, chosen.gather(1, places // CHUNK) * CHUNK + places % CHUNK


def read_back(unread: list[Level], draft: DraftView, *, num_values: int, quantifier: Quantifier | None) -> None:
    """Append `unread` levels (which it empties) to `draft`, in one transfer from the device."""
    values = [level.ranked[:num_values] for level in unread]
    entropies = [] if quantifier is None else [level.quantify(quantifier)[None] for level in unread]
    numbers = torch.cat(values + entropies).tolist()
    for part in values:
        draft.values.append(numbers[: len(part)])
        del numbers[: len(part)]
    draft.entropies.extend(numbers)
    unread.clear()
