"""The paged caches' own protocol: rewinds, forks, batches, memory."""

from __future__ import annotations

import copy

import mlx.core as mx
import pytest
from kvpool import BlockPoolAllocator, MlxBufferPool, PoolConfig
from kvpool._core import PagedKVCacheConfig, PagedStorage
from kvpool.paged_cache import BatchPagedKVCache, PagedKVCache


def storage_of(block_size=16, n_blocks=2, grow=True, **options):
    pool = BlockPoolAllocator(PoolConfig(block_size=block_size, n_blocks=n_blocks, grow_on_exhaustion=grow))
    return PagedStorage(pool, **options)


def tokens(n, batch=1, heads=2, dim=32, seed=0, dtype=mx.float32):
    return mx.random.normal((batch, heads, n, dim), key=mx.random.key(seed)).astype(dtype)


@pytest.mark.parametrize("format", ["raw", "int8", "int4", "int2", "kivi4", "kivi2"])
@pytest.mark.parametrize("sliding", [0, 64])
def test_rewind_is_clamped(format, sliding):  # P6
    config = PagedKVCacheConfig(format, format, window=0, sink=0, sliding_window=sliding)
    cache = PagedKVCache(storage_of(4), config)
    cache.update_and_fetch(tokens(10), tokens(10))
    assert (cache.trim(-5), cache.trim(0), cache.offset) == (0, 0, 10)
    keys, values = cache.update_and_fetch(tokens(1), tokens(1))
    assert keys.shape == values.shape == (1, 2, 11, 32)
    assert (cache.trim(99), cache.offset, cache.nbytes) == (11, 0, 0)


def test_a_window_that_has_slid_hands_back_nothing():
    cache = PagedKVCache(storage_of(4), PagedKVCacheConfig(sliding_window=8))
    rows = tokens(12)
    for t in range(10):
        cache.update_and_fetch(rows[:, :, t : t + 1], rows[:, :, t : t + 1])
    while cache.is_trimmable():
        cache.update_and_fetch(rows[:, :, :1], rows[:, :, :1])
    offset = cache.offset
    assert cache.trim(2) == 0 and cache.offset == offset


def batch_of(storage, *lengths, dtype=mx.float32):
    caches = []
    for seed, n in enumerate(lengths):
        caches.append(PagedKVCache(storage))
        if n:
            caches[-1].update_and_fetch(tokens(n, heads=8, seed=seed, dtype=dtype), tokens(n, heads=8, seed=9, dtype=dtype))
    return PagedKVCache.merge(caches)


@pytest.mark.parametrize("empty_first", [False, True])
def test_joining_an_empty_batch_keeps_rows_dtype_and_bits(empty_first):  # P8
    storage = storage_of()
    filled = batch_of(storage, 256, dtype=mx.float16)
    empty = batch_of(storage, 0, 0, 0, 0)
    joined, other = (empty, filled) if empty_first else (filled, empty)
    joined.extend(other)
    row = 4 if empty_first else 0
    assert joined.n_rows == 5 and other.n_rows == 0
    assert joined.left_padding.tolist() == [0 if i == row else 256 for i in range(5)]
    more = tokens(1, batch=5, heads=8, seed=5, dtype=mx.float16)
    keys, values = joined.update_and_fetch(more, more)
    assert keys.shape == values.shape == (5, 8, 257, 32) and keys.dtype == mx.float16
    assert joined.offset.tolist() == [257 if i == row else 1 for i in range(5)]
    assert mx.array_equal(keys[row, :, :256], tokens(256, heads=8, dtype=mx.float16)[0])
    assert mx.array_equal(keys[:, :, 256:], more)


def test_a_held_offset_does_not_move():
    batch = batch_of(storage_of(), 3, 5)
    held = batch.offset
    batch.update_and_fetch(tokens(2, batch=2, heads=8), tokens(2, batch=2, heads=8))
    assert held.tolist() == [3, 5] and batch.offset.tolist() == [5, 7]


