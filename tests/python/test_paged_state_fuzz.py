"""A saved state with one thing in it changed: a ValueError that leaves all as it was, or a cache that is consistent."""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpool import BlockPoolAllocator, BlockPoolExhaustedError, PoolConfig
from kvpool._core import PagedKVCacheConfig, PagedStorage
from kvpool.paged_cache import PagedKVCache

HEADS, KEY_DIM, VALUE_DIM = 2, 32, 40

CONFIGS = {
    "raw": PagedKVCacheConfig(),
    "int4_kivi2": PagedKVCacheConfig("int4", "kivi2", window=4, sink=2),
    "raw_int8": PagedKVCacheConfig("raw", "int8", window=0, sink=0, hadamard=True),
    "sliding": PagedKVCacheConfig("kivi4", "int2", window=0, sink=0, sliding_window=9),
}


def tokens(n, batch, dim, seed):
    return mx.random.normal((batch, HEADS, n, dim), key=mx.random.key(seed))


def append(cache, n, seed=0):
    return cache.update_and_fetch(
        tokens(n, cache.n_rows, KEY_DIM, seed), tokens(n, cache.n_rows, VALUE_DIM, seed + 1000)
    )


def new_storage(grow=True, n_blocks=2):
    return PagedStorage(BlockPoolAllocator(PoolConfig(block_size=4, n_blocks=n_blocks, grow_on_exhaustion=grow)))


def saved(config, batch=2):
    """A state as load_prompt_cache would hand it over: 19 tokens a row, the last three one by one."""
    cache = PagedKVCache(new_storage(), config)
    cache.update_and_fetch(tokens(16, batch, KEY_DIM, 1), tokens(16, batch, VALUE_DIM, 2))
    for i in range(3):
        append(cache, 1, seed=10 + i)
    return plain(cache.state)


def plain(state):
    if isinstance(state, (int, str, mx.array)):
        return state
    return [plain(part) for part in state]


STATES = {name: saved(config) for name, config in CONFIGS.items()}


def paths(state, path=()):
    """Where there is something to change: everything, whole lists included."""
    yield path
    if isinstance(state, list):
        for i, part in enumerate(state):
            yield from paths(part, (*path, i))


def get(state, path):
    for i in path:
        state = state[i]
    return state


def put(state, path, value):
    if not path:
        return value
    state = list(state)
    state[path[0]] = put(state[path[0]], path[1:], value)
    return state


INTEGERS = st.one_of(
    st.integers(-3, 70), st.sampled_from([2**31 - 1, 2**31, 2**32 + 4, 2**62, 2**63 - 1, -(2**63), 2**64, 10**30])
)
ANYTHING = st.one_of(
    INTEGERS,
    st.none(),
    st.floats(),
    st.booleans(),
    st.sampled_from(["", "raw", "int4", "int8", "kivi2", "fp32", "float32", "bfloat16", "x"]),
    st.just([]),
    st.just([[], []]),
    st.just(mx.array([])),
)


@st.composite
def changed_array(draw, array):
    values = np.array(array)
    kind = draw(st.sampled_from(["element", "shorter", "longer", "dtype", "shape", "swap"]))
    if kind == "element":
        if array.dtype == mx.int64:
            values[draw(st.integers(0, values.size - 1))] = draw(INTEGERS.filter(lambda n: -(2**63) <= n < 2**63))
        else:
            for _ in range(draw(st.integers(1, 40))):
                values[draw(st.integers(0, values.size - 1))] = draw(st.integers(0, 255))
    elif kind == "shorter":
        values = values[: draw(st.integers(0, values.size - 1))]
    elif kind == "longer":
        values = np.concatenate([values, values[: draw(st.integers(1, values.size))]])
    elif kind == "swap":
        i, j = draw(st.integers(0, values.size - 1)), draw(st.integers(0, values.size - 1))
        values[[i, j]] = values[[j, i]]
    elif kind == "dtype":
        return array.astype(draw(st.sampled_from([mx.float32, mx.int32, mx.int8, mx.uint64])))
    else:
        return draw(st.sampled_from([array.reshape(1, -1), array[None, None], array[:1].reshape(())]))
    return mx.array(values)


