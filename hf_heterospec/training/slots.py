"""A key-value cache of slots: every row holds an answer of its own length, and rows are reused as answers finish.

One decoding step writes one token per active slot, each at its own position, and reads views: nothing is copied or
repeated. Active slots are kept in front, so that the tail of a corpus runs on fewer rows.

    slot   rows 0 ..        (p: prompt, a: answer, .: stale or empty, masked)
    0      p p p a a a .
    1      p p a a a a a    <- longest: the mask and the views end here
    2      p p p p a . .
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, `[slots, num_kv_heads, capacity, head_dim]`. `owner` says where to write."""

    is_compileable = False
    is_croppable = False
    is_sliding = False

    def __init__(self, owner: SlotCache) -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        def empty(states: Tensor) -> Tensor:
            return states.new_zeros(self.owner.num_slots, states.shape[1], self.owner.capacity, states.shape[3])

        self.stored = empty(key_states), empty(value_states)
        self.keys, self.values = self.stored
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one row per active slot, `[active, num_kv_heads, 1, head_dim]`; return views of the active slots."""
        active, end = key_states.shape[0], self.owner.longest
        slots, rows = torch.arange(active, device=key_states.device), self.owner.lengths[:active]
        keys, values = self.stored
        keys[slots, :, rows] = key_states[:, :, 0]
        values[slots, :, rows] = value_states[:, :, 0]
        return keys[:active, :, :end], values[:active, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.longest, 0

    def get_seq_length(self) -> int:
        return self.owner.longest - 1

    def get_max_length(self) -> int:
        return self.owner.capacity


class SlotCache(Cache):
    """The cache of all layers.

    Args:
        num_layers: of the target.
        num_slots: answers decoded together.
        capacity: tokens a slot can hold.
    """

    def __init__(self, num_layers: int, *, num_slots: int, capacity: int, device: torch.device) -> None:
        self.num_slots, self.capacity = num_slots, capacity
        self.lengths = torch.zeros(num_slots, dtype=torch.long, device=device)  # tokens in each slot
        self.longest = 0  # rows that the views of this step end at
        self.slot_layers = [SlotLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self.slot_layers))

    def admit(self, prefilled: Cache, lengths: list[int], *, first_slot: int) -> None:
        """Copy freshly computed prompts (right-padded) into the slots from `first_slot` on."""
        slots = slice(first_slot, first_slot + len(lengths))
        for mine, theirs in zip(self.slot_layers, prefilled.layers, strict=True):
            fresh: tuple[Tensor, Tensor] = (theirs.keys, theirs.values)  # type: ignore
            if not mine.is_initialized:
                mine.lazy_initialization(*fresh)
            for stored, states in zip(mine.stored, fresh, strict=True):
                stored[slots, :, : states.shape[2]] = states
        self.lengths[slots] = torch.tensor(lengths, device=self.lengths.device)

    def move(self, source: int, destination: int) -> None:
        """Move a slot's rows into another slot, whose answer is finished."""
        length = int(self.lengths[source])
        for layer in self.slot_layers:
            for stored in layer.stored:
                stored[destination, :, :length] = stored[source, :, :length]
        self.lengths[destination] = length

    def begin_step(self, active: int) -> tuple[Tensor, Tensor]:
        """Prepare to write one token to each active slot.

        Returns:
            The tokens' positions `[active, 1]`, and the mask `[active, 1, 1, longest]`, true where a row is seen.
        """
        lengths = self.lengths[:active]
        self.longest = int(lengths.max()) + 1
        rows = torch.arange(self.longest, device=lengths.device)
        return lengths[:, None].clone(), (rows <= lengths[:, None])[:, None, None]

    def end_step(self, active: int) -> None:
        self.lengths[:active] += 1


ATTENTION = "heterospec_slots"
SLOTS_PER_GROUP = 16


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one token per slot, over slots of like length together: a slot reads few rows beyond its own.

    On the CPU this takes a quarter of the time of the fused kernel, which is made for long queries. Everything else
    goes to transformers' SDPA attention.
    """
    if query.device.type != "cpu" or query.shape[2] != 1 or attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    queries = query[:, :, 0] * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    seen = attention_mask[:, 0, 0]  # [slots, length], true on the rows 0 .. length of the slot
    lengths = seen.sum(dim=-1)
    out = query.new_empty(query.shape[0], 1, query.shape[1], value.shape[-1])
    for group in lengths.argsort().split(SLOTS_PER_GROUP):
        end = int(lengths[group[-1]])
        out[group, 0] = group_attention(
            *(rows.index_select(0, group) for rows in (queries, key[:, :, :end], value[:, :, :end], seen[:, :end]))
        )
    return out, None


def group_attention(queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """Two batched products with the query heads of a key head as rows.

    Args:
        queries: `[slots, num_heads, head_dim]`, scaled.
        keys, values: `[slots, num_kv_heads, length, head_dim]`, contiguous: batched products read others slowly.
        seen: `[slots, length]`.

    Returns:
        `[slots, num_heads, head_dim]`.
    """
    slots, kv_heads, length, head_dim = keys.shape
    grouped = queries.reshape(slots * kv_heads, -1, head_dim)  # [slots * kv_heads, groups, head_dim]
    scores = grouped @ keys.flatten(0, 1).transpose(1, 2)
    scores = scores.view(slots, -1, length).masked_fill(~seen[:, None], float("-inf"))
    weights = scores.softmax(dim=-1).view(slots * kv_heads, -1, length)
    return (weights @ values.flatten(0, 1)).view(slots, -1, values.shape[-1])


@contextmanager
def use_slot_attention(model: PreTrainedModel) -> Iterator[None]:
    """Lets `model` use `slot_attention` for the length of a `with` block, if it uses SDPA."""
    if model.config.get_text_config(decoder=True)._attn_implementation != "sdpa":
        yield
        return
    AttentionInterface.register(ATTENTION, slot_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    model.set_attn_implementation(ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")
