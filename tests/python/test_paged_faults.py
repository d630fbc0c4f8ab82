"""Faults that people met in other libraries, as calls on paged caches. Each stands for its class."""

from __future__ import annotations

import copy
import threading

import mlx.core as mx
import pytest
from kvpool import (
    BatchPagedKVCache,
    BlockPoolAllocator,
    BlockPoolExhaustedError,
    MlxBufferPool,
    PagedKVCache,
    PagedKVCacheConfig,
    PagedStorage,
    PoolConfig,
    render_prometheus,
)
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache
from prometheus_client.parser import text_string_to_metric_families

FORMATS = ["raw", "int8", "int4", "int2", "kivi4", "kivi2"]


def storage_of(block_size=16, n_blocks=8, grow=False, **options):
    pool = BlockPoolAllocator(PoolConfig(block_size=block_size, n_blocks=n_blocks, grow_on_exhaustion=grow))
    return PagedStorage(pool, **options)


def cache_of(storage, format="raw", owner=None, **options):
    options = {"window": 0, "sink": 0} | options
    return PagedKVCache(storage, PagedKVCacheConfig(format, format, **options), owner)


def tokens(n, *, rows=1, heads=2, dim=32, seed=0, dtype=mx.float32):
    return mx.random.normal((rows, heads, n, dim), key=mx.random.key(seed)).astype(dtype)


def append(cache, rows):
    return cache.update_and_fetch(rows, rows)


def test_a_block_is_released_once_by_its_current_holder():  # LMCache #5005
    storage = storage_of()
    pool = storage.pool
    gone = cache_of(storage, owner=1)
    append(gone, tokens(16))
    gone.release()
    gone.release()
    frees = pool.stats.n_frees
    b, c = cache_of(storage, owner=2), cache_of(storage, owner=3)
    append(b, tokens(16, seed=2))
    append(c, tokens(16, seed=3))
    gone.release()
    pool.free_all(1)
    del gone
    assert frees == pool.stats.n_frees == 2
    assert not {block.block_id for block in pool.blocks_for(2)} & {block.block_id for block in pool.blocks_for(3)}
    assert mx.array_equal(append(b, tokens(0))[0], tokens(16, seed=2))
    assert mx.array_equal(append(c, tokens(0))[0], tokens(16, seed=3))


def test_a_failed_append_leaves_no_trace():  # inference-sim #200
    storage = storage_of()
    pool = storage.pool
    append(cache_one := cache_of(storage, owner=1), tokens(32))
    cache = cache_of(storage, owner=2)
    with pytest.raises(BlockPoolExhaustedError):
        append(cache, tokens(48))
    assert pool.n_free("k") == pool.n_free("v") == 2 and pool.stats.blocks_in_use() == 4
    assert pool.blocks_for(2) == [] and cache.empty()
    pool.register_owner(2)
    assert mx.array_equal(append(cache_one, tokens(0))[0], tokens(32))


def test_a_request_that_can_never_fit_is_refused_at_once():
    storage = storage_of()
    with pytest.raises(BlockPoolExhaustedError):
        append(cache_of(storage), tokens(65))
    assert storage.pool.stats.blocks_in_use() == 0 and storage.resident_bytes() == 0
    append(cache_of(storage), tokens(64))


