"""The target's keys and values in one preallocated tensor: passes write in place, and accepted rows move at once."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer


class RowStore:
    """All layers' rows: `buffer` is `[2 * num_layers, heads, capacity, head_dim]`, keys and values in turns.

    The layers of the cache stay what they are to everybody else: `DynamicLayer`s whose keys and values are as long as
    the text.
    """

    BLOCK = 256  # capacity grows by half, in blocks of so many rows

    def __init__(self, layers: list[DynamicLayer]) -> None:
        _, heads, self.length, head_dim = layers[0].keys.shape
        self.buffer = layers[0].keys.new_zeros(2 * len(layers), heads, self._capacity(self.length + 1), head_dim)
        for place, layer in enumerate(layers):
            self.buffer[2 * place, :, : self.length] = layer.keys[0]
            self.buffer[2 * place + 1, :, : self.length] = layer.values[0]
        self.layers = [StoredLayer(self, place, layer) for place, layer in enumerate(layers)]
        self.show(self.length)

    @classmethod
    def adopt(cls, cache: Cache) -> RowStore | None:
        """Move the filled `cache` of one sequence into a store (mutates it). `None` where its layers are of another
        kind, or differ in shape."""
        if type(cache) is not DynamicCache or not cache.layers:
            return None
        store = getattr(cache.layers[0], "store", None)
        if store is not None and cache.layers == store.layers and all(layer.is_shown for layer in store.layers):
            store.length = cache.get_seq_length()
            return store
        if not all(type(layer) in (DynamicLayer, StoredLayer) and layer.is_initialized for layer in cache.layers):
            return None
        kinds = {(part.shape, part.dtype, part.device) for layer in cache.layers for part in (layer.keys, layer.values)}
        if len(kinds) != 1 or cache.layers[0].keys.shape[0] != 1:
            return None
        store = cls(cache.layers)
        cache.layers = list(store.layers)
        return store

    def _capacity(self, num_rows: int) -> int:
        return -(-num_rows * 3 // 2 // self.BLOCK) * self.BLOCK

    def reserve(self, num_rows: int) -> None:
        """Make room for `num_rows` in all."""
        if num_rows <= self.buffer.shape[2]:
            return
        planes, heads, _, head_dim = self.buffer.shape
        grown = self.buffer.new_zeros(planes, heads, self._capacity(num_rows), head_dim)
        grown[:, :, : self.length] = self.buffer[:, :, : self.length]
        self.buffer = grown

    def show(self, length: int) -> None:
        """Let the first `length` rows be the text."""
        self.length = length
        for place, layer in enumerate(self.layers):
            layer.keys = self.buffer[2 * place, None, :, :length]
            layer.values = self.buffer[2 * place + 1, None, :, :length]

    def parts(self) -> list[Tensor]:
        """Keys and values of each layer in turns, `[1, heads, capacity, head_dim]`: what a compiled pass writes to."""
        return list(self.buffer.split(1))

    def move(self, rows: Tensor, start: int) -> None:
        """Copy the rows numbered `rows`, of all layers, to `start ..`."""
        self.buffer[:, :, start : start + rows.shape[0]] = self.buffer[:, :, rows]


class StoredLayer(DynamicLayer):
    """One layer of a `RowStore`. Used in any other way than by appending and cropping, it is a plain `DynamicLayer`."""

    keys: Tensor | None
    values: Tensor | None

    def __init__(self, store: RowStore, place: int, layer: DynamicLayer) -> None:
        super().__init__()
        self.store, self.place = store, place
        self.device, self.is_initialized = layer.keys.device, True

    @property
    def is_shown(self) -> bool:
        """Whether the layer's keys are still rows of the store."""
        start = self.store.buffer[2 * self.place].data_ptr()
        return self.keys is not None and self.keys.data_ptr() == start and self.keys.shape[0] == 1

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        if not self.is_shown or key_states.shape[0] != 1 or end > self.store.buffer.shape[2]:
            return super().update(key_states, value_states, *args, **kwargs)
        keys, values = self.store.buffer[2 * self.place], self.store.buffer[2 * self.place + 1]
        keys[:, start:end], values[:, start:end] = key_states[0], value_states[0]
        self.keys, self.values = keys[None, :, :end], values[None, :, :end]
        return self.keys, self.values
