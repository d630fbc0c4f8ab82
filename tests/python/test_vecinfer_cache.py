"""Paged caches with vecinfer formats, from Python."""

import gc

import mlx.core as mx
import pytest
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from kvpool import KVCacheBuilder, PagedKVCache
from kvpool._core import (
    BlockPoolAllocator,
    PagedKVCacheConfig,
    PagedStorage,
    PoolConfig,
    VecInferCodebooks,
    VecInferStream,
)

HEADS, DIM = 2, 64
FORMATS = ("vecinfer1", "vecinfer1.5", "vecinfer2", "vecinfer3", "vecinfer4")


def storage_of() -> PagedStorage:
    return PagedStorage(BlockPoolAllocator(PoolConfig(block_size=8, n_blocks=256)))


def cache_of(fmt: str, codebooks: VecInferCodebooks, layer: int = 0) -> PagedKVCache:
    return PagedKVCache(storage_of(), PagedKVCacheConfig(fmt, fmt, window=8, sink=0, codebooks=codebooks, layer=layer))


def rows(n: int, seed: int) -> mx.array:
    return mx.random.normal((1, HEADS, n, DIM), key=mx.random.key(seed))


@pytest.mark.parametrize("fmt", FORMATS)
def test_attention_is_that_over_the_decoded_tokens(fmt):
    cache = cache_of(fmt, VecInferCodebooks.random(fmt, 2, HEADS, DIM, 1), layer=1)
    cache.update_and_fetch(rows(100, 1), rows(100, 2))
    keys, values = cache.update_and_fetch(rows(3, 3), rows(3, 4))
    assert not mx.array_equal(keys[:, :, :80], rows(100, 1)[:, :, :80])
    queries = mx.random.normal((1, 3 * HEADS, 3, DIM))
    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.125, mask="causal")
    assert mx.abs(cache.attend(queries, 0.125, "causal") - expected).max().item() < 1e-3


def test_a_saved_cache_comes_back_while_its_codebooks_are_loaded(tmp_path):
    file = str(tmp_path / "cache.safetensors")
    codebooks = VecInferCodebooks.random("vecinfer2", 3, HEADS, DIM, 2)
    cache = cache_of("vecinfer2", codebooks, layer=2)
    for seed in (1, 2):
        cache.update_and_fetch(rows(50, seed), rows(50, seed + 10))
    save_prompt_cache(file, [cache])
    (back,) = load_prompt_cache(file)
    assert back.config == cache.config and back.config.layer == 2 and back.offset == 100
    more = rows(1, 5)
    for got, kept in zip(back.update_and_fetch(more, more), cache.update_and_fetch(more, more)):
        assert mx.array_equal(got, kept)
    identity = f"{codebooks.identity:016x}"
    del cache, back, codebooks, got, kept
    gc.collect()
    with pytest.raises(ValueError, match=f"codebooks {identity}, which neither come with kvpool nor are loaded"):
        load_prompt_cache(file)


def test_other_codebooks_than_a_state_was_coded_with_are_refused():
    one = cache_of("vecinfer2", VecInferCodebooks.random("vecinfer2", 1, HEADS, DIM, 1))
    one.update_and_fetch(rows(50, 1), rows(50, 2))
    other = cache_of("vecinfer2", VecInferCodebooks.random("vecinfer2", 1, HEADS, DIM, 2))
    with pytest.raises(ValueError, match="of another configuration"):
        other.state = one.state


def test_a_format_without_codebooks_says_how_to_get_them():
    with pytest.raises(ValueError, match="kvpool calibrate"):
        cache_of("vecinfer2", None)
    with pytest.raises(ValueError, match="needs codebooks of that format, got vecinfer1"):
        cache_of("vecinfer2", VecInferCodebooks.random("vecinfer1", 1, HEADS, DIM, 1))


def test_streams_are_checked():
    def stream(**changes):
        arrays = {
            "codes": mx.array([[4, 8]], mx.int32),
            "centroids": mx.zeros((256 * 4,), mx.int8),
            "scales": mx.ones((1,)),
            "codebook_of": mx.zeros((1, HEADS), mx.int32),
            "smooth": mx.ones((1, HEADS, DIM)),
            "mean": mx.zeros((1, HEADS, DIM)),
        }
        return VecInferStream(**{**arrays, **changes})

    assert VecInferCodebooks("vecinfer2", stream(), stream()).nbytes > 2 * 256 * 4
    with pytest.raises(ValueError, match="values: mean must be"):
        VecInferCodebooks("vecinfer2", stream(), stream(mean=mx.zeros((1, HEADS, 32))))


@pytest.mark.parametrize("method", FORMATS)
def test_standalone_caches_take_codebooks(method):
    builder = KVCacheBuilder().with_method(method).with_head_dim(32).with_window(8)
    with pytest.raises(ValueError, match="kvpool calibrate"):
        builder.build()
    codebooks = VecInferCodebooks.random(method, 1, 1, 32, 5)
    given = builder.with_codebooks(codebooks).build()
    drawn = KVCacheBuilder().with_method(method).with_head_dim(32).with_window(8).with_random_codebooks(5).build()
    for t in range(100):
        k, v = mx.random.normal((32,)), mx.random.normal((32,))
        given.append(k, v)
        drawn.append(k, v)
    q = mx.random.normal((32,))
    assert mx.array_equal(given.attend(q), drawn.attend(q))
    assert given.memory_bytes() < 100 * 32 * 2 * 2
