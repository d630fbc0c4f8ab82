"""kvpool: the KV-cache memory engine for MLX."""

from ._version_check import require_matching_mlx

require_matching_mlx()

from . import _mlx_lm_registry  # noqa: E402
from ._core import (  # noqa: E402
    AllocationStats,
    Block,
    BlockPoolAllocator,
    BlockPoolExhaustedError,
    KiviKVCache,
    KVCache,
    KVCacheBuilder,
    KVCacheConfig,
    KVCacheFactory,
    MlxBuffer,
    MlxBufferPool,
    MLXBlockStorage,
    OwnerAlreadyActiveError,
    PoolConfig,
    PooledKVCache,
    StaleBufferError,
    __version__,
    render_prometheus,
)
from .pool_backed_cache import PoolBackedKVCache, build_pooled_caches  # noqa: E402

_mlx_lm_registry.register(PoolBackedKVCache)

__all__ = [
    "AllocationStats",
    "Block",
    "BlockPoolAllocator",
    "BlockPoolExhaustedError",
    "KVCache",
    "KVCacheBuilder",
    "KVCacheConfig",
    "KVCacheFactory",
    "KiviKVCache",
    "MLXBlockStorage",
    "MlxBuffer",
    "MlxBufferPool",
    "OwnerAlreadyActiveError",
    "PoolBackedKVCache",
    "PoolConfig",
    "PooledKVCache",
    "StaleBufferError",
    "__version__",
    "build_pooled_caches",
    "render_prometheus",
]