def test_release_is_safe_against_other_threads():  # TensorRT-LLM #15234
    storage = storage_of(n_blocks=64)
    pool, cache = storage.pool, cache_of(storage, owner=5)
    for _ in range(300):
        append(cache, tokens(512, heads=1, dim=8))
        mx.eval(cache.state)
        frees = pool.stats.n_frees
        assert len({(block.stream, block.block_id) for block in pool.blocks_for(5)}) == 64
        threads = [threading.Thread(target=call) for call in (lambda: pool.free_all(5), cache.release)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert pool.stats.n_frees - frees == 64 and pool.stats.blocks_in_use() == 0
        assert cache.empty() and storage.resident_bytes() == 0


def test_counters_stay_true_through_forks_trims_and_frees():  # TensorRT-LLM #11879
    storage = storage_of(block_size=4, n_blocks=32)
    pool, cache = storage.pool, cache_of(storage, owner=1)
    append(cache, tokens(11))
    forks = [copy.deepcopy(cache) for _ in range(5)]
    assert pool.stats.blocks_in_use() == 6
    append(forks[0], tokens(2))
    cache.trim(7)
    forks[1].trim(99)
    assert pool.stats.blocks_in_use() == 6 + 4
    pool.free_all(1)
    cache.release()
    assert cache.trim(3) == 0
    del forks
    assert pool.stats.blocks_in_use() == 0
    assert (pool.n_free("k"), pool.n_free("v")) == (16, 16)
    assert pool.shrink("k", 2) == 14 and pool.stats.n_blocks == 18


def test_shared_blocks_are_counted_once():
    storage = storage_of()
    cache = cache_of(storage)
    append(cache, tokens(64))
    forks = [copy.deepcopy(cache) for _ in range(9)]
    assert storage.pool.stats.blocks_in_use() == storage.pool.stats.n_blocks == 8
    assert all(mx.array_equal(append(fork, tokens(0))[0], tokens(64)) for fork in forks)


@pytest.mark.parametrize(
    "second", [("raw", mx.float16), ("raw", mx.float32), ("int8", mx.float32), ("kivi2", mx.bfloat16)]
)
@pytest.mark.parametrize("first", [("raw", mx.float16), ("raw", mx.float32), ("int4", mx.float16)])
def test_a_recycled_block_shows_nothing_of_its_last_user(first, second):  # vllm #35219
    storage = storage_of()
    gone = cache_of(storage, first[0])
    append(gone, mx.full((1, 2, 64, 8), float("nan"), first[1]))
    mx.eval(gone.state)
    gone.release()
    cache = cache_of(storage, second[0])
    rows = mx.ones((1, 2, 19, 8), second[1])
    append(cache, rows)
    keys, values = append(cache, rows[:, :, :1])
    for got in (keys, values, cache.attend(rows[:, :, :1], 1.0)):
        assert mx.allclose(got, mx.array(1.0), atol=1e-3).item()
    batch = PagedKVCache.merge([cache, cache_of(storage, second[0])])
    keys, _ = batch.update_and_fetch(*[mx.ones((2, 2, 1, 8), second[1])] * 2)
    assert mx.all(keys[1, :, :20] == 0).item()


@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
@pytest.mark.parametrize("format", FORMATS)
def test_restored_length_is_saved_length(format, dtype, tmp_path):  # maclocal-api #46
    storage = storage_of(32, 2, grow=True)
    saved = cache_of(storage, format)
    append(saved, tokens(283, heads=32, dim=128, dtype=dtype))
    append(saved, tokens(1, heads=32, dim=128, dtype=dtype))
    wanted = saved.keys_and_values()
    from_state = cache_of(storage, format)
    from_state.state = saved.state
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, [saved])
    for again in (from_state, *load_prompt_cache(file)):
        assert again.offset == 284 and again.meta_state == saved.meta_state
        got = append(again, tokens(1, heads=32, dim=128, dtype=dtype))
        assert again.offset == 285
        for mine, theirs in zip(got, wanted):
            # The block before the last token is sealed by it, where there is one.
            n = 284 if format == "raw" else 256
            assert mine.shape == (1, 32, 285, 128) and mx.array_equal(mine[:, :, :n], theirs[:, :, :n])


def test_what_is_saved_is_as_long_as_what_is_held(tmp_path):
    cache, file = cache_of(storage_of(64)), str(tmp_path / "cache.safetensors")
    append(cache, tokens(5, dtype=mx.float16))
    save_prompt_cache(file, [cache])
    sizes = [a.nbytes for a in mx.load(file).values() if a.dtype == mx.uint8]
    assert sizes == [5 * 2 * 32 * 2] * 2


