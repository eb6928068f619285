"""Training-time test: the head drafts chains during training, just as it will at inference (EAGLE-3, section 3).

A chain starts at an anchor t. Step 0 reads the target's feature at t, step s > 0 the head's own output of step s - 1;
both read the true next token. With target positions on top:

    position read as feature     t            t + 1        t + 2
    token read                   t + 1        t + 2        t + 3
    token to predict             t + 2        t + 3        t + 4
    RoPE position                t            t + 1        t + 2
    keys attended                0 .. t       0 .. t, 1    0 .. t, 1, 2     (1, 2: the chain's own steps)

Anchors of one answer share the keys of its context, made from target features; chains do not see one another. Later
steps run on fewer anchors: the work, and so the weight in the loss, falls by a constant factor per step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ..head import HeteroSpecHead
from .answers import REPEATED_RUN
from .features import Example

REPEATED_SHARE = 5


class ChainBatch(NamedTuple):
    """Padded answers and the anchors to draft from. An answer's anchors are in random order, so that the first few
    are a random few. `room[b, a]` is the number of steps from an anchor whose predicted token the answer holds;
    anchors beyond an answer's own have room 0."""

    input_ids: Tensor  # [batch, length]
    features: Tensor  # [batch, length, 3 * target hidden]
    lengths: Tensor  # [batch], prompt and answer
    prompt_lengths: Tensor  # [batch]
    target_ids: Tensor  # [batch, answer length, k]
    target_logits: Tensor  # [batch, answer length, k]
    anchors: Tensor  # [batch, anchors]
    room: Tensor  # [batch, anchors]

    def to(self, device: torch.device, dtype: torch.dtype) -> ChainBatch:
        """On `device`, with features in `dtype`, that of the head's products."""
        moved = ChainBatch(*(tensor.to(device) for tensor in self))
        return moved._replace(features=moved.features.to(dtype))

    @property
    def num_answer_tokens(self) -> int:
        return int((self.lengths - self.prompt_lengths).sum())


def collate(examples: Sequence[Example], *, fraction: float, generator: torch.Generator) -> ChainBatch:
    """Pad answers to a common length (a multiple of 32) and draw `fraction` of each answer's anchors."""
    length = -(-max(example.input_ids.numel() for example in examples) // 32) * 32
    answer = max(example.target_ids.shape[0] for example in examples)
    drawn = [draw_anchors(example, fraction=fraction, generator=generator) for example in examples]
    batch, k, width = len(examples), examples[0].target_ids.shape[1], examples[0].features.shape[1]
    input_ids = torch.zeros(batch, length, dtype=torch.long)
    features = torch.zeros(batch, length, width, dtype=examples[0].features.dtype)
    target_ids = torch.zeros(batch, answer, k, dtype=torch.long)
    target_logits = torch.zeros(batch, answer, k, dtype=examples[0].target_logits.dtype)
    anchors = torch.zeros(batch, max(1, *(row.numel() for row in drawn)), dtype=torch.long)
    room = torch.zeros_like(anchors)
    for row, (example, own) in enumerate(zip(examples, drawn, strict=True)):
        end, prompt = example.input_ids.numel(), example.prompt_length
        input_ids[row, :end] = example.input_ids
        features[row, :end] = example.features
        target_ids[row, : end - prompt] = example.target_ids
        target_logits[row, : end - prompt] = example.target_logits
        anchors[row, : own.numel()] = own
        room[row, : own.numel()] = end - 2 - own
    lengths = torch.tensor([example.input_ids.numel() for example in examples])
    prompt_lengths = torch.tensor([example.prompt_length for example in examples])
    return ChainBatch(input_ids, features, lengths, prompt_lengths, target_ids, target_logits, anchors, room)


def draw_anchors(example: Example, *, fraction: float, generator: torch.Generator) -> Tensor:
    """Some of an answer's anchors P-1 .. n-3, which predict tokens P+1 .. n-1, in random order.

    Small models repeat themselves, and a repeated token is easy to draft and teaches little: an anchor whose token
    ends a run of `REPEATED_RUN` tokens that the answer already had takes part one time in `REPEATED_SHARE`.
    """
    ids = example.input_ids[example.prompt_length :].tolist()
    seen: set[tuple[int, ...]] = set()
    repeated = []
    for end in range(2, len(ids) + 1):  # the token to predict is ids[end - 1]
        run = tuple(ids[max(0, end - REPEATED_RUN) : end])
        repeated.append(len(run) == REPEATED_RUN and run in seen)
        seen.add(run)
    order = torch.randperm(len(repeated), generator=generator)
    spared = torch.rand(len(repeated), generator=generator) < 1 / REPEATED_SHARE
    order = order[~torch.tensor(repeated, dtype=torch.bool)[order] | spared]
    return order[: max(1, round(fraction * order.numel()))] + example.prompt_length - 1


def take(rows: Tensor, index: Tensor) -> Tensor:
    """`rows[b, index[b, a]]` for `[batch, length, width]` rows."""
    return rows.gather(1, index.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))


class Context(NamedTuple):
    """Keys and values of the true context, and which rows each anchor sees."""

    keys: Tensor  # [batch, num_kv_heads, length, head_dim]
    values: Tensor
    mask: Tensor  # [batch, 1, 1, anchors, length], additive


def split_heads(projected: Tensor, head_dim: int) -> Tensor:
    """`[batch, length, heads * head_dim]` to `[batch, heads, length, head_dim]`."""
    return projected.view(*projected.shape[:2], -1, head_dim).transpose(1, 2)


