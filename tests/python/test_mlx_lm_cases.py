"""What mlx_lm's own tests ask of its caches (tests/test_prompt_cache.py of mlx_lm 0.32), asked of ours.

==================================================  ================================================================
mlx_lm's case                                       here
==================================================  ================================================================
test_save_load                                      test_save_load, test_metadata_comes_back
test_save_load_quantized_cache                      test_save_load with packed formats
test_save_load_rotating_cache                       test_a_sliding_cache_is_saved_before_and_after_it_slides
test_save_load_mixed_cache                          test_mixed_caches_are_saved_together
test_save_load_cache_list                           test_mixed_caches_are_saved_together, in a CacheList
test_save_load_batch_caches                         test_a_ragged_batch_is_saved; amid padding: _is_not_saved
test_save_load_arrays_cache                         test_a_hybrid_model_goes_on_from_a_file: the mask of a state-space
                                                    layer restored beside ours
test_cache_with_generate                            test_generation_in_two_calls_is_generation_in_one, also over a file
test_trim_cache                                     test_trim, test_all_layers_must_be_trimmable, and for windows
                                                    test_a_sliding_cache_trims_until_it_slides
test_trim_cache_with_generate                       test_trim_and_generate_again
test_cache_copying                                  test_a_copy_and_its_original_go_separate_ways
test_cache_to_quantized                             test_to_quantized and all with kv_bits in their name
test_cache_list                                     test_cache_list
test_make_mask_with_cache                           test_masks_are_those_of_the_stock_cache
test_window_mask_with_full_kv_cache                 test_masks_are_those_of_the_stock_cache, with a window
test_rotating_cache_mask                            test_masks_of_a_sliding_cache: ours keeps tokens in their order, so
                                                    there is no rotated mask; each query sees the last of its window
test_rotating_cache_updates                         test_a_sliding_cache_returns_what_the_new_tokens_see
test_batch_kv_cache                                 test_batch_update_filter_extend
test_batch_rotating_kv_cache                        test_a_sliding_batch_is_its_rows_one_by_one
test_merge_with_empty_caches                        test_merge_and_extend_with_empty_members
test_extend_with_empty_and_nonempty_batch_caches    test_merge_and_extend_with_empty_members
test_arrays_cache_extend_with_empty                 no meaning: state-space layers keep mlx_lm's ArraysCache
test_arrays_cache_advance                           no meaning: the same
==================================================  ================================================================
"""

from __future__ import annotations

import copy

import mlx.core as mx
import pytest
from kvpool import (
    BatchPagedKVCache,
    BlockPoolAllocator,
    BlockPoolExhaustedError,
    PagedKVCache,
    PagedKVCacheConfig,
    PagedStorage,
    PoolBackedKVCache,
    PoolConfig,
    build_pooled_caches,
)
from kvpool import mlx_lm as paged
from mlx_lm.generate import generate_step
from mlx_lm.models.base import create_attention_mask, create_causal_mask
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    LRUPromptCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from paged_models import prompt, tiny_model


@pytest.fixture(autouse=True)
def no_route():
    paged.uninstall()
    yield
    paged.uninstall()


@pytest.fixture
def file(tmp_path):
    return str(tmp_path / "cache.safetensors")


def growing_pool(block_size=4):
    return BlockPoolAllocator(PoolConfig(block_size=block_size, n_blocks=2, grow_on_exhaustion=True))


def paged_cache(format="raw", storage=None, **options):
    options = {"window": 4, "sink": 0} | options
    return PagedKVCache(storage or PagedStorage(growing_pool()), PagedKVCacheConfig(format, format, **options))


#: name: makes an empty cache
KINDS = {
    "raw": paged_cache,
    "int8": lambda: paged_cache("int8"),
    "int4": lambda: paged_cache("int4"),
    "int2": lambda: paged_cache("int2"),
    "kivi4": lambda: paged_cache("kivi4"),
    "kivi2": lambda: paged_cache("kivi2"),
    "pooled": lambda: PoolBackedKVCache(growing_pool(), owner=1),
}
EXACT = ("raw", "pooled")


def tokens(n, *, rows=1, heads=2, dim=32, seed=0, dtype=mx.float32):
    return mx.random.normal((rows, heads, n, dim), key=mx.random.key(seed)).astype(dtype)