@pytest.mark.parametrize("value", [0.5, 0.0, -3.0, 1000.0])
@pytest.mark.parametrize("format", FORMATS[1:])
def test_flat_rows_are_stored_as_their_constant(format, value):  # openvino #37095
    for hadamard in (False, True):
        cache = cache_of(storage_of(), format, hadamard=hadamard)
        rows = mx.full((1, 2, 16, 64), value)
        rows[..., 32:] = tokens(16, dim=32)  # one flat group beside a normal one
        for flat in (mx.full((1, 2, 16, 64), value), rows):
            append(cache, flat)
            got = [a[:, :, :16, :32] for a in append(cache, flat[:, :, :1])]
            cache.release()
            step = 0.0
            if hadamard:  # coded is the transform, which is not flat
                step = 8 * mx.abs(flat).max().item() / (2 ** int(format[-1]) - 1)
            assert all(mx.allclose(a, mx.array(value), rtol=1e-3, atol=step).item() for a in got)


def test_reuse_of_buffers_is_bounded():  # candle #3851
    buffers = MlxBufferPool()
    storage = storage_of(buffers=buffers)

    def cache_with(heads):
        cache = cache_of(storage)
        append(cache, tokens(16, heads=heads, dim=128))  # two blocks of heads * 8 KiB
        mx.eval(cache.state)
        return cache

    del (large := [cache_with(32)])[0]
    small = cache_with(1)
    large.append(cache_with(32))
    assert storage.resident_bytes() + buffers.free_bytes() == 2 * (264 << 10)
    assert small.nbytes == 2 * (8 << 10)


@pytest.mark.parametrize("rows", [1, 2])
def test_declared_sizes_are_checked_against_what_is_there(rows):  # mlx #3409
    storage = storage_of(n_blocks=32)
    cache = cache_of(storage, "int4")
    append(cache, tokens(40, rows=rows))
    append(cache, tokens(1, rows=rows))
    in_use = storage.pool.stats.blocks_in_use()
    state = list(cache.state)
    *head, blocks, keys, values = state[3][-1]
    far = mx.array(blocks)
    far[1] = 1 << 40
    back = mx.array(blocks)
    back[4] = 3
    for damaged in (
        [*head, blocks, keys[:-1], values],
        [*head, blocks, keys, mx.concatenate([values, values[:1]])],
        [*head, blocks[:-1], keys, values],
        [*head, far, keys, values],
        [*head, back, keys, values],
        ["float32", 1 << 40, *head[2:], blocks, keys, values],
        ["int32", *head[1:], blocks, keys, values],
    ):
        fresh = cache_of(storage, "int4")
        with pytest.raises(ValueError):
            fresh.state = [*state[:3], [*state[3][:-1], damaged]]
        assert fresh.empty() and storage.pool.stats.blocks_in_use() == in_use


def test_a_file_that_was_cut_short_is_refused(tmp_path):
    file = tmp_path / "cache.safetensors"
    cache = cache_of(storage_of())
    append(cache, tokens(40))
    save_prompt_cache(str(file), [cache])
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(RuntimeError, match="invalid data offsets"):
        load_prompt_cache(str(file))


def test_a_batch_that_does_not_fit_is_restored_in_no_row():
    storage = storage_of(n_blocks=16)
    batch = PagedKVCache.merge([cache_of(storage), cache_of(storage)])
    append(batch, tokens(48, rows=2))
    small = storage_of()
    again = PagedKVCache.merge([cache_of(small), cache_of(small)])
    with pytest.raises(BlockPoolExhaustedError):
        again.state = batch.state
    assert again.empty() and small.pool.stats.blocks_in_use() == 0


