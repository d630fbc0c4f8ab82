"""kvpool: the KV-cache memory engine for MLX."""

from ._version_check import require_matching_mlx

require_matching_mlx()

from . import _mlx_lm_registry  # noqa: E402
from ._core import (  # noqa: E402
    AllocationStats,
    Block,
    BlockPoolAllocator,
    BlockPoolExhaustedError,
    KVCache,
    KVCacheBuilder,
    KVCacheConfig,
    KVCacheFactory,
    MlxBuffer,
    MlxBufferPool,
    MLXBlockStorage,
    OwnerAlreadyActiveError,
    PagedKVCacheConfig,
    PagedStorage,
    PoolConfig,
    PooledKVCache,
    StaleBufferError,
    StandaloneKVCache,
    VecInferCalibration,
    VecInferCalibrator,
    VecInferCodebooks,
    VecInferStream,
    __version__,
    render_prometheus,
)
from .paged_cache import BatchPagedKVCache, PagedKVCache  # noqa: E402
from .pool_backed_cache import PoolBackedKVCache, build_pooled_caches  # noqa: E402
from .vecinfer_cache import VecInferKVCache  # noqa: E402

_mlx_lm_registry.register(PoolBackedKVCache)
_mlx_lm_registry.register(PagedKVCache)
_mlx_lm_registry.register(BatchPagedKVCache)
_mlx_lm_registry.register(VecInferKVCache)

__all__ = [
    "__version__",
    "AllocationStats",
    "BatchPagedKVCache",
    "Block",
    "BlockPoolAllocator",
    "BlockPoolExhaustedError",
    "build_pooled_caches",
    "KVCache",
    "KVCacheBuilder",
    "KVCacheConfig",
    "KVCacheFactory",
    "MLXBlockStorage",
    "MlxBuffer",
    "MlxBufferPool",
    "OwnerAlreadyActiveError",
    "PagedKVCache",
    "PagedKVCacheConfig",
    "PagedStorage",
    "PoolBackedKVCache",
    "PoolConfig",
    "PooledKVCache",
    "render_prometheus",
    "StaleBufferError",
    "StandaloneKVCache",
    "VecInferCalibration",
    "VecInferCalibrator",
    "VecInferCodebooks",
    "VecInferKVCache",
    "VecInferStream",
]
