"""What we need of the user's model: features, a pass over a tree, and a cache that keeps the accepted rows.

The model runs unmodified through its own `forward`; nothing stays on it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.utils import logging

from .configuration import DraftSettings
from .graphs import Graphs
from .head import gather_features
from .machine import to_device
from .rows import Rows, StoredLayer, rows_of
from .tree import DraftLimits, DraftTree

logger = logging.get_logger(__name__)

# Layers whose rows can be moved one by one, and attentions that take an additive mask.
TREE_CACHE_LAYERS = (DynamicLayer, StoredLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)
TREE_ATTENTIONS = ("eager", "sdpa")
TREE_LAYER_TYPES = {"full_attention", "sliding_attention"}


class TargetPass(NamedTuple):
    """What one forward pass says at each of its positions."""

    logits: Tensor  # [length, vocab]; of the last position only after a prefill
    features: Tensor  # [1, length, 3 * target_hidden], what the head reads; empty where nothing is drafted
    hidden_states: tuple[Tensor, ...] | None  # [1, length, target_hidden] per layer, where the caller asked for them

    def hidden_at(self, node: int) -> tuple[Tensor, ...] | None:
        """Hidden states that led to the logits of `node`: its own, or after a prefill the whole prompt's."""
        if self.hidden_states is None or self.logits.shape[0] == 1:
            return self.hidden_states
        return tuple(states[:, node : node + 1] for states in self.hidden_states)


