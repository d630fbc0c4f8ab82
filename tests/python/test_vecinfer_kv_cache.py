"""VecInferKVCache: its own names, and that attention from codes is attention over the decoded cache."""

from __future__ import annotations

import copy

import mlx.core as mx
import pytest
from kvpool import (
    BlockPoolAllocator,
    KVCacheConfig,
    PagedKVCache,
    PagedStorage,
    PoolConfig,
    VecInferCodebooks,
    VecInferKVCache,
)
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

FORMATS = {"vecinfer1": 1, "vecinfer1.5": 1.5, "vecinfer2": 2, "vecinfer3": 3, "vecinfer4": 4}
HEAD_DIMS = [64, 80, 96, 112, 128, 192, 256]
HEADS, DIM = 2, 64


def cache_of(method="vecinfer2", head_dim=DIM, window=16, sink=8, block_size=16, seed=1, storage=None):
    codebooks = VecInferCodebooks.random(method, 2, HEADS, head_dim, seed)
    config = KVCacheConfig(method, head_dim, block_size=block_size, window=window, sink=sink, codebooks=codebooks)
    return VecInferKVCache(config, layer=1, storage=storage)


def rows(n, seed=0, head_dim=DIM, batch=1, heads=HEADS):
    return mx.random.normal((batch, heads, n, head_dim), key=mx.random.key(seed))


def fill(cache, n, seed=0, head_dim=DIM, batch=1):
    return cache.update_and_fetch(rows(n, seed, head_dim, batch), rows(n, seed + 1000, head_dim, batch))


def reference(cache, q, causal=True, window=0):
    """Attention over what the cache decodes to."""
    keys, values = cache.keys_and_values()
    n, S = keys.shape[2], q.shape[2]
    key, query = mx.arange(n), mx.arange(n - S, n)[:, None]
    mask = key <= query if causal else mx.ones((S, n), mx.bool_)
    if window:
        mask = mask & (key > query - window)
    return mx.fast.scaled_dot_product_attention(q, keys, values, scale=q.shape[3] ** -0.5, mask=mask)


def check(cache, S, causal=True, window=0, batch=1, head_dim=DIM):
    q = rows(S, 77, head_dim, batch, heads=3 * HEADS)
    out = cache.fused_sdpa(q, head_dim**-0.5, causal=causal, sliding_window=window)
    assert out.shape == q.shape and out.dtype == q.dtype
    assert mx.abs(out - reference(cache, q, causal, window)).max().item() < 1e-3


