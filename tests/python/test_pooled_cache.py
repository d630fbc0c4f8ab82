"""PooledKVCache around caches of this package and around Python objects."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import weakref

import mlx.core as mx
import pytest

from kvpool import (
    BlockPoolAllocator,
    BlockPoolExhaustedError,
    KVCacheBuilder,
    MLXBlockStorage,
    PoolBackedKVCache,
    PoolConfig,
    PooledKVCache,
)


class ListCache:
    """Keeps what it gets; fails when told to."""

    def __init__(self):
        self.keys, self.values, self.fails_on = [], [], None

    def append_key(self, k):
        if self.fails_on == "key":
            raise OSError("no key")
        self.keys.append(k)

    def append_value(self, v):
        if self.fails_on == "value":
            raise OSError("no value")
        self.values.append(v)

    def attend(self, q):
        weights = mx.softmax(mx.stack(self.keys) @ q)
        return weights @ mx.stack(self.values)

    def memory_bytes(self):
        return sum(a.nbytes for a in self.keys + self.values)

    def reset(self):
        self.keys, self.values = [], []


class DroppingCache(ListCache):
    def drop_last_key(self):
        self.keys.pop()
        return True


def make_pool(n_blocks=64):
    return BlockPoolAllocator(PoolConfig(block_size=4, n_blocks=n_blocks))


VECTOR = mx.ones(8, mx.float16)


@pytest.mark.parametrize(
    "make_inner", [ListCache, lambda: KVCacheBuilder().with_method("kivi").with_head_dim(64).build()]
)
def test_checks_out_blocks_in_step_with_tokens(make_inner):
    pool, inner = make_pool(), make_inner()
    vector = mx.ones(8 if isinstance(inner, ListCache) else 64, mx.float16)
    cache = PooledKVCache(inner, pool, owner=7, format="int2")
    assert cache.inner is inner and cache.owner == 7
    for n in range(1, 10):
        cache.append_key(vector)
        cache.append_value(vector)
        assert cache.n_blocks_held() == len(pool.blocks_for(7)) == 2 * -(-n // 4)
    assert {block.format for block in pool.blocks_for(7)} == {"int2"}
    assert len(cache) == 9
    assert mx.allclose(cache.attend(vector), vector, atol=1e-2)
    assert cache.memory_bytes() == inner.memory_bytes() > 0
    cache.release()
    assert cache.n_blocks_held() == 0 and len(cache) == 9
    cache.reset()
    assert len(cache) == 0 and cache.memory_bytes() == 0
    assert pool.stats.blocks_in_use() == 0


@pytest.mark.parametrize("inner_class", [ListCache, DroppingCache])
def test_if_blocks_of_either_stream_run_out_nothing_has_changed(inner_class):
    for n_blocks in (2, 3):
        pool, inner = make_pool(n_blocks), inner_class()
        cache = PooledKVCache(inner, pool, owner=1)
        for _ in range(4):
            cache.append(VECTOR, VECTOR)
        with pytest.raises(BlockPoolExhaustedError):
            cache.append(VECTOR, VECTOR)
        assert len(inner.keys) == len(inner.values) == len(cache) == 4
        assert pool.stats.blocks_in_use() == cache.n_blocks_held() == 2


@pytest.mark.parametrize("n_before", [0, 3, 4])
@pytest.mark.parametrize("fails_on", ["key", "value"])
def test_what_the_inner_cache_raises_passes_through_and_nothing_has_changed(fails_on, n_before):
    pool, inner = make_pool(), DroppingCache()
    cache = PooledKVCache(inner, pool, owner=1)
    for _ in range(n_before):
        cache.append(VECTOR, VECTOR)
    held = cache.n_blocks_held()
    inner.fails_on = fails_on
    with pytest.raises(OSError, match=f"no {fails_on}"):
        cache.append(VECTOR, VECTOR)
    assert len(inner.keys) == len(inner.values) == len(cache) == n_before
    assert cache.n_blocks_held() == pool.stats.blocks_in_use() == held
    inner.fails_on = None
    cache.append(VECTOR, VECTOR)
    assert len(cache) == n_before + 1


def test_an_object_without_the_methods_is_refused():
    class Half:
        append_key = append_value = attend = memory_bytes = None

    with pytest.raises(ValueError, match="it has no reset"):
        PooledKVCache(Half(), make_pool())


def test_blocks_go_back_with_the_cache():
    pool = make_pool()
    cache = PooledKVCache(ListCache(), pool, owner=1)
    cache.append(VECTOR, VECTOR)
    del cache
    gc.collect()
    assert pool.stats.blocks_in_use() == 0


@pytest.mark.parametrize("n_wrappers", [1, 2])
def test_a_cycle_through_the_inner_cache_is_collected(n_wrappers):
    pool, inner = make_pool(), ListCache()
    cache = inner
    for _ in range(n_wrappers):
        cache = PooledKVCache(cache, pool, owner=1)
    cache.append(VECTOR, VECTOR)
    inner.outer = cache
    gone = weakref.ref(inner)
    del cache, inner
    gc.collect()
    assert gone() is None
    assert pool.stats.blocks_in_use() == 0


def test_nothing_keeps_a_pool_alive_that_it_should_not():
    class Pool(BlockPoolAllocator):
        pass

    def use(pool):
        blocks = pool.allocate("k", 40, owner=1)
        shared = pool.share(blocks, 9)
        storage = MLXBlockStorage(pool, 8)
        storage.write(blocks[0], 0, mx.ones((3, 8)))
        cache = PooledKVCache(PooledKVCache(ListCache(), pool, owner=4), pool, owner=2)
        cache.append(VECTOR, VECTOR)
        backed = PoolBackedKVCache(pool, owner=3)
        backed.update_and_fetch(mx.ones((1, 2, 3, 4)), mx.ones((1, 2, 3, 4)))
        fork = copy.deepcopy(backed)
        with pytest.raises(BlockPoolExhaustedError):
            pool.allocate("k", 10**6, owner=1)
        with pytest.raises(ValueError):
            backed.update_and_fetch(mx.ones(3), mx.ones(3))
        return [shared, storage.read(blocks[0]), cache, fork.state, pool.stats, pool.history, repr(storage)]

    pool = Pool(PoolConfig(n_blocks=512))
    gone = weakref.ref(pool)
    kept = use(pool)
    del pool
    gc.collect()
    assert gone() is not None, "blocks, caches and live counters keep it"
    del kept
    gc.collect()
    assert gone() is None


SCRIPT = """
import mlx.core as mx
from kvpool import *

class Inner:
    def __init__(self): self.n = 0
    def append_key(self, k): self.n += 1
    def append_value(self, v): pass
    def attend(self, q): return q
    def memory_bytes(self): return self.n
    def reset(self): self.n = 0

pool = BlockPoolAllocator(PoolConfig(n_blocks=4096))
stats, history = pool.stats, pool.history
blocks = pool.allocate("k", 40, owner=1)
storage = MLXBlockStorage(pool, 8)
storage.write(blocks[0], 0, mx.ones((3, 8)))
read = storage.read(blocks[0])
buffers = MlxBufferPool()
buffer = buffers.alloc(mx.Device(mx.cpu), 64, mx.uint8, (64,))
array = buffer.array
cache = PooledKVCache(Inner(), pool, owner=2)
cache.append(mx.ones(8), mx.ones(8))
backed = PoolBackedKVCache(pool, owner=3)
backed.update_and_fetch(mx.ones((1, 2, 3, 4)), mx.ones((1, 2, 3, 4)))
state = backed.state
try:
    pool.allocate("k", 10**6, owner=1)
except BlockPoolExhaustedError as error:
    kept = error
"""


def test_a_script_that_keeps_everything_to_its_end_ends_quietly():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