def filled(cache, *counts, **shape):
    """Appends ``counts`` tokens in turn; the first seal a packed cache makes comes with the second."""
    for seed, n in enumerate(counts):
        cache.update_and_fetch(tokens(n, seed=seed, **shape), tokens(n, seed=seed + 100, **shape))
    return cache


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and bool(mx.array_equal(a, b))


def assert_go_on_alike(a, b, **shape):
    """Whether the next tokens find the same keys and values before them, bit for bit."""
    new = tokens(3, seed=55, **shape), tokens(3, seed=56, **shape)
    for mine, theirs in zip(a.update_and_fetch(*new), b.update_and_fetch(*new), strict=True):
        assert same(mine, theirs)
    assert a.offset == b.offset if isinstance(a.offset, int) else same(a.offset, b.offset)


# Saving ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_save_load(kind, rows, dtype, file):
    shape = {"rows": rows, "dtype": dtype}
    caches = [filled(KINDS[kind](), *counts, **shape) for counts in [(10,), (9, 1), (21, 1, 5), (1,)]]
    save_prompt_cache(file, caches)
    loaded = load_prompt_cache(file)
    assert len(loaded) == len(caches)
    for cache, again in zip(caches, loaded):
        assert type(again) is type(cache) and again.offset == cache.offset
        assert_go_on_alike(cache, again, **shape)


@pytest.mark.parametrize("kind", KINDS)
def test_state_alone_restores(kind):
    cache, again = filled(KINDS[kind](), 21, 1, rows=2), KINDS[kind]()
    again.state = cache.state
    assert again.offset == 22
    assert_go_on_alike(cache, again, rows=2)


@pytest.mark.parametrize("kind", KINDS)
def test_metadata_comes_back(kind, file):
    metadata = {"a": "b", "c": "d"}
    save_prompt_cache(file, [filled(KINDS[kind](), 10)], metadata)
    assert load_prompt_cache(file, return_metadata=True)[1] == metadata


@pytest.mark.parametrize("format", ["raw", "int4"])
def test_a_sliding_cache_is_saved_before_and_after_it_slides(format, file):
    cache = filled(paged_cache(format, sliding_window=8), 10)
    for _ in range(3):
        save_prompt_cache(file, [cache])
        (again,) = load_prompt_cache(file)
        assert again.config == cache.config and again.is_trimmable() == cache.is_trimmable()
        assert_go_on_alike(again, cache)
    assert not cache.is_trimmable()


@pytest.mark.parametrize("wrap", [lambda caches: caches, lambda caches: [CacheList(*caches)]])
def test_mixed_caches_are_saved_together(wrap, file):
    caches = [
        ArraysCache(size=2),
        paged_cache("raw"),
        KVCache(),
        PoolBackedKVCache(growing_pool(), owner=1),
        RotatingKVCache(8),
        paged_cache("int4"),
        ChunkedKVCache(256),
        paged_cache("raw", sliding_window=8),
        paged_cache("raw"),
    ]
    arrays, *others, empty = caches
    arrays[0], arrays[1] = tokens(4), tokens(5)
    for cache in others:
        filled(cache, 7, rows=4)
    save_prompt_cache(file, wrap(caches))
    loaded = load_prompt_cache(file)
    arrays_again, *others_again, empty_again = loaded if len(loaded) > 1 else loaded[0].caches
    assert same(arrays[0], arrays_again[0]) and same(arrays[1], arrays_again[1])
    for cache, again in zip(others, others_again, strict=True):
        assert type(again) is type(cache)
        assert_go_on_alike(cache, again, rows=4)
    assert type(empty_again) is PagedKVCache and empty_again.empty()
    assert_go_on_alike(empty, empty_again)


@pytest.mark.parametrize("format", ["raw", "kivi4"])
def test_a_ragged_batch_is_saved(format, file):
    storage = PagedStorage(growing_pool())
    members = [filled(paged_cache(format, storage), *counts) for counts in [(9, 1), (), (3,)]]
    batch = PagedKVCache.merge(members)
    save_prompt_cache(file, [batch])
    (again,) = load_prompt_cache(file)
    assert type(again) is BatchPagedKVCache
    assert again.offset.tolist() == [10, 0, 3] and again.left_padding.tolist() == [0, 10, 7]
    assert len(set(again.owners)) == 3
    assert_go_on_alike(batch, again, rows=3)
    assert_go_on_alike(batch.extract(0), again.extract(0))


