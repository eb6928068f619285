"""Acceptance: follow the target through the tree (EAGLE-2, section 4; exactness argued in `docs/exactness.md`).

Notation: p is the target's distribution after the logits processors, q the draft's. The tree is a function of the
context alone, so q puts all its mass on the drafted tokens, and one rule serves greedy decoding and sampling:
*choose the next token exactly as plain decoding would, then see whether a child carries it*. Accepting child x with
probability p[x], striking it from p on refusal and trying the next sibling gives the same distribution with more
draws; this rule also consumes the random numbers of plain `generate`, so that a seed gives the same text.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from .sequence import Choice, Sequence
from .target import TargetPass
from .tree import DraftTree


class TokenChooser:
    """Plain decoding's choice of the next token: processors with the exact prefix, then argmax or one draw.

    Args:
        processors: run once per emitted token, in order, never on a refused branch.
        do_sample: draw from softmax of the processed logits with torch's global generator, else take the argmax.
    """

    def __init__(self, processors: LogitsProcessorList, *, do_sample: bool) -> None:
        self.processors, self.do_sample = processors, do_sample

    @property
    def needs_only_argmax(self) -> bool:
        return not self.do_sample and len(self.processors) == 0

    def __call__(self, prefix_ids: Tensor, logits: Tensor) -> Choice:
        """`prefix_ids` `[1, length]`, `logits` `[1, vocab]` in any dtype; processed as fp32, like upstream."""
        scores = self.processors(prefix_ids, logits.to(copy=True, dtype=torch.float32, device=prefix_ids.device))
        if self.do_sample:
            token = torch.multinomial(scores.softmax(dim=-1), num_samples=1)
        else:
            token = scores.argmax(dim=-1)
        return Choice(int(token), scores)


def accept(tree: DraftTree, scores: TargetPass, *, chooser: TokenChooser, sequence: Sequence) -> list[int]:
    """Walk down from the root while the chosen token is a child's, emitting every chosen token to `sequence`.

    Args:
        tree: the verified tree; its root is the last token of `sequence`.
        scores: the target's pass over it.

    Returns:
        The accepted nodes from the root on. Each stands for one emitted token, the one chosen *after* it: a path of
        m nodes has m - 1 accepted drafts and the bonus token. Nothing is emitted after the first stop.
    """
    # One transfer from a device for the whole round. On the CPU only the nodes on the path are looked at: over a
    # vocabulary of bf16 logits, an argmax of all nodes takes as long as a seventh of the target's pass.
    if chooser.needs_only_argmax and scores.logits.device.type != "cpu":
        token_ids, parents, best = torch.stack((tree.token_ids, tree.parents, scores.logits.argmax(dim=-1))).tolist()
    else:
        (token_ids, parents), best = torch.stack((tree.token_ids, tree.parents)).tolist(), None
    children: list[dict[int, int]] = [{} for _ in token_ids]
    for node in range(1, len(token_ids)):
        children[parents[node]][token_ids[node]] = node

    path = [0]
    while True:
        node = path[-1]
        logits = scores.logits[node : node + 1]  # [1, vocab]
        choice = chooser(sequence.ids, logits) if best is None else Choice(best[node], None)
        sequence.emit(choice, logits, scores.hidden_at(node))
        child = children[node].get(choice.token_id)
        if sequence.finished or child is None:
            return path
        path.append(child)
