"""The saved form of a paged cache, as mlx_lm's ``save_prompt_cache`` writes it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from ._core import PagedKVCacheConfig, PagedKVCacheCore, VecInferCodebooks

VERSION = 1

_CONFIG = ("key_format", "value_format", "group_size", "hadamard", "window", "sink", "sliding_window")
_MAX_BLOCK_SIZE = 65536
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
    _, values, block_size, rows = _parts(state)
    try:
        fields, coded = list(values[: len(_CONFIG)]), list(values[len(_CONFIG) :])
        fields = dict(zip(_CONFIG, fields, strict=True))
        fields["hadamard"] = bool(fields["hadamard"])
        identity, layer = coded or (None, 0)
    except (TypeError, ValueError):
        raise ValueError("PagedKVCache: the state's configuration is not what a PagedKVCache saved") from None
    codebooks = None if identity is None else _found(identity)
    try:
        config = PagedKVCacheConfig(**fields, codebooks=codebooks, layer=layer)
    except TypeError:
        raise ValueError("PagedKVCache: the state's configuration is not what a PagedKVCache saved") from None
    if not isinstance(block_size, int) or not 1 <= block_size <= _MAX_BLOCK_SIZE:
        raise ValueError(f"PagedKVCache: the state's block_size must be 1 to {_MAX_BLOCK_SIZE}, got {block_size!r}")
    return config, block_size, len(rows)


def _found(identity: Any) -> VecInferCodebooks:
    from .codebooks import shipped_codebooks

    known = isinstance(identity, str)
    codebooks = (_codebooks.get(identity) or shipped_codebooks(identity)) if known else None
    if codebooks is None:
        raise ValueError(
            f"PagedKVCache: the state is coded with codebooks {identity}, which neither come with kvpool nor are "
            "loaded; make a cache with them first"
        )
    return codebooks


def restore(cache: PagedKVCacheCore, state: Any) -> None:
    """Loads a saved state into a cache of the same configuration, in place of what it holds.

    Raises ValueError if the state is not consistent or does not fit, BlockPoolExhaustedError; nothing has changed then.
    """
    config, block_size, _ = saved_config(state)
    rows = _parts(state)[3]
    if _fields(config) != _fields(cache.config):
        raise ValueError("PagedKVCache: the state is of another configuration than the cache")
    coded = 0 if config.codebooks is None else config.codebooks.identity
    images = [_image(i, block_size, row, coded) for i, row in enumerate(rows)]
    owners = cache.owners if len(images) == cache.n_rows else cache.owners[:1] * len(images)
    try:
        cache._load_rows(images, owners)
    except TypeError:
        raise ValueError("PagedKVCache: the state's rows are not what a PagedKVCache saved") from None


def _parts(state: Any) -> tuple[int, Any, Any, list]:
    parts = list(state) if isinstance(state, (list, tuple, PagedState)) else []
    if not parts or not isinstance(parts[0], int):
        raise ValueError("PagedKVCache: the state must be what a PagedKVCache saved")
    if parts[0] != VERSION:
        raise ValueError(f"PagedKVCache: the state is of version {parts[0]}, this kvpool reads version {VERSION}")
    if len(parts) != 4 or not isinstance(parts[3], (list, tuple)) or not parts[3]:
        raise ValueError("PagedKVCache: the state must be what a PagedKVCache saved")
    return tuple(parts)


def _image(index: int, block_size: int, row: Any, codebooks: int) -> tuple | None:
    if not isinstance(row, (list, tuple)) or len(row) not in (1, 7) or (len(row) == 1 and row[0] != ""):
        raise ValueError(f"PagedKVCache: row {index} of the state is not what a PagedKVCache saved")
    if len(row) == 1:
        return None
    dtype, n_kv_heads, key_dim, value_dim, blocks, keys, values = row
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"PagedKVCache: the state's type must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    if not isinstance(blocks, mx.array) or blocks.dtype != mx.int64 or blocks.ndim != 1:
        raise ValueError(f"PagedKVCache: the blocks of row {index} of the state must be an int64 vector")
    return block_size, n_kv_heads, key_dim, value_dim, _DTYPES[dtype], blocks.tolist(), keys, values, codebooks