@pytest.mark.parametrize("padding", [{"left_padding": [0, 5]}, {"right_padding": [0, 2], "lengths": [9, 7]}])
def test_a_batch_amid_padding_is_not_saved(padding, file):
    storage = PagedStorage(growing_pool())
    batch = PagedKVCache.merge([paged_cache("raw", storage) for _ in range(2)])
    batch.prepare(**padding)
    filled(batch, 3, rows=2)
    mx.eval(batch.state)
    with pytest.raises(ValueError, match="once the padded prompt has been appended"):
        save_prompt_cache(file, [batch])
    filled(batch, 6, rows=2)
    batch.finalize()
    save_prompt_cache(file, [batch])
    assert same(load_prompt_cache(file)[0].offset, batch.offset)


# Generation -----------------------------------------------------------------------------------------------------------

MAKERS = {
    "paged": lambda model, **options: paged.make_prompt_cache(model, PagedStorage(growing_pool(8)), **options),
    "pooled": lambda model: build_pooled_caches(model, growing_pool(8), owner=1),
}


def steps(model, ids, cache, n, **options):
    got = list(generate_step(ids, model, max_tokens=n, prompt_cache=cache, **options))
    return [token for token, _ in got], [logits for _, logits in got]


def assert_near(got, wanted):
    assert all(mx.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("over_a_file", [False, True])
@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "deepseek_v3"])
def test_generation_in_two_calls_is_generation_in_one(name, maker, routed, over_a_file, file):
    model, ids = tiny_model(name), prompt(23)
    wanted, logits = steps(model, ids, make_prompt_cache(model), 8)
    if routed:
        paged.install()
    cache = MAKERS[maker](model)
    first, first_logits = steps(model, ids, cache, 4)
    if over_a_file:
        save_prompt_cache(file, cache)
        cache = load_prompt_cache(file)
    # generate_step has put the last token of the first call into the cache already.
    rest, rest_logits = steps(model, mx.array(wanted[4:5]), cache, 3)
    assert first + wanted[4:5] + rest == wanted
    assert_near(first_logits + rest_logits, logits[:4] + logits[5:])


@pytest.mark.parametrize("format", ["int8", "int4", "kivi2"])
def test_a_packed_cache_generates_the_same_from_a_file(format, file):
    model, ids = tiny_model("llama"), prompt(60)
    cache = MAKERS["paged"](model, format=format, window=8, sink=8)
    steps(model, ids, cache, 3)
    save_prompt_cache(file, cache)
    again = load_prompt_cache(file)
    assert sum(c.nbytes for c in again) == sum(c.nbytes for c in cache)
    (tokens_a, logits_a), (tokens_b, logits_b) = (steps(model, prompt(2, 9), c, 12) for c in (cache, again))
    assert tokens_a == tokens_b and all(mx.array_equal(a, b) for a, b in zip(logits_a, logits_b))


@pytest.mark.parametrize("maker", MAKERS)
def test_a_hybrid_model_goes_on_from_a_file(maker, file):
    model, ids = tiny_model("qwen3_next"), prompt(23)
    cache = MAKERS[maker](model)
    steps(model, ids, cache, 2)
    assert {type(c) for c in cache} == {ArraysCache, PagedKVCache if maker == "paged" else PoolBackedKVCache}
    save_prompt_cache(file, cache)
    again = load_prompt_cache(file)
    assert [type(c) for c in again] == [type(c) for c in cache]
    assert again[0].make_mask(4) is None
    assert steps(model, prompt(3), again, 6)[0] == steps(model, prompt(3), cache, 6)[0]
    assert trim_prompt_cache(cache, 1) == 0


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("maker", MAKERS)
def test_trim_and_generate_again(maker, routed):
    model, ids = tiny_model("llama"), prompt(23)
    if routed:
        paged.install()
    cache = MAKERS[maker](model)
    last = mx.array(steps(model, ids, cache, 1)[0])
    trim_prompt_cache(cache, cache[0].offset - 23)
    once = steps(model, last, cache, 3)
    assert trim_prompt_cache(cache, cache[0].offset - 23) == 4
    again = steps(model, last, cache, 3)
    assert once[0] == again[0]
    assert_near(again[1], once[1])


