"""A day in the life of a full pool."""

from __future__ import annotations

import copy
import random

import mlx.core as mx
from kvpool import BlockPoolAllocator, BlockPoolExhaustedError, PoolConfig
from kvpool._core import PagedKVCacheConfig, PagedStorage
from kvpool.paged_cache import PagedKVCache

N_REQUESTS = 2000
N_BLOCKS = 600
LOAD = 0.95
CONFIG = PagedKVCacheConfig("int4", "int4", window=8, sink=4)
ROWS = mx.random.normal((1, 1, 32, 16), key=mx.random.key(0))


def append(cache, n):
    cache.update_and_fetch(ROWS[:, :, :n], ROWS[:, :, :n])
    return cache.attend(ROWS[:, :, :1], 1.0)


def test_two_thousand_requests_leave_nothing_behind():
    pool = BlockPoolAllocator(PoolConfig(block_size=4, n_blocks=N_BLOCKS))
    storage = PagedStorage(pool)
    chance = random.Random(1)
    prefixes = [PagedKVCache(storage, CONFIG) for _ in range(3)]
    for cache in prefixes:
        append(cache, chance.randint(8, 30))
    running, n_started, peak, active = [], 0, 0, []
    n_refused = n_full = 0
    while n_started < N_REQUESTS or running:
        if n_started < N_REQUESTS and pool.stats.blocks_in_use() < LOAD * N_BLOCKS:
            shared = chance.random() < 0.5
            request = copy.deepcopy(chance.choice(prefixes)) if shared else PagedKVCache(storage, CONFIG)
            running.append(request)
            n_started += 1
        else:
            n_full += n_started < N_REQUESTS
            running.pop(chance.randrange(len(running)))  # done or cancelled
        if running:
            request = chance.choice(running)
            length, in_use = request.offset, pool.stats.blocks_in_use()
            try:
                out = append(request, chance.randint(1, 24))
            except BlockPoolExhaustedError:
                n_refused += 1
                assert (request.offset, pool.stats.blocks_in_use()) == (length, in_use)
                running.remove(request)
            else:
                if chance.random() < 0.2:
                    mx.async_eval(out)
            if chance.random() < 0.2:
                request.trim(chance.randint(0, 12))
            del request
        peak = max(peak, pool.stats.blocks_in_use())
        if n_started % 250 == 0 and n_started < N_REQUESTS:
            mx.eval(prefixes[0].state)
            active.append(mx.get_active_memory())
    assert peak > LOAD * N_BLOCKS and n_full > N_REQUESTS / 2
    for cache in prefixes:
        cache.release()
    mx.eval(prefixes[0].state)
    mx.synchronize()
    assert pool.stats.blocks_in_use() == 0
    assert storage.resident_bytes() == 0
    half = len(active) // 2
    assert max(active[half:]) < 1.25 * max(active[:half])
