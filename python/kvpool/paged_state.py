"""The saved form of a paged cache, as mlx_lm's ``save_prompt_cache`` writes it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from ._core import PagedKVCacheConfig, PagedKVCacheCore, VecInferCodebooks

VERSION = 1

_CONFIG = ("key_format", "value_format", "group_size", "hadamard", "window", "sink", "sliding_window")
_codebooks: weakref.WeakValueDictionary[str, VecInferCodebooks] = weakref.WeakValueDictionary()
_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


class PagedState(dict):
    """A cache's state in the two ways that mlx_lm uses one.

    ``mx.eval`` looks at a dict's own entries (a list it would iterate): here the one array that the cache's pending
    work hangs on, so that evaluating costs no copy. ``tree_flatten``, with which ``save_prompt_cache`` starts, asks
    for items(): that gives all there is to save, the packed bytes at their true length.
    """

    def __init__(self, cache: PagedKVCacheCore):
        super().__init__(pending=cache._pending())
        self._cache = cache

    def items(self) -> Any:
        return enumerate(self)

    def __iter__(self) -> Iterator[Any]:
        config = self._cache.config
        yield VERSION
        yield [int(v) if isinstance(v, bool) else v for v in _fields(config)]
        yield self._cache.storage.pool.config.block_size
        yield [_saved_row(self._cache._save_row(i)) for i in range(self._cache.n_rows)]


def _fields(config: PagedKVCacheConfig) -> list:
    """What is saved of a configuration; of codebooks their identity and the layer, if there are any."""
    fields = [getattr(config, name) for name in _CONFIG]
    return fields if config.codebooks is None else [*fields, _identity(config.codebooks), config.layer]


def _identity(codebooks: VecInferCodebooks) -> str:
    return f"{codebooks.identity:016x}"


def remember_codebooks(config: PagedKVCacheConfig) -> None:
    """Saved states that were coded with these codebooks can be restored while somebody holds them."""
    if config.codebooks is not None:
        _codebooks[_identity(config.codebooks)] = config.codebooks


def _saved_row(image: tuple | None) -> list:
    if image is None:
        return [""]
    block_size, n_kv_heads, key_dim, value_dim, dtype, blocks, keys, values, _ = image
    name = next(name for name, known in _DTYPES.items() if known == dtype)
    return [name, n_kv_heads, key_dim, value_dim, mx.array(blocks, mx.int64), keys, values]


def saved_config(state: Any) -> tuple[PagedKVCacheConfig, int, int]:
    """The configuration, the block size and the rows of a saved state.

    Raises ValueError if it is not one of this version, or was coded with codebooks that nobody has loaded.
    """
    try:
        version, values, block_size, rows = state
        values, coded = list(values[: len(_CONFIG)]), list(values[len(_CONFIG) :])
        values = dict(zip(_CONFIG, values, strict=True))
        identity, layer = coded or (None, 0)
    except (TypeError, ValueError):
        raise ValueError("PagedKVCache: the state must be what a PagedKVCache saved") from None
    if version != VERSION:
        raise ValueError(f"PagedKVCache: the state is of version {version}, this kvpool reads version {VERSION}")
    codebooks = None if identity is None else _found(identity)
    values["hadamard"] = bool(values["hadamard"])
    return PagedKVCacheConfig(**values, codebooks=codebooks, layer=int(layer)), int(block_size), len(rows)


def _found(identity: str) -> VecInferCodebooks:
    from .codebooks import shipped_codebooks

    codebooks = _codebooks.get(identity) or shipped_codebooks(identity)
    if codebooks is None:
        raise ValueError(
            f"PagedKVCache: the state is coded with codebooks {identity}, which neither come with kvpool nor are "
            "loaded; make a cache with them first"
        )
    return codebooks


def restore(cache: PagedKVCacheCore, state: Any) -> None:
    """Loads a saved state into an empty cache of the same configuration and number of rows.

    Raises ValueError if it is not consistent or does not fit, BlockPoolExhaustedError; the cache is then empty.
    """
    config, block_size, n_rows = saved_config(state)
    rows = list(state)[3]
    if _fields(config) != _fields(cache.config) or n_rows != cache.n_rows:
        raise ValueError("PagedKVCache: the state is of another configuration, or of another number of rows")
    try:
        for i, row in enumerate(rows):
            _restore_row(cache, i, block_size, row)
    except Exception:
        cache._release()
        raise


def _restore_row(cache: PagedKVCacheCore, i: int, block_size: int, row: list) -> None:
    if row[0] == "":
        return
    dtype, n_kv_heads, key_dim, value_dim, blocks, keys, values = row
    if dtype not in _DTYPES:
        raise ValueError(f"PagedKVCache: the state's type must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    codebooks = cache.config.codebooks
    coded = 0 if codebooks is None else codebooks.identity
    shape = block_size, n_kv_heads, key_dim, value_dim, _DTYPES[dtype]
    cache._load_row(i, *shape, blocks.tolist(), keys, values, coded)
