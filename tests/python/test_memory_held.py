"""What caches hold of MLX's memory, beside what they must."""

from __future__ import annotations

import gc
from pathlib import Path

import kvpool.codebooks
import mlx.core as mx
import pytest
from kvpool import BlockPoolAllocator, PagedKVCache, PagedKVCacheConfig, PagedStorage, PoolConfig
from kvpool._block_size import default_block_size

LAYERS, HEADS, DIM, WINDOW, SINK = 30, 3, 64, 128, 16
BOOKS = Path(kvpool.codebooks.__file__).parent


@pytest.mark.parametrize("format", ["vecinfer4", "vecinfer2", "vecinfer1.5", "vecinfer1"])
def test_at_8k_tokens_it_is_codes_window_sink_and_codebooks(format):
    block_size = default_block_size([format])
    codebooks = kvpool.codebooks.load_codebooks(BOOKS / f"SmolLM2-135M-Instruct.{format}.safetensors")
    prompt, token = (mx.random.normal((1, HEADS, n, DIM)).astype(mx.bfloat16) for n in (512, 1))
    mx.eval(prompt, token)
    gc.collect()
    mx.synchronize()
    before = mx.get_active_memory()
    pool = BlockPoolAllocator(PoolConfig(block_size=block_size, n_blocks=2, grow_on_exhaustion=True))
    storage = PagedStorage(pool)
    caches = [
        PagedKVCache(
            storage,
            PagedKVCacheConfig(format, format, window=WINDOW, sink=SINK, codebooks=codebooks, layer=layer),
        )
        for layer in range(LAYERS)
    ]

    def append(tokens):
        for cache in caches:
            cache.update_and_fetch(tokens, tokens)
        mx.eval([cache.state for cache in caches])
        mx.synchronize()
        return caches[0].offset

    while append(prompt) < 8192:
        pass
    for _ in range(block_size + 1):
        length = append(token)
        held = mx.get_active_memory() - before + codebooks.nbytes  # Kernels on the CPU have them outside MLX's memory.
        bits = (length - WINDOW - SINK) * codebooks.average_bits + (WINDOW + SINK) * 16
        packed = 2 * LAYERS * HEADS * DIM * bits / 8 + codebooks.nbytes
        assert packed < held <= 1.05 * packed, f"{held / packed:.4f} × at {length} tokens"
