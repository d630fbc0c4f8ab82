"""PoolBackedKVCache under mlx_lm's cache protocol."""

from __future__ import annotations

from typing import Any

from ._core import BlockPoolAllocator, PagedKVCacheConfig, PagedStorage, PoolBackedKVCacheCore, PoolConfig
from .paged_cache import PagedKVCache, packed


class PoolBackedKVCache(PoolBackedKVCacheCore):
    """``mlx_lm``'s KVCache for one attention layer, with its growth drawn from a pool.

    Keys and values lie in one contiguous buffer each that grows by ``step`` tokens (by default
    ``max(pool.config.block_size, 256)``, as mlx_lm's own); the token slots of both, over all rows of
    the batch, are blocks of the pool. Blocks go back with ``release()`` or with the cache. If the
    owner's blocks are freed elsewhere, the cache is empty from then on.

    ``copy.deepcopy`` is a fork: blocks and memory are shared until one side appends. Caches that are
    copied together, such as the layers of one request, get one new owner.

    Not thread-safe; the pool may be shared between threads.
    """

    @property
    def keys(self) -> Any:
        """Keys of all tokens, (B, n_kv_heads, offset, head_dim), or None."""
        return self.state[0]

    @property
    def values(self) -> Any:
        """Values of all tokens, (B, n_kv_heads, offset, head_dim), or None."""
        return self.state[1]

    @property
    def state(self) -> tuple[Any, Any]:
        """(keys, values) of all tokens; (None, None) when empty."""
        return self._state() or (None, None)

    @state.setter
    def state(self, state: Any) -> None:
        keys, values = state[:2]
        self._set_state(None if keys is None else (keys, values))

    @property
    def meta_state(self) -> str:
        """Always empty: the state says all."""
        return ""

    @meta_state.setter
    def meta_state(self, meta_state: Any) -> None:
        if meta_state:
            raise ValueError(f"PoolBackedKVCache has no meta_state, got {meta_state!r}")

    @classmethod
    def from_state(cls, state: Any) -> PoolBackedKVCache:
        """A cache with the given state and a pool of its own that grows with it."""
        pool = BlockPoolAllocator(PoolConfig(n_blocks=2, grow_on_exhaustion=True))
        cache = cls(pool, owner=pool.new_owner())
        cache.state = state
        return cache

    @classmethod
    def merge(cls, caches: list[PoolBackedKVCache]) -> Any:
        """A BatchKVCache of mlx_lm's with a row for each of ``caches``."""
        from mlx_lm.models.cache import BatchKVCache

        return BatchKVCache.merge(caches)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> PagedKVCache:
        """What mlx_lm's ``kv_bits`` asks for: a paged cache of the same tokens, with integer blocks of the same pool.

        They belong to the same owner. Raises ValueError naming what is not allowed, BlockPoolExhaustedError.
        """
        config = packed(PagedKVCacheConfig(), group_size, bits)
        cache = PagedKVCache(PagedStorage(self.pool), config, self.owner)
        if not self.empty():
            cache.update_and_fetch(*self.state)
        return cache

    def is_trimmable(self) -> bool:
        return True

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        """The attention mask for the next tokens, as mlx_lm makes it at the present offset."""
        from mlx_lm.models.cache import create_attention_mask

        return create_attention_mask(*args, offset=self.offset, **kwargs)

    def __deepcopy__(self, memo: dict) -> PoolBackedKVCache:
        owners = memo.setdefault((PoolBackedKVCache, "owners"), {})
        request = (id(self.pool), self.owner)
        first = owners.get(request)
        owner = self.pool.new_owner() if first is None else first.owner
        fork = type(self)(self.pool, owner=owner, step=self.step)
        fork._fork_from(self)
        if first is None:
            owners[request] = fork
        else:
            first._link(fork)
        memo[id(self)] = fork
        return fork

    def __repr__(self) -> str:
        return f"PoolBackedKVCache(owner={self.owner}, offset={self.offset}, step={self.step})"


def build_pooled_caches(model: Any, pool: BlockPoolAllocator, owner: int, step: int | None = None) -> list:
    """One cache a layer of ``model``, for ``mlx_lm.generate(..., prompt_cache=...)``.

    Layers of plain attention get a PoolBackedKVCache, all with the one ``owner``: ``release()`` of
    any releases all, as does ``pool.free_all(owner)``. Other layers (state space, sliding window)
    keep the cache that the model gives them.

    Args:
        model: a loaded mlx_lm model, or anything with ``layers``.
        pool: what every layer's cache draws from.
        owner: id of the request.
        step: tokens by which the buffers grow; ``max(block_size, 256)`` if None.
    """
    if hasattr(model, "make_cache"):
        from mlx_lm.models.cache import KVCache

        stock = model.make_cache()
        plain = [type(cache) is KVCache for cache in stock]
    else:
        stock = getattr(model, "layers", None) or model.model.layers
        plain = [True] * len(stock)
    caches = [
        PoolBackedKVCache(pool, owner=owner, step=step) if is_plain else cache for is_plain, cache in zip(plain, stock)
    ]
    pooled = [cache for cache, is_plain in zip(caches, plain) if is_plain]
    for cache in pooled[1:]:
        pooled[0]._link(cache)
    return caches
