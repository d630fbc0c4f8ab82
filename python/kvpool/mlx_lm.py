"""Paged caches under mlx_lm: ``make_prompt_cache``, ``attach``, ``install``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from . import _route
from ._core import BlockPoolAllocator, PagedKVCacheConfig, PagedStorage, PoolConfig
from .paged_cache import PagedKVCache

Format = str | tuple[str, str]

_DEFAULT_POOL = PoolConfig(block_size=32, n_blocks=64, grow_on_exhaustion=True)


def make_prompt_cache(
    model: Any,
    pool: BlockPoolAllocator | PagedStorage | None = None,
    format: Format | Sequence[Format] = "raw",
    *,
    window: int = 128,
    sink: int = 16,
    group_size: int = 32,
    hadamard: bool = True,
    check_finite: bool = False,
    owner: int | None = None,
) -> list[Any]:
    """One cache a layer of ``model``: paged for attention, the model's own for other layers.

    Args:
        model: a loaded mlx_lm model.
        pool: a pool, or a PagedStorage to share memory too; one of 32-token blocks that grows if None.
        format: "raw" (the model's own type), "int8", "int4", "int2", "kivi4" or "kivi2"; a pair for keys and
            values; a list a layer.
        window: newest tokens that stay raw.
        sink: first tokens that stay raw.
        group_size: channels to a scale, 32 or 64.
        hadamard: whether int formats and the values of kivi are stored after a Hadamard transform.
        check_finite: refuse tokens that the format cannot store (NaN, infinity, beyond fp16); evaluates each append.
        owner: id of the request; a new one if None.

    Raises ValueError naming what is not allowed.
    """
    if isinstance(pool, PagedStorage):
        storage = pool
    else:
        storage = PagedStorage(pool if pool is not None else BlockPoolAllocator(_DEFAULT_POOL))
    stock = _stock_caches(model)
    formats = [format] * len(stock) if isinstance(format, (str, tuple)) else list(format)
    if len(formats) != len(stock):
        raise ValueError(f"make_prompt_cache: format must name one for each of {len(stock)} layers, got {len(formats)}")
    owner = storage.pool.new_owner() if owner is None else owner

    def paged(cache: Any, format: Format) -> Any:
        sliding = _sliding_window(cache)
        if sliding is None:
            return cache
        keys, values = (format, format) if isinstance(format, str) else format
        config = PagedKVCacheConfig(
            keys,
            values,
            group_size=group_size,
            hadamard=hadamard,
            window=window,
            sink=sink,
            sliding_window=sliding,
            check_finite=check_finite,
        )
        return PagedKVCache(storage, config, owner)

    return [paged(cache, format) for cache, format in zip(stock, formats)]


def _stock_caches(model: Any) -> list[Any]:
    from mlx_lm.models.cache import KVCache

    make_cache = getattr(type(model), "make_cache", None)
    return make_cache(model) if make_cache is not None else [KVCache() for _ in model.layers]


def _sliding_window(cache: Any) -> int | None:
    """Tokens that a query of the layer sees (0: all), or None if the layer is no plain attention."""
    from mlx_lm.models.cache import KVCache, RotatingKVCache

    if type(cache) is KVCache:
        return 0
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return cache.max_size
    return None


def attach(model: Any, pool: BlockPoolAllocator | PagedStorage | None = None, **options: Any) -> Any:
    """Makes ``mlx_lm``'s generate, server, batches and speculative decoding use paged caches for ``model``.

    Sets ``model.make_cache`` and installs the route. ``options`` are those of make_prompt_cache(). All caches
    share one storage. Returns the model.
    """
    if not isinstance(pool, PagedStorage):
        pool = PagedStorage(pool if pool is not None else BlockPoolAllocator(_DEFAULT_POOL))
    make_prompt_cache(model, pool, **options)
    _route.install()
    object.__setattr__(model, "make_cache", lambda: make_prompt_cache(model, pool, **options))
    return model


def install() -> Any:
    """Routes the attention of every mlx_lm model to the caches that attend over their own blocks.

    Idempotent; leaves other caches alone. Takes effect at once. As a context manager it is taken out at the end,
    unless it was installed before.
    """
    was_installed = _route.is_installed()
    _route.install()
    return _scope(was_installed)


def uninstall() -> None:
    """Undoes install()."""
    _route.uninstall()


@contextmanager
def _scope(was_installed: bool) -> Iterator[None]:
    try:
        yield
    finally:
        if not was_installed:
            _route.uninstall()
