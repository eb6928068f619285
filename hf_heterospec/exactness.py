"""Checks output against the target itself: is every token the one plain decoding would choose?

In fp32 the answer is yes, token for token. In half precision a pass over a tree and a pass over one token run other
kernels and round differently, so near-ties may fall to either side: there, a token is right when its logit is the
largest of a plain pass over the same prefix, or within rounding of it (`docs/exactness.md`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

# In half precision a token may lie this many roundings below the argmax: one of its own logit, one of the other's.
ROUNDINGS_ALLOWED = 2.0


class Gaps(NamedTuple):
    """How far tokens lie below the argmax of a plain pass; 0 means they are the argmax."""

    logits: Tensor  # [num_new], fp32
    roundings: Tensor  # [num_new], in units of the model's dtype at the size of the largest logit


class Difference(NamedTuple):
    """The first position at which two outputs differ."""

    position: int  # among the new tokens
    token_id: int
    other_id: int
    gap: float  # logit of the better of the two minus the other's, in a plain pass over the common prefix


@torch.no_grad()
def logit_gaps(model: PreTrainedModel, ids: Tensor, *, prompt_length: int) -> Gaps:
    """How far each new token's logit lies below the largest, in one plain causal pass over `ids`.

    Args:
        ids: `[1, length]`, the prompt and the greedy output behind it.
    """
    logits = model(ids[:, :-1], use_cache=False).logits[0, prompt_length - 1 :].float()  # [num_new, vocab]
    chosen = logits.gather(1, ids[0, prompt_length:, None])[:, 0]
    best = logits.amax(dim=-1)
    # The spacing of numbers between 2^e and 2^(e + 1) is eps * 2^e: 0.125 for bf16 logits of 16 to 32.
    spacing = torch.finfo(model.dtype).eps * torch.exp2(best.abs().log2().floor())
    return Gaps(best - chosen, (best - chosen) / spacing)


@torch.no_grad()
def first_difference(model: PreTrainedModel, ids: Tensor, other: Tensor, *, prompt_length: int) -> Difference | None:
    """Where `ids` and `other` (`[1, length]` each, same prompt) part, and by how much; `None` when they are equal."""
    length = min(ids.shape[1], other.shape[1])
    differs = (ids[0, :length] != other[0, :length]).nonzero()
    if len(differs) == 0:
        return None
    position = int(differs[0])
    logits = model(ids[:, :position], use_cache=False).logits[0, -1].float()
    token, other_token = int(ids[0, position]), int(other[0, position])
    return Difference(position - prompt_length, token, other_token, float((logits[token] - logits[other_token]).abs()))