def test_padding_columns_are_not_stored():
    storage = storage_of()
    batch = batch_of(storage, 0, 0)
    batch.prepare(left_padding=[0, 3])
    assert batch.offset.tolist() == [0, -3]
    rows = tokens(8, batch=2, heads=8)
    for start in (0, 2):
        batch.update_and_fetch(rows[:, :, start : start + 2], rows[:, :, start : start + 2])
    assert batch.offset.tolist() == [4, 1]
    batch.prepare(lengths=[1, 4], right_padding=[3, 0])
    for start in (4, 6):
        keys, _ = batch.update_and_fetch(rows[:, :, start : start + 2], rows[:, :, start : start + 2])
    batch.finalize()
    assert batch.offset.tolist() == [5, 5]
    assert mx.array_equal(keys[0], rows[0, :, :5]) and mx.array_equal(keys[1], rows[1, :, 3:])


def test_filter_and_extract_move_rows_by_reference():
    storage = storage_of(4)
    batch = batch_of(storage, 9, 6, 3)
    in_use = storage.pool.stats.blocks_in_use()
    one = batch.extract(1)
    assert isinstance(one, PagedKVCache) and one.offset == 6
    assert storage.pool.stats.blocks_in_use() == in_use
    batch.filter(mx.array([2, 0]))
    assert batch.offset.tolist() == [3, 9]
    more = tokens(1, heads=8, seed=7)
    keys, _ = one.update_and_fetch(more, more)
    assert mx.array_equal(keys[:, :, :6], tokens(6, heads=8, seed=1)) and mx.array_equal(keys[:, :, 6:], more)
    del batch, keys
    assert storage.pool.stats.blocks_in_use() == 4
    del one
    assert storage.pool.stats.blocks_in_use() == 0


def test_deepcopy_gives_a_request_one_owner_and_shares_blocks():
    storage = storage_of(4)
    request = [PagedKVCache(storage, owner=7) for _ in range(3)]
    for cache in request:
        cache.update_and_fetch(tokens(6), tokens(6))
    in_use = storage.pool.stats.blocks_in_use()
    fork = copy.deepcopy(request)
    assert len({cache.owners[0] for cache in fork}) == 1 and fork[0].owners != [7]
    assert storage.pool.stats.blocks_in_use() == in_use
    more = tokens(1, seed=3)
    keys, _ = fork[0].update_and_fetch(more, more)
    assert storage.pool.stats.blocks_in_use() == in_use + 2
    original, _ = request[0].update_and_fetch(more * 2, more)
    assert mx.array_equal(keys[:, :, 6:], more) and mx.array_equal(original[:, :, 6:], more * 2)
    storage.pool.free_all(7)
    assert fork[1].offset == 6 and request[1].offset == 0
    assert isinstance(copy.deepcopy(batch_of(storage, 2, 3)), BatchPagedKVCache)


@pytest.mark.parametrize("format", ["raw", "int8", "int4", "kivi2"])
def test_memory_grows_as_nbytes_says_and_comes_back(format):
    storage = storage_of(32, buffers=MlxBufferPool(0))
    config = PagedKVCacheConfig(format, format, window=128, sink=16)
    rows = tokens(512, heads=4, dim=64, dtype=mx.float16)
    mx.eval(rows)
    mx.synchronize()
    before = mx.get_active_memory()
    caches = [PagedKVCache(storage, config) for _ in range(4)]
    for chunk in [rows] * 8 + [rows[:, :, :1]] * 33:  # As a prefill in chunks and a decode go: layer by layer.
        for cache in caches:
            cache.update_and_fetch(chunk, chunk)
        mx.eval([cache.state for cache in caches])
    mx.synchronize()
    grown, nbytes = mx.get_active_memory() - before, sum(cache.nbytes for cache in caches)
    assert abs(grown - nbytes) < 0.05 * nbytes
    fp16 = 4 * 4129 * 4 * 64 * 2 * 2
    bits = {"raw": 16, "int8": 9, "int4": 5, "kivi2": 3.5}[format]
    assert nbytes < fp16 * (bits / 16 + 0.06)
    for cache in caches:
        cache.release()
    mx.synchronize()
    assert storage.resident_bytes() == 0
    assert mx.get_active_memory() - before < 65536


def test_a_storage_says_what_runs_its_ops(monkeypatch):
    monkeypatch.setenv("KVPOOL_KERNELS", "ops")
    assert storage_of(16).level == "ops"
    monkeypatch.setenv("KVPOOL_KERNELS", "quick")
    with pytest.raises(ValueError, match="no kernels 'quick' here; allowed: ops, scalar"):
        storage_of(16)
    monkeypatch.delenv("KVPOOL_KERNELS")
    assert storage_of(16).level != "ops"
