from kvpool import PooledKVCache

__all__ = ["PooledKVCache"]