@st.composite
def changed(draw, state):
    path = draw(st.sampled_from(list(paths(state))))
    old = get(state, path)
    if isinstance(old, mx.array):
        return put(state, path, draw(st.one_of(changed_array(old), changed_array(old), ANYTHING)))
    if isinstance(old, list) and draw(st.booleans()):
        i = draw(st.integers(0, len(old) - 1))
        return put(state, path, draw(st.sampled_from([old[:i] + old[i + 1 :], old[:i] + [old[i]] + old[i:]])))
    return put(state, path, draw(ANYTHING))


def books(storage):
    pool = storage.pool
    return repr(pool.stats), pool.n_free("k"), pool.n_free("v"), storage.resident_bytes()


def contents(cache):
    return [np.array(array) for array in cache.keys_and_values()]


def require_consistent(cache):
    """It can be read, attended, appended to, shortened and given back."""
    length = cache.offset
    if length == 0:
        append(cache, 1)
        return
    rows = cache.n_rows
    keys, values = contents(cache)
    assert keys.shape[:2] == values.shape[:2] == (rows, HEADS) and keys.shape[2] == values.shape[2] <= length
    queries = tokens(1, rows, keys.shape[3], 5).astype(cache.keys_and_values()[0].dtype)
    attended = np.array(cache.attend(queries, 0.1, "causal").astype(mx.float32))
    assert attended.shape == (rows, HEADS, 1, values.shape[3])
    if keys.shape[3:] + values.shape[3:] == (KEY_DIM, VALUE_DIM):
        fetched, _ = append(cache, 3)
        mx.eval(fetched)
        assert cache.offset == length + 3
    cache.trim(2)
    again = PagedKVCache.from_state(plain(cache.state))
    for mine, theirs in zip(contents(cache), contents(again)):
        n = min(mine.shape[2], theirs.shape[2])  # of a window, an append keeps more until the next one
        assert mine[:, :, mine.shape[2] - n :].tobytes() == theirs[:, :, theirs.shape[2] - n :].tobytes()


@pytest.mark.parametrize("name", CONFIGS)
def test_an_unchanged_state_restores(name):
    cache = PagedKVCache.from_state(STATES[name])
    assert cache.offset == 19 and cache.n_rows == 2
    require_consistent(cache)


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_a_changed_state_is_refused_whole_or_restores_whole(name, data):
    state = data.draw(changed(STATES[name]))
    storage = new_storage()
    other = PagedKVCache(storage, CONFIGS[name])
    append(other, 7)
    cache = PagedKVCache(storage, CONFIGS[name])
    cache.update_and_fetch(tokens(5, 2, KEY_DIM, 3), tokens(5, 2, VALUE_DIM, 4))
    held, others = contents(cache), contents(other)
    before = books(storage)
    try:
        cache.state = state
    except ValueError:
        assert books(storage) == before and cache.offset == 5
        assert all(now.tobytes() == then.tobytes() for now, then in zip(contents(cache), held))
    else:
        require_consistent(cache)
    assert all(now.tobytes() == then.tobytes() for now, then in zip(contents(other), others))
    cache.release()
    other.release()
    assert storage.pool.stats.blocks_in_use() == 0


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_a_cache_from_a_changed_state_is_consistent(name, data):
    try:
        cache = PagedKVCache.from_state(data.draw(changed(STATES[name])))
    except ValueError:
        return
    require_consistent(cache)


@pytest.mark.parametrize("version", [0, 2, 10**6, -1])
def test_another_version_is_refused_by_name(version):
    with pytest.raises(ValueError, match=f"version {version}, this kvpool reads version 1"):
        PagedKVCache.from_state([version, "of", "another", "shape", "altogether"])


def test_an_exhausted_pool_loses_nothing():
    storage = new_storage(grow=False, n_blocks=16)  # 8 of each: the state's rows need 5 each
    cache = PagedKVCache(storage)
    cache.update_and_fetch(tokens(5, 2, KEY_DIM, 3), tokens(5, 2, VALUE_DIM, 4))
    held, free = contents(cache), storage.pool.n_free()
    with pytest.raises(BlockPoolExhaustedError):
        cache.state = STATES["raw"]
    assert cache.offset == 5 and storage.pool.n_free() == free
    assert all(now.tobytes() == then.tobytes() for now, then in zip(contents(cache), held))


def test_what_was_held_is_given_back():
    storage = new_storage()
    cache = PagedKVCache(storage, CONFIGS["raw"])
    append(cache, 50)
    fork = copy.deepcopy(cache)
    cache.state = STATES["raw"]
    fork.release()
    assert (cache.n_rows, cache.offset, storage.pool.stats.blocks_in_use()) == (2, 19, 2 * 2 * 5)