@pytest.mark.parametrize("maker", MAKERS)
def test_a_server_reuses_prompts_by_their_beginning(maker):
    model, ids = tiny_model("llama"), prompt(40).tolist()

    def stock(ids):
        return steps(model, mx.array(ids), make_prompt_cache(model), 6)[0]

    kept, cache = LRUPromptCache(), MAKERS[maker](model)
    answer = steps(model, mx.array(ids), cache, 4)[0]
    said = ids + answer
    assert cache[0].offset == len(said)
    kept.insert_cache("m", said, cache)
    del cache
    for turn in (said + [3, 4], ids[:30], ids[:20] + [9, 9]):  # longer, shorter, another ending
        reused, rest = kept.fetch_nearest_cache("m", turn)
        assert 0 < len(rest) <= 2 and reused[0].offset + len(rest) == len(turn)
        assert steps(model, mx.array(rest), reused, 6)[0] == stock(turn)
    other, rest = kept.fetch_nearest_cache("m", [1, 1, 1])
    assert other is None and rest == [1, 1, 1]


# Trim and copies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_trim(kind):
    caches = [filled(KINDS[kind](), 9, 1) for _ in range(2)]
    before = caches[0].update_and_fetch(*[tokens(0)] * 2)
    assert trim_prompt_cache(caches, 7) == 7
    for mine, earlier in zip(caches[0].update_and_fetch(*[tokens(0)] * 2), before):
        assert same(mine, earlier[:, :, :3])
    assert trim_prompt_cache(caches, 4) == 3
    assert trim_prompt_cache(caches, 4) == 0
    assert all(cache.offset == 0 for cache in caches)


@pytest.mark.parametrize("kind", KINDS)
def test_trimmed_to_zero_it_is_as_new(kind, file):
    cache = filled(KINDS[kind](), 9, 1)
    assert cache.trim(10) == 10 and cache.size() == cache.offset == 0
    save_prompt_cache(file, [cache])
    (again,) = load_prompt_cache(file)
    assert again.offset == 0
    assert cache.make_mask(3, return_array=True, window_size=None).shape == (3, 3)
    for other in (again, KINDS[kind]()):
        fork = copy.deepcopy(cache)
        assert_go_on_alike(fork, other)
        assert_go_on_alike(fork, other)


def test_all_layers_must_be_trimmable():
    arrays = ArraysCache(size=2)
    arrays[0], arrays[1] = mx.zeros((5, 5)), mx.zeros((5, 5))
    for kind in KINDS:
        caches = [arrays, filled(KINDS[kind](), 10)]
        assert trim_prompt_cache(caches, 1) == 0 and caches[1].offset == 10


def test_a_sliding_cache_trims_until_it_slides():
    caches = [filled(paged_cache(sliding_window=6), 5) for _ in range(2)]
    assert trim_prompt_cache(caches, 4) == 4
    for cache in caches:
        filled(cache, 10, 1)
    assert trim_prompt_cache(caches, 4) == 0
    assert [cache.offset for cache in caches] == [12, 12]


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_and_its_original_go_separate_ways(kind):
    caches = [filled(KINDS[kind](), 10, 1)]
    copies = copy.deepcopy(caches)
    trim_prompt_cache(caches, 1)
    assert (copies[0].offset, caches[0].offset) == (11, 10)
    z = tokens(1, seed=7)
    mine, theirs = caches[0].update_and_fetch(z, z)[0], copies[0].update_and_fetch(z, z)[0]
    assert same(mine[:, :, 10:], z)
    assert same(theirs[:, :, 10:], mx.concatenate([tokens(1, seed=1), z], 2))
    assert same(mine[:, :, :8], theirs[:, :, :8])


