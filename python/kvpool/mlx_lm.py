"""Paged caches under mlx_lm: ``make_prompt_cache``, ``attach``, ``install``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import _route
from ._block_size import default_block_size
from ._core import BlockPoolAllocator, PagedKVCacheConfig, PagedStorage, PoolConfig, VecInferCodebooks
from ._layers import sliding_window, stock_caches
from .paged_cache import PagedKVCache

Format = str | tuple[str, str]
Codebooks = str | Path | VecInferCodebooks | Mapping[str, VecInferCodebooks]


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
    codebooks: Codebooks | None = None,
) -> list[Any]:
    """One cache a layer of ``model``: paged for attention, the model's own for other layers.

    Args:
        model: a loaded mlx_lm model.
        pool: a pool, or a PagedStorage to share memory too; one that grows if None, in blocks of 32 tokens, for
            vecinfer formats of 2 bits and less on the CPU of 16.
        format: "raw" (the model's own type), "int8", "int4", "int2", "kivi4", "kivi2", "vecinfer1",
            "vecinfer1.5", "vecinfer2", "vecinfer3" or "vecinfer4"; a pair for keys and values; a list a layer.
        window: newest tokens that stay raw.
        sink: first tokens that stay raw.
        group_size: channels to a scale, 32 or 64.
        hadamard: whether int formats and the values of kivi are stored after a Hadamard transform.
        check_finite: refuse tokens that the format cannot store (NaN, infinity, beyond fp16); evaluates each append.
        owner: id of the request; a new one if None.
        codebooks: for vecinfer formats, a file that ``kvpool calibrate`` made, what load_codebooks() returned, or
            such sets by format; if None, those that come with kvpool for this model.

    Raises ValueError naming what is not allowed.
    """
    stock = stock_caches(model)
    formats = [format] * len(stock) if isinstance(format, (str, tuple)) else list(format)
    if len(formats) != len(stock):
        raise ValueError(f"make_prompt_cache: format must name one for each of {len(stock)} layers, got {len(formats)}")
    pairs = [(format, format) if isinstance(format, str) else format for format in formats]
    names = {name for pair in pairs for name in pair}
    sets = _codebooks(model, names, codebooks)
    storage = _storage(pool, names)
    owner = storage.pool.new_owner() if owner is None else owner
    caches, n_paged = [], 0
    for cache, (keys, values) in zip(stock, pairs):
        sliding = sliding_window(cache)
        if sliding is None:
            caches.append(cache)
            continue
        books = sets.get(keys, sets.get(values))
        config = PagedKVCacheConfig(
            keys,
            values,
            group_size=group_size,
            hadamard=hadamard,
            window=window,
            sink=sink,
            sliding_window=sliding,
            check_finite=check_finite,
            codebooks=books,
            layer=n_paged if books is not None else 0,
        )
        caches.append(PagedKVCache(storage, config, owner))
        n_paged += 1
    return caches


def _storage(pool: BlockPoolAllocator | PagedStorage | None, formats: Iterable[str]) -> PagedStorage:
    if isinstance(pool, PagedStorage):
        return pool
    if pool is None:
        config = PoolConfig(block_size=default_block_size(formats), n_blocks=64, grow_on_exhaustion=True)
        pool = BlockPoolAllocator(config)
    return PagedStorage(pool)


def _codebooks(model: Any, formats: set[str], given: Codebooks | None) -> dict[str, VecInferCodebooks]:
    """The sets that the formats want, by format."""
    from .codebooks import codebook_sets, load_codebooks

    wanted = sorted(name for name in formats if name.startswith("vecinfer"))
    if not wanted:
        return {}
    if isinstance(given, (str, Path)):
        given = load_codebooks(given, model)
    if isinstance(given, VecInferCodebooks):
        given = {given.format: given}
    sets = dict(given) if given is not None else codebook_sets(model, wanted)
    if missing := [name for name in wanted if name not in sets]:
        raise ValueError(f"make_prompt_cache: codebooks are of {', '.join(sets)}, but the format is {missing[0]}")
    return sets


def attach(model: Any, pool: BlockPoolAllocator | PagedStorage | None = None, **options: Any) -> Any:
    """Makes ``mlx_lm``'s generate, server, batches and speculative decoding use paged caches for ``model``.

    Sets ``model.make_cache`` and installs the route. ``options`` are those of make_prompt_cache(). All caches
    share one storage. Returns the model.
    """
    paged = [cache for cache in make_prompt_cache(model, pool, **options) if isinstance(cache, PagedKVCache)]
    storage = paged[0].storage if paged else pool
    used = [cache.config for cache in paged]
    sets = {config.codebooks.format: config.codebooks for config in used if config.codebooks is not None}
    options = options | ({"codebooks": sets} if sets else {})
    _route.install()
    object.__setattr__(model, "make_cache", lambda: make_prompt_cache(model, storage, **options))
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