def attend(queries: Tensor, context: Context, own: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention of chains over the context and their own earlier steps (and this one).

    Args:
        queries: `[batch, num_heads, anchors, head_dim]`.
        own: keys and values per step, `[batch, num_kv_heads, at least anchors, head_dim]`.

    Returns:
        `[batch, anchors, num_heads * head_dim]`.
    """
    batch, num_heads, anchors, head_dim = queries.shape
    kv_heads, length = context.keys.shape[1:3]
    packed = queries.reshape(batch, kv_heads, -1, head_dim) * head_dim**-0.5  # groups stacked along the anchors
    grouped = packed.view(batch, kv_heads, -1, anchors, head_dim)
    scores = (packed @ context.keys.transpose(2, 3)).view(*grouped.shape[:-1], length)
    scores = scores + context.mask[..., :anchors, :]
    own_scores = [(grouped * keys[:, :, None, :anchors]).sum(-1, keepdim=True) for keys, _ in own]
    weights = torch.cat((scores, *own_scores), dim=-1).softmax(dim=-1)  # [batch, kv_heads, groups, anchors, length + s]
    out = (weights[..., :length].reshape(batch, kv_heads, -1, length) @ context.values).view_as(grouped)
    for step, (_, values) in enumerate(own):
        out = out + weights[..., length + step, None] * values[:, :, None, :anchors]
    return out.reshape(batch, num_heads, anchors, head_dim).transpose(1, 2).reshape(batch, anchors, -1)


def rotate(states: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    return apply_rotary_pos_emb(states, states[:, :1], *rotary)[0]


def draft_chains(
    head: HeteroSpecHead, batch: ChainBatch, *, embeddings: Tensor, num_anchors: Sequence[int]
) -> Iterator[Tensor]:
    """Draft a chain from every anchor, teacher-forced, and yield the head's output of each step.

    Args:
        embeddings: `[batch, length, hidden]`, the target's embeddings of `batch.input_ids`.
        num_anchors: anchors per answer that run each step; must not rise.

    Yields:
        `[batch, num_anchors[s], hidden]`: `HeteroSpecHead.forward` of the same pair at inference.
    """
    layer, attention, head_dim = head.midlayer, head.midlayer.self_attn, head.config.head_dim
    hidden = head.fc(batch.features)  # [batch, length, hidden]
    positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
    rotary = head.rotary_emb(hidden, positions)
    # The last position has no next token; what is rolled there is seen by no anchor.
    inputs, residual = layer.attention_inputs(embeddings.roll(-1, dims=1).to(hidden.dtype), hidden)
    keys = rotate(split_heads(attention.k_proj(inputs), head_dim), rotary)
    values = split_heads(attention.v_proj(inputs), head_dim)
    context = Context(keys, values, anchor_mask(batch.anchors[:, : num_anchors[0]], like=keys))
    own: list[tuple[Tensor, Tensor]] = []
    for step, count in enumerate(num_anchors):
        at = (batch.anchors[:, :count] + step).clamp_max(positions.shape[1] - 2)
        rotary = head.rotary_emb(hidden, at)
        if step == 0:
            inputs, residual = take(inputs, at), take(residual, at)
        else:
            inputs, residual = layer.attention_inputs(take(embeddings, at + 1).to(hidden.dtype), hidden[:, :count])
            keys = rotate(split_heads(attention.k_proj(inputs), head_dim), rotary)
            own.append((keys, split_heads(attention.v_proj(inputs), head_dim)))
        queries = rotate(split_heads(attention.q_proj(inputs), head_dim), rotary)
        hidden = residual + attention.o_proj(attend(queries, context, own))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        yield hidden


def anchor_mask(anchors: Tensor, *, like: Tensor) -> Tensor:
    """Additive `[batch, 1, 1, anchors, length]`: an anchor t sees rows 0 .. t of keys `like`."""
    rows = torch.arange(like.shape[2], device=anchors.device)
    unseen = rows > anchors.unsqueeze(-1)
    return torch.zeros(unseen.shape, dtype=like.dtype, device=like.device).masked_fill_(unseen, float("-inf"))[
        :, None, None
    ]


class StepTargets(NamedTuple):
    """What one step of the chains should predict."""

    ids: Tensor  # [rows, k] draft ids; the row's first one in place of a token outside the draft vocabulary
    probs: Tensor  # [rows, k], over the draft vocabulary; 0 outside it
    draftable: Tensor  # [rows]: the target's most likely token is in the draft vocabulary, and the answer goes on


def step_targets(batch: ChainBatch, *, step: int, count: int, target_to_draft: Tensor) -> StepTargets:
    """Targets of step `step` for the first `count` anchors of each answer, flattened."""
    anchors, room = batch.anchors[:, :count], batch.room[:, :count]
    row = (anchors + step + 1 - batch.prompt_lengths.unsqueeze(1)).clamp(0, batch.target_ids.shape[1] - 1)
    ids = take(batch.target_ids, row).flatten(0, 1)  # [rows, k]
    draft_ids = target_to_draft[ids]  # -1: not in the draft vocabulary
    logits = take(batch.target_logits, row).flatten(0, 1).float()
    draftable = (draft_ids[:, 0] >= 0) & (room.flatten() > step)
    probs = logits.masked_fill(draft_ids < 0, float("-inf")).softmax(dim=-1)
    draft_ids = torch.where(draft_ids < 0, draft_ids[:, :1].clamp_min(0), draft_ids)
    return StepTargets(draft_ids, probs.nan_to_num(0.0), draftable)


def target_to_draft(head: HeteroSpecHead) -> Tensor:
    """`[vocab]` int64: the draft id of each target id, or -1."""
    device = head.lm_head.weight.device
    draft_ids = torch.arange(head.config.draft_vocab_size, device=device)
    table = torch.full((head.config.vocab_size,), -1, device=device)
    table[head.draft_to_target(draft_ids)] = draft_ids
    return table
