"""From a pass to an FX graph: the model's own forward runs on fake tensors, and what it does is recorded.

The graph holds no weights, and the number of nodes, the length of the context and the capacity of the cache are
symbols in it: one graph serves every tree and every text.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..beam import next_level
from ..head import HeteroSpecHead, gather_features
from .packing import Layout, PackedLinears, fuse_linears

GROUPED_ATTENTION = "heterospec_grouped_sdpa"  # what `sdpa` becomes in a traced target


class BufferCache(DynamicCache):
    """A cache for tracing: writes rows `start ..` of whole buffers in place and shows their first `columns`. The head
    says itself where its rows go."""

    def __init__(self, buffers: tuple[Tensor, ...], columns: Any, start: Any = None) -> None:
        super().__init__()
        self.buffers, self.columns, self.start = buffers, columns, start

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return self.write_rows(2 * layer_idx, key_states), self.write_rows(2 * layer_idx + 1, value_states)

    def write(self, keys: Tensor, values: Tensor, *, start: Any) -> tuple[Tensor, Tensor]:
        """As `head.DraftCache.write`."""
        self.start = start
        return self.update(keys, values, 0)

    def write_rows(self, place: int, states: Tensor) -> Tensor:
        rows = self.start + torch.arange(states.shape[2], device=states.device)
        self.buffers[place].index_copy_(2, rows, states)
        return self.buffers[place][:, :, : self.columns]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions and mask come from the caller


class TargetPass(nn.Module):
    """`token_ids` and `position_ids` `[1, N]`, additive `mask` `[1, 1, N, columns]`, `start` scalar, per layer keys
    and values `[1, heads, capacity, head_dim]` -> logits `[N, vocab]`, features `[1, N, 3 * hidden]`."""

    def __init__(self, model: PreTrainedModel, layer_ids: list[int]) -> None:
        super().__init__()
        self.model, self.layer_ids = model, layer_ids

    def forward(
        self, token_ids: Tensor, position_ids: Tensor, mask: Tensor, start: Tensor, *buffers: Tensor
    ) -> tuple[Tensor, Tensor]:
        outputs = self.model(
            input_ids=token_ids,
            position_ids=position_ids,
            attention_mask=mask,
            cache=BufferCache(buffers, mask.shape[-1], start),
            use_cache=True,
            output_hidden_states=sorted(set(self.layer_ids)),
            return_dict=True,
        )
        return outputs.logits[0], gather_features(outputs.hidden_states, self.layer_ids, token_ids.device)


class ReadPass(nn.Module):
    """`HeteroSpecHead.read`, with `mask` `[length, columns]`, a scalar `start`, keys and values last."""

    def __init__(self, head: HeteroSpecHead, embeddings: nn.Module) -> None:
        super().__init__()
        self.head, self.embeddings = head, embeddings

    def forward(
        self, token_ids: Tensor, features: Tensor, position_ids: Tensor, mask: Tensor, start: Tensor, *buffers: Tensor
    ) -> tuple[Tensor, Tensor]:
        cache = BufferCache(buffers, mask.shape[-1])
        hidden, log_probs = self.head.read(
            self.embeddings, token_ids, features, position_ids=position_ids, cache=cache, start=start, mask=mask
        )
        return hidden, log_probs  # a plain tuple, which is all inductor knows


class ExpandPass(nn.Module):
    """`beam.next_level`, with scalars `depth` and `length`, keys and values last."""

    def __init__(self, head: HeteroSpecHead, embeddings: nn.Module) -> None:
        super().__init__()
        self.head, self.embeddings = head, embeddings

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        *level, depth, length, keys, values = inputs
        beam, mask = level[0], level[4]
        cache = BufferCache((keys, values), mask.shape[-1] + beam.shape[0])
        children = next_level(self.head, self.embeddings, *level, depth=depth, length=length, cache=cache)
        return tuple(part for part in children if part is not None)


def kind_of(tensor: Tensor) -> list[Any]:
    """Dtype and shape, as JSON data: what a graph takes for granted about a weight."""
    return [str(tensor.dtype), list(tensor.shape)]


@dataclass
class Traced:
    """A graph, fake inputs for it, and where the real ones come from: sizes first, then the caller's, then weights.

    `sizes` says for each symbol which of the caller's inputs has it in which dimension. `weights` names parameters and
    buffers of the traced module, with the `kind_of` each. Those with a `layout` are packed in it, several of them one
    below the other.
    """

    graph: GraphModule
    inputs: list[Tensor | torch.SymInt]
    sizes: list[tuple[int, int]]
    weights: list[dict[str, Any]]


def trace(module: nn.Module, inputs: list[Tensor], *, layout: Layout | None) -> Traced:
    """Record `module(*inputs)`, its linear layers on weights packed in `layout`; all tensors, the module's included,
    are fake and of one mode."""
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    num_inputs = len(inputs)

    def run(*flat: Tensor) -> Any:
        state = dict(zip(tensors, flat[num_inputs:], strict=True))
        with PackedLinears() if layout else contextlib.nullcontext():
            return functional_call(module, state, flat[:num_inputs], tie_weights=True)

    with torch.no_grad():
        graph = make_fx(run)(*inputs, *tensors.values())
        fused = fuse_linears(graph, layout) if layout else []
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    names = dict(zip(placeholders[num_inputs:], tensors, strict=False))
    weights = []
    for node in placeholders[num_inputs:]:
        sources = dict(fused).get(node)
        if sources is None and not node.users:
            graph.graph.erase_node(node)
            continue
        parts = [names[source] for source in sources or [node]]
        kinds = [kind_of(tensors[part]) for part in parts]
        weights.append({"names": parts, "kinds": kinds, "layout": layout.value if layout and sources else None})
    sizes = _add_sizes(graph, inputs)
    for output in cast(tuple[Node, ...], graph.graph.output_node().args[0]):
        output.meta["example_value"] = output.meta["val"]  # where `standalone_compile` looks for the symbols' world
    graph.recompile()
    kept = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    return Traced(graph, kept, sizes, weights)


def _add_sizes(module: GraphModule, inputs: list[Tensor]) -> list[tuple[int, int]]:
    """Make every symbol in the shapes of `inputs` an input of its own, ahead of them (mutates the graph). Inductor need
    not find it in a shape then: from torch 2.14 on it looks only for those whose size the graph asks for.

    Returns:
        For each new input its value, as the number of an input of the caller's and a dimension.
    """
    places = {
        str(size): (number, dimension, size)
        for number, tensor in reversed([*enumerate(inputs)])
        for dimension, size in enumerate(tensor.shape)
        if isinstance(size, torch.SymInt)
    }
    first = next(iter(module.graph.nodes))
    with module.graph.inserting_before(first):
        for name, (_, _, size) in places.items():
            module.graph.placeholder(f"size_{name}").meta["val"] = size
    return [(number, dimension) for number, dimension, _ in places.values()]


class Shapes:
    """Fake inputs of the passes, with symbols for what changes from round to round.

    Args:
        mode: where the fake tensors live; see `new_mode`.
        device, dtype: the target's.
    """

    # Any sizes do, as long as they differ from one another and exceed 1; rows also stand for a beam, which no
    # vocabulary is smaller than.
    HINTS = (7, 397, 1021, 5, 211)

    def __init__(self, mode: FakeTensorMode, *, device: torch.device, dtype: torch.dtype) -> None:
        self.mode, self.device, self.dtype = mode, device, dtype
        self.rows, self.columns, self.capacity, self.parents, self.candidates = map(self._symbol, self.HINTS)

    def _symbol(self, hint: int) -> torch.SymInt:
        dynamic: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        size = self.mode.from_tensor(torch.empty(hint, device="meta"), symbolic_context=dynamic).shape[0]
        assert isinstance(size, torch.SymInt), size
        return size

    def _tensor(self, *shape: int | torch.SymInt, dtype: torch.dtype | None = None) -> Tensor:
        with self.mode:
            return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def target_inputs(self, model: PreTrainedModel) -> list[Tensor]:
        config = model.config.get_text_config(decoder=True)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return [
            self._tensor(1, self.rows, dtype=torch.long),
            self._tensor(1, self.rows, dtype=torch.long),
            self._tensor(1, 1, self.rows, self.columns),
            self._tensor(dtype=torch.long),
            *(self._tensor(1, heads, self.capacity, head_dim) for _ in range(2 * config.num_hidden_layers)),
        ]

    def read_inputs(self, head: HeteroSpecHead) -> list[Tensor]:
        return [
            self._tensor(1, self.rows, dtype=torch.long),
            self._tensor(1, self.rows, 3 * head.config.target_hidden_size),
            self._tensor(1, self.rows, dtype=torch.long),
            self._tensor(self.rows, self.columns),
            self._tensor(dtype=torch.long),
            *self._head_cache(head),
        ]

    def expand_inputs(self, head: HeteroSpecHead) -> list[Tensor]:
        return [
            self._tensor(self.rows, dtype=torch.long),
            self._tensor(self.candidates, dtype=torch.long),
            self._tensor(self.candidates, dtype=torch.float32),
            self._tensor(1, self.parents, head.config.hidden_size),
            self._tensor(self.parents, self.columns),
            self._tensor(1, dtype=torch.long),
            self._tensor(dtype=torch.long),
            self._tensor(dtype=torch.long),
            *self._head_cache(head),
        ]

    def _head_cache(self, head: HeteroSpecHead) -> list[Tensor]:
        config = head.config
        return [self._tensor(1, config.num_key_value_heads, self.capacity, config.head_dim) for _ in range(2)]


def new_mode() -> FakeTensorMode:
    """A world of fake tensors with symbolic shapes."""
    return FakeTensorMode(shape_env=ShapeEnv())


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`sdpa` with queries that share a key head stacked along the length, so that keys are read, never repeated."""
    if unknown := [name for name in ("softcap", "position_bias", "s_aux") if kwargs.get(name) is not None]:
        raise ValueError(f"Attention with {', '.join(unknown)} cannot be compiled; it runs eager.")
    batch, num_heads, length, head_dim = query.shape
    num_kv_heads = key.shape[1]
    groups = num_heads // num_kv_heads
    packed = query.reshape(batch, num_kv_heads, groups * length, head_dim)
    mask = attention_mask.repeat(1, 1, groups, 1)
    output = scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
    return output.view(batch, num_heads, length, -1).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS[GROUPED_ATTENTION] = grouped_attention
