"""Inputs that cannot be evaluated, or hold what a format cannot store: they stop one request, not its storage."""

from __future__ import annotations

import threading

import mlx.core as mx
import pytest
from kvpool import (
    BlockPoolAllocator,
    KVCacheBuilder,
    KVCacheConfig,
    KVCacheFactory,
    PagedKVCache,
    PagedKVCacheConfig,
    PagedStorage,
    PoolConfig,
)
from kvpool import mlx_lm as paged
from kvpool.paged_cache import BatchPagedKVCache
from paged_models import prompt, tiny_model


@pytest.fixture
def storage():
    return PagedStorage(BlockPoolAllocator(PoolConfig(block_size=4, n_blocks=2, grow_on_exhaustion=True)))


def tokens(n, seed=0, rows=1):
    return mx.random.normal((rows, 2, n, 32), key=mx.random.key(seed))


def of_another_thread(n):
    """Tokens whose work waits on a stream that ended with its thread: MLX cannot evaluate them."""
    made = []

    def make():
        with mx.stream(mx.new_stream(mx.cpu)):
            made.append(tokens(n) + 1)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made[0]


def test_a_failed_evaluation_holds_up_a_storage_until_it_recovers(storage):
    good, bad = PagedKVCache(storage), PagedKVCache(storage)
    good.update_and_fetch(tokens(6), tokens(6))
    bad.update_and_fetch(tokens(2), tokens(2))
    lost = of_another_thread(3)
    bad.update_and_fetch(lost, lost)
    keys, values = good.update_and_fetch(tokens(1, 1), tokens(1, 1))
    out = good.attend(tokens(1, 2), 0.2)
    for array in (out, keys, good.state):
        with pytest.raises(RuntimeError, match="Stream"):
            mx.eval(array)
    assert storage.recover() == 1
    assert storage.recover() == 0
    assert mx.array_equal(keys, mx.concatenate([tokens(6), tokens(1, 1)], 2))
    assert mx.allclose(out, mx.fast.scaled_dot_product_attention(tokens(1, 2), keys, values, scale=0.2), atol=1e-5)
    assert bad.trim(3) == 3
    assert mx.array_equal(bad.update_and_fetch(tokens(1), tokens(1))[0], mx.concatenate([tokens(2), tokens(1)], 2))


def test_a_request_that_is_not_trimmed_attends_to_nan(storage):
    bad = PagedKVCache(storage)
    lost = of_another_thread(3)
    bad.update_and_fetch(lost, lost)
    storage.recover()
    assert mx.all(mx.isnan(bad.attend(tokens(1), 0.2))).item()


def test_an_error_in_a_task_spoils_nothing_but_its_own_rows(storage):
    good, bad = PagedKVCache(storage), PagedKVCache(storage)
    good.update_and_fetch(tokens(6), tokens(6))
    singular = mx.linalg.inv(mx.zeros((32, 32)), stream=mx.cpu)
    bad.update_and_fetch(tokens(3) @ singular, tokens(3))
    out = good.attend(tokens(1, 2), 0.2)

    def reported(*calls):
        errors = []
        for call in calls:
            try:
                call()
            except RuntimeError as error:
                errors.append(str(error))
        return errors

    # MLX reports it wherever it is asked next, now and then more than once.
    errors = reported(lambda: mx.eval(bad.state, out), mx.synchronize)
    assert errors and all("LU factorization" in error for error in errors)
    reported(storage.recover, mx.synchronize)
    keys, values = good.keys_and_values()
    assert mx.array_equal(keys, tokens(6))
    assert mx.allclose(out, mx.fast.scaled_dot_product_attention(tokens(1, 2), keys, values, scale=0.2), atol=1e-5)


