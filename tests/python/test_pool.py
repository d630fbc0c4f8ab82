"""The pool as Python sees it: signatures, live views, errors, threads, lifetimes. The books: tests/unit/pool."""

from __future__ import annotations

import ast
import collections
import gc
import inspect
import random
import subprocess
import sys
import threading
from pathlib import Path

import kvpool
import mlx.core as mx
import pytest
from kvpool import (
    AllocationStats,
    Block,
    BlockPoolAllocator,
    BlockPoolExhaustedError,
    OwnerAlreadyActiveError,
    PoolBackedKVCache,
    PoolConfig,
    build_pooled_caches,
)

# As seed 001 writes them.
SEED = {
    "PoolConfig.__init__": "block_size=16, n_blocks=1024, separate_kv=True, grow_on_exhaustion=False, max_blocks=None",
    "AllocationStats.__init__": "n_blocks, n_allocations=0, n_frees=0, n_reused=0, n_exhausted=0, n_grown=0, "
    "n_retired=0, peak_blocks_in_use=0, _fragmented_count=0",
    "AllocationStats.blocks_in_use": "",
    "AllocationStats.fragmentation": "",
    "AllocationStats.snapshot": "",
    "AllocationStats.to_prometheus": "prefix='veloxquant_block_pool'",
    "Block.__init__": "block_id, stream='kv', format='fp16', n_used=0, owner=None, ever_allocated=False",
    "BlockPoolAllocator.__init__": "config=None",
    "BlockPoolAllocator.register_owner": "owner",
    "BlockPoolAllocator.release_owner": "owner",
    "BlockPoolAllocator.allocate": "stream, n_tokens, owner, format='fp16'",
    "BlockPoolAllocator.free": "blocks",
    "BlockPoolAllocator.free_all": "owner",
    "BlockPoolAllocator.blocks_for": "owner",
    "BlockPoolAllocator.n_free": "stream='k'",
    "BlockPoolAllocator.shrink": "stream, target_free",
    "BlockPoolAllocator.mark_used": "block, n_used",
    "PooledKVCache.__init__": "inner, pool, owner=-1, format='fp16'",
    "PooledKVCache.append_key": "k",
    "PooledKVCache.append_value": "v",
    "PooledKVCache.attend": "q",
    "PooledKVCache.memory_bytes": "",
    "PooledKVCache.release": "",
    "PooledKVCache.n_blocks_held": "",
    "PooledKVCache.reset": "",
    "PoolBackedKVCacheCore.__init__": "pool, owner=-1, step=None",
    "PoolBackedKVCacheCore.update_and_fetch": "keys, values",
    "PoolBackedKVCacheCore.release": "",
    "PoolBackedKVCacheCore.size": "",
    "PoolBackedKVCacheCore.trim": "n",
    "PoolBackedKVCacheCore.empty": "",
}


def pool_of(**config):
    return BlockPoolAllocator(PoolConfig(**config))


def ids(blocks):
    return [block.block_id for block in blocks]