def test_cache_list():
    both = CacheList(filled(paged_cache(), 8), filled(paged_cache("int4"), 8))
    assert both.is_trimmable() and both.trim(5) == 5 and both.size() == 3
    assert not CacheList(ArraysCache(size=2), paged_cache()).is_trimmable()

    storage = PagedStorage(growing_pool())
    lists = []
    for n in (5, 7):
        lists.append(CacheList(ArraysCache(size=1), filled(paged_cache("raw", storage), n)))
        lists[-1][0][0] = tokens(4, seed=n)
    merged = CacheList.merge(lists)
    for i, member in enumerate(lists):
        row = merged.extract(i)
        assert same(row[0][0], member[0][0])
        assert_go_on_alike(row[1], copy.deepcopy(member[1]))


# Masks and windows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("n_before", [0, 3, 16, 32])
def test_masks_are_those_of_the_stock_cache(kind, n_before):
    cache, stock = filled(KINDS[kind](), n_before), filled(KVCache(), n_before)
    for N in (1, 4):
        for window in (None, 3, 4, 64):
            for return_array in (False, True):
                options = {"window_size": window, "return_array": return_array}
                wanted = create_attention_mask(mx.zeros((1, N, 8)), stock, **options)
                got = create_attention_mask(mx.zeros((1, N, 8)), cache, **options)
                # Whether "everything before" is None, "causal" or an array is each cache's own business.
                full = create_causal_mask(N, n_before)
                wanted = full if wanted is None or isinstance(wanted, str) else wanted
                got = full if got is None or isinstance(got, str) else got
                assert mx.array_equal(got, wanted), (N, window, return_array)


def test_masks_of_a_sliding_cache():
    cache = paged_cache(sliding_window=8)
    for n_before in (0, 10, 1, 5):
        filled(cache, n_before)
        offset = cache.offset
        for N in (1, 3, 6):
            for window in (None, 5, 8, 20):
                seen = min(window or 8, 8)
                kept = max(0, offset - 8 + 1)
                mask = cache.make_mask(N, return_array=True, window_size=window)
                wanted = create_causal_mask(N, offset, window_size=seen)[:, kept:]
                if mask is None:
                    assert N == 1 and bool(mx.all(wanted))
                else:
                    assert mx.array_equal(mask, wanted), (offset, N, window)


def test_a_sliding_cache_returns_what_the_new_tokens_see():
    cache = filled(paged_cache(sliding_window=8), 10)
    for _ in range(3):
        keys, _ = cache.update_and_fetch(tokens(1), tokens(1))
        assert keys.shape[2] == 8
    keys, values = cache.update_and_fetch(tokens(3), tokens(3))
    assert keys.shape[2] == values.shape[2] == 10


# Batches --------------------------------------------------------------------------------------------------------------


def test_batch_update_filter_extend():
    storage = PagedStorage(growing_pool())

    def padded(*left_padding, n):
        batch = PagedKVCache.merge([paged_cache("raw", storage) for _ in left_padding])
        batch.prepare(left_padding=list(left_padding))
        return filled(batch, n, rows=len(left_padding))

    batch = padded(2, 3, 4, n=4)
    mx.eval(batch.state)
    assert batch.offset.tolist() == [2, 1, 0]
    batch.filter([0, 1])
    assert [mask.flatten().tolist() for mask in batch.make_mask(1)] == [[True, True, True], [False, True, True]]
    keys, _ = batch.update_and_fetch(*[tokens(1, rows=2)] * 2)
    assert keys.shape == (2, 2, 3, 32)

    a, b = padded(2, 1, 2, n=8), padded(3, 0, n=4)
    a.extend(b)
    assert a.offset.tolist() == [6, 7, 6, 1, 4]
    keys, values = a.update_and_fetch(*[tokens(1, rows=5)] * 2)
    assert keys.shape == values.shape == (5, 2, 8, 32)
    # mlx_lm's says [2, 1, 2, 7, 4]: it keeps the padding of the longest row as well.
    assert a.left_padding.tolist() == [1, 0, 1, 6, 3]


