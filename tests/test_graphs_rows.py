"""The row store: a `DynamicCache` to everybody, one tensor to us."""

from __future__ import annotations

import copy

import torch
from transformers import DynamicCache

from hf_heterospec.rows import RowStore, StoredLayer

LAYERS, HEADS, DIM = 3, 2, 4


def filled_cache(length: int = 5) -> DynamicCache:
    cache = DynamicCache()
    generator = torch.Generator().manual_seed(0)
    for layer in range(LAYERS):
        keys, values = torch.randn(2, 1, HEADS, length, DIM, generator=generator)
        cache.update(keys, values, layer)
    return cache


def test_adopted_rows_are_the_same_rows():
    reference, cache = filled_cache(), filled_cache()
    store = RowStore.adopt(cache)
    assert cache.get_seq_length() == 5
    assert store.buffer.shape[2] > 5
    for layer, old in zip(cache.layers, reference.layers, strict=True):
        assert torch.equal(layer.keys, old.keys)
        assert torch.equal(layer.values, old.values)


def test_updates_and_crops_match_a_dynamic_cache():
    reference, cache = filled_cache(), filled_cache()
    store = RowStore.adopt(cache)
    store.reserve(12, filled=5)
    store.show(5)
    new = torch.randn(2, 1, HEADS, 3, DIM)
    for layer in range(LAYERS):
        expected = reference.update(new[0], new[1], layer)
        got = cache.update(new[0], new[1], layer)
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    cache.crop(-2)
    reference.crop(-2)
    assert cache.get_seq_length() == reference.get_seq_length() == 6
    assert all(layer.is_shown for layer in cache.layers)


def test_growing_keeps_the_rows():
    cache = filled_cache()
    store = RowStore.adopt(cache)
    before = cache.layers[2].values.clone()
    store.reserve(1000, filled=5)
    store.show(5)
    assert torch.equal(cache.layers[2].values, before)
    assert store.buffer.shape[2] >= 1000


def test_accepted_rows_move_in_every_layer():
    cache = filled_cache(8)
    store = RowStore.adopt(cache)
    rows = store.buffer[:, :, [3, 5, 6]].clone()
    store.move(torch.tensor([3, 5, 6]), 3)
    assert torch.equal(store.buffer[:, :, 3:6], rows)


def test_foreign_use_falls_back_to_a_dynamic_layer():
    """Repeating the batch, as `num_return_sequences` does, leaves the store behind and stays correct."""
    cache = filled_cache()
    RowStore.adopt(cache)
    cache.batch_repeat_interleave(2)
    new = torch.randn(2, 2, HEADS, 1, DIM)
    keys, _ = cache.update(new[0], new[1], 0)
    assert keys.shape == (2, HEADS, 6, DIM)
    assert torch.equal(keys[:, :, 5:], new[0])


def test_a_copy_does_not_write_to_the_original():
    cache = filled_cache()
    RowStore.adopt(cache).reserve(20, filled=5)
    twin = copy.deepcopy(cache)
    before = cache.layers[0].keys.clone()
    for layer in range(LAYERS):
        twin.update(torch.ones(1, HEADS, 1, DIM), torch.ones(1, HEADS, 1, DIM), layer)
    assert torch.equal(cache.layers[0].keys, before)


def test_a_store_is_adopted_once():
    cache = filled_cache()
    store = RowStore.adopt(cache)
    assert RowStore.adopt(cache) is store
    assert all(type(layer) is StoredLayer for layer in cache.layers)


def test_caches_of_another_kind_are_left_alone():
    batch = DynamicCache()
    batch.update(torch.ones(2, HEADS, 3, DIM), torch.ones(2, HEADS, 3, DIM), 0)
    assert RowStore.adopt(batch) is None
    assert RowStore.adopt(DynamicCache()) is None