@pytest.fixture
def busy_switching():
    """Threads change as often as the interpreter can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def run_in_threads(*functions):
    """Runs them at once; raises what one of them raised."""
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


# Signatures -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stub():
    """Class name → its part of the stub, which test_stubs.py compares with the extension."""
    tree = ast.parse((Path(kvpool.__file__).parent / "_core.pyi").read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def parameters(stub, class_name, method):
    functions = [n for n in stub[class_name].body if isinstance(n, ast.FunctionDef) and n.name == method]
    if not functions:
        return parameters(stub, stub[class_name].bases[0].id, method)
    (function,) = functions
    arguments = function.args.args[1:]
    defaults = [None] * (len(arguments) - len(function.args.defaults)) + function.args.defaults
    return ", ".join(a.arg + (f"={ast.unparse(d)}" if d else "") for a, d in zip(arguments, defaults))


@pytest.mark.parametrize("name", SEED)
def test_signatures_are_the_seeds(stub, name):
    assert parameters(stub, *name.split(".")) == SEED[name]


def test_signature_of_build_pooled_caches_is_the_seeds():
    assert list(inspect.signature(build_pooled_caches).parameters) == ["model", "pool", "owner", "step"]
    assert inspect.signature(build_pooled_caches).parameters["step"].default is None


def test_keywords_and_defaults_work_in_a_call():
    config = PoolConfig(block_size=4, n_blocks=6, separate_kv=True, grow_on_exhaustion=False, max_blocks=None)
    pool = BlockPoolAllocator(config=config)
    pool.register_owner(owner=1)
    blocks = pool.allocate(stream="v", n_tokens=5, owner=1, format="int2")
    assert [(b.stream, b.format, b.n_used) for b in blocks] == [("v", "int2", 4), ("v", "int2", 1)]
    assert pool.allocate("k", 1, 1)[0].format == "fp16"
    pool.mark_used(block=blocks[1], n_used=3)
    pool.free(blocks=blocks)
    assert (pool.n_free(), pool.n_free(stream="v")) == (2, 3)
    assert pool.shrink(stream="v", target_free=1) == 2
    assert ids(pool.blocks_for(owner=1)) == [0]
    pool.free_all(owner=1)
    pool.release_owner(owner=1)
    assert pool.stats == AllocationStats(
        n_blocks=4, n_allocations=3, n_frees=3, n_reused=0, n_exhausted=0, n_grown=0, n_retired=2, peak_blocks_in_use=3
    )


def test_a_pool_without_a_config_has_the_default_one():
    assert BlockPoolAllocator().config == BlockPoolAllocator(None).config == PoolConfig()
    config = PoolConfig()
    fields = ("block_size", "n_blocks", "separate_kv", "grow_on_exhaustion", "max_blocks")
    assert [getattr(config, field) for field in fields] == [16, 1024, True, False, None]


def test_the_pools_config_is_a_copy():
    config = PoolConfig(n_blocks=8)
    pool = BlockPoolAllocator(config)
    config.block_size = 1
    pool.config.block_size = 2
    assert pool.config.block_size == 16 and pool.config != config


@pytest.mark.parametrize("field, value", [("block_size", 0), ("n_blocks", 0), ("max_blocks", 1023)])
def test_a_config_spoilt_after_it_was_made_is_refused(field, value):
    config = PoolConfig()
    setattr(config, field, value)
    with pytest.raises(ValueError, match=field):
        BlockPoolAllocator(config)


# Statistics -----------------------------------------------------------------------------------------------


def test_stats_are_live_and_a_snapshot_is_not():
    pool = pool_of(n_blocks=8)
    stats, before = pool.stats, pool.stats.snapshot()
    pool.allocate("k", 17, 1)
    assert (stats.n_allocations, stats.blocks_in_use(), stats.fragmentation()) == (2, 2, 1 / 8)
    assert (before.n_allocations, before.blocks_in_use(), before.fragmentation()) == (0, 0, 0.0)
    assert stats == pool.stats and stats != before
    assert stats._fragmented_count == 1
    pool.free_all(1)
    assert stats.blocks_in_use() == 0 and stats.n_frees == 2 and stats.peak_blocks_in_use == 2


def test_stats_hold_what_they_were_made_with():
    stats = AllocationStats(10, 9, 4, 3, 2, 6, 7, 8, _fragmented_count=5)
    assert (stats.n_blocks, stats.n_allocations, stats.n_frees, stats.n_reused) == (10, 9, 4, 3)
    assert (stats.n_exhausted, stats.n_grown, stats.n_retired, stats.peak_blocks_in_use) == (2, 6, 7, 8)
    assert stats.blocks_in_use() == 5 and stats.fragmentation() == 0.5
    assert AllocationStats(0, _fragmented_count=0).fragmentation() == 0.0
    with pytest.raises(AttributeError):
        stats.n_blocks = 1


def test_history_is_a_bounded_deque_of_snapshots():
    pool = pool_of(n_blocks=4)
    assert pool.history == collections.deque()
    for _ in range(200):
        pool.allocate("k", 1, 1)
        pool.free_all(1)
    history = pool.history
    assert type(history) is collections.deque and history.maxlen == len(history) == 256
    assert all(type(stats) is AllocationStats for stats in history)
    assert [stats.n_allocations for stats in history] == [73 + i // 2 for i in range(256)]
    assert history[-1] == pool.stats
    history.clear()
    pool.allocate("k", 1, 1)
    assert len(pool.history) == 256 and pool.history[-2].blocks_in_use() == 0


# P1 to P4 of shared/faults.md -----------------------------------------------------------------------------


@pytest.mark.parametrize("in_one_call", [False, True])
def test_p1_a_block_is_released_once_by_its_current_holder(in_one_call):
    pool = pool_of(n_blocks=8)
    a = pool.allocate("k", 16, 1)
    if in_one_call:
        pool.free(a + a)
    else:
        pool.free(a)
        pool.free(a)
    b, c = pool.allocate("k", 16, 2), pool.allocate("k", 16, 3)
    assert ids(b) != ids(c)
    assert pool.n_free("k") == 2 and pool.stats.n_frees == 1


def test_p1_a_handle_whose_block_was_handed_on_frees_nothing():
    pool = pool_of(n_blocks=8)
    old = pool.allocate("k", 16, 1)
    pool.free(old)
    mine = pool.allocate("k", 16, 2)
    other = pool.allocate("k", 16, 3)
    assert ids(mine) == ids(old)
    with pytest.raises(ValueError, match=f"block {ids(old)[0]}: .*owner 2"):
        pool.free(other + old)
    assert pool.stats.n_frees == 1 and mine[0].owner == 2 and other[0].owner == 3


def test_p2_a_failed_allocation_leaves_no_trace():
    pool = pool_of(n_blocks=8)
    pool.allocate("k", 32, 1)
    before = pool.stats.snapshot()
    with pytest.raises(BlockPoolExhaustedError, match="need 3 block.* 2 are free"):
        pool.allocate("k", 48, 2)
    assert pool.n_free("k") == 2 and pool.stats.blocks_in_use() == 2
    assert pool.blocks_for(2) == []
    assert (before.n_exhausted, pool.stats.n_exhausted) == (0, 1)
    pool.register_owner(2)


def test_p2_keys_and_values_are_taken_together_or_not_at_all():
    pool = pool_of(n_blocks=8, grow_on_exhaustion=True, max_blocks=9)
    pool.allocate("v", 16, 1)
    with pytest.raises(BlockPoolExhaustedError):
        pool.allocate_kv(81, 2)  # 6 and 6; growth by one covers neither
    with pytest.raises(BlockPoolExhaustedError):
        pool.allocate_kv(80, 2)  # 5 and 5: growth covers the keys, not the values as well
    assert (pool.n_free("k"), pool.n_free("v"), pool.stats.n_blocks, pool.stats.n_grown) == (4, 3, 8, 0)
    assert pool.blocks_for(2) == []
    keys, values = pool.allocate_kv(n_tokens=50, owner=2, format="int4")
    assert [b.stream for b in keys + values] == ["k"] * 4 + ["v"] * 4
    assert {b.format for b in keys + values} == {"int4"} and keys[-1].n_used == values[-1].n_used == 2
    assert pool.stats.n_grown == 1


@pytest.mark.parametrize("n_blocks, n_rounds", [(64, 10_000), (16_384, 60)], ids=["as reported", "long calls overlap"])
@pytest.mark.parametrize("way", ["free_all", "free", "release"])
def test_p3_release_is_safe_against_other_threads(busy_switching, way, n_blocks, n_rounds):
    pool = pool_of(n_blocks=n_blocks)
    n_tokens = n_blocks // 2 * 16
    zeros = mx.zeros((1, 1, n_tokens, 8))
    start, finish = threading.Barrier(2), threading.Barrier(2)
    held, caches, wrong = [], [None], []

    def thread_a():
        for index in range(n_rounds):
            caches[0] = PoolBackedKVCache(pool, owner=5, step=n_tokens)
            caches[0].update_and_fetch(zeros, zeros)
            held[:] = pool.blocks_for(5)
            frees = pool.stats.n_frees
            distinct = len(set(ids(held)))
            start.wait()
            pool.free_all(5)
            finish.wait()
            risen, in_use = pool.stats.n_frees - frees, pool.stats.blocks_in_use()
            if (distinct, risen, in_use) != (n_blocks, n_blocks, 0):
                wrong.append((index, distinct, risen, in_use))

    def thread_b():
        for _ in range(n_rounds):
            start.wait()
            if way == "free_all":
                pool.free_all(5)
            elif way == "free":
                pool.free(held)
            else:
                caches[0].release()
            finish.wait()

    def or_else_the_other_stops(function):
        def run():
            try:
                function()
            except BaseException:
                start.abort()
                finish.abort()
                raise

        return run

    run_in_threads(or_else_the_other_stops(thread_a), or_else_the_other_stops(thread_b))
    assert wrong == []
    assert pool.stats.n_frees == pool.stats.n_allocations == n_blocks * n_rounds
    assert pool.n_free("k") == pool.n_free("v") == n_blocks // 2


def test_p4_counters_never_go_negative():
    pool = pool_of(n_blocks=8)
    k, v = pool.allocate("k", 48, 1), pool.allocate("v", 16, 1)
    pool.free([v[0], *k])
    assert pool.shrink("k", 2) == 2
    assert (pool.n_free("k"), pool.n_free("v")) == (2, 4)
    assert (pool.stats.blocks_in_use(), pool.stats.n_blocks, pool.stats.n_retired) == (0, 6, 2)


# Errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda pool, b: PoolConfig(block_size=0), "block_size .* got 0"),
        (lambda pool, b: PoolConfig(block_size=-16), "block_size .* got -16"),
        (lambda pool, b: PoolConfig(n_blocks=0), "n_blocks .* got 0"),
        (lambda pool, b: PoolConfig(n_blocks=2**40), f"n_blocks .* got {2**40}"),
        (lambda pool, b: PoolConfig(n_blocks=4, max_blocks=3), "max_blocks .* got 3"),
        (lambda pool, b: pool.allocate("k", 0, 1), "n_tokens .* got 0"),
        (lambda pool, b: pool.allocate("k", -1, 1), "n_tokens .* got -1"),
        (lambda pool, b: pool.allocate_kv(0, 1), "n_tokens .* got 0"),
        (lambda pool, b: pool.allocate("x", 1, 1), "stream .* got 'x'"),
        (lambda pool, b: pool.allocate("kv", 1, 1), "stream .* got 'kv'"),
        (lambda pool, b: pool.n_free("K"), "stream .* got 'K'"),
        (lambda pool, b: pool.shrink("", 1), "stream .* got ''"),
        (lambda pool, b: pool.shrink("k", -1), "target_free .* got -1"),
        (lambda pool, b: pool.mark_used(b, 17), "n_used .* got 17"),
        (lambda pool, b: pool.mark_used(b, -1), "n_used .* got -1"),
        (lambda pool, b: pool.mark_used(Block(3), 1), "block 3: .*not of this pool"),
        (lambda pool, b: pool.free([b, Block(3)]), "block 3: .*not of this pool"),
        (lambda pool, b: pool_of().free([b]), "block 0: .*not of this pool"),
        (lambda pool, b: pool_of().share([b], 2), "block 0: .*not of this pool"),
        (lambda pool, b: Block(1, stream="q"), "stream .* got 'q'"),
    ],
)
def test_a_wrong_value_is_a_value_error_that_names_it_and_changes_nothing(call, words):
    pool = pool_of(n_blocks=8)
    (block,) = pool.allocate("k", 16, 1)
    before = pool.stats.snapshot()
    with pytest.raises(ValueError, match=words):
        call(pool, block)
    assert pool.stats == before and block.owner == 1 and block.n_used == 16


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda pool: BlockPoolAllocator(16), "config"),
        (lambda pool: BlockPoolAllocator.__new__(BlockPoolAllocator).allocate("k", 1, 1), "__init__"),
        (lambda pool: BlockPoolAllocator.__new__(BlockPoolAllocator).blocks_for(1), "__init__"),
        (lambda pool: PoolConfig(block_size=1.5), "block_size"),
        (lambda pool: pool.allocate("k", 1.5, 1), "n_tokens"),
        (lambda pool: pool.allocate("k", 2**63, 1), "n_tokens"),
        (lambda pool: pool.allocate("k", 1, "request"), "owner"),
        (lambda pool: pool.allocate("k", 1), "owner"),
        (lambda pool: pool.free(3), "blocks"),
        (lambda pool: pool.free([3]), "blocks must be of type Block, got int"),
        (lambda pool: pool.free([None]), "blocks must be of type Block, got NoneType"),
        (lambda pool: pool.share(pool.allocate("k", 1, 1) + ["b"], 2), "blocks must be of type Block, got str"),
        (lambda pool: pool.mark_used(3, 3), "block"),
        (lambda pool: AllocationStats(), "n_blocks"),
        (lambda pool: Block(), "block_id"),
        (lambda pool: kvpool.render_prometheus({"a": 3}), "AllocationStats, got int"),
        (lambda pool: kvpool.render_prometheus({3: pool.stats}), "names in pools"),
    ],
)
def test_a_wrong_type_is_a_type_error_that_names_it(call, words):
    with pytest.raises(TypeError, match=words):
        call(pool_of())


def test_errors_have_the_types_that_callers_expect():
    assert BlockPoolExhaustedError.__mro__[1] is RuntimeError
    assert OwnerAlreadyActiveError.__mro__[1] is ValueError
    pool = pool_of(n_blocks=8, grow_on_exhaustion=True)
    with pytest.raises(BlockPoolExhaustedError, match=f"{2**63 - 1} token"):
        pool.allocate("k", 2**63 - 1, 1)
    pool.register_owner(1)
    with pytest.raises(OwnerAlreadyActiveError, match="owner 1 "):
        pool.register_owner(1)
    pool.release_owner(1)
    pool.allocate("k", 1, 1)
    with pytest.raises(OwnerAlreadyActiveError, match="owner 1 "):
        pool.register_owner(1)
    pool.release_owner(1)  # frees nothing, so that 1 stays active
    with pytest.raises(OwnerAlreadyActiveError):
        pool.register_owner(1)
    pool.free_all(1)
    pool.register_owner(1)


def test_what_an_iterable_of_blocks_raises_comes_through():
    pool = pool_of()
    blocks = pool.allocate("k", 32, 1)

    def broken():
        yield blocks[0]
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        pool.free(broken())
    assert pool.stats.n_frees == 0
    pool.free(block for block in blocks)
    assert pool.stats.n_frees == 2


# Blocks ---------------------------------------------------------------------------------------------------


def test_a_block_is_live_and_read_only():
    pool = pool_of(n_blocks=8)
    (block,) = pool.allocate("v", 3, 7, "int8")
    assert (block.stream, block.format, block.n_used, block.owner) == ("v", "int8", 3, 7)
    assert block.live and block.ever_allocated and block.generation > 0
    pool.mark_used(block, 9)
    assert block.n_used == 9 and pool.blocks_for(7)[0].n_used == 9
    for name in ("block_id", "stream", "format", "n_used", "owner", "ever_allocated", "generation", "live"):
        with pytest.raises(AttributeError):
            setattr(block, name, getattr(block, name))
    pool.free([block])
    assert (block.owner, block.n_used, block.live) == (None, 0, False)
    pool.mark_used(block, 5)  # a freed handle is passed over
    (again,) = pool.allocate("v", 16, 8)
    assert again.block_id == block.block_id and again.generation > block.generation
    assert (block.owner, block.n_used, block.format) == (None, 0, "int8")


def test_a_block_equals_the_handles_of_its_own_holding_only():
    pool, other = pool_of(n_blocks=8), pool_of(n_blocks=8)
    (block,) = pool.allocate("k", 16, 1)
    (same,) = pool.blocks_for(1)
    assert block == same and hash(block) == hash(same) and {block, same} == {same}
    (shared,) = pool.share([block], 1)
    assert shared != block
    assert other.allocate("k", 16, 1)[0] != block
    assert block != Block(block.block_id, "k", n_used=16, owner=1, ever_allocated=True)
    assert [block == other for other in (block.block_id, None, "block")] == [False] * 3
    pool.free_all(1)
    assert pool.allocate("k", 16, 1)[0] != block


def test_a_detached_block_shows_what_it_was_given_and_equals_its_like():
    block = Block(3, stream="v", format="int4", n_used=5, owner=9, ever_allocated=True)
    assert (block.block_id, block.stream, block.format, block.n_used) == (3, "v", "int4", 5)
    assert (block.owner, block.ever_allocated, block.live, block.generation) == (9, True, False, 0)
    default = Block(3)
    assert (default.stream, default.format, default.n_used) == ("kv", "fp16", 0)
    assert default.owner is None and default.ever_allocated is False
    assert default == Block(block_id=3) and hash(default) == hash(Block(3))
    for other in (Block(4), Block(3, "k"), Block(3, format="int2"), Block(3, n_used=1), Block(3, owner=0),
                  Block(3, ever_allocated=True)):  # fmt: skip
        assert other != default


def test_a_shared_block_is_free_when_its_last_owner_lets_go():
    pool = pool_of(n_blocks=8)
    mine = pool.allocate("k", 20, 1)
    theirs = pool.share(blocks=iter(mine), owner=2)
    assert ids(theirs) == ids(mine) and [b.owner for b in theirs] == [2, 2]
    assert [pool.ref_count(b) for b in mine] == [2, 2]
    assert pool.stats.blocks_in_use() == 2 and pool.stats.n_allocations == 2
    pool.mark_used(theirs[1], 9)
    assert mine[1].n_used == 9
    pool.free_all(1)
    assert (mine[0].owner, theirs[0].owner, theirs[1].n_used) == (None, 2, 9)
    assert pool.stats.n_frees == 0 and pool.ref_count(mine[0]) == 0 and pool.ref_count(theirs[0]) == 1
    with pytest.raises(ValueError, match="freed"):
        pool.share(mine, 3)
    pool.free(theirs)
    assert pool.stats.n_frees == 2 and pool.n_free("k") == 4


def test_new_owner_is_nobody_elses():
    pool = pool_of()
    taken = [pool.new_owner() for _ in range(5)]
    for owner in (min(taken) - 1, min(taken) - 2):
        pool.allocate("k", 1, owner)
    taken += [pool.new_owner() for _ in range(5)]
    assert len(set(taken)) == 10
    for owner in taken:
        pool.register_owner(owner)


def test_an_odd_block_goes_to_the_keys_and_none_is_lost():
    pool = pool_of(n_blocks=7)
    assert (pool.n_free("k"), pool.n_free("v"), pool.stats.n_blocks) == (4, 3, 7)
    assert sorted(ids(pool.allocate("k", 64, 1) + pool.allocate("v", 48, 1))) == list(range(7))
    one = pool_of(n_blocks=1)
    assert (one.n_free("k"), one.n_free("v")) == (1, 0)


def test_one_free_list_ignores_the_stream():
    pool = pool_of(n_blocks=4, separate_kv=False)
    blocks = pool.allocate("k", 16, 1) + pool.allocate("v", 16, 1) + pool.allocate("anything", 16, 1)
    assert [b.stream for b in blocks] == ["kv"] * 3
    assert pool.n_free("k") == pool.n_free("v") == pool.n_free("kv") == 1
    keys, values = pool_of(n_blocks=4, separate_kv=False).allocate_kv(32, 1)
    assert sorted(ids(keys + values)) == [0, 1, 2, 3]


def test_shrink_retires_only_what_is_free():
    pool = pool_of(n_blocks=8)
    held = pool.allocate("k", 32, 1)
    assert pool.shrink("k", 5) == 0
    assert pool.shrink("k", 0) == 2
    assert (pool.n_free("k"), pool.n_free("v"), pool.stats.n_blocks) == (0, 4, 6)
    assert [b.owner for b in held] == [1, 1]
    pool.free(held)
    assert pool.n_free("k") == 2


def test_growth_takes_just_what_is_missing_up_to_the_cap():
    pool = pool_of(n_blocks=4, grow_on_exhaustion=True, max_blocks=6)
    blocks = pool.allocate("k", 16 * 4, 1)
    assert len(set(ids(blocks))) == 4 and pool.stats.n_grown == 2 and pool.stats.n_blocks == 6
    with pytest.raises(BlockPoolExhaustedError, match="can grow to 6"):
        pool.allocate("k", 1, 2)


def test_reprs_say_what_counts():
    pool = pool_of(n_blocks=8)
    (block,) = pool.allocate("k", 3, 7, "int2")
    assert repr(block) == "Block(block_id=0, stream='k', format='int2', n_used=3, owner=7)"
    assert repr(Block(5)) == "Block(block_id=5, stream='kv', format='fp16', n_used=0, owner=None)"
    config = PoolConfig(4, 8, False, True, 9)
    assert repr(config) == (
        "PoolConfig(block_size=4, n_blocks=8, separate_kv=False, grow_on_exhaustion=True, max_blocks=9)"
    )
    assert eval(repr(config)) == config and eval(repr(PoolConfig())) == PoolConfig()
    for shown in (repr(pool.stats), repr(pool)):
        assert "in_use=1/8" in shown and "allocations=1" in shown and "fragmentation=0.125" in shown
    assert repr(pool) == f"BlockPoolAllocator({pool.stats!r})"


# Threads and lifetimes ------------------------------------------------------------------------------------


def test_eight_threads_share_one_pool(busy_switching):
    pool = pool_of(block_size=1, n_blocks=20_000)
    held, lock, double = set(), threading.Lock(), []
    done = threading.Event()

    def take(blocks):
        with lock:
            double.extend(held.intersection(ids(blocks)))
            held.update(ids(blocks))

    def give(blocks):
        with lock:
            held.difference_update(ids(blocks))

    def request(owner):
        def run():
            rng = random.Random(owner)
            for _ in range(120):
                n_tokens = 4500 if rng.random() < 0.03 else rng.randint(1, 40)  # the long ones run without the GIL
                try:
                    blocks = [b for stream in pool.allocate_kv(n_tokens, owner) for b in stream]
                except BlockPoolExhaustedError:
                    continue
                take(blocks)
                assert {b.owner for b in blocks} == {owner}
                pool.mark_used(blocks[0], rng.randint(0, 1))
                shared = pool.share(blocks[:3], owner + 100)
                given = rng.sample(blocks, len(blocks) // 2)
                give(blocks)
                pool.free_all(owner + 100)
                pool.free(given)
                assert len(shared) == min(3, len(blocks)) and not any(b.live for b in given + shared)
                pool.free_all(owner)

        return run

    def watch():
        while not done.is_set():
            for stats in (pool.stats.snapshot(), *pool.history):
                assert 0 <= stats.blocks_in_use() <= stats.n_blocks and 0 <= stats.fragmentation() <= 1

    watcher_errors = []

    def watched():
        try:
            watch()
        except AssertionError as error:
            watcher_errors.append(error)

    watcher = threading.Thread(target=watched)
    watcher.start()
    try:
        run_in_threads(*(request(owner) for owner in range(8)))
    finally:
        done.set()
        watcher.join()
    assert watcher_errors == [] and double == []
    stats = pool.stats
    assert stats.blocks_in_use() == 0 and stats._fragmented_count == 0 and stats.n_frees == stats.n_allocations > 0
    assert pool.n_free("k") == pool.n_free("v") == 10_000
    keys, values = pool.allocate_kv(10_000, 1)
    assert sorted(ids(keys + values)) == list(range(20_000))


def test_blocks_and_stats_keep_their_pool():
    pool = pool_of(n_blocks=8)
    blocks = pool.allocate("k", 20, 7)
    (shared,) = pool.share(blocks[:1], 8)
    (listed,) = pool.blocks_for(8)
    keys, values = pool.allocate_kv(3, 9)
    stats = pool.stats
    del pool
    gc.collect()
    assert [b.owner for b in blocks + [shared, listed] + keys + values] == [7, 7, 8, 8, 9, 9]
    assert blocks[1].n_used == 4 and stats.blocks_in_use() == 4


def test_nothing_is_leaked_when_the_interpreter_ends():
    program = (
        "import kvpool\n"
        "pool = kvpool.BlockPoolAllocator()\n"
        "keys, values = pool.allocate_kv(40, 1)\n"
        "shared = pool.share(keys, 2)\n"
        "stats, history = pool.stats, pool.history\n"
        "for wrong in (lambda: pool.free([1]), lambda: pool.allocate('x', 1, 1), lambda: pool.free([kvpool.Block(0)])):\n"
        "    try: wrong()\n"
        "    except (TypeError, ValueError): pass\n"
        "    else: raise SystemExit('not refused')\n"
        "print(stats.blocks_in_use())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "6\n", "")
