"""PoolBackedKVCache against mlx_lm's own KVCache."""

from __future__ import annotations

import copy
import gc

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import BatchKVCache, KVCache

from kvpool import BlockPoolAllocator, BlockPoolExhaustedError, PoolBackedKVCache, PoolConfig


def make_pool(n_blocks=4096, **config):
    return BlockPoolAllocator(PoolConfig(block_size=16, n_blocks=n_blocks, **config))


def tokens(n, *, rows=1, heads=2, k_dim=8, v_dim=6, dtype=mx.float32):
    def random(dim):
        return mx.random.normal((rows, heads, n, dim)).astype(dtype)

    return random(k_dim), random(v_dim)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and bool(mx.array_equal(a, b))


def assert_agree(ours, stock):
    assert ours.offset == ours.size() == stock.offset
    assert ours.empty() == stock.empty()
    for mine, theirs in zip(ours.state, (None, None) if stock.empty() else stock.keys_and_values()):
        assert (mine is None) if theirs is None else same(mine, theirs)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("heads", "k_dim", "v_dim"), [(1, 8, 8), (4, 64, 64), (2, 24, 12)])
def test_agrees_with_the_stock_cache(dtype, rows, heads, k_dim, v_dim):
    ours, stock = PoolBackedKVCache(make_pool(), owner=1), KVCache()
    for n in (3, 1, 1, 250, 1, 1, 300, 1):
        keys, values = tokens(n, rows=rows, heads=heads, k_dim=k_dim, v_dim=v_dim, dtype=dtype)
        for mine, theirs in zip(ours.update_and_fetch(keys, values), stock.update_and_fetch(keys, values)):
            assert same(mine, theirs)
        assert_agree(ours, stock)
        for n_queries in (1, 5):
            for options in ({}, {"window_size": 4}, {"return_array": True}):
                options = {"window_size": None, "return_array": False} | options
                mine, theirs = (cache.make_mask(n_queries, **options) for cache in (ours, stock))
                assert mine == theirs if isinstance(theirs, (str, type(None))) else same(mine, theirs)
    assert ours.nbytes == 768 * rows * heads * (k_dim + v_dim) * keys.itemsize <= stock.nbytes
    assert ours.is_trimmable()


calls = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 40)),
        st.tuples(st.just("trim"), st.integers(0, 60)),
        st.tuples(st.just("copy"), st.integers(0, 3)),
        st.tuples(st.just("state"), st.integers(0, 3)),
        st.tuples(st.just("drop"), st.integers(0, 3)),
    ),
    max_size=20,
)


@settings(max_examples=30, deadline=None)
@given(calls=calls, block_size=st.sampled_from([1, 7, 16]), step=st.sampled_from([1, 8, 33, None]))
def test_any_calls_on_forks_agree_with_the_stock_cache(calls, block_size, step):
    pool = BlockPoolAllocator(PoolConfig(block_size=block_size, n_blocks=2, grow_on_exhaustion=True))
    pairs = [(PoolBackedKVCache(pool, owner=pool.new_owner(), step=step), KVCache())]
    for index, (call, n) in enumerate(calls):
        ours, stock = pairs[n % len(pairs) if call in ("copy", "state", "drop") else index % len(pairs)]
        if call == "append":
            new = tokens(n, heads=1, k_dim=2, v_dim=3)
            for mine, theirs in zip(ours.update_and_fetch(*new), stock.update_and_fetch(*new)):
                assert same(mine, theirs)
        elif call == "trim":
            assert ours.trim(n) == stock.trim(n)
        elif call == "copy":
            pairs.append((copy.deepcopy(ours), copy.deepcopy(stock)))
        elif call == "state":
            ours.state = ours.state
        elif len(pairs) > 1:
            pairs.remove((ours, stock))
            del ours, stock
        for pair in pairs:
            assert_agree(*pair)
        assert pool.n_free("k") + pool.n_free("v") + pool.stats.blocks_in_use() == pool.stats.n_blocks
    pairs.clear()
    ours = stock = pair = None
    gc.collect()
    assert pool.stats.blocks_in_use() == 0


def test_p6_rewind_is_clamped():
    cache = PoolBackedKVCache(make_pool(), owner=1)
    cache.update_and_fetch(*tokens(10))
    assert (cache.trim(-5), cache.trim(0)) == (0, 0)
    keys, values = cache.update_and_fetch(*tokens(1))
    assert keys.shape[2] == values.shape[2] == 11
    assert cache.trim(99) == 11
    assert cache.offset == 0


@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
def test_p7_restored_length_is_saved_length(dtype):
    saved = PoolBackedKVCache(make_pool(), owner=1)
    saved.update_and_fetch(*tokens(284, heads=32, k_dim=128, v_dim=128, dtype=dtype))
    restored = PoolBackedKVCache(make_pool(), owner=1)
    restored.state = saved.state
    restored.meta_state = saved.meta_state
    assert restored.offset == 284
    keys, _ = restored.update_and_fetch(*tokens(1, heads=32, k_dim=128, v_dim=128, dtype=dtype))
    assert keys.shape == (1, 32, 285, 128)
    assert same(keys[:, :, :284], saved.keys)
    assert restored.offset == 285