@pytest.mark.parametrize("method", FORMATS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("S", [1, 7, 64, 512])
def test_fused_sdpa_is_attention_over_the_decoded_cache(method, causal, S):
    cache = cache_of(method)
    fill(cache, 300)
    fill(cache, S, seed=1)
    check(cache, S, causal)


@pytest.mark.parametrize("method", FORMATS)
@pytest.mark.parametrize("S", [1, 100])
def test_fused_sdpa_in_a_sliding_window(method, S):
    cache = cache_of(method)
    fill(cache, 400)
    fill(cache, S, seed=1)
    check(cache, S, window=64)


@pytest.mark.parametrize("n", [1, 15, 16, 17, 31, 32, 33, 255, 256, 257, 1000])
def test_lengths_around_block_edges(n):
    cache = cache_of(window=0, sink=0)
    fill(cache, n)
    fill(cache, 1, seed=1)
    check(cache, 1)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("method", FORMATS)
def test_head_dims(method, head_dim):
    cache = cache_of(method, head_dim)
    for seed, n in enumerate((100, 5, 1)):
        fill(cache, n, seed, head_dim)
    check(cache, 1, head_dim=head_dim)


def test_batches_and_ragged_rows():
    cache = cache_of()
    fill(cache, 90, batch=3)
    fill(cache, 1, seed=1, batch=3)
    check(cache, 1, batch=3)

    storage = PagedStorage(BlockPoolAllocator(PoolConfig(block_size=16, n_blocks=2, grow_on_exhaustion=True)))
    lengths = [3, 130, 64]
    shared = cache_of(storage=storage).config
    caches = [VecInferKVCache(shared, storage=storage) for _ in lengths]
    for seed, (one, n) in enumerate(zip(caches, lengths)):
        fill(one, n, seed)
    batch = VecInferKVCache.merge(caches)
    fill(batch, 1, seed=50, batch=3)
    q = rows(1, 77, batch=3, heads=3 * HEADS)
    out = batch.attend(q, DIM**-0.5, "causal")
    for i in range(3):
        one = batch.extract(i)
        assert one.offset == lengths[i] + 1
        assert mx.abs(out[i : i + 1] - reference(one, q[i : i + 1])).max().item() < 1e-3


@pytest.mark.parametrize("method", FORMATS)
def test_trim_then_other_tokens_equals_a_fresh_cache(method):
    cache, fresh = cache_of(method, window=0), cache_of(method, window=0)
    for one in (cache, fresh):
        fill(one, 100)
    fill(cache, 23, seed=1)
    assert (cache.trim(-3), cache.trim(23), cache.size()) == (0, 23, 100)
    for seed in (2, 3):
        got, expected = fill(cache, 30, seed), fill(fresh, 30, seed)
    assert all(mx.array_equal(*pair) for pair in zip(got, expected))
    assert cache.trim(1000) == 160 and cache.empty() and cache.nbytes == 0


@pytest.mark.parametrize("method", FORMATS)
def test_saved_and_loaded_is_as_if_never_saved(method, tmp_path):
    cache = cache_of(method)
    fill(cache, 77)
    fill(cache, 20, seed=1)
    save_prompt_cache(str(tmp_path / "cache.safetensors"), [cache])
    (back,) = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    assert type(back) is VecInferKVCache and back.size() == 97
    for seed in (2, 3):
        got, expected = fill(back, 25, seed), fill(cache, 25, seed)
    assert all(mx.array_equal(*pair) for pair in zip(got, expected))
    assert back.compressed_key_bytes == cache.compressed_key_bytes


def test_a_fork_diverges_without_touching_its_parent():
    cache = cache_of()
    fill(cache, 100)
    keys, values = fill(cache, 5, seed=1)
    before = mx.array(keys), mx.array(values)
    fork = copy.deepcopy(cache)
    assert type(fork) is VecInferKVCache
    fill(fork, 60, seed=2)
    check(fork, 60)
    assert all(mx.array_equal(*pair) for pair in zip(cache.keys_and_values(), before))


@pytest.mark.parametrize(("method", "bits"), FORMATS.items())
def test_bytes_are_counted_and_held(method, bits):
    cache = cache_of(method, window=16, sink=0, block_size=32)
    assert (cache.assigned_avg_bits, cache.compressed_key_bytes) == (0, 0)
    n = 4096
    fill(cache, n)
    fill(cache, 1, seed=1)
    n += 1
    fp16 = n * HEADS * DIM * 2
    assert cache.fp16_key_bytes == cache.fp16_value_bytes == fp16
    compressed = cache.compressed_key_bytes + cache.compressed_value_bytes
    assert compressed == pytest.approx(2 * fp16 * bits / 16, abs=2)
    assert cache.assigned_avg_bits == pytest.approx(bits, rel=1e-4)
    raw = 64 * HEADS * DIM * 4 * 2  # the newest tokens, in float32
    assert compressed <= cache.nbytes + raw and cache.nbytes <= compressed + raw
    assert 0 < cache.codebook_bytes < 300_000
    assert not hasattr(cache, "bits")


def test_missing_codebooks_name_the_command_and_random_ones_are_asked_for():
    with pytest.raises(ValueError, match="kvpool calibrate"):
        VecInferKVCache(KVCacheConfig("vecinfer2", DIM))
    cache = VecInferKVCache(KVCacheConfig("vecinfer", DIM, bits=4, random_codebooks=3), n_kv_heads=HEADS)
    assert cache.config.key_format == "vecinfer4"
    fill(cache, 10)
    with pytest.raises(ValueError, match="method must be vecinfer1"):
        VecInferKVCache(KVCacheConfig("kivi", DIM))
    with pytest.raises(ValueError, match="KV heads"):
        fill(VecInferKVCache(KVCacheConfig("vecinfer2", DIM, random_codebooks=3)), 4)
    with pytest.raises(ValueError, match="layer"):
        VecInferKVCache(KVCacheConfig("vecinfer2", DIM, codebooks=cache_of().config.codebooks), layer=2)
    assert isinstance(cache, PagedKVCache)
