"""Cross-entropy against the target's distribution, over the draft vocabulary, without keeping logits.

The logits of a batch are the largest tensors of the training by far. Here they live for one block of rows: the
gradient of a softmax cross-entropy is known as soon as the softmax is, so the forward pass computes the gradients of
the hidden states and of the weight as well, and the backward pass only scales them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROWS_PER_BLOCK = 2048


class SoftCrossEntropy(torch.autograd.Function):
    """`sum_n weights[n] * CE(probs[n], softmax(hidden[n] @ weight.T))` with sparse targets.

    Args:
        hidden: `[rows, hidden]`, in the dtype that the products run in.
        weight: `[draft_vocab, hidden]`, any floating dtype; its gradient comes in the same.
        ids: `[rows, k]` int64, draft ids of the target's most likely tokens, each once; what is left of a row may
            repeat its first id.
        probs: `[rows, k]`, their probabilities; a row sums to 1. Repetitions have 0.
        weights: `[rows]`; a row of weight 0 contributes nothing.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, probs: Tensor, weights: Tensor) -> Tensor:
        compute = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.shape[0], ROWS_PER_BLOCK):
            rows = slice(start, start + ROWS_PER_BLOCK)
            q = (hidden[rows] @ compute.T).softmax(dim=-1)  # [block, draft_vocab]
            picked = q.gather(1, ids[rows]).float()  # [block, k]
            loss -= (weights[rows] * (probs[rows] * picked.clamp_min(1e-9).log()).sum(dim=-1)).sum()
            # q - p, the gradient of the logits. Plain indexing, because adding with repetitions is 60 times slower.
            first = ids[rows] == ids[rows, :1]
            p = torch.where(first, probs[rows, :1], probs[rows])
            q[torch.arange(q.shape[0], device=q.device).unsqueeze(1), ids[rows]] = (picked - p).to(q.dtype)
            q *= weights[rows].to(q.dtype).unsqueeze(1)
            grad_hidden[rows] = q @ compute
            grad_weight += q.T @ hidden[rows]
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad.to(grad_hidden.dtype), grad_weight * grad.to(grad_weight.dtype), None, None, None


soft_cross_entropy = SoftCrossEntropy.apply
