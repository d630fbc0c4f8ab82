"""VecInfer's cache: product-quantised keys and values, attended from their codes."""

from __future__ import annotations

from typing import Any

from ._block_size import default_block_size
from ._core import (
    BlockPoolAllocator,
    KVCacheConfig,
    PagedKVCacheConfig,
    PagedStorage,
    PoolConfig,
    VecInferBytes,
    vecinfer_bytes,
    vecinfer_cache_config,
)
from .paged_cache import PagedKVCache


class VecInferKVCache(PagedKVCache):
    """One layer's keys and values as VecInfer codes (arXiv:2510.06175) in blocks, attended where they lie.

    The newest ``window`` and the first ``sink`` tokens stay raw; no decoded copy of the others is ever held. Drop-in
    for mlx_lm's KVCache; all of PagedKVCache holds. Has no ``bits``.
    """

    def __init__(
        self,
        config: KVCacheConfig | PagedKVCacheConfig,
        layer: int = 0,
        *,
        n_kv_heads: int = 1,
        storage: PagedStorage | None = None,
        owner: int | None = None,
    ):
        """
        Args:
            config: method "vecinfer1" to "vecinfer4" with the codebooks of a model; or what another cache has.
            layer: of the codebooks.
            n_kv_heads: of random codebooks, which ``config.random_codebooks`` asks for.
            storage: to share a pool; one of its own that grows if None.
            owner: id of the request; a new one if None.

        Raises ValueError naming ``kvpool calibrate`` if there are no codebooks, or what else is not allowed.
        """
        if isinstance(config, KVCacheConfig):
            block_size = config.block_size
            config = vecinfer_cache_config(config, n_kv_heads, layer)
        else:
            block_size = default_block_size((config.key_format, config.value_format))
        if storage is None:
            pool = BlockPoolAllocator(PoolConfig(block_size=block_size, n_blocks=2, grow_on_exhaustion=True))
            storage = PagedStorage(pool)
        super().__init__(storage, config, owner)
        vecinfer_bytes(self)

    @classmethod
    def _on(cls, storage: PagedStorage, config: PagedKVCacheConfig) -> VecInferKVCache:
        return cls(config, storage=storage)

    def fused_sdpa(self, q: Any, scale: float, *, causal: bool = True, sliding_window: int = 0) -> Any:
        """Attention of ``q`` (B, n_heads, S, head_dim), of the tokens appended last, from the codes.

        Args:
            scale: factor of the scores.
            causal: whether a query sees only tokens up to its own.
            sliding_window: if > 0, a query sees so many tokens, itself among them.

        Returns (B, n_heads, S, head_dim) of q's type.
        """
        return self._attend(q, scale, causal, None, None, max(sliding_window, 0), 0.0)

    def _bytes(self) -> VecInferBytes:
        return vecinfer_bytes(self)

    @property
    def compressed_key_bytes(self) -> int:
        """Codes of all keys, by arithmetic, without codebooks; what is held is ``nbytes``."""
        return self._bytes().compressed_key

    @property
    def fp16_key_bytes(self) -> int:
        """The same keys in fp16."""
        return self._bytes().fp16_key

    @property
    def compressed_value_bytes(self) -> int:
        """Codes of all values, by arithmetic, without codebooks; what is held is ``nbytes``."""
        return self._bytes().compressed_value

    @property
    def fp16_value_bytes(self) -> int:
        """The same values in fp16."""
        return self._bytes().fp16_value

    @property
    def codebook_bytes(self) -> int:
        """Of the layer's codebooks and transforms, which all its caches share."""
        return self._bytes().codebooks

    @property
    def assigned_avg_bits(self) -> float:
        """Bits of a code by element, keys and values together; 0 without tokens."""
        return self._bytes().assigned_avg_bits

    def __repr__(self) -> str:
        return f"VecInferKVCache({self.config.key_format}, offset={self.offset}, nbytes={self.nbytes})"
