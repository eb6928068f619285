"""The target's keys and values as rows of preallocated tensors: passes write in place, and accepted rows move."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticCache, StaticLayer


class Rows(Protocol):
    """The rows of a cache that holds one sequence."""

    def reserve(self, num_rows: int, *, filled: int) -> None:
        """Make room for `num_rows` in all, the first `filled` of which are in use."""

    def columns(self, num_rows: int) -> int:
        """How many columns the mask of an ordinary `forward` has that leaves `num_rows` in the cache."""

    def show(self, length: int) -> None:
        """Let the first `length` rows be the text, for the next `forward` and for the caller."""

    def parts(self) -> list[Tensor]:
        """Keys and values of each layer in turns, `[1, heads, capacity, head_dim]`: what a compiled pass writes to."""

    def move(self, rows: Tensor, start: int) -> None:
        """Copy the rows numbered `rows`, of all layers, to `start ..`."""


def rows_of(cache: Cache) -> Rows | None:
    """The rows of a filled cache (a `DynamicCache` is given preallocated ones), or `None` where its layers are of
    another kind."""
    return RowStore.adopt(cache) or StaticRows.adopt(cache)


class StaticRows:
    """The rows of a `StaticCache`, where they are. Its capacity is the caller's: there is never more room."""

    def __init__(self, layers: list[StaticLayer]) -> None:
        self.layers = layers

    @classmethod
    def adopt(cls, cache: Cache) -> StaticRows | None:
        """`None` where the layers are of another kind, or hold more than one sequence."""
        fits = all(
            type(layer) is StaticLayer and layer.is_initialized and layer.batch_size == 1 for layer in cache.layers
        )
        return cls(cache.layers) if type(cache) is StaticCache and fits else None

    def reserve(self, num_rows: int, *, filled: int) -> None:
        assert num_rows <= self.layers[0].max_cache_len, "`Target.limits` sees to it"

    def columns(self, num_rows: int) -> int:
        return self.layers[0].max_cache_len

    def show(self, length: int) -> None:
        for layer in self.layers:
            layer.cumulative_length.fill_(length)

    def parts(self) -> list[Tensor]:
        return [part for layer in self.layers for part in (layer.keys, layer.values)]

    def move(self, rows: Tensor, start: int) -> None:
        for part in self.parts():
            part[:, :, start : start + rows.shape[0]] = part[:, :, rows]


class RowStore:
    """All layers' rows: `buffer` is `[2 * num_layers, heads, capacity, head_dim]`, keys and values in turns.

    The layers of the cache stay what they are to everybody else: `DynamicLayer`s whose keys and values are as long as
    the text.
    """

    BLOCK = 256  # capacity grows by half, in blocks of so many rows

    def __init__(self, layers: list[DynamicLayer]) -> None:
        _, heads, length, head_dim = layers[0].keys.shape
        self.buffer = layers[0].keys.new_zeros(2 * len(layers), heads, self._capacity(length + 1), head_dim)
        for place, layer in enumerate(layers):
            self.buffer[2 * place, :, :length] = layer.keys[0]
            self.buffer[2 * place + 1, :, :length] = layer.values[0]
        self.layers = [StoredLayer(self, place, layer) for place, layer in enumerate(layers)]
        self.show(length)

    @classmethod
    def adopt(cls, cache: Cache) -> RowStore | None:
        """Move the filled `cache` of one sequence into a store (mutates it). `None` where its layers are of another
        kind, or differ in shape."""
        if type(cache) is not DynamicCache or not cache.layers:
            return None
        store = getattr(cache.layers[0], "store", None)
        if store is not None and cache.layers == store.layers and all(layer.is_shown for layer in store.layers):
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

    def columns(self, num_rows: int) -> int:
        return num_rows

    def reserve(self, num_rows: int, *, filled: int) -> None:
        if num_rows <= self.buffer.shape[2]:
            return
        planes, heads, _, head_dim = self.buffer.shape
        grown = self.buffer.new_zeros(planes, heads, self._capacity(num_rows), head_dim)
        grown[:, :, :filled] = self.buffer[:, :, :filled]
        self.buffer = grown

    def show(self, length: int) -> None:
        for place, layer in enumerate(self.layers):
            layer.keys = self.buffer[2 * place, None, :, :length]
            layer.values = self.buffer[2 * place + 1, None, :, :length]

    def parts(self) -> list[Tensor]:
        return list(self.buffer.split(1))

    def move(self, rows: Tensor, start: int) -> None:
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