@pytest.mark.parametrize("traced", [mx.compile, mx.vmap, lambda f: mx.grad(lambda x: f(x).sum())])
def test_a_cache_refuses_to_be_traced(storage, traced):
    cache = PagedKVCache(storage)
    rows = tokens(3)
    cache.update_and_fetch(rows, rows)

    def append(x):
        return cache.update_and_fetch(x, x)[0]

    def attend(x):
        return cache.attend(x, 0.2)

    for call in (append, attend):
        with pytest.raises(ValueError, match="inside mx.compile, mx.grad, mx.vmap"):
            traced(call)(rows[None] if traced is mx.vmap else rows)
    assert mx.array_equal(cache.update_and_fetch(rows, rows)[0], mx.concatenate([rows, rows], 2))


NAN = float("nan")


def test_check_finite_names_the_token_and_changes_nothing(storage):
    cache = PagedKVCache(storage, PagedKVCacheConfig("raw", "int4", window=0, sink=0, check_finite=True))
    rows = tokens(6)
    bad = mx.array(rows)
    bad[0, 1, 4, 7] = NAN
    in_use = storage.pool.stats.blocks_in_use()
    with pytest.raises(ValueError, match="values of row 0, column 4, head 1 must be finite .* int4 cannot store"):
        cache.update_and_fetch(rows, bad)
    assert cache.empty() and storage.pool.stats.blocks_in_use() == in_use
    keys, _ = cache.update_and_fetch(bad, rows)
    assert mx.isnan(keys[0, 1, 4, 7]).item()


def test_check_finite_finds_what_cannot_be_evaluated_before_it_is_appended(storage):
    cache = PagedKVCache(storage, PagedKVCacheConfig("int4", "int4", check_finite=True))
    lost = of_another_thread(3)
    with pytest.raises(RuntimeError, match="Stream"):
        cache.update_and_fetch(lost, lost)
    assert cache.empty() and storage.pool.stats.blocks_in_use() == 0
    assert mx.array_equal(cache.update_and_fetch(tokens(3), tokens(3))[0], tokens(3))


def test_check_finite_goes_with_copies_batches_and_generation(storage):
    model = tiny_model("llama")
    caches = paged.make_prompt_cache(model, storage, format="int8", window=0, check_finite=True)
    assert all(cache.config.check_finite for cache in caches)
    with paged.install():
        model(prompt(20)[None], cache=caches)
        model.layers[1].self_attn.v_proj.weight *= NAN
        with pytest.raises(ValueError, match="values of row 0, column 0"):
            model(prompt(5)[None], cache=caches)
    assert caches[1].offset == 20
    batch = PagedKVCache.merge([caches[1]])
    assert isinstance(batch, BatchPagedKVCache) and batch.config.check_finite


def test_a_saved_state_restores_whether_checked_or_not(storage):
    saved = PagedKVCache(storage, PagedKVCacheConfig("int4", "int4", check_finite=True))
    saved.update_and_fetch(tokens(6), tokens(6))
    plain, checked = PagedKVCache(storage, PagedKVCacheConfig("int4", "int4")), PagedKVCache(storage, saved.config)
    for cache in (plain, checked):
        cache.state = saved.state
        assert cache.offset == 6
    bad = tokens(1) * NAN
    plain.update_and_fetch(bad, bad)
    with pytest.raises(ValueError, match="must be finite"):
        checked.update_and_fetch(bad, bad)


def test_check_finite_of_standalone_caches():
    builder = KVCacheBuilder().with_method("int4").with_head_dim(32).with_check_finite(True)
    assert builder.config == KVCacheConfig("int4", 32, check_finite=True)
    good, bad = mx.ones((32,)), mx.full((32,), NAN)
    for cache in (builder.build(), KVCacheFactory.create(builder.config)):
        cache.append(good, good)
        with pytest.raises(ValueError, match="values of row 0, column 0, head 0"):
            cache.append(good, bad)
        with pytest.raises(ValueError, match="keys of row 0"):
            cache.append(bad, good)
        assert mx.allclose(cache.attend(good), mx.ones((32,)))
    unchecked = KVCacheBuilder().with_method("int4").with_head_dim(32).build()
    unchecked.append(good, bad)
    assert mx.all(mx.isnan(unchecked.attend(good))).item()
