"""The caches of one run of ``kvpool generate``, and the memory that they take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional

from .options import CacheKind
from .pool_plan import DEFAULT_STEP, PagedDemand, PooledDemand, PoolOptions, make_pool

if TYPE_CHECKING:
    from mlx.nn import Module

    from kvpool import BlockPoolAllocator
    from kvpool import PagedStorage

POOLED_BLOCK = 16


@dataclass(frozen=True)
class PagedFormat:
    """How paged caches store tokens; as kvpool.mlx_lm.make_prompt_cache()."""

    keys: str
    values: str
    window: int
    sink: int
    group_size: int
    hadamard: bool

    def make(self, model: Module, codebooks: dict[str, Any], pool: Any = None) -> list[Any]:
        from kvpool.mlx_lm import make_prompt_cache

        return make_prompt_cache(
            model,
            pool,
            (self.keys, self.values),
            window=self.window,
            sink=self.sink,
            group_size=self.group_size,
            hadamard=self.hadamard,
            codebooks=codebooks,
        )


@dataclass
class RunCaches:
    """The caches of one request, a layer each. ``bytes_peak`` is the most that observe() has seen."""

    kind: CacheKind
    layers: list[Any]
    pool: Optional[BlockPoolAllocator] = None
    storage: Optional[PagedStorage] = None
    format: Optional[PagedFormat] = None
    bytes_peak: int = 0

    @property
    def n_tokens(self) -> int:
        return max((getattr(cache, "offset", 0) for cache in self.layers), default=0)

    @property
    def bytes_held(self) -> int:
        if self.storage is None:
            return sum(cache.nbytes for cache in self.layers)
        others = (cache.nbytes for cache in self.layers if not _is_paged(cache))
        return self.storage.resident_bytes() + sum(others)

    def observe(self) -> None:
        self.bytes_peak = max(self.bytes_peak, self.bytes_held)


def stock_caches(model: Module) -> RunCaches:
    """mlx_lm's own."""
    from mlx_lm.models.cache import make_prompt_cache

    return RunCaches(CacheKind.stock, make_prompt_cache(model))


def pooled_caches(model: Module, options: PoolOptions, n_prompt: int, n_answer: int) -> RunCaches:
    """Contiguous buffers accounted for in a pool. Raises typer.BadParameter for a pool that is too small."""
    from mlx_lm.models.cache import KVCache

    from kvpool import build_pooled_caches

    n_layers = sum(type(cache) is KVCache for cache in stock_caches(model).layers)
    _require_layers(n_layers)
    block_size = options.block_size or POOLED_BLOCK
    demand = PooledDemand(n_layers, block_size, options.step or max(block_size, DEFAULT_STEP))
    pool = make_pool(options, demand, n_prompt, n_answer)
    return RunCaches(CacheKind.pooled, build_pooled_caches(model, pool, owner=1, step=demand.step), pool)


def paged_caches(
    model: Module,
    options: PoolOptions,
    format: PagedFormat,
    codebooks: dict[str, Any],
    n_prompt: int,
    n_answer: int,
    chunk: int,
) -> RunCaches:
    """Caches in blocks, attended where they lie; installs the route for the rest of the process.

    ``codebooks``: sets by vecinfer format. ``chunk``: the most tokens that are added at once. Raises
    typer.BadParameter for a pool that is too small.
    """
    from kvpool import PagedStorage
    from kvpool._block_size import default_block_size
    from kvpool.mlx_lm import install

    windows = [cache.config.sliding_window for cache in format.make(model, codebooks) if _is_paged(cache)]
    _require_layers(len(windows))
    block_size = options.block_size or default_block_size((format.keys, format.values))
    demand = PagedDemand(block_size, [window and window + chunk for window in windows])
    pool = make_pool(options, demand, n_prompt, n_answer)
    storage = PagedStorage(pool)
    install()
    return RunCaches(CacheKind.paged, format.make(model, codebooks, storage), pool, storage, format)


def _is_paged(cache: Any) -> bool:
    from kvpool import PagedKVCache

    return isinstance(cache, PagedKVCache)


def _require_layers(n_layers: int) -> None:
    if n_layers == 0:
        raise ValueError("this model has no attention layers to pool; run it with --cache stock")
