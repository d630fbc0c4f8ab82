"""Which layers of a model keep keys and values."""

from __future__ import annotations

from typing import Any


def stock_caches(model: Any) -> list[Any]:
    """The caches that mlx_lm gives the model's layers."""
    from mlx_lm.models.cache import KVCache

    make_cache = getattr(type(model), "make_cache", None)
    return make_cache(model) if make_cache is not None else [KVCache() for _ in model.layers]


def sliding_window(cache: Any) -> int | None:
    """Tokens that a query of the layer sees (0: all), or None if the layer is no plain attention."""
    from mlx_lm.models.cache import KVCache, RotatingKVCache

    if type(cache) is KVCache:
        return 0
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return cache.max_size
    return None


def attention_layers(model: Any) -> list[int]:
    """The layers with a cache of plain attention, in order: layer i of a set of codebooks is the i-th of them."""
    return [i for i, cache in enumerate(stock_caches(model)) if sliding_window(cache) is not None]
