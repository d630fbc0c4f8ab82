"""Writes the golden files of the present version of saved caches.

    python tests/golden/make.py

Run it when paged_state.VERSION changes, and leave the files of earlier versions where they are: what was saved once
must load for ever. ``paged_v1.safetensors`` is what save_prompt_cache writes, ``paged_v1.values.safetensors`` what the
rows decode to.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
from kvpool import BlockPoolAllocator, PoolConfig
from kvpool._core import PagedKVCacheConfig, PagedStorage
from kvpool.paged_cache import PagedKVCache
from kvpool.paged_state import VERSION
from mlx_lm.models.cache import save_prompt_cache

HEADS, KEY_DIM, VALUE_DIM, N_TOKENS = 2, 16, 24, 21

LAYERS = [
    (mx.float16, PagedKVCacheConfig()),
    (mx.float32, PagedKVCacheConfig("int4", "kivi2", window=3, sink=2)),
    (mx.bfloat16, PagedKVCacheConfig("int8", "int2", group_size=64, hadamard=True, window=0, sink=0)),
    (mx.float16, PagedKVCacheConfig("kivi4", "raw", window=0, sink=0, sliding_window=10)),
]


def layer_cache(seed: int, dtype: mx.Dtype, config: PagedKVCacheConfig) -> PagedKVCache:
    pool = BlockPoolAllocator(PoolConfig(block_size=8, n_blocks=2, grow_on_exhaustion=True))
    cache = PagedKVCache(PagedStorage(pool), config)
    for n in (N_TOKENS - 2, 1, 1):  # what an append finds full and old enough it seals
        seed += 1
        keys = mx.random.normal((1, HEADS, n, KEY_DIM), key=mx.random.key(seed)).astype(dtype)
        values = mx.random.normal((1, HEADS, n, VALUE_DIM), key=mx.random.key(seed + 100)).astype(dtype)
        cache.update_and_fetch(keys, values)
    return cache


def main() -> None:
    caches = [layer_cache(10 * layer, *kind) for layer, kind in enumerate(LAYERS)]
    stem = Path(__file__).parent / f"paged_v{VERSION}"
    save_prompt_cache(f"{stem}.safetensors", caches, {"made": "by tests/golden/make.py"})
    values = {}
    for layer, cache in enumerate(caches):
        restored = PagedKVCache.from_state(cache.state)
        values[f"{layer}.keys"], values[f"{layer}.values"] = restored.keys_and_values()
    mx.save_safetensors(f"{stem}.values.safetensors", values)


if __name__ == "__main__":
    main()