class Target:
    """The target during one call.

    Args:
        model: the user's causal language model.
        model_kwargs: what `generate` prepared for its forward: cache, attention mask, position ids and the rest.
        layer_ids: hidden states the head reads; none when nothing is drafted.
        generation_config: for the prefill, and to know whether the caller wants hidden states.
        graphs: compiled passes, used as soon as they are ready.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        model_kwargs: dict[str, Any],
        *,
        layer_ids: list[int],
        generation_config: GenerationConfig,
        graphs: Graphs | None = None,
    ) -> None:
        self.model = model
        self.graphs = graphs
        self.rows: Rows | None = None  # the cache's, where its kind allows
        self.layer_ids = layer_ids
        self.generation_config = generation_config
        self.wants_hidden_states = bool(generation_config.output_hidden_states)
        self.model_kwargs = dict(model_kwargs)
        if layer_ids and not self.wants_hidden_states:
            self.model_kwargs["output_hidden_states"] = sorted(set(layer_ids))
        self.cached_length = 0
        self._recording: list[tuple[Any, bool]] = []

    @property
    def cache(self) -> Cache:
        return self.model_kwargs["cache"]

    def prefill(self, input_ids: Tensor, *, most_nodes: int) -> TargetPass:
        """Run the prompt, `[1, length]` (or what of it the cache does not hold yet), and prepare the cache for passes
        over up to `most_nodes` nodes.

        Raises:
            ValueError: when the model keeps its state outside the cache, where it cannot be rolled back.
        """
        outputs = self.model._prefill(input_ids, self.generation_config, self.model_kwargs)
        self.model_kwargs = self.model._update_model_kwargs_for_generation(outputs, self.model_kwargs)
        if any(_is_unused(layer) for layer in self.cache.layers):
            raise ValueError(
                f"A HeteroSpecHead cannot decode with {type(self.model).__name__}, which keeps its state outside the "
                "cache. Leave out assistant_model."
            )
        self.cached_length = int(self.cache.get_seq_length())
        # From here on rejected rows are rolled back: layers with a window must keep what they would drop, recurrent
        # ones the state after each node.
        self._recording = [(layer, layer.record_past) for layer in self.cache.layers if hasattr(layer, "record_past")]
        self.cache.activate_past_recording(recurrent_states_to_keep=most_nodes)
        self.rows = rows_of(self.cache)
        return self._read(outputs, outputs.logits[0, -1:])

    def prompt_positions(self, length: int) -> tuple[Tensor, Tensor]:
        """Positions of the prefill's last `length` inputs, `[1, length]`, and which are no padding, `[length]` bool."""
        device = self.model.device
        mask = self.model_kwargs.get("attention_mask")
        if mask is not None:
            return self._positions()[:, -length - 1 : -1], mask[0, -length - 1 : -1].to(device).bool()
        return self._positions()[:, -length - 1 : -1], torch.ones(length, dtype=torch.bool, device=device)

    def _positions(self) -> Tensor:
        """`[1, num_tokens]`, the token without KV last."""
        positions = self.model_kwargs.get("position_ids")
        if positions is None:
            return torch.arange(self.cached_length + 1, device=self.model.device)[None]
        return positions.to(self.model.device).reshape(-1, positions.shape[-1])[:1]  # M-RoPE's text row, if several

    def limits(self, settings: DraftSettings, *, num_remaining: int) -> DraftLimits:
        """How much may be drafted this round, with `num_remaining` tokens still to be emitted."""
        static = [layer.max_cache_len for layer in self.cache.layers if isinstance(layer, StaticLayer)]
        num_nodes = min([settings.total_tokens, *(rows - self.cached_length for rows in static)])
        if not self.cache.is_croppable:
            logger.warning_once("The target's cache cannot be rolled back, so nothing is drafted.")
            return DraftLimits(0, 1, 0)
        width = settings.top_k
        if width > 1 and not self._takes_tree(num_nodes):
            logger.warning_once(
                "The target cannot verify a tree here (its attention takes no tree mask, a layer keeps a state, or "
                "the text has reached the sliding window), so a chain is drafted instead."
            )
            width = 1
        num_copied = min(num_remaining, num_nodes) - 1 if settings.copies else 0
        return DraftLimits(min(settings.depth + 1, num_remaining - 1), num_nodes, width, num_copied)

    def _takes_tree(self, num_nodes: int) -> bool:
        """Whether an additive mask means to every layer what `_tree_mask` means by it."""
        config = self.model.config.get_text_config(decoder=True)
        window = getattr(config, "sliding_window", None)
        return (
            config._attn_implementation in TREE_ATTENTIONS
            and self.model_kwargs.get("position_ids") is not None
            and all(type(layer) in TREE_CACHE_LAYERS for layer in self.cache.layers)
            and set(getattr(config, "layer_types", None) or ()) <= TREE_LAYER_TYPES
            and (window is None or self.cached_length + num_nodes <= window)
        )

    def verify(self, tree: DraftTree) -> TargetPass:
        """One pass over all nodes of `tree`. Appends their rows to the cache; `commit` must follow."""
        end = self.cached_length + tree.num_nodes
        if self.rows is not None:
            self.rows.reserve(end, filled=self.cached_length)
            if self.graphs is not None and self.is_compiled:
                return self._verify_compiled(tree, self.graphs, self.rows)
            self.rows.show(self.cached_length)
        kwargs = dict(self.model_kwargs)
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = kwargs["position_ids"][..., -1:] + tree.depths
        if tree.width > 1:
            columns = self.cache.get_mask_sizes(tree.num_nodes, 0)[0] if self.rows is None else self.rows.columns(end)
            kwargs["attention_mask"] = self._tree_mask(tree, columns)
        elif (mask := kwargs.get("attention_mask")) is not None:
            kwargs["attention_mask"] = torch.cat((mask, mask.new_ones(1, tree.num_nodes - 1)), dim=1)
        inputs = self.model.prepare_inputs_for_generation(tree.token_ids[None], **kwargs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = 0  # all
        outputs = self.model(**inputs, return_dict=True)
        return self._read(outputs, outputs.logits[0])

    @property
    def is_compiled(self) -> bool:
        """Whether the next `verify` runs a compiled graph."""
        ready = self.graphs is not None and self.graphs.is_ready and self.rows is not None
        return ready and not self.wants_hidden_states and self.model_kwargs.get("position_ids") is not None

    def describe_passes(self, status: str) -> str:
        """`status` of the graphs, or why this call cannot use them although they are ready."""
        if self.graphs is None or not self.graphs.is_ready or self.is_compiled:
            return status
        cache = type(self.cache).__name__
        return (
            f"eager: compiled passes take no {cache}" if self.rows is None else "eager: the call asks for hidden states"
        )

    def _verify_compiled(self, tree: DraftTree, graphs: Graphs, rows: Rows) -> TargetPass:
        logits, features = graphs.run(
            "target",
            tree.token_ids[None],
            self.model_kwargs["position_ids"][:, -1:] + tree.depths,
            self._tree_mask(tree, self.cached_length + tree.num_nodes),
            to_device(self.cached_length, tree.token_ids.device),
            *rows.parts(),
        )
        return TargetPass(logits, features, None)

    def _tree_mask(self, tree: DraftTree, columns: int) -> Tensor:
        """Additive `[1, 1, num_nodes, columns]`: a node sees the context, its ancestors and itself.

        For a root with children a and b, and a's child c, behind a context of 2 tokens (x: seen):

                    ctx ctx root a b c
            root     x   x   x   . . .
            a        x   x   x   x . .
            b        x   x   x   . x .
            c        x   x   x   x . x
        """
        num_nodes, start = tree.num_nodes, self.cached_length
        device, dtype = tree.token_ids.device, self.model.dtype
        seen = torch.zeros(num_nodes, columns, dtype=torch.bool, device=device)
        context = self.model_kwargs.get("attention_mask")
        seen[:, :start] = True if context is None else context[:, :start].bool()
        seen[:, start : start + num_nodes] = tree.ancestors()
        mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, torch.finfo(dtype).min)
        return mask[None, None]

    def commit(self, path: list[int], num_nodes: int) -> None:
        """Keep the rows of the accepted nodes, in order, and drop the other rows of the last `verify`."""
        if path != list(range(len(path))):
            self._move(to_device(path, self.model.device) + self.cached_length)
        if self.rows is None:
            self.cache.crop(len(path) - num_nodes)
        self.cached_length += len(path)
        self.model_kwargs = self.model._update_model_kwargs_for_generation(
            {}, self.model_kwargs, num_new_tokens=len(path)
        )

    def _move(self, accepted: Tensor) -> None:
        """Copy the rows numbered `accepted` behind the text."""
        if self.rows is not None:
            return self.rows.move(accepted, self.cached_length)
        kept = slice(self.cached_length, self.cached_length + len(accepted))
        for layer in self.cache.layers:
            if layer.is_initialized:  # else it shares another layer's rows
                rows = accepted.to(layer.keys.device)
                layer.keys[:, :, kept] = layer.keys[:, :, rows]
                layer.values[:, :, kept] = layer.values[:, :, rows]

    def finish(self) -> Cache:
        """Leave the cache as plain `generate` would: as long as the text, and window layers stop recording."""
        if self.rows is not None:
            self.rows.show(self.cached_length)
        for layer, was_recording in self._recording:
            layer.record_past = was_recording
        return self.cache

    def _read(self, outputs: Any, logits: Tensor) -> TargetPass:
        features = logits.new_empty(0)
        if self.layer_ids:
            features = gather_features(outputs.hidden_states, self.layer_ids, self.model.device)
        return TargetPass(logits, features, outputs.hidden_states if self.wants_hidden_states else None)


def _is_unused(layer: Any) -> bool:
    """Whether a recurrent layer of a filled cache holds no state."""
    return isinstance(layer, LinearAttentionCacheLayerMixin) and not any(
        (*layer.is_conv_states_initialized.values(), *layer.is_recurrent_states_initialized.values())
    )


def with_room_for_trees(model: PreTrainedModel, cache: Cache, *, max_length: int, num_nodes: int) -> Cache:
    """A static cache `generate` has just made holds `max_length` tokens and not one row more; a tree needs
    `num_nodes` beyond.

    Returns `cache` itself unless it is an empty `StaticCache` that the user did not hand in.
    """
    if type(cache) is not StaticCache or cache.is_initialized or getattr(cache, "_is_user_defined", False):
        return cache
    rows = max(max_length, *(layer.max_cache_len for layer in cache.layers)) + num_nodes
    return StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=rows)
