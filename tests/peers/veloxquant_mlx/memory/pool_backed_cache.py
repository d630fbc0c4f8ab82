from kvpool import PoolBackedKVCache, build_pooled_caches

__all__ = ["PoolBackedKVCache", "build_pooled_caches"]
