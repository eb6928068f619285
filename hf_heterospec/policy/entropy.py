"""The complexity quantifier: cumulative meta-path top-K entropy (HeteroSpec, section 3.1).

For a drafted path P = (x_1 .. x_T), where q_t is the draft's top-K distribution that x_t was drawn from, renormalised:

    H(P) = sum over t of H_t,        H_t = - sum over i <= K of q_t,i ln q_t,i

One path stands for the round: the meta-path P*, which ends in the most valuable node of the last drafted level. The
sum is carried through the beam, H(child) = H(parent) + H_t, so that it costs no pass.

What the paper leaves open is a field of `Quantifier`, and its default is our reading of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

MetaPath = Literal["best", "mean", "expected"]
Steps = Literal["all", "without_root", "last"]


@dataclass(frozen=True)
class Quantifier:
    """How H(P*) is computed. It belongs to a fitted policy: cuts of one quantifier mean nothing to another.

    Attributes:
        top_k: K, the number of leading draft tokens whose entropy is taken; `None` is the tree's own width.
        path: whose entropy stands for the round. `"best"`: of the path to the most valuable node; `"mean"`: the mean
            over the beam; `"expected"`: the mean over the beam, weighted by the nodes' probabilities.
        steps: which distributions of the path count. `"all"` x_1 .. x_T were drawn from; `"without_root"`: all but
            the first; `"last"`: only the one x_T was drawn from.
    """

    top_k: int | None = None
    path: MetaPath = "best"
    steps: Steps = "all"

    def __post_init__(self) -> None:
        for name, value, allowed in (("path", self.path, get_args(MetaPath)), ("steps", self.steps, get_args(Steps))):
            if value not in allowed:
                raise ValueError(f"`{name}` must be one of {', '.join(map(repr, allowed))}; got {value!r}.")
        if self.top_k is not None and (not isinstance(self.top_k, int) or self.top_k < 2):
            raise ValueError(f"`top_k` must be None or an integer of at least 2; got {self.top_k!r}.")

    def step(self, log_probs: Tensor) -> Tensor:
        """H_t in nats, `[parents]`, of the draft's top log-probabilities, `[parents, k]`, best first, fp32."""
        return entropy_of_top(log_probs[..., : self.top_k])

    def extend(self, path_entropies: Tensor, log_probs: Tensor, *, level: int) -> Tensor:
        """H of the paths that end in children of the beam, `[parents]`.

        Args:
            path_entropies: `[parents]`, H of the paths to the beam entries; zero for the root.
            log_probs: `[parents, k]`, the draft's top log-probabilities at the beam entries.
            level: of the children, 1 for the root's.
        """
        step = self.step(log_probs)
        if self.steps == "last":
            return step
        return path_entropies if self.steps == "without_root" and level == 1 else path_entropies + step

    def of_beam(self, values: Tensor, entropies: Tensor) -> Tensor:
        """H(P*), `[...]`, of beams: `values` `[..., k]`, log-probabilities, best first, and `entropies` `[..., k]`."""
        if self.path == "best":
            return entropies[..., 0]
        if self.path == "mean":
            return entropies.mean(dim=-1)
        return (values.softmax(dim=-1) * entropies).sum(dim=-1)


def entropy_of_top(log_probs: Tensor) -> Tensor:
    """Entropy in nats of distributions over their last dimension, `[..., k]`, renormalised to sum to 1."""
    log_q = log_probs.log_softmax(dim=-1)
    return -(log_q.exp() * log_q).sum(dim=-1)
