"""MlxBufferPool from Python: seed 003's calls, with its gaps closed."""

from __future__ import annotations

import threading

import mlx.core as mx
import pytest

from kvpool import MlxBufferPool, StaleBufferError

CPU = mx.Device(mx.cpu)


def alloc(pool, n_bytes):
    return pool.alloc(CPU, n_bytes, mx.uint8, (n_bytes,))


def test_a_buffer_is_an_array_of_zeros_of_the_shape_asked_for():
    buffer = MlxBufferPool().alloc(CPU, 100, mx.float16, [3, 4, 2])
    assert (buffer.byte_len, buffer.capacity, buffer.shape, buffer.dtype) == (100, 128, (3, 4, 2), mx.float16)
    array = buffer.array
    assert isinstance(array, mx.array)
    assert array.shape == (3, 4, 2) and array.dtype == mx.float16
    assert mx.array_equal(array, mx.zeros((3, 4, 2)))
    assert (array + 1).sum().item() == 24


def test_the_arena_of_the_seed_allocates_nothing_once_warm():
    pool = MlxBufferPool()
    created = []
    for _ in range(5):
        pool.reset()
        for i in range(50):
            alloc(pool, 100 + i)
        created.append(pool.created_bytes())
    assert created == [29 * 128 + 21 * 256] * 5
    assert pool.in_use_count() == 50


def test_p10_reuse_is_bounded():
    pool = MlxBufferPool()
    pool.release(alloc(pool, 256 * 1024))
    kept = alloc(pool, 8 * 1024)
    alloc(pool, 256 * 1024)
    assert pool.created_bytes() == 264 * 1024
    assert kept.live


def test_release_and_reset_mix():
    pool = MlxBufferPool()
    a, b = alloc(pool, 64), alloc(pool, 64)
    pool.release(a)
    pool.release(a)
    pool.reset()
    assert (pool.free_count(), pool.free_bytes(), pool.in_use_count()) == (2, 128, 0)
    for handle in (a, b):
        assert not handle.live
        with pytest.raises(StaleBufferError):
            _ = handle.array if handle is b else pool.release(b)
    pool.clear()
    assert (pool.free_count(), pool.free_bytes()) == (0, 0)


def test_an_array_that_outlives_reset_is_never_aliased():
    pool = MlxBufferPool()
    kept = alloc(pool, 64).array
    later = alloc(pool, 64).array + 3
    pool.reset()
    assert pool.free_count() == 0
    assert mx.array_equal(kept, mx.zeros(64)) and mx.array_equal(later, mx.full(64, 3))


@pytest.mark.parametrize("n_bytes", [0, 2**63, 2**64 - 1])
def test_sizes_that_cannot_be(n_bytes):
    with pytest.raises(ValueError, match="byte_len must be 1 to"):
        MlxBufferPool().alloc(CPU, n_bytes, mx.uint8, (1,))


def test_other_arguments_that_cannot_be():
    pool = MlxBufferPool()
    with pytest.raises(TypeError):
        pool.alloc(CPU, -1, mx.uint8, (1,))
    with pytest.raises(ValueError, match="at least the 400 bytes"):
        pool.alloc(CPU, 399, mx.float32, (100,))
    with pytest.raises(ValueError, match="negative"):
        pool.alloc(CPU, 399, mx.float32, (-1,))
    with pytest.raises(ValueError, match="another pool"):
        pool.release(alloc(MlxBufferPool(), 8))
    assert pool.created_bytes() == 0


def test_memory_that_the_system_refuses_is_not_counted():
    pool = MlxBufferPool()
    active = mx.get_active_memory()
    with pytest.raises(MemoryError):
        pool.alloc(CPU, 2**60, mx.uint8, (1,))
    assert mx.get_active_memory() == active and pool.created_bytes() == 0


def test_a_batch_is_all_or_nothing():
    pool = MlxBufferPool()
    with pytest.raises(ValueError):
        pool.alloc_batch(CPU, [(64, mx.uint8, (64,)), (0, mx.uint8, (0,))])
    assert pool.in_use_count() == 0
    a, b = pool.alloc_batch(CPU, [(64, mx.uint8, (64,)), (16, mx.float32, (2, 2))])
    assert (a.shape, b.shape, pool.in_use_count()) == ((64,), (2, 2), 2)


def test_the_cap():
    pool = MlxBufferPool(max_free_bytes=128)
    for _ in range(3):
        alloc(pool, 64)
    pool.reset()
    assert pool.free_bytes() == pool.max_free_bytes == 128


def test_eight_threads():
    pool = MlxBufferPool()
    errors = []

    def work():
        try:
            for i in range(500):
                buffer = alloc(pool, i % 300 + 1)
                assert buffer.live and buffer.array.size == i % 300 + 1
                pool.release(buffer)
                assert not buffer.live
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert pool.in_use_count() == 0