def test_batch_agrees_with_the_stock_batch():
    caches = [[filled(make(), n) if n else make() for n in (5, 0, 12)] for make in (KVCache, paged_cache)]
    storage = PagedStorage(growing_pool())
    caches[1] = [filled(paged_cache("raw", storage), n) if n else paged_cache("raw", storage) for n in (5, 0, 12)]
    stock, ours = BatchKVCache.merge(caches[0]), PagedKVCache.merge(caches[1])

    def agree(rows):
        assert ours.offset.tolist() == stock.offset.tolist()
        new = tokens(2, rows=rows, seed=3), tokens(2, rows=rows, seed=4)
        for n in (1, 3):
            assert mx.array_equal(ours.make_mask(n), stock.make_mask(n))
        for mine, theirs in zip(ours.update_and_fetch(*new), stock.update_and_fetch(*new)):
            for row, n in enumerate(ours.offset.tolist()):
                assert mx.array_equal(mine[row, :, mine.shape[2] - n :], theirs[row, :, theirs.shape[2] - n :])

    agree(3)
    for batch in (ours, stock):
        batch.filter(mx.array([0, 2]))
    agree(2)
    mine, theirs = ours.extract(1), stock.extract(1)
    assert mine.offset == theirs.offset == 16
    assert all(mx.array_equal(a, b) for a, b in zip(mine.keys_and_values(), theirs.keys_and_values()))
    assert ours.trim(3) == stock.trim(3) == 3
    agree(2)


def test_a_sliding_batch_is_its_rows_one_by_one():
    storage = PagedStorage(growing_pool())

    def cache():
        return paged_cache("raw", storage, sliding_window=6)

    alone = [filled(cache(), *counts) for counts in [(9, 1), (2,), (17, 3)]]
    batch = PagedKVCache.merge(copy.deepcopy(alone))
    late = [filled(cache(), 4), cache()]
    batch.extend(PagedKVCache.merge(copy.deepcopy(late)))
    alone += late
    for n in (1, 1, 4, 1):
        new = tokens(n, rows=5, seed=n), tokens(n, rows=5, seed=n + 9)
        queries = tokens(n, rows=5, heads=4, seed=n + 20)
        mask = batch.make_mask(n)
        keys, values = batch.update_and_fetch(*new)
        gathered = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.2, mask=mask)
        in_place = batch.attend(queries, 0.2, "causal")
        for i, row in enumerate(alone):
            row.update_and_fetch(*(a[i : i + 1] for a in new))
            wanted = row.attend(queries[i : i + 1], 0.2, "causal")
            assert mx.allclose(in_place[i : i + 1], wanted, atol=1e-5)
            assert mx.allclose(gathered[i : i + 1], wanted, atol=1e-5)
    batch.filter([2, 4])
    assert batch.offset.tolist() == [alone[2].offset, alone[4].offset]


@pytest.mark.parametrize("sliding", [0, 512])
@pytest.mark.parametrize("empty_first", [False, True])
def test_merge_and_extend_with_empty_members(empty_first, sliding):
    storage = PagedStorage(growing_pool())
    shape = {"heads": 8, "dim": 64}

    def merged(*lengths):
        caches = [paged_cache("raw", storage, sliding_window=sliding) for _ in lengths]
        return PagedKVCache.merge([filled(c, n, **shape) if n else c for c, n in zip(caches, lengths)])

    assert merged(0, 4).offset.tolist() == [0, 4]
    full, empty = merged(5, 3), merged(0, 0, 0)
    batch, other = (empty, full) if empty_first else (full, empty)
    batch.extend(other)
    lengths = [0, 0, 0, 5, 3] if empty_first else [5, 3, 0, 0, 0]
    assert batch.offset.tolist() == lengths
    new = [10, 8, 12, 7, 11]
    batch.prepare(lengths=new, right_padding=[2, 4, 0, 5, 1])
    keys, _ = batch.update_and_fetch(*[tokens(12, rows=5, **shape)] * 2)
    batch.finalize()
    assert batch.offset.tolist() == [n + m for n, m in zip(lengths, new)]
    assert keys.shape == (5, 8, max(batch.offset.tolist()), 64)


