"""The examples in the seeds' documents, as written but for the package's name and the model that is loaded."""

from __future__ import annotations

import types

import mlx.core as mx
import pytest
import tokenizers
from model_zoo import VOCAB_SIZE, make_model

import kvpool


@pytest.fixture
def mlx_lm_with_a_tiny_model(monkeypatch):
    import mlx_lm
    from mlx_lm.tokenizer_utils import TokenizerWrapper
    from transformers import PreTrainedTokenizerFast

    characters = [chr(code) for code in range(ord(" "), ord(" ") + VOCAB_SIZE - 1)]
    vocab = {token: index for index, token in enumerate(["</s>", *characters])}
    spelling = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    wrapped = TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=spelling, eos_token="</s>"))
    monkeypatch.setattr(mlx_lm, "load", lambda name: (make_model("llama", num_hidden_layers=1), wrapped))
    return mlx_lm


def test_wrapping_a_kivi_cache():
    from kvpool import BlockPoolAllocator, KVCacheBuilder, PoolConfig, PooledKVCache

    request_id = 1
    pool = BlockPoolAllocator(PoolConfig(block_size=16, n_blocks=512))
    inner = KVCacheBuilder().with_method("kivi").with_head_dim(128).build()
    cache = PooledKVCache(inner, pool, owner=request_id, format="int2")

    key, value = mx.random.normal((2, 128)).astype(mx.float16)
    cache.append_key(key)
    cache.append_value(value)
    assert mx.allclose(cache.attend(key), value, atol=1e-2)
    assert (cache.n_blocks_held(), cache.memory_bytes() > 0) == (2, True)
    cache.release()  # return blocks to the pool for reuse by the next request
    assert pool.stats.blocks_in_use() == 0


def test_driving_real_generate_traffic(mlx_lm_with_a_tiny_model):
    mlx_lm = mlx_lm_with_a_tiny_model
    request_id, prompt = 1, "WHY IS THE SKY BLUE?"
    from kvpool import BlockPoolAllocator, PoolConfig, build_pooled_caches

    model, tokenizer = mlx_lm.load("mlx-community/Llama-3.2-3B-Instruct-4bit")
    pool = BlockPoolAllocator(PoolConfig(block_size=16, n_blocks=4096))
    cache = build_pooled_caches(model, pool, owner=request_id)
    text = mlx_lm.generate(model, tokenizer, prompt, prompt_cache=cache)
    assert pool.stats.blocks_in_use() > 0
    cache[0].release()  # every layer shares one owner, so any one releases all

    assert text == mlx_lm.generate(model, tokenizer, prompt) != ""
    assert pool.stats.blocks_in_use() == 0


def test_the_pools_own_example():
    from kvpool import BlockPoolAllocator, PoolConfig

    request_id = 1
    pool = BlockPoolAllocator(PoolConfig(block_size=16, n_blocks=256))
    blocks = pool.allocate(stream="k", n_tokens=40, owner=request_id, format="int2")
    assert [(b.n_used, b.format, b.owner) for b in blocks] == [(16, "int2", 1), (16, "int2", 1), (8, "int2", 1)]
    pool.free_all(owner=request_id)
    assert pool.n_free("k") == 128


def test_the_arena_pattern_of_the_buffer_pool():
    from kvpool import MlxBufferPool

    device = mx.Device(mx.cpu)
    pool = MlxBufferPool()

    def forward_pass(pool):
        scratch = [pool.alloc(device, 4096, mx.float32, (32, 32)) for _ in range(10)]
        return sum(buffer.array.sum().item() for buffer in scratch)

    created = set()
    for _ in range(4):
        pool.reset()  # start of token: recycle previous token's buffers
        assert forward_pass(pool) == 0  # many alloc(), no explicit release
        created.add(pool.created_bytes())
    assert created == {10 * 4096}


SEED_NAMES = """AllocationStats Block BlockPoolAllocator BlockPoolExhaustedError KVCacheBuilder KVCacheConfig
    KVCacheFactory MLXBlockStorage MlxBufferPool OwnerAlreadyActiveError PoolBackedKVCache PoolConfig PooledKVCache
    build_pooled_caches""".split()


@pytest.mark.parametrize("name", SEED_NAMES)
def test_every_name_of_the_seeds_is_in_the_package(name):
    assert name in kvpool.__all__
    assert not isinstance(getattr(kvpool, name), types.ModuleType)


@pytest.mark.parametrize("error", [kvpool.BlockPoolExhaustedError, kvpool.OwnerAlreadyActiveError])
def test_errors_are_of_the_standard_kinds(error):
    assert issubclass(error, (RuntimeError, ValueError))