def test_p8_joining_batches_keeps_rows():
    pool = make_pool()
    filled = PoolBackedKVCache(pool, owner=1)
    filled.update_and_fetch(*tokens(256, heads=8))
    a = PoolBackedKVCache.merge([filled])
    b = PoolBackedKVCache.merge([PoolBackedKVCache(pool, owner=10 + i) for i in range(4)])
    assert isinstance(a, BatchKVCache)
    first, second = copy.deepcopy(a), copy.deepcopy(b)
    first.extend(b)
    second.extend(a)
    for batch, row in ((first, 0), (second, 4)):
        assert batch.keys.shape[0] == batch.values.shape[0] == 5
        assert batch.offset.shape == batch.left_padding.shape == (5,)
        assert sorted(batch.left_padding.tolist()) == [0] + [256] * 4
        assert same(batch.keys[row : row + 1, :, :256], filled.keys)
        keys, _ = batch.update_and_fetch(*tokens(1, rows=5, heads=8))
        assert keys.shape == (5, 8, 257, 8)


def test_merge_keeps_the_place_of_empty_members():
    pool = make_pool()
    caches = [PoolBackedKVCache(pool, owner=i) for i in range(4)]
    caches[1].update_and_fetch(*tokens(5, dtype=mx.bfloat16))
    caches[3].update_and_fetch(*tokens(2, dtype=mx.bfloat16))
    caches[2].update_and_fetch(*tokens(2, dtype=mx.bfloat16))
    caches[2].trim(2)
    batch = PoolBackedKVCache.merge(caches)
    assert batch.keys.dtype == mx.bfloat16
    assert batch.left_padding.tolist() == [5, 0, 5, 3]
    assert same(batch.keys[1:2], caches[1].keys)
    assert same(batch.keys[3:4, :, 3:], caches[3].keys)


@pytest.mark.parametrize(("n_blocks", "separate_kv"), [(4, True), (5, True), (4, False), (5, False)])
def test_if_either_stream_runs_out_nothing_has_changed(n_blocks, separate_kv):
    pool = make_pool(n_blocks, separate_kv=separate_kv)
    cache = PoolBackedKVCache(pool, owner=1, step=16)
    held = tokens(32)
    cache.update_and_fetch(*held)
    with pytest.raises(BlockPoolExhaustedError):
        cache.update_and_fetch(*tokens(1))
    assert cache.offset == 32 and pool.stats.blocks_in_use() == 4
    assert same(cache.keys, held[0]) and same(cache.values, held[1])


def test_a_deepcopy_shares_until_one_side_appends():
    pool = make_pool()
    layers = [PoolBackedKVCache(pool, owner=1) for _ in range(3)]
    for layer in layers:
        layer.update_and_fetch(*tokens(20))
    in_use = pool.stats.blocks_in_use()
    forks = copy.deepcopy(layers)
    assert pool.stats.blocks_in_use() == in_use
    assert len({fork.owner for fork in forks}) == 1 and forks[0].owner != 1
    forks[1].update_and_fetch(*tokens(1))
    assert pool.stats.blocks_in_use() == in_use + in_use // 3
    assert layers[1].offset == 20 and forks[1].offset == 21
    forks[2].release()
    assert all(fork.empty() for fork in forks)
    assert [layer.offset for layer in layers] == [20] * 3
    assert pool.stats.blocks_in_use() == in_use


def test_blocks_go_back_with_the_cache_and_by_free_all():
    pool = make_pool()
    cache = PoolBackedKVCache(pool, owner=1)
    cache.update_and_fetch(*tokens(3))
    pool.free_all(1)
    assert cache.empty() and cache.state == (None, None) and cache.nbytes == 0
    cache.update_and_fetch(*tokens(3))
    del cache
    gc.collect()
    assert pool.stats.blocks_in_use() == 0


def test_state_of_an_empty_cache_and_meta_state():
    cache = PoolBackedKVCache(make_pool(), owner=1)
    assert cache.state == (None, None) and cache.meta_state == "" and cache.keys is None
    cache.update_and_fetch(*tokens(3))
    cache.state = (None, None)
    assert cache.empty()
    with pytest.raises(ValueError, match="no meta_state"):
        cache.meta_state = ("1",)


def test_errors():
    pool = make_pool()
    with pytest.raises(ValueError, match="step must be >= 1, got 0"):
        PoolBackedKVCache(pool, owner=1, step=0)
    cache = PoolBackedKVCache(pool, owner=1)
    keys, values = tokens(3)
    with pytest.raises(ValueError, match="equal B and S"):
        cache.update_and_fetch(keys, values[:, :, :2])
    cache.update_and_fetch(keys, values)
    with pytest.raises(ValueError, match="only S may differ"):
        cache.update_and_fetch(*tokens(1, rows=2))
    assert cache.offset == 3
    assert not hasattr(cache, "bits")
