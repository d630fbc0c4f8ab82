"""Paged caches under mlx_lm's own generation: what comes out is what comes out without them."""

from __future__ import annotations

import copy

import mlx.core as mx
import pytest
from kvpool import BlockPoolAllocator, PoolConfig
from kvpool import mlx_lm as paged
from kvpool._core import PagedStorage
from kvpool.paged_cache import PagedKVCache
from mlx_lm import batch_generate, stream_generate
from mlx_lm.generate import BatchGenerator, generate_step, speculative_generate_step
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache, trim_prompt_cache
from paged_models import CONFIGS, prompt, tiny_model


@pytest.fixture(autouse=True)
def no_route():
    paged.uninstall()
    yield
    paged.uninstall()


def generated(model, tokens, cache, n=40, **options):
    return [token for token, _ in generate_step(tokens, model, prompt_cache=cache, max_tokens=n, **options)]


def pool_of_8():
    return PagedStorage(BlockPoolAllocator(PoolConfig(block_size=8, n_blocks=2, grow_on_exhaustion=True)))


@pytest.mark.parametrize("routed", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_those_of_stock_caches(name, routed):
    model, tokens = tiny_model(name), prompt(50)
    stock = generated(model, tokens, make_prompt_cache(model), prefill_step_size=20)
    cache = paged.make_prompt_cache(model, pool_of_8())
    assert any(isinstance(c, PagedKVCache) for c in cache)
    if routed:
        paged.install()
    assert generated(model, tokens, cache, prefill_step_size=20) == stock


@pytest.mark.parametrize("routed", [True, False])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3", "deepseek_v3"])
def test_logits_of_halves_are_near(name, dtype, routed):
    model, tokens = tiny_model(name, dtype), prompt(60)
    if routed:
        paged.install()
    caches = make_prompt_cache(model), paged.make_prompt_cache(model, pool_of_8())
    for chunk in tokens[:40], tokens[40:41], tokens[41:]:
        stock, ours = (model(chunk[None], cache=cache).astype(mx.float32) for cache in caches)
        assert mx.abs(stock - ours).max().item() < (0.02 if dtype == mx.float16 else 0.15) * mx.abs(stock).max().item()


@pytest.mark.parametrize(
    "format, on_cpu", [("raw", 32), ("kivi2", 32), ("vecinfer3", 32), ("vecinfer2", 16), (("int4", "vecinfer1"), 16)]
)
def test_blocks_that_are_made_are_small_where_few_bits_are_kept(default_model, format, on_cpu):
    caches = paged.make_prompt_cache(default_model[0], format=format)
    expected = on_cpu if mx.default_device() == mx.Device(mx.cpu) else 32
    assert {cache.storage.pool.config.block_size for cache in caches} == {expected}
    assert len({cache.storage for cache in caches}) == 1


def test_default_model_generates_the_same_text(default_model):
    model, tokenizer, _ = default_model
    text = "The three largest cities of France are"
    stock = [r.token for r in stream_generate(model, tokenizer, text, max_tokens=24)]
    with paged.install():
        cache = paged.make_prompt_cache(model)
        assert [r.token for r in stream_generate(model, tokenizer, text, max_tokens=24, prompt_cache=cache)] == stock


def finished(model, prompts, caches=None):
    generator = BatchGenerator(model, max_tokens=20, completion_batch_size=3, prefill_batch_size=2, prefill_step_size=8)
    uids = generator.insert(prompts, caches=caches)
    tokens = {uid: [] for uid in uids}
    while responses := generator.next_generated():
        for response in responses:
            tokens[response.uid].append(response.token)
    generator.close()
    return [tokens[uid] for uid in uids]


@pytest.mark.parametrize("routed", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "deepseek_v2", "deepseek_v3"])
def test_ragged_batch_is_one_by_one(name, routed):
    model = tiny_model(name)
    prompts = [prompt(n, seed=n).tolist() for n in (5, 31, 1, 17, 40)]
    alone = [generated(model, mx.array(p), make_prompt_cache(model), n=20) for p in prompts]
    storage = pool_of_8()
    paged.attach(model, storage)
    if not routed:
        paged.uninstall()
    assert finished(model, prompts) == alone
    assert storage.pool.stats.blocks_in_use() == 0


def test_batch_generate_continues_forked_caches():
    model, storage = tiny_model("llama"), pool_of_8()
    paged.attach(model, storage)
    first = prompt(21)
    cache = paged.make_prompt_cache(model, storage)
    model(first[None], cache=cache)
    prompts = [prompt(n, seed=n).tolist() for n in (3, 9)]
    got = finished(model, prompts, [copy.deepcopy(cache) for _ in prompts])
    for p, tokens in zip(prompts, got):
        whole = mx.concatenate([first, mx.array(p)])
        assert tokens == generated(model, whole, paged.make_prompt_cache(model, storage), n=20)
    assert cache[0].offset == 21


