"""build_pooled_caches under mlx_lm: every kind of model, saving, speculation, the server's cache."""

from __future__ import annotations

import subprocess
import sys

import mlx.core as mx
import pytest
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import (
    KVCache,
    LRUPromptCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from model_zoo import KINDS, greedy, make_model, prompt_of

from kvpool import BlockPoolAllocator, PoolBackedKVCache, PoolConfig, build_pooled_caches


def make_pool(block_size=16):
    return BlockPoolAllocator(PoolConfig(block_size=block_size, n_blocks=2, grow_on_exhaustion=True))


@pytest.mark.parametrize("kind", KINDS)
def test_plain_layers_are_pooled_and_the_others_keep_their_own(kind):
    model = make_model(kind)
    stock = make_prompt_cache(model)
    pooled = build_pooled_caches(model, make_pool(), owner=1)
    assert [type(c) for c in pooled] == [PoolBackedKVCache if type(c) is KVCache else type(c) for c in stock]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_generation_gives_the_stock_caches_tokens(kind):
    model = make_model(kind)
    pool = make_pool()
    expected = greedy(model, prompt_of(40), make_prompt_cache(model))
    cache = build_pooled_caches(model, pool, owner=1)
    assert greedy(model, prompt_of(40), cache) == expected
    n_pooled = sum(isinstance(c, PoolBackedKVCache) for c in cache)
    assert pool.stats.blocks_in_use() == n_pooled * 2 * 256 // 16
    pool.free_all(1)
    assert pool.stats.blocks_in_use() == 0


@pytest.mark.parametrize(("block_size", "step"), [(1, None), (16, 5), (256, 1), (256, None)])
def test_block_size_and_step_change_no_token(block_size, step):
    model = make_model("llama")
    expected = greedy(model, prompt_of(40), make_prompt_cache(model))
    assert greedy(model, prompt_of(40), build_pooled_caches(model, make_pool(block_size), 1, step)) == expected


def test_release_of_any_layer_releases_all():
    model = make_model("gemma3_text")
    pool = make_pool()
    cache = build_pooled_caches(model, pool, owner=1)
    greedy(model, prompt_of(5), cache, n=3)
    next(c for c in reversed(cache) if isinstance(c, PoolBackedKVCache)).release()
    assert pool.stats.blocks_in_use() == 0
    assert all(c.empty() for c in cache if isinstance(c, PoolBackedKVCache))


RESTORE = """
import sys
import mlx.core as mx
{imports}
from mlx_lm.models.cache import load_prompt_cache
cache, metadata = load_prompt_cache(sys.argv[1], return_metadata=True)
assert metadata == {{"who": "me"}}, metadata
sys.path.insert(0, sys.argv[2])
from model_zoo import greedy, make_model, prompt_of
print(type(cache[1]).__module__, cache[1].offset, greedy(make_model(sys.argv[3]), prompt_of(3), cache))
"""


@pytest.mark.parametrize(
    ("kind", "imports"),
    [("qwen3_next", "import kvpool"), ("gemma3_text", "import mlx_lm.models.cache; import kvpool")],
)
def test_a_saved_cache_goes_on_in_a_fresh_process(tmp_path, kind, imports):
    model = make_model(kind)
    pool = make_pool()
    cache = build_pooled_caches(model, pool, owner=1)
    greedy(model, prompt_of(20), cache, n=5)
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, cache, {"who": "me"})
    offset = cache[1].offset
    expected = greedy(model, prompt_of(3), cache)
    command = [sys.executable, "-c", RESTORE.format(imports=imports), file, str(__file__).rsplit("/", 1)[0], kind]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert output == f"kvpool.pool_backed_cache {offset} {expected}"


def test_a_saved_cache_with_empty_layers_is_restored(tmp_path):
    pool = make_pool()
    caches = [PoolBackedKVCache(pool, owner=1) for _ in range(2)]
    caches[1].update_and_fetch(mx.ones((1, 2, 3, 4)), mx.ones((1, 2, 3, 4)))
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, caches)
    first, second = load_prompt_cache(file)
    assert first.empty() and second.offset == 3
    assert mx.load(file)["1.0"].shape == (1, 2, 3, 4)


def test_speculative_decoding_gives_the_models_own_tokens():
    model, draft = make_model("llama"), make_model("llama", seed=7, num_hidden_layers=2)
    pool = make_pool()
    prompt = prompt_of(30)
    expected = greedy(model, prompt, make_prompt_cache(model))
    cache = build_pooled_caches(model, pool, owner=1) + build_pooled_caches(draft, pool, owner=2)
    steps = speculative_generate_step(prompt, model, draft, num_draft_tokens=3, max_tokens=12, prompt_cache=cache)
    assert [int(token) for token, *_ in steps] == expected
    assert len({c.offset for c in cache[:4]}) == 1


def test_trim_prompt_cache_rewinds():
    model = make_model("qwen2")
    cache = build_pooled_caches(model, make_pool(), owner=1)
    first = greedy(model, prompt_of(20), cache, n=6)
    n = cache[0].offset - 19
    assert trim_prompt_cache(cache, n) == n > 0
    assert greedy(model, prompt_of(20)[19:], cache, n=6) == first


def test_the_servers_prompt_cache_forks():
    model = make_model("llama")
    pool = make_pool()
    lru = LRUPromptCache(max_size=2)
    prompt = prompt_of(30)
    cache = build_pooled_caches(model, pool, owner=1)
    expected = greedy(model, prompt, make_prompt_cache(model))
    greedy(model, prompt[:20], cache, n=1)
    trim_prompt_cache(cache, cache[0].offset - 20)
    lru.insert_cache("m", prompt[:20].tolist(), cache)
    in_use = pool.stats.blocks_in_use()
    for _ in range(3):
        fetched, rest = lru.fetch_nearest_cache("m", prompt.tolist())
        assert len(rest) == 10
        assert greedy(model, mx.array(rest), fetched) == expected
        del fetched
    assert cache[0].offset == 20
    assert pool.stats.blocks_in_use() == in_use
    del cache
    lru.trim_to(n_sequences=0)
    assert pool.stats.blocks_in_use() == 0
