"""One level of the draft beam, and reading it back for the policy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .policy.entropy import Quantifier
from .policy.rounds import DraftView
from .tree import Candidates


@dataclass(frozen=True)
class Level:
    """One drafted level of the beam.

    Attributes:
        candidates: its nodes, all children of the level before, parent by parent.
        width: k, how many of them form the beam.
        entropies: `[parents]`, H of the paths that end in each parent's children (`policy.entropy`), or `None`.
    """

    candidates: Candidates
    width: int
    entropies: Tensor | None

    @cached_property
    def ranking(self) -> tuple[Tensor, Tensor]:
        """Values, best first, and their places, `[num_candidates]` each. Among equals the first comes first."""
        return self.candidates.values.sort(descending=True, stable=True)

    @property
    def beam(self) -> Tensor:
        """`[k]`, places of the best candidates, best first."""
        return self.ranking[1][: self.width]

    @property
    def beam_entropies(self) -> Tensor:
        """`[k]`, H of the paths to the beam's entries."""
        assert self.entropies is not None
        return self.entropies[self.beam // self.width if len(self.entropies) > 1 else torch.zeros_like(self.beam)]

    def quantify(self, quantifier: Quantifier) -> Tensor:
        """H(P*), a scalar tensor."""
        return quantifier.of_beam(self.ranking[0][: self.width], self.beam_entropies)


def read_back(unread: list[Level], draft: DraftView, *, num_values: int, quantifier: Quantifier | None) -> None:
    """Append `unread` levels (which it empties) to `draft`, in one transfer from the device."""
    values = [level.ranking[0][:num_values] for level in unread]
    entropies = [] if quantifier is None else [level.quantify(quantifier)[None] for level in unread]
    numbers = torch.cat(values + entropies).tolist()
    for part in values:
        draft.values.append(numbers[: len(part)])
        del numbers[: len(part)]
    draft.entropies.extend(numbers)
    unread.clear()