# kv_bits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("kind", EXACT)
def test_to_quantized(kind, bits):
    cache = filled(KINDS[kind](), 200)
    small = cache.to_quantized(group_size=32, bits=bits)
    assert isinstance(small, PagedKVCache) and small.offset == cache.offset == 200
    assert (small.config.key_format, small.config.group_size) == (f"int{bits}", 32)
    packed_from_the_start = filled(PagedKVCache(PagedStorage(growing_pool()), small.config), 200)
    raw_bytes = small.nbytes
    assert_go_on_alike(small, packed_from_the_start)
    assert small.nbytes < raw_bytes and cache.offset == 200
    assert small.to_quantized(bits=bits) is small


def test_to_quantized_of_an_empty_cache_is_empty():
    for kind in EXACT:
        small = KINDS[kind]().to_quantized(bits=4)
        assert small.empty() and small.config.value_format == "int4"
        assert filled(small, 3).offset == 3


def test_a_quantized_cache_stays_in_its_pool_and_with_its_owner():
    pool = growing_pool()
    cache = filled(PoolBackedKVCache(pool, owner=7), 40)
    small = cache.to_quantized(bits=4)
    del cache
    assert pool.stats.blocks_in_use() == 20 and len(pool.blocks_for(7)) == 20
    pool.free_all(7)
    assert small.empty() and pool.stats.blocks_in_use() == 0


def test_to_quantized_says_what_it_cannot_do():
    with pytest.raises(ValueError, match="bits must be 8, 4 or 2, got 3"):
        paged_cache().to_quantized(bits=3)
    with pytest.raises(ValueError, match="bits must be 8, 4 or 2, got 6"):
        KINDS["pooled"]().to_quantized(bits=6)
    with pytest.raises(ValueError, match="group_size must be 32 or 64, got 16"):
        KINDS["pooled"]().to_quantized(bits=4, group_size=16)
    with pytest.raises(ValueError, match="stores kivi2 and kivi2 already, asked for int4"):
        paged_cache("kivi2").to_quantized(bits=4)
    with pytest.raises(ValueError, match="sliding window must be made with format='int4'"):
        paged_cache(sliding_window=8).to_quantized(bits=4)
    pool = BlockPoolAllocator(PoolConfig(block_size=4, n_blocks=12))
    cache = filled(PagedKVCache(PagedStorage(pool)), 20)
    with pytest.raises(BlockPoolExhaustedError):
        cache.to_quantized(bits=4)
    assert cache.offset == 20 and pool.stats.blocks_in_use() == 10


@pytest.mark.parametrize("maker", MAKERS)
def test_generate_with_kv_bits_packs(maker):
    model, ids = tiny_model("llama"), prompt(300)
    exact, cache, small = make_prompt_cache(model), MAKERS[maker](model), MAKERS[maker](model)
    options = {"kv_group_size": 32, "quantized_kv_start": 0}
    wanted = steps(model, ids, exact, 8)
    full = steps(model, ids, cache, 8)
    got = steps(model, ids, small, 8, kv_bits=8, **options)
    assert full[0] == got[0] == wanted[0]
    assert all(mx.allclose(a, b, atol=0.2) for a, b in zip(got[1], wanted[1]))
    assert all(type(c) is PagedKVCache and c.config.key_format == "int8" for c in small)
    exact_bytes = sum(2 * c.keys.nbytes * c.offset // c.keys.shape[2] for c in exact)
    assert sum(c.nbytes for c in small) < 0.75 * exact_bytes


def test_generate_with_kv_bits_starts_when_told():
    model, cache = tiny_model("llama"), MAKERS["pooled"](tiny_model("llama"))
    steps(model, prompt(30), cache, 2, kv_bits=4, kv_group_size=32, quantized_kv_start=100)
    assert all(type(c) is PoolBackedKVCache for c in cache)


@pytest.mark.parametrize("format", ["int8", "kivi4"])
def test_generate_with_kv_bits_of_another_format_is_refused(format):
    model = tiny_model("llama")
    with pytest.raises(ValueError, match=f"stores {format}"):
        steps(model, prompt(30), MAKERS["paged"](model, format=format), 2, kv_bits=4, quantized_kv_start=0)


def test_generate_with_kv_bits_of_a_sliding_model_is_refused():
    model = tiny_model("gemma3_text")
    with pytest.raises(ValueError, match="sliding window"):
        steps(model, prompt(30), MAKERS["paged"](model), 2, kv_bits=4, quantized_kv_start=0)