@pytest.mark.parametrize("routed", [True, False])
def test_speculative_decoding_gives_the_models_own_tokens(routed):
    model, draft, tokens = tiny_model("llama"), tiny_model("llama_mqa", seed=1), prompt(30)
    stock = generated(model, tokens, make_prompt_cache(model))
    storage = pool_of_8()
    cache = paged.make_prompt_cache(model, storage) + paged.make_prompt_cache(draft, storage)
    if routed:
        paged.install()
    steps = speculative_generate_step(tokens, model, draft, max_tokens=40, num_draft_tokens=3, prompt_cache=cache)
    assert [token for token, _, _ in steps] == stock


def test_compressed_formats_generate_through_every_path():
    model, tokens = tiny_model("llama"), prompt(60)
    for format in ("int8", "int4", ("kivi2", "int2")):
        storage = pool_of_8()
        cache = paged.make_prompt_cache(model, storage, format=format, window=8, sink=0)
        unrouted = generated(model, tokens, cache, n=20)
        with paged.install():
            again = paged.make_prompt_cache(model, storage, format=format, window=8, sink=0)
            assert generated(model, tokens, again, n=20) == unrouted
        raw = paged.make_prompt_cache(model, storage)
        generated(model, tokens, raw, n=20)
        assert sum(c.nbytes for c in cache) < 0.7 * sum(c.nbytes for c in raw)


def test_server_prompt_cache_shares_blocks():
    model, storage, tokens = tiny_model("llama"), pool_of_8(), prompt(64).tolist()
    paged.attach(model, storage)
    cache = model.make_cache()
    model(mx.array(tokens)[None], cache=cache)
    in_use = storage.pool.stats.blocks_in_use()
    kept = LRUPromptCache()
    kept.insert_cache("m", tokens, cache)
    forks = [kept.fetch_nearest_cache("m", tokens + [5, 6])[0] for _ in range(4)]
    assert storage.pool.stats.blocks_in_use() == in_use
    shorter, rest = kept.fetch_nearest_cache("m", tokens[:50] + [9])
    assert shorter[0].offset == 50 and rest == [9]
    assert storage.pool.stats.blocks_in_use() == in_use
    logits = [model(mx.array([[7]]), cache=fork) for fork in forks]
    assert all(mx.array_equal(logits[0], other) for other in logits)
    assert mx.allclose(logits[0][0, -1], model(mx.array([tokens + [7]]))[0, -1], atol=1e-4)
    assert cache[0].offset == 64
    assert len({owner for c in forks[0] for owner in c.owners}) == 1
    del forks, shorter, kept, cache, logits
    assert storage.pool.stats.blocks_in_use() == 0


def test_trim_prompt_cache_rewinds_exactly():
    model, tokens = tiny_model("llama"), prompt(40)
    with paged.install():
        cache = paged.make_prompt_cache(model, pool_of_8())
        model(tokens[None], cache=cache)
        once = model(tokens[None, 20:], cache=cache)
        assert trim_prompt_cache(cache, 20) == 20
        assert mx.array_equal(model(tokens[None, 20:], cache=cache), once)


def test_prefill_state_neither_gathers_nor_peaks():
    model = tiny_model("llama")
    with paged.install():
        cache = paged.make_prompt_cache(model)
        model(prompt(2000)[None], cache=cache)
        mx.eval([c.state for c in cache])
        mx.synchronize()
        mx.clear_cache()
        active = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval([c.state for c in cache])
        assert mx.get_peak_memory() - active < 4096
        assert sum(c.nbytes for c in cache) > 500_000


def test_attach_takes_a_text_batch(default_model):
    model, tokenizer, _ = default_model
    storage = PagedStorage(BlockPoolAllocator(PoolConfig(block_size=32, n_blocks=64, grow_on_exhaustion=True)))
    prompts = [tokenizer.encode(text) for text in ("Once upon a time there was", "2 + 2 =")]
    stock = batch_generate(model, tokenizer, prompts, max_tokens=8).texts
    paged.attach(model, storage, format="int8", window=4)
    try:
        assert batch_generate(model, tokenizer, prompts, max_tokens=8).texts == stock
    finally:
        object.__delattr__(model, "make_cache")
    assert storage.pool.stats.blocks_in_use() == 0