def test_what_is_in_use_can_be_scraped():  # DingoCache #43
    storage = storage_of()
    append(cache_of(storage, "kivi2", owner=1), tokens(20))
    page = render_prometheus({'a"b\\c\nd': storage.pool.stats})
    (name,) = {sample.labels["pool"] for family in text_string_to_metric_families(page) for sample in family.samples}
    assert name == 'a"b\\c\nd'


@pytest.mark.parametrize("n_blocks", [5, 6, 7])
def test_if_either_stream_runs_out_neither_has_changed(n_blocks):
    for separate in (True, False):
        pool = BlockPoolAllocator(PoolConfig(block_size=16, n_blocks=n_blocks, separate_kv=separate))
        cache = PagedKVCache(PagedStorage(pool))
        n = n_blocks // 2 * 16
        append(cache, tokens(n))
        in_use = pool.stats.blocks_in_use()
        with pytest.raises(BlockPoolExhaustedError):
            append(cache, tokens(1))
        assert cache.offset == n and pool.stats.blocks_in_use() == in_use
        assert mx.array_equal(append(cache, tokens(0))[1], tokens(n))


def test_values_that_are_refused_leave_the_keys_out_too():
    storage = storage_of()
    cache = cache_of(storage, "int4")
    for values in (tokens(3, dim=12), tokens(2), tokens(3, heads=1), tokens(3).astype(mx.int32)[:, 0]):
        with pytest.raises(ValueError):
            cache.update_and_fetch(tokens(3), values)
        assert cache.empty() and storage.pool.stats.blocks_in_use() == 0
    assert append(cache, tokens(3, dim=64))[0].shape == (1, 2, 3, 64)


@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("dim", [40, 64, 80, 96, 112, 128, 192, 256])
def test_every_head_dim_works_in_every_format(dim, group_size):
    rows = tokens(33, dim=dim)
    for format in FORMATS:
        cache = cache_of(storage_of(), format, group_size=group_size)
        append(cache, rows)
        keys, values = append(cache, rows[:, :, :1])
        allowed = {"raw": 0, "int8": 0.01, "int4": 0.15, "kivi4": 0.15, "int2": 0.75, "kivi2": 0.75}[format]
        for got in (keys, values):
            assert mx.sqrt(mx.square(got[:, :, :33] - rows).mean()).item() <= allowed


@pytest.mark.parametrize("dim", [7, 12, 260, 512])
def test_a_head_dim_that_cannot_be_stored_is_refused_with_the_reason(dim):
    cache = cache_of(storage_of(), "int4")
    with pytest.raises(ValueError, match=f"head_dim must be a multiple of 8 from 8 to 256, got {dim}"):
        append(cache, tokens(3, dim=dim))
    assert cache.empty()


def test_a_mask_of_keys_alone_broadcasts_over_grouped_heads():
    storage = storage_of(n_blocks=32)
    batch = PagedKVCache.merge([cache_of(storage), cache_of(storage)])
    assert isinstance(batch, BatchPagedKVCache)
    keys, values = batch.update_and_fetch(tokens(20, rows=2), tokens(20, rows=2, seed=1))
    queries = tokens(1, rows=2, heads=6, seed=2)
    seen = mx.random.uniform(shape=(2, 1, 1, 20), key=mx.random.key(3)) > 0.4
    for mask in (seen, mx.where(seen, 0.0, -mx.inf), mx.where(seen, 0.3, -2.0)):
        wanted = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.2, mask=mask)
        assert mx.allclose(batch.attend(queries, 0.2, mask), wanted, atol=1e-5)


def test_a_rejected_token_does_not_come_back_from_a_window():
    cache = cache_of(storage_of(4, 64), sliding_window=8)
    for t in range(10):
        append(cache, mx.full((1, 2, 1, 8), float(t)))
    trimmed = cache.trim(2)
    keys, _ = append(cache, mx.full((1, 2, 100, 8), -1.0))
    assert trimmed in (0, 2)
    assert (9.0 in keys.flatten().tolist()) == (trimmed == 0)
